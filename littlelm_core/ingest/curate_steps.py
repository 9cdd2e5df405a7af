"""What one process does with one part: read and sift it, and later write what stays.

`sift` reads a part once. A record that a step refuses is counted and forgotten, but for
a few examples; one that passes becomes a line of a packed file, and leaves its hash,
band keys and shingles in the files that the search for duplicates needs. `write` reads
the lines again, once it is known which of them are duplicates.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from littlelm_core import curation
from littlelm_core.config import DataError
from littlelm_core.ingest.curate_dedup import DOC
from littlelm_core.ingest.curate_options import (
    FILTERS,
    Options,
    Removed,
    describe,
    text_hash,
)
from littlelm_core.ingest.find import find_parts
from littlelm_core.ingest.read import Bad, Part, Text, read_part
from littlelm_core.ingest.write import BAD_LISTED, write_json
from littlelm_core.shards import atomic_file

BATCH_CHARACTERS = 1_000_000  # of text that is hashed at once


# ---- Evaluation items


def read_items(sources: tuple[str, ...], text_key: str) -> tuple[list[str], list[str]]:
    """Return (items, the file of each) of evaluation files or folders.

    A record gives its question (query, context or text) and, as another item, the
    question with the right answer; one of an unknown shape all its strings. A text
    file is one item. Raises DataError when there is none.
    """
    items: list[str] = []
    files: list[str] = []
    parts = find_parts(list(sources), 0)
    tables = [part for part in parts if part.kind != "text"]
    for part in tables or parts:  # a folder of items may have a README beside them
        for found in read_part(part, "", whole=True):
            if isinstance(found, Bad):
                raise DataError(f"{found.place}: {found.reason}: not an item to find")
            texts = _texts_of(found.record or {}, text_key)
            items += texts
            files += [Path(part.files[0][0]).name] * len(texts)
    if not items:
        raise DataError(f"no evaluation item in {', '.join(sources)}")
    return items, files


def _texts_of(record: dict[str, Any], text_key: str) -> list[str]:
    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from strings(list(value.values()))
        elif isinstance(value, list):
            for inner in value:
                yield from strings(inner)

    gold = record.get("gold")
    gold = gold if isinstance(gold, int) else 0
    for question, answer in (
        ("query", "choices"), ("context_options", "continuation"),
        ("context", "continuation"),
    ):  # fmt: skip
        if question in record and answer in record:
            parts = [record[question], record[answer]]
            parts = [p[gold] if isinstance(p, list) and p else p for p in parts]
            if all(isinstance(p, str) for p in parts):
                return [parts[0], " ".join(parts)]
    if isinstance(record.get(text_key), str):
        return [record[text_key]]
    return [" ".join(strings(record))]


# ---- One part


class Sifter:
    """The steps on documents, ready to use; one in each process."""

    def __init__(self, options: Options):
        self.options = options
        self.filters = [
            curation.Language(options.language) if name == "language" else FILTERS[name]
            for name in options.filters
        ]
        self.classifier = self.finder = None
        if options.classifier:
            self.classifier = curation.QualityClassifier.load(options.classifier)
        if options.against:
            items, self.files = read_items(options.against, options.text_key)
            self.finder = curation.Decontaminator(items, options.ngram, options.overlap)
            self.items = items

    def normalize(self, text: str) -> str:
        """Return the text as it will be written."""
        return curation.normalize(text) if self.options.normalize else text

    def judge(self, text: str) -> str | None:
        """Return why a text alone is dropped, or None."""
        if not text.strip():
            return "normalize: nothing left"
        return curation.judge(text, self.filters)

    def judge_all(self, texts: list[str]) -> list[tuple[str, str] | None]:
        """Return (reason, detail) of what is dropped among texts that passed `judge`.

        The steps that are quicker on many texts at once.
        """
        found: list[tuple[str, str] | None] = [None] * len(texts)
        if self.classifier is not None and texts:
            for i, score in enumerate(self.classifier.scores(texts).tolist()):
                if score < self.options.min_quality:
                    found[i] = ("classifier: low score", f"score {score:.3f}")
        if self.finder is not None and texts:
            for hit in self.finder.find(texts):
                if found[hit.document] is None:
                    item = " ".join(self.items[hit.item].split())[:200]
                    detail = f"{hit.share:.0%} of the item: {item}"
                    name = f"decontamination: {self.files[hit.item]}"
                    found[hit.document] = (name, detail)
        return found


@functools.lru_cache(1)
def sifter(options: Options) -> Sifter:
    """Return this process's Sifter."""
    return Sifter(options)


