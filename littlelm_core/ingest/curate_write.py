"""The last pass of `data curate`: the lines that stay, in the format asked for."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from littlelm_core.ingest.curate_dedup import DOC, EXACT, KEPT, Documents
from littlelm_core.ingest.curate_options import FORMATS, Options, Removed, describe
from littlelm_core.ingest.read import Part, raw_lines
from littlelm_core.ingest.write import write_json
from littlelm_core.shards import atomic_file

REASONS = ("duplicates: near", "duplicates: exact")
ENDINGS = tuple(f".{name}" for name in FORMATS)
BEFORE = 150  # characters shown before two near duplicates differ
LEVEL = 6  # of compression: slower ones gain little on text
ROWS = 1_000  # read at once for a parquet file
GROUP_CHARACTERS = 16_000_000  # of text in one row group


def write(
    part: Part,
    label: str,
    first: int,
    key: str,
    work: Path,
    out: Path,
    options: Options,
    advance: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Write the documents of a part that stay; return a report.

    first: the number of the part's first document in the arrays of `work`/clusters.
    The report names no file where nothing stays.
    """
    docs = np.fromfile(work / f"{label}.docs", DOC)
    kind = _slice(work / "clusters" / "kind.bin", "u1", first, len(docs))
    root = _slice(work / "clusters" / "root.bin", "<u8", first, len(docs))
    lines, removed = work / f"{label}.lines.zst", Removed()
    for number in np.flatnonzero(kind != KEPT).tolist():
        reason = REASONS[int(kind[number] == EXACT)]
        removed.count(reason, int(docs["size"][number]))
        pair = {"number": first + number, "kept": int(root[number])}
        digest = int(docs["hash"][number, 0])
        removed.examples.add(reason, digest, lambda pair=pair: pair)
    kept = kind == KEPT
    report = {
        "key": key,
        "domain": part.domain,
        "documents": int(kept.sum()),
        "bytes": int(docs["size"][kept].sum()),
        "file": None,
        **removed.to_json(),
    }
    if kept.any():
        name = f"{part.domain}/{label}.{options.format}"
        with atomic_file(out / name) as file:
            if options.format != "parquet":
                _write_lines(file, lines, kept, options.format)
            elif part.kind == "parquet":
                _write_rows(file, part, lines, docs["row"], kept, options.text_key)
            else:
                _write_table(file, lines, kept, options.text_key)
        report["file"] = name
        report["size"] = (out / name).stat().st_size
        report["fingerprint"] = fingerprint(out / name)
    write_json(work / f"{label}.written.json", report)
    advance(int(docs["size"].sum()))
    return report


