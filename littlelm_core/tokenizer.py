# From chapters/01_tokenizer.md by `littlelm book export`: edit the chapter.
"""Tokenizer: bytes become ids of pieces that occur often, and back without loss.

A model reads ids. One id for each byte makes rows long, one for each word leaves out
every word that was not seen; byte pair encoding lies between: it starts from the 256
bytes and adds the pair that occurs most often, again and again. Any text has ids, no
text is lost, and common text is short.

What is here: the pattern that cuts text into words, `train_bpe`, an encoder to read
(`merge_by_rank`) beside the fast one in tiktoken that gives the same ids, special
tokens that text cannot spell by accident, and a decoder that streams.

What the hardware wants: few tokens for each byte, since every token costs the whole
model once; a vocabulary that stays small beside the model, since its table is read for
each token; and a count of rows that tiles evenly (`vocab_multiple` in the model).

Numbers: an id is an int in 0 ... vocab_size - 1; a rank is the id of a token made by
training, the lower the earlier; the special tokens follow after the last rank.
"""

import base64
import codecs
import functools
import hashlib
import heapq
import importlib
import json
import multiprocessing
import operator
import os
import re
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import regex
import tiktoken

from littlelm_core.config import ConfigError, DataError, nearest, register

__all__ = [
    "GPT2_PATTERN",
    "PairIndex",
    "SPECIAL_TOKENS",
    "SPLIT_PATTERN",
    "TextStream",
    "Tokenizer",
    "bpe_tokenizer",
    "clean_text",
    "count_words",
    "gpt2_tokenizer",
    "merge_by_rank",
    "split_text",
    "train_bpe",
]


# ---- Cut text into words

# After GPT-4's pattern, with numbers of at most two digits as in nanochat. The first
# group needs no look-ahead, which lets the engine of tiktoken run it as one automaton.
SPLIT_PATTERN = (
    r"(?:'(?i:[sdmt]|ll|ve|re)"  # the end of an English contraction
    r"|[^\r\n\p{L}\p{N}]?[\p{L}]+"  # letters, with one character before them
    r"|[\p{N}]{1,2}"  # digits, two at most
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs, with the line ends after them
    r"|\s*[\r\n])"  # line ends, with the space before them
    r"|\s+(?!\S)|\s+"  # space; its last character goes with the word that follows
)

GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
    r"|\s++$|\s+(?!\S)|\s"
)

_LONG_TEXT = 1 << 22  # characters; the pieces of a longer text are not held in a list


