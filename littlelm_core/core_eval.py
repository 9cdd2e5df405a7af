# From chapters/15_core_eval.md by `littlelm book export`: edit the chapter.
"""CORE: twenty-two exams, one number, and how far to trust it.

A loss says how well a model predicts text; CORE says what that is good for: the mean,
over 22 tasks, of the accuracy above chance. Each item is a prompt with a few solved
examples in front, and the model answers by how likely it finds each answer, so nothing
is generated and nothing is judged by taste.

The score is easy to get almost right. A space, a token on the border between question
and answer, a tie: each decides answers, and prompts that do not fit can move the score
by more than people quote as progress. So every rule is written down here, every
departure is counted in the report, and a slow reading of the same rules
(`score_alone`) stands beside the fast one.

What the hardware wants: no shared beginning read twice. The answers to one question
share its examples, questions about one story share the story, and logits are needed
where an answer stands, at less than 2 % of the positions.

Shapes: B rows, T tokens, L tokens of a shared prefix, N scored positions, C width of
the model, V vocabulary.
"""

import functools
import itertools
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from littlelm_core.config import ConfigError, DataError, LittleLMError
from littlelm_core.ingest.core_files import TABLES, read_tasks
from littlelm_core.ingest.core_tokens import read_tokens, write_tokens
from littlelm_core.ingest.hugging_face import CausalLM, TheirTokenizer
from littlelm_core.model import CHUNK_LOGITS, LanguageModel
from littlelm_core.report.core_dict import core_dict, core_notes, digest_of
from littlelm_core.report.core_run import (
    EvaluationStopped,
    check_ids,
    check_settings,
    check_tasks,
    context_in_force,
    gather,
    journal_key,
)
from littlelm_core.report.journal import Journal

__all__ = [
    "AT_ONCE",
    "BATCH_TOKENS",
    "CROPS",
    "CoreReport",
    "Example",
    "Item",
    "MARGINS",
    "MOST_ROWS",
    "Place",
    "Reader",
    "Row",
    "Rules",
    "SHORTEST_PREFIX",
    "Score",
    "Task",
    "TaskResult",
    "Text",
    "Unit",
    "VERSION",
    "WASTE",
    "Work",
    "bootstrap",
    "common_prefix",
    "crop",
    "encode",
    "encoded",
    "evaluate",
    "example_of",
    "is_close",
    "judge",
    "load_tasks",
    "losses_and_leads",
    "packed",
    "prompts",
    "score_alone",
    "score_rows",
    "shared_tokens",
    "shots_of",
    "solved",
    "spread",
    "stories",
]


# ---- Tasks


@dataclass(frozen=True)
class Task:
    """One task: how it is asked, what chance gives, and its items.

    kind: one of KINDS. shots: solved examples in front of an item. delimiter:
    between question and answer. baselines: {"v1": per cent, "v2": per cent} of a guess.
    items: the records, shuffled once by `random.Random(1337)` as the reference does, so
    that the first N are a sample. sha256: of the file. suite: the name of the table,
    listed: how many tasks it has. unlike: in what it differs from CORE's, if it has no
    other name.
    """

    label: str
    kind: str
    shots: int
    delimiter: str
    baselines: Mapping[str, float]
    items: tuple[dict[str, Any], ...] = field(repr=False)
    sha256: str = ""
    category: str = ""
    suite: str = "some tasks"
    listed: int = 1
    unlike: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 of the items, which may be only some of the file's."""
        return digest_of(self.items)

    def centered(self, accuracy: float, table: str = "v1") -> float:
        """Return the share of the way from chance (0) to perfect (1)."""
        chance = self.baselines[table] / 100
        return (accuracy - chance) / (1 - chance)


def load_tasks(folder: str | Path) -> list[Task]:
    """Return the tasks of a folder: core.yaml and the files that it names.

    Raises DataError, in one line with file and line number, for what is missing, empty
    or malformed.
    """
    return [Task(**fields) for fields in read_tasks(Path(folder))]


# ---- Prompts


def shots_of(task: Task, index: int, pool: int | None = None) -> list[dict[str, Any]]:
    """Return the solved examples of item `index`: never the item itself.

    pool: the examples come from the first `pool` items; all of them unless given. The
    draw is the reference's: `random.Random(1234 + index).sample` from all other items.
    Raises DataError when there are too few.
    """
    count = len(task.items) if pool is None else pool
    if task.shots > count - 1:
        raise DataError(
            f"{task.label} wants {task.shots} examples before each item and has "
            f"{count} items to take them from: it needs at least {task.shots + 1}"
        )
    # Drawing from a range is drawing from the list of the others, without the list.
    drawn = random.Random(1234 + index).sample(range(count - 1), task.shots)
    return [task.items[i + (i >= index)] for i in drawn]


def solved(task: Task, record: Mapping[str, Any]) -> str:
    """Return a record with its right answer, as it stands among the examples."""
    if task.kind == "multiple_choice":
        question, answer = record["query"], record["choices"][record["gold"]]
    elif task.kind == "schema":
        question = record["context_options"][record["gold"]]
        answer = record["continuation"]
    else:
        question, answer = record["context"].strip(), record["continuation"]
    return f"{question}{task.delimiter}{answer}"


