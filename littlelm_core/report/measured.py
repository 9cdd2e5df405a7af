"""The numbers of data/ablations: what a `littlelm bench fixes` stored, seed by seed.

Scores are bits per byte on the pinned validation text, the plain mean over the domains:
lower is better. A spread is the standard deviation over the seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from littlelm_core.config import DataError, nearest

__all__ = [
    "BEFORE",
    "FIXES",
    "FOLDER",
    "LABELS",
    "LADDER",
    "Effect",
    "best_rate",
    "chosen_rate",
    "cost",
    "effect",
    "load",
    "mean_and_spread",
    "reported",
    "scores",
    "sweep",
    "verdict",
]

FOLDER = Path(__file__).resolve().parents[2] / "data" / "ablations"

FIXES = ("schedule", "muon", "data", "fp8", "context")
LABELS = {
    "failed": "failed recipe at its own rate",
    "baseline": "failed recipe, rate searched",
    "schedule": "+ schedule",
    "muon": "Muon alone",
    "data": "mixture alone",
    "fp8": "FP8 and padding alone",
    "context": "half the context alone",
    "ladder-muon": "+ Muon",
    "ladder-data": "+ mixture",
    "ladder-fp8": "+ FP8 and padding",
    "ladder-context": "+ half the context",
    "heap": "failed recipe on a heap",
    "curated": "on the heap, curated",
}
LADDER = ("baseline", "schedule", *(f"ladder-{fix}" for fix in FIXES[1:]))

# The arm that each arm is compared with: the rung below, or the baseline.
BEFORE = {fix: "baseline" for fix in FIXES}
BEFORE |= dict(zip(LADDER[1:], LADDER, strict=False)) | {"baseline": "failed"}
BEFORE |= {"heap": "baseline", "curated": "heap"}


# ---- The numbers


def load(name: str = "fixes", folder: Path = FOLDER) -> dict[str, Any]:
    """Return data/ablations/<name>.json.

    Raises DataError: the file is missing (the line names the command that makes it) or
    damaged.
    """
    path = Path(folder) / f"{name}.json"
    command = f"littlelm bench {name}"
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: {command} measures it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: delete it and run {command}") from error


def runs_of(stored: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """Return an arm's finished runs. Raises DataError for an unknown arm."""
    if arm not in LABELS:
        raise DataError(f"no arm is called {arm!r}{nearest(arm, LABELS)}")
    return [run for run in stored["runs"].values() if run["arm"] == arm]


def sweep(stored: Mapping[str, Any], arm: str) -> dict[float, float | None]:
    """Return {rate: score} of the search, by rate; None where the run failed."""
    seed = stored["sweep_seed"]
    found = [r for r in runs_of(stored, arm) if r["seed"] == seed]
    return {r["rate"]: r["score"] for r in sorted(found, key=lambda r: r["rate"])}


def best_rate(scores: Mapping[float, float]) -> float:
    """Return the rate with the lowest score; of equal ones the lowest rate."""
    return min(sorted(scores), key=lambda rate: scores[rate])


def chosen_rate(stored: Mapping[str, Any], arm: str) -> float:
    """Return the rate that an arm's reported runs have: the best one of its search.

    Raises DataError when no run of the arm has a score.
    """
    tried = {r: s for r, s in sweep(stored, arm).items() if s is not None}
    if not tried:  # an arm with a rate of its own is not searched
        tried = {r["rate"]: 0.0 for r in runs_of(stored, arm)}
    if not tried:
        raise DataError(f"arm {arm} is not measured yet: littlelm bench fixes does it")
    return best_rate(tried)


def reported(stored: Mapping[str, Any], arm: str) -> dict[int, dict[str, Any]]:
    """Return {seed: run} of an arm's runs at its chosen rate, the search left out."""
    runs = [r for r in runs_of(stored, arm) if r["seed"] != stored["sweep_seed"]]
    if not runs:
        return {}
    rate = chosen_rate(stored, arm)
    runs = [r for r in runs if r["rate"] == rate and r["score"] is not None]
    return {r["seed"]: r for r in sorted(runs, key=lambda r: r["seed"])}


def scores(
    stored: Mapping[str, Any], arm: str, domain: str | None = None
) -> dict[int, float]:
    """Return {seed: bits per byte} of an arm, of one domain or their plain mean."""
    if domain is None:
        return {seed: run["score"] for seed, run in reported(stored, arm).items()}
    return {
        seed: run["validation"][domain]["bits_per_byte"]
        for seed, run in reported(stored, arm).items()
    }


def cost(stored: Mapping[str, Any], arm: str) -> float | None:
    """Return a step's processor time over the baseline's, None if it is not measured.

    The failed recipe at its own rate takes the baseline's steps.
    """
    entry = stored.get("cost", {}).get("baseline" if arm == "failed" else arm)
    return entry and entry["ratio"]


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 of a single value)."""
    values = list(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread


class Effect(NamedTuple):
    """What a change gains, in bits per byte: above 0 is better."""

    mean: float
    spread: float  # standard deviation of the differences over the seeds
    by_seed: dict[int, float]


def effect(
    stored: Mapping[str, Any], before: str, after: str, domain: str | None = None
) -> Effect | None:
    """Return what `after` gains over `before`, seed by seed; None where none is equal.

    The same seed gives both arms the same start and, where the rows are the same, the
    same rows: much of the noise is common to both and falls out of the difference.
    """
    a, b = (scores(stored, arm, domain) for arm in (before, after))
    gains = {seed: a[seed] - b[seed] for seed in a if seed in b}
    if not gains:
        return None
    return Effect(*mean_and_spread(gains.values()), gains)


# Student's t, two-sided 95 %, by the number of pairs; from 11 on the last is safe.
T_95 = {
    2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26
}  # fmt: skip


def verdict(gain: Effect | None) -> str:
    """Say in words whether the seeds tell an effect from none.

    "gains" or "loses" where the mean's 95 % interval (Student's t) leaves out 0.
    """
    if gain is None:
        return "not measured"
    pairs = len(gain.by_seed)
    reach = T_95[max(2, min(pairs, 10))] * gain.spread / math.sqrt(pairs)
    if pairs < 2 or abs(gain.mean) <= reach:
        return "within the noise"
    return "gains" if gain.mean > 0 else "loses"