def clean_text(text: str) -> str:
    """Return text that UTF-8 can hold: surrogate pairs joined, lone ones U+FFFD."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@functools.cache
def _compiled(pattern: str, ascii_only: bool) -> Any:
    if ascii_only and pattern == SPLIT_PATTERN:  # the standard engine is twice as fast
        plain = pattern.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
        return re.compile(plain, re.ASCII)
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise DataError(
            f"split pattern {pattern!r} does not compile: {error}"
        ) from error


def split_text(text: str, pattern: str = SPLIT_PATTERN) -> Iterable[str]:
    """Cut text without surrogates into the pieces that merges never cross.

    Returns a list, or an iterator for a text of millions of characters.
    """
    compiled = _compiled(pattern, text.isascii())
    if not text.isascii() and not _unicode_gap().keys().isdisjoint(map(ord, text)):
        known = text.translate(_unicode_gap())  # as long as text: cuts fit both
        cuts = (m.span() for m in compiled.finditer(known))
        return [text[start:end] for start, end in cuts]
    if len(text) > _LONG_TEXT or compiled.groups:
        return map(operator.itemgetter(0), compiled.finditer(text))
    return compiled.findall(text)


@functools.cache
def _unicode_gap() -> dict[int, str]:
    """Return stand-ins for the characters that `regex` and tiktoken class differently.

    They carry tables of two Unicode versions: what the newer one knows as a letter is
    a sign to the other. tiktoken decides, so that training and encoding cut alike.
    """
    planes = (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000))
    every = "".join(map(chr, planes))
    single = {bytes([b]): b for b in range(256)}
    stand_ins = {}
    for letter_or_number, stand_in in ((r"\p{L}", "a"), (r"\p{N}", "0")):
        engine = tiktoken.Encoding(
            "class", pat_str=letter_or_number, mergeable_ranks=single, special_tokens={}
        )
        theirs = set(bytes(engine.encode_ordinary(every)).decode())
        ours = set(regex.findall(letter_or_number, every))
        stand_ins |= dict.fromkeys(map(ord, theirs - ours), stand_in)
        for character in ours - theirs:
            stand_ins.setdefault(ord(character), "\ufffd")
    return stand_ins


# ---- Count each word once


def _count(texts: Iterable[str], pattern: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_text(clean_text(text), pattern))
    return counts


def _batches(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _worker_context() -> Any:
    """Return how to start workers; None where they could not find this code.

    A forked worker needs no main guard in the caller's script, and has what a notebook
    defined. On macOS a fork is less safe, so there only for a notebook.
    """
    notebook = __name__ == "__main__"
    if "fork" in multiprocessing.get_all_start_methods() and (
        notebook or sys.platform == "linux"
    ):
        return multiprocessing.get_context("fork")
    return None if notebook else multiprocessing.get_context()


def count_words(
    texts: Iterable[str], pattern: str = SPLIT_PATTERN, workers: int = 1
) -> Counter[str]:
    """Count the pieces of all texts, which are read once and never held together.

    workers: processes that cut and count; the result does not depend on them. Where
    Python starts processes afresh (Windows), a script needs its main guard.
    Raises TypeError for a single string in place of an iterable of strings.
    """
    if isinstance(texts, str | bytes):
        raise TypeError("texts is one text, not an iterable of texts: pass [text]")
    context = _worker_context()
    if workers <= 1 or context is None:
        return _count(texts, pattern)
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = deque()
        for batch in _batches(texts):
            pending.append(pool.submit(_count, batch, pattern))
            if len(pending) > 2 * workers:  # read no further ahead than this
                counts.update(pending.popleft().result())
        for part in pending:
            counts.update(part.result())
    return counts


# ---- Find and merge pairs with vectors


class PairIndex:
    """The unique words as one array of bytes, and where each adjacent pair stands.

    first[i] is the token that begins at slot i (-1 between words, -2 inside a token),
    last[i] the token that ends there, weight[i] how often the slot's word occurs. A
    merge touches only the slots of its pair, by vector operations.

    The count of a pair never grows after the merge that made it: every new neighbor is
    the new token. So a count from then is a bound; it is made exact only when the pair
    comes up, and pairs below `floor` wait outside the heap in groups.
    """

    def __init__(self, words: Mapping[str, int]) -> None:
        encoded = [word.encode() for word in words]
        size = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        text = np.frombuffer(b"\0" + b"\0".join(encoded) + b"\0", np.uint8)
        self.first = text.astype(np.int32)
        self.first[np.concatenate(([0], np.cumsum(size)))] = -1
        self.last = self.first.copy()
        self.weight = np.zeros(len(text), np.int64)
        counts = np.fromiter(words.values(), np.int64, len(encoded))
        self.weight[1:] = np.repeat(counts, size)
        self.length = np.ones(512, np.int32)  # bytes of each token
        self.heap: list[tuple[int, int, np.ndarray]] = []  # (-count, pair, slots)
        self.groups: list[tuple[np.ndarray, ...]] = []
        self.floor = _HIGHEST
        inside = self.first >= 0
        at = np.flatnonzero(inside[:-1] & inside[1:])
        at = at.astype(np.int32 if len(text) < 2**31 else np.int64)
        self._add(self.first[at], self.first[at + 1], at)

    def _add(self, left: Any, right: Any, at: np.ndarray) -> None:
        """File the pairs of these slots, one group for each pair."""
        if not len(at):
            return
        pair = np.left_shift(left, 32, dtype=np.int64) | right
        order = np.argsort(pair, kind="stable")  # slots of a group stay in order
        pair, at = pair[order], at[order]
        start = np.flatnonzero(np.concatenate(([True], pair[1:] != pair[:-1])))
        end = np.append(start[1:], len(at))
        count = np.add.reduceat(self.weight[at], start)
        self.groups.append((count, pair[start], start, end, at))
        self._raise_up(self.groups[-1], self.floor, _HIGHEST)

    def _raise_up(self, groups: tuple[np.ndarray, ...], low: int, high: int) -> None:
        """Put those groups on the heap whose count is in low ... high - 1."""
        count, pair, start, end, at = groups
        for i in np.flatnonzero((count >= low) & (count < high)).tolist():
            slots = at[start[i] : end[i]]
            heapq.heappush(self.heap, (-int(count[i]), int(pair[i]), slots))

    def _lower_floor(self) -> None:
        high, self.floor = self.floor, self.floor // 4
        if high == _HIGHEST:
            self.floor = max((int(g[0].max()) // 8 for g in self.groups), default=1)
        self.floor = max(1, self.floor)
        for groups in self.groups:
            self._raise_up(groups, self.floor, high)

    def best(self) -> tuple[int, int, np.ndarray] | None:
        """Return (left, right, slots) of the next merge, or None when no pair is left.

        Highest count first, ties by the smallest pair of ids.
        """
        heap, first = self.heap, self.first
        while True:
            while not heap or -heap[0][0] < self.floor:
                if self.floor == 1:
                    return None
                self._lower_floor()
            bound, pair, at = heap[0]
            left, right = pair >> 32, pair & 0xFFFFFFFF
            at = at[first[at] == left]
            at = at[first[at + self.length[left]] == right]
            count = int(self.weight[at].sum())
            if count == -bound:
                heapq.heappop(heap)
                return left, right, at
            if count:
                heapq.heapreplace(heap, (-count, pair, at))
            else:
                heapq.heappop(heap)

    def merge(self, left: int, right: int, at: np.ndarray, new: int) -> None:
        """Replace the pair by token `new` at these slots, and file the new pairs."""
        a, b = self.length[left], self.length[right]
        if left == right:
            at = _without_overlap(at, a)
        if new == len(self.length):
            self.length = np.concatenate((self.length, np.ones_like(self.length)))
        self.length[new] = a + b
        self.first[at] = new
        self.first[at + a] = -2
        self.last[at + (a + b - 1)] = new
        after = self.first[at + (a + b)]
        ok = after >= 0
        self._add(new, after[ok], at[ok])
        before = self.last[at - 1]
        ok = (before >= 0) & (before != new)  # new before new is filed already
        self._add(before[ok], new, at[ok] - self.length[before[ok]])


_HIGHEST = 1 << 62


def _without_overlap(at: np.ndarray, step: int) -> np.ndarray:
    """Keep each second slot of a run: left to right, aaa is aa and a."""
    number = np.arange(len(at))
    starts = np.ones(len(at), bool)
    starts[1:] = at[1:] != at[:-1] + step
    run = np.maximum.accumulate(np.where(starts, number, 0))
    return at[(number - run) % 2 == 0]


_EMPTY = "no text to train a tokenizer on: the texts are missing or all empty"


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    pattern: str = SPLIT_PATTERN,
    workers: int = 1,
    engine: Literal["python", "rustbpe"] = "python",
) -> dict[bytes, int]:
    """Train byte pair encoding; return {token: rank}, the 256 bytes first.

    Each step merges the pair of neighbors, within a word of the pattern, that occurs
    most often, ties by the smallest pair of ids. The result does not depend on the
    order of the texts, the hash seed or the workers. When no pair is left the result is
    smaller than vocab_size, with a warning.

    texts: read once; vocab_size: ranks, at least 256, without special tokens;
    workers: processes that cut and count words (rustbpe uses its own threads).
    engine: "python" (numpy), or the package rustbpe, which gives the same ranks; it
    counts in 32 bits, and has Unicode tables of its own.
    Raises DataError: no text, a size below 256. ConfigError: an unknown engine, or one
    that is not installed.
    Source: Sennrich et al. (arXiv 1508.07909); bytes and words as in GPT-2.
    """
    if vocab_size < 256:
        raise DataError(f"vocab_size = {vocab_size}: it begins with the 256 bytes")
    if engine == "rustbpe":
        tokens = _train_rustbpe(texts, vocab_size, pattern)
    elif engine == "python":
        tokens = _train_python(count_words(texts, pattern, workers), vocab_size)
    else:
        raise ConfigError(f"unknown engine {engine!r}{nearest(engine, _ENGINES)}")
    if len(tokens) < vocab_size:
        warnings.warn(
            f"the text has no more pairs: {len(tokens)} ranks, not {vocab_size}",
            stacklevel=2,
        )
    return {token: rank for rank, token in enumerate(tokens)}


_ENGINES = ("python", "rustbpe")


def _train_python(words: Mapping[str, int], vocab_size: int) -> list[bytes]:
    if not words:
        raise DataError(_EMPTY)
    index = PairIndex(words)
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < vocab_size and (best := index.best()):
        left, right, at = best
        index.merge(left, right, at, len(tokens))
        tokens.append(tokens[left] + tokens[right])
    return tokens


def _train_rustbpe(texts: Iterable[str], vocab_size: int, pattern: str) -> list[bytes]:
    try:
        rustbpe = importlib.import_module("rustbpe")
    except ImportError as error:
        raise ConfigError(
            'engine "rustbpe" needs its package: pip install rustbpe, or take "python"'
        ) from error
    if isinstance(texts, str | bytes):
        raise TypeError("texts is one text, not an iterable of texts: pass [text]")
    seen = False

    def clean() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield clean_text(text)

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(clean(), vocab_size, pattern=pattern)
    if not seen:
        raise DataError(_EMPTY)
    ranks = sorted(trainer.get_mergeable_ranks(), key=operator.itemgetter(1))
    return [bytes(token) for token, _ in ranks]


# ---- Encode by rank


def merge_by_rank(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return the ids of one piece: the lowest rank merges first, then the leftmost.

    A linked list of parts and a heap of the pairs that could merge: n bytes take about
    n log n steps, where the plain loop takes n squared.
    """
    if piece in ranks:
        return [ranks[piece]]
    n = len(piece)
    end = list(range(1, n + 1))  # end[i]: where the part that starts at i ends
    before = list(range(-1, n))  # before[i]: where the part before i starts
    heap: list[tuple[int, int, int]] = []  # (rank, start, end of the merged part)

    def offer(i: int) -> None:
        if i >= 0 and end[i] < n:
            stop = end[end[i]]
            rank = ranks.get(piece[i:stop])
            if rank is not None:
                heapq.heappush(heap, (rank, i, stop))

    for i in range(n - 1):
        offer(i)
    while heap:
        _, i, stop = heapq.heappop(heap)
        middle = end[i]
        # A part that was merged away has end 0; one that grew has another neighbor.
        if not middle or middle >= n or end[middle] != stop:
            continue
        end[i], end[middle] = stop, 0
        if stop < n:
            before[stop] = i
        offer(before[i])
        offer(i)
    ids, i = [], 0
    while i < n:
        ids.append(ranks[piece[i : end[i]]])
        i = end[i]
    return ids


