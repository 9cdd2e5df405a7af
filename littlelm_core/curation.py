# From chapters/11_curation.md by `littlelm book export`: edit the chapter.
"""Clean text: normalise, filter, remove duplicates, keep the exam questions out.

A filter is a small object with a `name`; called with a text it returns the reason to
drop it, or None. MinHash finds near duplicates among millions of documents without
comparing all pairs; what it proposes is verified before anything is dropped. Without
these steps a model spends its tokens on menus, learns some pages a hundred times, and
is examined on questions that it has read.

The hardware wants long arrays: words are hashed for many documents at once, in blocks
that fit into the cache. No result depends on Python's `hash()`, on a batch or a worker.

Shapes: N documents, P permutations, S shingles of a block.
"""

import hashlib
import re
import string
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from littlelm_core.config import ConfigError, DataError

__all__ = [
    "C4Quality",
    "Clusters",
    "Decontaminator",
    "DedupReport",
    "FUNCTION_WORDS",
    "Filter",
    "FineWebQuality",
    "GopherQuality",
    "GopherRepetition",
    "Hit",
    "Language",
    "MinHash",
    "PROSE_FILTERS",
    "Page",
    "QualityClassifier",
    "STOP_WORDS",
    "decontaminate",
    "deduplicate",
    "jaccard",
    "judge",
    "language",
    "normalize",
    "run_hashes",
    "word_hashes",
]


# ---- One spelling

# What ends a line, what is a space, and what nobody sees.
_SPELLING = {
    **dict.fromkeys([*range(9), *range(14, 28), *range(127, 160)]),
    **dict.fromkeys([0xAD, 0x200B, 0x2060, 0xFEFF]),
    **dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), "\n"),
    **dict.fromkeys(map(ord, "\x1f\xa0\u1680\u202f\u205f\u3000"), " "),
    **dict.fromkeys(range(0x2000, 0x200B), " "),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}
_ODD = re.compile(f"[{''.join(map(chr, _SPELLING))}]")  # most texts have none


def normalize(text: str) -> str:
    """Give what looks the same one spelling; a second call changes nothing.

    Unicode to NFC, line ends to LF, the many spaces to " ", invisible characters out;
    no blanks at line ends, at most one empty line in a row, none at the borders of the
    text. Indentation stays: it means something in code. A lone surrogate, which UTF-8
    cannot write, becomes U+FFFD.
    """
    if _ODD.search(text):
        text = text.replace("\r\n", "\n").translate(_SPELLING)
    text = unicodedata.normalize("NFC", text)
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


# ---- Words, once

Filter = Callable[[str], str | None]  # with a `name`: why a text is dropped, or None


