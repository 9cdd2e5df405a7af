"""Read the chapters: their cells, sections and `#|` directives, and say where we are.

A chapter is `chapters/NN_name.md` (MyST notebook text, read through jupytext).
Everything else in this package works on the `Chapter` objects made here, so that every
complaint names the same things: the file, the section and the number of the code cell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from littlelm_core.config import LittleLMError, nearest

PACKAGE = "littlelm_core"
# Written by hand, and what a chapter may import besides earlier chapters' modules.
HAND_WRITTEN = ("check", "corpus", "ingest", "report")
FORMAT = "md:myst"

_DIRECTIVE = re.compile(r"^#\s*\|\s*(\S+)\s*(.*?)\s*$")
_MAGIC = re.compile(r"^\s*[%!]{1,2}[A-Za-z_]")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
_ROLE = re.compile(r"\{[\w:-]+\}`([^`<]*?)(?:\s*<[^`]*>)?`")
_FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})")


class BookError(LittleLMError):
    """A chapter that breaks a rule of the book: names chapter, section and cell."""


def lacks(package: str) -> BookError:
    """The error of a package of the book's extra that is not installed."""
    return BookError(
        f"{package} is missing: the book needs its extra, pip install -e '.[book]'"
    )


@dataclass(frozen=True)
class Cell:
    """One cell of a chapter. `number` counts code cells from 1, as `In [n]` does."""

    kind: str  # "code" | "markdown" | "raw"
    source: str
    metadata: dict[str, Any]
    index: int  # among all cells, from 0
    number: int | None  # among code cells, from 1
    section: str  # the last heading above, of any level from 2
    top_section: str  # the last `##` heading above

    @cached_property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.metadata.get("tags", ()))

    @cached_property
    def directives(self) -> dict[str, str]:
        """The `#| word rest` lines at the head of a code cell."""
        found: dict[str, str] = {}
        for line in self.source.splitlines() if self.kind == "code" else ():
            if not (match := _DIRECTIVE.match(line)):
                break
            found[match[1]] = match[2]
        return found

    @property
    def exported(self) -> bool:
        return "export" in self.directives

    @cached_property
    def code(self) -> str:
        """The source without its `#|` lines; blank lines keep the line numbers."""
        lines = self.source.splitlines()
        return "\n".join("" if _DIRECTIVE.match(line) else line for line in lines)

    @property
    def plain_code(self) -> str:
        """The code without IPython's own lines (`%config`, `!ls`)."""
        lines = self.code.splitlines()
        return "\n".join("" if _MAGIC.match(line) else line for line in lines)


@dataclass(frozen=True)
class Section:
    """A heading, the `##` section it belongs to, its cell and the lines below it."""

    level: int
    title: str
    top: str
    cell: Cell
    text: list[str]


@dataclass(frozen=True)
class Chapter:
    """A chapter as it was read; `order` is its number NN, `module` its default_exp."""

    path: Path
    cells: tuple[Cell, ...]
    metadata: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def order(self) -> int:
        return int(self.path.stem[:2])

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def notebook(self) -> Path:
        return self.path.with_suffix(".ipynb")

    @property
    def code_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def module(self) -> str:
        """The module this chapter writes. Raises BookError unless it is named once."""
        named = [c for c in self.code_cells if "default_exp" in c.directives]
        if not named:
            raise BookError(
                f"{self.name}: no cell says `#| default_exp module`; "
                "make it the chapter's first code cell"
            )
        if len(named) > 1:
            raise self.error(
                named[1],
                "a second `#| default_exp`; code cell "
                f"{named[0].number} already names the chapter's one module",
            )
        module = named[0].directives["default_exp"]
        if not module.isidentifier():
            raise self.error(named[0], f"{module!r} can't be the name of a module")
        return module

    @cached_property
    def sections(self) -> list[Section]:
        """Every heading with the text below it, up to the next heading."""
        found: list[Section] = []
        top = ""
        for cell in self.cells:
            if cell.kind != "markdown":
                continue
            lines = cell.source.splitlines()
            marks = headings(cell.source)
            ends = [line for _, _, line in marks[1:]] + [len(lines)]
            if found and lines:  # text above a cell's first heading goes on
                first = marks[0][2] if marks else len(lines)
                found[-1].text.extend(lines[:first])
            for (level, title, line), end in zip(marks, ends, strict=False):
                top = title if level == 2 else top
                found.append(Section(level, title, top, cell, lines[line + 1 : end]))
        return found

    def text_of(self, top: str) -> str:
        """All text below one `##` heading, its `###` sections included."""
        inside = (s for s in self.sections if s.top == top and s.level >= 2)
        return "\n".join(line for s in inside for line in s.text)

    def error(self, cell: Cell | None, message: str) -> BookError:
        return BookError(f"{self.where(cell)}: {message}")

    def where(self, cell: Cell | None) -> str:
        """'chapters/02_attention.md, section "Build it", code cell 7'."""
        parts = [self.name]
        if cell is not None:
            parts += [f'section "{cell.section}"'] if cell.section else []
            number = f"code cell {cell.number}" if cell.number else None
            parts.append(number or f"text cell {cell.index + 1}")
        return ", ".join(parts)


