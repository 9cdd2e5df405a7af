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
from dataclasses import asdict, dataclass
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
from littlelm_core.ingest.find import CURATED, WORK, cut, find_parts
from littlelm_core.ingest.pool import Pool, progress_bar
from littlelm_core.ingest.read import Bad, Part, read_part
from littlelm_core.ingest.write import BAD_LISTED, PART_BYTES, hold, write_json

MANIFEST_VERSION = 1
__all__ = ["Options", "curate", "filter_names"]

# Single files with these names are neither text nor JSON lines nor parquet.
UNKNOWN = frozenset(
    {
        ".7z", ".arrow", ".avro", ".bin", ".bz2", ".csv", ".docx", ".feather", ".h5",
        ".json", ".npy", ".npz", ".orc", ".pdf", ".pkl", ".shard", ".tar", ".tgz",
        ".tsv", ".warc", ".xlsx", ".xml", ".xz", ".zip",
    }
)  # fmt: skip
# Other code may decide otherwise: what it has left is then not gone on with.
CODE = hashlib.blake2b(
    b"".join(
        Path(module.__file__).read_bytes()
        for module in (curation, curate_dedup, curate_steps, curate_write)
    )
).hexdigest()


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
    plan = make_plan(sources, out, options or Options(), part_bytes)
    with hold(out):
        try:
            if (done := plan.finished()) is not None:
                console.print(f"{out} is done already", markup=False, soft_wrap=True)
                return done
            plan.start()
            with (
                Pool(workers or os.cpu_count() or 1) as pool,
                progress_bar(console) as bar,
            ):
                _run(plan, pool, bar, console)
            return plan.finish()
        except OSError as error:
            raise DataError(
                f"cannot write {out}: {error.strerror or error}: what is done is kept, "
                "make room or give another folder and run it again"
            ) from error


def _run(plan: Plan, pool: Pool, bar: Any, console: Console) -> None:
    """Run the three passes, each with a bar."""

    def teller(task: Any) -> Any:
        return lambda size: bar.advance(task, size)

    todo = plan.to_sift()
    if len(todo) < len(plan.jobs):
        done = len(plan.jobs) - len(todo)
        console.print(f"{done} of {len(plan.jobs)} parts are sifted already")
    size = sum(part.size for part, *_ in todo)
    task = bar.add_task("sifting", total=size)
    pool.run(curate_steps.sift, todo, size, teller(task))
    documents = plan.documents().starts[-1]
    task = bar.add_task("duplicates", total=documents * (plan.bands + 1))
    plan.cluster(pool, lambda: bar.advance(task, documents))
    size = sum(report["bytes"] for report in plan.sifted())
    task = bar.add_task("writing", total=size)
    pool.run(curate_write.write, plan.to_write(), size, teller(task))


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


def make_plan(
    sources: Iterable[str | Path], out: Path, options: Options, part_bytes: int
) -> Plan:
    """Look at the sources and divide the work; writes nothing.

    Raises DataError as `curate`.
    """
    sources = [str(s) for s in sources]
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
    files = [*options.against, *([options.classifier] if options.classifier else [])]
    stamps = [part.stamp for part in find_parts(files, 0)] if files else []
    common = repr((options, stamps, CODE))
    numbers: Counter[str] = Counter()
    jobs = []
    for part in parts:
        label = f"{part.domain}-{numbers[part.domain]:05d}"
        numbers[part.domain] += 1
        key = hashlib.blake2b(repr((part, common)).encode(), digest_size=16)
        jobs.append((part, label, key.hexdigest(), out / WORK, options))
    whole = hashlib.blake2b(repr([job[:3] for job in jobs]).encode(), digest_size=16)
    return Plan(tuple(sources), out, options, tuple(jobs), whole.hexdigest())


# ---- The three passes