class Page(str):
    """A text that cuts itself into words and lines once, however many filters ask.

    Words are what white space separates, as in Gopher: "end." is one word.
    """

    @cached_property
    def words(self) -> list[str]:
        """Return the words, in order."""
        return self.split()

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines that are not blank."""
        return [line for line in self.split("\n") if line and not line.isspace()]

    @classmethod
    def of(cls, text: str) -> "Page":
        """Return the text as a Page; one that is a Page already stays itself."""
        return text if isinstance(text, cls) else cls(text)


class _Rules:
    """A filter that asks rule by rule, until one is broken: that is the reason."""

    def __call__(self, text: str) -> str | None:
        broken = (reason for reason, wrong in self._rules(Page.of(text)) if wrong)
        return next(broken, None)


# ---- Gopher: is it prose?

# A word of these alone is no word.
_SYMBOLS = string.punctuation + "…‘’“”„«»‹›–—―•·¡¿。、，！？；：（）【】《》「」"
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})


@dataclass(frozen=True)
class GopherQuality(_Rules):
    """Rules by which Gopher told running prose from the rest (Rae et al. 2021, A.1)."""

    min_words: int = 50
    max_words: int = 100_000
    min_width: float = 3  # mean characters of a word
    max_width: float = 10
    max_symbols: float = 0.1  # "#", or ellipses, for each word
    max_bullets: float = 0.9  # share of lines that start with one
    max_ellipses: float = 0.3  # share of lines that end in one
    min_alphabetic: float = 0.8  # share of words with at least one letter
    min_stop_words: int = 2  # different ones
    name: str = "gopher_quality"

    def _rules(self, page: Page) -> Iterator[tuple[str, bool]]:
        odd = [word for word in page.words if not word.isalpha()]
        symbols = [word for word in odd if not word.strip(_SYMBOLS)]
        total, count = len(page.words), len(page.words) - len(symbols)
        yield "too few words", count < max(self.min_words, 1)
        yield "too many words", count > self.max_words
        width = (sum(map(len, page.words)) - sum(map(len, symbols))) / count
        yield "short words", width < self.min_width
        yield "long words", width > self.max_width
        yield "hashes", page.count("#") / total > self.max_symbols
        ellipses = page.count("...") + page.count("…")
        yield "ellipses", ellipses / total > self.max_symbols
        lines = page.splitlines() if ellipses or "-" in page or "•" in page else [""]
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        yield "bullets", bullets / len(lines) > self.max_bullets
        ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        yield "cut lines", ends / len(lines) > self.max_ellipses
        letters = total - sum(not any(map(str.isalpha, word)) for word in odd)
        yield "few letters", letters / total < self.min_alphabetic
        found = STOP_WORDS.intersection(page.words)
        yield "no stop words", len(found) < self.min_stop_words


# ---- Gopher: does it repeat itself?


def _duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Return how many parts stood before already, and their characters."""
    unique = set(parts)
    return len(parts) - len(unique), sum(map(len, parts)) - sum(map(len, unique))


@dataclass(frozen=True)
class GopherRepetition(_Rules):
    """Limits on repetition, with the thresholds of Gopher's table A1.

    parts: shares of paragraphs, or lines, that stood before, and of the text's
    characters in them. top: the characters of the commonest n-gram. repeated: those of
    all n-grams that stood before, each character counted once.
    """

    parts: tuple[float, float] = (0.3, 0.2)
    top: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    repeated: tuple[tuple[int, float], ...] = (
        (5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1),
    )  # fmt: skip
    name: str = "gopher_repetition"

    def _rules(self, page: Page) -> Iterator[tuple[str, bool]]:
        yield "empty", not page.lines
        paragraphs = re.split(r"\n{2,}", page.strip())
        for what, parts in (("paragraphs", paragraphs), ("lines", page.lines)):
            number, length = _duplicates(parts)
            yield f"repeated {what}", number / len(parts) > self.parts[0]
            yield f"characters of repeated {what}", length / len(page) > self.parts[1]
        words, total = page.words, len(page.words)
        number_of = dict(zip(words, range(total), strict=True))
        ids = np.array([number_of[word] for word in words])
        ends = list(accumulate(map(len, words), initial=0))
        top, repeated = dict(self.top), dict(self.repeated)
        # N-grams by the place of their first word, and which of them are equal.
        places, groups, sizes = np.arange(total), ids, np.bincount(ids)
        for n in range(2, min(max(top | repeated, default=0), total) + 1):
            again = (sizes[groups] > 1) & (places + n <= total)
            places = places[again]
            if not len(places) and n > max(top, default=0):
                break  # as in most prose: no run of five words occurs twice
            grown = groups[again] * total + ids[places + n - 1]
            _, groups, sizes = np.unique(grown, return_inverse=True, return_counts=True)
            if n in top:  # where nothing repeats, the first one is the top
                count = sizes.max(initial=1)
                best = places[np.argmax(sizes[groups] == count)] if count > 1 else 0
                length = ends[best + n] - ends[best] + n - 1
                yield f"top {n}-gram", count * length / len(page) > top[n]
            if n in repeated:
                length, free, seen, again = 0, 0, set(), sizes[groups] > 1
                pairs = zip(places[again].tolist(), groups[again].tolist(), strict=True)
                for place, group in pairs:
                    if place >= free:  # after one that stood before, n words on
                        if group in seen:
                            length += ends[place + n] - ends[place]
                            free = place + n
                        seen.add(group)
                yield f"repeated {n}-grams", length / len(page) > repeated[n]


