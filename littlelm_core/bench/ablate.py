"""Ablations: arms that differ in one thing, each at its own best learning rate.

An arm is a run as a table. Its rate is chosen on a seed of its own (`SWEEP_SEED`), on
the same grid and by the same rule for every arm; then it is trained with the seeds that
are reported. A finished run is stored at once under the fingerprint of everything that
decides it, so that a killed ladder goes on where it was, and a changed arm is new.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import littlelm_core
from littlelm_core.bench import PEERS, commit, heap
from littlelm_core.bench.measure import rounds
from littlelm_core.bench.peers import version
from littlelm_core.config import DataError, LittleLMError, RunConfig
from littlelm_core.doctor import machine
from littlelm_core.ingest import Prepared, prepare_run
from littlelm_core.ingest.write import write_json
from littlelm_core.report.measured import best_rate
from littlelm_core.report.terminal import duration
from littlelm_core.shards import ValidationRows
from littlelm_core.trainer import Loop, plain_weights, score

__all__ = [
    "PLAIN",
    "SWEEP_SEED",
    "Arm",
    "Job",
    "Store",
    "circumstances",
    "execute",
    "measure",
    "next_jobs",
    "sources",
    "step_costs",
    "train",
    "windows",
]

FORMAT = 1  # of a file in data/ablations
SWEEP_SEED = 0  # chooses the rate and is not reported: the seeds from 1 on are
EXTENSIONS = 3  # rates at most that are added beyond the grid on either side
CURVE = 40  # points of a stored loss curve
PLAIN: dict[str, Any] = {"markup": False, "soft_wrap": True, "highlight": False}

# The modules whose code decides a number here.
MODULES = (
    "attention", "blocks", "config", "fp8", "mixture", "model", "optim", "schedule",
    "shards", "tokenizer", "trainer",
)  # fmt: skip


# ---- What is run


@dataclass(frozen=True)
class Arm:
    """One recipe. table: a run without name, run_dir, seed and optimizer.lr.

    rates: the grid of peak rates, ascending, a constant factor apart; a single rate is
    taken as it is, without a sweep. excerpts: of the validation split, a domain. text:
    "" for what the run names, else one of `heap.KINDS`.
    """

    name: str
    label: str
    table: Mapping[str, Any]
    rates: tuple[float, ...]
    excerpts: int = 24
    excerpt_tokens: int = 1024
    text: str = ""

    def run(self, rate: float, seed: int) -> RunConfig:
        """Return the whole run. Raises ConfigError, or ValueError from pydantic."""
        optimizer = {**self.table["optimizer"], "lr": rate}
        names = {"name": self.name, "run_dir": f"runs/ablations/{self.name}"}
        table = {**self.table, **names, "seed": seed, "optimizer": optimizer}
        return RunConfig.model_validate(table)

    def config(self) -> dict[str, Any]:
        """Return the whole run as a table, without what one run has of its own."""
        table = self.run(self.rates[0], SWEEP_SEED).model_dump(mode="json")
        for key in ("name", "run_dir", "seed"):
            del table[key]
        if len(self.rates) > 1:
            del table["optimizer"]["lr"]
        return table


@dataclass(frozen=True)
class Job:
    """One run of an arm."""

    arm: Arm
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Sixteen hex digits of all that decides the result but code and corpus."""
        arm = self.arm
        what = [arm.table, self.rate, self.seed, arm.excerpts, arm.excerpt_tokens]
        what += [arm.text, heap.RECIPE] if arm.text else []
        text = json.dumps(what, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- Which run is next


def next_jobs(
    arm: Arm, score_of: Callable[[Job], float | None], seeds: Sequence[int]
) -> list[Job]:
    """Return the runs of an arm that are wanted now; none when it is complete.

    score_of: the score of a finished run (infinity where it failed), else None.
    First the whole grid; while the best rate is at an edge, one more rate beyond it, a
    grid's factor away, up to EXTENSIONS a side; then the seeds at the best rate.
    """
    rates = list(arm.rates)
    if len(rates) > 1:
        factor = rates[1] / rates[0]
        least = rates[0] / factor ** (EXTENSIONS + 0.5)
        most = rates[-1] * factor ** (EXTENSIONS + 0.5)
        while True:
            sweep = [Job(arm, rate, SWEEP_SEED) for rate in sorted(rates)]
            scores = {job.rate: score_of(job) for job in sweep}
            if missing := [job for job in sweep if scores[job.rate] is None]:
                return missing
            best = best_rate(scores)
            beyond = {max(rates): best * factor, min(rates): best / factor}.get(best)
            beyond = beyond and float(f"{beyond:.6g}")
            if beyond is None or not least < beyond < most:
                break
            rates.append(beyond)
    else:
        best = rates[0]
    jobs = [Job(arm, best, seed) for seed in seeds]
    return [job for job in jobs if score_of(job) is None]


# ---- One run


@lru_cache
def sources() -> str:
    """Return a hash of the modules' code as it is now; asked again, the same one."""
    digest = hashlib.blake2b(digest_size=8)
    for name in MODULES:
        path = Path(littlelm_core.__file__).with_name(f"{name}.py")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def windows(
    batch: tuple[torch.Tensor, torch.Tensor], context: int, bos_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut rows into rows of `context` tokens that start with BOS, as in training.

    The targets are the same ones for every context that divides the rows' length: arms
    of different contexts are scored on the same text.
    """
    ids_BT, targets_BT = (x.reshape(-1, context) for x in batch)
    ids_BT = ids_BT.clone()
    ids_BT[:, 0] = bos_id
    return ids_BT, targets_BT


def evaluate(loop: Loop, arm: Arm) -> dict[str, dict[str, float]]:
    """Return {domain: bits_per_byte, tokens, bytes} of evenly spread excerpts.

    The plain weights are scored in fp32 for every arm, whatever it trained in.
    """
    model = type(loop.model)(loop.cfg)
    model.load_state_dict(plain_weights(loop.model), strict=True)
    model.to(loop.device).eval()
    bytes_V = loop.place(loop.tokenizer.token_byte_counts())
    limit = arm.excerpts * arm.excerpt_tokens
    found = {}
    for domain, shards in loop.data.validation.items():
        rows = ValidationRows(shards, 2, arm.excerpt_tokens, max_tokens=limit)
        bos = loop.tokenizer.bos_id
        batches = (windows(batch, loop.cfg.context, bos) for batch in rows)
        nats, tokens, size = score(model.loss, batches, bytes_V)
        bits = nats / math.log(2) / size
        found[domain] = {"bits_per_byte": bits, "tokens": tokens, "bytes": size}
    return found


def prepare(arm: Arm, run: RunConfig) -> Prepared:
    """Return the data of an arm's run."""
    return heap.prepare(arm.text, run) if arm.text else prepare_run(run)


def measure(job: Job) -> dict[str, Any]:
    """Train one run and score it; return its record, plain values alone.

    A run that failed (its loss was not finite) has no score, and its error. Nothing is
    written: a run of half a minute needs no checkpoint.
    """
    torch.set_num_threads(1)
    code, made_by = sources(), commit()
    run = job.arm.run(job.rate, job.seed)
    loop = Loop(run, prepare(job.arm, run))
    losses: list[float] = []
    record: dict[str, Any] = {
        "arm": job.arm.name, "rate": job.rate, "seed": job.seed, "error": None,
        "validation": {}, "score": None,
    }  # fmt: skip
    start, start_cpu = time.perf_counter(), time.process_time()
    try:
        for _ in range(run.steps):
            step = loop.take_step()
            losses.append(math.nan if step["loss"] is None else step["loss"])
    except LittleLMError as error:
        record["error"] = str(error)
    record |= {
        "seconds": round(time.perf_counter() - start, 3),
        "cpu_seconds": round(time.process_time() - start_cpu, 3),
        "steps": loop.step,
        "tokens": loop.tokens,
        "skipped_steps": loop.skipped_steps,
        "parameters": sum(p.numel() for p in loop.parameters),
        "precision": getattr(loop.precision, "dtype", None),
        "device": str(loop.device),
        "curve": curve(losses),
        "train_loss": mean_of(losses[-max(len(losses) // 20, 1) :]),
    }
    if record["error"] is None:
        record["validation"] = evaluate(loop, job.arm)
        scores = [v["bits_per_byte"] for v in record["validation"].values()]
        record["score"] = mean_of(scores)
    now = datetime.datetime.now().astimezone()
    record |= {"time": now.isoformat(timespec="seconds"), "sources": code}
    record["commit"] = made_by
    return record


def step_costs(
    tried: Mapping[str, Arm], first: str, count: int = 7, steps: int = 4
) -> dict[str, dict[str, Any]]:
    """Return what a step costs: processor seconds, and how many times those of `first`.

    The arms take turns, `steps` at a time: a busy machine slows all of them, and only
    times of one round are divided by each other. Medians over `count` rounds.
    """
    torch.set_num_threads(1)

    def advance(loop: Loop) -> None:
        for _ in range(steps):
            loop.take_step()

    turns = {}
    for name, arm in tried.items():
        run = arm.run(arm.rates[0], SWEEP_SEED)
        turns[name] = partial(advance, Loop(run, prepare(arm, run)))
    taken = rounds(turns, count, clock=time.process_time)
    costs = {}
    for name, times in taken.items():
        ratios = [a / b for a, b in zip(times, taken[first], strict=True)]
        costs[name] = {
            "step_seconds": statistics.median(times) / steps,
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return costs


def mean_of(values: Sequence[float]) -> float | None:
    """Return the plain mean, or None where it is no finite number (JSON has none)."""
    mean = statistics.fmean(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def curve(losses: Sequence[float]) -> list[list[float | None]]:
    """Return about CURVE points [steps done, mean loss since the point before]."""
    size = max(1, math.ceil(len(losses) / CURVE))
    cuts = range(0, len(losses), size)
    parts = [losses[i : i + size] for i in cuts]
    means = [mean_of(part) for part in parts]
    ends = [min(i + size, len(losses)) for i in cuts]
    return [[e, m and round(m, 4)] for e, m in zip(ends, means, strict=True)]


# ---- All runs


class Store:
    """The JSON file of an ablation: its head, and a record for every finished run."""

    def __init__(self, path: Path):
        self.path = path
        self.table: dict[str, Any] = {"format": FORMAT, "runs": {}}
        with contextlib.suppress(FileNotFoundError):
            self.table = read_store(path)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Records by fingerprint."""
        return self.table["runs"]

    def score(self, job: Job) -> float | None:
        """Return a finished run's score, infinity where it failed, else None."""
        record = self.runs.get(job.key)
        if record is None:
            return None
        return math.inf if record["score"] is None else record["score"]

    def add(self, job: Job, record: dict[str, Any]) -> None:
        """Keep a record, on the disk too."""
        self.runs[job.key] = record
        self.write()

    def drop_old(self, arm: Arm, fresh: bool = False) -> None:
        """Drop the runs of another recipe than the arm's; with `fresh`, all of it."""
        for key, run in list(self.runs.items()):
            same = key == Job(arm, run["rate"], run["seed"]).key
            if run["arm"] == arm.name and (fresh or not same):
                del self.runs[key]

    def write(self) -> None:
        """Write the file in one move."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.table)


def read_store(path: Path) -> dict[str, Any]:
    """Return a stored ablation.

    Raises FileNotFoundError, and DataError for a damaged or unknown file.
    """
    try:
        table = json.loads(path.read_text("utf-8"))
        version = table["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: delete it and measure again") from error
    if version != FORMAT:
        raise DataError(
            f"{path} has format {version}, this littlelm reads {FORMAT}: measure again"
        )
    return table


def circumstances(arm: Arm) -> dict[str, Any]:
    """Return the head of a file: when, where and on what the arms were measured."""
    now = datetime.datetime.now().astimezone()
    return {
        "time": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": [version(name) for name in PEERS],
        "machine": machine() | {"threads": 1},
        "sweep_seed": SWEEP_SEED,
        "excerpts": {"a_domain": arm.excerpts, "tokens": arm.excerpt_tokens},
        "arms": {},
    }


def train(
    store: Store,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    workers: int,
    console: Console,
) -> None:
    """Train what the arms lack, keep each run at once, and print a line for it."""
    start, done = time.monotonic(), 0

    def pending() -> list[Job]:
        return [job for arm in arms for job in next_jobs(arm, store.score, seeds)]

    def left() -> int:
        """Runs still to come: a sweep that has not ended wants its seeds too."""
        known = pending()
        sweeping = {job.arm.name for job in known if job.seed == SWEEP_SEED}
        return len(known) + len(sweeping) * len(seeds)

    def take(job: Job, record: dict[str, Any]) -> None:
        nonlocal done
        store.add(job, record)
        done += 1
        rest, score = left(), record["score"]
        eta = (time.monotonic() - start) / done * rest
        result = record["error"] if score is None else f"{score:.4f} bits per byte"
        weights = job.arm.table.get("mixture", {}).get("weights", {})
        mixed = " ".join(f"{name} {weight:.2f}" for name, weight in weights.items())
        console.print(
            f"{job.arm.name}{mixed and f' ({mixed})'}, rate {job.rate:g}, seed "
            f"{job.seed}: {result} ({record['seconds']:.0f} s; {rest} runs left, "
            f"{duration(eta)})",
            **PLAIN,
        )

    if todo := left():
        console.print(f"{todo} runs to train with {workers} worker(s)", **PLAIN)
    execute(pending, take, workers)


def execute(
    pending: Callable[[], list[Job]],
    take: Callable[[Job, dict[str, Any]], None],
    workers: int = 1,
) -> None:
    """Run jobs until none is pending; `take` gets each record as it comes.

    pending: the jobs that could start now, in order, those that run among them. One
    worker is this process; several are processes of their own, with one thread each.
    """
    if workers == 1:
        while jobs := pending():
            take(jobs[0], measure(jobs[0]))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: dict[Future, Job] = {}
        while True:
            busy = {job.key for job in running.values()}
            free = [job for job in pending() if job.key not in busy]
            for job in free[: workers - len(running)]:
                running[pool.submit(measure, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                take(running.pop(future), future.result())
