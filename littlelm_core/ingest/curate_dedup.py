"""Deduplication of more documents than fit into memory.

Each part has left files with what is needed of its documents: `docs` (hash of the text,
size, where its shingles end), `bands` (keys of the MinHash bands) and `sets` (sorted
shingles). Documents are numbered through all parts. Band by band, the keys are
scattered into buckets that fit into memory; documents that share a key and no cluster
yet are compared, and pairs that are alike enough are united. What comes out is the
same as of `curation.deduplicate` over all texts at once: one memory-mapped array, for
each document the lowest number of its cluster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from littlelm_core.curation import jaccard
from littlelm_core.ingest.pool import Pool
from littlelm_core.ingest.write import write_json
from littlelm_core.shards import atomic_file

BUCKET_BYTES = 32_000_000  # of keys that are sorted at once
CHUNK = 65_536  # documents handled at once
PATIENCE = 256  # comparisons in a group of documents with one key, for each of them
KEPT, EXACT, NEAR = 0, 1, 2

DOC = np.dtype([("hash", "<u8", (2,)), ("size", "<u8"), ("row", "<u8"), ("end", "<u8")])
KEYED = np.dtype([("key", "<u8"), ("doc", "<u8")])
PAIR = np.dtype([("first", "<u8"), ("second", "<u8")])


class Documents(NamedTuple):
    """The files of all parts, seen as one list of documents by number."""

    stems: tuple[Path, ...]  # of each part's files: stem.docs, stem.bands, stem.sets
    starts: tuple[int, ...]  # number of each part's first document, and their sum
    bands: int  # 0: no near duplicates are looked for

    def rows(self, place: int, what: str) -> np.ndarray:
        """Return "docs", "bands" or "sets" of one part, memory-mapped."""
        path = self.stems[place].with_suffix(f".{what}")
        if path.stat().st_size == 0:
            empty = np.empty(0, DOC if what == "docs" else np.uint64)
            return empty.reshape(0, self.bands) if what == "bands" else empty
        if what == "docs":
            return np.asarray(np.memmap(path, DOC, "r"))
        flat = np.asarray(np.memmap(path, np.dtype("<u8"), "r"))
        return flat.reshape(-1, self.bands) if what == "bands" else flat

    def chunks(self, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the first document, rows) of CHUNK documents at most."""
        for place, first in enumerate(self.starts[:-1]):
            rows = self.rows(place, what)
            for at in range(0, len(rows), CHUNK):
                yield first + at, rows[at : at + CHUNK]

    def part_of(self, document: int) -> tuple[int, int]:
        """Return (place of the part, number within the part) of a document."""
        place = int(np.searchsorted(self.starts, document, side="right")) - 1
        return place, document - self.starts[place]


class Alike:
    """Tells whether two documents are duplicates, by their numbers.

    threshold: least Jaccard similarity of their shingles; None: equal hashes.
    """

    def __init__(self, documents: Documents, threshold: float | None):
        self.documents, self.threshold = documents, threshold
        self.held: dict[int, tuple[np.ndarray, IO[bytes] | None]] = {}

    def __call__(self, first: int, second: int) -> bool:
        """Return whether the two are duplicates."""
        a, b = self._seen(first), self._seen(second)
        if self.threshold is None:
            return bool((a == b).all())
        low, high = sorted((len(a), len(b)))
        return low >= self.threshold * high and jaccard(a, b) >= self.threshold

    def _seen(self, document: int) -> np.ndarray:
        place, number = self.documents.part_of(document)
        if place not in self.held:
            if len(self.held) > 200:  # a process may not open many more files
                self.held.clear()
            path = self.documents.stems[place].with_suffix(".sets")
            # Read, not mapped: what is mapped stays in memory while there is room.
            sets = None if self.threshold is None else path.open("rb", buffering=0)
            self.held[place] = self.documents.rows(place, "docs"), sets
        docs, sets = self.held[place]
        if sets is None:
            return docs["hash"][number]
        start, end = int(docs["end"][number - 1]) if number else 0, docs["end"][number]
        sets.seek(8 * start)
        return np.frombuffer(sets.read(8 * (int(end) - start)), "<u8")


