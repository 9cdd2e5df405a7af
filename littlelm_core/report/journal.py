"""Finished pieces of a long job on disk, so that a killed one goes on."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from littlelm_core.config import ConfigError

FILES = "rank-*.jsonl"


class Journal:
    """JSON records in a folder, one file for each process.

    A file's first line, and one at each time that it is gone on with, holds the key of
    all that the records depend on. Raises ConfigError when the folder's is another one.
    """

    def __init__(self, folder: str | Path, key: str, rank: int = 0) -> None:
        folder = Path(folder)
        self.records: list[Any] = []
        for path in sorted(folder.glob(FILES)):
            self._read(path, key)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.jsonl"
        self.file = path.open("a", encoding="utf-8")
        # On another line: the last one of a killed process may be half.
        self.file.write("\n" + json.dumps({"key": key}) + "\n")
        self.file.flush()

    def _read(self, path: Path, key: str) -> None:
        for line in path.read_text("utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, list):
                self.records.append(record)
            elif record != {"key": key}:
                raise ConfigError(
                    f"{path} is of another model, tokenizer, data or rule: name "
                    "another folder, or begin anew without --resume"
                )

    def add(self, record: list[Any]) -> None:
        """Append a finished record, a list."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close this process's file."""
        self.file.close()


def recorded(folder: str | Path) -> Counter[str]:
    """Count the records of a folder by what they begin with, whatever their key."""
    found: Counter[str] = Counter()
    for path in Path(folder).glob(FILES):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                found.update(record[:1] if isinstance(record, list) else ())
    return found


def remove(folder: str | Path) -> None:
    """Delete a folder's journal, and the folder when nothing else is in it.

    Another process may do the same at the same time.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder, while it is listed
        for path in Path(folder).glob(FILES):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or it holds other files
        Path(folder).rmdir()
