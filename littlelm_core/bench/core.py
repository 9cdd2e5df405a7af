"""Rows of the evaluator: CORE's tasks in their real proportions, against one at a time.

Both readings give the same answer to every item, or the row raises; on a GPU one that
hangs on rounding may be answered otherwise, and is counted. Each counts its own
tokenization. In the precision of `littlelm eval`; on a CPU in seconds of CPU time,
since on a busy machine the clock on the wall measures the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littlelm_core.bench.measure import Row, against
from littlelm_core.bench.models import filled
from littlelm_core.bench.peers import SHAPE_8M
from littlelm_core.config import load_run
from littlelm_core.core_eval import (
    Item,
    Reader,
    Rules,
    Task,
    Text,
    Work,
    crop,
    encode,
    evaluate,
    judge,
    load_tasks,
    score_alone,
    spread,
)
from littlelm_core.ingest import prepare_run
from littlelm_core.ingest.core_bundle import tasks_folder
from littlelm_core.ingest.hugging_face import load_causal_lm
from littlelm_core.report.evaluation import precision_context

SHAPE_3M = dataclasses.replace(
    SHAPE_8M, dim=192, layers=4, heads=6, kv_heads=3, ffn_dim=512, context=2048
)
PART = 400  # one item in so many is scored, of each task at least one
PART_OF_THEIRS = 1200  # with a model of a hundred million parameters or more
CONTEXT = 2048
STORY = 16  # items: as many as coqa asks about a story, in the mean


def one_by_one(
    model: nn.Module, tokenizer: Any, task: Task, count: int
) -> tuple[Item, ...]:
    """Return the first items of a task, each read alone: what `evaluate` must equal."""
    reader, text = Reader(model), Text(tokenizer)
    rules = Rules(min(reader.context or CONTEXT, CONTEXT), max_per_task=count)
    found = []
    for example in encode(task, text, rules):
        example = crop(example, rules.context)
        scores = spread(example, score_alone(reader, example))
        found.append(judge(task, example, scores))
    return tuple(found)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock: of the processor, or of the wall once a GPU has done all."""
    if device.type == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@contextmanager
def timed(spent: Counter[str], clock: Callable[[], float]) -> Iterator[None]:
    """Add up the seconds of a Reader's methods, by name."""
    names = ("read", "fork", "streams", "logits")
    own = {name: getattr(Reader, name) for name in names}
    depth = 0

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal depth
            depth += 1
            start = clock()
            try:
                return method(*arguments)
            finally:
                depth -= 1
                if not depth:  # `read` calls `streams`: its time is its own
                    spent[name] += clock() - start

        return call

    for name, method in own.items():
        setattr(Reader, name, wrap(name, method))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(Reader, name, method)


def compare(
    what: str,
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Task],
    counts: dict[str, int],
    count: int,
    bar: float | None,
    whole: dict[str, Counter[str]] | None = None,
) -> Row:
    """Score a sample both ways, task by task in turns; return the row.

    What is compared are estimates of a whole run: the seconds of a task for a token in
    the sample, times the tokens that a whole run reads in this way.
    whole: what `planned` says of all items, by task; without, items are weighed.
    """
    text, reader = Text(tokenizer), Reader(model)
    scales = {}  # from the sample to a whole run, for a task's rows alone and read
    for task in tasks:
        sample = planned(task, text, counts[task.label], reader)
        every = len(task.items) / counts[task.label]
        total = (
            whole[task.label] if whole else {k: every * n for k, n in sample.items()}
        )
        scales[task.label] = [total[k] / sample[k] for k in ("alone", "read")]
    device = reader.device
    clock, numbers = clock_of(device), partial(precision_context, "auto", device)
    rounded = settled = 0
    totals: dict[str, list[float]] = {"ours": [], "theirs": []}
    tokens: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for number in range(count):
        sums = dict.fromkeys(totals, 0.0)
        for task in tasks:
            most, (alone, weight) = counts[task.label], scales[task.label]
            start, own = clock(), Counter[str]()
            with timed(own, clock), numbers():
                report = evaluate(
                    model, tokenizer, [task], max_per_task=most, context=CONTEXT
                )
            between = clock()
            with numbers():
                theirs = one_by_one(model, tokenizer, task, most)
            sums["ours"] += weight * (between - start)
            sums["theirs"] += alone * (clock() - between)
            result = report.tasks[task.label]
            exact = device.type == "cpu"
            unlike = _assert_equal(task, result.items, theirs, exact)
            own["tokens"] = report.seconds["tokenize"]
            spent.update({name: weight * value for name, value in own.items()})
            if number == 0:
                rounded += unlike
                settled += result.count("settled")
                tokens["alone"] += alone * result.tokens_alone
                tokens["run"] += weight * result.tokens_run
        for name, value in sums.items():
            totals[name].append(value)
    names = {"tokens": "tokens", "read": "read", "fork": "fork", "streams": "rows",
             "logits": "logits"}  # fmt: skip
    ours = sum(totals["ours"])
    parts = ", ".join(
        f"{said} {spent[name] / ours:.0%}" for name, said in names.items()
    )
    items = sum(counts[task.label] for task in tasks)
    but = f" but for {rounded} that hang on rounding" if rounded else ""
    return against(
        f"{tasks[0].suite}, {what}", "one item at a time", totals, tokens["alone"],
        "tok/s", bar, note=f"{items} items, equal answers{but}; {settled} settled; "
        f"tokens {tokens['alone'] / tokens['run']:.2f}x; time: {parts}",
    )  # fmt: skip