class Clusters(NamedTuple):
    """For each document its cluster's lowest number, and how it was found."""

    root: np.ndarray  # (documents,) uint64
    kind: np.ndarray  # (documents,) uint8: KEPT, EXACT or NEAR
    compared: int  # pairs whose shingles were compared
    rejected: int  # of these, pairs that were too unlike
    hasty: int  # groups of one key with more than PATIENCE comparisons a document

    def sizes(self) -> dict[int, int]:
        """Return {documents: clusters of so many}, ascending."""
        if not len(self.root):
            return {}
        members = np.bincount(np.asarray(self.root).astype(np.int64))
        size, count = np.unique(members[members > 0], return_counts=True)
        return dict(zip(size.tolist(), count.tolist(), strict=True))


def cluster(
    documents: Documents,
    threshold: float | None,
    folder: Path,
    pool: Pool,
    advance: Callable[[], None] = lambda: None,
    exact: bool = True,
) -> Clusters:
    """Find the clusters of all documents; the arrays lie in `folder`.

    threshold: least Jaccard similarity of the shingles of a near duplicate. exact:
    look for any duplicates at all. `advance` is called after each band, and once for
    the exact duplicates. Buckets that are done in `folder` are not done again.
    """
    if (folder / "done.json").exists():
        return open_clusters(folder)
    count = documents.starts[-1]
    folder.mkdir(parents=True, exist_ok=True)
    root = _array(folder / "root.bin", np.dtype("<u8"), count)
    kind = _array(folder / "kind.bin", np.dtype("u1"), count)
    for at in range(0, count, CHUNK):
        root[at : at + CHUNK] = np.arange(at, min(at + CHUNK, count))

    def exact_keys() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for first, rows in documents.chunks("docs"):
            yield 0, np.arange(first, first + len(rows)), rows["hash"][:, 0]

    def near_keys() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for first, rows in documents.chunks("bands"):
            alone = np.flatnonzero(kind[first : first + len(rows)] == KEPT)
            for band in range(documents.bands):
                yield band, alone + first, rows[alone, band]

    counts = np.zeros(3, np.int64)
    stages = [("exact", exact_keys, 1, None, EXACT)] if exact else []
    if documents.bands:
        stages.append(("near", near_keys, documents.bands, threshold, NEAR))
    for name, keys, width, least, mark in stages:
        buckets = scatter(keys(), width, count, folder / name)
        for band in buckets:
            jobs = [
                (path, documents, folder / "root.bin", least)
                for path in band
                if not path.with_suffix(".pairs").exists()
            ]
            size = sum(path.stat().st_size for path, *_ in jobs) * 20
            pool.run(find_pairs, jobs, size)
            for path in band:
                found = np.fromfile(path.with_suffix(".pairs"), PAIR)
                unite(root, found[2:])
                if least is not None:
                    head = found[:2].view(np.uint64).astype(np.int64)
                    counts += head[:3]
            flatten(root)
            if isinstance(root, np.memmap):
                root.flush()
            advance()
        for at in range(0, count, CHUNK):
            here = slice(at, min(at + CHUNK, count))
            moved = root[here] != np.arange(here.start, here.stop)
            kind[here][moved & (kind[here] == KEPT)] = mark
    for array in (root, kind):
        if isinstance(array, np.memmap):
            array.flush()
    write_json(folder / "done.json", [count, *counts.tolist()])
    return Clusters(root, kind, *counts.tolist())


def open_clusters(folder: Path) -> Clusters:
    """Return what `cluster` has left in a folder."""
    count, *counts = json.loads((folder / "done.json").read_text("utf-8"))
    arrays = [
        np.memmap(folder / name, dtype, "r", shape=(count,))
        if count
        else np.empty(0, dtype)
        for name, dtype in (("root.bin", "<u8"), ("kind.bin", "u1"))
    ]
    return Clusters(*arrays, *counts)


