"""Datasets with a name: `littlelm data prepare climbmix --shards 8`.

ClimbMix is stored as GPT-2 ids, the very ids that littlelm-3.8b trains on: they are
checked, put behind a BOS and written as shards, and no text is made of them.

Validation is one file by name, the last one, of it the first VALIDATION_TOKENS tokens:
the same for any number of shards. These texts repeat themselves, so training documents
that equal a held-out one are left out and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from littlelm_core.config import ConfigError, DataError
from littlelm_core.corpus import data_folder
from littlelm_core.ingest.catalog import DATASETS, Form, find_form
from littlelm_core.ingest.download import (
    RemoteFile,
    Unreachable,
    check_room,
    fetch,
    is_there,
    list_files,
    local_path,
    remove,
)
from littlelm_core.ingest.ids import clean_ids, read_ids
from littlelm_core.ingest.pool import progress_bar, run_jobs
from littlelm_core.ingest.read import Bad, Part, Text, read_part
from littlelm_core.ingest.write import (
    BAD_LISTED,
    MANIFEST,
    SHARD_TOKENS,
    SPLITS,
    SplitWriter,
    add_counts,
    describe,
    finished,
    hold,
    write_json,
)
from littlelm_core.shards import FORMAT_VERSION

GPT2_IDS = 50_257
VALIDATION_TOKENS = 40_000_000
TEXTS_AT_ONCE = 512  # are encoded at once
RECIPE = 1  # raise it when the same files would give other shards


# ---- One file to shards


def _digest(document: np.ndarray) -> bytes:
    return hashlib.blake2b(document.tobytes(), digest_size=8).digest()


class Job(NamedTuple):
    """One file: which split it is, where it comes from and where its shards go."""

    file: RemoteFile
    split: str
    label: str
    form: Form
    out: Path
    downloads: Path
    keep: bool

    def key(self, tokenizer: Any) -> str:
        """Return what names the content of the shards that come out."""
        settings = RECIPE, FORMAT_VERSION, SHARD_TOKENS, VALIDATION_TOKENS
        file = self.file.repo, self.file.path, self.split
        what = (file, tokenizer.fingerprint, settings)
        return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()

    @property
    def report(self) -> Path:
        """Where its report lies, once it is done."""
        return self.out / "parts" / f"{self.split}-{self.label}.json"


def _documents(
    path: Path, form: Form, tokenizer: Any
) -> Iterator[tuple[np.ndarray, int, int] | Bad]:
    """Yield (document of ids, its bytes, its cluster or -1), and what is Bad."""
    if form.ids:
        sizes = np.asarray(tokenizer.token_byte_counts())
        for found in read_ids(path):
            bos, size = tokenizer.bos_id, tokenizer.vocab_size
            pieces = found if isinstance(found, Bad) else clean_ids(found, size, bos)
            if isinstance(pieces, Bad):
                yield pieces
                continue
            for document in pieces:
                yield document, int(sizes[document].sum()), found.cluster
        return
    part = Part("", "parquet", ((str(path), ""),), path.stat().st_size, "")
    texts: list[str] = []

    def encoded() -> Iterator[tuple[np.ndarray, int, int]]:
        batch = tokenizer.encode_batch(texts)
        for text, ids in zip(texts, batch, strict=True):
            size = len(text.encode("utf-8", "surrogatepass"))
            dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
            yield np.array([tokenizer.bos_id, *ids], dtype), size, -1
        texts.clear()

    for record in read_part(part, "text"):
        if isinstance(record, Text):
            texts.append(record.text)
            if len(texts) == TEXTS_AT_ONCE:
                yield from encoded()
        else:
            yield record
    yield from encoded()


def prepare_file(
    job: Job, tokenizer: Any, advance: Callable[[int], None] = lambda size: None
) -> dict[str, Any]:
    """Fetch one file and write its shards and its report; return the report."""
    fetched = 0

    def came(size: int) -> None:
        nonlocal fetched
        fetched += size
        advance(size)

    path = fetch(job.file, job.downloads, came)
    size = path.stat().st_size
    advance(size - fetched)  # what had come before
    held_out = _held_out(job.out) if job.split == "train" else frozenset()
    writer = SplitWriter(job.out, job.label, tokenizer, SHARD_TOKENS)
    reasons, places, clusters = Counter(), [], Counter()
    equal, digests = 0, set()
    for found in _documents(path, job.form, tokenizer):
        if isinstance(found, Bad):
            reasons[found.reason] += 1
            if len(places) < BAD_LISTED:
                places.append(f"{found.place}: {found.reason}")
            continue
        document, bytes_, cluster = found
        if job.split == "validation":
            digests.add(_digest(document))
        elif _digest(document) in held_out:
            equal += 1
            continue
        writer.put(job.split, document, bytes_)
        clusters[cluster] += len(document)
        if job.split == "validation" and clusters.total() >= VALIDATION_TOKENS:
            break
    if job.split == "validation":
        _held_out_file(job.out).write_bytes(b"".join(sorted(digests)))
    report = {
        "key": job.key(tokenizer),
        "file": job.file.path,
        "repo": job.file.repo,
        "bytes": size,
        "sha256": job.file.sha256,
        "splits": writer.finish(),
        "bad": dict(sorted(reasons.items())),
        "bad_places": places,
        "equal_to_validation": equal,
        "cluster_tokens": {str(c): n for c, n in sorted(clusters.items()) if c >= 0},
    }
    write_json(job.report, report)
    if not job.keep:
        remove(job.file, job.downloads)
    advance(size)
    return report


def _held_out_file(out: Path) -> Path:
    return out / "parts" / "held-out.bin"


def _held_out(out: Path) -> frozenset[bytes]:
    data = _held_out_file(out).read_bytes()
    return frozenset(data[i : i + 8] for i in range(0, len(data), 8))


def _finished(job: Job, tokenizer: Any) -> dict[str, Any] | None:
    """Return the report of a file that is done and whole, or None."""
    report = finished(job.out, job.report, job.key(tokenizer))
    if job.split == "validation" and not _held_out_file(job.out).is_file():
        return None
    return report


# ---- The folder


def prepare_named(
    name: str,
    shards: int,
    tokenizer: Any,
    out: str | Path | None = None,
    form: str = "",
    workers: int = 0,
    *,
    downloads: str | Path | None = None,
    keep: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prepare the first `shards` files of a dataset and the one that is held out.

    tokenizer: GPT-2's for stored ids; any for text.
    out: the folder of shards; None: data/prepared/<name>, where a run that says
    data.source = "<name>" looks. form: as in DATASETS; "": the first.
    downloads: where files are fetched to, or were put by hand, in the layout of the
    repository. keep: leave fetched files there.
    Done files are not fetched again: more shards later cost only the difference.
    Returns the manifest. Raises ConfigError: no such dataset, form or number of shards;
    DataError: no network, no room, files that are not what they should be.
    """
    console = console or Console(stderr=True)
    kind = find_form(name, form)
    kind.check(shards)
    if kind.ids and tokenizer.vocab_size != GPT2_IDS:
        raise ConfigError(
            f"the stored ids are GPT-2's {GPT2_IDS:,}, this tokenizer has "
            f"{tokenizer.vocab_size:,}: leave --tokenizer out, or take --form text"
        )
    out = Path(out) if out else data_folder() / name
    if downloads:
        folder = Path(downloads)
    else:
        folder = data_folder() / "downloads" / kind.repo.replace("/", "--")
    console.print(DATASETS[name].licence, soft_wrap=True, markup=False)
    with hold(out), hold(folder):
        _check_recipe(out, {"dataset": name, "repo": kind.repo, "files": kind.pattern})
        try:
            return _prepare(
                name, kind, shards, tokenizer, out, workers, folder, keep, console
            )
        except OSError as error:
            raise DataError(
                f"cannot write {error.filename or out}: {error.strerror}: what is done "
                "is kept, make room or give another folder and run it again"
            ) from error


