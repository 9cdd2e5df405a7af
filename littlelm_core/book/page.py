"""One chapter beside its executed notebook, as the gates look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from littlelm_core.book.chapter import Cell, Chapter
from littlelm_core.book.prose import Figure, directives, figure_of


@dataclass(frozen=True)
class Problem:
    """One broken rule: where it is broken, and what to do about it."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Page:
    """A chapter with what the gates need to know of it."""

    chapter: Chapter
    root: Path

    def problem(self, cell: Cell | None, message: str) -> Problem:
        return Problem(self.chapter.where(cell), message)

    @property
    def rerun(self) -> str:
        return f"run littlelm book execute {self.chapter.path.stem[:2]}"

    @cached_property
    def notebook(self) -> Any | None:
        """The executed notebook, None when it is missing or can't be read."""
        import nbformat

        try:
            return nbformat.read(self.chapter.notebook, as_version=4)
        except (OSError, ValueError, AttributeError):
            return None

    def outputs(self) -> Iterator[tuple[Cell, Any]]:
        """(cell of the chapter, cell of the notebook), as far as the two agree."""
        if self.notebook is not None:
            pairs = zip(self.chapter.cells, self.notebook.cells, strict=False)
            yield from ((c, n) for c, n in pairs if n.cell_type == c.kind == "code")

    @cached_property
    def figures(self) -> list[tuple[Cell, Figure]]:
        """Every figure: computed by a cell, or drawn and named by a directive."""
        found = []
        for cell in self.chapter.cells:
            if cell.kind == "markdown":
                for directive in directives(cell.source, ("figure",)):
                    found.append((cell, Figure.drawn(directive)))
        for cell, node in self.outputs():
            if images(node):
                found.append((cell, figure_of(cell.metadata)))
        return sorted(found, key=lambda pair: pair[0].index)


def images(node: Any) -> list[Any]:
    """The outputs of a notebook cell that are pictures."""
    return [
        output
        for output in node.get("outputs", [])
        if any(kind.startswith("image/") for kind in output.get("data", {}))
    ]