def _array(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Return a new array of zeros in a file, memory-mapped."""
    with path.open("wb") as file:
        file.truncate(max(count, 1) * dtype.itemsize)
    return np.memmap(path, dtype, "r+", shape=(count,)) if count else np.empty(0, dtype)


# ---- Keys into buckets


def scatter(
    keys: Iterator[tuple[int, np.ndarray, np.ndarray]],
    width: int,
    count: int,
    folder: Path,
) -> list[list[Path]]:
    """Write (key, document) into buckets; return the paths of each band's.

    keys: (band, document numbers, keys). A bucket holds all documents of its keys, and
    about BUCKET_BYTES; what was scattered as a whole before stays.
    """
    split = 4 + count * KEYED.itemsize // BUCKET_BYTES
    paths = [
        [folder / f"{band:02d}-{i:05d}.keys" for i in range(split)]
        for band in range(width)
    ]
    if (folder / "scattered").exists():
        return paths
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (path for band in paths for path in band):
        path.touch()
    for band, numbers, found in keys:
        rows = np.empty(len(found), KEYED)
        rows["key"], rows["doc"] = found, numbers
        bucket = (found >> np.uint64(32)) % np.uint64(split)
        for i in np.unique(bucket).tolist():
            with paths[band][i].open("ab") as file:
                file.write(rows[bucket == i].tobytes())
    (folder / "scattered").touch()
    return paths


def find_pairs(
    path: Path,
    documents: Documents,
    roots: Path,
    threshold: float | None,
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    """Compare the documents of a bucket that share a key; write pairs of duplicates.

    Documents of one cluster are not compared any more. The first two rows are counts:
    compared, rejected, groups given up (see PATIENCE).
    """
    rows = np.fromfile(path, KEYED)
    rows = rows[np.lexsort((rows["doc"], rows["key"]))]
    found, counts, alike = [], np.zeros(4, np.uint64), Alike(documents, threshold)
    if len(rows):
        root = np.memmap(roots, np.dtype("<u8"), "r")
        cluster_of = np.asarray(root[rows["doc"]])
        starts = np.flatnonzero(np.append(True, rows["key"][1:] != rows["key"][:-1]))
        sizes = np.diff(starts, append=len(rows))
        apart = cluster_of != np.repeat(cluster_of[starts], sizes)
        work = np.logical_or.reduceat(apart, starts)
        for start, size in zip(
            starts[work].tolist(), sizes[work].tolist(), strict=True
        ):
            here = slice(start, start + size)
            pairs, compared, hasty = _compare_group(
                rows["doc"][here].tolist(), cluster_of[here].tolist(),
                alike,
            )  # fmt: skip
            found += pairs
            counts[:3] += np.array([compared, compared - len(pairs), hasty], np.uint64)
    with atomic_file(path.with_suffix(".pairs")) as file:
        file.write(counts.tobytes())
        file.write(np.array(found, np.uint64).tobytes())
    path.unlink(missing_ok=True)


def _compare_group(
    documents: list[int], clusters: list[int], alike: Callable[[int, int], bool]
) -> tuple[list[tuple[int, int]], int, bool]:
    """Return (pairs, comparisons, given up?) that unite all a group has in common.

    Every document is compared with those of all other clusters, until they are one: so
    it does not matter in which order or in which buckets documents are found.
    """
    members: dict[int, list[int]] = {}
    for document, number in zip(documents, clusters, strict=True):
        members.setdefault(number, []).append(document)
    pairs: list[tuple[int, int]] = []
    limit, compared = PATIENCE * len(documents), 0
    while len(members) > 1:
        front = members.pop(next(iter(members)))
        while front and members:
            one = front.pop(0)
            for number, others in list(members.items()):
                for other in others:
                    if compared >= limit:
                        return pairs, compared, True
                    compared += 1
                    if alike(one, other):
                        pairs.append((min(one, other), max(one, other)))
                        front += members.pop(number)
                        break
    return pairs, compared, False


# ---- Clusters


def unite(root: np.ndarray, pairs: np.ndarray) -> None:
    """Join the clusters that pairs connect; changes root in place.

    root: a forest in which every link leads to a lower number.
    """
    first, second = pairs["first"], pairs["second"]
    while len(first):
        a, b = find_roots(root, first), find_roots(root, second)
        apart = a != b
        first, second = a[apart], b[apart]
        np.minimum.at(root, np.maximum(first, second), np.minimum(first, second))


def find_roots(root: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the root of each document; the way there is shortened."""
    found = root[documents]
    while not np.array_equal(above := root[found], found):
        found = above
    root[documents] = found
    return found


def flatten(root: np.ndarray) -> None:
    """Let every link lead to a root."""
    for at in range(0, len(root), CHUNK):  # what is before is flat already
        here = root[at : at + CHUNK]
        while not np.array_equal(above := root[here], here):
            here[:] = above