def _check_recipe(out: Path, recipe: dict[str, str]) -> None:
    """Refuse a folder that holds other data than these files of this dataset."""
    path, there = out / "parts" / "recipe.json", None
    if path.exists() or (out / MANIFEST).exists():
        with contextlib.suppress(OSError, ValueError):
            there = json.loads(path.read_text("utf-8"))
        if there != recipe:
            raise DataError(f"{out} holds other data: give another folder by --out")
    write_json(path, recipe)


def _prepare(
    name: str,
    kind: Form,
    shards: int,
    tokenizer: Any,
    out: Path,
    workers: int,
    folder: Path,
    keep: bool,
    console: Console,
) -> dict[str, Any]:
    domain = name.replace("-", "_")
    paths = [kind.validation, *(kind.pattern.format(n) for n in range(shards))]
    jobs = []
    for number, path in enumerate(paths):
        split, place = ("train", number - 1) if number else ("validation", 0)
        label, file = f"{domain}-{place:05d}", RemoteFile(kind.repo, path)
        jobs.append(Job(file, split, label, kind, out, folder, keep))
    reports = {job: _finished(job, tokenizer) for job in jobs}
    if reports[jobs[0]] is None:  # other held-out documents: all is filtered anew
        reports = dict.fromkeys(jobs)
    waiting = [job for job, report in reports.items() if report is None]
    if len(waiting) < len(jobs):
        done = len(jobs) - len(waiting)
        console.print(f"{done} of {len(jobs)} files are done already")
    workers = min(workers or min(os.cpu_count() or 1, 4), max(len(waiting), 1))
    if waiting:
        tokenizer.save(out / "tokenizer.json")
        listed = _listed([job.file for job in waiting], folder)
        _estimate(listed, kind, workers, out, folder, keep, console)
        waiting_listed = [
            j._replace(file=f) for j, f in zip(waiting, listed, strict=True)
        ]
        total = 2 * sum(file.size for file in listed)  # fetched and read
        with progress_bar(console) as bar:
            task = bar.add_task(f"{name}, {len(listed)} files", total=total)

            def run(some: list[Job]) -> list[dict[str, Any]]:
                sizes = 2 * sum(job.file.size for job in some)
                pairs = [(job, tokenizer) for job in some]
                return run_jobs(
                    prepare_file, pairs, workers, sizes,
                    lambda size: bar.advance(task, size),
                )  # fmt: skip

            # Training documents are compared with the held-out ones: those come first.
            first = [j for j in waiting_listed if j.split == "validation"]
            rest = [j for j in waiting_listed if j.split == "train"]
            reports.update(zip(waiting, run(first) + run(rest), strict=True))
    manifest = _manifest(name, [reports[job] for job in jobs], tokenizer)
    write_json(out / MANIFEST, manifest)
    return manifest


