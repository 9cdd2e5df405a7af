"""Documents out of files: plain text, JSON lines, parquet, Hugging Face datasets.

Every reader yields either a `Text` or a `Bad`: a record that cannot be used is counted
and named with its place, never skipped in silence and never the end of the run.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from littlelm_core.config import DataError, nearest

PIECE = 50_000  # characters: a text file of more than two pieces is cut into some
HELD_TEXT = 16_000_000  # bytes: a text file above this is read piece by piece


class Text(NamedTuple):
    """One document. `name` decides its split; None: its own text does.

    place ("file:line") and record (all fields) are there where they are asked for.
    """

    text: str
    name: str | None = None
    place: str = ""
    record: dict[str, Any] | None = None


class Bad(NamedTuple):
    """A record that cannot be used: where it is ("file:line") and what is wrong."""

    place: str
    reason: str


class Part(NamedTuple):
    """What one process reads in one go; kind: text, jsonl, parquet or dataset."""

    domain: str
    kind: str
    files: tuple[tuple[str, str], ...]  # (path, name for the split or "")
    size: int  # bytes (rows of a dataset), for the progress bar
    stamp: str  # changes when the source changes
    # Of a dataset; of a file that `cut` has cut: bytes of jsonl, row groups of parquet.
    rows: tuple[int, int] = (0, 0)


def read_part(part: Part, text_key: str, whole: bool = False) -> Iterator[Text | Bad]:
    """Yield the documents and bad records of a part, in order.

    whole: with the place and all fields of each record. text_key "": records of any
    fields, whose text is "" (of a text file, "text").
    """
    if part.kind == "dataset":
        yield from _read_dataset(part, text_key, whole)
        return
    for path, name in part.files:
        if part.kind == "jsonl":
            yield from _read_jsonl(Path(path), text_key, part.rows, whole)
        elif part.kind == "parquet":
            yield from _read_parquet(Path(path), text_key, part.rows, whole)
        else:
            for found in _read_text(Path(path), name or None):
                if whole and isinstance(found, Text):
                    named = name or Path(path).name
                    record = {text_key or "text": found.text, "path": named}
                    found = found._replace(place=str(path), record=record)
                yield found


# ---- Plain text


def _read_text(path: Path, name: str | None) -> Iterator[Text | Bad]:
    """Yield a text file as one document, or a long one in pieces."""
    try:
        if path.stat().st_size > HELD_TEXT:
            yield from _read_long_text(path, name)
            return
        data = path.read_bytes()
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        binary = b"\0" in data[:8192]
        yield Bad(f"{path}:{line}", "binary file" if binary else "not UTF-8")
        return
    except OSError as error:
        yield Bad(str(path), f"cannot be read: {error.strerror}")
        return
    if "\0" in text[:8192]:
        yield Bad(str(path), "binary file")
    elif not text.strip():
        yield Bad(str(path), "empty")
    else:
        for piece in _pieces(text):
            yield Text(piece, name)


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at blank lines into pieces of about PIECE characters."""
    if len(text) <= 2 * PIECE:
        yield text
        return
    start = 0
    while start < len(text):
        stop = _end_of_piece(text, start)
        if text[start:stop].strip():
            yield text[start:stop]
        start = stop


def _end_of_piece(text: str, start: int) -> int:
    """Return where the piece from `start` on ends; looks 4 PIECE ahead."""
    cut = text.find("\n\n", start + PIECE, start + 4 * PIECE + 2)
    stop = len(text) if cut < 0 else cut + 2
    if stop - start > 4 * PIECE:  # no blank line for long: cut at a line, or there
        line = text.find("\n", start + PIECE, start + 2 * PIECE)
        stop = line + 1 if line >= 0 else start + PIECE
    return stop


def _read_long_text(path: Path, name: str | None) -> Iterator[Text | Bad]:
    """Yield the pieces of a text file that is never held as a whole."""
    decoder, held, line = codecs.getincrementaldecoder("utf-8-sig")(), "", 1
    bad: Bad | None = None
    with path.open("rb") as file:
        data = file.read(8192)
        if b"\0" in data:
            yield Bad(str(path), "binary file")
            return
        while data or held:
            try:
                held += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += held.count("\n") + error.object[: error.start].count(b"\n")
                bad = Bad(f"{path}:{line}", "not UTF-8")  # what is before it is kept
                data, held = b"", held + error.object[: error.start].decode("utf-8")
                file.seek(0, 2)
            start = 0
            # A piece looks 4 PIECE ahead, so it is the same in any blocks.
            while len(held) - start > 5 * PIECE or (not data and start < len(held)):
                stop = _end_of_piece(held, start)
                if held[start:stop].strip():
                    yield Text(held[start:stop], name)
                start = stop
            line, held = line + held.count("\n", 0, start), held[start:]
            data = file.read(1 << 20)
    if bad is not None:
        yield bad


