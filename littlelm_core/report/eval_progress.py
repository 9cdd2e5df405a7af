"""The progress of an evaluation: a bar of rich, or a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from littlelm_core.report.terminal import LINE_EVERY, duration


class EvalProgress:
    """Called as progress(label, items) by `evaluate`; a context around it.

    The time left is by characters of prompts: tasks differ a hundredfold in length.
    tasks: of `core_eval`. most: items of each that are scored; None: all. share: one of
    how many processes this is, all of which are as fast. known: items of each label
    that an earlier evaluation has scored: they come first and take no time. say: prints
    plain lines, in place of a bar on stderr. quiet: say nothing.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        most: int | None,
        share: int = 1,
        known: Mapping[str, int] | None = None,
        say: Callable[[str], None] | None = None,
        quiet: bool = False,
    ) -> None:
        self.quiet, self.share = quiet, share
        self.counts = {t.label: min(most or len(t.items), len(t.items)) for t in tasks}
        self.weights = {task.label: _characters(task) for task in tasks}
        self.known = {label: (known or {}).get(label, 0) for label in self.counts}
        self.done = dict.fromkeys(self.counts, 0)
        self.total = self._weigh(self.counts) - self._weigh(self.known)
        self.fresh, self.weighed = 0, 0.0  # of the items that are scored now
        self.bar: RichProgress | None = None
        console = Console(highlight=False, stderr=True)
        if not quiet and say is None and console.is_terminal:
            self.bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("", total=self.total)
        self.say = say or (lambda text: print(text, file=console.file, flush=True))

    def _weigh(self, items: Mapping[str, int]) -> float:
        return sum(self.weights[label] * number for label, number in items.items())

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
        before = max(self.done[label], self.known[label])
        self.done[label] += items * self.share
        fresh = max(self.done[label] - before, 0)
        self.fresh += fresh
        self.weighed += fresh * self.weights[label]
        now = time.monotonic()
        rate = self.fresh / max(now - self.started, 1e-3)
        count = min(self.done[label], self.counts[label])
        text = f"{label} {count:,}/{self.counts[label]:,}, {rate:,.1f} items/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.weighed, description=text)
        elif not self.quiet and fresh and now - self.printed >= LINE_EVERY:
            self.printed = now
            left = (now - self.started) * max(self.total / self.weighed - 1, 0)
            self.say(f"{text}, {duration(left)} left")


def _characters(task: Any) -> float:
    """Estimate the characters of an item's prompt."""
    some = task.items[:50]
    own = sum(len(str(record)) for record in some) / len(some)
    return own * (task.shots + 1)