@dataclass(frozen=True)
class Plan:
    """The parts of a curation and what is done of it, as the files in `out` say.

    jobs: the arguments of `sift` for each part. key: of the whole outcome. Nothing else
    is known of other processes: so the passes may run on other machines too.
    """

    sources: tuple[str, ...]
    out: Path
    options: Options
    jobs: tuple[tuple[Any, ...], ...]
    key: str

    @property
    def work(self) -> Path:
        """Return the folder of what is under way."""
        return self.out / WORK

    @property
    def bands(self) -> int:
        """Return the bands of keys; 0: no near duplicates are looked for."""
        return self.options.minhash.bands if self.options.dedup == "near" else 0

    def finished(self) -> dict[str, Any] | None:
        """Return the manifest of a folder that is whole, or None."""
        try:
            manifest = json.loads((self.out / CURATED).read_text("utf-8"))
            if manifest["key"] != self.key or not (self.out / "report.html").exists():
                return None
            for part in manifest["parts"]:
                if (self.out / part["name"]).stat().st_size != part["size"]:
                    return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return manifest

    def start(self) -> None:
        """Make the folder; remove half-written files of a run that was killed."""
        self.work.mkdir(parents=True, exist_ok=True)
        for left in [*self.work.rglob(".*.tmp"), *self.out.glob("*/.*.tmp")]:
            left.unlink(missing_ok=True)

    def to_sift(self) -> list[tuple[Any, ...]]:
        """Return the jobs of `sift` that are not done."""
        found = [curate_steps.sifted(self.work, *job[1:3]) for job in self.jobs]
        return [j for j, report in zip(self.jobs, found, strict=True) if report is None]

    def sifted(self) -> list[dict[str, Any]]:
        """Return the reports of `sift`. Raises DataError: not all there, no text."""
        found = [curate_steps.sifted(self.work, *job[1:3]) for job in self.jobs]
        if None in found:
            raise DataError(f"part {found.index(None)} of {self.out} is not sifted")
        if not any(report["documents"] for report in found):
            places = [place for report in found for place in report["bad_places"]]
            raise DataError(f"no text: {places[0] if places else 'empty'}")
        return found

    def documents(self) -> curate_dedup.Documents:
        """Return the documents that `sift` has let pass, numbered."""
        numbers = np.cumsum([0, *(report["passed"] for report in self.sifted())])
        stems = tuple(self.work / label for _, label, *_ in self.jobs)
        return curate_dedup.Documents(stems, tuple(numbers.tolist()), self.bands)

    def cluster(self, pool: Pool, advance: Any = lambda: None) -> curate_dedup.Clusters:
        """Find the duplicates over all parts, or open what was found."""
        # What it names, of other options or sources, is about to be written anew.
        (self.out / CURATED).unlink(missing_ok=True)
        folder = self.work / "clusters"
        if (folder / "key").exists() and (folder / "key").read_text() != self.key:
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        (folder / "key").write_text(self.key)
        return curate_dedup.cluster(
            self.documents(),
            self.options.threshold if self.bands else None,
            folder,
            pool,
            advance,
            exact=self.options.dedup != "none",
        )

    def to_write(self) -> list[tuple[Any, ...]]:
        """Return the jobs of `write` that are not done."""
        return [job for job in self.writes() if curate_write.written(*job) is None]

    def writes(self) -> list[tuple[Any, ...]]:
        """Return the job of `write` for each part."""
        starts = self.documents().starts
        return [
            (part, label, first, self.key, self.work, self.out, self.options)
            for (part, label, *_), first in zip(self.jobs, starts, strict=False)
        ]

    def finish(self) -> dict[str, Any]:
        """Write the report and the manifest; delete what was under way."""
        results = [curate_write.written(*job) for job in self.writes()]
        if None in results:
            raise DataError(f"part {results.index(None)} of {self.out} is not written")
        clusters = curate_dedup.open_clusters(self.work / "clusters")
        report = _add_up(self.sifted(), results, clusters)
        labels = [label for _, label, *_ in self.jobs]
        curate_write.show_pairs(
            report["examples"], self.documents(), labels, self.work, self.options
        )
        report["options"] = asdict(self.options)
        report["versions"] = {
            "littlelm": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        write_report(self.out, report)
        manifest = report | {
            "format": MANIFEST_VERSION, "key": self.key, "sources": self.sources,
            "parts": [
                {
                    "name": result["file"], "domain": result["domain"],
                    "size": result["size"], "documents": result["documents"],
                    "fingerprint": result["fingerprint"],
                }
                for result in results if result["file"]
            ],
        }  # fmt: skip
        del manifest["examples"], manifest["bad_places"]
        keep = {self.out / part["name"] for part in manifest["parts"]}
        for path in self.out.glob("*/*"):  # of sources that are no longer named
            if path not in keep and path.name.endswith(curate_write.ENDINGS):
                path.unlink()
        write_json(self.out / CURATED, manifest)
        shutil.rmtree(self.work, ignore_errors=True)
        return json.loads(json.dumps(manifest))  # as it will be read


# ---- The sums


def _add_up(
    sifts: list[dict[str, Any]],
    writes: list[dict[str, Any]],
    clusters: curate_dedup.Clusters,
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
