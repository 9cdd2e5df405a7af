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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from littlelm_core.config import ConfigError, DataError, register

__all__ = [
    "BLOCK",
    "FORMAT_VERSION",
    "HEADER",
    "IGNORED",
    "Loader",
    "MAGIC",
    "PLAN_VERSION",
    "PackReport",
    "PackedRows",
    "Pieces",
    "RowPlan",
    "Shard",
    "ValidationRows",
    "atomic_file",
    "check_ids",
    "domain_of",
    "load_plan",
    "make_batch",
    "open_shards",
    "pack_best_fit",
    "permute",
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
    """Return the smaller of uint16 and uint32 that holds ids 0 … vocab_size - 1."""
    whole = isinstance(vocab_size, int | np.integer) and vocab_size is not True
    if not (whole and 1 <= vocab_size <= 2**32):
        raise DataError(f"vocab_size = {vocab_size!r} is no integer from 1 to 2**32")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def check_ids(document: Sequence[int], vocab_size: int, where: str) -> np.ndarray:
    """Return ids as an array; raise DataError where a cast would change one."""
    ids = np.asarray(document)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{where} is not a flat list of integer ids")
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        raise DataError(
            f"{where} has the id {wrong[0]}: the vocabulary is {vocab_size}"
        )
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
    The file, little-endian: 64 bytes of header, the ids of all documents on end (uint16
    where the vocabulary allows, else uint32), the documents' offsets (uint64, one more
    than documents) and a CRC-32 for each block of 65,536 ids.
    Raises DataError: an id that is no integer, negative or >= vocab_size; `path` stays
    what it was then, as after a crash.
    """
    dtype = token_dtype(vocab_size)
    offsets, checksums, waiting = [0], [], bytearray()

    def write_block() -> None:
        block = waiting[: BLOCK * dtype.itemsize]
        checksums.append(zlib.crc32(block))
        file.write(block)
        del waiting[: len(block)]

    with atomic_file(path) as file:
        file.write(bytes(HEADER.size))
        for number, document in enumerate(documents):
            ids = check_ids(document, vocab_size, f"{path}: document {number}")
            offsets.append(offsets[-1] + len(ids))
            waiting += ids.astype(dtype).tobytes()
            while len(waiting) >= BLOCK * dtype.itemsize:
                write_block()
        if waiting:
            write_block()
        footer = np.array(offsets, "<u8").tobytes()
        footer += np.array(checksums, "<u4").tobytes()
        file.write(bytes(-file.tell() % 8) + footer)
        file.seek(0)
        sizes = dtype.itemsize, BLOCK, vocab_size, len(offsets) - 1, offsets[-1]
        file.write(_header(sizes, footer))
    return Shard(path)


def _header(sizes: tuple[int, ...], footer: bytes) -> bytes:
    """Pack the header; its digest covers its own sizes and the whole footer."""
    start = MAGIC, FORMAT_VERSION, HEADER.size, *sizes
    unsigned = HEADER.pack(*start, bytes(16))
    return HEADER.pack(
        *start, hashlib.blake2b(unsigned + footer, digest_size=16).digest()
    )


class Shard:
    """A shard that is open for reading; `shard[i]` is document i as an array of ids.

    Opening maps the file and checks header and offsets; the ids of a block are checked
    against checksum and vocabulary when it is first read: opening 100 GB takes no time.

    Attributes: path, vocab_size, dtype, tokens (how many), offsets_D (int64, one more
    than documents), fingerprint (hex: equal for equal contents).
    Raises DataError: no such file, not a shard, another format version, damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            raw = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise self._useless(f"cannot be opened ({error})") from error
        header = raw[: HEADER.size].tobytes()
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._useless("is not a shard")
        _, version, _, item, _, vocab, documents, tokens, digest = HEADER.unpack(header)
        if version != FORMAT_VERSION:
            raise self._useless(f"has the shard format {version}, not {FORMAT_VERSION}")
        end = HEADER.size + tokens * item
        footer = raw[end + -end % 8 :]
        if header != _header((item, BLOCK, vocab, documents, tokens), footer.tobytes()):
            raise self._useless("is truncated, or its header or offsets are damaged")
        self.vocab_size, self.tokens, self.fingerprint = vocab, tokens, digest.hex()
        self.dtype = np.dtype(f"<u{item}")
        self._ids = raw[HEADER.size : end].view(self.dtype)
        self.offsets_D = footer[: 8 * (documents + 1)].view("<i8")
        self._checksums = footer[8 * (documents + 1) :].view("<u4")
        self._unchecked = set(range(len(self._checksums)))

    def _useless(self, reason: str) -> DataError:
        return DataError(f"{self.path} {reason}: copy it or prepare the data again")

    def __len__(self) -> int:
        return len(self.offsets_D) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.read(*self.span(range(len(self))[i])).copy()

    def span(self, i: int) -> tuple[int, int]:
        """Return where document i starts and stops: Python ints, which never wrap."""
        return int(self.offsets_D[i]), int(self.offsets_D[i + 1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids start … stop - 1 of all documents on end, a read-only view."""
        if self._unchecked:
            blocks = range(start // BLOCK, -(-stop // BLOCK))
            for block in self._unchecked.intersection(blocks):
                self._check(block)
        return self._ids[start:stop]

    def _check(self, block: int) -> None:
        ids = self._ids[block * BLOCK : (block + 1) * BLOCK]
        if zlib.crc32(ids) != self._checksums[block]:
            raise self._useless(f"is damaged (checksum of block {block})")
        if ids.max() >= self.vocab_size:
            raise self._useless(f"has the id {ids.max()}, of {self.vocab_size} ids")
        self._unchecked.discard(block)


# ---- Rows from documents


class PackReport(NamedTuple):
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


class Pieces:
    """Pieces waiting for a row: a stack for each size, a bit for each that has some.

    A piece is (added, start, stop): the ids start … stop - 1 of a document, and one
    place more for a BOS that is added where the document has been cut.
    """

    def __init__(self, longest: int):
        self.stacks = [[] for _ in range(longest + 1)]
        self.present = 0

    def add(self, added: int, start: int, stop: int) -> None:
        """Let a piece wait, unless it is empty; `longest` and more is one size."""
        if start < stop:
            size = min(added + stop - start, len(self.stacks) - 1)
            self.stacks[size].append((added, start, stop))
            self.present |= 1 << size

    def take(self, room: int, cut_longest: bool = False) -> tuple[int, int, int]:
        """Return the longest piece that fits `room`; if none does, one to be cut."""
        sizes = self.present & ((2 << room) - 1)
        if not sizes:
            sizes = self.present if cut_longest else self.present & -self.present
        size = sizes.bit_length() - 1
        piece = self.stacks[size].pop()
        if not self.stacks[size]:
            self.present ^= 1 << size
        return piece


class RowPlan(NamedTuple):
    """Which pieces of the documents make up which row; row r is segments
    first_R[r] … first_R[r + 1] - 1, each `length` ids from `start` on."""

    first_R: np.ndarray  # int64, rows + 1
    start_S: np.ndarray  # int64, places among the ids of all documents on end
    length_S: np.ndarray  # int64
    report: PackReport

    def row(self, r: int, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Return the ids of row r; read(start, stop) gives ids (`Shard.read`)."""
        first, last = self.first_R[r : r + 2].tolist()
        starts = self.start_S[first:last].tolist()
        spans = zip(starts, self.length_S[first:last].tolist(), strict=True)
        return np.concatenate([read(at, at + length) for at, length in spans])


def plan_rows(
    offsets_D: np.ndarray, row_len: int, rest: str = "drop", in_order: bool = False
) -> RowPlan:
    """Plan rows of row_len + 1 ids by best fit, from the documents' offsets alone.

    Each row takes the longest piece that still fits, again and again. When nothing
    fits, one is cut: with rest = "drop" the shortest, and what is cut off is dropped,
    so that each piece is the start of a document (the rule of nanochat, there over a
    small buffer); with "keep" the longest, and what is cut off goes on in another row
    behind a BOS of its own. Ids that do not fill a last row are dropped.
    in_order: take documents as they come instead, and let the last row be shorter.
    Raises DataError: row_len < 1, an unknown rule.
    """
    if row_len < 1 or rest not in ("drop", "keep"):
        raise DataError(f"row_len = {row_len} (>= 1), rest = {rest!r} (drop or keep)")
    waiting = Pieces(0 if in_order else row_len + 1)  # one stack keeps their order
    for stop, start in pairwise(offsets_D[::-1].tolist()):  # the first lies on top
        waiting.add(0, start, stop)
    keep, room, row, rows = rest == "keep", row_len + 1, [], []
    while waiting.present:
        added, start, stop = waiting.take(room, cut_longest=keep)
        end = min(stop, start + room - added)
        row += [(-1, 1)] * added + [(start, end - start)]
        room -= added + end - start
        if keep:
            waiting.add(1, end, stop)
        if room == 0 or (in_order and not waiting.present):
            rows.append(row)
            room, row = row_len + 1, []
    segments = np.array([segment for row in rows for segment in row], np.int64)
    start_S, length_S = np.ascontiguousarray(segments.reshape(-1, 2).T)
    tokens, added = int(offsets_D[-1]), int((start_S < 0).sum())
    dropped = tokens + added - int(length_S.sum())
    report = PackReport(len(offsets_D) - 1, tokens, len(rows), dropped, added)
    first_R = np.cumsum([0, *map(len, rows)])
    # The first of all ids, which is a BOS, stands for each that is added.
    return RowPlan(first_R, np.maximum(start_S, 0), length_S, report)


def pack_best_fit(
    docs: Sequence[Sequence[int]], row_len: int, rest: str = "drop"
) -> tuple[np.ndarray, PackReport]:
    """Pack documents that start with BOS into rows_RW of row_len + 1 ids (int64).

    Every row is full and starts with BOS; no id stands in two rows, but for the BOS
    before a later piece of a document. The report says what was dropped; rules as in
    `plan_rows`.
    """
    docs = [check_ids(d, 2**63, f"document {n}") for n, d in enumerate(docs)]
    ids = np.concatenate([*docs, np.empty(0, np.int64)], dtype=np.int64)
    plan = plan_rows(np.cumsum([0, *map(len, docs)]), row_len, rest)
    rows_RW = np.empty((plan.report.rows, row_len + 1), np.int64)
    for r, row_W in enumerate(rows_RW):
        row_W[:] = plan.row(r, lambda start, stop: ids[start:stop])
    return rows_RW, plan.report


# ---- A plan that is kept

PLAN_VERSION = 1  # raise it when plan_rows changes its mind: old plans are made again


def load_plan(shard: Shard, row_len: int, rest: str = "drop") -> RowPlan:
    """Return the shard's row plan, from the file beside it or made now and kept there.

    One that is damaged, or made for another content or by another version, is made
    again; a folder that cannot be written costs time only.
    """
    path = shard.path.with_name(f".{shard.path.name}.rows-{row_len}-{rest}.npz")
    made_for = f"{shard.fingerprint} {PLAN_VERSION}"
    with suppress(Exception), np.load(path) as kept:  # whatever is wrong with the file
        if kept["made_for"] == made_for:
            first_R, start_S, length_S, report = (kept[f] for f in RowPlan._fields)
            return RowPlan(first_R, start_S, length_S, PackReport(*report.tolist()))
    plan = plan_rows(shard.offsets_D, row_len, rest)
    with suppress(OSError), atomic_file(path) as file:
        np.savez(file, made_for=made_for, **plan._asdict())
    return plan


# ---- The order of an epoch


def _mix(x_N: np.ndarray, key: int) -> np.ndarray:
    """Scramble 64-bit numbers (the finalizer of SplitMix64; Steele et al., 2014)."""
    z = x_N + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index_N: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return where a seeded permutation of 0 … size - 1 sends each index (int64).

    A Feistel network over pairs (high, low) of about sqrt(size) each; what falls
    outside is sent on until it falls inside (Black and Rogaway, 2002). No table: any
    place is computed alone, the same on every machine and under every numpy.
    """
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=64).digest()
    low_size = np.uint64(math.isqrt(size - 1) + 1)
    high_size = np.uint64(-(-size // int(low_size)))
    result_N = np.array(index_N, np.uint64)
    outside = np.arange(len(result_N))
    while len(outside):
        high, low = divmod(result_N[outside], low_size)
        for number, key in enumerate(np.frombuffer(digest, "<u8")):
            if number % 2:
                high = (high + _mix(low, key)) % high_size
            else:
                low = (low + _mix(high, key)) % low_size
        result_N[outside] = high * low_size + low
        outside = outside[result_N[outside] >= size]
    return result_N.astype(np.int64)


_PLACES = 4096  # are computed at once, since 20 take nearly as long


@lru_cache(maxsize=64)
def _order(size: int, seed: int, epoch: int, start: int) -> np.ndarray:
    """Return the rows at the places start … start + _PLACES - 1 of an epoch."""
    return permute(np.arange(start, min(start + _PLACES, size)), size, seed, epoch)


# ---- The loader


def open_shards(shards: Iterable[Shard | str | Path]) -> list[Shard]:
    """Open shards given by path, sorted by file name.

    Raises DataError: an empty list, shards of different vocabularies.
    """
    opened = [s if isinstance(s, Shard) else Shard(s) for s in shards]
    if not opened:
        raise DataError("no shards: run littlelm data prepare, or check the folder")
    example = {s.vocab_size: str(s.path) for s in opened}
    if len(example) > 1:
        raise DataError(
            f"not one vocabulary but {example}: prepare all shards with one tokenizer"
        )
    return sorted(opened, key=lambda s: (s.path.name, s.fingerprint))


IGNORED = -100  # a target that counts nothing, torch's convention


def make_batch(
    rows: Iterable[np.ndarray], batch_rows: int, row_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs_BT, targets_BT) of rows of ids.

    The one place where targets part from inputs; where ids or rows are missing, the
    target is -100 and the input 0.
    """
    batch_BW = np.full((batch_rows, row_len + 1), IGNORED)
    for row_W, ids in zip(batch_BW, rows, strict=False):
        row_W[: len(ids)] = ids
    batch_BW = torch.from_numpy(batch_BW)
    return batch_BW[:, :-1].clamp(min=0), batch_BW[:, 1:].contiguous()


class PackedRows(Sequence):
    """The rows of some shards on end; `rows[i]` is an array of row_len + 1 ids.

    parts: shards and their plans, as `load_plan` makes them.
    Attributes: lengths_N (the tokens that each row trains on), fingerprint (hex: equal
    for equal rows).
    """

    def __init__(self, parts: Sequence[tuple[Shard, RowPlan]], row_len: int, rest: str):
        self.parts = parts
        self.first = np.cumsum([0, *(plan.report.rows for _, plan in parts)]).tolist()
        self.lengths_N = np.broadcast_to(np.int64(row_len), self.first[-1])
        names = PLAN_VERSION, row_len, rest, *(shard.fingerprint for shard, _ in parts)
        digest = hashlib.blake2b(" ".join(map(str, names)).encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self.first[-1]

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]
        number = bisect_right(self.first, i) - 1
        shard, plan = self.parts[number]
        return plan.row(i - self.first[number], shard.read)


def domain_of(shard: Shard) -> str:
    """Return the domain in a shard's name, <split>-<domain>-<00000>[-<01>].shard."""
    name = re.fullmatch(r"[^-]+-(.+?)-\d{5}(-\d+)?", shard.path.stem)
    return name[1] if name else shard.path.stem


@register("loader", "packed")
class Loader:
    """Yields (inputs_BT, targets_BT), int64, for ever; targets are the next ids.

    Rows come from best-fit packing of each shard. An epoch visits every row once over
    all ranks, in an order of its own; the next follows in the same batch, so that no
    row is left over. Batch n is world · batch_rows rows in that order, rank after rank:
    a step of so many rows is the same on any number of ranks.

    shards: `Shard`s or paths, in any order. batch_rows: rows of one rank's batch.
    rest: what becomes of a document that is cut, as in `plan_rows`.
    Attributes: rows (of an epoch), report (of packing), epoch, position, fingerprint,
    mixture (None: the order above).
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
    ):
        if batch_rows < 1 or not 0 <= rank < world:
            raise DataError(f"batch_rows = {batch_rows} (>= 1), rank {rank} of {world}")
        self.batch_rows, self.row_len, self.seed = batch_rows, row_len, seed
        self.rank, self.world = rank, world
        self.shards = open_shards(shards)
        parts = [(shard, load_plan(shard, row_len, rest)) for shard in self.shards]
        self._packed = PackedRows(parts, row_len, rest)
        counts = zip(*(plan.report for _, plan in parts), strict=True)
        self.report = PackReport(*map(sum, counts))
        self.rows, self.fingerprint = self.report.rows, self._packed.fingerprint
        if self.rows < world * batch_rows:
            raise DataError(
                f"{self.report.tokens:,} tokens give {self.rows} rows of {row_len + 1} "
                f"ids, a batch has {world * batch_rows}: add text, or lower rows or "
                "context"
            )
        if self.report.dropped_share > 0.5 and rank == 0:
            warnings.warn(
                f"packing drops {self.report.dropped_share:.0%} of the tokens, since "
                f"documents are longer than {row_len}: set loader.rest = 'keep'",
                stacklevel=2,
            )
        self.rest, self.mixture = rest, None
        self._consumed = 0  # rows that all ranks together have taken, over all epochs

    @property
    def epoch(self) -> int:
        """How many times every row has been given."""
        return self._consumed // self.rows

    @property
    def position(self) -> int:
        """How many rows of the current epoch all ranks together have taken."""
        return self._consumed % self.rows

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mixture is None:
            rows_B = self._rows_at(self._consumed + self.rank * self.batch_rows)
            rows = [self._packed[i] for i in rows_B.tolist()]
        else:
            rows = self._picked_rows()
        batch = make_batch(rows, self.batch_rows, self.row_len)
        self._consumed += self.world * self.batch_rows
        return batch

    def _rows_at(self, place: int) -> np.ndarray:
        """Return batch_rows rows from one place of the endless order on."""
        rows: list[int] = []
        while len(rows) < self.batch_rows:
            epoch, index = divmod(place + len(rows), self.rows)
            at = index % _PLACES
            order = _order(self.rows, self.seed, epoch, index - at)
            rows += order[at : at + self.batch_rows - len(rows)].tolist()
        return np.array(rows)

    def mix(self, make: Callable[[Mapping[str, PackedRows]], Any]) -> Any:
        """Take rows in the order of a mixture of domains from now on; return it.

        make: called with {domain: its rows}, gives the mixture. Its `pick()` says
        (domain, epoch, index) of the next row of all ranks together, or None at the
        end: then missing rows have the target -100, and all ranks end together. One
        that names no row raises ConfigError.
        """
        parts: dict[str, list[tuple[Shard, RowPlan]]] = {}
        for shard, plan in self._packed.parts:
            parts.setdefault(domain_of(shard), []).append((shard, plan))
        rules = self.row_len, self.rest
        self.domains = {n: PackedRows(p, *rules) for n, p in sorted(parts.items())}
        self.mixture = make(self.domains)
        return self.mixture

    def _picked_rows(self) -> list[np.ndarray]:
        """Return this rank's rows of the batch; every rank makes every choice."""
        picks = [self.mixture.pick() for _ in range(self.world * self.batch_rows)]
        if picks[0] is None:
            raise StopIteration
        for pick in picks:  # on every rank, so that all end together
            there = range(len(self.domains.get(getattr(pick, "domain", None), ())))
            if pick is not None and getattr(pick, "index", None) not in there:
                known = ", ".join(
                    f"{n} ({len(d)} rows)" for n, d in self.domains.items()
                )
                raise ConfigError(
                    f"mixture: pick() gave {pick!r}: it must give Pick(domain, epoch, "
                    f"index), a row of {known}, or None at the end"
                )
        mine = picks[self.rank * self.batch_rows :][: self.batch_rows]
        return [self.domains[p.domain][p.index] for p in mine if p is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, on every rank the same."""
        names = "fingerprint", "seed", "epoch", "position"
        state = {name: getattr(self, name) for name in names}
        if self.mixture is not None:
            state["mixture"] = self.mixture.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where any rank of any world size stopped, in the order of its seed.

        Raises DataError: the state belongs to other data, row length or rule, or was
        made with a mixture and there is none now, or the other way round.
        """
        if ("mixture" in state) != (self.mixture is not None):
            was = "with" if "mixture" in state else "without"
            raise DataError(
                f"the checkpoint was made {was} a mixture: change [mixture] back, or "
                'start anew with mixture.use = "weighted" and weights that may change'
            )
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "the checkpoint was made on other data: give it the same shards, "
                "context and loader.rest, or start in a new run_dir"
            )
        if self.mixture is not None:
            self.mixture.load_state_dict(state["mixture"])
        self.seed = int(state["seed"])
        self._consumed = int(state["epoch"]) * self.rows + int(state["position"])


# ---- Validation


class ValidationRows:
    """Batches of rows in order, each once: (inputs_BT, targets_BT) of fixed shape.

    Every id that does not start a document is a target exactly once over all ranks
    (first ids, of no bytes, may be targets too). Missing rows and places have the
    target -100: all ranks get the same number of batches, and none waits for another.

    max_tokens: score about so many targets, in rows spread evenly; -1: all.
    Raises DataError: no shards, no documents in them.
    """

    def __init__(
        self,
        shards: Iterable[Shard | str | Path],
        batch_rows: int,
        row_len: int,
        rank: int = 0,
        world: int = 1,
        max_tokens: int = -1,
    ):
        self.batch_rows, self.row_len = batch_rows, row_len
        self.rank, self.world = rank, world
        parts = [
            (shard, plan_rows(shard.offsets_D, row_len, "keep", in_order=True))
            for shard in open_shards(shards)
        ]
        self._packed = PackedRows(parts, row_len, "keep")
        if not (rows := len(self._packed)):
            raise DataError("the validation shards have no documents: add text to them")
        wanted = rows if max_tokens == -1 else -(-max_tokens // row_len)
        wanted = max(1, min(wanted, rows))
        self._rows = [i * rows // wanted for i in range(wanted)]

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return -(-len(self._rows) // (self.batch_rows * self.world))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(len(self)):
            first = (number * self.world + self.rank) * self.batch_rows
            rows = self._rows[first : first + self.batch_rows]
            ids = (self._packed[i] for i in rows)
            yield make_batch(ids, self.batch_rows, self.row_len)


def split_shards(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Return (train, validation) by file name alone, each sorted.

    Names with the word "validation" or "val" are validation; where no name has it, the
    first by name is, so that shards that sort behind it never move one to another side.
    Raises DataError: nothing left to train on.
    """
    paths = sorted({Path(p) for p in paths}, key=lambda p: (p.name, str(p)))
    word = re.compile(r"(^|[^a-z])val(idation)?([^a-z]|$)")
    validation = [p for p in paths if word.search(p.name)] or paths[:1]
    train = [p for p in paths if p not in validation]
    if not train:
        found = f"none of {len(paths)} shards is for training by its name"
        raise DataError(f"{found}: prepare the data in smaller shards")
    return train, validation
