"""Export: one chapter, one readable module; a broken rule is named with its cell."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import littlelm_core
from littlelm_core.book import BookError, export

REPOSITORY = Path(littlelm_core.__file__).parent.parent


def silent(_):
    """An echo that says nothing."""


def fails(book, chapter="01"):
    with pytest.raises(BookError) as caught:
        export([chapter], root=book.root, echo=silent)
    message = str(caught.value)
    assert "\n" not in message
    return message


def module(book, name="twice"):
    return (book.root / "littlelm_core" / f"{name}.py").read_text(encoding="utf-8")


def test_a_module_reads_like_one_that_was_written_by_hand(book):
    text = module(book)
    head = text.splitlines()[:2]
    assert head == [
        "# From chapters/01_twice.md by `littlelm book export`: edit the chapter.",
        '"""The module twice of a small book."""',
    ]
    assert "# ---- The function\n" in text
    assert '__all__ = ["twice"]\n' in text
    assert text.index("import SIDES, double") < text.index("__all__")
    assert "assert value" not in text  # the cell without `#| export` stays behind
    tree = ast.parse(text)
    assert ast.get_docstring(tree) == "The module twice of a small book."


def test_exporting_again_changes_no_byte(book):
    before = module(book)
    for _ in range(2):
        assert export(root=book.root, echo=silent) == []
    path = book.root / "littlelm_core" / "twice.py"
    path.unlink()
    assert export(root=book.root, echo=silent) == [path]
    assert module(book) == before


def test_an_exported_module_passes_the_linter_of_the_repository(book):
    config = str(REPOSITORY / "pyproject.toml")
    path = str(book.root / "littlelm_core" / "twice.py")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--config",
                config,
                "--no-cache",
                path,
            ],
            capture_output=True,
            text=True,
            cwd=book.root,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_imports_of_several_cells_are_merged_sorted_and_on_top(book):
    book.add_cell(
        "#| export\nfrom __future__ import annotations\n\nimport math\n"
        "from pathlib import Path\n\nfrom littlelm_core.doubling import double\n\n\n"
        "def root(x: float) -> tuple[float, Path]:\n"
        "    return math.sqrt(double(x)), Path()"
    )
    export(root=book.root, echo=silent)
    text = module(book)
    top = text.split("__all__")[0]
    assert top.splitlines()[2:] == [
        "",
        "from __future__ import annotations",
        "",
        "import math",
        "from pathlib import Path",
        "",
        "from littlelm_core.doubling import SIDES, double",
        "",
    ]
    assert text.count("import math") == 1
    assert '__all__ = ["root", "twice"]' in text


def test_imports_for_type_checkers_stay_under_their_condition(book):
    book.add_cell(
        "#| export\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from pathlib import Path\n\n\ndef name(path: 'Path') -> str:\n"
        "    return path.name"
    )
    export(root=book.root, echo=silent)
    assert "if TYPE_CHECKING:\n    from pathlib import Path\n" in module(book)


def test_private_names_are_not_public_and_constants_may_be_made_by_a_call(book):
    book.add_cell(
        "#| export\nimport re\n\nWORD = re.compile('a')\n_cache = dict()\n"
        "rate: float = 0.5\nLOOK = lambda: print()"
    )
    export(root=book.root, echo=silent)
    assert '__all__ = ["LOOK", "WORD", "rate", "twice"]' in module(book)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("print(1)", "`print(1)` runs"),
        ("for i in range(3):\n    pass", "`for i in range(3):` runs"),
        ("result = twice(3)", "`result = twice(3)` runs"),
        ("assert True", "`assert True` runs"),
        ("if SIDES:\n    X = 1", "`if SIDES:` runs"),
        ("SIDES += 1", "`SIDES += 1` runs"),
        ("twice.calls = 0", "`twice.calls = 0` changes an object"),
        ('"""text"""', '`"""text"""` runs'),
    ],
)
def test_a_statement_that_runs_is_refused_and_shown(book, line, shown):
    book.add_cell(f"#| export\nX0 = 0\n{line}")
    message = fails(book)
    assert shown in message
    assert 'chapters/01_twice.md, section "What it costs", code cell 10' in message


def test_a_name_that_only_the_notebook_has_is_refused(book):
    book.add_cell("#| export\ndef show(x):\n    return plt.plot(x), value")
    message = fails(book)
    assert "code cell 10: plt is neither defined nor imported" in message
    assert "only code cell 2 has it" in message


def test_a_name_that_nothing_has_is_refused_in_every_scope(book):
    book.add_cell(
        "#| export\nclass Box:\n    def get(self):\n"
        "        return [inner for x in range(3) if (inner := x) + missing]"
    )
    assert "missing is neither defined nor imported by the module" in fails(book)


def test_a_definition_used_before_it_exists_is_refused(book):
    book.add_cell("#| export\n@later\ndef f(x):\n    return x")
    book.add_cell("#| export\ndef later(f):\n    return f")
    assert "later is neither defined" in fails(book)


def test_builtins_and_module_names_are_known(book):
    book.add_cell("#| export\ndef where():\n    return sorted([__file__, __name__])")
    export(root=book.root, echo=silent)


def test_an_import_that_nothing_uses_is_refused(book):
    book.add_cell("#| export\nimport json\n\nX0 = 1")
    assert "code cell 10: json imported but unused" in fails(book)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f():\n    import json\n    return json", "inside f"),
        ("X0 = 1\nimport json", "stands below a definition"),
        ("class A:\n    import json", "inside A"),
        ("from .doubling import double\n\nX0 = double", "not a relative import"),
    ],
)
def test_an_import_below_the_top_is_refused(book, source, words):
    book.add_cell(f"#| export\n{source}")
    message = fails(book)
    assert words in message
    assert "code cell 10" in message


@pytest.mark.parametrize(
    "line",
    [
        "from littlelm_core.twice import twice",
        "import littlelm_core.twice",
        "from littlelm_core import twice",
    ],
)
def test_a_later_chapter_is_not_imported(book, line):
    book.add_cell(f"#| export\n{line}\n\n\ndef f():\n    return twice", book.first)
    message = fails(book, "00")
    assert "imports littlelm_core.twice of chapter 01" in message
    assert 'chapters/00_doubling.md, section "What it costs", code cell 10' in message


def test_commands_unknown_modules_and_the_own_module_are_not_imported(book):
    for name, words in (
        ("cli", "a command"),
        ("nothing", "no chapter writes that module"),
        ("twice", "its own module"),
    ):
        before = book.second.read_text(encoding="utf-8")
        book.add_cell(f"#| export\nfrom littlelm_core import {name}\n\nX0 = {name}")
        assert words in fails(book)
        book.second.write_text(before, encoding="utf-8")


def test_two_chapters_with_one_module_are_refused(book):
    shutil.copy(book.first, book.root / "chapters" / "02_again.md")
    message = fails(book, "02")
    assert "module 'doubling' is also written by chapters/00_doubling.md" in message
    assert "00_doubling" in fails(book, "02")
    assert "02_again" in fails(book, "00")


def test_a_hand_written_module_is_not_overwritten(book):
    book.change(book.second, "default_exp twice", "default_exp check")
    assert "check.py is written by hand" in fails(book)


def test_a_chapter_names_its_module_exactly_once(book):
    book.change(book.second, "#| default_exp twice", "# nothing")
    assert "no cell says `#| default_exp" in fails(book)
    book.change(book.second, "# nothing", "#| default_exp twice")
    book.add_cell("#| default_exp other")
    assert "a second `#| default_exp`; code cell 1 already" in fails(book)


def test_a_name_is_defined_once(book):
    book.add_cell("#| export\ndef twice(x):\n    return x")
    assert "twice is already defined in code cell 5" in fails(book)


def test_misspelled_and_misplaced_directives_are_refused(book):
    before = book.second.read_text(encoding="utf-8")
    book.add_cell("#| exprot\nX0 = 1")
    message = fails(book)
    assert "unknown directive `#| exprot` (did you mean 'export'?)" in message
    book.second.write_text(before, encoding="utf-8")
    book.add_cell("X0 = 1\n#| export")
    assert "code cell 10: a `#|` line below" in fails(book)


def test_a_cell_that_is_not_plain_python_is_refused(book):
    book.add_cell("#| export\n%config X = 1\nX0 = 1")
    assert "code cell 10: not plain Python, line 2" in fails(book)


def test_check_shows_the_difference_and_writes_nothing(book):
    said = []
    assert export(check=True, root=book.root, echo=said.append) == []
    path = book.root / "littlelm_core" / "twice.py"
    old = path.read_text(encoding="utf-8")
    path.write_text(old.replace("SIDES / 2", "SIDES / 3"), encoding="utf-8")
    with pytest.raises(BookError, match="differs from its chapters"):
        export(check=True, root=book.root, echo=said.append)
    assert "-    return double(x) * SIDES / 3\n+    return double(x) * SIDES / 2" in (
        "\n".join(said)
    )
    assert "SIDES / 3" in path.read_text(encoding="utf-8")


def test_an_unknown_chapter_is_named_with_the_nearest(book):
    assert "no chapter '01_twise' (did you mean '01_twice'?)" in fails(book, "01_twise")


def test_the_command_fails_with_one_line_and_exit_code_1(book):
    book.change(book.second, "SIDES / 2", "SIDES / 4")
    program = (
        "import sys, littlelm_core.book as b; from pathlib import Path; "
        f"root = Path({str(book.root)!r}); real = b.export; "
        "b.export = lambda *a, **k: real(*a, root=root, **k); "
        "from littlelm_core.book.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "export", "--check"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the package differs from its chapters")
    assert "+    return double(x) * SIDES / 4" in done.stdout
