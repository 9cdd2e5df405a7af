"""What a run prints: what it is about to do, a bar with rate and time left, results.

In a terminal a bar of rich; anywhere else (a file, CI) a plain line now and then.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from littlelm_core.config import RunConfig

LINE_EVERY = 10.0  # seconds between plain lines


def duration(seconds: float) -> str:
    """Return a time as "45 s", "4 min 05 s" or "3 h 20 min"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def table(rows: list[list[str]]) -> str:
    """Return rows as aligned text; numbers (all but the first column) to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def core_name(record: dict[str, Any]) -> str:
    """Return the name of a CORE report's or record's score: its suite, or no CORE."""
    some = " (a sample)" if record.get("sample") else ""  # older logs do not say
    if record["core"] is not None:
        return f"{record['suite']}{some}"
    number = len(record["tasks"])
    tasks = f"{record['suite']} task{'s' * (number != 1)}"
    return f"centered mean of {number} {tasks}{some}"


def core_score(record: dict[str, Any]) -> str:
    """Return the score of a CORE report or record with its 95 % interval."""
    low, high = record["interval"]
    return f"{record['mean_of_tasks']:.4f} (95 % interval {low:.4f} to {high:.4f})"


class Progress:
    """The terminal side of a run. total and done are optimizer steps."""

    def __init__(self, total: int, done: int = 0, quiet: bool = False):
        self.total, self.done, self.quiet = total, done, quiet
        self.printed = -LINE_EVERY
        self.bar: RichProgress | None = None
        if not quiet and sys.stdout.isatty():
            self.console = Console(highlight=False)
            self.bar = RichProgress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=total, completed=done)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """Print text, above the bar where there is one."""
        if self.bar is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        elif not self.quiet:
            print(text, flush=True)

    def announce(self, run: RunConfig, facts: dict[str, Any]) -> None:
        """Say what is about to run, how long it may take and where it all goes."""
        rows = [["group", "tensors", "parameters", "peak lr", "weight decay"]]
        for group in facts["groups"]:
            decay = group["weight_decay"]
            rows.append(
                [
                    group["name"],
                    str(group["tensors"]),
                    f"{group['parameters']:,}",
                    f"{group['lr']:g}",
                    "-" if decay is None else f"{decay:g}",
                ]
            )
        total = facts["parameters"]["total"]
        rows.append(["total", str(sum(int(r[1]) for r in rows[1:])), f"{total:,}"])
        rows[-1] += ["", ""]
        compiled = ", compiled" if facts["compile"] else ""
        where = f"{facts['processes']} x {facts['device']}"
        if facts["device"] == "cpu":
            where += f" with {facts['threads']} thread(s)"
        steps = self.total - self.done
        tokens = facts["tokens_per_step"]
        self.say(f"run {run.name} on {where}, {facts['precision']}{compiled}")
        if conversion := facts.get("conversion"):
            self.say(conversion["text"])
        self.say(table(rows))
        self.say(
            f"a step: {tokens:,} tokens = {facts['rows']} rows x {facts['context']} x "
            f"{facts['grad_accum']} micro-batch(es) x {facts['processes']} process(es)"
        )
        if facts["resumed"]:
            self.say(f"going on from {facts['resumed']}")
        self.say(
            f"to do: {steps:,} steps = {steps * tokens:,} tokens, about "
            f"{duration(facts['seconds_expected'])} (without validation)"
        )
        self.say(f"outputs: {run.run_dir} (metrics.jsonl, report.html, checkpoints)")
        if self.bar is not None:
            self.bar.start()

    def train(self, record: dict[str, Any]) -> None:
        """Move the bar by one train record."""
        loss = "skipped" if record["loss"] is None else f"loss {record['loss']:.3f}"
        rate = f"{record['tokens_per_second']:,.0f} tokens/s"
        if record["mfu"] is not None:
            rate += f", MFU {record['mfu']:.1%}"
        if self.bar is not None:
            self.bar.update(
                self.task, completed=record["step"], description=f"{loss}, {rate}"
            )
            return
        self.seconds = record["seconds"]
        now = time.monotonic()
        if now - self.printed >= LINE_EVERY or record["step"] == self.total:
            self.printed = now
            taken = max(record["step"], 1)
            left = (self.total - record["step"]) * record["seconds"] / taken
            self.say(
                f"step {record['step']}/{self.total}  {loss}  {rate}  "
                f"{duration(left)} left"
            )

    def validation(self, record: dict[str, Any]) -> None:
        """Say bits per byte of each domain."""
        scores = ", ".join(
            f"{domain} {score['bits_per_byte']:.3f}"
            for domain, score in record["domains"].items()
        )
        self.say(f"validation at step {record['step']}, bits per byte: {scores}")

    def core(self, record: dict[str, Any]) -> None:
        """Say the score of a CORE evaluation, its interval and what it took."""
        self.say(
            f"{core_name(record)} at step {record['step']}: {core_score(record)}, "
            f"in {duration(record['seconds'])}"
        )

    def sample(self, record: dict[str, Any]) -> None:
        """Show a sample on one line."""
        text = f"{record['prompt']} | {record['text']}"
        text = " ".join(text.split())
        self.say(f"sample, {record['domain']}: {text[:200]}")

    def finish(self, result: Any) -> None:
        """Say how it ended and what to do next."""
        skipped = result.skipped_steps
        more = f", {skipped} of them skipped" if skipped else ""
        self.say(
            f"{'stopped' if result.interrupted else 'done'} at step {result.steps}"
            f"{more}: {result.tokens:,} tokens, loss {result.final_loss:.4f}"
        )
        if result.interrupted:
            self.say("saved; the same command goes on from here")