def prompts(
    task: Task, index: int, shots: Sequence[Mapping[str, Any]]
) -> tuple[list[str], str | None]:
    """Return (the text of each row of an item, the stripped prompt or None).

    A multiple choice has a row for each choice, a schema one for each context, language
    modeling one; only the last has a prompt, where the scored tokens begin.
    """
    record = task.items[index]
    front = "".join(f"{solved(task, shot)}\n\n" for shot in shots)
    if task.kind == "multiple_choice":
        start = f"{front}{record['query']}{task.delimiter}"
        return [start + choice for choice in record["choices"]], None
    if task.kind == "schema":
        end = f"{task.delimiter}{record['continuation']}"
        return [front + option + end for option in record["context_options"]], None
    prompt = f"{front}{record['context'].strip()}{task.delimiter}"
    return [prompt + record["continuation"]], prompt.strip()


# ---- Tokens


class Row(NamedTuple):
    """Ids of one row, BOS first; those from `start` on are scored."""

    ids: np.ndarray
    start: int

    @property
    def inputs(self) -> np.ndarray:
        """The ids that are read: of what follows the last one nothing is asked."""
        return self.ids[:-1]

    @property
    def scored(self) -> int:
        """Tokens whose loss counts; 0 for a choice without a token of its own."""
        return len(self.ids) - self.start


