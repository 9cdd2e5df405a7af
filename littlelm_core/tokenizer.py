# From chapters/01_tokenizer.md by `littlelm book export`: edit the chapter.
"""Tokenizer: bytes become ids of pieces that occur often, and back without loss.

A model reads ids. One id for each byte makes rows long, one for each word leaves out
every word that was not seen. Byte pair encoding lies between: it starts from the 256
bytes and adds the pair that occurs most often, again and again.

What the hardware wants: few tokens for each byte, since each costs the whole model
once; a table that stays small beside the model; rows that tile evenly
(`vocab_multiple` in the model).

An id is in 0 ... vocab_size - 1. A rank is the id of a token that training made, the
lower the earlier; the special tokens follow after the last rank.
"""

import base64
import codecs
import functools
import hashlib
import heapq
import importlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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
# The same for ASCII text, in the standard engine.
_ASCII_SPLIT = re.compile(
    SPLIT_PATTERN.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), re.ASCII
)
GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
    r"|\s++$|\s+(?!\S)|\s"
)


def clean_text(text: str) -> str:
    """Return text that UTF-8 can hold: surrogate pairs joined, lone ones U+FFFD."""
    if not isinstance(text, str):
        kind = type(text).__name__
        raise TypeError(f"text must be a str, not {kind}; encode_bytes takes bytes")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def split_text(text: str, pattern: str = SPLIT_PATTERN) -> list[str]:
    """Cut text without surrogates into the pieces that merges never cross.

    Raises DataError for a pattern that the package `regex` cannot compile.
    """
    if text.isascii() and pattern == SPLIT_PATTERN:
        return _ASCII_SPLIT.findall(text)
    try:
        return [match[0] for match in regex.finditer(pattern, text)]
    except regex.error as error:
        raise DataError(f"pattern {pattern!r} does not compile: {error}") from error


# ---- Count each word once


