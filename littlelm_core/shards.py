# From chapters/05_shards.md by `littlelm book export`: edit the chapter.
"""Tokens on disk: a file format, rows packed from documents, a loader that resumes.

A run reads each token once, in an order that nobody may depend on but everybody must be
able to repeat. Without a format that refuses what it does not understand, a wrong
vocabulary trains silently on noise; without packing, much of the machine computes on
padding; without a loader whose whole state is four small values, a killed run reads
some text twice and some never.

What the hardware wants: files that are mapped, not loaded; few, large, sequential
writes; no work per token in Python; rows of one fixed width.

Shapes: D documents, R rows, S segments (pieces of documents in rows), B rows of a
batch, T tokens of a row as the model sees it, W = T + 1 ids of a row on disk.
"""

import hashlib
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from littlelm_core.config import DataError, register

__all__ = [
    "BLOCK",
    "FORMAT_VERSION",
    "HEADER",
    "IGNORED",
    "Loader",
    "MAGIC",
    "PLAN_VERSION",
    "PackReport",
    "Piece",
    "Pieces",
    "RESTS",
    "RowPlan",
    "RowWriter",
    "Shard",
    "ValidationRows",
    "atomic_file",
    "check_ids",
    "check_vocabulary",
    "fill_row",
    "load_plan",
    "open_shards",
    "pack_best_fit",
    "permute",
    "plan_in_order",
    "plan_rows",
    "split_shards",
    "token_dtype",
    "write_shard",
]


# ---- The file

MAGIC = b"LLMSHARD"
FORMAT_VERSION = 1
BLOCK = 65_536  # ids under one checksum: small enough to check only what is read
# magic, version, header bytes, bytes of an id, ids of a block, vocabulary, documents,
# tokens, digest of this header and of the footer; 64 bytes, little-endian
HEADER = struct.Struct("<8sIIIIQQQ16s")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest of uint16 and uint32 that holds the ids 0 … vocab_size - 1.

    Raises DataError: a vocabulary that is not a number from 1 to 2**32.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int | np.integer):
        raise DataError(f"vocab_size = {vocab_size!r} is not an integer")
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"vocab_size = {vocab_size} must be from 1 to 2**32")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def check_ids(document: Sequence[int], vocab_size: int, where: str) -> np.ndarray:
    """Return a document's ids as an integer array; refuse what a cast would change.

    Raises DataError: ids that are no integers, negative, or >= vocab_size.
    """
    ids = np.asarray(document)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{where} is not a flat list of integer ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise DataError(f"{where} has the id {wrong}: the vocabulary is {vocab_size}")
    return ids


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `path` that takes its name only when all is on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_shard(
    path: str | Path, documents: Iterable[Sequence[int]], vocab_size: int
) -> "Shard":
    """Write documents of ids, each starting with BOS, to one file; return it opened.

    documents: any iterable of lists or integer arrays; they are not all held in memory.
    The file: 64 bytes of header, the ids of all documents on end (little-endian, uint16
    where the vocabulary allows, else uint32), then the documents' offsets (uint64,
    one more than documents) and a CRC-32 for each block of 65,536 ids.
    Raises DataError: an id that is no integer, negative or >= vocab_size. Nothing is
    left under `path` then, nor after a crash.
    """
    dtype = token_dtype(vocab_size)
    offsets, checksums, checksum, room = [0], [], 0, BLOCK * dtype.itemsize
    with atomic_file(path) as file:
        file.write(bytes(HEADER.size))
        for number, document in enumerate(documents):
            ids = check_ids(document, vocab_size, f"{path}: document {number}")
            data = memoryview(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + len(ids))
            file.write(data)
            while len(data):
                part, data = data[:room], data[room:]
                checksum, room = zlib.crc32(part, checksum), room - len(part)
                if room == 0:
                    checksums.append(checksum)
                    checksum, room = 0, BLOCK * dtype.itemsize
        if offsets[-1] % BLOCK:
            checksums.append(checksum)
        footer = _footer(offsets, checksums)
        file.write(bytes(-file.tell() % 8) + footer)
        sizes = (dtype.itemsize, BLOCK, vocab_size, len(offsets) - 1, offsets[-1])
        file.seek(0)
        file.write(_header(sizes, footer))
    return Shard(path)


