"""The row of `data curate`: memory that does not grow with the input.

A tenth of the input and then all of it, each by the command in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from littlelm_core import corpus
from littlelm_core.bench.measure import Row
from littlelm_core.config import LittleLMError
from littlelm_core.ingest.find import WORK

PAGE = 3_000  # characters
WORKERS = 2
OPTIONS = ("--filters", "gopher_quality", "--workers", str(WORKERS))


def noisy_pages(size: int, seed: int = 1) -> Iterator[bytes]:
    """Yield JSON lines of about `size` bytes: the default corpus, again and again.

    Each copy of a page but the first has up to a tenth of its words changed; one in
    ten has none.
    """
    draw = np.random.default_rng(seed)
    pages: list[list[str]] = []
    for domain in corpus.domains():
        for text in corpus.documents(domain, "train"):
            cuts = range(0, len(text), PAGE)
            pages += [text[at : at + PAGE].split(" ") for at in cuts]
    written = number = 0
    while written < size:
        for page in pages:
            words = page
            if number >= len(pages) and draw.random() > 0.1:
                words = page.copy()
                changes = draw.binomial(len(words), draw.uniform(0, 0.1))
                for at in draw.integers(0, len(words), changes):
                    words[at] = f"noise{at}"
            line = json.dumps({"id": number, "text": " ".join(words)}).encode() + b"\n"
            yield line
            number += 1
            written += len(line)
            if written >= size:
                return


def curate(quick: bool = False) -> list[Row]:
    """1 GB of noisy repetition by two processes, and a tenth of it."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise LittleLMError("the memory of processes is read from /proc: use Linux")
    size = 2_000_000 if quick else 1_000_000_000
    found = []
    with tempfile.TemporaryDirectory(prefix="littlelm-curate-") as folder:
        for part in (size // 10, size):
            source, out = Path(folder) / f"{part}.jsonl", Path(folder) / f"out-{part}"
            with source.open("wb") as file:
                file.writelines(noisy_pages(part))
            seconds, peak, disk = _measure(source, out)
            manifest = json.loads((out / "curated.json").read_text("utf-8"))
            found.append((source.stat().st_size, seconds, peak, disk, manifest))
            source.unlink()
    (_, _, low, _, _), (read, seconds, peak, disk, manifest) = found
    sizes = {int(k): v for k, v in manifest["clusters"]["sizes"].items()}
    note = (
        f"{read / 1e6:,.0f} MB, {manifest['read']['documents']:,} documents, "
        f"{manifest['kept']['documents']:,} kept, largest cluster {max(sizes):,}; "
        f"{WORKERS} workers, {seconds:,.0f} s; temporary files {disk / 1e6:,.0f} MB; "
        f"options {' '.join(OPTIONS)}"
    )
    return [
        Row(
            "curate, peak memory", "a tenth of the input", peak / 1e6, low / 1e6,
            "MB", low / peak, 0.8, [low / peak], note,
        ),
        Row(
            "curate, speed", "0.5 MB/s a worker", read / 1e6 / seconds, None, "MB/s",
            read / 1e6 / seconds / (0.5 * WORKERS), 1.0,
            [read / 1e6 / seconds / (0.5 * WORKERS)], note,
        ),
    ]  # fmt: skip


def _measure(source: Path, out: Path) -> tuple[float, int, int]:
    """Run the command; return (seconds, peak bytes of memory, of temporary files)."""
    command = [sys.executable, "-m", "littlelm_core", "data", "curate"]
    command += [str(source), str(out), *OPTIONS]
    start, peak, disk = time.perf_counter(), 0, 0
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    while process.poll() is None:
        peak = max(peak, sum(map(_memory, _family(process.pid))))
        disk = max(disk, _size(out / WORK))
        time.sleep(0.2)
    reader.join()
    if process.returncode:
        raise LittleLMError(f"data curate failed: {' '.join(said)[-500:]}")
    return time.perf_counter() - start, peak, disk


def _family(process: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield process
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))
    except OSError:  # it has ended meanwhile
        return


def _memory(process: int) -> int:
    """Return bytes of memory; what several share is divided among them."""
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(where) / name).stat().st_size
            except OSError:
                continue
    return total