def _assert_equal(
    task: Task, ours: Sequence[Item], theirs: Sequence[Item], exact: bool
) -> int:
    """Return how many items that hang on rounding were not answered alike.

    Raises AssertionError for another one; with exact, for any.
    """
    unlike = [
        (one, other)
        for one, other in zip(ours, theirs, strict=True)
        if (one.choice, one.correct) != (other.choice, other.correct)
    ]
    for one, other in unlike:
        if exact or not one.settled:
            raise AssertionError(f"{task.label}, item {one.index}: {one} and {other}")
    return len(unlike)


def core(quick: bool = False, model: str = "") -> list[Row]:
    """A 3M model on all tasks, and on those with four choices and ten shots.

    model: "hf:FOLDER" of a model to score all tasks with, and to count their tokens.
    """
    tasks = [_by_stories(task) for task in load_tasks(tasks_folder())]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model:
        return [_theirs(model, tasks, device, quick)]
    tokenizer = prepare_run(load_run("tiny")).tokenizer
    cfg = dataclasses.replace(SHAPE_3M, vocab_size=tokenizer.vocab_size)
    if quick:
        cfg = dataclasses.replace(
            cfg, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64
        )
    counts = _sample(tasks, 5000 if quick else PART)
    four = [
        task
        for task in tasks
        if task.shots == 10 and len(task.items[0].get("choices", ())) == 4
    ]
    more = {label: max(n, 1 if quick else 10) for label, n in counts.items()}
    small = filled(cfg).to(device)
    measure = partial(compare, model=small, tokenizer=tokenizer, count=3)
    bar = 5.0 if device == "cuda" else 2.3
    whole = None if quick else _whole(small, tokenizer, tasks)
    return [
        measure("3M model", tasks=tasks, counts=counts, bar=bar, whole=whole),
        measure(
            "four choices, ten shots", tasks=four, counts=more, bar=3.3, whole=whole
        ),
    ]


def _by_stories(task: Task) -> Task:
    """Sort items without examples, so that a part of them has whole stories."""
    if task.kind != "language_modeling" or task.shots:
        return task
    items = tuple(sorted(task.items, key=lambda record: record["context"]))
    return dataclasses.replace(task, items=items)


def _sample(tasks: Sequence[Task], part: int) -> dict[str, int]:
    """Return how many items of each task are one in `part`; of stories a whole one."""
    least = {task.label: 1 if task.shots else STORY for task in tasks}
    return {
        task.label: min(
            max(least[task.label], round(len(task.items) / part)), len(task.items)
        )
        for task in tasks
    }


def _theirs(model: str, tasks: Sequence[Task], device: str, quick: bool) -> Row:
    loaded, tokenizer = load_causal_lm(model.removeprefix("hf:"), device)
    counts = _sample(tasks, 20000 if quick else PART_OF_THEIRS)
    bar = 5.0 if device == "cuda" else 3.0
    whole = None if quick else _whole(loaded, tokenizer, tasks)
    name = Path(model).name
    row = compare(name, loaded, tokenizer, tasks, counts, 1, bar, whole)
    if whole:
        row.note += "; all of it: " + _said(sum(whole.values(), Counter()))
    return row


def planned(task: Task, text: Text, count: int, reader: Reader) -> Counter[str]:
    """Count the tokens of the first items, and the positions that need logits.

    alone: if each row is read alone; by item: what rows of an item share, once; with
    stories: what items share, too; read: that with padding, as `evaluate` reads it.
    """
    rules = Rules(CONTEXT, max_per_task=count)
    examples = [crop(e, rules.context) for e in encode(task, text, rules)]
    found: Counter[str] = Counter()
    found["alone"] = sum(len(row.ids) for e in examples for row in e.rows)
    work = Work(task, examples, reader.caches)
    for batch in work.batches(reader.batch_tokens):
        found["read"] += len(batch) * min(unit.prefix for unit in batch)
        for readings, longest in work.passes(batch, reader.batch_tokens):
            found["read"] += len(readings) * longest
    for unit in work.units:
        sizes = [len(work.row(alike[0]).inputs) for alike in work.readings(unit.rows)]
        shared = sum(sizes) - unit.prefix * (len(sizes) - 1)
        by_item = [len(work.row(at).inputs) for at in unit.rows]
        story = task.kind == "language_modeling"  # of one row each
        found["with stories"] += shared
        found["by item"] += sum(by_item) if story else shared
        found["logits"] += sum(work.row(at).scored for at in unit.rows)
    return found


def _whole(
    model: nn.Module, tokenizer: Any, tasks: Sequence[Task]
) -> dict[str, Counter[str]]:
    text, reader = Text(tokenizer), Reader(model)
    return {task.label: planned(task, text, len(task.items), reader) for task in tasks}


def _said(total: Counter[str]) -> str:
    names = ("alone", "by item", "with stories", "read")
    millions = ", ".join(f"{total[name] / 1e6:.1f}M {name}" for name in names)
    return (
        f"{millions} at {CONTEXT}: {total['alone'] / total['read']:.2f}x; "
        f"logits at {total['logits'] / total['alone']:.2%}"
    )
