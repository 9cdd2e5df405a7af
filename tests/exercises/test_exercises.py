"""The graders reject a wrong answer and know an unfinished one.

That a grader accepts the chapter's own solution is shown by the executed notebook: the
folded cell runs `check` on it, and this looks for the line that it printed.
"""

import inspect
import json
import re
from pathlib import Path

import pytest

from littlelm_core import check

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(__file__).parent.glob("chapter_*.py"))
CHAPTERS = {p.stem[:2]: p for p in (ROOT / "chapters").glob("[0-9][0-9]_*.md")}


def graders(path):
    module = check._load_file(path, f"littlelm_exercises_{path.stem[-2:]}")
    found = {}
    for name, function in vars(module).items():
        match = re.fullmatch(r"exercise_(\d+)_(\d+)", name)
        if match:
            found[f"{match[1]}.{match[2]}"] = function
    return found


EXERCISES = [
    pytest.param(function, id=exercise)
    for path in FILES
    for exercise, function in graders(path).items()
]


@pytest.mark.parametrize("number", sorted(CHAPTERS))
def test_a_chapter_grades_what_it_asks(number):
    text = CHAPTERS[number].read_text(encoding="utf-8")
    asked = re.findall(r"^### (\d+\.\d+) ", text, flags=re.M)
    path = Path(__file__).parent / f"chapter_{number}.py"
    assert path.is_file(), f"no graders in {path}"
    assert list(graders(path)) == asked, "graders and exercises differ"
    assert 4 <= len(asked) <= 6, f"{len(asked)} exercises; a chapter has 4 to 6"
    for exercise in asked:
        calls = text.count(f'check("{exercise}")')
        assert calls >= 2, f"{exercise} is checked {calls} times: stub and solution"
        name = f"ex_{exercise.replace('.', '_')}"
        assert name in text, f"no stub of {name}"


@pytest.mark.parametrize("number", sorted(CHAPTERS))
def test_the_executed_notebook_solves_every_exercise(number):
    notebook = CHAPTERS[number].with_suffix(".ipynb")
    assert notebook.is_file(), f"{notebook.name} is missing: littlelm book execute"
    printed = "".join(
        "".join(output.get("text", ""))
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        for output in cell.get("outputs", ())
    ).splitlines()
    path = Path(__file__).parent / f"chapter_{number}.py"
    for exercise in graders(path) if path.is_file() else ():
        assert f"{exercise}: not done yet" in printed, f"no stub of {exercise} ran"
        assert f"{exercise}: correct" in printed, f"no solution of {exercise} ran"


@pytest.mark.parametrize("grader", EXERCISES)
def test_a_grader_rejects_an_answer_that_returns_nothing(grader):
    assert len(inspect.signature(grader).parameters) == 1
    with pytest.raises(Exception) as raised:
        grader(lambda *args, **keys: None)
    broken = (ImportError, NameError, NotImplementedError, SyntaxError)
    assert not isinstance(raised.value, broken), f"the grader is broken: {raised.value}"


@pytest.mark.parametrize("grader", EXERCISES)
def test_a_grader_lets_an_unfinished_answer_through(grader):
    def stub(*args, **keys):
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        grader(stub)