def _cleaned(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text, cleaned. Raises TypeError for one text, DataError for none."""
    if isinstance(texts, str | bytes):
        raise TypeError("texts is one text, not an iterable of texts: pass [text]")
    empty = True
    for text in texts:
        empty = empty and not text
        yield clean_text(text)
    if empty:
        raise DataError("no text to train a tokenizer on: none came, or all are empty")


def _count(texts: Iterable[str], pattern: str) -> Counter[str]:
    pieces = map(split_text, texts, itertools.repeat(pattern))
    return Counter(itertools.chain.from_iterable(pieces))


def count_words(
    texts: Iterable[str], pattern: str = SPLIT_PATTERN, workers: int = 1
) -> Counter[str]:
    """Count the pieces of all texts, which are read once and never held together.

    workers: processes that cut and count; the counts do not depend on them. They are
    forked: where that is not safe (not on Linux) this process counts alone.
    """
    if workers <= 1 or sys.platform != "linux":
        return _count(_cleaned(texts), pattern)
    counts: Counter[str] = Counter()
    texts, fork = _cleaned(texts), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=fork) as pool:
        while ahead := list(itertools.islice(texts, 128 * workers)):
            shares = (ahead[i::workers] for i in range(workers))
            for part in pool.map(_count, shares, itertools.repeat(pattern)):
                counts.update(part)
    return counts


# ---- Find and merge pairs with vectors


class PairIndex:
    """The unique words as one array of bytes, and where each adjacent pair stands.

    tokens: the bytes of each token, the 256 single bytes first. first[i]: the token
    that begins at slot i, -1 where none does; start[i]: where the token that ends at
    slot i begins; weight[i]: how often the word of slot i occurs.

    The count of a pair never grows after the merge that made it, since every new
    neighbor is the new token. So a count from then is a bound, made exact only when the
    pair comes up, and of the pairs that a merge makes only the best waits in the heap.
    """

    def __init__(self, words: Mapping[str, int]) -> None:
        encoded = [word.encode() for word in words]
        size = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        text = np.frombuffer(b"\0" + b"\0".join(encoded) + b"\0", np.uint8)
        self.tokens = [bytes([b]) for b in range(256)]
        self.first = text.astype(np.int32)
        self.first[np.cumsum(size)] = self.first[0] = -1  # between the words
        slot = np.int32 if len(text) < 2**31 else np.int64
        self.start = np.arange(len(text), dtype=slot)
        counts = np.fromiter(words.values(), np.int64, len(encoded))
        self.weight = np.append(0, np.repeat(counts, size))
        self.heap: list[tuple] = []  # (-count, pair, slots, the next pairs)
        inside = self.first >= 0
        at = self.start[:-1][inside[:-1] & inside[1:]]
        self._push(self._group(self.first[at], self.first[at + 1], at))

    def _group(self, left: Any, right: Any, at: np.ndarray) -> Iterator[tuple]:
        """Yield (-count, pair, slots) of each pair at these slots, the best first."""
        pair = np.left_shift(left, 32, dtype=np.int64) | right
        order = np.argsort(pair, kind="stable")  # slots of a pair stay in order
        pair, at = pair[order], at[order]
        begin = np.flatnonzero(np.diff(pair, prepend=-1))
        end = np.append(begin[1:], len(at))
        count = np.add.reduceat(self.weight[at], begin)
        for i in np.argsort(-count, kind="stable").tolist():
            yield -int(count[i]), int(pair[begin[i]]), at[begin[i] : end[i]]

    def _push(self, group: Iterator[tuple]) -> None:
        if best := next(group, None):
            heapq.heappush(self.heap, (*best, group))

    def best(self) -> tuple[int, int, np.ndarray] | None:
        """Return (left, right, slots) of the next merge, or None when no pair is left.

        Highest count first, ties by the smallest pair of ids.
        """
        while self.heap:
            bound, pair, at, group = heapq.heappop(self.heap)
            self._push(group)
            left, right = divmod(pair, 2**32)
            at = at[self.first[at] == left]
            at = at[self.first[at + len(self.tokens[left])] == right]
            count = int(self.weight[at].sum())
            if count == -bound:
                return left, right, at
            if count:
                heapq.heappush(self.heap, (-count, pair, at, iter(())))
        return None

    def merge(self, left: int, right: int, at: np.ndarray) -> None:
        """Make the pair a token, put it at these slots, and file its new pairs."""
        new, a = len(self.tokens), len(self.tokens[left])
        self.tokens.append(self.tokens[left] + self.tokens[right])
        if left == right:  # each second slot of a run: aaa is aa and a
            run = np.flatnonzero(np.diff(at, prepend=-a) != a)
            place = np.arange(len(at)) - np.repeat(run, np.diff(run, append=len(at)))
            at = at[place % 2 == 0]
        end = at + len(self.tokens[new])
        self.first[at], self.first[at + a], self.start[end - 1] = new, -1, at
        after = self.first[end]
        ok = after >= 0
        self._push(self._group(new, after[ok], at[ok]))
        begin = self.start[at - 1]
        before = self.first[begin]
        ok = (before >= 0) & (before != new)  # new before new is filed already
        self._push(self._group(before[ok], new, begin[ok]))


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    pattern: str = SPLIT_PATTERN,
    workers: int = 1,
    engine: Literal["python", "rustbpe"] = "python",
) -> dict[bytes, int]:
    """Train byte pair encoding; return {token: rank}, the 256 bytes first.

    Each step merges the pair of neighbors, within a word of the pattern, that occurs
    most often, ties by the smallest pair of ids; order of texts, hash seed and workers
    change nothing. When no pair is left, fewer ranks come back, with a warning.

    texts: read once; vocab_size: ranks, at least 256, without special tokens;
    workers: processes that count words; engine: "python" (numpy) or "rustbpe", a
    package with the same ranks, its own threads and Unicode tables, counts of 32 bits.
    Raises DataError: no text, a size below 256. ConfigError: no such engine.
    Source: Sennrich et al. (arXiv 1508.07909); bytes and words as in GPT-2.
    """
    if vocab_size < 256:
        raise DataError(f"vocab_size = {vocab_size}: it begins with the 256 bytes")
    if engine == "rustbpe":
        tokens = _train_rustbpe(texts, vocab_size, pattern)
    elif engine == "python":
        index = PairIndex(count_words(texts, pattern, workers))
        tokens = index.tokens
        while len(tokens) < vocab_size and (best := index.best()):
            index.merge(*best)
    else:
        near = nearest(engine, ("python", "rustbpe"))
        raise ConfigError(f"unknown engine {engine!r}{near}")
    if len(tokens) < vocab_size:
        text = f"the text has no more pairs: {len(tokens)} ranks, not {vocab_size}"
        warnings.warn(text, stacklevel=2)
    return {token: rank for rank, token in enumerate(tokens)}


def _train_rustbpe(texts: Iterable[str], vocab_size: int, pattern: str) -> list[bytes]:
    try:
        trainer = importlib.import_module("rustbpe").Tokenizer()
    except ImportError as error:
        raise ConfigError(
            'engine "rustbpe" needs its package: pip install rustbpe, or take "python"'
        ) from error
    trainer.train_from_iterator(_cleaned(texts), vocab_size, pattern=pattern)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return sorted(ranks, key=ranks.__getitem__)


# ---- Encode by rank


def merge_by_rank(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return the ids of one piece: the lowest rank merges first, then the leftmost.

    A linked list of parts and a heap of the pairs that could merge: n bytes take about
    n log n steps, where the plain loop takes n squared.
    """
    if piece in ranks:
        return [ranks[piece]]
    n = len(piece)
    # end[i]: where the part that starts at i ends, -1 once it was merged away. The last
    # entry, which is also end[-1], is where nothing ends: no part there, no merge.
    end = list(range(1, n + 2))
    before = list(range(-1, n))  # before[i]: where the part before i starts
    heap: list[tuple[int, int, int]] = []  # (rank, start, end of the merged part)

    def offer(i: int) -> None:
        if end[i] < n:
            stop = end[end[i]]
            rank = ranks.get(piece[i:stop])
            if rank is not None:
                heapq.heappush(heap, (rank, i, stop))

    for i in range(n - 1):
        offer(i)
    while heap:
        _, i, stop = heapq.heappop(heap)
        middle = end[i]
        if end[middle] != stop:  # one of the two has merged with another since
            continue
        end[i], end[middle], before[stop] = stop, -1, i
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
        order = sorted(ranks, key=ranks.__getitem__)
        self.ranks = {token: ranks[token] for token in order}
        self.pattern = pattern
        self.special_tokens = tuple(special_tokens)
        for byte in range(256):
            if bytes([byte]) not in ranks:
                raise DataError(f"ranks lack the single byte {byte}")
        for want, rank in enumerate(self.ranks.values()):
            if rank != want:
                raise DataError(f"ranks are 0 ... {len(ranks) - 1}: {want} is missing")
        if "" in special_tokens or len(set(special_tokens)) < len(special_tokens):
            raise DataError(f"special tokens {special_tokens}: one is empty or twice")
        ids = enumerate(self.special_tokens, len(ranks))
        self.special_ids = {name: i for i, name in ids}
        self._tokens = [*self.ranks, *(name.encode() for name in self.special_tokens)]
        self.vocab_size = len(self._tokens)  # ranks and special tokens together
        try:
            self._fast = tiktoken.Encoding(
                "ours", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={}
            )
        except ValueError as error:
            raise DataError(f"tiktoken refuses pattern {pattern!r}: {error}") from error

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
        counts = [*map(len, self.ranks), *[0] * len(self.special_tokens)]
        return np.array(counts, np.int64)

    def encode(self, text: str, allowed_special: Collection[str] = ()) -> list[int]:
        """Return the ids of a text. Never raises on a str, and adds no BOS.

        allowed_special: names of special tokens (or "all") whose spelling becomes their
        id. By default it is ordinary text: a document must not be able to end itself
        or speak as the assistant. Raises ValueError for a name that is none.
        """
        text = clean_text(text)
        if not allowed_special:
            return self._encode_ordinary(text)
        names = self.special_tokens if allowed_special == "all" else allowed_special
        for name in names:
            if name not in self.special_ids:
                known = nearest(name, self.special_tokens)
                raise ValueError(f"no special token is called {name!r}{known}")
        cut = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        ids: list[int] = []
        for i, part in enumerate(re.split(f"({cut})", text)):
            ids += [self.special_ids[part]] if i % 2 else self._encode_ordinary(part)
        return ids

    def encode_batch(
        self, texts: Iterable[str], allowed_special: Collection[str] = ()
    ) -> list[list[int]]:
        """Return `encode` of each text, on as many threads as there are cores."""
        encode = functools.partial(self.encode, allowed_special=allowed_special)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return list(pool.map(encode, texts))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return ids that decode to exactly these bytes, whatever they are.

        What is not UTF-8 becomes the ids of single bytes; the text on both sides is
        encoded as texts of their own, so nothing far away changes.
        """
        ids: list[int] = []
        text = data.decode("utf-8", "surrogateescape")
        for i, part in enumerate(re.split("([\udc80-\udcff])", text)):
            if i % 2:
                ids.append(self.ranks[part.encode("utf-8", "surrogateescape")])
            else:
                ids += self._encode_ordinary(part)
        return ids

    def encode_by_rank(self, text: str) -> list[int]:
        """Return `encode(text)` by our own encoder, the readable and slow one."""
        pieces = split_text(clean_text(text), self.pattern)
        parts = (merge_by_rank(piece.encode(), self.ranks) for piece in pieces)
        return list(itertools.chain.from_iterable(parts))

    def _encode_ordinary(self, text: str) -> list[int]:
        try:
            return self._fast.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
        return self.encode_by_rank(text)  # a million spaces exhaust the engine's stack

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes behind ids; a special token gives its spelling.

        An id at or above vocab_size (a padding row of the model's table) gives U+FFFD.
        Raises ValueError for a negative id.
        """
        ids, tokens, size = list(ids), self._tokens, self.vocab_size
        if ids and min(ids) < 0:
            raise ValueError(f"id {min(ids)} is negative")
        return b"".join(tokens[i] if i < size else b"\xef\xbf\xbd" for i in ids)

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
            "tokens": [base64.b64encode(token).decode() for token in self.ranks],
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
        try:
            table = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = table.get("format"), table.get("version")
            if kind != (_FORMAT, _VERSION):
                known = f"this littlelm reads {(_FORMAT, _VERSION)}"
                raise ValueError(f"format and version are {kind}, {known}")
            tokens = [base64.b64decode(t, validate=True) for t in table["tokens"]]
            ranks = {token: rank for rank, token in enumerate(tokens)}
            return cls(ranks, table["pattern"], table["special_tokens"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a saved tokenizer: {error}") from error

    @classmethod
    def gpt2(cls, path: str | Path | None = None) -> Self:
        """Return GPT-2's tokenizer: 50,257 ids, <|endoftext|> as BOS.

        path: GPT-2's vocab.bpe (also called merges.txt), checked by its hash; None:
        through tiktoken, which downloads it once. Raises DataError where neither works.
        """
        return cls(_gpt2_ranks(path), GPT2_PATTERN, ("<|endoftext|>",))


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
        return self._decoder.decode(b"", final=True)


# ---- Save, load, and GPT-2's vocabulary

_GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def _gpt2_ranks(path: str | Path | None) -> dict[bytes, int]:
    try:
        if path is None:
            engine = tiktoken.get_encoding("gpt2")
            return {engine.decode_single_token_bytes(i): i for i in range(50256)}
        data = Path(path).read_bytes()
    except Exception as error:
        raise DataError(
            f"no GPT-2 vocabulary from {path or 'tiktoken'} ({type(error).__name__}): "
            "go online once, or give the path of vocab.bpe"
        ) from error
    if (digest := hashlib.sha256(data).hexdigest()) != _GPT2_SHA256:
        raise DataError(
            f"{path} is not GPT-2's vocab.bpe: "
            f"sha256 {digest[:16]}..., not {_GPT2_SHA256[:16]}..."
        )
    # It spells each byte as one character: bytes that are printable as themselves, the
    # others by the characters from U+0100 on.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    letters = map(chr, (*printable, *range(256, 256 + len(others))))
    singles = [bytes([b]) for b in (*printable, *others)]
    byte_of = {" ": b"", **dict(zip(letters, singles, strict=True))}
    merges = data.decode().splitlines()[1:]
    tokens = singles + [b"".join(map(byte_of.__getitem__, line)) for line in merges]
    return {token: rank for rank, token in enumerate(tokens)}


# ---- The parts that a run can name


@register("tokenizer", "bpe")
def bpe_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    pattern: str = SPLIT_PATTERN,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    workers: int = 1,
    engine: Literal["python", "rustbpe"] = "python",
) -> Tokenizer:
    """Train a tokenizer of vocab_size ids, the special tokens among them."""
    if vocab_size < (least := 256 + len(special_tokens)):
        need = f"bytes and special tokens need {least}"
        raise ConfigError(f"tokenizer.vocab_size = {vocab_size}: {need}")
    ranks = train_bpe(texts, vocab_size - len(special_tokens), pattern, workers, engine)
    return Tokenizer(ranks, pattern, special_tokens)


@register("tokenizer", "gpt2")
def gpt2_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | None = None
) -> Tokenizer:
    """Return GPT-2's tokenizer; texts are not read, vocab_size must be 50,257."""
    if vocab_size != 50257:
        raise ConfigError(f"tokenizer.vocab_size = {vocab_size}: GPT-2 has 50257 ids")
    return Tokenizer.gpt2(path)