# ---- Special tokens and the class around it

SPECIAL_TOKENS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
_FORMAT, _VERSION = "littlelm-tokenizer", 1
_REPLACEMENT = "\ufffd".encode()


class Tokenizer:
    """Text to ids and back, lossless for every str that UTF-8 can hold.

    ranks: {token: rank} with all 256 single bytes and ranks 0 ... n-1.
    pattern: cuts text into pieces; it must run in `regex` and in tiktoken.
    special_tokens: their ids follow the ranks in this order; the first is the BOS.
    Raises DataError for ranks, a pattern or special tokens that do not hold this.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str = SPLIT_PATTERN,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ) -> None:
        self.ranks = dict(ranks)
        self.pattern = pattern
        self.special_tokens = tuple(special_tokens)
        self._tokens = _tokens_in_order(self.ranks) + [
            name.encode() for name in self.special_tokens
        ]
        self.special_ids = {
            name: len(self.ranks) + i for i, name in enumerate(self.special_tokens)
        }
        if len(self.special_ids) < len(self.special_tokens) or "" in self.special_ids:
            raise DataError(
                f"special tokens {self.special_tokens}: one is empty or twice"
            )
        _compiled(pattern, False)
        try:
            self._fast = tiktoken.Encoding(
                "littlelm",
                pat_str=pattern,
                mergeable_ranks=self.ranks,
                special_tokens={},
            )
        except ValueError as error:
            raise DataError(f"tiktoken refuses pattern {pattern!r}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Ranks and special tokens together."""
        return len(self._tokens)

    @property
    def bos_id(self) -> int:
        """The id of the first special token, which starts every document."""
        if not self.special_tokens:
            raise DataError("this tokenizer has no special token to start a document")
        return len(self.ranks)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that decides an id."""
        return hashlib.sha256(self._to_json().encode()).hexdigest()[:16]

    def token_byte_counts(self) -> np.ndarray:
        """Return the bytes of text behind each id, int64; special tokens have 0."""
        counts = [len(token) for token in self._tokens]
        counts[len(self.ranks) :] = [0] * len(self.special_tokens)
        return np.array(counts, np.int64)

    def encode(self, text: str, allowed_special: str | Iterable[str] = ()) -> list[int]:
        """Return the ids of a text. Never raises on a str, and adds no BOS.

        allowed_special: names of special tokens (or "all") whose spelling in this text
        becomes their id. By default a spelling is ordinary text: a document must not
        be able to end itself or speak as the assistant.
        Surrogate pairs become the character, lone surrogates U+FFFD.
        Raises ValueError for a name that is no special token.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"encode takes a str, not {type(text).__name__}; "
                "encode_bytes takes bytes"
            )
        allowed = self._allowed(allowed_special)
        if not allowed:
            return self._encode_ordinary(text)
        cut = "|".join(map(re.escape, sorted(allowed, key=len, reverse=True)))
        ids: list[int] = []
        for i, part in enumerate(re.split(f"({cut})", clean_text(text))):
            ids.extend(
                [self.special_ids[part]] if i % 2 else self._encode_ordinary(part)
            )
        return ids

    def encode_batch(
        self,
        texts: Iterable[str],
        allowed_special: str | Iterable[str] = (),
        threads: int | None = None,
    ) -> list[list[int]]:
        """Return `encode` of each text; threads: tiktoken's, by default the cores."""
        texts = list(texts)
        if self._allowed(allowed_special):
            return [self.encode(text, allowed_special) for text in texts]
        try:
            return self._fast.encode_ordinary_batch(
                texts, num_threads=threads or min(8, os.cpu_count() or 1)
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
        return [self._encode_ordinary(text) for text in texts]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return ids that decode to exactly these bytes, whatever they are.

        Bytes that are not UTF-8 become the ids of single bytes; the valid text before
        and after is encoded as texts of their own, so nothing far away changes.
        """
        ids: list[int] = []
        text = bytes(data).decode("utf-8", "surrogateescape")
        for i, part in enumerate(re.split("([\udc80-\udcff]+)", text)):
            if i % 2:
                bad = part.encode("utf-8", "surrogateescape")
                ids.extend(self.ranks[bytes([b])] for b in bad)
            else:
                ids.extend(self._encode_ordinary(part))
        return ids

    def encode_by_rank(self, text: str) -> list[int]:
        """Return `encode(text)` by our own encoder, the readable and slow one."""
        ids: list[int] = []
        for piece in split_text(clean_text(text), self.pattern):
            ids.extend(merge_by_rank(piece.encode(), self.ranks))
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        try:
            return self._fast.encode_ordinary(text)
        except BaseException as error:
            if not _is_panic(error):
                raise
        return self.encode_by_rank(text)

    def _allowed(self, names: str | Iterable[str]) -> set[str]:
        if isinstance(names, str):
            names = self.special_tokens if names == "all" else (names,)
        names = set(names)
        for name in names - self.special_ids.keys():
            known = nearest(name, self.special_tokens)
            raise ValueError(f"no special token is called {name!r}{known}")
        return names

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes behind ids; a special token gives its spelling.

        An id at or above vocab_size (a padding row of the model's table) gives U+FFFD.
        Raises ValueError for a negative id.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and min(ids) < 0:
            raise ValueError(f"id {min(ids)} is negative")
        try:
            return b"".join(map(self._tokens.__getitem__, ids))
        except IndexError:
            tokens, size = self._tokens, len(self._tokens)
            return b"".join(tokens[i] if i < size else _REPLACEMENT for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text behind ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self) -> "TextStream":
        """Return a decoder that takes one id at a time."""
        return TextStream(self)

    def _to_json(self) -> str:
        table = {
            "format": _FORMAT,
            "version": _VERSION,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "tokens": [
                base64.b64encode(token).decode()
                for token in self._tokens[: len(self.ranks)]
            ],
        }
        return json.dumps(table, indent=0)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as JSON; the file is there whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8", newline="\n") as file:
                file.write(self._to_json())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises DataError for any other file or version."""
        return cls(*_read_tokenizer(Path(path)))

    @classmethod
    def gpt2(cls, path: str | Path | None = None) -> Self:
        """Return GPT-2's tokenizer: 50,257 ids, <|endoftext|> as BOS.

        path: GPT-2's vocab.bpe (merges.txt) or r50k_base.tiktoken, checked by hash;
        None: through tiktoken, which downloads it once.
        Raises DataError: another file, or neither a network nor tiktoken's cache.
        """
        return cls(_gpt2_ranks(path), GPT2_PATTERN, ("<|endoftext|>",))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.pattern, self.special_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size:,} ids, {self.fingerprint})"


