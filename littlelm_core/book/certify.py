"""Run every gate over the book and say what is wrong, chapter by chapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from littlelm_core.book import anatomy, gates
from littlelm_core.book.chapter import (
    BookError,
    chapter_paths,
    find_root,
    module_orders,
    read_chapter,
    select,
)
from littlelm_core.book.isolate import run_alone
from littlelm_core.book.page import Page, Problem

GATES = (*gates.GATES, *anatomy.GATES)


def check(
    chapters: Iterable[str] = (),
    fast: bool = False,
    root: Path | None = None,
    echo: Callable[[str], Any] = print,
) -> None:
    """Run every gate over the named chapters (all by default).

    `fast` leaves out the runs with only the earlier modules present. Every problem is
    shown through `echo`, with chapter, section and cell; BookError is raised if there
    was one.
    """
    root = find_root(root)
    everything = chapter_paths(root)
    if not everything:
        raise BookError(f"no chapters/NN_name.md in {root}")
    problems = list(book_problems(root))
    pages = []
    for path in select(everything, chapters):
        try:
            pages.append(Page(read_chapter(path), root))
        except BookError as error:
            problems.append(_of_error(error))
    for page in pages:
        found = list(page_problems(page))
        found += [] if fast else alone(page)
        problems += found
        state = f"{len(found)} problems" if found else "ok"
        echo(f"{page.chapter.path.stem}: {state}")
    for problem in problems:
        echo(f"  {problem}")
    if problems:
        raise BookError(f"the book has {len(problems)} problems, listed above")


def page_problems(page: Page) -> Iterator[Problem]:
    """What the gates find in one chapter; a gate that can't read it says so."""
    for gate in GATES:
        try:
            yield from gate(page)
        except BookError as error:
            yield _of_error(error)


def alone(page: Page) -> Iterator[Problem]:
    """Run the chapter with only the earlier modules present."""
    if (failed := run_alone(page.chapter, page.root)) is not None:
        number, why = failed
        cell = next((c for c in page.chapter.code_cells if c.number == number), None)
        yield page.problem(cell, why)


def _of_error(error: BookError) -> Problem:
    where, _, message = str(error).partition(": ")
    return Problem(where, message)


def book_problems(root: Path) -> Iterator[Problem]:
    """What can be wrong between chapters: modules, figure names, table of contents."""
    paths = chapter_paths(root)
    for module, owners in module_orders(paths).items():
        if len(owners) > 1:
            names = " and ".join(path.stem for path in owners)
            yield Problem("chapters", f"{names} both write the module {module}")
    numbers: dict[str, str] = {}
    figures: dict[str, str] = {}
    for path in paths:
        if (first := numbers.setdefault(path.stem[:2], path.stem)) != path.stem:
            yield Problem("chapters", f"{first} and {path.stem} have one number")
        try:
            page = Page(read_chapter(path), root)
        except BookError:
            continue  # reported with the chapter
        for cell, figure in page.figures:
            owner = figures.setdefault(figure.name, path.stem)
            if figure.name and owner != path.stem:
                yield page.problem(cell, f"{owner} has a figure {figure.name} too")
    yield from unsorted(root)
    listed = contents(root)
    for path in paths:
        if f"chapters/{path.stem}" not in listed:
            yield Problem("_toc.yml", f"does not list chapters/{path.stem}")
    for name in listed:
        if not any((root / f"{name}{end}").exists() for end in (".md", ".ipynb")):
            yield Problem("_toc.yml", f"lists {name}, which is not there")


def unsorted(root: Path) -> Iterator[Problem]:
    """Glossary and bibliography are kept in order, so that nothing is added twice."""
    terms = anatomy.glossary_terms(anatomy.text_of(root / "chapters" / "glossary.md"))
    keys = anatomy.citation_keys(anatomy.text_of(root / "chapters" / "references.bib"))
    lists = {"glossary.md": [t.lower() for t in terms], "references.bib": keys}
    for name, entries in lists.items():
        for before, after in itertools.pairwise(entries):
            if after == before:
                yield Problem(f"chapters/{name}", f"{after!r} stands there twice")
            elif after < before:
                yield Problem(f"chapters/{name}", f"{after!r} belongs above {before!r}")


def contents(root: Path) -> list[str]:
    """The files that _toc.yml names in their order, the site's first page first."""
    path = root / "_toc.yml"
    if not path.exists():
        raise BookError(f"no {path}: the site needs its table of contents")
    table = yaml.safe_load(path.read_text(encoding="utf-8"))

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "file":
                    yield str(value)
                else:
                    yield from walk(value)
        elif isinstance(node, list):
            for item in node:
                yield from walk(item)

    return [str(table["root"]), *walk(table)]
