"""Tokens of an evaluation's prompts, kept on disk between evaluations."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

FLAGS = ("truncated", "border")


def write_tokens(path: Path, examples: Iterable[Any]) -> None:
    """Write examples of `core_eval`; what rows share with an item's first, once.

    A disk that takes none costs the time to encode them again, and a warning.
    """
    ids, table = [], []
    for example in examples:
        first = example.rows[0].ids
        flags = sum(getattr(example, name) << bit for bit, name in enumerate(FLAGS))
        for number, (row, start) in enumerate(example.rows):
            shared = _shared(first, row) if number else 0
            ids.append(row[shared:])
            table.append((example.index, len(row), shared, start, flags))
    flat = np.concatenate(ids)
    flat = flat.astype(np.uint16) if flat.max() < 1 << 16 else flat
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, ids=flat, table=np.array(table, dtype=np.int64))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        text = f"tokens of prompts are not kept in {path.parent}: {error.strerror}"
        warnings.warn(text, stacklevel=2)


def read_tokens(
    path: Path,
) -> list[tuple[int, list[tuple[np.ndarray, int]], dict[str, bool]]] | None:
    """Return (index, (ids, start) of each row, flags) of items; None without a file.

    A file that cannot be read is as good as none: it is written anew.
    """
    try:
        with np.load(path) as stored:
            flat, table = stored["ids"].astype(np.int32), stored["table"].tolist()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    found: dict[int, tuple[list[tuple[np.ndarray, int]], dict[str, bool]]] = {}
    at = 0
    for index, length, shared, start, bits in table:
        flags = {name: bool(bits >> bit & 1) for bit, name in enumerate(FLAGS)}
        rows = found.setdefault(index, ([], flags))[0]
        ids = flat[at : at + length - shared]
        at += length - shared
        rows.append(
            (np.concatenate((rows[0][0][:shared], ids)) if shared else ids, start)
        )
    return [(index, rows, flags) for index, (rows, flags) in found.items()]


def _shared(first: np.ndarray, row: np.ndarray) -> int:
    shortest = min(len(first), len(row))
    unequal = first[:shortest] != row[:shortest]
    return int(unequal.argmax()) if unequal.any() else shortest
