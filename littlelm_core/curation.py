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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
    "LearnedQuality",
    "MinHash",
    "PROSE_FILTERS",
    "Page",
    "QualityClassifier",
    "STOP_WORDS",
    "SYMBOLS",
    "TERMINAL",
    "Tally",
    "band_groups",
    "decontaminate",
    "deduplicate",
    "jaccard",
    "judge",
    "language",
    "mix",
    "normalize",
    "run_hashes",
    "word_hashes",
]


# ---- One spelling

# What ends a line, what is a space, and what nobody sees.
_BREAK = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_SPACE = re.compile("[\x1f\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_UNSEEN = re.compile("[\0-\x08\x0e-\x1b\x7f-\x9f\xad\u200b\u2060\ufeff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# All of these and a little more: most texts have none, and one search is enough.
_ODD = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\xad\u1680\u2000-\u200b\u2028-\u202f\u205f-\u2060\u3000\ufeff"
    "\ud800-\udfff]"
)


def normalize(text: str) -> str:
    """Give what looks the same one spelling; a second call changes nothing.

    Unicode to NFC, line ends to LF, the many spaces to " ", invisible characters out;
    no blanks at line ends, at most one empty line in a row, none at the borders of the
    text. Indentation stays: it means something in code. A lone surrogate, which UTF-8
    cannot write, becomes U+FFFD.
    """
    if _ODD.search(text):
        text = _UNSEEN.sub("", _SPACE.sub(" ", _BREAK.sub("\n", text)))
        text = _SURROGATE.sub("\ufffd", text)
    text = unicodedata.normalize("NFC", text)
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


# ---- Words, once


class Page(str):
    """A text that cuts itself into words and lines once, however many filters ask.

    Words are what white space separates, as in Gopher: "end." is one word.
    """

    @cached_property
    def words(self) -> list[str]:
        """Return the words, in order."""
        return self.split()

    @cached_property
    def odd_words(self) -> list[str]:
        """Return the words that are more, or less, than a run of letters."""
        return [word for word in self.words if not word.isalpha()]

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines that are not blank."""
        return [line for line in self.split("\n") if line and not line.isspace()]

    @classmethod
    def of(cls, text: str) -> "Page":
        """Return the text as a Page; one that is a Page already stays itself."""
        return text if isinstance(text, cls) else cls(text)


# ---- Gopher: is it prose?

# Characters that make a word no word when there is nothing else in it.
SYMBOLS = string.punctuation + "…‘’“”„«»‹›–—―•·¡¿。、，！？；：（）【】《》「」"
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})


@dataclass(frozen=True)
class GopherQuality:
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

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        text = Page.of(text)
        total, odd = len(text.words), text.odd_words
        symbols = [w for w in odd if not w.strip(SYMBOLS)]
        count = total - len(symbols)
        if count < max(self.min_words, 1):
            return "too few words"
        if count > self.max_words:
            return "too many words"
        width = (sum(map(len, text.words)) - sum(map(len, symbols))) / count
        if not self.min_width <= width <= self.max_width:
            return "short words" if width < self.min_width else "long words"
        ellipses = text.count("...") + text.count("…")
        if text.count("#") / total > self.max_symbols:
            return "hashes"
        if ellipses / total > self.max_symbols:
            return "ellipses"
        lines = text.splitlines() if ellipses or "-" in text or "•" in text else [""]
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if bullets / len(lines) > self.max_bullets:
            return "bullets"
        ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        if ends / len(lines) > self.max_ellipses:
            return "cut lines"
        no_letter = sum(not any(map(str.isalpha, word)) for word in odd)
        if (total - no_letter) / total < self.min_alphabetic:
            return "few letters"
        if len(STOP_WORDS.intersection(text.words)) < self.min_stop_words:
            return "no stop words"
        return None


# ---- Gopher: does it repeat itself?


def _duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Return how many parts stood before already, and their characters."""
    unique = set(parts)
    if len(unique) == len(parts):
        return 0, 0
    return len(parts) - len(unique), sum(map(len, parts)) - sum(map(len, unique))


def _groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (group of each key, size of each group); equal keys share a group."""
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    first = np.append(True, ranked[1:] != ranked[:-1])
    group = np.empty(len(keys), np.int64)
    group[order] = np.cumsum(first) - 1
    return group, np.diff(np.flatnonzero(first), append=len(keys))


def _covered(places: list[int], groups: list[int], n: int, ends: np.ndarray) -> int:
    """Return the characters in n-grams seen before; after one, n words are skipped."""
    seen: set[int] = set()
    characters, free = 0, 0
    for place, group in zip(places, groups, strict=True):
        if place < free:
            continue
        if group in seen:
            characters += int(ends[place + n] - ends[place])
            free = place + n
        seen.add(group)
    return characters


@dataclass(frozen=True)
class GopherRepetition:
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

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        text = Page.of(text)
        if not text.lines:
            return "empty"
        paragraphs = re.split(r"\n{2,}", text.strip())
        for what, parts in (("paragraphs", paragraphs), ("lines", text.lines)):
            number, characters = _duplicates(parts)
            if number / len(parts) > self.parts[0]:
                return f"repeated {what}"
            if characters / len(text) > self.parts[1]:
                return f"characters of repeated {what}"
        return self._n_grams(text)

    def _n_grams(self, text: Page) -> str | None:
        """Grow n-grams word by word: only what occurs twice can grow and repeat."""
        words, total = text.words, len(text.words)
        number = dict(zip(words, range(total), strict=True))
        ids = np.array(list(map(number.__getitem__, words)), np.int64)
        ends = np.append(0, np.cumsum(np.array(list(map(len, words)), np.int64)))
        top, repeated = dict(self.top), dict(self.repeated)
        places, groups, sizes = np.arange(total), ids, np.bincount(ids)
        for n in range(2, min(max(top | repeated, default=0), total) + 1):
            again = (sizes[groups] > 1) & (places + n <= total)
            places, groups = places[again], groups[again]
            if not len(places) and n > max(top, default=0):
                break  # as in most prose: no run of five words occurs twice
            groups, sizes = _groups(groups * total + ids[places + n - 1])
            if n in top:
                count, best = 1, 0  # where nothing repeats, the first one is the top
                if len(sizes) and sizes.max() > 1:
                    count = int(sizes.max())
                    best = int(places[np.argmax(sizes[groups] == count)])
                length = int(ends[best + n] - ends[best]) + n - 1
                if count * length / len(text) > top[n]:
                    return f"top {n}-gram"
            if n in repeated:
                again = sizes[groups] > 1
                length = _covered(
                    places[again].tolist(), groups[again].tolist(), n, ends
                )
                if length / len(text) > repeated[n]:
                    return f"repeated {n}-grams"
        return None


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
            if "[" in line:
                line = _CITATION.sub("", line)
            end = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
            if len(words) < self.min_words or (self.terminal and not end):
                continue
            lower = line.lower()
            if "lorem ipsum" in lower:
                return [], "lorem ipsum"
            if "javascript" in lower:
                continue
            if "{" in line:
                return [], "curly bracket"
            if _POLICY.search(lower):
                continue
            sentences += sum(map(bool, _SENTENCE.split(line)))
            kept.append(line)
        return kept, "too few sentences" if sentences < self.min_sentences else None


# Ends of sentences in the scripts of the world's larger languages.
TERMINAL = frozenset(".?!。？！．｡؟۔।॥։።၊။។៕᙮⁇⁈⁉‼‽")


@dataclass(frozen=True)
class FineWebQuality:
    """FineWeb's own rules (Penedo et al. 2024), from comparing good and bad dumps."""

    min_terminal: float = 0.12  # share of lines that end in a full stop or the like
    max_short: float = 0.67  # share of lines of at most `short` characters
    short: int = 30
    max_repeated: float = 0.01  # share of characters in lines that stood before
    max_newlines: float = 0.3  # line ends for each word
    name: str = "fineweb"

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        text = Page.of(text)
        lines, newlines = text.lines, text.count("\n")
        if not lines:
            return "empty"
        ends = sum(map(TERMINAL.__contains__, [line[-1] for line in lines]))
        if ends / len(lines) < self.min_terminal:
            return "lines without an end"
        if sum(len(line) <= self.short for line in lines) / len(lines) > self.max_short:
            return "short lines"
        if _duplicates(lines)[1] / (len(text) - newlines) > self.max_repeated:
            return "repeated lines"
        return "a list" if newlines / len(text.words) > self.max_newlines else None


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
_FUNCTION_WORDS = frozenset().union(*_LANGUAGES.values())


def language(text: str) -> tuple[str, float]:
    """Return (language, share of its function words): "en", ..., or "unknown", 0.0.

    Counts 18 to 20 words of each of seven languages: enough to tell a page of English
    prose from the six others and from text without any of them. No judge of short
    texts, of code, or of languages that are not in FUNCTION_WORDS.
    """
    words = text.lower().split()
    found = [word for word in words if word in _FUNCTION_WORDS]
    share = {
        code: sum(map(known.__contains__, found)) / max(len(words), 1)
        for code, known in _LANGUAGES.items()
    }
    best = max(share, key=share.__getitem__)
    return (best, share[best]) if share[best] > 0 else ("unknown", 0.0)


@dataclass(frozen=True)
class Language:
    """Keep texts of one language, judged by `language`."""

    keep: str = "en"
    min_share: float = 0.1  # of its function words among all words
    name: str = "language"

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        code, share = language(text)
        if code != self.keep:
            return f"looks like {code}" if code != "unknown" else "no known language"
        return None if share >= self.min_share else "few function words"


# ---- Counting what is dropped

Filter = Callable[[str], str | None]  # with a `name`


def judge(text: str, filters: Iterable[Filter]) -> str | None:
    """Return "filter: reason" of the first filter that drops the text, or None."""
    text = Page.of(text)
    for drop in filters:
        if reason := drop(text):
            return f"{drop.name}: {reason}"
    return None


@dataclass
class Tally:
    """What was dropped and why, with the first few examples of each reason."""

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    keep_examples: int = 3
    example_length: int = 300

    def add(self, text: str, reason: str | None) -> None:
        """Count a document: kept when there is no reason to drop it."""
        self.seen += 1
        self.kept += reason is None
        if reason is not None:
            self.dropped[reason] += 1
            self.characters[reason] += len(text)
            shown = self.examples.setdefault(reason, [])
            if len(shown) < self.keep_examples:
                shown.append(str(text[: self.example_length]))

    def merge(self, later: "Tally") -> None:
        """Add the tally of the documents that come after this one's."""
        self.seen += later.seen
        self.kept += later.kept
        self.dropped += later.dropped
        self.characters += later.characters
        for reason, texts in later.examples.items():
            shown = self.examples.setdefault(reason, [])
            shown += texts[: self.keep_examples - len(shown)]


# For pages of English prose, the cheapest that drops most first. Not for code.
PROSE_FILTERS: tuple[Filter, ...] = (
    Language(),
    GopherRepetition(),
    GopherQuality(),
    FineWebQuality(),
)


# ---- A hash that stays

_BLOCK = 1 << 15  # bytes of text, or shingles, that are worked on at once: cache


def mix(x: np.ndarray) -> np.ndarray:
    """Mix the 64 bits of each number, one to one: the last steps of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _random(count: int, seed: int) -> np.ndarray:
    """Return `count` fixed uint64 numbers: splitmix64 from a seed, on any machine."""
    step = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix(mix(np.full(1, seed, np.uint64)) + step)


# Bytes of words: letters, digits, "_" and all of a character beyond ASCII. Capitals
# become small, any other byte ends a word.
_FOLD = bytes(
    ord(chr(b).lower()) if chr(b).isalnum() or b == 95 else 0 for b in range(128)
) + bytes(range(128, 256))
_BEYOND = re.compile(r"[^\w\x00-\x7f]+")  # punctuation and spaces beyond ASCII
_BLOB = re.compile(rb"[^\0]{8192}")
_BASE = np.uint64(0x9FB21C651E98DF25)  # odd: it has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


@lru_cache(maxsize=4)
def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Return base^0 ... base^(count - 1) modulo 2^64."""
    return np.multiply.accumulate(np.append(np.uint64(1), np.full(count - 1, base)))


def _fold(text: str) -> bytes:
    if not text.isascii():
        text = _BEYOND.sub(" ", text.lower())
    data = text.encode("utf-8", "surrogatepass").translate(_FOLD)
    # A blob of 100 MB as one word would need 3 GB below: it is cut.
    return _BLOB.sub(rb"\g<0>\0", data) if len(data) > 1 << 20 else data


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash the normalised words of texts: lower case, letters and digits alone.

    Returns (uint64 hashes of all words, int64 offsets of N + 1): the words of text i
    are hashes[offsets[i]:offsets[i + 1]]. A word's hash depends on its letters alone.
    In texts above 1 MB words of more than 8192 bytes are cut.
    """
    folded = [_fold(text) for text in texts]
    data = b"\0" + b"\0".join(folded) + b"\0"
    hashes, starts, low = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    while low < len(data) - 1:  # from one end of a word to another: none is cut
        high = data.rfind(b"\0", low + 1, low + _BLOCK)
        high = high if high > 0 else data.find(b"\0", low + 1)
        block = np.frombuffer(data, np.uint8, high + 1 - low, low)
        inside = block != 0
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        first, last = edges[::2], edges[1::2]
        # Sums of byte · base^place; the inverse power takes a word's place out again.
        size = max(_BLOCK, 1 << (high - low).bit_length())
        sums = np.cumsum(block * _powers(_BASE, size)[: len(block)])
        hashes.append((sums[last] - sums[first]) * _powers(_INVERSE, size)[first])
        starts.append(first + low)
        low = high
    ends = np.cumsum([0, *(len(part) + 1 for part in folded)])
    return mix(np.concatenate(hashes)), np.searchsorted(np.concatenate(starts), ends)


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
    return mix(total[inside]), text[:count][inside]


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
            raise ConfigError(
                f"{self.permutations} permutations do not fill {self.bands} bands "
                "evenly: make permutations a multiple of bands"
            )

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
        whole = np.array([_whole(texts[i]) for i in short], np.uint64)
        hashes = np.insert(hashes, np.cumsum(counts)[short], whole)
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
                np.add(work, shift[k], out=work)
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
        return mix(keys)

    def shingle_sets(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's different shingles as sorted uint64, for `jaccard`."""
        hashes, offsets = self.shingles(texts)
        return [np.unique(part) for part in np.split(hashes, offsets[1:-1])]


def _whole(text: str) -> int:
    plain = " ".join(text.split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "little")


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a ∩ b| / |a ∪ b| of two sorted arrays without repetition."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / max(len(a) + len(b) - common, 1)


# ---- Keep one of each


@dataclass
class DedupReport:
    """What `deduplicate` did; kept + removed = documents.

    clusters: {kept document: all documents of its cluster}, of those with two or more.
    exact: removed as equal texts; near: removed after a comparison. candidates: pairs
    that met in a band; rejected: those that were too unlike.
    """

    documents: int
    kept: int
    exact: int
    near: int
    candidates: int
    rejected: int
    clusters: dict[int, list[int]]

    @property
    def removed(self) -> int:
        """Return the documents removed."""
        return self.exact + self.near

    @property
    def sizes(self) -> dict[int, int]:
        """Return {cluster size: clusters}, single documents too, by size."""
        sizes = Counter(map(len, self.clusters.values()))
        alone = self.documents - sum(map(len, self.clusters.values()))
        return dict(sorted((sizes + Counter({1: alone})).items()))


class Clusters:
    """Union-find whose root is always the lowest member."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def find(self, i: int) -> int:
        """Return the lowest member of i's cluster."""
        root = i
        while (up := self.parent.get(root, root)) != root:
            root = up
        while i != root:  # the next search is shorter
            self.parent[i], i = root, self.parent.get(i, root)
        return root

    def unite(self, i: int, j: int) -> None:
        """Put two clusters together."""
        low, high = sorted((self.find(i), self.find(j)))
        if low != high:
            self.parent[high] = low


def band_groups(keys: np.ndarray) -> Iterable[np.ndarray]:
    """Yield the rows that share a key, ascending, band by band: two or more each."""
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        ranked = column[order]
        edges = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
        starts = np.concatenate(([0], edges))
        sizes = np.diff(starts, append=len(column))
        for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True):
            yield order[start : start + size]


