"""Filters of pages that are wrong in ways people have shipped."""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

from littlelm_core import curation
from littlelm_core.curation import (
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    Language,
)


def others(**changed):
    return SimpleNamespace(**{**vars(curation), **changed})


@dataclass(frozen=True)
class DividesByZero(GopherQuality):
    """The mean width of no words."""

    def __call__(self, text):
        words = text.split()
        if sum(map(len, words)) / len(words) < self.min_width:
            return "short words"
        return super().__call__(text)


@dataclass(frozen=True)
class CountsSymbols(GopherQuality):
    """A dash between blanks is a word."""

    def __call__(self, text):
        if len(text.split()) >= self.min_words:
            return None if super().__call__(text) == "too few words" else "else"
        return "too few words"


@dataclass(frozen=True)
class AtLeastNotMoreThan(GopherQuality):
    """Drops at the threshold, not above it."""

    max_symbols: float = 0.1 - 1e-9


@dataclass(frozen=True)
class OnlyDashes(GopherQuality):
    """Knows one kind of bullet."""

    def __call__(self, text):
        return super().__call__(text.replace("•", "x"))


@dataclass(frozen=True)
class CountsStopWords(GopherQuality):
    """Counts occurrences, where the paper counts different words."""

    def __call__(self, text):
        reason = super().__call__(text)
        often = sum(word in curation.STOP_WORDS for word in text.split())
        return None if reason == "no stop words" and often >= 2 else reason


@dataclass(frozen=True)
class CountsOverlaps(GopherRepetition):
    """Counts every repeated n-gram, so that each word counts n times."""

    def __call__(self, text):
        words = text.split()
        for n, limit in self.repeated:
            grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            seen, characters = set(), 0
            for gram in grams:
                characters += sum(map(len, gram)) if gram in seen else 0
                seen.add(gram)
            if characters / len(text) > limit:
                return "repeated"
        return GopherRepetition(self.parts, self.top, ())(text)


@dataclass(frozen=True)
class CountsTheFirst(GopherRepetition):
    """All lines that occur twice, the first of each included."""

    def __call__(self, text):
        lines = curation.Page(text).lines
        counts = Counter(lines)
        again = sum(count for count in counts.values() if count > 1)
        if lines and again / len(lines) > self.parts[0]:
            return "repeated lines"
        return super().__call__(text)


@dataclass(frozen=True)
class OldThresholds(GopherRepetition):
    top: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.2), (4, 0.2))


@dataclass(frozen=True)
class WholePage(C4Quality):
    """One line about JavaScript condemns the page."""

    def __call__(self, text):
        return "javascript" if "javascript" in text.lower() else super().__call__(text)


@dataclass(frozen=True)
class CountsLines(C4Quality):
    """A line is a sentence."""

    def __call__(self, text):
        lines = self.clean(text).splitlines()
        reason = super().__call__(text)
        return reason or ("few" if len(lines) < self.min_sentences else None)


@dataclass(frozen=True)
class CodeIsFine(C4Quality):
    def __call__(self, text):
        return super().__call__(text.replace("{", "("))


@dataclass(frozen=True)
class AsciiEnds(FineWebQuality):
    """Only English ends sentences."""

    def __call__(self, text):
        return super().__call__(text.replace("。", "x"))


@dataclass(frozen=True)
class ShorterThan(FineWebQuality):
    short: int = 29


@dataclass(frozen=True)
class AnyMatch(Language):
    """A text may be English as long as English words are in it."""

    def __call__(self, text):
        words = curation.FUNCTION_WORDS[self.keep].split()
        return None if set(text.lower().split()) & set(words) else "another"


def nfkc(text):
    return curation.normalize(unicodedata.normalize("NFKC", text))


def strips_lines(text):
    return "\n".join(line.strip() for line in curation.normalize(text).split("\n"))


def one_pass(text):
    """Composes first and takes invisible characters out after it."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
    text = re.sub(r"\n{3,}", "\n\n", text.translate(curation._SPELLING))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def judges_all(text, filters):
    reasons = [f"{drop.name}: {reason}" for drop in filters if (reason := drop(text))]
    return reasons[0] if reasons else None


ZOO = {
    "divides by no words": (
        others(GopherQuality=DividesByZero),
        "test_nothing_and_one_word_are_no_trouble",
    ),
    "symbols are words": (
        others(GopherQuality=CountsSymbols),
        "test_gopher_counts_words",
    ),
    "drops at the threshold": (
        others(GopherQuality=AtLeastNotMoreThan),
        "test_gopher_counts_symbols",
    ),
    "one kind of bullet": (
        others(GopherQuality=OnlyDashes),
        "test_gopher_looks_at_lines",
    ),
    "stop words twice": (
        others(GopherQuality=CountsStopWords),
        "test_gopher_wants_letters_and_english",
    ),
    "overlapping n-grams": (
        others(GopherRepetition=CountsOverlaps),
        "test_gopher_measures_repeated_n_grams",
    ),
    "the first is no repeat": (
        others(GopherRepetition=CountsTheFirst),
        "test_gopher_finds_repeated_lines_and_paragraphs",
    ),
    "thresholds from memory": (
        others(GopherRepetition=OldThresholds),
        "test_gopher_thresholds_are_those_of_the_paper",
    ),
    "a line condemns the page": (
        others(C4Quality=WholePage),
        "test_c4_keeps_lines_that_are_sentences",
    ),
    "lines for sentences": (
        others(C4Quality=CountsLines),
        "test_c4_keeps_lines_that_are_sentences",
    ),
    "brackets stay": (others(C4Quality=CodeIsFine), "test_c4_drops_code_and_filler"),
    "ASCII ends of sentences": (
        others(FineWebQuality=AsciiEnds),
        "test_fineweb_looks_at_lines",
    ),
    "short by one": (others(FineWebQuality=ShorterThan), "test_fineweb_looks_at_lines"),
    "any word of a language": (
        others(Language=AnyMatch),
        "test_language_keeps_the_one_asked_for",
    ),
    "NFKC": (others(normalize=nfkc), "test_normalize_gives_one_spelling"),
    "indentation lost": (
        others(normalize=strips_lines),
        "test_normalize_gives_one_spelling",
    ),
    "composed too early": (others(normalize=one_pass), "test_normalize_twice_is_once"),
    "asks every filter": (
        others(judge=judges_all),
        "test_judge_names_the_first_filter_that_drops",
    ),
}
