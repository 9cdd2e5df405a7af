"""Each gate finds the defect that it is there for, and names where it is."""

import re

import nbformat
import pytest
import sample

from littlelm_core.book import BookError, check, execute
from littlelm_core.book.certify import alone, book_problems
from littlelm_core.book.chapter import read_chapter
from littlelm_core.book.page import Page
from littlelm_core.book.prose import words


def silent(_):
    """An echo that says nothing."""


def change_notebook(path, change):
    """Edit the executed notebook of a chapter."""
    notebook_path = path.with_suffix(".ipynb")
    notebook = nbformat.read(notebook_path, as_version=4)
    change(notebook)
    nbformat.write(notebook, notebook_path)


def code(notebook, number):
    return [cell for cell in notebook.cells if cell.cell_type == "code"][number - 1]


def found(book, words, path=None):
    """The one problem with these words; fails when there is none."""
    problems = book.problems(path or book.second)
    hits = [p for p in problems if words in p]
    assert hits, problems
    return hits[0]


def test_the_small_book_passes_every_gate(book):
    said = []
    check(root=book.root, echo=said.append)
    assert said == ["00_doubling: ok", "01_twice: ok"]


def test_check_shows_every_problem_and_fails_in_one_line(book):
    book.change(book.second, "## Next", "## Nixt")
    said = []
    with pytest.raises(BookError, match=r"^the book has \d problems, listed above$"):
        check(["01"], fast=True, root=book.root, echo=said.append)
    assert any('"Nixt" is no section of the spine' in line for line in said)
    assert any('the section "Next" is missing' in line for line in said)


# ---- The pair


def test_a_source_edited_after_execution(book):
    book.change(book.second, "assert value == 4", "assert value == 4.0")
    assert "code cell 6: its source differs" in found(book, "differs between")


def test_a_text_edited_after_execution(book):
    book.change(book.second, "Arithmetic.", "Algebra.")
    assert "text cell" in found(book, "its source differs between .md and .ipynb")


def test_a_tag_edited_after_execution(book):
    book.change(book.second, ":tags: [hide-input]", ":tags: [hide-cell]")
    found(book, "its metadata differs between .md and .ipynb")


def test_a_cell_added_after_execution(book):
    book.add_cell("x = 1")
    found(book, "cells and the .ipynb")


def test_an_id_that_execute_did_not_make(book):
    change_notebook(book.second, lambda n: n.cells[3].update(id="random-1"))
    found(book, "its id differs between .md and .ipynb; run littlelm book execute 01")


def test_a_missing_and_an_unreadable_notebook(book):
    path = book.second.with_suffix(".ipynb")
    path.write_text("{not json")
    found(book, "no readable 01_twice.ipynb beside it; run littlelm book execute 01")
    path.unlink()
    found(book, "no readable 01_twice.ipynb beside it")


# ---- Executed


def test_a_notebook_that_was_never_executed(book):
    def forget(notebook):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(execution_count=None, outputs=[])

    change_notebook(book.second, forget)
    assert "code cell 1: not executed in order" in found(book, "not executed")


def test_cells_executed_out_of_order(book):
    change_notebook(book.second, lambda n: code(n, 6).update(execution_count=40))
    assert "code cell 6: not executed in order (40, not 6)" in found(book, "order")


def test_an_error_in_the_outputs(book):
    def fail(notebook):
        code(notebook, 6).outputs = [
            nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
        ]

    change_notebook(book.second, fail)
    assert "code cell 6: its output is an error: E" in found(book, "is an error")


def test_a_warning_in_the_outputs(book):
    def warn(notebook):
        code(notebook, 6).outputs.append(
            nbformat.v4.new_output("stream", name="stderr", text="Warning: old\n")
        )

    change_notebook(book.second, warn)
    assert "code cell 6: writes to stderr: Warning: old" in found(book, "stderr")


# ---- Portable and small


def show(book, text, kind="text/plain"):
    def add(notebook):
        code(notebook, 6).outputs = [
            nbformat.v4.new_output("display_data", data={kind: text})
        ]

    change_notebook(book.second, add)


@pytest.mark.parametrize(
    "text",
    ["/home/ann/x.py", "/Users/ann/x", "C:\\Users\\ann", "/tmp/ipykernel_12/3.py"],
)
def test_a_machines_path_in_an_output(book, text):
    show(book, text)
    assert "code cell 6: prints a machine's path" in found(book, "path")


