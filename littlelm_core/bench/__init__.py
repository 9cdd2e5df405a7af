"""`littlelm bench`: ours and named peers, side by side in one run, with the bars.

Every row compares the same work (equal tokens, ranks or losses are asserted) on the
same threads, in turns. The result goes to a JSON file with versions and machine.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from littlelm_core.config import ConfigError, nearest
from littlelm_core.report.terminal import table as text_table

__all__ = ["ROWS", "main", "run"]

# What can be asked for, and the function that measures it.
ROWS = {
    "train": "littlelm_core.bench.models:train",
    "bpe": "littlelm_core.bench.text:bpe",
    "encode": "littlelm_core.bench.text:encoding",
    "loader": "littlelm_core.bench.text:loader",
    "generate": "littlelm_core.bench.models:generation",
    "muon": "littlelm_core.bench.optim:muon",
    "fp8": "littlelm_core.bench.fp8:emulation",
    "minhash": "littlelm_core.bench.curation:minhash",
    "heuristics": "littlelm_core.bench.curation:heuristics",
    "core": "littlelm_core.bench.core:core",
}
# Only when it is asked for: it takes many minutes and gigabytes of disk.
LONG = {"curate": "littlelm_core.bench.curate:curate"}
# Whole trainings, with options and a store of their own: the command starts them.
ABLATIONS = ("fixes", "mixture")
PEERS = (
    "torch", "transformers", "tokenizers", "tiktoken", "rustbpe", "numpy", "datasketch",
    "datatrove", "pyarrow", "zstandard",
)  # fmt: skip


def find(what: str) -> str:
    """Return where one of ROWS or LONG is. Raises ConfigError for another name."""
    known = ROWS | LONG
    if what in ABLATIONS:
        raise ConfigError(f"{what} trains, so it runs alone: littlelm bench {what}")
    if what not in known:
        valid = nearest(what, [*known, *ABLATIONS])
        raise ConfigError(f"no benchmark is called {what!r}{valid}")
    return known[what]


def run(what: str, quick: bool = False, model: str = "") -> list[Any]:
    """Measure one of ROWS or LONG. Raises ConfigError for another name.

    model: "hf:FOLDER" of a model that `core` measures in place of its own.
    """
    module, _, name = find(what).partition(":")
    more = {"model": model} if model and what == "core" else {}
    return getattr(importlib.import_module(module), name)(quick, **more)


def main(
    what: Sequence[str],
    console: Console,
    quick: bool = False,
    threads: int = 1,
    folder: Path = Path("data/benchmarks"),
    model: str = "",
) -> list[Any]:
    """Measure what is asked for (ROWS if nothing), print a table, write the JSON."""
    for name in what:
        find(name)  # a wrong name is refused before anything is measured
    # Before the libraries start their pools: they read these once.
    os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    names, rows = list(what) or list(ROWS), []
    try:
        for name in names:
            with console.status(f"measuring {name}"):
                found = run(name, quick, model)
            rows += found
            for row in found:
                line = f"{row.what}: {row.ratio:.2f}x {row.peer} ({row.note})"
                console.print(line, markup=False, soft_wrap=True)
    finally:
        torch.set_num_threads(before)
    console.print("\n" + table(rows, threads), markup=False, soft_wrap=True)
    label = "all" if set(names) == set(ROWS) else "-".join(names)
    label += f"-{Path(model).name}" if model else ""
    path = write(rows, folder, label + ("-quick" if quick else ""), threads)
    console.print(f"wrote {path}", soft_wrap=True)
    return rows


def table(rows: Sequence[Any], threads: int) -> str:
    """Return the rows as text, with the bar and the verdict of each."""
    lines = [[f"{threads} thread(s)", "ours", "peer", "unit", "ratio", "bar", "bar is"]]
    for row in rows:
        spread = f"{min(row.ratios):.2f}-{max(row.ratios):.2f}"
        lines.append(
            [
                row.what,
                short(row.ours),
                "-" if row.theirs is None else short(row.theirs),
                row.unit,
                f"{row.ratio:.2f}x ({spread})",
                "-" if row.bar is None else f"{row.bar:.2f}x",
                {None: "-", True: "met", False: "MISSED"}[row.passes],
            ]
        )
    return text_table(lines)


def short(value: float) -> str:
    """Return a rate in four characters or so: "1,640", "98.3M"."""
    for unit, size in (("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write(rows: Sequence[Any], folder: Path, label: str, threads: int) -> Path:
    """Write the rows with versions, machine and commit; return the path."""
    from littlelm_core.bench.peers import version
    from littlelm_core.doctor import machine

    now = datetime.datetime.now().astimezone()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{label}.json"
    result = {
        "time": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "threads": threads,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": [version(name) for name in PEERS],
        "machine": machine() | {"threads": threads},
        "rows": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def commit() -> str | None:
    """Return the clone's commit, "+" behind it when files differ from it."""
    root = Path(__file__).resolve().parents[2]
    try:
        commit, changed = (
            subprocess.run(
                ["git", *command], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
