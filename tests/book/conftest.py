"""A small book, exported and executed once; every test damages a copy of its own."""

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import sample  # noqa: E402

from littlelm_core import book as machinery  # noqa: E402
from littlelm_core.book.certify import page_problems  # noqa: E402
from littlelm_core.book.chapter import read_chapter  # noqa: E402
from littlelm_core.book.page import Page  # noqa: E402


def silent(_: str) -> None:
    """An echo that says nothing."""


class Book:
    """A small book in a folder, with the handles that the tests need."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.first = root / "chapters" / "00_doubling.md"
        self.second = root / "chapters" / "01_twice.md"

    def change(self, path: Path, old: str, new: str) -> None:
        """Replace a text that must be there, once."""
        text = path.read_text(encoding="utf-8")
        assert old in text, f"the sample has no {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def add_cell(self, source: str, path: Path | None = None) -> None:
        """Put a code cell at the end of "What it costs"."""
        self.change(
            path or self.second, "## Exercises", sample.cell(source) + "## Exercises"
        )

    def problems(self, path: Path) -> list[str]:
        """What the gates find in one chapter."""
        return [str(p) for p in page_problems(Page(read_chapter(path), self.root))]


@pytest.fixture(scope="session")
def executed_book(tmp_path_factory):
    """The small book as its authors leave it: exported and executed."""
    root = tmp_path_factory.mktemp("book")
    style = HERE.parent.parent / "chapters" / "course.mplstyle"
    sample.write_book(root, style)
    machinery.export(root=root, echo=silent)
    machinery.execute(root=root, echo=silent)
    return root


@pytest.fixture
def book(executed_book, tmp_path):
    """A copy of the small book."""
    root = tmp_path / "book"
    shutil.copytree(executed_book, root)
    return Book(root)