# ---- C4 and FineWeb: does it look like a page?

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_SENTENCE = re.compile(r"""[.!?]+["'”’)\]]*(?=\s|$)""")  # where one ends
_POLICY = re.compile(r"terms of use|(privacy|cookie) policy|uses? (of )?cookies")


@dataclass(frozen=True)
class C4Quality:
    """C4's rules (Raffel et al. 2020): keep lines that are sentences, count those.

    A line is kept when it ends like a sentence, has at least three words, none of them
    endless, and is not about JavaScript or cookies. A page is dropped when "lorem
    ipsum" or a curly bracket is in such a line, or when fewer than five sentences are
    left. `clean` returns what is left. (The list of bad words is not included.)
    """

    min_sentences: int = 5
    min_words: int = 3
    max_word: int = 1000
    terminal: bool = True  # FineWeb keeps lines that do not end like a sentence
    name: str = "c4"

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        return self._sift(text)[1]

    def clean(self, text: str) -> str:
        """Return the lines that are sentences."""
        return "\n".join(self._sift(text)[0]).strip()

    def _sift(self, text: str) -> tuple[list[str], str | None]:
        kept, sentences = [], 0
        for line in map(str.strip, text.splitlines()):
            words = line.split()
            if len(line) > self.max_word and max(map(len, words)) > self.max_word:
                continue
            line = _CITATION.sub("", line)
            end = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
            if len(words) < self.min_words or (self.terminal and not end):
                continue
            lower = line.lower()
            if "lorem ipsum" in lower:
                return [], "lorem ipsum"
            if "{" in line and "javascript" not in lower:
                return [], "curly bracket"
            if "javascript" not in lower and not _POLICY.search(lower):
                sentences += sum(map(bool, _SENTENCE.split(line)))
                kept.append(line)
        return kept, "too few sentences" if sentences < self.min_sentences else None


# Ends of sentences in the scripts of the world's larger languages.
_TERMINAL = frozenset(".?!。？！．｡؟۔।॥։።၊။។៕᙮⁇⁈⁉‼‽")


@dataclass(frozen=True)
class FineWebQuality(_Rules):
    """FineWeb's own rules (Penedo et al. 2024), from comparing good and bad dumps."""

    min_terminal: float = 0.12  # share of lines that end in a full stop or the like
    max_short: float = 0.67  # share of lines of at most `short` characters
    short: int = 30
    max_repeated: float = 0.01  # share of characters in lines that stood before
    max_newlines: float = 0.3  # line ends for each word
    name: str = "fineweb"

    def _rules(self, page: Page) -> Iterator[tuple[str, bool]]:
        lines, newlines = page.lines, page.count("\n")
        yield "empty", not lines
        ends = sum(line[-1] in _TERMINAL for line in lines)
        yield "lines without an end", ends / len(lines) < self.min_terminal
        short = sum(len(line) <= self.short for line in lines)
        yield "short lines", short / len(lines) > self.max_short
        length = _duplicates(lines)[1]
        yield "repeated lines", length / (len(page) - newlines) > self.max_repeated
        yield "a list", newlines / len(page.words) > self.max_newlines


# ---- Which language?

# The commonest words that only grammar needs, of seven languages in Latin letters.
FUNCTION_WORDS = {
    "en": "the of and to in a is that for it was on with as be by at are this from",
    "de": "der die und das den von zu mit sich des auf für ist im dem nicht ein eine",
    "es": "de la que el en los del se las por un para con una su al lo como más pero",
    "fr": "de la le et les des en un du une que est pour qui dans par plus pas au sur",
    "it": "di e il la che in un per del non della una sono con le si da dei nel alla",
    "nl": "de van het een en in is dat op te zijn met voor niet aan er om ook als maar",
    "pt": "de a o que e do da em um para com não uma os no se na por mais as dos como",
}


