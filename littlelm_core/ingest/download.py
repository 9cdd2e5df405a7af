"""Files of a public Hugging Face repository, or of a plain address: fetched, checked.

Two addresses of the Hub are enough: `paths-info` tells sizes and SHA-256 sums, and
`resolve` gives a file from any byte on. The Hub's own client (huggingface_hub 2.4)
starts a file anew after it was killed; here a part of 20 GB goes on where it stopped.
What is fetched is checked against the listed sum before anyone reads it.

$HF_ENDPOINT names another server of the same layout, as it does for the Hub's client.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

from littlelm_core.config import DataError, LittleLMError

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 6  # in a row that bring no byte
FIRST_WAIT = 1.0  # seconds; twice as long each time
LONGEST_WAIT = 120.0
BLOCK = 1 << 20
LISTED_AT_ONCE = 500
REFUSED = (400, 401, 403, 404, 410)  # trying again changes nothing


class Unreachable(DataError):
    """The server cannot be reached: no network, or it stays away."""


class Refused(DataError):
    """The server answers, and will not give the file."""


class RemoteFile(NamedTuple):
    """A file of a dataset repository; size -1 and sha256 "" where nobody told them.

    A small file may have no listed sum: then its size alone is checked.
    address: of a file that is in no repository; `path` is its name on this machine.
    """

    repo: str
    path: str
    size: int = -1
    sha256: str = ""
    address: str = ""

    @property
    def url(self) -> str:
        """Where the file is."""
        if self.address:
            return self.address
        where = urllib.parse.quote(self.path)
        return f"{endpoint()}/datasets/{self.repo}/resolve/main/{where}"


def endpoint() -> str:
    """Return the server: $HF_ENDPOINT or the Hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


# ---- Ask, and ask again


def _open(
    url: str,
    headers: dict[str, str],
    data: bytes | None = None,
    method: str | None = None,
) -> IO[bytes]:
    # Compressed on the way, the bytes would not be those of the file.
    headers = {"Accept-Encoding": "identity", "User-Agent": "littlelm", **headers}
    request = urllib.request.Request(url, data, headers, method=method)
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _patiently(attempt: Callable[[], bool], url: str) -> None:
    """Call `attempt` until it returns True, with longer waits while it brings nothing.

    attempt: returns whether all is there; raises `Progress` after an interrupted part.
    Raises Refused where the server refuses, Unreachable where it does not answer.
    """
    failures, wait = 0, FIRST_WAIT
    while True:
        pause = wait
        try:
            if attempt():
                return
            reason = "the answer ended too early"
        except LittleLMError:  # the disk, not the network
            raise
        except Progress:
            failures, wait = 0, FIRST_WAIT
            continue
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in REFUSED:
                raise Refused(
                    f"{url} answers {error.code} {error.reason}: the file was moved or "
                    "is not public; put it there by hand, or update littlelm"
                ) from error
            reason = f"{error.code} {error.reason}"
            after = error.headers.get("Retry-After", "")
            pause = float(after) if after.isdigit() else wait
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        failures += 1
        if failures >= ATTEMPTS:
            raise Unreachable(f"cannot reach {url} ({reason})")
        time.sleep(min(pause, LONGEST_WAIT))
        wait *= 2


class Progress(Exception):
    """An attempt failed, but not before it brought something."""


def list_files(repo: str, paths: Iterable[str]) -> list[RemoteFile]:
    """Return size and SHA-256 of files of a dataset repository, in the given order.

    Raises Unreachable: no network; DataError: no such repository or file.
    """
    paths = list(paths)
    url = f"{endpoint()}/api/datasets/{repo}/paths-info/main"
    found: dict[str, RemoteFile] = {}
    for start in range(0, len(paths), LISTED_AT_ONCE):
        form = [("paths", p) for p in paths[start : start + LISTED_AT_ONCE]]
        data = urllib.parse.urlencode([*form, ("expand", "false")]).encode()

        def ask(data: bytes = data) -> bool:
            with _open(url, {}, data) as answer:
                entries = json.load(answer)
            for entry in entries:
                digest = (entry.get("lfs") or {}).get("oid", "")
                path = entry["path"]
                found[path] = RemoteFile(repo, path, int(entry["size"]), digest)
            return True

        _patiently(ask, url)
    if absent := [p for p in paths if p not in found]:
        raise DataError(
            f"{repo} has no file {absent[0]} ({len(absent)} of {len(paths)} absent): "
            "its layout has changed, update littlelm"
        )
    return [found[p] for p in paths]