def deduplicate(
    docs: Sequence[str],
    threshold: float = 0.8,
    minhash: MinHash | None = None,
    batch: int = 1000,
) -> tuple[list[int], DedupReport]:
    """Keep one document, the first, of each cluster of duplicates.

    threshold: least Jaccard similarity of the shingle sets, computed for each pair that
    meets in a band, before they are united; a cluster is what such pairs connect. Equal
    texts are always duplicates. Returns (kept indices ascending, report).
    Raises ConfigError for a threshold outside 0 ... 1.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold {threshold} is no similarity: 0 < threshold <= 1")
    minhash = minhash or MinHash()
    clusters, first = Clusters(), {}
    for i, text in enumerate(docs):
        clusters.unite(first.setdefault(text, i), i)
    unique = list(first.values())
    keys = [
        minhash.band_keys(minhash.signatures([docs[i] for i in unique[k : k + batch]]))
        for k in range(0, len(unique), batch)
    ]
    groups = list(band_groups(np.concatenate(keys))) if keys else []
    groups = [[unique[i] for i in group] for group in groups]
    met = sorted({i for group in groups for i in group})
    sets: dict[int, np.ndarray] = {}
    for k in range(0, len(met), batch):
        part = met[k : k + batch]
        found = minhash.shingle_sets([docs[i] for i in part])
        sets.update(zip(part, found, strict=True))
    compared: dict[tuple[int, int], bool] = {}

    def close(i: int, j: int) -> bool:
        if (i, j) not in compared:
            compared[i, j] = jaccard(sets[i], sets[j]) >= threshold
        return compared[i, j]

    for group in groups:
        parts: dict[int, list[int]] = {}  # the group so far, by cluster
        for j in group:
            mine = parts.pop(clusters.find(j), [])
            for root, others in list(parts.items()):
                if any(close(i, j) for i in others):
                    clusters.unite(root, j)
                    mine += parts.pop(root)
            parts[clusters.find(j)] = [*mine, j]
    members: dict[int, list[int]] = {}
    for i in range(len(docs)):
        members.setdefault(clusters.find(i), []).append(i)
    report = DedupReport(
        documents=len(docs),
        kept=len(members),
        exact=len(docs) - len(unique),
        near=len(unique) - len(members),
        candidates=len(compared),
        rejected=sum(not close for close in compared.values()),
        clusters={i: group for i, group in members.items() if len(group) > 1},
    )
    return sorted(members), report


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
        counts = np.diff(offsets)
        self.too_short = np.flatnonzero(counts < shortest).tolist()
        self.needed = np.zeros(len(items), np.int64)  # different runs of each item
        # For each length of a run, the hashes, ascending, and the item of each.
        self.index: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for n in sorted({min(ngram, c) for c in counts.tolist() if c >= shortest}):
            runs, item = run_hashes(words, offsets, n)
            mine = (counts[item] == n) | ((n == ngram) & (counts[item] > n))
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
                for owner in item[at[k] : end[k]].tolist():
                    found.add((int(text[k]), owner, int(hashes[k])))
        shares = Counter((t, owner) for t, owner, _ in found)
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
    hits = []
    for k in range(0, len(docs), batch):
        found = finder.find(docs[k : k + batch])
        hits += [hit._replace(document=hit.document + k) for hit in found]
    return hits


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
        self,
        good: Sequence[str],
        bad: Sequence[str],
        steps: int = 100,
        lr: float = 1.0,
        decay: float = 1e-5,
    ) -> list[float]:
        """Train on all texts at once by AdaGrad; both classes weigh the same.

        decay: L2 penalty. Returns the loss in nats of each step. Raises DataError
        when a class has no text.
        """
        if not len(good) or not len(bad):
            raise DataError("a classifier needs texts of both kinds: one list is empty")
        bucket, text = self.features([*good, *bad])
        label = np.repeat([1.0, 0.0], [len(good), len(bad)])
        weight = np.repeat([0.5 / len(good), 0.5 / len(bad)], [len(good), len(bad)])
        share = 1 / np.maximum(np.bincount(text, minlength=len(label)), 1)
        squares, bias_squares = np.full(len(self.weights), 1e-12), 1e-12
        losses = []
        for _ in range(steps):
            total = np.bincount(text, self.weights[bucket], len(label))
            logit = total * share + self.bias
            losses.append(float(weight @ (np.logaddexp(0, logit) - label * logit)))
            error = weight * (1 / (1 + np.exp(-logit)) - label)
            slope = np.bincount(bucket, (error * share)[text], len(self.weights))
            slope += decay * self.weights
            squares += slope**2
            self.weights -= lr * slope / np.sqrt(squares)
            bias_squares += error.sum() ** 2
            self.bias -= lr * float(error.sum()) / float(np.sqrt(bias_squares))
        return losses

    def save(self, path: str | Path) -> None:
        """Write weights and settings as one .npz file."""
        with Path(path).open("wb") as file:
            np.savez(
                file, version=self.VERSION, bits=self.bits, ngrams=self.ngrams,
                bias=self.bias, weights=self.weights,
            )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> "QualityClassifier":
        """Read what `save` wrote. Raises DataError for another file or version."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                found = {name: stored[name] for name in stored.files}
            version, weights = int(found["version"]), found["weights"]
            model = cls(int(found["bits"]), int(found["ngrams"]))
            model.bias = float(found["bias"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(f"{path} is no classifier: {error}") from None
        if version != cls.VERSION or weights.shape != model.weights.shape:
            raise DataError(
                f"{path}: version {version} with {weights.size} weights, not version "
                f"{cls.VERSION} with {model.weights.size}: train it again"
            )
        model.weights = weights
        return model


@dataclass(frozen=True)
class LearnedQuality:
    """Keep texts that a QualityClassifier gives at least `min_score`."""

    classifier: QualityClassifier
    min_score: float = 0.5
    name: str = "classifier"

    def __call__(self, text: str) -> str | None:
        """Return why the text is dropped, or None."""
        score = float(self.classifier.scores([text])[0])
        return None if score >= self.min_score else "low score"