def _listed(files: list[RemoteFile], folder: Path) -> list[RemoteFile]:
    """Return the files with size and sum; without a network, those that lie there.

    Raises Unreachable, with the folder to put them into, when one does not.
    """
    try:
        return list_files(files[0].repo, [f.path for f in files])
    except Unreachable as error:
        absent = [f.path for f in files if not is_there(f, folder)]
        if absent:
            names = ", ".join(absent[:3]) + (" …" if len(absent) > 3 else "")
            raise Unreachable(
                f"{error}: without a network, put {len(absent)} files of the dataset "
                f"{files[0].repo} into {folder} under their own names ({names}) and "
                "run this again"
            ) from error
        sizes = [local_path(f, folder).stat().st_size for f in files]
        return [f._replace(size=size) for f, size in zip(files, sizes, strict=True)]


def _estimate(
    files: list[RemoteFile],
    kind: Form,
    workers: int,
    out: Path,
    folder: Path,
    keep: bool,
    console: Console,
) -> None:
    """Say what will be fetched and kept; refuse when the disk is too small."""
    absent = sorted((f.size for f in files if not is_there(f, folder)), reverse=True)
    fetched = sum(absent if keep else absent[:workers])
    kept = int(sum(f.size for f in files) * kind.shard_bytes)
    needs = [(out, kept, "shards"), (folder, fetched, "files while they are read")]
    console.print(
        f"{len(files)} files, {sum(absent) / 1e9:,.2f} GB to fetch; at most:",
        soft_wrap=True,
    )
    for line in check_room(needs):
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _manifest(
    name: str, reports: list[dict[str, Any]], tokenizer: Any
) -> dict[str, Any]:
    """Add the reports up. Raises DataError when a split holds nothing."""
    domain: dict[str, Any] = {s: {} for s in SPLITS}
    bad, clusters, places, equal = Counter(), Counter(), [], 0
    for report in reports:
        bad.update(report["bad"])
        clusters.update(report["cluster_tokens"])
        places += report["bad_places"]
        equal += report["equal_to_validation"]
        for split in SPLITS:
            add_counts(domain[split], report["splits"][split])
    for split in SPLITS:
        if not domain[split]["documents"]:
            first = f": {places[0]}" if places else ""
            raise DataError(f"{name} gave no {split} documents{first}")
    names = ("repo", "file", "bytes", "sha256")
    return {
        "bad_records": {"total": bad.total(), "reasons": dict(bad), "places": places},
        **describe({name.replace("-", "_"): domain}, tokenizer),
        "sources": [name],
        "licence": DATASETS[name].licence,
        "files": [{n: report[n] for n in names} for report in reports],
        "equal_to_validation": equal,
        "cluster_tokens": dict(clusters),
    }