def headings(text: str) -> list[tuple[int, str, int]]:
    """The (level, title, line) of each heading of some MyST, outside of fences."""
    found, fence = [], ""
    for number, line in enumerate(text.splitlines()):
        if match := _FENCE.match(line):
            mark = match[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
        elif not fence and (match := _HEADING.match(line)):
            found.append((len(match[1]), plain(match[2]), number))
    return found


def plain(heading: str) -> str:
    """A heading without MyST roles and emphasis marks, on one line."""
    return " ".join(re.sub(r"[`*]", "", _ROLE.sub(r"\1", heading)).split())


def read_chapter(path: str | Path) -> Chapter:
    """Read a chapter's .md. Raises BookError when it can't be read."""
    try:
        import jupytext
    except ImportError as error:  # pragma: no cover - the extra is installed in tests
        raise lacks("jupytext") from error
    path = Path(path)
    try:
        notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMAT)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BookError(f"{path}: can't be read as a MyST notebook: {first}") from error
    return from_notebook(path, notebook)


def from_notebook(path: Path, notebook: Any) -> Chapter:
    """Make a Chapter of a notebook node (of the .md, or of its executed pair)."""
    cells, number, section, top = [], 0, "", ""
    for index, node in enumerate(notebook.cells):
        if node.cell_type == "markdown":
            for level, title, _ in headings(node.source):
                if level == 2:
                    section = top = title
                elif level > 2:
                    section = title
        number += node.cell_type == "code"
        cells.append(
            Cell(
                node.cell_type,
                node.source,
                dict(node.metadata),
                index,
                number if node.cell_type == "code" else None,
                section,
                top,
            )
        )
    chapter = Chapter(path, tuple(cells), dict(notebook.metadata))
    check_directives(chapter)
    return chapter


def check_directives(chapter: Chapter) -> None:
    """A misspelled or misplaced `#|` line would silently export nothing: refuse it."""
    for cell in chapter.code_cells:
        seen = list(cell.directives)
        for word in seen:
            if word not in ("export", "default_exp"):
                hint = nearest(word, ("export", "default_exp"))
                raise chapter.error(cell, f"unknown directive `#| {word}`{hint}")
        count = sum(bool(_DIRECTIVE.match(x)) for x in cell.source.splitlines())
        if count > len(seen):
            raise chapter.error(
                cell, "a `#|` line below the cell's first lines; move it to the top"
            )


def find_root(start: Path | None = None) -> Path:
    """The clone's root: the folder that holds chapters/ and the package.

    Raises BookError when the package runs from elsewhere than its clone.
    """
    root = start or Path(sys.modules[PACKAGE].__file__ or ".").resolve().parent.parent
    if not (root / "chapters").is_dir():
        raise BookError(
            f"no chapters/ in {root}: the book works from a clone of the course "
            "(git clone, then pip install -e '.[book]')"
        )
    return root


def chapter_paths(root: Path) -> list[Path]:
    """Every chapters/NN_name.md, in reading order."""
    return sorted((root / "chapters").glob("[0-9][0-9]_*.md"))


def select(paths: list[Path], wanted: Iterable[str] = ()) -> list[Path]:
    """Pick chapters by "02", "2", "attention", "02_attention" or path; all by default.

    Raises BookError for a name that fits no chapter.
    """
    chosen = []
    for word in wanted:
        stem = Path(str(word)).name.removesuffix(".ipynb").removesuffix(".md")
        number = f"{int(stem):02d}" if stem.isdigit() else None
        hits = [
            p for p in paths if stem in (p.stem, p.stem[3:]) or number == p.stem[:2]
        ]
        if not hits:
            hint = nearest(stem, [p.stem for p in paths])
            raise BookError(f"no chapter {word!r}{hint}")
        chosen += [hit for hit in hits if hit not in chosen]
    return sorted(chosen) if chosen else paths


def module_orders(paths: list[Path]) -> dict[str, list[Path]]:
    """Which chapters claim which module; unreadable chapters are left out."""
    owners: dict[str, list[Path]] = {}
    for path in paths:
        try:
            module = read_chapter(path).module
        except BookError:
            continue  # reported when that chapter itself is exported or checked
        owners.setdefault(module, []).append(path)
    return owners
