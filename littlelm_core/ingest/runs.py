"""The data that a run names: prepared once, found again by its fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from littlelm_core import corpus
from littlelm_core.config import (
    DataError,
    RunConfig,
    build,
    resolve,
)
from littlelm_core.ingest.catalog import DATASETS, find_form
from littlelm_core.ingest.write import (
    MANIFEST,
    MANIFEST_VERSION,
    SHARD_TOKENS,
    SPLITS,
    SplitWriter,
    add_counts,
    describe,
    write_json,
)
from littlelm_core.shards import FORMAT_VERSION, Shard
from littlelm_core.tokenizer import Tokenizer

RECIPE = 1  # raise it when prepare_default would write something else
SAMPLE_BYTES = 8_000_000  # of text that a tokenizer is trained on


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, opened."""

    folder: Path
    tokenizer: Any
    train: list[Shard]
    validation: dict[str, list[Shard]]  # by domain
    manifest: dict[str, Any]


def prepare_run(run: RunConfig) -> Prepared:
    """Return the data that `run.data.source` names, prepared now if need be.

    "default" is the default corpus, with the run's tokenizer trained on a part of it:
    about ten seconds, once for each tokenizer. Anything else is a folder that
    `littlelm data prepare` wrote. Two processes may ask at once: each sees a whole
    folder or none.
    Raises DataError: no such folder, an incomplete or damaged one, a tokenizer of
    another size than the run's.
    """
    if run.data.source != "default":
        return open_prepared(source_folder(run.data.source), run)
    folder = corpus.data_folder() / f"default-{_key(run)}"
    try:
        return open_prepared(folder, run)
    except DataError:
        if folder.exists():  # damaged: make it again
            shutil.rmtree(folder, ignore_errors=True)
    try:
        with whole_folder(folder) as temporary:
            prepare_default(run, temporary)
    except OSError as error:
        raise DataError(
            f"cannot prepare the default corpus in {folder.parent}: {error.strerror}: "
            "make room, or set LITTLELM_DATA to another folder"
        ) from error
    return open_prepared(folder, run)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill that takes its name only when all is in it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        with contextlib.suppress(OSError):  # another process was first: take its own
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def source_folder(source: str) -> Path:
    """Return the folder that data.source names.

    A path, or a bare name of a folder of prepared data: "climbmix" is
    data/prepared/climbmix, where `littlelm data prepare climbmix` writes it.
    Raises DataError: a dataset with a name that is not prepared.
    """
    path, named = Path(source).expanduser(), corpus.data_folder() / source
    if path.is_dir() or len(path.parts) > 1:
        return path
    if not named.is_dir() and source in DATASETS:
        files = find_form(source).files
        raise DataError(
            f"data.source = {source!r} is not prepared, there is no {named}: run "
            f"littlelm data prepare {source} --shards N (1 to {files}; --help says how "
            "large), or name another data.source"
        )
    return named if named.is_dir() else path


def _key(run: RunConfig) -> str:
    part = run.tokenizer
    source = ""
    if ":" in part.use:  # an own tokenizer: its code is part of what was prepared
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(resolve("tokenizer", part.use))
    what = (
        RECIPE,
        FORMAT_VERSION,
        corpus.fingerprint(),
        part.model_dump_json(),
        source,
    )
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()


def tokenizer_sample(size: int = SAMPLE_BYTES) -> list[str]:
    """Return training documents of about `size` bytes, spread over all domains."""
    texts = [t for d in corpus.domains() for t in corpus.documents(d, "train")]
    total = sum(len(t) for t in texts)
    share, taken, seen, sample = min(1.0, size / total), 0, 0, []
    for text in texts:
        seen += len(text)
        if taken + len(text) / 2 <= share * seen:
            sample.append(text)
            taken += len(text)
    return sample


def prepare_default(run: RunConfig, folder: Path) -> dict[str, Any]:
    """Train the run's tokenizer and write the default corpus as shards, one a domain
    and split; return the manifest."""
    tokenizer = build("tokenizer", run.tokenizer, tokenizer_sample())
    tokenizer.save(folder / "tokenizer.json")
    domains = {}
    for domain in corpus.domains():
        writer = SplitWriter(folder, f"{domain}-00000", tokenizer, SHARD_TOKENS)
        for split in SPLITS:
            writer.add(split, list(corpus.documents(domain, split)))
        domains[domain] = {s: {} for s in SPLITS}
        for split, counts in writer.finish().items():
            add_counts(domains[domain][split], counts)
    manifest = {
        **describe(domains, tokenizer),
        "sources": ["default"],
        "corpus": corpus.fingerprint(),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def open_prepared(folder: str | Path, run: RunConfig | None = None) -> Prepared:
    """Open a prepared folder and check that it is whole.

    run: refuse a folder whose tokenizer has another size than the run's.
    Raises DataError: no such folder, no manifest (it is not complete), a shard that is
    missing, damaged or another one than the manifest names.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(
            f'no folder {folder}: data.source is "default" or a folder made by '
            "littlelm data prepare"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        version = manifest["format"]
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no {MANIFEST}: run littlelm data prepare again to finish it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: prepare it again") from error
    if version != MANIFEST_VERSION:
        raise DataError(
            f"{folder} has data format {version}, this littlelm reads "
            f"{MANIFEST_VERSION}: prepare it again or update littlelm"
        )
    tokenizer = _load_tokenizer(folder, run)
    if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
        raise DataError(f"{folder}/tokenizer.json is not the one of the shards")
    train, validation = [], {}
    for domain, splits in sorted(manifest["domains"].items()):
        for split in SPLITS:
            shards = [_open(folder, s) for s in splits[split]["shards"]]
            if split == "train":
                train += shards
            elif shards:
                validation[domain] = shards
    for shard in train[:1]:
        _check_vocabulary(shard, tokenizer.vocab_size)
        wanted = run.tokenizer.options.get("vocab_size") if run else None
        if wanted is not None and run.data.source != "default":
            _check_vocabulary(shard, wanted)
    return Prepared(folder, tokenizer, train, validation, manifest)


def _open(folder: Path, entry: dict[str, Any]) -> Shard:
    shard = Shard(folder / entry["name"])
    if shard.fingerprint != entry["fingerprint"]:
        raise DataError(
            f"{shard.path} is not the shard that {MANIFEST} names: prepare it again"
        )
    return shard


def _check_vocabulary(shard: Shard, vocab_size: int) -> None:
    if shard.vocab_size != vocab_size:
        raise DataError(
            f"the vocabulary is {vocab_size} but that of {shard.path} is "
            f"{shard.vocab_size}: set tokenizer.vocab_size = {shard.vocab_size} or "
            "prepare the data with this tokenizer"
        )


def _load_tokenizer(folder: Path, run: RunConfig | None) -> Any:
    """Load tokenizer.json with the run's own class where it has one, else with ours."""
    own = resolve("tokenizer", run.tokenizer.use) if run else Tokenizer
    loader = own if hasattr(own, "load") else Tokenizer
    return loader.load(folder / "tokenizer.json")


def total(manifest: dict[str, Any], split: str) -> dict[str, int]:
    """Return documents, tokens and bytes of one split over all domains."""
    counts: Counter[str] = Counter()
    for domain in manifest["domains"].values():
        for key in ("documents", "tokens", "bytes"):
            counts[key] += domain[split][key]
    return dict(counts)