def sift(
    part: Part,
    label: str,
    key: str,
    work: Path,
    options: Options,
    advance: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Read a part; leave its lines, docs, bands and sets in `work`; return a report.

    documents, bytes: of the records with a text, as they were read.
    """
    steps, removed = sifter(options), Removed()
    reasons: Counter[str] = Counter()
    listed: list[str] = []
    seen, size, told, passed = 0, 0, 0, 0
    stem = work / label
    with Lines(stem, options) as lines:
        batch: list[tuple[int, int, Text, str]] = []
        held = 0

        def flush() -> None:
            nonlocal passed
            verdicts = steps.judge_all([text for *_, text in batch])
            stay = []
            for (row, bytes_, found, text), verdict in zip(
                batch, verdicts, strict=True
            ):
                if verdict is None:
                    stay.append((row, bytes_, found.record, text))
                    continue
                reason, detail = verdict
                removed.add(reason, bytes_, text, lambda f=found, t=text, d=detail: {
                    "detail": d, **describe(f.record, t, options.text_key, f.place),
                })  # fmt: skip
            lines.add(stay)
            passed += len(stay)
            batch.clear()

        for row, found in enumerate(read_part(part, options.text_key, whole=True)):
            if isinstance(found, Bad):
                # Without the keys that the record has instead: else few are equal.
                reasons[found.reason.partition(" (")[0]] += 1
                if len(listed) < BAD_LISTED:
                    listed.append(f"{found.place}: {found.reason}")
                continue
            seen += 1
            bytes_ = len(found.text.encode("utf-8", "surrogatepass"))
            size += bytes_
            text = steps.normalize(found.text)
            if reason := steps.judge(text):
                removed.add(reason, bytes_, text, lambda f=found: describe(
                    f.record, f.text, options.text_key, f.place
                ))  # fmt: skip
            else:
                batch.append((row, bytes_, found, text))
                held += len(text)
            if held >= BATCH_CHARACTERS:
                flush()
                held = 0
            # Packed files hold more than their size: never tell more than that.
            step = 1 if part.kind == "dataset" else bytes_
            step = min(step, part.size - told)
            told += step
            advance(step)
        flush()
    report = {
        "key": key,
        "domain": part.domain,
        "documents": seen,
        "bytes": size,
        "passed": passed,
        "bad": dict(sorted(reasons.items())),
        "bad_places": listed,
        **removed.to_json(),
    }
    write_json(stem.with_suffix(".json"), report)
    advance(part.size - told)
    return report


class Lines:
    """Writes the records that passed, with what the search for duplicates needs."""

    def __init__(self, stem: Path, options: Options):
        self.options, self.stem, self.end = options, stem, 0
        self.files = contextlib.ExitStack()

    def __enter__(self) -> Lines:
        def opened(suffix: str) -> Any:
            path = self.stem.with_suffix(suffix)
            return self.files.enter_context(atomic_file(path))

        try:
            packer = zstandard.ZstdCompressor(1)  # read once and deleted: fast is best
            file = opened(".lines.zst")
            self.lines = self.files.enter_context(
                packer.stream_writer(file, closefd=False)
            )
            self.docs = opened(".docs")
            self.bands, self.sets = opened(".bands"), opened(".sets")
        except BaseException:
            self.files.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.files.__exit__(*error)

    def add(self, records: list[tuple[int, int, dict[str, Any], str]]) -> None:
        """Append (row in its part, bytes, record, text as it will be written)."""
        if not records:
            return
        docs = np.zeros(len(records), DOC)
        for i, (row, size, record, text) in enumerate(records):
            self.lines.write(to_line({**record, self.options.text_key: text}) + b"\n")
            docs[i] = (text_hash(text), size, row, 0)
        if self.options.dedup == "near":
            texts, minhash = [text for *_, text in records], self.options.minhash
            keys = minhash.band_keys(minhash.signatures(texts))
            self.bands.write(np.ascontiguousarray(keys, "<u8").tobytes())
            sets = minhash.shingle_sets(texts)
            docs["end"] = self.end + np.cumsum([len(s) for s in sets])
            self.end = int(docs["end"][-1])
            self.sets.write(np.concatenate(sets).astype("<u8").tobytes())
        self.docs.write(docs.tobytes())


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as JSON; what JSON has no type for becomes a string.

    Bytes become base64; dates, times and decimals what `str` makes of them.
    """
    try:
        return json.dumps(record, ensure_ascii=False, default=_plain).encode()
    except UnicodeEncodeError:  # a lone surrogate in another field: an escape
        return json.dumps(record, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def sifted(work: Path, label: str, key: str) -> dict[str, Any] | None:
    """Return the report of a part that is sifted already, or None."""
    try:
        report = json.loads((work / f"{label}.json").read_text("utf-8"))
        docs = (work / f"{label}.docs").stat().st_size
        good = report["key"] == key and docs == report["passed"] * DOC.itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if good else None
