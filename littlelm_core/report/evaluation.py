"""Evaluations of runs and checkpoints: where their tasks, tokens and reports lie."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from littlelm_core import corpus
from littlelm_core.config import (
    ConfigError,
    DataError,
    LittleLMError,
    RunConfig,
    nearest,
)
from littlelm_core.core_eval import (
    CoreReport,
    Task,
    evaluate,
    load_tasks,
    shots_of,
)
from littlelm_core.ingest import prepare_run
from littlelm_core.ingest.core_bundle import tasks_folder
from littlelm_core.ingest.hugging_face import CausalLM, load_causal_lm
from littlelm_core.model import model_config
from littlelm_core.report.core import core_record, write_core_page
from littlelm_core.report.core_dict import (
    FORMAT,
    data_digest,
    digest_of,
    table_digest,
)
from littlelm_core.report.core_run import EvaluationStopped
from littlelm_core.report.eval_progress import EvalProgress
from littlelm_core.report.log import read_metrics, write_text
from littlelm_core.report.terminal import core_name, core_score
from littlelm_core.shards import ValidationRows
from littlelm_core.trainer import (
    World,
    find_checkpoint,
    load_checkpoint,
    multiplies_bf16,
    score,
)


def token_folder() -> Path:
    """Return where the tokens of prompts are kept from one evaluation to the next."""
    return corpus.data_folder() / "core-tokens"


def run_tasks(run: RunConfig) -> list[Task]:
    """Return the tasks that a run evaluates.

    Raises DataError when they do not load or lack items; a run asks before it trains.
    """
    return enough(load_tasks(tasks_folder(run.eval_tasks)))


def announced(run: RunConfig) -> str:
    """Return in a line what a run will be scored on; raises as `run_tasks` does."""
    tasks = run_tasks(run)
    most = cap(tasks, run.eval_max_per_task) or math.inf
    items = sum(min(most, len(task.items)) for task in tasks)
    return (
        f"exam: {tasks[0].suite}, {items:,} items of {len(tasks)} tasks, every "
        f"{run.eval_every:,} steps and at the end"
    )


def enough(
    tasks: list[Task], most: int | None = None, legacy_pool: bool = False
) -> list[Task]:
    """Return tasks that have enough items for their examples, or raise DataError.

    most: items of each that are scored, and with legacy_pool give the examples.
    """
    for task in tasks:
        shots_of(task, 0, min(most, len(task.items)) if most and legacy_pool else None)
    return tasks


def is_scored(trainer: Any) -> bool:
    """Whether the log has this step's score on the tasks that the run names now."""
    done = [
        record
        for record in trainer.report.log.records
        if record["event"] == "core" and record["step"] == trainer.step
    ]
    if not done:
        return False
    now = exam_of(run_tasks(trainer.run), trainer.run.eval_max_per_task)
    return any(record.get("exam", now) == now for record in done)


def exam_of(tasks: Sequence[Task], most: int) -> str:
    """Return a digest of tasks and how many items of each are scored, -1: all."""
    return digest_of(data_digest(tasks), table_digest(tasks), cap(tasks, most) or -1)