class TextStream:
    """Decodes ids as they come; the pieces together equal decoding all at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that is complete now; "" while a character is not."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """End the text: what was held back can only be an incomplete character."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _is_panic(error: BaseException) -> bool:
    """Whether the Rust engine gave up: a run of a million spaces exhausts its stack."""
    return type(error).__name__ == "PanicException"


def _tokens_in_order(ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the tokens by rank. Raises DataError for ranks that cannot encode."""
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise DataError(
                f"ranks lack the single byte {byte}: it could not be encoded"
            )
    tokens = sorted(ranks, key=ranks.__getitem__)
    for rank, token in enumerate(tokens):
        if ranks[token] != rank:
            raise DataError(f"ranks must be 0 ... {len(ranks) - 1}: {rank} is missing")
    return tokens


# ---- Save, load, and GPT-2's vocabulary


def _read_tokenizer(path: Path) -> tuple[dict[bytes, int], str, tuple[str, ...]]:
    """Return (ranks, pattern, special tokens) of a saved tokenizer."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        kind, version = table["format"], table["version"]
    except FileNotFoundError as error:
        raise DataError(f"no tokenizer {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a saved tokenizer: {error!r}") from error
    if (kind, version) != (_FORMAT, _VERSION):
        raise DataError(
            f"{path} has format {kind!r} version {version!r}; this littlelm reads "
            f"{_FORMAT!r} version {_VERSION}: use the littlelm that wrote it"
        )
    try:
        tokens = [base64.b64decode(t, validate=True) for t in table["tokens"]]
        pattern, special = table["pattern"], tuple(table["special_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error
    return {token: rank for rank, token in enumerate(tokens)}, pattern, special


_GPT2_FILES = {
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5": "vocab.bpe",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "tiktoken",
}


def _gpt2_ranks(path: str | Path | None) -> dict[bytes, int]:
    if path is None:
        try:
            engine = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise DataError(
                "GPT-2's vocabulary is not in tiktoken's cache and was not downloaded "
                f"({type(error).__name__}): go online once, or give the path of "
                "vocab.bpe or r50k_base.tiktoken"
            ) from error
        return {engine.decode_single_token_bytes(i): i for i in range(50256)}
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"GPT-2's vocabulary: {error}") from error
    digest = hashlib.sha256(data).hexdigest()
    kind = _GPT2_FILES.get(digest)
    if kind is None:
        raise DataError(
            f"{path} is neither GPT-2's vocab.bpe nor r50k_base.tiktoken: its sha256 "
            f"is {digest[:16]}..., not {' or '.join(d[:16] for d in _GPT2_FILES)}"
        )
    if kind == "tiktoken":
        lines = (line.split() for line in data.splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in lines}
    # vocab.bpe spells each byte as a printable character: those that are printable
    # stand for themselves, the others follow from U+0100 on.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(others)}
    ranks = {bytes([b]): i for i, b in enumerate((*printable, *others))}
    for line in data.decode().splitlines()[1:]:
        token = bytes(byte_of[c] for c in line.replace(" ", ""))
        ranks[token] = len(ranks)
    return ranks


# ---- The parts that a run can name


@register("tokenizer", "bpe")
def bpe_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    pattern: str = SPLIT_PATTERN,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
    workers: int = 1,
    engine: Literal["python", "rustbpe"] = "python",
) -> Tokenizer:
    """Train a tokenizer of vocab_size ids, the special tokens among them."""
    ranks = vocab_size - len(special_tokens)
    if ranks < 256:
        raise ConfigError(
            f"tokenizer.vocab_size = {vocab_size}: 256 bytes and {len(special_tokens)} "
            f"special tokens need at least {256 + len(special_tokens)}"
        )
    return Tokenizer(
        train_bpe(texts, ranks, pattern, workers, engine), pattern, special_tokens
    )


@register("tokenizer", "gpt2")
def gpt2_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | None = None
) -> Tokenizer:
    """Return GPT-2's tokenizer; texts are not read, vocab_size must be 50,257."""
    if vocab_size != 50257:
        raise ConfigError(
            f"tokenizer.vocab_size = {vocab_size}: GPT-2's vocabulary has 50257"
        )
    return Tokenizer.gpt2(path)
