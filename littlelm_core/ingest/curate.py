"""`littlelm data curate`: files to clean files, of any size, in bounded memory.

Three passes over parts of about 64 MB, each by several processes: sift (normalise,
filter, hash), find the clusters of duplicates over all parts, write what stays. What a
pass has done lies in OUT/.curate, so that a run that was killed goes on; it is deleted
at the end. What comes out depends on the sources and options alone: not on the number
of processes, nor on when they were killed.

    OUT/<domain>/<domain>-00000.jsonl.zst   the documents that stay, with all fields
    OUT/curated.json                        parts, counts, options; written last
    OUT/report.json, report.html            what was dropped and why, with examples
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from littlelm_core import __version__, curation
from littlelm_core.config import DataError
from littlelm_core.ingest import curate_dedup, curate_steps, curate_write
from littlelm_core.ingest.curate_options import Examples, Options, filter_names
from littlelm_core.ingest.curate_report import write_report
from littlelm_core.ingest.find import CURATED, cut, find_parts
from littlelm_core.ingest.pool import Pool, progress_bar
from littlelm_core.ingest.read import Bad, Part, read_part
from littlelm_core.ingest.write import BAD_LISTED, PART_BYTES, hold, write_json

MANIFEST_VERSION = 1
WORK = ".curate"
__all__ = ["Options", "curate", "filter_names"]

# Single files with these names are neither text nor JSON lines nor parquet.
UNKNOWN = frozenset(
    {
        ".7z", ".arrow", ".avro", ".bin", ".bz2", ".csv", ".docx", ".feather", ".h5",
        ".json", ".npy", ".npz", ".orc", ".pdf", ".pkl", ".shard", ".tar", ".tgz",
        ".tsv", ".warc", ".xlsx", ".xml", ".xz", ".zip",
    }
)  # fmt: skip


def curate(
    sources: Iterable[str | Path],
    out: str | Path,
    options: Options | None = None,
    workers: int = 0,
    *,
    part_bytes: int = PART_BYTES,
    console: Console | None = None,
) -> dict[str, Any]:
    """Clean text: normalise, filter, deduplicate over all sources, decontaminate.

    sources: files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, text), folders of them or
    Hugging Face datasets, each "DOMAIN=SOURCE" or plain; of duplicates the first stays.
    workers: processes; 0: one for each core.
    part_bytes: of input that one process reads in one go; decides where files are cut.
    Returns the manifest. kept + removed + bad records = records read.
    Raises DataError: nothing to read, an unknown format, no text under the key, a
    folder of something else, a full disk.
    """
    out, console = Path(out), console or Console(stderr=True)
    options, sources = options or Options(), [str(s) for s in sources]
    if not sources:
        raise DataError("no sources: name files, folders or a dataset")
    for source in sources:
        path = Path(source.partition("=")[2] or source)
        if path.suffix.lower() in UNKNOWN and path.is_file():
            raise DataError(
                f"{path}: {path.suffix} is no format that can be read: give .jsonl, "
                ".jsonl.gz, .jsonl.zst, .parquet or plain text"
            )
    _refuse_foreign(out)
    parts = find_parts(sources, part_bytes, out)
    if options.format == "parquet":  # each file has types of its own
        parts = [one for part in parts for one in _single_files(part)]
    parts = cut(parts, part_bytes)
    _look_for_text(parts, options.text_key)
    curate_steps.sifter(options)  # what is wrong with items or classifier is said now
    workers, work = workers or os.cpu_count() or 1, out / WORK
    with hold(out):
        try:
            jobs, whole = _plan(parts, options, work)
            if (done := _finished(out, whole)) is not None:
                console.print(f"{out} is done already", markup=False, soft_wrap=True)
                return done
            work.mkdir(parents=True, exist_ok=True)
            for left in [*work.rglob(".*.tmp"), *out.glob("*/.*.tmp")]:
                left.unlink(missing_ok=True)  # of a run that was killed
            with Pool(workers) as pool, progress_bar(console) as bar:
                manifest = _run(jobs, whole, out, options, pool, bar, console)
            manifest["sources"] = sources
            keep = {out / part["name"] for part in manifest["parts"]}
            for path in out.glob("*/*"):  # of sources that are no longer named
                if path not in keep and path.name.endswith(curate_write.ENDINGS):
                    path.unlink()
            write_json(out / CURATED, manifest)
            shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise DataError(
                f"cannot write {out}: {error.strerror or error}: what is done is kept, "
                "make room or give another folder and run it again"
            ) from error
    return manifest


# ---- Before the work


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: give a folder")
    ours = (out / CURATED).exists() or (out / WORK).exists()
    if out.is_dir() and not ours and any(p.name != ".lock" for p in out.iterdir()):
        raise DataError(
            f"{out} holds files of something else: give a new folder or an empty one"
        )


def _single_files(part: Part) -> list[Part]:
    if part.kind != "parquet" or len(part.files) == 1:
        return [part]
    return [
        part._replace(files=(file,), size=Path(file[0]).stat().st_size, stamp=stamp)
        for file, stamp in zip(part.files, part.stamp.split("\n"), strict=True)
    ]


def _look_for_text(parts: list[Part], text_key: str) -> None:
    """Find a wrong key now and not after hours. Raises DataError."""
    first: Bad | None = None
    for part in parts:
        for found in islice(read_part(part, text_key), 100):
            if not isinstance(found, Bad):
                return
            first = first or found
    assert first is not None
    raise DataError(f"no text: {first.place}: {first.reason}")


def _plan(
    parts: list[Part], options: Options, work: Path
) -> tuple[list[tuple[Any, ...]], str]:
    """Return (the job of each part, a key of the whole outcome)."""
    files = [*options.against, *([options.classifier] if options.classifier else [])]
    stamps = [part.stamp for part in find_parts(files, 0)] if files else []
    modules = (curation, curate_dedup, curate_steps, curate_write)
    code = [Path(module.__file__).read_bytes() for module in modules]
    common = repr((options, stamps, hashlib.blake2b(b"".join(code)).hexdigest()))
    numbers: Counter[str] = Counter()
    jobs = []
    for part in parts:
        label = f"{part.domain}-{numbers[part.domain]:05d}"
        numbers[part.domain] += 1
        key = hashlib.blake2b(repr((part, common)).encode(), digest_size=16)
        jobs.append((part, label, key.hexdigest(), work, options))
    whole = hashlib.blake2b(repr([job[:3] for job in jobs]).encode(), digest_size=16)
    return jobs, whole.hexdigest()


def _finished(out: Path, key: str) -> dict[str, Any] | None:
    """Return the manifest of a folder that is whole, or None."""
    try:
        manifest = json.loads((out / CURATED).read_text("utf-8"))
        if manifest["key"] != key or not (out / "report.html").exists():
            return None
        for part in manifest["parts"]:
            if (out / part["name"]).stat().st_size != part["size"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


# ---- The three passes


def _run(
    jobs: list[tuple[Any, ...]],
    whole: str,
    out: Path,
    options: Options,
    pool: Pool,
    bar: Any,
    console: Console,
) -> dict[str, Any]:
    work = out / WORK
    reports = [curate_steps.sifted(work, label, key) for _, label, key, *_ in jobs]
    open_ = [job for job, report in zip(jobs, reports, strict=True) if report is None]
    if len(open_) < len(jobs):
        done = len(jobs) - len(open_)
        console.print(f"{done} of {len(jobs)} parts are sifted already")
    size = sum(part.size for part, *_ in open_)
    task = bar.add_task("sifting", total=size)
    found = iter(pool.run(curate_steps.sift, open_, size, _teller(bar, task)))
    reports = [report or next(found) for report in reports]
    if not any(report["documents"] for report in reports):
        places = [place for report in reports for place in report["bad_places"]]
        raise DataError(f"no text: {places[0] if places else 'empty'}")

    near = options.dedup == "near"
    starts = np.concatenate(([0], np.cumsum([r["passed"] for r in reports]))).tolist()
    stems = tuple(work / label for _, label, *_ in jobs)
    bands = options.minhash.bands if near else 0
    documents = curate_dedup.Documents(stems, tuple(starts), bands)
    folder = work / "clusters"
    if (folder / "key").exists() and (folder / "key").read_text() != whole:
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    (folder / "key").write_text(whole)
    task = bar.add_task("duplicates", total=(bands + 1) * starts[-1])
    clusters = curate_dedup.cluster(
        documents,
        options.threshold if near else None,
        folder,
        pool,
        lambda: bar.advance(task, starts[-1]),
        exact=options.dedup != "none",
    )

    size = sum(report["bytes"] for report in reports)
    task = bar.add_task("writing", total=size)
    todo, results = [], []
    for (part, label, *_), first in zip(jobs, starts, strict=False):
        job = (part, label, first, whole, work, out, options)
        results.append(curate_write.written(*job))
        if results[-1] is None:
            todo.append(job)
    found = iter(pool.run(curate_write.write, todo, size, _teller(bar, task)))
    results = [result or next(found) for result in results]
    report = _add_up(reports, results, clusters, options)
    _show_kept(report["examples"], documents, [job[1] for job in jobs], work, options)
    report["options"] = asdict(options)
    report["versions"] = {
        "littlelm": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    write_report(out, report)
    manifest = {k: v for k, v in report.items() if k not in ("examples", "bad_places")}
    manifest |= {"format": MANIFEST_VERSION, "key": whole}
    manifest["parts"] = [
        {
            "name": result["file"], "domain": result["domain"], "size": result["size"],
            "documents": result["documents"], "fingerprint": result["fingerprint"],
        }
        for result in results if result["file"]
    ]  # fmt: skip
    return json.loads(json.dumps(manifest))  # as it will be read


def _teller(bar: Any, task: Any) -> Any:
    return lambda size: bar.advance(task, size)


# ---- The sums


def _add_up(
    sifts: list[dict[str, Any]],
    writes: list[dict[str, Any]],
    clusters: curate_dedup.Clusters,
    options: Options,
) -> dict[str, Any]:
    """Return all counts. Raises DataError where they do not add up."""
    removed: dict[str, Counter[str]] = {}
    domains: dict[str, dict[str, Any]] = {}
    bad: Counter[str] = Counter()
    examples, places = Examples(), []
    for sift, write in zip(sifts, writes, strict=True):
        domain = domains.setdefault(
            sift["domain"], {"read": Counter(), "kept": Counter(), "bad": 0}
        )
        domain["bad"] += sum(sift["bad"].values())
        for what, report in (("read", sift), ("kept", write)):
            for unit in ("documents", "bytes"):
                domain[what][unit] += report[unit]
        for report in (sift, write):
            examples.merge(report["examples"])
            for reason, counts in report["removed"].items():
                removed.setdefault(reason, Counter()).update(counts)
        bad.update(sift["bad"])
        places += sift["bad_places"]
    read, kept, lost = Counter(), Counter(), Counter()
    for domain in domains.values():
        read.update(domain["read"])
        kept.update(domain["kept"])
    for counts in removed.values():
        lost.update(counts)
    if read != kept + lost:
        raise DataError(
            f"read {dict(read)}, but kept {dict(kept)} and removed {dict(lost)}: the "
            "sources have changed meanwhile; delete the folder and run it again"
        )
    return {
        "records": read["documents"] + bad.total(),
        "read": dict(read),
        "kept": {unit: kept[unit] for unit in ("documents", "bytes")},
        "removed": {
            reason: dict(counts)
            for reason, counts in sorted(
                removed.items(), key=lambda item: (-item[1]["documents"], item[0])
            )
        },
        "bad": {"total": bad.total(), "reasons": dict(sorted(bad.items()))},
        "bad_places": places[:BAD_LISTED],
        "domains": domains,
        "clusters": {
            "sizes": {str(k): v for k, v in clusters.sizes().items()},
            "compared": clusters.compared,
            "rejected": clusters.rejected,
            "hasty": clusters.hasty,
        },
        "examples": examples.to_json(),
    }


def _show_kept(
    examples: dict[str, list[dict[str, Any]]],
    documents: curate_dedup.Documents,
    labels: list[str],
    work: Path,
    options: Options,
) -> None:
    """Put beside each example of a duplicate the text that stays instead."""
    for reason in curate_write.REASONS:
        for example in examples.get(reason, []):
            place, number = documents.part_of(example.pop("kept"))
            kept = curate_write.kept_record(work, labels[place], number)
            key = options.text_key
            example["kept"] = curate_steps.describe(kept, kept[key], key, "")