def evaluate_run(
    trainer: Any, validation: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Score a trainer's model as it stands; return the "core" record of its log.

    validation: the record of the same step, whose bits per byte stand beside the score.
    The report with every item comes to lie in the run's folder under the name of the
    suite. None when a signal has come.
    """
    run, world, tasks = trainer.run, trainer.world, run_tasks(trainer.run)
    most = cap(tasks, run.eval_max_per_task)
    say = trainer.report.progress.say
    shown = EvalProgress(tasks, most, world.size, say=say, quiet=world.rank > 0)

    def goes_on(label: str, items: int) -> bool:
        shown(label, items)
        return not trainer.interrupted

    with shown, trainer.precision.context():
        try:
            report = evaluate(
                trainer.model,
                trainer.tokenizer,
                tasks,
                max_per_task=most,
                context=trainer.cfg.context,
                rank=world.rank,
                world=world.size,
                token_cache=token_folder(),
                progress=goes_on,
            )
        except EvaluationStopped:
            return None
    facts = named(report, f"{run.name}, step {trainer.step}", bits_of(validation))
    if world.rank == 0:
        folder = trainer.run_dir / short(report.suite) / f"step_{trainer.step:08d}"
        save(report, facts, folder / part_name([], max_per_task=most))
    return core_record(facts) | {"exam": exam_of(tasks, run.eval_max_per_task)}


def cap(tasks: Sequence[Task], most: int) -> int | None:
    """Return the most items of each task that are scored; None if that is all of them.

    A limit that cuts nothing (-1: there is none) leaves a whole exam.
    """
    return most if any(len(task.items) > most >= 0 for task in tasks) else None


def short(suite: str) -> str:
    """Return a suite's name as a folder in that of a run: core, mini_core."""
    name = "_".join(re.findall(r"\w+", suite.lower()))
    return name if name not in ("", "checkpoints", "part") else f"tasks_{name}"


def part_name(labels: Sequence[str], **rules: Any) -> str:
    """Return where the report of a part lies, by what was asked; "" for the whole.

    labels: of the tasks, none for all. rules: by name, those that are not in force
    (None, False) are left out.
    """
    asked = [(name, value) for name, value in rules.items() if value]
    words = [name if value is True else f"{name}_{value}" for name, value in asked]
    name = re.sub(r"[^\w-]+", "_", "-".join([*sorted(labels), *words]))
    # File systems end at 255 bytes; long names and odd labels are told by a digest.
    odd = not all(re.fullmatch(r"\w+", label) for label in labels)
    if odd or len(name.encode()) > 100:
        start = name.encode()[:80].decode(errors="ignore")
        name = f"{start}-{digest_of(sorted(labels), words)[:8]}"
    return f"part/{name}" if name else ""


def bits_of(validation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return bits per byte by domain of a "validation" record; none without one."""
    scores = validation["domains"] if validation else {}
    return {domain: score["bits_per_byte"] for domain, score in scores.items()}


def named(report: CoreReport, model: str, bits: Mapping[str, float]) -> dict[str, Any]:
    """Return a report's facts with the model's name and its bits per byte."""
    return {**report.to_dict(), "model": model, "bits_per_byte": dict(bits)}


def save(
    report: CoreReport,
    facts: Mapping[str, Any],
    folder: Path,
    against: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.json, with every item, and report.html into a folder; return it.

    Where the report of another exam lies, it stays: the new one's folder comes to stand
    beside it, with a digest in its name.
    """
    with suppress(OSError, ValueError, AttributeError):  # none, or no report
        there = json.loads((folder / "report.json").read_text("utf-8"))
        if _exam(there) != _exam(facts):
            folder = folder.with_name(f"{folder.name}-{digest_of(_exam(facts))[:8]}")
    write_text(folder / "report.json", report.to_json(facts))
    write_core_page(facts, folder / "report.html", against)
    return folder


def _exam(facts: Mapping[str, Any]) -> list[Any]:
    """Return all of a report that must be equal for one to take another's place."""
    names = "model", "data_sha256", "table_sha256", "baselines"
    # On these no answer depends.
    free = "prefix_cache", "batch_tokens", "world"
    settings = {k: v for k, v in facts.get("settings", {}).items() if k not in free}
    return [*map(facts.get, names), sorted(settings.items())]


def read_report(path: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    """Read a stored report, to draw beside one of these tasks.

    Raises DataError for a file that is none, or is of other data altogether.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
        if report["format"] != FORMAT:
            raise ValueError(f"it has the format {report['format']!r}")
        parts = [task["n"] < task["of"] for task in report["tasks"].values()]
        report.setdefault("sample", any(parts))  # older ones do not say
        core_name(report), core_score(report)
        theirs = {k: (t["sha256"], t["accuracy"]) for k, t in report["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lacks = "it lacks " if isinstance(error, KeyError) else ""
        reason = getattr(error, "strerror", None) or f"{lacks}{error}"
        raise DataError(f"{path} is no report of littlelm eval: {reason}") from error
    if not any(theirs.get(task.label, ("",))[0] == task.sha256 for task in tasks):
        raise DataError(
            f"{path} has no task with the same data: evaluate both models on the same "
            "files"
        )
    return report


# ---- A model by name


@dataclass(frozen=True)
class Subject:
    """A model to evaluate.

    context: that it was trained with, None to ask the model. bits: gives its bits per
    byte of validation text, by domain. folder: of its reports.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    context: int | None
    folder: Path
    bits: Callable[[], dict[str, float]]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device


@contextmanager
def processes() -> Iterator[World]:
    """Join torchrun's processes, if it started this one; give this one's place."""
    together = "RANK" in os.environ and not dist.is_initialized()
    if together:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local)
        # Imported later, as transformers and optimizers do, it keeps the group, so that
        # gloo's threads outlive it and, now and then, abort Python at its end.
        importlib.import_module("torch._dynamo")
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield World.current()
        if together:
            dist.barrier()  # a process that leaves while its peer talks may abort it
    finally:
        if together:
            dist.destroy_process_group()


def load_subject(name: str, suite: str, world: World) -> Subject:
    """Load a checkpoint (a run, its folder, a step), or "hf:FOLDER".

    suite: the name of the tasks, which names the folder of the reports.
    Raises what `find_checkpoint`, `load_checkpoint` and `load_causal_lm` raise.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
    if name.startswith("hf:"):
        path = Path(name.removeprefix("hf:")).expanduser()
        model, tokenizer = load_causal_lm(path, device)
        folder = Path("runs") / f"eval-{path.resolve().name}" / short(suite)
        bits = partial(text_bits, model, tokenizer)
        return Subject(name, model, tokenizer, None, folder, bits)
    checkpoint = find_checkpoint(name).resolve()
    model, tokenizer, run, state = load_checkpoint(checkpoint, device)
    # A checkpoint that was copied elsewhere has no log there.
    own = checkpoint.parent.name == "checkpoints"
    run_dir, step = checkpoint.parents[1] if own else None, state["step"]
    context = model_config(run, tokenizer.vocab_size).context
    folder = (run_dir or checkpoint.parent) / short(suite) / checkpoint.name
    bits = partial(checkpoint_bits, model, tokenizer, run, run_dir, step, world)
    name = f"{run.name}, step {step}"
    return Subject(name, model, tokenizer, context, folder, bits)


PRECISIONS = ("auto", "fp32", "bf16")


def precision_context(kind: str, device: torch.device) -> AbstractContextManager:
    """Return the autocast of one of PRECISIONS; "auto": bf16 on a GPU that has it.

    On a CPU "auto" is fp32, whose answers hang least on rounding.
    """
    able = device.type != "cpu" and multiplies_bf16(device)
    bf16 = kind == "bf16" or (kind == "auto" and able)
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def choose_tasks(folder: str, labels: str) -> list[Task]:
    """Return the tasks of a folder, or some of them by label.

    Raises ConfigError for a label that is not there.
    """
    tasks = load_tasks(tasks_folder(folder))
    wanted = [label.strip() for label in labels.split(",") if label.strip()]
    known = {task.label: task for task in tasks}
    if labels and not wanted:
        raise ConfigError(f"--tasks {labels!r} names no task")
    if wrong := [label for label in wanted if label not in known]:
        raise ConfigError(f"no task {wrong[0]!r}{nearest(wrong[0], known)}")
    return [known[label] for label in known if label in wanted] if wanted else tasks


# ---- Bits per byte beside the score

# Of each domain, where no validation is on record; of a model that only reads text.
SAMPLE_TOKENS, TEXT_TOKENS = 16384, 4096


def checkpoint_bits(
    model: nn.Module,
    tokenizer: Any,
    run: Any,
    run_dir: Path | None,
    step: int,
    world: World,
) -> dict[str, float]:
    """Return what the run's log says for this step; else score a sample now.

    Nothing where the run's data, of the same tokenizer, is not here for any process.
    """
    records = read_metrics(run_dir / "metrics.jsonl") if run_dir else []
    logged = [r for r in records if (r["event"], r["step"]) == ("validation", step)]
    # The first process speaks for all: the others may have no log on their disks.
    if any(world.sum(world.rank == 0 and bool(logged))):
        return bits_of(logged[-1] if logged else None)  # the last: of the whole split
    data = None
    with suppress(LittleLMError):
        data = prepare_run(run)
    if data and data.tokenizer.fingerprint != tokenizer.fingerprint:
        data = None  # prepared anew since: its ids mean other bytes
    if any(world.sum(data is None)):  # one that leaves alone keeps the others waiting
        return {}
    device = next(model.parameters()).device
    context = model_config(run, tokenizer.vocab_size).context
    bytes_V = torch.as_tensor(tokenizer.token_byte_counts()).to(device)
    found = {}
    for domain, shards in data.validation.items():
        rows = ValidationRows(shards, run.rows, context, *world, SAMPLE_TOKENS)
        nats, _, size = world.sum(*score(model.loss, rows, bytes_V))
        found[domain] = nats / math.log(2) / size
    return found


@torch.inference_mode()
def text_bits(model: CausalLM, tokenizer: Any) -> dict[str, float]:
    """Return bits per byte of the default corpus's validation text, for any tokenizer.

    A sample of whole documents of each domain, read in rows of at most 1024 tokens.
    Nothing where the corpus is not here.
    """
    found = {}
    for domain in corpus.domains():
        nats = size = tokens = 0
        try:
            documents = corpus.documents(domain, "validation")
        except DataError:
            return {}
        for text in documents:
            ids = [tokenizer.bos_id, *tokenizer.encode_batch([text])[0]]
            nats += _nats(model, ids, min(model.cfg.context or 1024, 1024))
            size += len(text.encode("utf-8", "replace"))
            tokens += len(ids)
            if tokens >= TEXT_TOKENS:
                break
        found[domain] = nats / math.log(2) / size
    return found


def _nats(model: CausalLM, ids: Sequence[int], context: int) -> float:
    """Return the summed loss of all ids but the first, each in the row it falls in."""
    device, total = next(model.parameters()).device, 0.0
    for start in range(0, len(ids) - 1, context):
        row = torch.tensor(ids[start : start + context + 1], device=device)
        streams_TC = model.hidden(row[None, :-1])[0]
        for x, targets in zip(streams_TC.split(128), row[1:].split(128), strict=True):
            logits = model.logits(x).float()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return total