_LANGUAGES = {code: frozenset(words.split()) for code, words in FUNCTION_WORDS.items()}
_ALL = frozenset().union(*_LANGUAGES.values())


def language(text: str) -> tuple[str, float]:
    """Return (language, share of its function words): "en", ..., or "unknown", 0.0.

    Counts 18 to 22 words of each of seven languages: enough to tell a page of English
    prose from the six others and from text without any of them. No judge of short
    texts, of code, or of languages that are not in FUNCTION_WORDS.
    """
    words = text.lower().split()
    found = [word for word in words if word in _ALL]
    if not found:
        return "unknown", 0.0
    count = {
        code: sum(map(known.__contains__, found)) for code, known in _LANGUAGES.items()
    }
    best = max(count, key=count.__getitem__)
    return best, count[best] / len(words)


@dataclass(frozen=True)
class Language(_Rules):
    """Keep texts of one language, judged by `language`."""

    keep: str = "en"
    min_share: float = 0.1  # of its function words among all words
    name: str = "language"

    def _rules(self, page: Page) -> Iterator[tuple[str, bool]]:
        code, share = language(page)
        yield "no known language", code == "unknown"
        yield f"looks like {code}", code != self.keep
        yield "few function words", share < self.min_share


# ---- Counting what is dropped


def judge(text: str, filters: Iterable[Filter]) -> str | None:
    """Return "filter: reason" of the first filter that drops the text, or None."""
    page = Page.of(text)
    reasons = (f"{drop.name}: {why}" for drop in filters if (why := drop(page)))
    return next(reasons, None)


# For pages of English prose, the cheapest that drops most first. Not for code.
PROSE_FILTERS = (Language(), GopherRepetition(), GopherQuality(), FineWebQuality())


# ---- A hash that stays

_BLOCK = 1 << 15  # bytes of text, or shingles, that are worked on at once: cache


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix the 64 bits of each number, one to one: the last steps of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _random(count: int, seed: int) -> np.ndarray:
    """Return `count` fixed uint64 numbers: splitmix64 from a seed, on any machine."""
    step = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(_mix(np.full(1, seed, np.uint64)) + step)


# Bytes of words: letters, digits, "_" and all of a character beyond ASCII. Capitals
# become small, any other byte ends a word.
_FOLD = bytes(
    ord(chr(b).lower()) if chr(b).isalnum() or b == 95 else 0 for b in range(128)
) + bytes(range(128, 256))
_BEYOND = re.compile(r"[^\w\x00-\x7f]+")  # punctuation and spaces beyond ASCII
_BASE = np.uint64(0x9FB21C651E98DF25)  # odd: it has an inverse modulo 2^64
_POWERS = np.cumprod(np.full(_BLOCK, _BASE))  # of place 0: base^1
_INVERSES = np.cumprod(np.full(_BLOCK, pow(int(_BASE), -1, 1 << 64), np.uint64)) * _BASE


def _fold(text: str) -> bytes:
    if not text.isascii():
        text = _BEYOND.sub(" ", text.lower())
    return text.encode("utf-8", "surrogatepass").translate(_FOLD)


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash the normalised words of texts: lower case, letters and digits alone.

    Returns (uint64 hashes of all words, int64 offsets of N + 1): the words of text i
    are hashes[offsets[i]:offsets[i + 1]]. A word's hash depends on its letters alone;
    one of more than _BLOCK bytes is cut into pieces of that size.
    """
    folded = [_fold(text) for text in texts]
    data = b"\0".join(folded) + b"\0"
    ends = np.cumsum([0, *(len(part) + 1 for part in folded)])
    hashes, starts, low = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    while low < len(data):  # whole words as long as there are any
        high = data.rfind(b"\0", low, low + _BLOCK) + 1 or low + _BLOCK
        block = np.frombuffer(data, np.uint8, min(high, len(data)) - low, low)
        inside = np.concatenate(([False], block != 0, [False]))
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        first, end = edges[::2], edges[1::2]
        # Sums of byte · base^place; the inverse power takes a word's place out again.
        sums = np.zeros(len(block) + 1, np.uint64)
        np.cumsum(block * _POWERS[: len(block)], out=sums[1:])
        hashes.append((sums[end] - sums[first]) * _INVERSES[first])
        starts.append(first + low)
        low = high
    return _mix(np.concatenate(hashes)), np.searchsorted(np.concatenate(starts), ends)


def run_hashes(
    words: np.ndarray, offsets: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Hash each run of n words that lies within one text.

    Returns (uint64 hashes, int64 index of the text of each), in order.
    """
    text = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    count = max(len(words) - n + 1, 0)
    total = words[:count].copy()
    for k in range(1, n):
        total *= _BASE
        total += words[k : k + count]
    inside = text[:count] == text[n - 1 :]
    return _mix(total[inside]), text[:count][inside]


