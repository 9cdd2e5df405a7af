"""The gates on a chapter's files: paired, executed, portable, small, exported.

Every gate takes a `Page` and yields problems, each with chapter, section and cell. None
of them runs a chapter: that is `isolate.py`. A gate is here because its defect has been
seen: nbval passes a notebook that was never executed, and a stale module looks fine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from littlelm_core.book.chapter import (
    PACKAGE,
    BookError,
    chapter_paths,
    module_orders,
)
from littlelm_core.book.execute import machine_paths, source_notebook, stderr_of
from littlelm_core.book.export import module_text
from littlelm_core.book.imports import check_imports
from littlelm_core.book.page import Page, Problem

MAX_BYTES = 500_000
# A person's folder or a scratch file, whichever machine it was written on.
_PERSONAL = re.compile(
    r"/(?:home|Users)/[\w.-]+|/root/|[A-Z]:\\Users\\|/tmp/\w+|/var/folders/"
    r"|(?:site|dist)-packages/"
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_FOREIGN = re.compile(
    r"""<script|<iframe|(?:src|@import|url\()\s*=?\s*["'(]?\s*(?:https?:)?//""", re.I
)


def pair(page: Page) -> Iterator[Problem]:
    """The .md and its .ipynb hold the same cells, with the ids that execute gives."""
    chapter, notebook = page.chapter, page.notebook
    if notebook is None:
        name = chapter.notebook.name
        yield page.problem(None, f"no readable {name} beside it; {page.rerun}")
        return
    wanted = source_notebook(chapter).cells
    if len(wanted) != len(notebook.cells):
        yield page.problem(
            None,
            f"the .md has {len(wanted)} cells and the .ipynb {len(notebook.cells)}; "
            f"{page.rerun}",
        )
    for cell, want, have in zip(chapter.cells, wanted, notebook.cells, strict=False):
        for what in ("cell_type", "source", "metadata", "id"):
            if want[what] != have.get(what):
                yield page.problem(
                    cell, f"its {what} differs between .md and .ipynb; {page.rerun}"
                )
                return  # the cells below a difference differ as well


def executed(page: Page) -> Iterator[Problem]:
    """Every code cell ran, in order, from a fresh start, without a word on stderr."""
    for count, (cell, node) in enumerate(page.outputs(), 1):
        if node.execution_count != count:
            how = node.execution_count or "no number"
            yield page.problem(
                cell, f"not executed in order ({how}, not {count}); {page.rerun}"
            )
        for output in node.outputs:
            if output.output_type == "error":
                yield page.problem(cell, f"its output is an error: {output.ename}")
        for text in stderr_of(node):
            first = text.splitlines()[0] if text else ""
            yield page.problem(
                cell, f"writes to stderr: {first[:80]} (mend or filter what warns)"
            )


def portable(page: Page) -> Iterator[Problem]:
    """Nothing of this machine in the text, nothing from another host in a page."""
    folders = [folder for folder, _ in machine_paths(page.root)]
    for cell in page.chapter.cells:
        for folder in folders:
            if folder + "/" in cell.source:
                yield page.problem(cell, f"names a folder of one machine: {folder}")
    for cell, node in page.outputs():
        for output in node.outputs:
            data = dict(output.get("data", {}))
            text = output.get("text", "") + "".join(
                value for kind, value in data.items() if kind.startswith("text/")
            )
            found = [f for f in folders if f in text] or _PERSONAL.findall(text)
            if found:
                yield page.problem(cell, f"prints a machine's path: {found[0]}")
            if match := _ADDRESS.search(text):
                yield page.problem(
                    cell, f"prints an address, other in each run: {match[0]}"
                )
            if match := _FOREIGN.search(data.get("text/html", "")):
                yield page.problem(
                    cell, f"its HTML loads or runs something: {match[0]}"
                )
            if any("widget" in kind or "javascript" in kind for kind in data):
                yield page.problem(cell, "a widget or script; use plain text or SVG")


def size(page: Page) -> Iterator[Problem]:
    """A notebook that opens quickly and reviews well."""
    path = page.chapter.notebook
    count = path.stat().st_size if path.exists() else 0
    if count >= MAX_BYTES:
        heavy = max(page.outputs(), key=lambda p: len(json.dumps(p[1].outputs)))
        kilobytes = len(json.dumps(heavy[1].outputs)) // 1000
        yield page.problem(
            heavy[0],
            f"{path.name} has {count:,} bytes, the limit is {MAX_BYTES:,}; this cell's "
            f"output is the largest ({kilobytes} kB)",
        )


def fresh(page: Page) -> Iterator[Problem]:
    """The package's module is what the chapter exports now; imports look back only."""
    try:
        text = module_text(page.chapter, page.root)
        target = page.root / PACKAGE / f"{page.chapter.module}.py"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            yield page.problem(
                None,
                f"{PACKAGE}/{target.name} differs from what the chapter exports; "
                f"run littlelm book export {page.chapter.path.stem[:2]}",
            )
    except BookError as error:
        where, _, message = str(error).partition(": ")
        yield Problem(where, message)
        return
    owners = module_orders(chapter_paths(page.root))
    orders = {module: int(where[0].stem[:2]) for module, where in owners.items()}
    for cell in page.chapter.code_cells:
        try:
            check_imports(page.chapter, cell, orders, page.root)
        except BookError as error:
            yield page.problem(cell, str(error).partition(": ")[2])


GATES = (pair, executed, portable, size, fresh)