def test_the_clones_own_folder_in_text_and_output(book):
    show(book, f"saved in {book.root}/runs")
    found(book, f"prints a machine's path: {book.root}")
    book.change(book.second, "Arithmetic.", f"See {book.root}/chapters.")
    found(book, f"names a folder of one machine: {book.root}")


def test_an_address_in_an_output(book):
    show(book, "<object object at 0x7f12ab34cd56>")
    assert "code cell 6: prints an address" in found(book, "address")


@pytest.mark.parametrize(
    "html",
    [
        "<script>1</script>",
        '<img src="https://example.org/a.png">',
        '<link><style>@import "//example.org/a.css"</style>',
        "<iframe></iframe>",
    ],
)
def test_html_that_loads_or_runs_something(book, html):
    show(book, html, "text/html")
    assert "code cell 6: its HTML loads or runs something" in found(book, "HTML")


def test_a_widget(book):
    show(book, "{}", "application/vnd.jupyter.widget-view+json")
    assert "code cell 6: a widget or script" in found(book, "widget")


def test_a_notebook_of_half_a_megabyte(book):
    show(book, "x" * 500_000)
    assert "code cell 6: 01_twice.ipynb has" in found(book, "the limit is 500,000")


# ---- Exports and imports


def test_a_module_edited_by_hand(book):
    path = book.root / "littlelm_core" / "twice.py"
    path.write_text(path.read_text() + "\nX = 1\n")
    found(book, "littlelm_core/twice.py differs from what the chapter exports")
    path.unlink()
    found(book, "littlelm_core/twice.py differs from what the chapter exports")


def test_a_later_module_imported_by_a_cell_that_stays(book):
    book.add_cell("%config X = 1\nfrom littlelm_core.twice import twice", book.first)
    hit = found(book, "imports littlelm_core.twice of chapter 01", book.first)
    assert 'section "What it costs", code cell 10' in hit


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module('littlelm_core.' + 'twice')",
        "from littlelm_core import later",
    ],
)
def test_a_run_that_reaches_a_later_module(book, source):
    # The copy has no hand-written module of that name and no later chapter's.
    (book.root / "littlelm_core" / "later.py").write_text("X = 1\n")
    book.add_cell(source, book.first)
    (problem,) = alone(Page(read_chapter(book.first), book.root))
    assert 'section "What it costs", code cell 10: fails with only' in str(problem)
    assert "Error" in str(problem)


def test_a_run_alone_has_the_earlier_module_and_its_own_definitions(book):
    book.add_cell(
        "import importlib\nimport littlelm_core.doubling as earlier\n"
        "own = importlib.import_module('littlelm_core.twice')\n"
        "assert own.twice is twice and earlier.double(2) == 4\n"
        "import os, inspect\nassert os.path.exists('course.mplstyle')\n"
        "assert 'Return what' in inspect.getsource(twice)"
    )
    assert list(alone(Page(read_chapter(book.second), book.root))) == []


def test_in_a_run_alone_the_own_module_exists_once_the_chapter_has_built_it(book):
    probe = "import importlib.util\nfound = importlib.util.find_spec"
    book.change(
        book.second,
        "### The function",
        sample.cell(f"{probe}\nassert found('littlelm_core.twice') is None")
        + "### The function",
    )
    book.add_cell(
        f"{probe}\nassert found('littlelm_core.twice') is not None\n"
        "assert found('littlelm_core.doubling') is not None\n"
        "assert found('littlelm_core.later') is None"
    )
    assert list(alone(Page(read_chapter(book.second), book.root))) == []


def test_a_run_alone_has_the_hand_written_modules(book):
    report = book.root / "littlelm_core" / "report"
    report.mkdir()
    (report / "__init__.py").write_text("X = 1\n")
    book.add_cell("from littlelm_core.report import X\nassert X == 1")
    assert list(alone(Page(read_chapter(book.second), book.root))) == []


# ---- The spine


def test_a_missing_section(book):
    book.change(book.second, "## What it costs\n", "### What it costs\n")
    found(book, 'the section "What it costs" is missing')


def test_sections_out_of_order(book):
    book.change(book.second, "## The idea", "## Next")
    book.change(book.second, "## Next\n\nMore.", "## The idea\n\nMore.")
    found(book, '"Build it" stands below "Next"')


def test_a_section_that_is_not_in_the_spine(book):
    book.change(book.second, "## Next", "## Later\n\n## Next")
    found(book, '"Later" is no section of the spine')