# ---- JSON lines


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked by suffix; a cut archive raises."""
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            yield from file
    elif path.suffix == ".zst":
        yield from _zst_lines(path)
    else:
        with path.open("rb") as file:
            yield from file


def _zst_lines(path: Path) -> Iterator[bytes]:
    # zstandard's own stream reader takes the end of a cut file for its end.
    decoder, held = zstandard.ZstdDecompressor().decompressobj(), b""
    fed = False
    with path.open("rb") as file:
        while data := file.read(1 << 16):  # few: what repeats grows a thousandfold
            while data:
                held += decoder.decompress(data)
                data, fed = decoder.unused_data, not decoder.eof
                if decoder.eof:
                    decoder = zstandard.ZstdDecompressor().decompressobj()
            *lines, held = held.split(b"\n")
            yield from lines
    if held:
        yield held
    if fed:
        raise EOFError


def _lines_between(path: Path, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield (where it starts, line) for the lines that start in bytes [first, last)."""
    with path.open("rb") as file:
        if first:  # to the start of a line: it may be right here
            file.seek(first - 1)
            first += len(file.readline()) - 1
        while first < last and (raw := file.readline()):
            yield first, raw
            first += len(raw)


def _read_jsonl(
    path: Path, text_key: str, rows: tuple[int, int] = (0, 0), whole: bool = False
) -> Iterator[Text | Bad]:
    number = 0
    try:
        if rows[1]:
            for number, raw in _lines_between(path, *rows):
                if raw.strip():
                    yield _record(raw, text_key, f"{path}:byte {number}", whole)
            return
        for number, raw in enumerate(raw_lines(path), 1):
            if raw.strip():
                yield _record(raw, text_key, f"{path}:{number}", whole)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = "the file ends too early" if isinstance(error, EOFError) else error
        yield Bad(f"{path}:{number + 1}", f"cannot be read on: {reason}")
        return
    if number == 0:
        yield Bad(str(path), "empty")


def _record(raw: bytes, text_key: str, place: str, whole: bool) -> Text | Bad:
    try:
        record = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return Bad(place, "not UTF-8")
    except (ValueError, RecursionError):
        return Bad(place, "not JSON")
    if not isinstance(record, dict):
        return Bad(place, "not a JSON object")
    if text_key and text_key not in record:
        return Bad(place, f"no key {text_key!r}{nearest(text_key, record)}")
    return _checked(record, text_key, place, whole)


def _checked(
    record: dict[str, Any], text_key: str, place: str, whole: bool
) -> Text | Bad:
    text = record[text_key] if text_key else ""
    if not isinstance(text, str):
        return Bad(place, f"{text_key} is {type(text).__name__}, not a string")
    if text_key and not text.strip():
        return Bad(place, "empty")
    return Text(text, None, place, record) if whole else Text(text)


# ---- Parquet and datasets


def _read_parquet(
    path: Path, text_key: str, rows: tuple[int, int] = (0, 0), whole: bool = False
) -> Iterator[Text | Bad]:
    row = 0
    try:
        file = pq.ParquetFile(path)
        if text_key and text_key not in file.schema_arrow.names:
            close = nearest(text_key, file.schema_arrow.names)
            yield Bad(str(path), f"no column {text_key!r}{close}")
            return
        groups = range(*rows) if rows[1] else range(file.num_row_groups)
        row = sum(file.metadata.row_group(i).num_rows for i in range(groups.start))
        columns = None if whole else [text_key]
        for batch in file.iter_batches(256, row_groups=list(groups), columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield _checked(record, text_key, f"{path}:row {row}", whole)
    except (OSError, pa.ArrowException) as error:
        reason = "not a parquet file" if row == 0 else "cannot be read on"
        yield Bad(f"{path}:row {row + 1}", f"{reason}: {' '.join(str(error).split())}")
        return
    if row == 0:
        yield Bad(str(path), "empty")


def open_dataset(name: str) -> Any:
    """Return a Hugging Face dataset: a folder of `save_to_disk`, or a name.

    name: "owner/name", "owner/name:config" or "owner/name:config:split" (the split is
    train by default). Raises DataError: no `datasets`, no network, no such name.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name} needs: pip install 'littlelm[hub]'") from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line is enough
    folder, wanted = Path(name), "train"
    try:
        if folder.is_dir():
            found = datasets.load_from_disk(name)
        else:
            repository, _, rest = name.partition(":")
            config, _, split = rest.partition(":")
            wanted = split or "train"
            found = datasets.load_dataset(repository, config or None, split=wanted)
    except Exception as error:  # the library raises its own, its network's and OSErrors
        first = " ".join(str(error).split())[:200]
        raise DataError(
            f"cannot load the dataset {name}: {first} (without a network, load it "
            "once on a machine that has one, or give a folder of files)"
        ) from error
    if hasattr(found, "keys"):
        if wanted not in found:
            raise DataError(f"{name} has no split {wanted!r}{nearest(wanted, found)}")
        found = found[wanted]
    return found


def _read_dataset(part: Part, text_key: str, whole: bool) -> Iterator[Text | Bad]:
    name = part.files[0][0]
    found = open_dataset(name)
    if text_key and text_key not in found.column_names:
        close = nearest(text_key, found.column_names)
        yield Bad(name, f"no column {text_key!r}{close}")
        return
    first, last = part.rows
    if not whole:
        found = found.select_columns([text_key])
    for start in range(first, last, 256):
        columns = found[start : min(start + 256, last)]
        for row, values in enumerate(zip(*columns.values(), strict=True), start):
            record = dict(zip(columns, values, strict=True))
            yield _checked(record, text_key, f"{name}:row {row + 1}", whole)