class Example(NamedTuple):
    """An item in tokens: its rows, and what was done to make them fit."""

    index: int
    rows: tuple[Row, ...]
    truncated: bool = False  # a row lost tokens
    cut_answer: bool = False  # even the answer did not fit
    border: bool = False  # a token lies across the border of prompt and answer


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Return how many ids all rows begin with."""
    shortest = min(map(len, rows))
    for row in rows[1:]:
        unequal = row[:shortest] != rows[0][:shortest]
        shortest = int(unequal.argmax()) if unequal.any() else shortest
    return shortest


def example_of(
    task: Task, index: int, rows: Sequence[np.ndarray], prompt: np.ndarray | None
) -> Example:
    """Find where the scored tokens of an item's rows begin.

    rows: ids with BOS; prompt: those of the stripped prompt, for language modeling.
    Raises DataError for an answer of language modeling without a token.
    """
    if task.kind == "multiple_choice":
        starts = [common_prefix(rows)] * len(rows)
        if len(rows) == 1:
            starts = [1]  # nothing to compare: all of it is the answer
    elif task.kind == "schema":
        same = common_prefix([row[::-1] for row in rows])
        starts = [max(len(row) - same, 1) for row in rows]
    else:
        starts = [common_prefix([prompt, rows[0]])]
        answer = task.items[index]["continuation"]
        if starts[0] == len(rows[0]) or not answer.strip():
            raise DataError(
                f"{task.label}: item {index} has a continuation without a token: "
                f"{answer!r}"
            )
    border = prompt is not None and starts[0] < len(prompt)
    pairs = zip(rows, starts, strict=True)
    return Example(index, tuple(Row(*pair) for pair in pairs), border=border)


# ---- What does not fit

CROPS = ("bos", "plain", "shots", "none")


def crop(example: Example, context: int | None, policy: str = "bos") -> Example:
    """Cut rows that are longer than the context from the front: the answer goes last.

    policy: "bos" keeps the last tokens and puts BOS back in front, "plain" keeps the
    last tokens only, as the reference does, "none" cuts nothing. ("shots" has dropped
    examples before, see `encode`, and does as "bos" with what is still too long.)
    """
    if context is None or policy == "none":
        return example
    if max(len(row.ids) for row in example.rows) <= context:
        return example
    rows, cut_answer = [], False
    for ids, start in example.rows:
        drop = max(len(ids) - context, 0)
        if drop and policy != "plain":
            ids = np.concatenate((ids[:1], ids[drop + 1 :]))
        else:
            ids = ids[drop:]
        # The first token of a row cannot be scored: nothing stands before it.
        cut_answer |= start - drop < 1
        rows.append(Row(ids, max(start - drop, 1)))
    return example._replace(rows=tuple(rows), truncated=True, cut_answer=cut_answer)


# ---- Encode, in parallel and once


class Text:
    """A tokenizer as the evaluator sees it: anything with `encode` and `bos_id`.

    Raises ConfigError for one without BOS, or that adds it by itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.bos = tokenizer, tokenizer.bos_id
        self.fingerprint: str | None = getattr(tokenizer, "fingerprint", None)
        if self.bos is None:
            raise ConfigError(
                "the tokenizer has bos_id = None: name an id to begin with"
            )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's ids with one BOS in front; in parallel, if it can."""
        rows = self._rows(texts)
        # By chance texts may all begin with that id; then an empty one has none.
        alike = rows and all(ids[1:2].tolist() == [self.bos] for ids in rows)
        if alike and len(self._rows([""])[0]) > 1:
            raise ConfigError(
                f"the tokenizer begins a text with BOS ({self.bos}) by itself: it must "
                "encode the text alone, BOS comes in front of it here"
            )
        return rows

    def _rows(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch = getattr(self.tokenizer, "encode_batch", None)
        found = batch(texts) if batch else map(self.tokenizer.encode, texts)
        return [np.array([self.bos, *ids], dtype=np.int32) for ids in found]


class Rules(NamedTuple):
    """What decides an item's tokens and its answer beside the task: see `evaluate`."""

    context: int | None = None
    crop: str = "bos"
    max_per_task: int | None = None
    legacy_pool: bool = False
    legacy_nan: bool = False

    def count(self, task: Task) -> int:
        """Items of a task that are scored."""
        return min(self.max_per_task or len(task.items), len(task.items))

    def pool(self, task: Task) -> int:
        """Items that examples are taken from."""
        return self.count(task) if self.legacy_pool else len(task.items)


AT_ONCE = 512  # items whose texts are held at a time
VERSION = 1  # of all rules, to `judge`: tokens and items of older ones are not used


def encode(task: Task, text: Text, rules: Rules) -> list[Example]:
    """Return the items of a task in tokens, whole but for dropped examples."""
    found: list[Example] = []
    for start in range(0, rules.count(task), AT_ONCE):
        indices = range(start, min(start + AT_ONCE, rules.count(task)))
        shots = {i: shots_of(task, i, rules.pool(task)) for i in indices}
        examples = _encode_some(task, text, shots)
        while rules.crop == "shots" and rules.context is not None:
            long = [
                e.index
                for e in examples.values()
                if shots[e.index] and max(len(r.ids) for r in e.rows) > rules.context
            ]
            if not long:
                break
            shots.update((i, shots[i][1:]) for i in long)
            again = _encode_some(task, text, {i: shots[i] for i in long})
            examples.update((i, e._replace(truncated=True)) for i, e in again.items())
        found += examples.values()
    return found


def _encode_some(
    task: Task, text: Text, shots: Mapping[int, Sequence[Mapping[str, Any]]]
) -> dict[int, Example]:
    """Encode all rows and prompts of some items in one call."""
    texts: list[str] = []
    sizes = []
    for index, front in shots.items():
        rows, prompt = prompts(task, index, front)
        texts += rows if prompt is None else [*rows, prompt]
        sizes.append((index, len(rows), prompt is not None))
    ids = iter(text.encode(texts))
    found = {}
    for index, count, has_prompt in sizes:
        rows = [next(ids) for _ in range(count)]
        prompt = next(ids) if has_prompt else None
        found[index] = example_of(task, index, rows, prompt)
    return found


def encoded(task: Task, text: Text, rules: Rules, folder: Path | None) -> list[Example]:
    """Return `encode`, from a file in `folder` where an earlier call has left it.

    A file is named by everything that its tokens depend on: the tokenizer, the task's
    items and settings, the rules, and the VERSION of what is done by them.
    """
    if folder is None or text.fingerprint is None:
        return encode(task, text, rules)
    shots = (rules.context, rules.crop) if rules.crop == "shots" else ()
    key = digest_of(
        VERSION, text.fingerprint, text.bos, task.digest, task.kind, task.shots,
        task.delimiter, rules.count(task), rules.pool(task), len(task.items), shots,
    )[:16]  # fmt: skip
    path = Path(folder) / f"{task.label}-{key}.npz"
    if (stored := read_tokens(path)) is None:
        found = encode(task, text, rules)
        write_tokens(path, found)
        return found
    return [
        Example(index, tuple(map(Row._make, rows)), **flags)
        for index, rows, flags in stored
    ]


# ---- A model that is read

# Tokens read at a time. On a CPU they should stay in the cache.
BATCH_TOKENS = {"cpu": 2048, "gpu": 65536}


class Reader:
    """A model as the evaluator sees it: streams of ids in, logits where asked.

    Any module that maps ids_BT to logits_BTV will do. One with `hidden` and `logits`
    makes logits at the scored positions only, one with `make_cache` reads a shared
    prefix once; a LanguageModel of this course has all three.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        weight = next(model.parameters(), torch.zeros(()))
        self.device, self.dtype = weight.device, weight.dtype
        cfg = getattr(model, "cfg", None)
        self.context: int | None = getattr(cfg, "context", None)
        self.vocab_size: int | None = getattr(cfg, "vocab_size", None)
        self.splits = hasattr(model, "hidden") and hasattr(model, "logits")
        # An own model's cache may know nothing of rows that go on from one another.
        layers = model.make_cache(1, 2) if hasattr(model, "make_cache") else ()
        self.caches = bool(layers) and all(hasattr(x, "select") for x in layers)
        # A GPU's batch is too large for a model that makes logits of every token.
        large = self.device.type != "cpu" and getattr(model, "splits", self.splits)
        self.batch_tokens = BATCH_TOKENS["gpu" if large else "cpu"]

    def streams(self, ids_BT: Tensor, cache: Any = None) -> Tensor:
        """Return what `logits` reads, B x T x C (the logits, if there is no such)."""
        call = self.model.hidden if self.splits else self.model
        return call(ids_BT) if cache is None else call(ids_BT, cache)

    def logits(self, x_NC: Tensor) -> Tensor:
        """Return fp32 logits over the real vocabulary: no padding ids."""
        logits_NV = self.model.logits(x_NC) if self.splits else x_NC
        return logits_NV[:, : self.vocab_size].float()

    def read(self, ids_BL: Tensor) -> Any:
        """Read prefixes of one length; return their cache."""
        cache = self.model.make_cache(*ids_BL.shape)
        self.streams(ids_BL, cache)
        return cache

    def fork(self, cache: Any, rows: Sequence[int], length: int) -> Any:
        """Return a cache whose row i goes on from row rows[i], for `length` tokens."""
        rows_R = torch.tensor(rows, device=self.device)  # moved once for all layers
        return [layer.select(rows_R, length) for layer in cache]


# ---- One item at a time


class Score(NamedTuple):
    """One row: the mean loss of its scored tokens in nats, and their least lead.

    loss: NaN where no token is scored. lead: by how much the least certain scored token
    beats (or, below 0, is beaten by) every other id, in logits; of equal ids the first
    is the best. NaN where the kind does not ask; by `score_alone` 1 or -1.
    """

    loss: float
    lead: float


@torch.inference_mode()
def score_alone(reader: Reader, example: Example) -> list[Score]:
    """Score an item as one reads the rules, and as the reference harness does it.

    All rows padded to one length, loss and argmax at every position, and of these what
    was asked for. The lead is 1 where every scored token is the argmax, else -1.
    """
    longest = max(len(row.ids) for row in example.rows)
    ids_BT = torch.zeros(len(example.rows), longest, dtype=torch.int64)
    for ids, row in zip(ids_BT, example.rows, strict=True):
        ids[: len(row.ids)] = torch.from_numpy(row.ids)
    ids_BT = ids_BT.to(reader.device)
    streams_BTC = reader.streams(ids_BT)
    found = []
    for ids, streams_TC, row in zip(ids_BT, streams_BTC, example.rows, strict=True):
        if not row.scored:
            found.append(Score(math.nan, math.nan))
            continue
        logits_TV = reader.logits(streams_TC)[:-1]  # row t predicts the id at t + 1
        losses_T = F.cross_entropy(logits_TV, ids[1:], reduction="none")
        right_T = logits_TV.argmax(-1) == ids[1:]
        scored = slice(row.start - 1, len(row.ids) - 1)
        lead = 1.0 if right_T[scored].all() else -1.0
        found.append(Score(float(losses_T[scored].double().mean()), lead))
    return found


# ---- From scores to an answer


class Item(NamedTuple):
    """One item's result.

    index: after the shuffle, which decides the item's examples. choice: the option with
    the lowest loss (language modeling: 0). scores: mean loss of each option in nats,
    None for one without a token of its own.
    """

    index: int
    correct: bool
    choice: int
    scores: tuple[float | None, ...]
    tie: bool = False
    truncated: bool = False
    cut_answer: bool = False
    border: bool = False
    settled: bool = False


def spread(example: Example, scores: Sequence[Score]) -> list[Score]:
    """Give identical rows one score, that of the first of them."""
    first: dict[Any, int] = {}
    for number, row in enumerate(example.rows):
        first.setdefault((row.ids.tobytes(), row.start), number)
    return [scores[first[row.ids.tobytes(), row.start]] for row in example.rows]


def judge(
    task: Task, example: Example, scores: Sequence[Score], legacy_nan: bool = False
) -> Item:
    """Choose the lowest mean loss, the first of equals; or ask whether all were best.

    A choice that has no token of its own cannot win; with legacy_nan it wins where it
    stands first, as in the reference, whose minimum starts with its NaN.
    Raises LittleLMError for a NaN among the scores of real tokens.
    """
    losses = [
        score.loss if row.scored else None
        for score, row in zip(scores, example.rows, strict=True)
    ]
    if any(loss is not None and math.isnan(loss) for loss in losses):
        raise LittleLMError(
            f"{task.label}: item {example.index} scores NaN: the model's weights or "
            "its precision are broken"
        )
    flags = {
        name: getattr(example, name) for name in ("truncated", "cut_answer", "border")
    }
    if task.kind == "language_modeling":
        right = scores[0].lead >= 0
        return Item(example.index, right, 0, tuple(losses), **flags)
    best = min((loss for loss in losses if loss is not None), default=None)
    choice = 0 if legacy_nan and losses[0] is None else losses.index(best)
    right = choice == task.items[example.index]["gold"]
    tie = best is not None and losses.count(best) > 1
    return Item(example.index, right, choice, tuple(losses), tie, **flags)


# Numbers of another order of summation differ; an answer that hangs on less than this
# is settled: its rows are read by themselves. Nats and logits, by the products' dtype.
MARGINS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def is_close(
    task: Task, example: Example, scores: Sequence[Score], margin: float
) -> bool:
    """Whether rounding might change an item's answer."""
    if task.kind == "language_modeling":
        return abs(scores[0].lead) <= margin
    # Unlike rows of one loss are close too: another order of the sums may part them.
    by_row = {
        (row.ids.tobytes(), row.start): score.loss
        for row, score in zip(example.rows, scores, strict=True)
    }
    losses = sorted(loss for loss in by_row.values() if math.isfinite(loss))
    return len(losses) > 1 and losses[1] - losses[0] <= margin


# ---- The fast reading: a shared beginning once

# A shared prefix shorter than this is not worth a pass of its own.
SHORTEST_PREFIX = 16
MOST_ROWS = 64  # behind one prefix
# The part of its limit that a pass may waste: another pass would cost about as much.
WASTE = 1 / 64

Place = tuple[int, int]  # a row: the number of its example, and its own there


class Unit(NamedTuple):
    """Rows that begin with the same `prefix` tokens: of one item, or of one story."""

    prefix: int
    rows: tuple[Place, ...]


def shared_tokens(rows: Sequence[Row]) -> int:
    """Return the tokens that rows begin with, less what must be read with them.

    The last token before a scored one is read with the rows, for its logits.
    """
    if len(rows) < 2:
        return 0
    starts = min(row.start for row in rows)
    return max(min(common_prefix([row.ids for row in rows]), starts) - 1, 0)


def stories(rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
    """Return (shared tokens, numbers of rows) of the groups that save most in all.

    In sorted order rows that begin alike lie side by side, so a group is a run of
    them, and the best division of the first n rows follows from shorter ones.
    """
    # Big-endian, so that the order of the bytes is that of the ids.
    keys = [row.ids.astype(">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    pairs = itertools.pairwise(order)
    between = [shared_tokens([rows[i], rows[j]]) for i, j in pairs]
    saved, first = [0], [0]
    for end in range(1, len(order) + 1):
        saved.append(saved[-1])
        first.append(end - 1)
        shared = math.inf
        for start in range(end - 2, max(end - MOST_ROWS, 0) - 1, -1):
            shared = min(shared, between[start])
            if shared < SHORTEST_PREFIX:
                break
            gain = saved[start] + (end - start - 1) * shared
            if gain > saved[end]:
                saved[end], first[end] = gain, start
    groups, end = [], len(order)
    while end:
        start = first[end]
        groups.append((min(between[start : end - 1], default=0), order[start:end]))
        end = start
    return groups


class Work:
    """The rows of a task's examples, in the order in which they cost least.

    Identical rows of an item are scored once, rows of a unit that are alike but for
    their last token are read once. Items of language modeling that begin alike (several
    questions about one story) become one unit. done: indices of items that need not be
    read; those of this rank are `known`.
    """

    def __init__(
        self,
        task: Task,
        examples: Sequence[Example],
        share: bool,
        rank: int = 0,
        world: int = 1,
        done: Collection[int] = (),
    ) -> None:
        self.task, self.examples = task, examples
        kept: list[tuple[Place, ...]] = []
        for number, example in enumerate(examples):
            rows = {
                (row.ids.tobytes(), row.start): (number, r)
                for r, row in reversed([*enumerate(example.rows)])
                if row.scored
            }
            kept.append(tuple(sorted(rows.values())))
        # Items of which no choice has a token of its own: nothing to read.
        silent = [n for n, rows in enumerate(kept) if not rows][rank::world]
        kept = [rows for rows in kept if rows]
        if not share:
            groups = [(0, rows) for rows in kept]
        elif task.kind == "language_modeling":
            found = stories([self.row(rows[0]) for rows in kept])
            groups = [(n, tuple(kept[i][0] for i in those)) for n, those in found]
        else:
            groups = [
                (shared_tokens([self.row(at) for at in rows]), rows) for rows in kept
            ]
        groups.sort(key=lambda group: -self.longest(group[1]))
        # Which items are a rank's own must not hang on what is done: ranks that read a
        # journal at different times would share the rest differently.
        mine = groups[rank::world]
        own = {*silent, *(n for _, rows in mine for n, _ in rows)}
        self.known = sorted(i for n in own if (i := examples[n].index) in done)
        self.silent = [n for n in silent if examples[n].index not in done]
        # What shares too little is read row by row, together with other items' rows.
        self.units: list[Unit] = []
        for prefix, rows in mine:
            rows = tuple(at for at in rows if examples[at[0]].index not in done)
            apart = self.readings(rows)
            if prefix >= SHORTEST_PREFIX and len(apart) > 1:
                self.units.append(Unit(prefix, rows))
            else:
                self.units += [Unit(0, tuple(alike)) for alike in apart]
        self.units.sort(key=lambda unit: -unit.prefix)

    def row(self, at: Place) -> Row:
        """Return a row by its place."""
        return self.examples[at[0]].rows[at[1]]

    def readings(self, rows: Sequence[Place]) -> list[list[Place]]:
        """Divide rows by what is read of them: answers of one token read the same."""
        found = defaultdict(list)
        for at in rows:
            found[self.row(at).inputs.tobytes()].append(at)
        return [*found.values()]

    def longest(self, rows: Sequence[Place]) -> int:
        """Return the tokens of the longest of some rows."""
        return max(len(self.row(at).ids) for at in rows)

    def batches(self, limit: int) -> Iterator[list[Unit]]:
        """Yield units that are read together, longest prefix first.

        Their prefixes, at most `limit` tokens, are cut to the shortest one; a batch
        ends where the tokens that rows then read again would be more than WASTE of
        the limit. Rows without a prefix are one batch: `packed` divides it.
        """
        batch: list[Unit] = []
        extra = again = 0  # a unit's first reading has the tokens that its prefix lost
        for unit in self.units:
            if batch:
                again += extra * (batch[-1].prefix - unit.prefix)
                size = (len(batch) + 1) * batch[0].prefix
                apart = unit.prefix == 0 < batch[0].prefix
                if apart or size > limit or again > WASTE * limit:
                    yield batch
                    batch, extra, again = [], 0, 0
            batch.append(unit)
            extra += len(self.readings(unit.rows)) - 1
        if batch:
            yield batch

    def passes(
        self, batch: Sequence[Unit], limit: int
    ) -> Iterator[tuple[list[tuple[int, list[Place]]], int]]:
        """Yield (readings, longest) of what is read at a time behind the prefixes.

        A reading: its unit's number in the batch, and the rows that read the same.
        """
        prefix = min(unit.prefix for unit in batch)
        units = [(n, self.readings(unit.rows)) for n, unit in enumerate(batch)]
        found = [(n, alike) for n, readings in units for alike in readings]
        sizes = [len(self.row(alike[0]).inputs) - prefix for _, alike in found]
        for numbers, longest in packed(sizes, prefix, limit):
            yield [found[i] for i in numbers], longest


def packed(
    sizes: Sequence[int], prefix: int, limit: int
) -> Iterator[tuple[list[int], int]]:
    """Yield (numbers of rows, longest) of rows that are padded to one length.

    sizes: tokens of each row after `prefix` others. At most `limit` tokens of rows and
    prefixes, and of padding at most WASTE of the limit.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    group: list[int] = []
    padded = 0
    for i in order:
        longest = sizes[group[0]] if group else sizes[i]
        padded += longest - sizes[i]
        full = (len(group) + 1) * (prefix + longest) > limit
        if group and (full or padded > WASTE * limit):
            yield group, longest
            group, padded = [], 0
        group.append(i)
    if group:
        yield group, sizes[group[0]]


def losses_and_leads(
    logits_NV: Tensor, targets_N: Tensor, leads: bool
) -> tuple[Tensor, Tensor]:
    """Return (loss_N, lead_N) of targets; without `leads` the second is NaN."""
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    if not leads:
        return losses_N, torch.full_like(losses_N, math.nan)
    at_N1 = logits_NV.gather(1, targets_N[:, None])
    others_NV = logits_NV.scatter(1, targets_N[:, None], -math.inf)
    leads_N = at_N1[:, 0] - others_NV.amax(-1)
    # argmax gives the first of equal ids: any other one is behind, if by nothing.
    behind_N = logits_NV.argmax(-1) != targets_N
    least = torch.finfo(leads_N.dtype).tiny
    return losses_N, torch.where(behind_N, leads_N.clamp(max=-least), leads_N)


@torch.inference_mode()
def score_rows(
    reader: Reader, work: Work, batch: Sequence[Unit], limit: int
) -> Iterator[tuple[Place, Score, int]]:
    """Yield (row, its score, tokens read for it) for all rows of a batch.

    The prefix common to each unit is read once, cut to the length of the shortest one;
    then the rest of every row behind it, rows of about one length at a time.
    """
    prefix = min(unit.prefix for unit in batch)
    cache = None
    if prefix:
        heads = [work.row(unit.rows[0]).ids[:prefix] for unit in batch]
        cache = reader.read(torch.from_numpy(np.stack(heads)).long().to(reader.device))
    leads = work.task.kind == "language_modeling"
    for chosen, longest in work.passes(batch, limit):
        ids_BT = np.zeros((len(chosen), longest), dtype=np.int64)
        for ids, (_, alike) in zip(ids_BT, chosen, strict=True):
            rest = work.row(alike[0]).inputs[prefix:]
            ids[: len(rest)] = rest
        fork = None
        if cache is not None:
            fork = reader.fork(cache, [n for n, _ in chosen], prefix + longest)
        ids_BT = torch.from_numpy(ids_BT).to(reader.device)
        streams_NC = reader.streams(ids_BT, fork).flatten(0, 1)
        rows = [(b, at) for b, (_, alike) in enumerate(chosen) for at in alike]
        scored = [work.row(at) for _, at in rows]
        counts = [row.scored for row in scored]
        b_N = np.repeat([b for b, _ in rows], counts)
        t_N = np.concatenate([np.arange(r.start, len(r.ids)) for r in scored]) - 1
        targets_N = np.concatenate([row.ids[row.start :] for row in scored])
        before_N = torch.from_numpy(b_N * longest + t_N - prefix).to(reader.device)
        targets_N = torch.from_numpy(targets_N).long().to(reader.device)
        loss_N, lead_N = _at_scored(reader, streams_NC, before_N, targets_N, leads)
        ends = np.cumsum(counts)
        for (b, at), end, count in zip(rows, ends, counts, strict=True):
            n, alike = chosen[b]
            own = slice(end - count, end)
            score = Score(float(loss_N[own].mean()), float(lead_N[own].min()))
            read = longest if at == alike[0] else 0
            yield at, score, read + (prefix if at == batch[n].rows[0] else 0)


def _at_scored(
    reader: Reader, streams_NC: Tensor, before_N: Tensor, targets_N: Tensor, leads: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return fp64 (loss_N, lead_N), with a chunk of logits in memory at a time."""
    kind = "cpu" if reader.device.type == "cpu" else "gpu"
    width = reader.vocab_size or streams_NC.shape[-1]
    rows = max(CHUNK_LOGITS[kind] // width, 1)
    parts = [
        losses_and_leads(reader.logits(streams_NC[before]), targets, leads)
        for before, targets in zip(
            before_N.split(rows), targets_N.split(rows), strict=True
        )
    ]
    losses, leads_ = (
        torch.cat(column).double().cpu() for column in zip(*parts, strict=True)
    )
    return losses.numpy(), leads_.numpy()


# ---- The report


@dataclass(frozen=True)
class TaskResult:
    """What one task came to. Shares lie between 0 and 1.

    table: of the baselines that `centered` goes by. What it cost, without the items
    that a journal had: tokens_alone, if each row were read alone; tokens_run, what was
    read, padding included; logits, positions at which logits were made; seconds.
    """

    task: Task = field(repr=False)
    items: tuple[Item, ...] = field(repr=False)
    table: str = "v1"
    tokens_alone: int = 0
    tokens_run: int = 0
    logits: int = 0
    seconds: float = 0.0

    @property
    def n(self) -> int:
        """Items that were scored."""
        return len(self.items)

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(item.correct for item in self.items) / self.n

    @property
    def error(self) -> float:
        """The standard error of the accuracy: one binomial draw of n items."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.n)

    @property
    def centered(self) -> float:
        """Accuracy above chance, by the report's table; `task.centered` has both."""
        return self.task.centered(self.accuracy, self.table)

    @property
    def uncropped(self) -> tuple[int, float | None]:
        """(items that fit the context, their accuracy or None)."""
        fit = [item.correct for item in self.items if not item.truncated]
        return len(fit), sum(fit) / len(fit) if fit else None

    def count(self, flag: str) -> int:
        """Count the items with a flag: truncated, tie, border, cut_answer, settled."""
        return sum(getattr(item, flag) for item in self.items)

    @property
    def truncated(self) -> int:
        """Items that lost tokens to the context."""
        return self.count("truncated")

    @property
    def ties(self) -> int:
        """Items whose lowest loss several choices share."""
        return self.count("tie")

    @property
    def no_score(self) -> int:
        """Items with a choice that has no token of its own."""
        return sum(None in item.scores for item in self.items)

    @property
    def won_without_score(self) -> int:
        """Items whose answer is such a choice: legacy_nan, or there is no other."""
        return sum(item.scores[item.choice] is None for item in self.items)


def bootstrap(
    tasks: Sequence[TaskResult], table: str = "v1", draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of the mean centered accuracy.

    Items are drawn anew from each task, with replacement. Of n items of which a share a
    is right, such a draw has a binomial number right: that is drawn.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(draws)
    for result in tasks:
        accuracies = rng.binomial(result.n, result.accuracy, draws) / result.n
        chance = result.task.baselines[table] / 100
        means += (accuracies - chance) / (1 - chance) / len(tasks)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class CoreReport:
    """All that an evaluation came to; `to_json` is what is stored.

    tasks: by label. settings: what the items' answers depend on, and how they were
    read. share: (rank, world) of a report that holds only that rank's items.
    """

    tasks: dict[str, TaskResult]
    baselines: str
    settings: dict[str, Any]
    seconds: dict[str, float]
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for label, result in self.tasks.items():
            if self.share[1] == 1 and not result.n:
                raise DataError(f"{label} has no item: CORE is a mean over all tasks")

    @property
    def whole(self) -> bool:
        """Whether all tasks of their table were run: 22 in CORE's."""
        return len(self.tasks) == max(r.task.listed for r in self.tasks.values())

    @property
    def core(self) -> float:
        """The mean of the centered accuracies; CORE only where `whole`, see `notes`."""
        return self.core_by(self.baselines)

    def core_by(self, table: str) -> float:
        """Return the same by one of the two tables of baselines.

        Raises LittleLMError for one rank's share.
        """
        if self.share[1] > 1:
            raise LittleLMError(
                f"this is the share of rank {self.share[0]} of {self.share[1]}: "
                "merge the reports of all ranks first"
            )
        each = [r.task.centered(r.accuracy, table) for r in self.tasks.values()]
        return sum(each) / len(each)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `core`: what other items of these kinds might give."""
        return bootstrap(list(self.tasks.values()), self.baselines)

    @property
    def uncropped(self) -> tuple[int, float | None]:
        """(tasks with items that fit the context, the mean over those items)."""
        found = [
            result.task.centered(result.uncropped[1], self.baselines)
            for result in self.tasks.values()
            if result.uncropped[0]
        ]
        return len(found), sum(found) / len(found) if found else None

    @property
    def suite(self) -> str:
        """The name of the tasks: CORE, or another one."""
        return next(iter(self.tasks.values())).task.suite

    @property
    def notes(self) -> list[str]:
        """What must be said beside the number, a line each."""
        return core_notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report without its items, ready for JSON."""
        return core_dict(self)

    def to_json(self, facts: Mapping[str, Any] | None = None) -> str:
        """Return the report with every item's answer and scores.

        facts: `to_dict`, to which a caller has added (the model's name).
        """
        items = {
            label: [item._asdict() for item in result.items]
            for label, result in self.tasks.items()
        }
        facts = self.to_dict() if facts is None else facts
        return json.dumps({**facts, "items": items}, indent=1)


# ---- All of it


def _told_apart(text: Text, tasks: Sequence[Task]) -> list[list[int]]:
    """Return what a tokenizer without a fingerprint makes of each task's first item."""
    rows = [row for task in tasks for row in prompts(task, 0, [])[0]]
    return [ids.tolist() for ids in text.encode(rows)]


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    max_per_task: int | None = None,
    batch_tokens: int | None = None,
    context: int | None = None,
    baselines: str = "v1",
    prefix_cache: bool = True,
    rank: int = 0,
    world: int = 1,
    crop: str = "bos",
    legacy_pool: bool = False,
    legacy_nan: bool = False,
    token_cache: Path | None = None,
    journal: Path | None = None,
    progress: Callable[[str, int], object] = lambda label, items: None,
) -> CoreReport:
    """Score a model on tasks; return the report.

    model: a LanguageModel, one of transformers, or any module that maps ids_BT to
    logits_BTV; autocast is the caller's. tokenizer: ours, one of transformers, or any
    with `encode` and `bos_id`.
    max_per_task: only the first so many items. context: the model's unless given.
    baselines: the table of `core`, "v1" or "v2". crop: see `crop`. legacy_pool: draw
    examples from the first max_per_task items alone. legacy_nan: see `judge`.
    batch_tokens: tokens read at a time, and as many of prefixes kept for them (more
    only for a single longer row); None: `Reader.batch_tokens`.
    prefix_cache: read shared prefixes once. token_cache: a folder for the tokens of
    prompts. journal: a folder for finished items, from which the same call goes on.
    progress: called as progress(label, items finished); False ends the evaluation.
    rank, world: this process's share of the items. Where torch.distributed runs, all
    ranks get the whole report; else `core_run.merge` makes it.
    Answers do not depend on batch_tokens, prefix_cache, rank or world; in bf16 but for
    the few where rounding moves a score by more than MARGINS.
    Raises ConfigError for settings that mean nothing, DataError for tasks that lack
    items, LittleLMError for scores that are NaN, EvaluationStopped on every rank when
    one was told to end.
    """
    if hasattr(model, "get_output_embeddings"):
        model = CausalLM(model)
    if not hasattr(tokenizer, "bos_id"):
        tokenizer = TheirTokenizer(tokenizer)
    reader, text = Reader(model), Text(tokenizer)
    if crop == "none" and isinstance(model, LanguageModel):
        raise ConfigError(
            f"crop = 'none': the model reads no more than {reader.context} tokens, so "
            "choose bos, plain or shots"
        )
    kind = reader.device.type
    batch_tokens = reader.batch_tokens if batch_tokens is None else batch_tokens
    check_tasks(tasks)
    choices = {"crop": (crop, CROPS), "baselines": (baselines, TABLES)}
    check_settings(batch_tokens, max_per_task, rank, world, choices)
    context = context_in_force(reader.context, context, crop)
    rules = Rules(context, crop, max_per_task, legacy_pool, legacy_nan)
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else reader.dtype
    started, clock = time.perf_counter(), {"tokenize": 0.0, "model": 0.0}
    book, done = None, {task.label: {} for task in tasks}
    if journal is not None:
        known = text.fingerprint or _told_apart(text, tasks)
        what = VERSION, known, text.bos, rules, str(dtype)
        key = journal_key(model, tasks, *what)
        book = Journal(journal, key, rank)
        for label, index, right, choice, losses, *flags in book.records:
            done[label][index] = Item(index, right, choice, tuple(losses), *flags)
    together = world > 1 and dist.is_available() and dist.is_initialized()
    training, stopped = model.training, False
    model.eval()
    results = {}
    try:
        if together and token_cache and text.fingerprint:
            before = time.perf_counter()
            for task in tasks[rank::world]:  # each rank makes the tokens of some tasks
                encoded(task, text, rules, token_cache)
            dist.barrier()
            clock["tokenize"] += time.perf_counter() - before
        for task in tasks:
            before = time.perf_counter()
            examples = encoded(task, text, rules, token_cache)
            check_ids(task.label, examples, reader.vocab_size)
            clock["tokenize"] += time.perf_counter() - before
            before = time.perf_counter()
            finish = _Finish(task, examples, rules, MARGINS.get(dtype, 1e-4))
            for item in finish.items(
                reader, done[task.label], batch_tokens, prefix_cache, rank, world
            ):
                if book and item.index not in done[task.label]:
                    book.add([task.label, *item])
                stopped = stopped or progress(task.label, 1) is False
                if stopped:
                    break
            seconds = time.perf_counter() - before
            clock["model"] += seconds
            results[task.label] = finish.result(baselines, seconds)
            if stopped:
                break
    finally:
        model.train(training)
        if book:
            book.close()
    settings = {
        **rules._asdict(),
        "prefix_cache": prefix_cache and reader.caches,
        "batch_tokens": batch_tokens,
        "world": world,
        "dtype": str(dtype).removeprefix("torch."),
    }
    clock["total"] = time.perf_counter() - started
    report = CoreReport(results, baselines, settings, clock, (rank, world))
    if together:
        return gather(report, stopped)
    if stopped:
        raise EvaluationStopped
    return report


class _Finish:
    """One task's items, judged as soon as their last row is scored."""

    def __init__(
        self, task: Task, examples: Sequence[Example], rules: Rules, margin: float
    ) -> None:
        self.task, self.rules, self.margin = task, rules, margin
        self.examples = [crop(e, rules.context, rules.crop) for e in examples]
        self.found: list[Item] = []
        self.alone = self.run = self.logits = 0

    def items(
        self,
        reader: Reader,
        done: Mapping[int, Item],
        limit: int,
        share: bool,
        rank: int,
        world: int,
    ) -> Iterator[Item]:
        """Yield this rank's items as they are finished, those of a journal first."""
        work = Work(
            self.task, self.examples, share and reader.caches, rank, world, done
        )
        known = [done[index] for index in work.known]
        self.found += known
        yield from known
        waiting = Counter(n for unit in work.units for n, _ in unit.rows)
        scores: dict[int, dict[int, Score]] = defaultdict(dict)
        for n in work.silent:
            yield self.finish(reader, self.examples[n], {})
        for (n, r), score in self.read(reader, work, limit):
            scores[n][r] = score
            waiting[n] -= 1
            if not waiting[n]:
                yield self.finish(reader, self.examples[n], scores.pop(n))

    def read(
        self, reader: Reader, work: Work, limit: int
    ) -> Iterator[tuple[Place, Score]]:
        """Yield (row, its score), and count what is read for it."""
        for batch in work.batches(limit):
            for at, score, read in score_rows(reader, work, batch, limit):
                self.run += read
                self.logits += work.row(at).scored
                yield at, score

    def finish(
        self, reader: Reader, example: Example, by_row: dict[int, Score]
    ) -> Item:
        """Judge an item; the rows of one that hangs on rounding are read by themselves.

        That reading depends on nothing but the item, so the answer does neither.
        """
        self.alone += sum(len(row.ids) for row in example.rows)
        missing = Score(math.nan, math.nan)
        scores = [by_row.get(r, missing) for r in range(len(example.rows))]
        scores = spread(example, scores)
        settled = is_close(self.task, example, scores, self.margin)
        if settled:
            work = Work(self.task, [example], share=False)
            for (_, r), score in self.read(reader, work, 1):
                scores[r] = score
            scores = spread(example, scores)
        item = judge(self.task, example, scores, self.rules.legacy_nan)
        self.found.append(item._replace(settled=settled))
        return self.found[-1]

    def result(self, table: str, seconds: float) -> TaskResult:
        """Return this rank's result."""
        items = tuple(sorted(self.found, key=lambda item: item.index))
        return TaskResult(
            self.task, items, table, self.alone, self.run, self.logits, seconds
        )
