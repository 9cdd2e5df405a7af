"""Finished pieces of a long job on disk, so that a killed one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from littlelm_core.config import ConfigError


class Journal:
    """JSON records in a folder, one file for each process.

    The first line of each file holds the key of all that the records depend on. Raises
    ConfigError when the folder's is another one.
    """

    def __init__(self, folder: str | Path, key: str, rank: int = 0) -> None:
        folder = Path(folder)
        self.records: list[Any] = []
        for path in sorted(folder.glob("rank-*.jsonl")):
            self._read(path, key)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.jsonl"
        fresh = not path.exists() or not path.stat().st_size
        self.file = path.open("a", encoding="utf-8")
        # Another line: the last one of a killed process may be half.
        self.file.write(json.dumps({"key": key}) + "\n" if fresh else "\n")
        self.file.flush()

    def _read(self, path: Path, key: str) -> None:
        for line in path.read_text("utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                self.records.append(record)
            elif record.get("key") != key:
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
