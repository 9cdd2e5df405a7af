"""`littlelm data prepare`: files to shards, in parallel, resumable.

The sources are divided into parts of about 64 MB; a part becomes shards of its own and
a small report, all written under another name first. A run that was killed leaves whole
parts and nothing else, and the next one goes on with what is missing. What comes out
depends on the sources and the tokenizer alone: not on the number of processes, nor on
when they were killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from littlelm_core import __version__
from littlelm_core.config import DataError, LittleLMError
from littlelm_core.ingest.find import find_parts
from littlelm_core.ingest.pool import progress_bar, run_jobs
from littlelm_core.ingest.read import Bad, Part, Text, read_part
from littlelm_core.shards import FORMAT_VERSION, Shard, atomic_file, write_shard

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SPLITS = ("train", "validation")
OWN_NAME = re.compile(r"(train|validation)-[a-z0-9_]+-\d{5}(-\d{2,})?\.shard")
PART_BYTES = 64_000_000
SHARD_TOKENS = 50_000_000  # a part with more becomes several shards
BATCH_CHARACTERS = 2_000_000  # encoded at once
BAD_LISTED = 1_000  # of each part, with their places; all are counted


@dataclass(frozen=True)
class Options:
    """What decides the content of a prepared folder, beside its sources."""

    text_key: str = "text"
    validation_share: float = 0.01
    shard_tokens: int = SHARD_TOKENS


# ---- Documents to shards


def split_of(document: Text, share: float) -> str:
    """Return "train" or "validation" from a hash of the document's name or text.

    Equal documents land on one side; neither order nor number of files matters.
    """
    key = document.text if document.name is None else document.name
    data = key.encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    return "validation" if number < share * 2**64 else "train"


class SplitWriter:
    """Collects the encoded documents of one part and writes them as shards."""

    def __init__(self, folder: Path, label: str, tokenizer: Any, shard_tokens: int):
        self.folder, self.label, self.tokenizer = folder, label, tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        self.held: dict[str, list[np.ndarray]] = {s: [] for s in SPLITS}
        self.held_tokens = Counter()
        self.counts = {s: Counter() for s in SPLITS}
        self.shards: dict[str, list[dict[str, Any]]] = {s: [] for s in SPLITS}

    def add(self, split: str, texts: list[str]) -> None:
        """Encode texts of one split, each behind one BOS."""
        bos = self.tokenizer.bos_id
        encoded = self.tokenizer.encode_batch(texts)
        for text, ids in zip(texts, encoded, strict=True):
            document = np.array([bos, *ids], self.dtype)
            self.put(split, document, len(text.encode("utf-8", "surrogatepass")))

    def put(self, split: str, document: np.ndarray, size: int) -> None:
        """Take a document of ids that starts with BOS and stands for `size` bytes."""
        self.held[split].append(document)
        self.held_tokens[split] += len(document)
        self.counts[split].update(documents=1, tokens=len(document), bytes=size)
        if self.held_tokens[split] >= self.shard_tokens:
            self.flush(split)

    def flush(self, split: str) -> None:
        """Write what is held of a split, if anything, as the next shard."""
        if not self.held[split]:
            return
        number = len(self.shards[split])
        name = f"{split}-{self.label}" + (f"-{number:02d}" if number else "") + ".shard"
        path = self.folder / name
        shard = write_shard(path, self.held[split], self.tokenizer.vocab_size)
        self.shards[split].append({"name": name, "fingerprint": shard.fingerprint})
        self.held[split], self.held_tokens[split] = [], 0

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the rest; return {split: {documents, tokens, bytes, shards}}."""
        for split in SPLITS:
            self.flush(split)
        empty = {"documents": 0, "tokens": 0, "bytes": 0}
        return {
            s: {**empty, **self.counts[s], "shards": self.shards[s]} for s in SPLITS
        }


def batches(documents: Iterable[Text], share: float) -> Iterator[tuple[str, list[str]]]:
    """Yield (split, texts) of up to BATCH_CHARACTERS, each split in its own order."""
    held: dict[str, list[str]] = {s: [] for s in SPLITS}
    size = Counter()
    for document in documents:
        split = split_of(document, share)
        held[split].append(document.text)
        size[split] += len(document.text)
        if size[split] >= BATCH_CHARACTERS:
            yield split, held[split]
            held[split], size[split] = [], 0
    yield from ((s, held[s]) for s in SPLITS if held[s])