def test_optional_sections_in_their_place(book):
    book.change(
        book.second,
        "## Exercises",
        "## When it does not help\n\nNever.\n\n## Exercises",
    )
    assert not [p for p in book.problems(book.second) if "spine" in p or "below" in p]


def test_two_titles_and_none(book):
    book.change(book.second, "## Next\n", "# Next\n")
    found(book, "begins with one `# Title`")
    book.change(book.first, "# The doubling", "The doubling")
    found(book, "begins with one `# Title`", book.first)


def test_a_heading_inside_code_is_no_section(book):
    book.change(book.second, "Arithmetic.", "```text\n## Not a section\n```")
    assert not [p for p in book.problems(book.second) if "Not a section" in p]


def test_the_line_about_time(book):
    book.change(book.second, "about 5 minutes · ", "")
    found(book, "below the title stands one line")


def test_too_many_words(book):
    book.change(book.second, "Arithmetic.", "word " * 3_501)
    found(book, "words of prose; the limit is 3,500")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One two, three.", 3),
        ("```python\nnot prose\n```\nyes", 1),
        ("The sum $a + b$ is\n$$\na = b\n$$\nhere", 6),
        ("```{note}\n:class: tip\nTwo words\n```", 2),
        ("```{figure} a.svg\n:alt: not these\n\nThe caption.\n```", 2),
        ("{term}`byte pair encoding` don't", 3),
        ("````{note}\n```python\ncode\n```\nouter\n````", 1),
    ],
)
def test_words_are_those_that_one_reads(text, count):
    assert words(text) == count


# ---- Figures


def test_a_computed_figure_without_alt_text(book):
    book.change(book.second, "    alt: A rising line.\n", "    alt: ''\n")
    assert "code cell 3: a figure without alt text" in found(book, "alt text")


def test_a_computed_figure_without_any_metadata(book):
    text = book.second.read_text(encoding="utf-8")
    start = text.index("---\nmystnb:")
    end = text.index("---\n", start + 4) + 4
    book.second.write_text(text[:start] + text[end:], encoding="utf-8")
    assert "code cell 3: a figure's name is like" in found(book, "name is like")
    assert "code cell 3" in found(book, "without a caption")
    assert "code cell 3" in found(book, "without alt text")


def test_a_figure_without_a_caption(book):
    book.change(book.second, "      The value doubles with each step.\n", "      \n")
    assert "code cell 3" in found(book, "a figure without a caption")


def test_a_drawn_figure_without_caption_alt_name_or_file(book):
    book.change(book.second, "\n\nOne square.\n", "\n")
    found(book, "a figure without a caption")
    book.change(book.second, ":alt: A square.\n", "")
    found(book, "a figure without alt text")
    book.change(book.second, ":name: fig-twice-c\n", ":name: c\n")
    found(book, "not 'c'")
    book.change(book.second, "figures/twice.svg", "figures/none.svg")
    found(book, "no file figures/none.svg")


@pytest.mark.parametrize(
    "text",
    ["![a line](figures/twice.svg)", '<img src="x.svg">', "```{image} x.svg\n```"],
)
def test_an_image_that_is_no_figure(book, text):
    book.change(book.second, "Arithmetic.", text)
    found(book, "figure}")


def test_a_figure_that_the_text_never_speaks_of(book):
    book.change(book.second, "{numref}`fig-twice-b`", "{numref}`fig-twice-a`")
    found(book, "the text never speaks of {numref}`fig-twice-b`")


def test_too_few_figures_and_too_few_computed(book):
    change_notebook(book.second, lambda n: code(n, 3).update(outputs=[]))
    found(book, "2 figures; a chapter has 3 to 6")
    change_notebook(book.second, lambda n: code(n, 7).update(outputs=[]))
    found(book, "only 0 of 1 figures are computed")


def test_two_pictures_in_one_cell(book):
    def double(notebook):
        code(notebook, 3).outputs *= 2

    change_notebook(book.second, double)
    assert "code cell 3: two pictures under one caption" in found(book, "two pictures")


# ---- Words and sources


def test_a_term_or_source_that_is_not_there(book):
    chapters = book.root / "chapters"
    (chapters / "glossary.md").write_text(
        "```{glossary}\nhalf byte\n  Four bits; {term}`no entry` of its own.\n```\n"
    )
    (chapters / "references.bib").write_text("@misc{known2026,\n  year = {2026}\n}\n")
    text = "{term}`Half\nbyte`, {term}`halves <half byte>` {cite}`known2026`"
    book.change(book.second, "Arithmetic.", text)
    assert not [p for p in book.problems(book.second) if " is not in " in p]
    book.change(book.second, text, "{term}`quarter` {cite}`known2026,other2025`")
    found(book, "'quarter' is not in chapters/glossary.md")
    found(book, "'other2025' is not in chapters/references.bib")


# ---- Exercises and the contract


def test_too_few_exercises(book):
    text = book.second.read_text(encoding="utf-8")
    start, end = text.index("### 1.4 "), text.index("## What moved")
    book.second.write_text(text[:start] + text[end:], encoding="utf-8")
    assert "3 exercises; a chapter has 4 to 6" in found(book, "exercises; a chapter")


def test_an_exercise_with_a_wrong_id(book):
    book.change(book.second, "### 1.3 Times 3", "### 2.3 Times 3")
    assert 'should be "1.3 ..."' in found(book, "should be")


def test_an_exercise_without_a_stub(book):
    book.change(book.second, "    raise NotImplementedError", "    return 1")
    found(book, "no stub cell: ex_1_1 raises NotImplementedError")


def test_an_exercise_without_its_check(book):
    book.change(book.second, '```{code-cell} ipython3\ncheck("1.2")\n```\n', "")
    found(book, 'no check("1.2") in or below the stub')


def test_an_exercise_without_a_solution(book):
    book.change(book.second, "def ex_1_2(x):\n    return 2 * x", "pass")
    found(book, "no solution: a later cell that defines ex_1_2")


def test_a_solution_that_is_not_folded(book):
    text = book.second.read_text(encoding="utf-8")
    text = re.sub(r":tags: \[hide-cell\]\n\n(def ex_1_2)", r"\1", text)
    book.second.write_text(text, encoding="utf-8")
    found(book, "a solution is folded: tag it hide-cell")


def test_a_solution_that_is_not_checked(book):
    book.change(book.second, 'return 2 * x\n\n\ncheck("1.2")', "return 2 * x")
    found(book, 'the solution is not run by check("1.2")')


def test_an_exercise_without_a_grader(book):
    path = book.root / "tests" / "exercises" / "chapter_01.py"
    path.write_text(path.read_text().replace("exercise_1_2", "exercise_1_9"))
    found(book, "no grader exercise_1_2 in tests/exercises/chapter_01.py")


def test_check_it_without_a_contract(book):
    book.change(book.second, 'check("twice", twice)', "print(1)")
    found(book, 'no cell of "Check it" calls check(')


def test_an_exported_name_that_is_not_told(book):
    book.change(book.second, "- `twice`:", "- It:")
    found(book, '"What moved into the core" does not name `twice`')


# ---- Between chapters


def test_problems_between_chapters(book):
    assert list(book_problems(book.root)) == []
    (book.root / "chapters" / "01_again.md").write_text(
        book.second.read_text(encoding="utf-8"), encoding="utf-8"
    )
    texts = [str(p) for p in book_problems(book.root)]
    assert any("both write the module twice" in text for text in texts)
    assert any("01_again and 01_twice have one number" in text for text in texts)
    assert any("01_again has a figure fig-twice-c too" in text for text in texts)
    assert any("does not list chapters/01_again" in text for text in texts)


def test_a_table_of_contents_that_lists_what_is_not_there(book):
    path = book.root / "_toc.yml"
    path.write_text(path.read_text() + "- file: chapters/02_gone\n")
    texts = [str(p) for p in book_problems(book.root)]
    assert texts == ["_toc.yml: lists chapters/02_gone, which is not there"]


def test_a_glossary_and_bibliography_out_of_order(book):
    chapters = book.root / "chapters"
    glossary = "```{glossary}\nbeta\n  B.\n\nAlpha\n  A.\n\nAlpha\n  A.\n```\n"
    (chapters / "glossary.md").write_text(glossary)
    (chapters / "references.bib").write_text("@misc{b,\n}\n@misc{a,\n}\n")
    assert [str(p) for p in book_problems(book.root)] == [
        "chapters/glossary.md: 'alpha' belongs above 'beta'",
        "chapters/glossary.md: 'alpha' stands there twice",
        "chapters/references.bib: 'a' belongs above 'b'",
    ]


def test_an_empty_book_fails(tmp_path):
    (tmp_path / "chapters").mkdir()
    with pytest.raises(BookError, match="no chapters/NN_name"):
        check(root=tmp_path, echo=silent)
    with pytest.raises(BookError, match="works from a clone"):
        execute(root=tmp_path / "nowhere", echo=silent)
