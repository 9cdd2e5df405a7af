"""Execute: a fresh kernel a chapter, and a notebook without anything of the moment."""

import os
import sys

import nbformat
import pytest

from littlelm_core.book import BookError, execute


def silent(_):
    """An echo that says nothing."""


def outputs(path):
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    return {cell.source: cell.get("outputs") for cell in notebook.cells}, notebook


def test_running_again_gives_the_same_bytes(book):
    path = book.first.with_suffix(".ipynb")
    before = path.read_bytes()
    seconds = execute(["00"], root=book.root, echo=silent)
    assert list(seconds) == ["00_doubling"]
    assert seconds["00_doubling"] > 0
    assert path.read_bytes() == before


def test_the_notebook_has_counts_stable_ids_and_no_moment_in_it(book):
    _, notebook = outputs(book.first)
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert "version" not in notebook.metadata.language_info
    assert notebook.metadata.kernelspec.display_name == "Python 3 (ipykernel)"
    text = book.first.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert "execution" not in text.replace("execution_count", "")
    for word in ("dc:date", "<metadata>", "Matplotlib v", str(book.root), "timestamp"):
        assert word not in text


def test_a_new_cell_leaves_the_ids_of_the_others(book):
    _, old = outputs(book.second)
    book.add_cell("print(1)")
    book.add_cell("print(1)")  # equal text: still an id of its own
    execute(["01"], root=book.root, echo=silent)
    _, new = outputs(book.second)
    ids = [cell.id for cell in new.cells]
    assert len(set(ids)) == len(ids) == len(old.cells) + 2
    changed = set(ids) - {cell.id for cell in old.cells}
    assert len(changed) == 2


def test_the_kernel_is_this_interpreter_alone_on_one_thread_with_fixed_seeds(book):
    book.add_cell(
        "import os, random, sys\nimport numpy as np\nimport littlelm_core\n"
        "print(sys.executable, littlelm_core.__file__, os.getcwd())\n"
        "print(os.environ['OMP_NUM_THREADS'], hash('a'), random.random(),"
        " np.random.rand())"
    )
    shown = []
    for _ in range(2):
        execute(["01"], root=book.root, echo=silent)
        cells, _ = outputs(book.second)
        (output,) = next(v for k, v in cells.items() if "sys.executable" in k)
        shown.append(output.text)
    assert shown[0] == shown[1]
    executable, package, folder, threads = shown[0].split()[:4]
    relative = os.path.relpath(sys.executable, sys.prefix).replace(os.sep, "/")
    assert executable == f"venv/{relative}"  # the machine's folders are left out
    assert package == "./littlelm_core/__init__.py"
    assert folder == "./chapters"
    assert threads == "1"


def test_a_failing_cell_stops_with_its_place_and_keeps_the_old_notebook(book):
    path = book.second.with_suffix(".ipynb")
    before = path.read_bytes()
    book.add_cell("raise RuntimeError('a wrong turn\\nand more')")
    said = []
    with pytest.raises(BookError) as caught:
        execute(["01"], root=book.root, echo=said.append)
    assert str(caught.value) == (
        'chapters/01_twice.md, section "What it costs", code cell 10: '
        "RuntimeError: a wrong turn"
    )
    assert "Traceback" in said[-1]
    assert "\x1b[" not in said[-1]
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.glob("*.part")) == []


def test_a_kernel_that_dies_is_named_with_its_cell(book):
    book.add_cell("import os\nos._exit(3)")
    with pytest.raises(BookError, match="code cell 10: the kernel died here"):
        execute(["01"], root=book.root, echo=silent)


def test_words_on_stderr_are_told(book):
    book.add_cell("import warnings\nwarnings.warn('too hot')")
    said = []
    execute(["01"], root=book.root, echo=said.append)
    told = [line for line in said if "writes to stderr" in line]
    assert len(told) == 1
    assert "code cell 10" in told[0]
    assert "too hot" in told[0]


def test_the_echo_of_a_docstring_cell_is_left_out(book):
    cells, _ = outputs(book.first)
    assert cells['#| export\n"""The module doubling of a small book."""'] == []


def test_no_kernel_outlives_its_chapter(book):
    # A process that answers to its own number after the chapter is a kernel left over.
    book.add_cell(
        "import os, pathlib\npathlib.Path('kernel.pid').write_text(str(os.getpid()))"
    )
    execute(["01"], root=book.root, echo=silent)
    pid = int((book.second.parent / "kernel.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