def prepare_part(
    part: Part,
    label: str,
    key: str,
    out: Path,
    tokenizer: Any,
    options: Options,
    advance: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Write the shards and the report of one part; return the report."""
    reasons: Counter[str] = Counter()
    listed: list[Bad] = []

    def good() -> Iterator[Text]:
        for record in read_part(part, options.text_key):
            if isinstance(record, Text):
                yield record
                continue
            reasons[record.reason] += 1
            if len(listed) < BAD_LISTED:
                listed.append(record)

    writer = SplitWriter(out, label, tokenizer, options.shard_tokens)
    told = 0
    for split, texts in batches(good(), options.validation_share):
        writer.add(split, texts)
        # Packed files hold more than their size: never tell more than that.
        size = len(texts) if part.kind == "dataset" else sum(map(len, texts))
        size = min(size, part.size - told)
        told += size
        advance(size)
    report = {
        "key": key,
        "domain": part.domain,
        "splits": writer.finish(),
        "bad": dict(sorted(reasons.items())),
        "bad_places": [f"{b.place}: {b.reason}" for b in listed],
    }
    write_json(out / "parts" / f"{label}.json", report)
    advance(part.size - told)
    return report


def hold(folder: Path) -> contextlib.AbstractContextManager:
    """Lock a folder for this process, until what is returned is left.

    The system frees it when the process ends, however it does. Nothing is locked on
    Windows, nor where the file system has no locks.
    Raises LittleLMError when another process holds it: two would mix their records and
    delete each other's files.
    """
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:
        return contextlib.nullcontext()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN) and error.filename is None:
            raise LittleLMError(
                f"another process writes into {folder}: wait for its end, or give "
                "another folder"
            ) from error
        return contextlib.nullcontext()  # not writable: the first write says it
    return file


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a half-written file is never read."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


# ---- The folder


def prepare(
    sources: Iterable[str | Path],
    out: str | Path,
    tokenizer: Any,
    workers: int = 0,
    *,
    text_key: str = "text",
    validation_share: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    console: Console | None = None,
) -> dict[str, Any]:
    """Turn text into a folder of shards that a run can name as its data.source.

    sources: files (text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet), folders of them or
    Hugging Face datasets ("owner/name:config:split"), each "DOMAIN=SOURCE" or plain.
    tokenizer: has encode_batch, bos_id, vocab_size, fingerprint and save.
    workers: processes; 0: one for each core.
    validation_share: of documents (files of a folder), chosen by a hash; it is raised
    step by step when it would leave the validation split empty.
    Returns the manifest, which is written last: a folder without one is not complete.
    Raises DataError: nothing to read, no text in it, one document only, a full disk.
    """
    out, console = Path(out), console or Console(stderr=True)
    if not 0 < validation_share < 1:
        raise DataError(f"validation_share = {validation_share} must be in (0, 1)")
    options = Options(text_key, validation_share, shard_tokens)
    parts = find_parts([str(s) for s in sources], PART_BYTES, out)
    if not parts:
        raise DataError("no sources: name files, folders or a dataset")
    workers = workers or os.cpu_count() or 1
    with hold(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            for left in out.glob(".*.shard.*.tmp"):  # of a run that was killed
                left.unlink(missing_ok=True)
            tokenizer.save(out / "tokenizer.json")
            while True:
                reports = _prepare_all(parts, out, tokenizer, options, workers, console)
                manifest = _manifest(reports, tokenizer, options, sources)
                empty = _empty_split(manifest)
                if empty is None:
                    break
                if empty == "train" or options.validation_share > 0.5:
                    raise DataError(
                        "one document (or one text many times) cannot be split into "
                        "training and validation: add text, or cut it into documents"
                    )
                share = options.validation_share * 2
                options = Options(text_key, share, shard_tokens)
            keep = {s["name"] for d in manifest["domains"].values() for s in _shards(d)}
            for path in out.glob("*.shard"):  # of sources that are no longer named
                if OWN_NAME.fullmatch(path.name) and path.name not in keep:
                    path.unlink()
            write_json(out / MANIFEST, manifest)
        except OSError as error:
            raise DataError(
                f"cannot write {out}: {error.strerror}: what is done is kept, make "
                "room or give another folder and run it again"
            ) from error
    return manifest


def _prepare_all(
    parts: list[Part],
    out: Path,
    tokenizer: Any,
    options: Options,
    workers: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Prepare the parts that are not done; return the reports of all, in order."""
    numbers: Counter[str] = Counter()
    reports: dict[int, dict[str, Any]] = {}
    jobs = {}
    for place, part in enumerate(parts):
        label = f"{part.domain}-{numbers[part.domain]:05d}"
        numbers[part.domain] += 1
        wanted = (part, options, tokenizer.fingerprint, FORMAT_VERSION)
        key = hashlib.blake2b(repr(wanted).encode(), digest_size=16).hexdigest()
        report = finished(out, out / "parts" / f"{label}.json", key)
        if report is None:
            jobs[place] = (part, label, key, out, tokenizer, options)
        else:
            reports[place] = report
    if reports:
        console.print(f"{len(reports)} of {len(parts)} parts are done already")
    with progress_bar(console) as bar:
        total = sum(part.size for part, *_ in jobs.values())
        task = bar.add_task("preparing", total=total)
        done = run_jobs(
            prepare_part, list(jobs.values()), workers, total,
            lambda size: bar.advance(task, size),
        )  # fmt: skip
    reports.update(zip(jobs, done, strict=True))
    return [reports[place] for place in range(len(parts))]


def finished(out: Path, path: Path, key: str) -> dict[str, Any] | None:
    """Return the report at `path` if it is done and its shards whole, or None."""
    try:
        report = json.loads(path.read_text("utf-8"))
        if report["key"] != key:
            return None
        for split in SPLITS:
            for shard in report["splits"][split]["shards"]:
                if Shard(out / shard["name"]).fingerprint != shard["fingerprint"]:
                    return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report


def _shards(domain: dict[str, Any]) -> list[dict[str, Any]]:
    return [shard for split in SPLITS for shard in domain[split]["shards"]]


def _empty_split(manifest: dict[str, Any]) -> str | None:
    for split in SPLITS:
        if not sum(d[split]["documents"] for d in manifest["domains"].values()):
            return split
    return None


def _manifest(
    reports: list[dict[str, Any]],
    tokenizer: Any,
    options: Options,
    sources: Iterable[str | Path],
) -> dict[str, Any]:
    """Add the reports up. Raises DataError when they hold no document at all."""
    domains: dict[str, Any] = {}
    bad, places = Counter(), []
    for report in reports:
        bad.update(report["bad"])
        places += report["bad_places"]
        domain = domains.setdefault(report["domain"], {s: {} for s in SPLITS})
        for split in SPLITS:
            add_counts(domain[split], report["splits"][split])
    if not any(d[s]["documents"] for d in domains.values() for s in SPLITS):
        first = places[0] if places else ", ".join(map(str, sources))
        more = f" (and {bad.total() - 1} more)" if bad.total() > 1 else ""
        raise DataError(f"no text to train on: {first}{more}")
    return {
        "bad_records": {"total": bad.total(), "reasons": dict(bad), "places": places},
        **describe(domains, tokenizer),
        "text_key": options.text_key,
        "validation_share": options.validation_share,
        "sources": [str(s) for s in sources],
    }


def add_counts(total: dict[str, Any], counts: dict[str, Any]) -> None:
    """Add documents, tokens, bytes and the list of shards to a running total."""
    for key in ("documents", "tokens", "bytes"):
        total[key] = total.get(key, 0) + counts[key]
    total["shards"] = total.get("shards", []) + counts["shards"]


def describe(domains: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the part of a manifest that every prepared folder has."""
    names = [
        f"{s['name']} {s['fingerprint']}"
        for _, domain in sorted(domains.items())
        for s in _shards(domain)
    ]
    names.append(tokenizer.fingerprint)
    return {
        "format": MANIFEST_VERSION,
        "fingerprint": hashlib.blake2b(
            "\n".join(names).encode(), digest_size=16
        ).hexdigest(),
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "domains": domains,
        "versions": {
            "littlelm": __version__,
            "shards": FORMAT_VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }
