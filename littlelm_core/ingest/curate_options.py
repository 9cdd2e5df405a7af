"""What `data curate` is asked to do, and its counts of what was dropped."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from littlelm_core import curation
from littlelm_core.config import ConfigError, nearest

EXAMPLES = 4  # of each reason
SHOWN = 600  # characters of an example
FORMATS = ("jsonl.zst", "jsonl.gz", "parquet")
FILTERS = {
    f.name: f
    for f in (
        curation.Language(),
        curation.GopherRepetition(),
        curation.GopherQuality(),
        curation.FineWebQuality(),
        curation.C4Quality(),
    )
}
FILTER_SETS = {
    "prose": tuple(f.name for f in curation.PROSE_FILTERS),
    "all": tuple(FILTERS),
    "none": (),
}


def filter_names(given: str) -> tuple[str, ...]:
    """Return the filters of a set, or of names with commas between."""
    names = (name.strip() for name in given.split(","))
    return FILTER_SETS.get(given) or tuple(name for name in names if name != "none")


@dataclass(frozen=True)
class Options:
    """What decides the outcome, beside the sources.

    filters: names of FILTERS, in order. dedup: "near", "exact" or "none". against:
    files or folders of evaluation items. classifier: what QualityClassifier.save wrote.
    Raises ConfigError for a name that is none.
    """

    text_key: str = "text"
    normalize: bool = True
    filters: tuple[str, ...] = FILTER_SETS["prose"]
    language: str = "en"
    dedup: str = "near"
    threshold: float = 0.8
    minhash: curation.MinHash = field(default_factory=curation.MinHash)
    against: tuple[str, ...] = ()
    ngram: int = 13
    overlap: float = 0.5
    classifier: str = ""
    min_quality: float = 0.5
    format: str = "jsonl.zst"

    def __post_init__(self) -> None:
        for name in self.filters:
            if name not in FILTERS:
                known = [*FILTER_SETS, *FILTERS]
                raise ConfigError(f"no filter {name!r}{nearest(name, known)}")
        for what, value, known in (
            ("dedup", self.dedup, ("near", "exact", "none")),
            ("format", self.format, FORMATS),
            ("language", self.language, tuple(curation.FUNCTION_WORDS)),
        ):
            if value not in known:
                raise ConfigError(f"{what} {value!r}: one of {', '.join(known)}")
        for what in ("threshold", "overlap"):
            if not 0 < getattr(self, what) <= 1:
                raise ConfigError(f"{what} {getattr(self, what)} must be in (0, 1]")
        if not 0 <= self.min_quality <= 1:
            raise ConfigError(f"min_quality {self.min_quality} must be in 0 to 1")


class Examples:
    """Keeps those of each reason whose texts have the lowest hashes.

    So they are the same for any order and any number of processes, and no process has
    to know of another's.
    """

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
        self.number = 0  # of equal hashes the first one stays

    def add(self, reason: str, digest: int, make: Callable[[], dict[str, Any]]) -> None:
        """Offer an example; `make` is called only if it is kept."""
        held = self.held.setdefault(reason, [])
        if len(held) == EXAMPLES and -held[0][0] <= digest:
            return
        self.number += 1
        entry = (-digest, -self.number, {"hash": f"{digest:016x}", **make()})
        (heapq.heappush if len(held) < EXAMPLES else heapq.heapreplace)(held, entry)

    def merge(self, other: dict[str, list[dict[str, Any]]]) -> None:
        """Take in the examples of a report."""
        for reason, found in other.items():
            for example in found:
                self.add(reason, int(example["hash"], 16), lambda e=example: e)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return {reason: examples}, in an order that depends on them alone."""
        return {
            reason: [e for *_, e in sorted(held, key=lambda h: (-h[0], -h[1]))]
            for reason, held in sorted(self.held.items())
        }


class Removed:
    """Counts what is dropped, by reason: documents and bytes of their text."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.examples = Examples()

    def add(
        self, reason: str, size: int, text: str, make: Callable[[], dict[str, Any]]
    ) -> None:
        """Count a document, and offer it as an example."""
        self.count(reason, size)
        self.examples.add(reason, text_hash(text)[0], make)

    def count(self, reason: str, size: int) -> None:
        """Count a document of `size` bytes."""
        self.documents[reason] += 1
        self.bytes[reason] += size

    def to_json(self) -> dict[str, Any]:
        """Return the counts and examples as plain values."""
        return {
            "removed": {
                reason: {
                    "documents": self.documents[reason],
                    "bytes": self.bytes[reason],
                }
                for reason in sorted(self.documents)
            },
            "examples": self.examples.to_json(),
        }


def text_hash(text: str) -> tuple[int, int]:
    """Return 128 bits that stand for a text."""
    data = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    number = int.from_bytes(data.digest(), "little")
    return number & (2**64 - 1), number >> 64


def describe(
    record: dict[str, Any], text: str, text_key: str, place: str, start: int = 0
) -> dict[str, Any]:
    """Return an example as it stands in the report: its text from `start` on."""
    names = ("id", "url", "path", "title", "source")
    found = {n: record.get(n) for n in names if n != text_key}
    fields = {n: str(v)[:200] for n, v in found.items() if v is not None}
    shown = text[start : start + SHOWN]
    whole = {"place": place, "fields": fields, "length": len(text)}
    return whole | {"text": shown, "start": start}
