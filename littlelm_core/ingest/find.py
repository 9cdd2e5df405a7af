"""What there is to read: files and folders to parts that one process reads in one go.

In an order that depends on names alone; a part names its files and where in them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from littlelm_core.config import DataError, nearest
from littlelm_core.ingest.read import Part, open_dataset

ROWS_OF_A_PART = 50_000  # of a Hugging Face dataset, read by one process at a time
CURATED = "curated.json"  # the manifest of `data curate`
WORK = ".curate"  # its folder of what is under way


def find_parts(
    sources: list[str], part_bytes: int, out: Path | None = None
) -> list[Part]:
    """Return what there is to read, in an order that depends on names alone.

    sources: paths of files or folders, or names of datasets, each "DOMAIN=SOURCE" or
    just the source, whose stem then names the domain.
    out: the folder of shards; what lies in it is no source.
    Raises DataError: nothing of this name, an empty folder, `out` itself.
    """
    parts: list[Part] = []
    for source in sources:
        given, where = parse(source)
        path = Path(where).expanduser()
        domain = given or path.name.split(".")[0].split(":")[0]
        domain = re.sub(r"[^a-z0-9]+", "_", domain.lower()).strip("_") or "text"
        if path.is_dir() and (path / CURATED).is_file():
            parts += _curated_parts(path, domain if "=" in source else "", part_bytes)
        elif path.is_dir() and (path / WORK).exists():
            raise DataError(f"data curate has not finished {path}: run it again")
        elif path.is_dir() and not _is_dataset(path):
            root, own = path.resolve(), out and out.resolve()
            if root == own:
                raise DataError(f"{path} is the folder of shards: give --out another")
            within = own and own.is_relative_to(root) and path / own.relative_to(root)
            files = [
                p for p in path.rglob("*")
                if p.is_file() and not (within and p.is_relative_to(within))
                and not any(
                    name.startswith(".") or name == "__pycache__"
                    for name in p.relative_to(path).parts
                )
            ]  # fmt: skip
            if not files:
                raise DataError(f"the folder {path} has no files")
            names = {p.relative_to(path).as_posix(): p for p in files}
            parts += _group(domain, names, part_bytes)
        elif path.is_file():
            parts += _group(domain, {"": path}, part_bytes)
        else:
            parts += _dataset_parts(domain, str(path) if path.is_dir() else where)
    return parts


def parse(source: str, names: Iterable[str] = ()) -> tuple[str, str]:
    """Return (domain or "", path or name of a dataset) of a source.

    names: of what else could have been meant. Raises DataError: nothing of this name.
    """
    given, equals, rest = source.partition("=")
    domain, where = (given, rest) if equals else ("", source)
    if not where.strip():  # else it would be the working directory
        raise DataError(f"the source {source!r} names no file: give its path")
    path = Path(where).expanduser()
    dataset = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", where)
    if not (path.is_file() or path.is_dir() or dataset):
        close = difflib.get_close_matches(where, names)  # a path is not like all names
        raise DataError(
            f"no file, folder or dataset {where}{nearest(where, close)}: check the path"
        )
    return domain, where


def _curated_parts(path: Path, domain: str, part_bytes: int) -> list[Part]:
    """Return the parts that `data curate` has written, its own domains by default."""
    domains: dict[str, dict[str, Path]] = {}
    try:
        for part in json.loads((path / CURATED).read_text("utf-8"))["parts"]:
            files = domains.setdefault(domain or part["domain"], {})
            files[part["name"]] = path / part["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / CURATED} is damaged: curate again") from error
    if not domains:
        raise DataError(f"data curate has kept no document in {path}")
    return [
        part
        for name, files in domains.items()
        for part in _group(name, files, part_bytes)
    ]


def _is_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _kind(path: Path) -> str:
    name = path.name.lower()
    if re.search(r"\.(jsonl|ndjson)(\.gz|\.zst)?$|\.json\.(gz|zst)$", name):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _group(domain: str, files: dict[str, Path], part_bytes: int) -> list[Part]:
    """Put consecutive small files of a kind together, in the order of their names."""
    parts: list[Part] = []
    for name in sorted(files):
        path, kind = files[name], _kind(files[name])
        info = path.stat()
        stamp = f"{path.resolve()}:{info.st_size}:{info.st_mtime_ns}"
        part = Part(domain, kind, ((str(path), name),), info.st_size, stamp)
        last = parts[-1] if parts else None
        if last and last.kind == kind and last.size + part.size <= part_bytes:
            parts[-1] = last._replace(
                files=last.files + part.files,
                size=last.size + part.size,
                stamp=f"{last.stamp}\n{part.stamp}",
            )
        else:
            parts.append(part)
    return parts


def _dataset_parts(domain: str, name: str) -> list[Part]:
    found = open_dataset(name)
    stamp = f"{name}:{found._fingerprint}"
    parts = []
    for start in range(0, max(len(found), 1), ROWS_OF_A_PART):
        rows = (start, min(start + ROWS_OF_A_PART, len(found)))
        size = rows[1] - rows[0]
        parts.append(Part(domain, "dataset", ((name, ""),), size, stamp, rows))
    return parts


def cut(parts: list[Part], part_bytes: int) -> list[Part]:
    """Cut the parts of one large file into several, at lines or row groups.

    Files that are packed as a whole (.gz, .zst) and text stay as they are.
    """
    result: list[Part] = []
    for part in parts:
        path, edges = Path(part.files[0][0]), []
        if len(part.files) > 1 or part.size <= part_bytes:
            pass
        elif part.kind == "jsonl" and path.suffix not in (".gz", ".zst"):
            edges = [(at, at) for at in range(0, part.size, part_bytes)]
            edges.append((part.size, part.size))
        elif part.kind == "parquet":
            edges = _row_group_edges(path, part_bytes)
        if len(edges) <= 2:
            result.append(part)
            continue
        for (first, start), (last, stop) in pairwise(edges):
            result.append(part._replace(rows=(first, last), size=stop - start))
    return result


def _row_group_edges(path: Path, part_bytes: int) -> list[tuple[int, int]]:
    """Return (row group, bytes before it) about every part_bytes; [] if unreadable."""
    try:
        found = pq.ParquetFile(path).metadata
    except (OSError, pa.ArrowException):
        return []
    edges, size = [(0, 0)], 0
    for group in range(found.num_row_groups):
        info = found.row_group(group)
        size += sum(
            info.column(i).total_compressed_size for i in range(info.num_columns)
        )
        if size - edges[-1][1] >= part_bytes or group + 1 == found.num_row_groups:
            edges.append((group + 1, size))
    return edges