def _footer(offsets: Sequence[int], checksums: Sequence[int]) -> bytes:
    offsets, checksums = np.array(offsets, "<u8"), np.array(checksums, "<u4")
    return offsets.tobytes() + checksums.tobytes()


def _header(sizes: tuple[int, ...], footer: bytes) -> bytes:
    """Pack the header; its digest covers its own sizes and the whole footer."""
    start = (MAGIC, FORMAT_VERSION, HEADER.size, *sizes)
    unsigned = HEADER.pack(*start, bytes(16))
    return HEADER.pack(
        *start, hashlib.blake2b(unsigned + footer, digest_size=16).digest()
    )


class Shard:
    """A shard that is open for reading; `shard[i]` is document i as an array of ids.

    Opening maps the file and checks header and footer; a block of ids is checked
    against its checksum, and its ids against the vocabulary, the first time that it is
    read, so that opening 100 GB takes no time and no wrong id gets through.

    Attributes: path, vocab_size, dtype, tokens (how many), offsets_D (int64, one more
    than documents), fingerprint (hex: equal for equal contents).
    Raises DataError: no such file, not a shard, another format version, damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                raw, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(
                f"cannot open the shard {path}: {error.strerror}"
            ) from error
        if len(raw) < HEADER.size or not raw.startswith(MAGIC):
            raise DataError(f"{path} is not a shard: prepare the data again")
        _, version, start, item, block, vocab, documents, tokens, digest = (
            HEADER.unpack(raw)
        )
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has shard format {version}, this littlelm reads "
                f"{FORMAT_VERSION}: prepare the data again or update littlelm"
            )
        blocks = -(-tokens // block) if block else 0
        footer_at = start + tokens * item + (-tokens * item) % 8
        expected = footer_at + 8 * (documents + 1) + 4 * blocks
        if start != HEADER.size or item not in (2, 4) or size != expected:
            raise self._damaged(f"{size:,} bytes where its header says {expected:,}")
        raw_footer = np.memmap(self.path, np.uint8, "r", footer_at)
        self._offsets_D = raw_footer[: 8 * (documents + 1)].view("<u8")
        self._checksums = raw_footer[8 * (documents + 1) :].view("<u4").tolist()
        if (
            _header((item, block, vocab, documents, tokens), raw_footer.tobytes())
            != raw
        ):
            raise self._damaged("header or offsets do not match their digest")
        self.vocab_size, self.tokens, self.fingerprint = vocab, tokens, digest.hex()
        self.dtype = np.dtype(f"<u{item}")
        self.offsets_D = np.asarray(self._offsets_D).astype(np.int64)
        self._block, self._unchecked = block, set(range(blocks))
        mapped = np.memmap(self.path, self.dtype, "r", start, tokens) if tokens else ()
        self._ids = np.asarray(mapped, self.dtype)  # a plain view of the mapped file

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"{self.path} is truncated or damaged ({reason}): copy it again, or delete "
            "it and prepare the data again"
        )

    def __len__(self) -> int:
        return len(self.offsets_D) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Return document i, ids of the file's dtype. Raises IndexError, DataError."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} documents, no number {i}")
        start, stop = self.span(i % len(self))
        return self.read(start, stop).copy()

    def span(self, i: int) -> tuple[int, int]:
        """Return where document i starts and stops: Python ints, which never wrap."""
        return int(self.offsets_D[i]), int(self.offsets_D[i + 1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids start … stop - 1 of all documents on end, a read-only view."""
        if self._unchecked and stop > start:
            for block in range(start // self._block, (stop - 1) // self._block + 1):
                if block in self._unchecked:
                    self._check(block)
        return self._ids[start:stop]

    def _check(self, block: int) -> None:
        ids = self._ids[block * self._block : (block + 1) * self._block]
        if zlib.crc32(ids) != self._checksums[block]:
            raise self._damaged(f"block {block} of its ids has another checksum")
        if ids.max() >= self.vocab_size:
            raise DataError(
                f"{self.path} has the id {ids.max()}, its vocabulary is "
                f"{self.vocab_size}: prepare the data again"
            )
        self._unchecked.discard(block)

    def verify(self) -> None:
        """Check every block now. Raises DataError."""
        for block in sorted(self._unchecked):
            self._check(block)


# ---- Rows from documents


@dataclass(frozen=True)
class PackReport:
    """What packing did: rows · (row_len + 1) = tokens - dropped + added."""

    documents: int
    tokens: int
    rows: int
    dropped: int  # tokens that are in no row
    added: int  # BOS ids put before the second and later pieces of a document

    @property
    def dropped_share(self) -> float:
        """The share of all tokens that are in no row."""
        return self.dropped / self.tokens if self.tokens else 0.0

    def __add__(self, other: "PackReport") -> "PackReport":
        return PackReport(*(getattr(self, f) + getattr(other, f) for f in _COUNTS))


_COUNTS = ("documents", "tokens", "rows", "dropped", "added")


class Piece(NamedTuple):
    """What is left of a document: the ids from `at` to `stop`; it starts at `head`."""

    head: int
    at: int
    stop: int

    @property
    def size(self) -> int:
        """The ids it takes in a row: its own, and a BOS before a later piece."""
        return self.stop - self.at + (self.at > self.head)


class Pieces:
    """Pieces waiting for a row: a stack for each size, a bit for each that has some."""

    def __init__(self, width: int):
        self.stacks: list[list[Piece]] = [[] for _ in range(width + 1)]
        self.present = 0

    def add(self, piece: Piece) -> None:
        """Let a piece of at most `width` ids wait."""
        self.stacks[piece.size].append(piece)
        self.present |= 1 << piece.size

    def take(self, size: int) -> Piece:
        """Return the last piece added of this size; it waits no longer."""
        piece = self.stacks[size].pop()
        if not self.stacks[size]:
            self.present ^= 1 << size
        return piece

    def longest(self, room: int | None = None) -> int:
        """Return the largest size there is, or that fits into `room`; 0: none."""
        bits = self.present if room is None else self.present & ((2 << room) - 1)
        return max(0, bits.bit_length() - 1)

    def shortest(self) -> int:
        """Return the smallest size there is; 0: none."""
        return max(0, (self.present & -self.present).bit_length() - 1)


class RowPlan(NamedTuple):
    """Which pieces of the documents make up which row; row r is segments
    first_R[r] … first_R[r + 1] - 1, each `length` ids from `start` on."""

    first_R: np.ndarray  # int64, rows + 1
    start_S: np.ndarray  # int64, places among the ids of all documents on end
    length_S: np.ndarray  # int64
    report: PackReport


class RowWriter:
    """Collects the segments of a plan, row after row of `width` ids."""

    def __init__(self, width: int):
        self.width = self.room = width
        self.first, self.start, self.length = [0], [], []
        self.added = self._added = 0

    def put(self, piece: Piece) -> Piece:
        """Put into the row what fits of a piece; return what is left of it."""
        head, at, stop = piece
        if at > head:  # a later piece: the document's own BOS stands before it
            self._segment(head, 1)
            self._added += 1
        taken = min(stop - at, self.room)
        if taken:
            self._segment(at, taken)
        return Piece(head, at + taken, stop)

    def _segment(self, start: int, length: int) -> None:
        self.start.append(start)
        self.length.append(length)
        self.room -= length

    def close(self) -> None:
        """End the row; what is not closed does not count."""
        self.first.append(len(self.start))
        self.added, self.room = self._added, self.width

    def plan(self, offsets: Sequence[int]) -> RowPlan:
        """Return the rows that were closed, as a plan with its report."""
        last, tokens = self.first[-1], offsets[-1] - offsets[0]
        parts = self.first, self.start[:last], self.length[:last]
        first_R, start_S, length_S = (np.array(p, np.int64) for p in parts)
        dropped = tokens + self.added - int(length_S.sum())
        counts = len(offsets) - 1, tokens, len(self.first) - 1, dropped, self.added
        return RowPlan(first_R, start_S, length_S, PackReport(*counts))


RESTS = ("drop", "keep")


def plan_rows(offsets_D: np.ndarray, row_len: int, rest: str = "drop") -> RowPlan:
    """Plan rows of row_len + 1 ids by best fit, from the documents' offsets alone.

    Each row takes the longest piece that still fits, again and again. When nothing
    fits, one is cut: with rest = "drop" the shortest, and what is cut off is dropped,
    so that each piece is the start of a document (the rule of nanochat, there over a
    small buffer); with "keep" the longest, and what is cut off goes on in another row
    behind a BOS of its own. Ids that do not fill a last row are dropped.
    Raises DataError: row_len < 1, an unknown rule.
    """
    if row_len < 1 or rest not in RESTS:
        raise DataError(f"row_len = {row_len} (>= 1), rest = {rest!r} (drop or keep)")
    width, keep = row_len + 1, rest == "keep"
    offsets = [int(o) for o in offsets_D]
    rows, pieces = RowWriter(width), Pieces(width)
    for stop, head in pairwise(reversed(offsets)):  # so that the first waits on top
        piece = Piece(head, head, stop)
        while piece.size > width and (keep or piece.at == head):
            piece = rows.put(piece)
            rows.close()
        if piece.at < stop and (keep or piece.at == head):
            pieces.add(piece)
    while pieces.present:
        size = pieces.longest(rows.room)
        if not size:
            size = pieces.longest() if keep else pieces.shortest()
        piece = rows.put(pieces.take(size))
        if keep and piece.at < piece.stop:
            pieces.add(piece)
        if rows.room == 0:
            rows.close()
    return rows.plan(offsets)


def pack_best_fit(
    docs: Sequence[Sequence[int]], row_len: int, rest: str = "drop"
) -> tuple[np.ndarray, PackReport]:
    """Pack documents that start with BOS into rows_RW of row_len + 1 ids (int64).

    Every row is full and starts with BOS; no id stands in two rows (but for the BOS
    that rest = "keep" puts before the later pieces of a long document). The report
    says what was dropped; rules as in `plan_rows`.
    """
    docs = [check_ids(d, 2**63, f"document {n}") for n, d in enumerate(docs)]
    ids = np.concatenate([np.empty(0, np.int64), *docs])
    offsets = np.cumsum([0, *map(len, docs)])
    plan = plan_rows(offsets, row_len, rest)
    rows_RW = np.empty((plan.report.rows, row_len + 1), np.int64)
    for row, out_W in enumerate(rows_RW):
        fill_row(out_W, plan, row, lambda start, stop: ids[start:stop])
    return rows_RW, plan.report


def fill_row(
    out_W: np.ndarray,
    plan: RowPlan,
    row: int,
    read: Callable[[int, int], np.ndarray],
) -> int:
    """Copy the pieces of one row to the front of out_W; return how many ids they are.

    read: gives the ids from start to stop, of all documents on end (`Shard.read`).
    """
    first, last = plan.first_R[row : row + 2].tolist()
    starts = plan.start_S[first:last].tolist()
    at = 0
    for start, length in zip(starts, plan.length_S[first:last].tolist(), strict=True):
        out_W[at : at + length] = read(start, start + length)
        at += length
    return at


# ---- A plan that is kept

PLAN_VERSION = 1  # raise it when plan_rows changes its mind: old plans are made again


def load_plan(shard: Shard, row_len: int, rest: str = "drop") -> RowPlan:
    """Return the shard's row plan, from the file beside it or made now and kept there.

    The plan lies beside the shard as `.NAME.rows-ROW_LEN-REST.npy`, one array of int64
    that is mapped, not loaded. One that is damaged, or made for another content or by
    another version, is made again; a folder that cannot be written costs time only.
    """
    path = shard.path.with_name(f".{shard.path.name}.rows-{row_len}-{rest}.npy")
    made_for = np.frombuffer(bytes.fromhex(shard.fingerprint), "<i8").tolist()
    made_for += [PLAN_VERSION, row_len]
    with suppress(OSError, EOFError, ValueError, IndexError, TypeError):
        flat = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        rows, segments = flat[7], len(flat) - 12 - flat[7]
        checked = zlib.crc32(np.ascontiguousarray(flat[1:])) == flat[0]
        if checked and flat[1:5].tolist() == made_for and segments % 2 == 0:
            cuts = np.cumsum([11, rows + 1, segments // 2])
            first, start, length = np.split(flat, cuts)[1:]
            return RowPlan(first, start, length, PackReport(*flat[5:10].tolist()))
    plan = plan_rows(shard.offsets_D, row_len, rest)
    counts = [getattr(plan.report, f) for f in _COUNTS]
    flat = np.concatenate([[0, *made_for, *counts, 0], *plan[:3]]).astype("<i8")
    flat[0] = zlib.crc32(flat[1:])
    with suppress(OSError), atomic_file(path) as file:
        np.save(file, flat)
    return plan


# ---- The order of an epoch


def _mix(x_N: np.ndarray, key: int) -> np.ndarray:
    """Scramble 64-bit numbers (the finalizer of SplitMix64; Steele et al., 2014)."""
    z = x_N.astype(np.uint64) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index_N: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return where a seeded permutation of 0 … size - 1 sends each index (int64).

    A Feistel network over pairs (high, low) of about sqrt(size) each; what falls
    outside is sent on until it falls inside (Black and Rogaway, 2002). No table: any
    place of the order of 30 million rows is computed alone, the same on every machine
    and under every version of numpy.
    """
    keys = np.frombuffer(
        hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=64).digest(), "<u8"
    ).tolist()
    low_size = math.isqrt(size - 1) + 1
    high_size = -(-size // low_size)
    result_N = np.asarray(index_N, np.int64).copy()
    outside = np.arange(len(result_N))
    while len(outside):
        high, low = (
            part.astype(np.uint64) for part in divmod(result_N[outside], low_size)
        )
        for number, key in enumerate(keys):
            if number % 2:
                high = (high + _mix(low, key)) % np.uint64(high_size)
            else:
                low = (low + _mix(high, key)) % np.uint64(low_size)
        result_N[outside] = (high * np.uint64(low_size) + low).astype(np.int64)
        outside = outside[result_N[outside] >= size]
    return result_N


# ---- The loader


def open_shards(shards: Iterable[Shard | str | Path]) -> list[Shard]:
    """Open shards given by path, sorted by file name. Raises DataError.

    Refuses an empty list and shards of different vocabularies.
    """
    opened = [s if isinstance(s, Shard) else Shard(s) for s in shards]
    if not opened:
        raise DataError("no shards: run littlelm data prepare, or check the folder")
    opened.sort(key=lambda s: (s.path.name, s.fingerprint))
    for shard in opened[1:]:
        if shard.vocab_size != opened[0].vocab_size:
            raise DataError(
                f"{shard.path} has a vocabulary of {shard.vocab_size}, "
                f"{opened[0].path} of {opened[0].vocab_size}: prepare both with one "
                "tokenizer"
            )
    return opened


def check_vocabulary(shard: Shard, vocab_size: int) -> None:
    """Raise DataError when a shard's vocabulary is not the model's."""
    if shard.vocab_size != vocab_size:
        raise DataError(
            f"the vocabulary is {vocab_size} but that of {shard.path} is "
            f"{shard.vocab_size}: set tokenizer.vocab_size = {shard.vocab_size} or "
            "prepare the data with this tokenizer"
        )


@register("loader", "packed")
class Loader:
    """Yields (inputs_BT, targets_BT), int64, for ever; targets are the next ids.

    Rows come from best-fit packing of each shard. An epoch visits every row once over
    all ranks, in an order of its own; the next epoch follows in the same batch, so
    that no row is left over. Batch number n takes the world · batch_rows rows from
    position n · world · batch_rows on, and each rank its share of them: rows per
    optimizer step being equal, any world size reads the same rows in the same step.

    shards: `Shard`s or paths, in any order. batch_rows: rows of one rank's batch.
    rest: what becomes of a document that is cut, as in `plan_rows`.
    vocab_size: refuse shards of another vocabulary.
    Attributes: rows (of an epoch), report (of packing), epoch, position, fingerprint.
    Raises DataError: no shards, damaged ones, less data than one batch.
    """

    def __init__(
        self,
        shards: Iterable[Shard | str | Path],
        batch_rows: int,
        row_len: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        rest: str = "drop",
        vocab_size: int | None = None,
    ):
        if batch_rows < 1 or not 0 <= rank < world:
            raise DataError(
                f"batch_rows = {batch_rows}, rank = {rank}, world = {world}: need "
                "batch_rows >= 1 and 0 <= rank < world"
            )
        self.shards = open_shards(shards)
        if vocab_size is not None:
            check_vocabulary(self.shards[0], vocab_size)
        self.batch_rows, self.row_len, self.seed = batch_rows, row_len, seed
        self.rank, self.world = rank, world
        # Ranks begin with different shards, so that they share the work of planning.
        turn = rank * len(self.shards) // world
        plans = [load_plan(s, row_len, rest) for s in self._turned(turn)]
        self._plans = plans[len(plans) - turn :] + plans[: len(plans) - turn]
        self.report = sum((p.report for p in self._plans), PackReport(0, 0, 0, 0, 0))
        self._first_row = np.cumsum([0, *(p.report.rows for p in self._plans)])
        self.rows = self.report.rows
        if self.rows < world * batch_rows:
            raise DataError(
                f"the data gives {self.rows} rows of {row_len + 1} ids "
                f"({self.report.tokens:,} tokens), fewer than one batch of "
                f"{world * batch_rows}: add text, or lower the rows or the context"
            )
        if self.report.dropped_share > 0.5 and rank == 0:
            warnings.warn(
                f"packing drops {self.report.dropped_share:.0%} of the tokens: most "
                f"documents are longer than {row_len} tokens; loader.rest = 'keep' "
                "goes on with their rests",
                stacklevel=2,
            )
        names = [str(PLAN_VERSION), str(row_len), rest]
        names += [s.fingerprint for s in self.shards]
        digest = hashlib.blake2b(" ".join(names).encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()
        self._consumed = 0  # rows that all ranks together have taken, over all epochs
        self._order: tuple[int, int, np.ndarray] | None = None

    def _turned(self, turn: int) -> list[Shard]:
        return self.shards[turn:] + self.shards[:turn]

    @property
    def epoch(self) -> int:
        """How many times every row has been given."""
        return self._consumed // self.rows

    @property
    def position(self) -> int:
        """How many rows of the current epoch all ranks together have taken."""
        return self._consumed % self.rows

    @property
    def vocab_size(self) -> int:
        return self.shards[0].vocab_size

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows_B = self._rows_at(self._consumed + self.rank * self.batch_rows)
        shard_B = np.searchsorted(self._first_row, rows_B, "right") - 1
        rows_B = rows_B - self._first_row[shard_B]
        batch_BW = np.empty((self.batch_rows, self.row_len + 1), np.int64)
        rows = zip(batch_BW, shard_B.tolist(), rows_B.tolist(), strict=True)
        for out_W, shard, row in rows:
            fill_row(out_W, self._plans[shard], row, self.shards[shard].read)
        self._consumed += self.world * self.batch_rows
        return _shift(batch_BW)

    def _rows_at(self, place: int) -> np.ndarray:
        """Return batch_rows rows from one place of the endless order on."""
        parts, missing = [], self.batch_rows
        while missing:
            epoch, index = divmod(place, self.rows)
            start = index - index % 4096  # places are computed in blocks of so many
            if self._order is None or self._order[:2] != (epoch, start):
                index_N = np.arange(start, min(start + 4096, self.rows))
                rows_N = permute(index_N, self.rows, self.seed, epoch)
                self._order = (epoch, start, rows_N)
            parts.append(self._order[2][index - start :][:missing])
            place, missing = place + len(parts[-1]), missing - len(parts[-1])
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, str | int]:
        """Return all that is needed to go on; the same on every rank."""
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, str | int]) -> None:
        """Go on where any rank of any world size stopped, in the order of its seed.

        Raises DataError: the state belongs to other data, row length or rule.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the checkpoint was made on other data ({state['fingerprint']}, now "
                f"{self.fingerprint}): give it the same shards, context and "
                "loader.rest, or start in a new run_dir"
            )
        self.seed, self._order = int(state["seed"]), None
        self._consumed = int(state["epoch"]) * self.rows + int(state["position"])


def _shift(batch_BW: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each contiguous: the one place where they part."""
    inputs_BT = np.ascontiguousarray(batch_BW[:, :-1])
    targets_BT = np.ascontiguousarray(batch_BW[:, 1:])
    return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)


# ---- Validation

IGNORED = -100  # a target that counts nothing, torch's convention


def plan_in_order(offsets_D: np.ndarray, row_len: int) -> RowPlan:
    """Plan rows of row_len + 1 ids, document after document; the last may be shorter.

    Nothing is dropped: what does not fit a row goes on in the next behind a BOS, so
    each id that is not the first of a document is a target exactly once.
    """
    rows, offsets = RowWriter(row_len + 1), [int(o) for o in offsets_D]
    for head, stop in pairwise(offsets):
        piece = Piece(head, head, stop)
        while piece.at < stop:
            piece = rows.put(piece)
            if rows.room == 0:
                rows.close()
    if rows.room < rows.width:
        rows.close()
    return rows.plan(offsets)


class ValidationRows:
    """Batches of rows in order, each once: (inputs_BT, targets_BT) of fixed shape.

    Every id of the shards that does not start a document is a target exactly once
    over all ranks (first ids may be targets too: they are special ids, which bits per
    byte leaves out). Missing rows and places have the target -100. All ranks get the
    same number of batches, whatever the number of rows: none waits for another.

    max_tokens: score about so many targets, in rows spread evenly; -1: all.
    Raises DataError: no shards, no documents in them, another vocabulary.
    """

    def __init__(
        self,
        shards: Iterable[Shard | str | Path],
        batch_rows: int,
        row_len: int,
        rank: int = 0,
        world: int = 1,
        max_tokens: int = -1,
        vocab_size: int | None = None,
    ):
        self.shards = open_shards(shards)
        if vocab_size is not None:
            check_vocabulary(self.shards[0], vocab_size)
        self.batch_rows, self.row_len = batch_rows, row_len
        self.rank, self.world = rank, world
        self._plans = [plan_in_order(s.offsets_D, row_len) for s in self.shards]
        rows = [(s, r) for s, p in enumerate(self._plans) for r in range(p.report.rows)]
        if not rows:
            raise DataError(f"{self.shards[0].path} has no documents to validate on")
        wanted = len(rows) if max_tokens == -1 else -(-max_tokens // row_len)
        wanted = max(1, min(wanted, len(rows)))
        self._rows = [rows[i * len(rows) // wanted] for i in range(wanted)]

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return -(-len(self._rows) // (self.batch_rows * self.world))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(len(self)):
            first = (number * self.world + self.rank) * self.batch_rows
            batch = np.zeros((self.batch_rows, self.row_len + 1), np.int64)
            filled_B = np.zeros((self.batch_rows, 1), np.int64)
            rows = self._rows[first : first + self.batch_rows]
            for place, (shard, row) in enumerate(rows):
                read = self.shards[shard].read
                filled = fill_row(batch[place], self._plans[shard], row, read)
                filled_B[place] = filled
            inputs_BT, targets_BT = _shift(batch)
            empty_BT = np.arange(1, self.row_len + 1) >= filled_B
            yield inputs_BT, targets_BT.masked_fill(torch.from_numpy(empty_BT), IGNORED)


def split_shards(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Return (train, validation) by file name alone, each sorted.

    Names with the word "validation" or "val" are validation; where no name has it, the
    first by name is. More shards never move one from one side to the other, as long
    as their names sort behind the first.
    Raises DataError: fewer than two shards, or nothing left to train on.
    """
    paths = sorted({Path(p) for p in paths}, key=lambda p: (p.name, str(p)))
    if len(paths) < 2:
        raise DataError(
            f"{len(paths)} shard is not enough: one is needed for training and one for "
            "validation; prepare the data in smaller shards"
        )
    named = [
        p for p in paths if re.search(r"(^|[^a-z])val(idation)?([^a-z]|$)", p.name)
    ]
    validation = named or paths[:1]
    train = [p for p in paths if p not in validation]
    if not train:
        raise DataError("all shards are validation by name: none is left to train on")
    return train, validation
