"""Documents that are stored as token ids: read, checked, each behind one BOS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from littlelm_core.config import nearest
from littlelm_core.ingest.read import Bad

ROWS_AT_ONCE = 2_048


class Ids(NamedTuple):
    """A stored document: its ids as they are, its cluster, its place."""

    ids: np.ndarray
    cluster: int
    place: str


def read_ids(path: Path) -> Iterator[Ids | Bad]:
    """Yield the stored documents of a parquet or JSON lines file, and bad records."""
    if path.suffix == ".parquet":
        yield from _parquet_ids(path)
    else:
        yield from _jsonl_ids(path)


def _parquet_ids(path: Path) -> Iterator[Ids | Bad]:
    row = 0
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if "tokens" not in names:
            yield Bad(str(path), f"no column 'tokens'{nearest('tokens', names)}")
            return
        columns = [n for n in ("tokens", "cluster_id") if n in names]
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
            lists = batch.column("tokens")
            lengths = pc.fill_null(pc.list_value_length(lists), 0)
            ends = np.cumsum(lengths.to_numpy(zero_copy_only=False))
            # A missing id becomes -1, which no vocabulary has.
            ids = pc.fill_null(lists.flatten(), -1).to_numpy(zero_copy_only=False)
            clusters = [-1] * len(ends)
            if "cluster_id" in columns:
                clusters = pc.fill_null(batch.column("cluster_id"), -1).to_pylist()
            start = 0
            for stop, cluster in zip(ends.tolist(), clusters, strict=True):
                row += 1
                yield Ids(ids[start:stop], cluster, f"{path}:row {row}")
                start = stop
    except (OSError, pa.ArrowException) as error:
        reason = "not a parquet file" if row == 0 else "cannot be read on"
        yield Bad(f"{path}:row {row + 1}", f"{reason}: {' '.join(str(error).split())}")


def _jsonl_ids(path: Path) -> Iterator[Ids | Bad]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place = f"{path}:{number}"
            try:
                record = json.loads(raw)
                ids = np.array(record["tokens"])
                yield Ids(ids, int(record.get("cluster_id", -1)), place)
            except (ValueError, KeyError, TypeError):
                if raw.strip():
                    yield Bad(place, "not a JSON object with a list of tokens")


def clean_ids(found: Ids, vocab_size: int, bos: int) -> list[np.ndarray] | Bad:
    """Return the documents of a record, each behind one BOS; Bad for what is none.

    GPT-2's BOS is also its end of text: where one stands inside a record, another
    document begins.
    """
    ids = found.ids
    if ids.size == 0:
        return Bad(found.place, "empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return Bad(found.place, "tokens is no flat list of ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        return Bad(found.place, f"an id that is not in 0 … {vocab_size - 1}")
    cuts = np.flatnonzero(ids == bos)
    pieces = np.split(ids, cuts) if cuts.size else [ids]
    pieces = [p[1:] if p.size and p[0] == bos else p for p in pieces]
    documents = [np.concatenate([[bos], p]).astype("<u2") for p in pieces if p.size]
    return documents or Bad(found.place, "empty")
