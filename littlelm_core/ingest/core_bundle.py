"""The files of CORE: `littlelm data prepare core`.

CORE's tasks lie in the evaluation bundle that nanochat downloads, a zip of about 80
files in folders by category, of which CORE reads 21. They come to lie side by side in
one folder, with a core.yaml beside them, and that is what `load_tasks` reads.

Files are known by their sum, wherever in the zip they lie: a bundle that was packed
anew is as good, and one file that was altered is not. Nothing could be downloaded where
this was written; tests pack the same 21 files and serve them.

$LITTLELM_CORE_URL names another address of the zip.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.console import Console

from littlelm_core.config import DataError
from littlelm_core.corpus import data_folder
from littlelm_core.ingest.core_table import FILES, URL, File, core_yaml
from littlelm_core.ingest.download import (
    Refused,
    RemoteFile,
    Unreachable,
    check_room,
    fetch,
    is_ours,
    is_there,
    local_path,
    remove,
    sized,
)
from littlelm_core.ingest.pool import progress_bar
from littlelm_core.ingest.write import MANIFEST, hold
from littlelm_core.shards import atomic_file

ARCHIVE = "eval_bundle.zip"
TABLE = "core.yaml"
MINI = Path(__file__).parents[2] / "data" / "mini_core"  # comes with the clone


# ---- The folder


def core_folder() -> Path:
    """Return where the tasks lie by default: $LITTLELM_DATA/core."""
    return data_folder() / "core"


def tasks_folder(named: str | Path = "") -> Path:
    """Return the folder of tasks to evaluate: the named one, CORE, or mini CORE.

    Raises DataError where a named folder lacks a table, or the clone its data.
    """
    if named:
        if not (Path(named).expanduser() / TABLE).is_file():
            raise DataError(f"{named} has no {TABLE}: it is no folder of tasks")
        return Path(named).expanduser()
    if (core_folder() / TABLE).is_file():
        return core_folder()
    if (MINI / TABLE).is_file():
        return MINI
    raise DataError(
        f"no tasks: {MINI} comes with the clone of the course, and littlelm data "
        "prepare core gets the real ones"
    )


def prepare_core(
    out: str | Path | None = None,
    *,
    downloads: str | Path | None = None,
    keep: bool = False,
    console: Console | None = None,
) -> Path:
    """Fetch the bundle and lay out core.yaml and the 21 files; return their folder.

    out: the folder; None: `core_folder()`. What lies there and has the right sum stays,
    what is missing or altered is written anew, core.yaml last; when all is there,
    nothing is fetched and nothing written.
    downloads: where the zip comes to lie, or was put by hand. keep: leave it there.
    Raises DataError: no network, a refusal, no room, a bundle without one of the files,
    a folder with other data.
    """
    console = console or Console(stderr=True)
    out = Path(out) if out else core_folder()
    folder = Path(downloads) if downloads else data_folder() / "downloads" / "core"
    tabled = _has_our_table(out)
    absent = [n for n, file in FILES.items() if not _is_whole(out / n, file)]
    if tabled and not absent:
        console.print(f"{out} is complete: every sum is right", soft_wrap=True)
        return out
    file = RemoteFile("", ARCHIVE, address=os.environ.get("LITTLELM_CORE_URL") or URL)
    try:
        if absent:
            with hold(folder):
                _bring(file, folder, absent, out, console)
        if not keep:
            remove(file, folder)
        if not tabled:  # last: what has a table is complete
            with atomic_file(out / TABLE) as written:
                written.write(core_yaml().encode())
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or out}: {error.strerror}: make room or "
            "give another folder and run this again, what is done is kept"
        ) from error
    return out


def _has_our_table(out: Path) -> bool:
    """Whether core.yaml lies there, ours in its values; refuse a folder of others."""
    path = out / TABLE
    if (out / MANIFEST).exists():
        raise DataError(f"{out} holds shards: give another folder by --out")
    if not path.is_file():
        return False
    try:
        there = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        there = None
    if there != yaml.safe_load(core_yaml()):
        raise DataError(
            f"{path} is not the table of CORE: give another folder by --out, or delete "
            "this file and run it again"
        )
    return True


def _is_whole(path: Path, file: File) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


# ---- The bundle


class _Unlike(DataError):
    """A bundle that is damaged, or lacks one of the files."""


def _bring(
    file: RemoteFile, folder: Path, names: list[str], out: Path, console: Console
) -> None:
    """Fetch the bundle if need be and unpack the files; a bad one is fetched again."""
    for last in (False, True):
        path = _fetched(file, folder, names, out, console)
        try:
            return _unpack(path, names, out)
        except _Unlike as error:
            if not is_ours(file, folder):
                raise DataError(f"{error}: delete it and run this again") from error
            remove(file, folder)
            if last:
                raise DataError(
                    f"{error}; it came twice from {file.url}: try again later, or "
                    "update littlelm"
                ) from error


def _fetched(
    file: RemoteFile, folder: Path, names: list[str], out: Path, console: Console
) -> Path:
    """Return the bundle's path, from the folder of downloads or from its server."""
    path = local_path(file, folder)
    if is_there(file, folder):
        return path
    try:
        file = sized(file)
        room = sum(FILES[name].size for name in names)
        needs = [(folder, file.size, "the bundle"), (out, room, "tasks")]
        for line in check_room(needs, "give folders on a larger disk"):
            console.print(line, soft_wrap=True, markup=False)
        with progress_bar(console) as bar:
            task = bar.add_task(ARCHIVE, total=file.size)
            partial = path.with_name(path.name + ".partial")
            if partial.is_file():
                bar.advance(task, partial.stat().st_size)
            return fetch(file, folder, lambda size: bar.advance(task, size))
    except Unreachable as error:
        raise Unreachable(
            f"{error}: without a network, bring {ARCHIVE} from that address and put it "
            f"into {folder}, then run this again"
        ) from error
    except Refused as error:
        raise DataError(f"{error} (there: {path})") from error


def _unpack(path: Path, names: list[str], out: Path) -> None:
    """Write the files, each whole or not at all; raise _Unlike at the first bad one."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                content = _find(archive, FILES[name])
                if content is None:
                    raise _Unlike(f"{path} {_what_is_wrong(archive, name)}")
                with atomic_file(out / name) as file:
                    file.write(content)
    except zipfile.BadZipFile as error:
        raise _Unlike(f"{path} is no whole zip ({error})") from error


def _find(archive: zipfile.ZipFile, file: File) -> bytes | None:
    """Return the content with the listed sum, whatever its name and folder."""
    for content in _contents(archive, file.size):
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content
    return None


def _contents(archive: zipfile.ZipFile, size: int) -> Iterator[bytes]:
    """Yield what has this size; what cannot be read is none."""
    for info in archive.infolist():
        if info.file_size == size:
            try:
                yield archive.read(info)
            except (
                zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError,
                RuntimeError,  # encrypted
            ):  # fmt: skip
                continue


def _what_is_wrong(archive: zipfile.ZipFile, name: str) -> str:
    """Say whether a file is missing or altered, with the path it was looked for at."""
    member = FILES[name].member
    for info in archive.infolist():
        if info.filename.endswith(f"/{member}"):
            return f"has an altered {info.filename}: its SHA-256 is not the listed one"
    return f"has no {member}"
