"""The progress of an evaluation: a bar of rich, or a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from littlelm_core.report.terminal import LINE_EVERY, duration


class EvalProgress:
    """Called as progress(label, items) by `evaluate`; a context around it.

    The time left is by characters of prompts: tasks differ a hundredfold in length.
    tasks: of `core_eval`. most: items of each that are scored; None: all. share: one of
    how many processes this is, all of which are as fast. quiet: say nothing.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        most: int | None,
        share: int = 1,
        quiet: bool = False,
    ) -> None:
        self.console = Console(highlight=False, stderr=True)
        self.quiet, self.share = quiet, share
        self.counts = {t.label: min(most or len(t.items), len(t.items)) for t in tasks}
        self.weights = {task.label: _characters(task) for task in tasks}
        self.total = sum(self.weights[k] * n for k, n in self.counts.items())
        self.done = dict.fromkeys(self.counts, 0)
        self.weighed = 0.0
        self.bar: RichProgress | None = None
        if not quiet and self.console.is_terminal:
            self.bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=self.total)

    def __enter__(self) -> EvalProgress:
        self.started = self.printed = time.monotonic()
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, label: str, items: int) -> None:
        """Count finished items."""
        self.done[label] += items * self.share
        self.weighed += items * self.share * self.weights[label]
        seconds = time.monotonic() - self.started
        rate = sum(self.done.values()) / max(seconds, 1e-3)
        count = min(self.done[label], self.counts[label])
        text = f"{label} {count:,}/{self.counts[label]:,}, {rate:,.1f} items/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.weighed, description=text)
        elif not self.quiet and time.monotonic() - self.printed >= LINE_EVERY:
            self.printed = time.monotonic()
            left = seconds * max(self.total / self.weighed - 1, 0)
            print(f"{text}, {duration(left)} left", file=self.console.file, flush=True)


def _characters(task: Any) -> float:
    """Estimate the characters of an item's prompt."""
    some = task.items[:50]
    own = sum(len(str(record)) for record in some) / len(some)
    return own * (task.shots + 1)
