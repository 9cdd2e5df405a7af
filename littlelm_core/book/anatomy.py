"""The gates on how a chapter is built: its spine, figures, exercises and contract.

They read the text and, for figures, which cells of the notebook drew one. A chapter
whose sections stand in a fixed order and whose exercises all have a grader can be read,
and relied on, like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from littlelm_core.book.chapter import PACKAGE, Cell
from littlelm_core.book.page import Page, Problem, images
from littlelm_core.book.prose import (
    directives,
    glossary_terms,
    prose,
    references,
    roles,
    words,
)

SPINE = (  # (section, must every chapter have it)
    ("What you will build", True),
    ("What you need", True),
    ("The idea", True),
    ("Build it", True),
    ("Check it", True),
    ("At scale", False),
    ("What it costs", True),
    ("When it does not help", False),
    ("Exercises", True),
    ("What moved into the core", True),
    ("Next", True),
)
MAX_WORDS = 3_500
FIGURES = (3, 6)
EXERCISES = (4, 6)

_INTRO = re.compile(
    r"^Prerequisites: .+ · about \d+ minutes · runs in about \d+ s\b", re.MULTILINE
)
_FIGURE_NAME = re.compile(r"fig-[a-z0-9]+(-[a-z0-9]+)*")
_EXERCISE = re.compile(r"(\d+)\.(\d+) \S")


def spine(page: Page) -> Iterator[Problem]:
    """One title, the line about time, and the sections of the spine in their order."""
    found = page.chapter.sections
    titles = [section for section in found if section.level == 1]
    if len(titles) != 1 or found[0] is not titles[0]:
        yield page.problem(None, "begins with one `# Title`, and has no other")
    first = next((c for c in page.chapter.cells if c.kind == "markdown"), None)
    if first is None or not _INTRO.search(first.source):
        yield page.problem(
            first,
            "below the title stands one line: Prerequisites: ... · about NN minutes · "
            "runs in about NN s",
        )
    names = [name for name, _ in SPINE]
    sections = [(s.title, s.cell) for s in found if s.level == 2]
    place = -1
    for title, cell in sections:
        if title not in names:
            yield page.problem(cell, f'"{title}" is no section of the spine; use ###')
        elif names.index(title) <= place:
            yield page.problem(cell, f'"{title}" stands below "{names[place]}"')
        else:
            place = names.index(title)
    have = {title for title, _ in sections}
    for name, needed in SPINE:
        if needed and name not in have:
            yield page.problem(None, f'the section "{name}" is missing')


def length(page: Page) -> Iterator[Problem]:
    """Prose that can be read in an evening."""
    count = sum(words(c.source) for c in page.chapter.cells if c.kind == "markdown")
    if count > MAX_WORDS:
        yield page.problem(
            None, f"{count:,} words of prose; the limit is {MAX_WORDS:,}"
        )


def figures(page: Page) -> Iterator[Problem]:
    """Each figure has a name, a caption and alt text, and the text speaks of it."""
    mentioned = {
        name
        for cell in page.chapter.cells
        if cell.kind == "markdown"
        for name in references(cell.source)
    }
    for cell in page.chapter.cells:
        if cell.kind == "markdown":
            for found in directives(cell.source, ("image",)):
                yield page.problem(cell, f"{found.argument}: use {{figure}}")
            if re.search(r"!\[[^\]]*\]\(|<img\b", prose(cell.source)):
                yield page.problem(cell, "a bare image; use the {figure} directive")
    for cell, node in page.outputs():
        if len(images(node)) > 1:
            yield page.problem(cell, "two pictures under one caption; use two cells")
    for cell, figure in page.figures:
        if not _FIGURE_NAME.fullmatch(figure.name):
            yield page.problem(
                cell, f"a figure's name is like fig-attention-mask, not {figure.name!r}"
            )
        elif figure.name not in mentioned:
            yield page.problem(
                cell, f"the text never speaks of {{numref}}`{figure.name}`"
            )
        if not figure.caption:
            yield page.problem(cell, "a figure without a caption")
        if not figure.alt:
            yield page.problem(cell, "a figure without alt text")
        if figure.file and not (page.chapter.path.parent / figure.file).exists():
            yield page.problem(cell, f"no file {figure.file}")
    if page.notebook is None:
        return
    count, computed = len(page.figures), sum(not f.file for _, f in page.figures)
    low, high = FIGURES
    if not low <= count <= high:
        yield page.problem(None, f"{count} figures; a chapter has {low} to {high}")
    if 2 * computed < count:
        yield page.problem(None, f"only {computed} of {count} figures are computed")


def sources(page: Page) -> Iterator[Problem]:
    """Every term stands in the glossary, every citation in the bibliography."""
    chapters = page.root / "chapters"
    terms = {term.lower() for term in glossary_terms(text_of(chapters / "glossary.md"))}
    keys = citation_keys(text_of(chapters / "references.bib"))
    for cell in page.chapter.cells:
        if cell.kind != "markdown":
            continue
        for term in roles(cell.source, ("term",)):
            if term.lower() not in terms:
                yield page.problem(cell, f"{term!r} is not in chapters/glossary.md")
        for cited in roles(cell.source, ("cite", "cite:p", "cite:t")):
            for key in cited.split(","):
                if key.strip() not in keys:
                    yield page.problem(
                        cell, f"{key.strip()!r} is not in chapters/references.bib"
                    )


def exercises(page: Page) -> Iterator[Problem]:
    """Each exercise: a stub, its check, a folded solution with the check, a grader."""
    order = page.chapter.order
    titles = [
        (section.title, section.cell)
        for section in page.chapter.sections
        if section.top == "Exercises" and section.level == 3
    ]
    low, high = EXERCISES
    if not low <= len(titles) <= high:
        yield page.problem(
            None, f"{len(titles)} exercises; a chapter has {low} to {high}"
        )
    graders = _graders(page.root / "tests" / "exercises" / f"chapter_{order:02d}.py")
    for number, (title, cell) in enumerate(titles, 1):
        match = _EXERCISE.match(title)
        if not match or (int(match[1]), int(match[2])) != (order, number):
            yield page.problem(cell, f'"{title}" should be "{order}.{number} ..."')
            continue
        key, name = f"{order}.{number}", f"ex_{order}_{number}"
        inside = [
            c
            for c in page.chapter.code_cells
            if c.top_section == "Exercises" and c.section == title
        ]
        defined = [c for c in inside if re.search(rf"(def|class) {name}\b", c.code)]
        asked = [
            c for c in inside if re.search(rf"check\(.{re.escape(key)}.\)", c.code)
        ]
        solution = defined[-1] if len(defined) > 1 else None
        if not defined or "NotImplementedError" not in defined[0].code:
            yield page.problem(cell, f"no stub cell: {name} raises NotImplementedError")
        elif not any(_between(c, defined) for c in asked):
            yield page.problem(cell, f'no check("{key}") in or below the stub')
        if solution is None or "NotImplementedError" in solution.code:
            yield page.problem(cell, f"no solution: a later cell that defines {name}")
        elif "hide-cell" not in solution.tags:
            yield page.problem(solution, "a solution is folded: tag it hide-cell")
        elif not any(c.index >= solution.index for c in asked):
            yield page.problem(solution, f'the solution is not run by check("{key}")')
        if f"exercise_{order}_{number}" not in graders:
            yield page.problem(
                cell,
                f"no grader exercise_{order}_{number} in "
                f"tests/exercises/chapter_{order:02d}.py",
            )


def _between(cell: Cell, defined: list[Cell]) -> bool:
    """Whether a cell stands at or below the stub and above the solution."""
    return defined[0].index <= cell.index and cell not in defined[1:]


def _graders(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def contract(page: Page) -> Iterator[Problem]:
    """ "Check it" runs the contract, and what moved into the core is told in full."""
    own = [c for c in page.chapter.code_cells if c.top_section == "Check it"]
    if not any(re.search(r"^\s*check\(", c.code, re.MULTILINE) for c in own):
        yield page.problem(None, 'no cell of "Check it" calls check("part", Part)')
    moved = page.chapter.text_of("What moved into the core")
    target = page.root / PACKAGE / f"{page.chapter.module}.py"
    public = re.search(
        r"^__all__ = (\[.*?\])", text_of(target), re.DOTALL | re.MULTILINE
    )
    for name in ast.literal_eval(public[1]) if public else ():
        if not re.search(rf"`[^`]*\b{name}\b[^`]*`", moved):
            yield page.problem(
                None, f'"What moved into the core" does not name `{name}`'
            )


def citation_keys(text: str) -> list[str]:
    """The keys of a bibliography, in its order."""
    return re.findall(r"^@\w+\{([^,\s]+)", text, re.MULTILINE)


def text_of(path: Path) -> str:
    """The text of a file, empty without one."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


GATES = (spine, length, figures, sources, exercises, contract)
