"""Make the site from the executed notebooks, and see that it needs no other host.

Nothing runs here: the pages show the very outputs that `execute` wrote and nbval
certified. Every warning is an error, and each page is searched for what a browser would
fetch from elsewhere.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from littlelm_core.book.certify import contents
from littlelm_core.book.chapter import BookError, chapter_paths, find_root, lacks

# What a browser fetches when it opens a page; a link that one clicks is not fetched.
FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "input": ("src",),
}
# <link> fetches by its rel; these only name a place.
_NAMED = {"canonical", "next", "prev", "search", "author", "license", "index", "top"}
_ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", re.I)
_CSS = re.compile(r"""(?:@import\s+["']|url\(\s*["']?)\s*((?:https?:)?//[^"')\s]+)""")
_IN_NOTEBOOK = re.compile(r"(\.ipynb):(\d{5,}):")
_IN_SCRIPT = re.compile(r"""["'](https?://[^"'\s]+\.m?js)["']""")


def build(root: Path | None = None, echo: Callable[[str], Any] = print) -> Path:
    """Build the site; return the path of its first page.

    Raises BookError where jupyter-book is not installed, for a chapter without its
    notebook, for any warning of the build, and for a page that would load something
    from another host.
    """
    root = find_root(root)
    if importlib.util.find_spec("jupyter_book") is None:
        raise lacks("jupyter-book")
    for name in contents(root):
        if not any((root / f"{name}{end}").exists() for end in (".md", ".ipynb")):
            raise BookError(f"_toc.yml lists {name}, which is not there")
    for path in chapter_paths(root):
        if not path.with_suffix(".ipynb").exists():
            raise BookError(
                f"chapters/{path.name} has no executed notebook; run littlelm book "
                f"execute {path.stem[:2]}"
            )
    site = root / "_build"
    shutil.rmtree(site, ignore_errors=True)  # a half-old build can hide a failure
    start = time.perf_counter()
    program = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", program, "build", str(root)]
    options = ["-n", "-W", "--keep-going", "--all", "--quiet"]
    done = subprocess.run(
        [*command, *options], capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        echo(complaints(done.stdout + "\n" + done.stderr))
        raise BookError(
            "the site does not build without a warning; what is wrong stands above"
        )
    html = site / "html"
    pages = sorted(html.rglob("*.html"))
    foreign = list(foreign_loads(html))
    for line in foreign:
        echo(f"  {line}")
    if foreign:
        raise BookError(
            f"{len(foreign)} places of the site load something from another host"
        )
    first = html / f"{contents(root)[0]}.html"
    if not first.exists():
        raise BookError(f"the build made no {first}")
    seconds = time.perf_counter() - start
    echo(f"{len(pages)} pages in {seconds:.1f} s: {first.relative_to(root)}")
    return first


def complaints(log: str) -> str:
    """The lines of a build's log that say what is wrong, or its end."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    found = [x for x in lines if re.search(r"WARNING|ERROR|CRITICAL|Error:", x)]
    found = [_IN_NOTEBOOK.sub(_cell_and_line, line) for line in found]
    return "\n".join(found or lines[-15:])


def _cell_and_line(match: re.Match[str]) -> str:
    """myst-nb counts 10,000 lines for each cell of a notebook."""
    cell, line = divmod(int(match[2]), 10_000)
    return f"{match[1]}, cell {cell} of all, line {line}:"


class _Fetches(HTMLParser):
    """Collect what a page makes a browser fetch from another host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._inside = tag if tag in ("script", "style") else ""
        urls = [values.get(name, "") for name in FETCHED.get(tag, ())]
        if tag == "link" and not set(values.get("rel", "").split()) <= _NAMED:
            urls.append(values.get("href", ""))
        self.found += [url for url in urls if _ELSEWHERE.match(url)]
        self.found += _CSS.findall(values.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.found += _CSS.findall(data)
        elif self._inside == "script":
            self.found += _IN_SCRIPT.findall(data)


def foreign_loads(html: Path) -> Iterator[str]:
    """ "page: address" for everything that the site would fetch from another host."""
    for path in sorted(html.rglob("*.html")):
        parser = _Fetches()
        parser.feed(path.read_text(encoding="utf-8"))
        for url in parser.found:
            yield f"{path.relative_to(html)}: {url}"
    for path in sorted(html.rglob("*.css")):
        for url in _CSS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(html)}: {url}"