# ---- MinHash


@dataclass(frozen=True)
class MinHash:
    """Near duplicates by MinHash and locality-sensitive hashing (Broder 1997).

    permutations: P, the numbers of a signature; bands: they are cut into this many
    bands of P / bands rows, and two documents meet when all rows of a band agree:
    with probability 1 - (1 - s^rows)^bands at a Jaccard similarity s of their sets of
    `shingle` consecutive words. Raises ConfigError where bands do not divide P.
    """

    permutations: int = 112
    bands: int = 14
    shingle: int = 5
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.permutations, self.bands, self.shingle, self.seed + 1) < 1:
            raise ConfigError("permutations, bands, shingle are at least 1, seed 0")
        if self.permutations % self.bands:
            raise ConfigError(f"permutations: a multiple of bands, {self.bands}")

    @property
    def rows(self) -> int:
        """Return the rows of a band."""
        return self.permutations // self.bands

    def meeting(self, similarity: float) -> float:
        """Return the probability that documents of this similarity become a pair."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def shingles(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Hash the shingles of texts, at least one each.

        Returns (uint64 hashes, int64 offsets of N + 1), as `word_hashes`. A text with
        fewer words than a shingle is one shingle: all of it, case and punctuation
        too, so that different short texts have nothing in common.
        """
        hashes, text = run_hashes(*word_hashes(texts), self.shingle)
        counts = np.bincount(text, minlength=len(texts))
        short = np.flatnonzero(counts == 0)
        plain = [" ".join(texts[i].split()) for i in short]
        data = [text.encode("utf-8", "surrogatepass") for text in plain]
        whole = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in data)
        hashes = np.insert(
            hashes, np.cumsum(counts)[short], np.frombuffer(whole, "<u8")
        )
        return hashes, np.append(0, np.cumsum(np.maximum(counts, 1)))

    def signatures(self, texts: Sequence[str]) -> np.ndarray:
        """Return the signatures, uint32 of shape (N, P); other texts do not matter.

        Entry k is the least value of (a_k · h + b_k) mod 2^32 over the shingles' hashes
        h. The a_k are odd, so that each is a permutation of the 32-bit numbers.
        """
        hashes, offsets = self.shingles(texts)
        small = (hashes >> np.uint64(32)).astype(np.uint32)
        random = _random(2 * self.permutations, self.seed).astype(np.uint32)
        odd, shift = random[::2] | np.uint32(1), random[1::2]
        signatures = np.empty((self.permutations, len(texts)), np.uint32)
        low = 0
        while low < len(texts):  # as many whole texts as fit into the cache
            high = int(np.searchsorted(offsets, offsets[low] + _BLOCK, "right")) - 1
            high = max(high, low + 1)
            block = small[offsets[low] : offsets[high]]
            starts, work = offsets[low:high] - offsets[low], np.empty_like(block)
            for k in range(self.permutations):
                np.multiply(block, odd[k], out=work)
                work += shift[k]
                np.minimum.reduceat(work, starts, out=signatures[k, low:high])
            low = high
        return np.ascontiguousarray(signatures.T)

    def band_keys(self, signatures: np.ndarray) -> np.ndarray:
        """Return a key for each band, uint64 of shape (N, bands), from signatures.

        Documents meet where a key is equal in the same column.
        """
        rows = signatures.reshape(len(signatures), self.bands, self.rows)
        keys = np.tile(_random(self.bands, self.seed), (len(rows), 1))
        for k in range(self.rows):
            keys = keys * _BASE + rows[:, :, k]
        return _mix(keys)

    def shingle_sets(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's different shingles as sorted uint64, for `jaccard`."""
        hashes, offsets = self.shingles(texts)
        return [np.unique(part) for part in np.split(hashes, offsets[1:-1])]


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a ∩ b| / |a ∪ b| of two sorted arrays without repetition."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / max(len(a) + len(b) - common, 1)


# ---- Keep one of each


@dataclass
class DedupReport:
    """What `deduplicate` did; kept + removed = documents.

    clusters: {kept document: all documents of its cluster}, of those with two or more.
    exact: removed as equal texts; near: removed after a comparison. compared: pairs
    whose shingles were compared.
    """

    documents: int
    kept: int
    exact: int
    near: int
    compared: int
    clusters: dict[int, list[int]]

    @property
    def removed(self) -> int:
        """Return the documents removed."""
        return self.exact + self.near

    @property
    def sizes(self) -> dict[int, int]:
        """Return {cluster size: clusters}, single documents too, by size."""
        sizes = Counter(map(len, self.clusters.values()))
        sizes[1] = self.kept - len(self.clusters)
        return dict(sorted((+sizes).items()))


class Clusters(dict[int, int]):
    """Union-find: each number leads to lower ones of its cluster, to the lowest."""

    def __missing__(self, i: int) -> int:
        return i

    def find(self, i: int) -> int:
        """Return the lowest member of i's cluster."""
        while self[i] != i:
            self[i] = i = self[self[i]]  # half of the way, for the next search
        return i

    def unite(self, i: int, j: int) -> None:
        """Put two clusters together."""
        low, high = sorted((self.find(i), self.find(j)))
        self[high] = low


def _groups(keys: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield the rows that share a key, ascending, band by band: two or more each."""
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        edges = np.flatnonzero(np.diff(column[order])) + 1
        bounds = [0, *edges.tolist(), len(order)]
        for start, end in pairwise(bounds):
            if end - start > 1:
                yield tuple(order[start:end].tolist())


def _batches(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[k : k + size] for k in range(0, len(items), size))


def deduplicate(
    docs: Sequence[str],
    threshold: float = 0.8,
    minhash: MinHash | None = None,
    batch: int = 1000,
) -> tuple[list[int], DedupReport]:
    """Keep one document, the first, of each cluster of duplicates.

    threshold: least Jaccard similarity of the shingle sets, computed for pairs that
    meet in a band, before they are united; a cluster is what such pairs connect. Equal
    texts are always duplicates. Returns (kept indices ascending, report).
    Raises ConfigError for a threshold outside 0 ... 1.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold {threshold} is no similarity: 0 < threshold <= 1")
    minhash = minhash or MinHash()
    copies: dict[str, list[int]] = defaultdict(list)  # the indices of each text
    for i, text in enumerate(docs):
        copies[text].append(i)
    texts = list(copies)
    parts = map(minhash.signatures, _batches(texts, batch))
    signatures = np.concatenate([minhash.signatures([]), *parts])
    groups = dict.fromkeys(_groups(minhash.band_keys(signatures)))
    met = sorted(set().union(*groups))
    parts = map(minhash.shingle_sets, _batches([texts[i] for i in met], batch))
    sets = dict(zip(met, chain.from_iterable(parts), strict=True))
    # Thousands of pages with one footer can meet, all unlike. Signatures that agree
    # in fewer entries belong to a duplicate once in 10^9 times (Hoeffding's bound).
    margin = np.sqrt(np.log(1e9) * minhash.permutations / 2)
    least = threshold * minhash.permutations - margin
    clusters, compared = Clusters(), set()
    for group in groups:
        roots = np.array([clusters.find(i) for i in group])
        mine = signatures[list(group)]
        for k in range(len(group)):
            apart = k + np.flatnonzero(roots[k:] != roots[k])
            agree = (mine[apart] == mine[k]).sum(1)
            for j in apart[agree >= least].tolist():
                pair = group[k], group[j]
                if roots[j] == roots[k] or pair in compared:
                    continue  # united meanwhile, or known to be unlike
                compared.add(pair)
                if jaccard(*(sets[i] for i in pair)) >= threshold:
                    clusters.unite(*pair)
                    roots[roots == roots[j]] = roots[k]
    members: dict[int, list[int]] = defaultdict(list)
    for i, same in enumerate(copies.values()):
        members[clusters.find(i)] += same
    named = {min(group): sorted(group) for group in members.values()}
    report = DedupReport(
        documents=len(docs),
        kept=len(named),
        exact=len(docs) - len(texts),
        near=len(texts) - len(named),
        compared=len(compared),
        clusters={i: group for i, group in named.items() if len(group) > 1},
    )
    return list(named), report


# ---- Exam questions


class Hit(NamedTuple):
    """A document that contains an evaluation item, or enough of it."""

    document: int  # index among the documents
    item: int  # index among the items
    share: float  # of the item's n-grams that the document has


class Decontaminator:
    """Finds evaluation items in documents, by runs of `ngram` normalised words.

    A document holds an item when it has at least `threshold` of the item's different
    runs. An item of fewer than `ngram` words is one run, found whole; one with fewer
    than `shortest` words is a stock phrase and never found: `too_short` lists those.
    Raises ConfigError: a threshold outside 0 ... 1, `shortest` above `ngram`.
    """

    def __init__(
        self,
        items: Sequence[str],
        ngram: int = 13,
        threshold: float = 0.5,
        shortest: int = 8,
    ) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold {threshold} is no share: 0 < threshold <= 1")
        if not 1 <= shortest <= ngram:
            raise ConfigError(f"shortest {shortest}: from 1 to ngram, {ngram}")
        self.threshold = threshold
        words, offsets = word_hashes(items)
        lengths = np.minimum(np.diff(offsets), ngram)  # of the runs of each item
        self.too_short = np.flatnonzero(lengths < shortest).tolist()
        self.needed = np.zeros(len(items), np.int64)  # different runs of each item
        # For each length of a run, the hashes, ascending, and the item of each.
        self.index: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for n in np.unique(lengths[lengths >= shortest]).tolist():
            runs, item = run_hashes(words, offsets, n)
            mine = lengths[item] == n
            pairs = np.unique(
                np.stack([runs[mine], item[mine].astype(np.uint64)]), axis=1
            )
            self.index[n] = pairs[0], pairs[1].astype(np.int64)
            self.needed += np.bincount(self.index[n][1], minlength=len(items))

    def find(self, texts: Sequence[str]) -> list[Hit]:
        """Return the hits in texts, by document, then item."""
        words, offsets = word_hashes(texts)
        found: set[tuple[int, int, int]] = set()  # document, item, run
        for n, (runs, item) in self.index.items():
            hashes, text = run_hashes(words, offsets, n)
            at, end = (
                np.searchsorted(runs, hashes, side) for side in ("left", "right")
            )
            for k in np.flatnonzero(at < end).tolist():
                owners = item[at[k] : end[k]].tolist()
                found.update((int(text[k]), i, int(hashes[k])) for i in owners)
        shares = Counter((t, i) for t, i, _ in found)
        hits = (Hit(t, i, c / int(self.needed[i])) for (t, i), c in shares.items())
        return sorted(hit for hit in hits if hit.share >= self.threshold)


def decontaminate(
    docs: Sequence[str],
    items: Sequence[str],
    ngram: int = 13,
    threshold: float = 0.5,
    shortest: int = 8,
    batch: int = 1000,
) -> list[Hit]:
    """Return which documents contain which evaluation items, by `Decontaminator`."""
    finder = Decontaminator(items, ngram, threshold, shortest)
    return [
        hit._replace(document=hit.document + k)
        for k in range(0, len(docs), batch)
        for hit in finder.find(docs[k : k + batch])
    ]


# ---- A judge that learns


class QualityClassifier:
    """Logistic regression on hashed words and pairs of words.

    A text is the mean of the weights of its words and pairs, plus a bias, as in
    fastText (Joulin et al. 2017) without its hidden layer. Two that were trained on
    the same texts are equal to the last bit.
    """

    VERSION = 1

    def __init__(self, bits: int = 18, ngrams: int = 2) -> None:
        if not (1 <= bits <= 28 and ngrams >= 1):
            raise ConfigError(f"bits {bits} (1 to 28), ngrams {ngrams} (at least 1)")
        self.bits, self.ngrams = bits, ngrams
        self.weights = np.zeros(1 << bits)
        self.bias = 0.0

    def features(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return (bucket of each feature, text of each feature), both int64."""
        words, offsets = word_hashes(texts)
        runs = [run_hashes(words, offsets, n) for n in range(1, self.ngrams + 1)]
        hashes, text = (np.concatenate(part) for part in zip(*runs, strict=True))
        return (hashes >> np.uint64(64 - self.bits)).astype(np.int64), text

    def scores(self, texts: Sequence[str]) -> np.ndarray:
        """Return the probability of quality of each text, fp64 of shape (N,)."""
        bucket, text = self.features(texts)
        total = np.bincount(text, self.weights[bucket], len(texts))
        count = np.bincount(text, minlength=len(texts))
        return 1 / (1 + np.exp(-(total / np.maximum(count, 1) + self.bias)))

    def fit(
        self, good: Sequence[str], bad: Sequence[str], steps: int = 100
    ) -> list[float]:
        """Train on all texts at once by AdaGrad; both classes weigh the same.

        Returns the loss in nats of each step. Raises DataError when a class is empty.
        """
        if not len(good) or not len(bad):
            raise DataError("a classifier needs texts of both kinds: one list is empty")
        bucket, text = self.features([*good, *bad])
        label = np.repeat([1.0, 0.0], [len(good), len(bad)])
        weight = np.repeat([0.5 / len(good), 0.5 / len(bad)], [len(good), len(bad)])
        share = 1 / np.maximum(np.bincount(text, minlength=len(label)), 1)
        params = np.append(self.weights, self.bias)
        squares, losses = np.full(len(params), 1e-12), []
        for _ in range(steps):
            total = np.bincount(text, params[bucket], len(label))
            logit = total * share + params[-1]
            losses.append(float(weight @ (np.logaddexp(0, logit) - label * logit)))
            error = weight * (1 / (1 + np.exp(-logit)) - label)
            slope = np.bincount(bucket, (error * share)[text], len(params))
            slope += 1e-5 * params  # L2 penalty, but not of the bias
            slope[-1] = error.sum()
            squares += slope**2
            params -= slope / np.sqrt(squares)
        self.weights, self.bias = params[:-1], float(params[-1])
        return losses

    def save(self, path: str | Path) -> None:
        """Write weights and settings as one .npz file."""
        kept = {
            name: getattr(self, name) for name in ("bits", "ngrams", "bias", "weights")
        }
        with Path(path).open("wb") as file:
            np.savez(file, version=self.VERSION, **kept)

    @classmethod
    def load(cls, path: str | Path) -> "QualityClassifier":
        """Read what `save` wrote. Raises DataError for another file or version."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                version, weights = int(stored["version"]), stored["weights"]
                model = cls(int(stored["bits"]), int(stored["ngrams"]))
                model.bias = float(stored["bias"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is no classifier: {error}") from None
        if version != cls.VERSION or weights.shape != model.weights.shape:
            raise DataError(
                f"{path}: version {version} with {weights.size} weights, not version "
                f"{cls.VERSION} with {model.weights.size}: train it again"
            )
        model.weights = weights
        return model
