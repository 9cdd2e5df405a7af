"""Measure contestants side by side, so that a busy machine slows all of them.

Each round runs every contestant once, in turn; what is compared is the ratio within a
round, and its median over the rounds. Times of different minutes are never compared.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass
class Row:
    """One line of the table: ours against a peer, or against a plain number.

    ratio: how many times the peer's speed (above 1: ours is faster), or, without a
    peer, our speed over the bar. bar: the ratio that is asked for. ratios: one a round.
    """

    what: str
    peer: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float
    bar: float | None
    ratios: list[float]
    note: str = ""

    @property
    def passes(self) -> bool | None:
        """Is the bar met? None where there is none."""
        return None if self.bar is None else self.ratio >= self.bar

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values, with its verdict."""
        return dataclasses.asdict(self) | {"passes": self.passes}


def rounds(
    contestants: Mapping[str, Callable[[], object]],
    count: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds of each contestant in each round; all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warm_up + count):
        for name, run in contestants.items():
            gc.collect()
            start = clock()
            run()
            taken = clock() - start
            if number >= warm_up:
                seconds[name].append(taken)
    return seconds


def against(
    what: str,
    peer: str,
    seconds: Mapping[str, list[float]],
    work: float,
    unit: str,
    bar: float | None,
    ours: str = "ours",
    theirs: str = "theirs",
    note: str = "",
) -> Row:
    """Make a row of two contestants' times for the same amount of work.

    work: units of work in one run (tokens, bytes, ...).
    """
    pairs = zip(seconds[ours], seconds[theirs], strict=True)
    ratios = [b / a for a, b in pairs]
    return Row(
        what,
        peer,
        work / statistics.median(seconds[ours]),
        work / statistics.median(seconds[theirs]),
        unit,
        statistics.median(ratios),
        bar,
        ratios,
        note,
    )


def alone(
    what: str,
    seconds: list[float],
    work: float,
    unit: str,
    least: float,
    note: str = "",
) -> Row:
    """Make a row of our own rate against a plain number, `least` units a second."""
    rates = [work / s for s in seconds]
    ratios = [rate / least for rate in rates]
    median = statistics.median(rates)
    return Row(
        what,
        f"{least:,.0f} {unit}",
        median,
        None,
        unit,
        median / least,
        1.0,
        ratios,
        note,
    )