def sized(file: RemoteFile) -> RemoteFile:
    """Return a file of a plain address with the size that its server tells.

    Raises Unreachable: no network; DataError: the server refuses or tells no size.
    """
    told: list[str | None] = []

    def ask() -> bool:
        with _open(file.url, {}, method="HEAD") as answer:
            told.append(answer.headers.get("Content-Length"))
        return True

    _patiently(ask, file.url)
    if told[-1] is None or not told[-1].isdigit():
        raise Refused(f"{file.url} tells no size of the file: name another address")
    return file._replace(size=int(told[-1]))


# ---- Fetch


def local_path(file: RemoteFile, folder: Path) -> Path:
    """Return where a file lies, or would lie, in a folder of downloads."""
    return folder / file.path


def is_there(file: RemoteFile, folder: Path) -> bool:
    """Whether a file lies in the folder with the size that the server tells."""
    path = local_path(file, folder)
    return path.is_file() and file.size in (-1, path.stat().st_size)


def is_ours(file: RemoteFile, folder: Path) -> bool:
    """Whether `fetch` has brought and checked it; else somebody put it there."""
    return _mark(local_path(file, folder)).is_file()


def remove(file: RemoteFile, folder: Path) -> None:
    """Delete a file that `fetch` brought; leave one that somebody else put there."""
    if is_ours(file, folder):
        path = local_path(file, folder)
        path.unlink(missing_ok=True)
        _mark(path).unlink()


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def fetch(
    file: RemoteFile, folder: Path, advance: Callable[[int], None] = lambda size: None
) -> Path:
    """Bring a file into a folder, from where an earlier call stopped; return its path.

    One that lies there already, with the listed size, is taken after its sum has been
    compared. advance: called with the bytes that came.
    Raises Unreachable: no network, or it went away; DataError: the server refuses,
    or the sum is wrong twice.
    """
    path = local_path(file, folder)
    if is_there(file, folder):
        if is_ours(file, folder) or not file.sha256 or _sha256(path) == file.sha256:
            return path
        raise DataError(
            f"{path} is not the file that {file.repo} lists (its SHA-256 differs): "
            "delete it and run this again"
        )
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    for last in (False, True):
        _patiently(lambda: _fetch_rest(file, partial, advance), file.url)
        digest = _sha256(partial)
        if file.sha256 in ("", digest):
            break
        partial.unlink()
        if last:
            raise DataError(
                f"{file.url} came twice with the SHA-256 {digest[:16]}…, not "
                f"{file.sha256[:16]}…: try again later, or another network"
            )
    _mark(path).write_text(f"{digest}  {path.name}\n", "utf-8")
    partial.replace(path)
    return path


def _fetch_rest(
    file: RemoteFile, partial: Path, advance: Callable[[int], None]
) -> bool:
    """Append what is missing; return whether all is there."""
    before = partial.stat().st_size if partial.is_file() else 0
    if before > file.size:  # of another file
        partial.unlink()
        before = 0
    if before == file.size > 0:
        return True
    headers = {"Range": f"bytes={before}-"} if before else {}
    have = before
    try:
        with _open(file.url, headers) as answer:
            have = before if answer.status == 206 else 0  # 200: from the first byte on
            with partial.open("r+b" if have else "wb", buffering=0) as out:
                out.seek(have)
                # read1 gives what is there: a kill loses little.
                while block := answer.read1(BLOCK):
                    _write(out, block, partial)
                    have += len(block)
                    advance(len(block))
    except (OSError, http.client.HTTPException) as error:
        if have > before:
            raise Progress from error
        raise
    if before < have < file.size:
        raise Progress
    return have == file.size


def _write(out: IO[bytes], block: bytes, path: Path) -> None:
    """Write a block; an error of the disk is none of the network."""
    try:
        out.write(block)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}: make room and run this again, "
            "what has come is kept"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- Room


def check_room(
    needs: Iterable[tuple[Path, int, str]],
    mend: str = "take fewer shards, or folders on a larger disk",
) -> list[str]:
    """Return a line for each disk about the room that is needed; refuse what is small.

    needs: (folder, bytes, what they are); the folders need not exist yet.
    mend: what to do where the room is too small.
    Raises DataError with the numbers of the first disk that is too small.
    """
    disks: dict[int, tuple[Path, int, list[str]]] = {}
    for folder, size, what in needs:
        there = folder.resolve()
        while not there.exists():
            there = there.parent
        at, sum_, parts = disks.get(there.stat().st_dev, (there, 0, []))
        parts = [*parts, f"{size / 1e9:,.2f} GB of {what}"]
        disks[there.stat().st_dev] = at, sum_ + size, parts
    lines = []
    for at, size, parts in disks.values():
        free, what = shutil.disk_usage(at).free, " and ".join(parts)
        if size > free:
            raise DataError(
                f"{what} need {size / 1e9:,.2f} GB and the disk of {at} has "
                f"{free / 1e9:,.2f} GB free: {mend}"
            )
        lines.append(f"{what}; {free / 1e9:,.2f} GB are free at {at}")
    return lines