def _slice(path: Path, dtype: str, first: int, count: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return np.fromfile(path, dtype, count, offset=first * size)


def fingerprint(path: Path) -> str:
    """Return a hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, functools.partial(hashlib.blake2b, digest_size=16)
        ).hexdigest()


def record_of(work: Path, label: str, number: int) -> dict[str, Any]:
    """Return one document of a part, by its number there."""
    return json.loads(
        next(islice(raw_lines(work / f"{label}.lines.zst"), number, None))
    )


def written(
    part: Part, label: str, first: int, key: str, work: Path, out: Path, *rest: Any
) -> dict[str, Any] | None:
    """Return the report of a part that is written already, or None."""
    try:
        report = json.loads((work / f"{label}.written.json").read_text("utf-8"))
        if report["key"] != key:
            return None
        name = report["file"]
        good = name is None or (out / name).stat().st_size == report["size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if good else None


def show_pairs(
    examples: dict[str, list[dict[str, Any]]],
    documents: Documents,
    labels: list[str],
    work: Path,
    options: Options,
) -> None:
    """Put beside each duplicate the text that stays, from where they differ."""
    for reason in REASONS:
        for example in examples.get(reason, []):
            pair = []
            for number in (example.pop("number"), example.pop("kept")):
                place, line = documents.part_of(number)
                pair.append(record_of(work, labels[place], line))
            dropped, kept = (record[options.text_key] for record in pair)
            both = enumerate(zip(dropped, kept, strict=False))
            start = next((i for i, (a, b) in both if a != b), 0)
            start = max(start - BEFORE, 0)
            example |= describe(pair[0], dropped, options.text_key, "", start)
            example["kept"] = describe(pair[1], kept, options.text_key, "", start)


# ---- JSON lines


def _stay(lines: Path, kept: np.ndarray) -> Iterator[bytes]:
    for line, stays in zip(raw_lines(lines), kept.tolist(), strict=True):
        if stays:
            yield line


def _write_lines(file: IO[bytes], lines: Path, kept: np.ndarray, form: str) -> None:
    if form == "jsonl.gz":
        packed: Any = gzip.GzipFile("", "wb", LEVEL, file, mtime=0)  # no name, no time
    else:
        packer = zstandard.ZstdCompressor(LEVEL, write_checksum=True)
        packed = packer.stream_writer(file, closefd=False)
    with packed:
        for line in _stay(lines, kept):
            packed.write(line + b"\n")


# ---- Parquet


def _write_rows(
    file: IO[bytes],
    part: Part,
    lines: Path,
    rows: np.ndarray,
    kept: np.ndarray,
    text_key: str,
) -> None:
    """Copy the rows of a parquet file that stay, in its own types, with new texts."""
    source = pq.ParquetFile(part.files[0][0])
    groups = range(*part.rows) if part.rows[1] else range(source.num_row_groups)
    wanted, texts = rows[kept], _stay(lines, kept)
    held: list[pa.Table] = []
    size = at = 0
    with pq.ParquetWriter(file, source.schema_arrow, compression="zstd") as writer:
        for batch in source.iter_batches(ROWS, row_groups=list(groups)):
            low, high = np.searchsorted(wanted, (at, at + len(batch)))
            if high > low:
                table = pa.Table.from_batches([batch]).take(wanted[low:high] - at)
                place = table.schema.get_field_index(text_key)
                new = [json.loads(next(texts))[text_key] for _ in range(high - low)]
                column = pa.array(new, table.schema.field(place).type)
                field = table.schema.field(place)
                held.append(table.set_column(place, field, column))
                size += sum(map(len, new))
            at += len(batch)
            if size >= GROUP_CHARACTERS:
                writer.write_table(pa.concat_tables(held))
                held, size = [], 0
        if held:
            writer.write_table(pa.concat_tables(held))


def _write_table(file: IO[bytes], lines: Path, kept: np.ndarray, text_key: str) -> None:
    """Write JSON records as a table; a field without one type becomes JSON text."""
    fields: dict[str, pa.DataType | None] = {}
    for records in _batches(lines, kept, text_key):
        for name in {name: None for record in records for name in record}:
            values = [record.get(name) for record in records]
            found = _type_of(values)
            fields[name] = _common(fields[name], found) if name in fields else found
    texts = {name for name, kind in fields.items() if kind is None}
    while (refused := _fill(file, lines, kept, text_key, fields, texts)) is not None:
        texts.add(refused)
        file.seek(0)
        file.truncate()


def _fill(
    file: IO[bytes],
    lines: Path,
    kept: np.ndarray,
    text_key: str,
    fields: dict[str, pa.DataType | None],
    texts: set[str],
) -> str | None:
    """Write the table; return a field with a value that its type cannot hold."""
    schema = pa.schema(
        [(n, pa.string() if n in texts else kind) for n, kind in fields.items()]
    )
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for records in _batches(lines, kept, text_key):
            for record in records:
                for name in texts & record.keys():
                    record[name] = json.dumps(record[name], ensure_ascii=False)
            columns = []
            for field in schema:
                values = [record.get(field.name) for record in records]
                try:
                    columns.append(pa.array(values, field.type))
                except (pa.ArrowException, OverflowError):  # 2**60 among floats
                    return field.name
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return None


def _batches(
    lines: Path, kept: np.ndarray, text_key: str
) -> Iterator[list[dict[str, Any]]]:
    held: list[dict[str, Any]] = []
    size = 0
    for line in _stay(lines, kept):
        record = json.loads(line)
        held.append(_without_halves(record) if b"\\ud" in line else record)
        size += len(held[-1][text_key])
        if size >= GROUP_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held


def _without_halves(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with U+FFFD for lone surrogates, which UTF-8 does not have."""
    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))


def _type_of(values: list[Any]) -> pa.DataType | None:
    """Return the type of a column, or None where parquet has none for it."""
    try:
        found = pa.infer_type(values)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None
    return found if _storable(found) else None


def _storable(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):  # one without fields cannot be stored
        return kind.num_fields > 0 and all(_storable(f.type) for f in kind)
    return _storable(kind.value_type) if pa.types.is_list(kind) else True


def _common(a: pa.DataType | None, b: pa.DataType | None) -> pa.DataType | None:
    if a is None or b is None:
        return None
    try:
        both = [pa.schema([("x", kind)]) for kind in (a, b)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
