"""The three doors to a contract: the notebook's `check`, the command and pytest."""

import json
import random

import numpy
import pytest
import torch

from littlelm_core import check as module
from littlelm_core.check import check, check_part_cli, contracts, run_contract
from littlelm_core.config import LittleLMError

CONTRACT = '''
"""A contract for a function that doubles."""
import random
import pytest
from hypothesis import given
from hypothesis import strategies as st

PART = "own:double"

def helper(part):
    return part(2)

def test_it_doubles(part):
    wanted = 4
    assert helper(part) == wanted

@given(number=st.integers())
def test_any_number(part, number):
    assert part(number) == 2 * number, "not the double"

def test_it_refuses_text(part):
    with pytest.raises(TypeError):
        part("a")

def test_of_another_kind(part, tmp_path):
    raise AssertionError("check must not call this")

def test_without_a_part():
    raise AssertionError("check must not call this")

def test_left_out(part):
    pytest.importorskip("not_a_module_of_anyone")

def test_draws_are_the_same(part):
    assert random.random() == random.Random(0).random()
'''

GRADER = """
def exercise_2_3(answer):
    got = answer(2)
    assert got == 4, f"twice 2 is 4, not {got}"

def exercise_2_4(answer):
    assert answer == 3
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with one contract and two exercises."""
    for folder in ("contracts", "exercises"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests/contracts/test_double.py").write_text(CONTRACT)
    (tmp_path / "tests/exercises/chapter_02.py").write_text(GRADER)
    (tmp_path / "own.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def double(number):
    if not isinstance(number, int):
        raise TypeError("a number is needed")
    return 2 * number


def test_a_right_part_passes_in_the_order_of_the_file(clone, capsys):
    results = run_contract("double", double)
    assert [r.test for r in results] == [
        "test_it_doubles", "test_any_number", "test_it_refuses_text", "test_left_out",
        "test_draws_are_the_same",
    ]  # fmt: skip
    assert all(r.ok and not r.message for r in results)
    check("double", double)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "double: 5 of 5 passed",
        "  pass  it doubles",
    ]


def test_a_wrong_part_is_told_what_is_wrong(clone, capsys):
    with pytest.raises(AssertionError, match="double: 3 of 5 failed; it doubles"):
        check("double", lambda number: 5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "  FAIL  it doubles",
        "        not so: helper(part) == wanted (where wanted = 4)",
    ]
    assert "        not the double" in lines
    assert any(
        line.endswith(
            "did not raise TypeError: with pytest.raises(TypeError): part('a')"
        )
        for line in lines
    )


def test_an_error_in_a_part_is_named_with_its_own_line(clone):
    def broken(number):
        return number.missing

    first = run_contract("double", broken)[0]
    assert first.error == "AttributeError"
    assert "'int' object has no attribute 'missing'" in first.message
    assert "in broken: return number.missing" in first.message


def test_the_output_repeats_and_leaves_the_callers_numbers_alone(clone, capsys):
    def random_state():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    untouched = random_state()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    outputs = []
    for _ in range(2):
        with pytest.raises(AssertionError):
            check("double", lambda number: 0 if abs(number) > 300 else 2 * number)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "FAIL  any number" in outputs[0]
    assert random_state() == untouched


def test_a_part_is_named_by_file_or_module(clone, monkeypatch, capsys):
    monkeypatch.syspath_prepend(clone)
    # Doubling "a" raises nothing: one of the tests fails.
    assert check_part_cli("double") == 1
    assert check_part_cli("double", f"{clone}/own.py:double") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("FAIL  it refuses text: did not raise TypeError")
    assert out[1] == "double: 4 of 5 passed"
    (clone / "right.py").write_text(
        "def f(x):\n    if x == 'a':\n        raise TypeError\n    return 2 * x\n"
    )
    assert check_part_cli("double", f"{clone}/right.py:f") == 0
    assert capsys.readouterr().out == "double: 5 of 5 passed\n"
    for use, word in (
        (f"{clone}/none.py:f", "no file"), (f"{clone}/right.py:g", "has no g"),
        ("no_such_module:f", "no_such_module"),
    ):  # fmt: skip
        with pytest.raises(LittleLMError, match=word):
            check_part_cli("double", use)


def test_unknown_names_are_refused_with_the_nearest(clone):
    with pytest.raises(LittleLMError, match="did you mean 'double'"):
        check("duoble", double)
    with pytest.raises(LittleLMError, match=r"2\.9: there are 2\.3, 2\.4"):
        check("2.9", double)
    with pytest.raises(LittleLMError, match="chapter 3"):
        check("3.1", double)


def test_without_the_clones_tests_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for call in (contracts, lambda: check("double"), lambda: check("2.3", double)):
        with pytest.raises(LittleLMError, match="clone") as raised:
            call()
        assert "\n" not in str(raised.value)


def test_an_exercise_is_correct_unfinished_or_wrong(clone, capsys):
    check("2.3", double)
    assert capsys.readouterr().out == "2.3: correct\n"

    def stub(number):
        raise NotImplementedError

    check("2.3", stub)
    assert capsys.readouterr().out == "2.3: not done yet\n"
    with pytest.raises(AssertionError, match=r"2\.3: twice 2 is 4, not 5") as raised:
        check("2.3", lambda number: 5)
    shown = raised.value._render_traceback_()
    assert shown == ["AssertionError: 2.3: twice 2 is 4, not 5"]
    with pytest.raises(AssertionError, match=r"2\.3: ZeroDivisionError: .*1 / 0"):
        check("2.3", lambda number: 1 / 0)


def test_an_answer_is_found_where_check_is_called(clone, capsys):
    exec("ex_2_3 = lambda x: 2 * x\ncheck('2.3')", {"check": check})
    ex_2_3 = double  # noqa: F841
    check("2.3")
    assert capsys.readouterr().out == 2 * "2.3: correct\n"
    with pytest.raises(LittleLMError, match="no ex_2_4 here"):
        check("2.4")


def test_every_contract_of_the_clone_loads():
    assert {"config", "norm", "rope"} <= set(contracts())
    for name in contracts():
        loaded = module.load_contract(name)
        assert loaded.__doc__
        assert module.contract_tests(loaded)


def test_practice_copies_a_chapter_without_its_solutions(tmp_path, monkeypatch):
    pytest.importorskip("jupytext")
    chapters = tmp_path / "chapters"
    chapters.mkdir()
    source = (module.ROOT / "chapters/00_config.md").read_text(encoding="utf-8")
    (chapters / "00_config.md").write_text(source, encoding="utf-8")
    (chapters / "course.mplstyle").write_text("")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    path = module.practice("0")
    assert path == tmp_path / "practice" / "00_config.ipynb"
    assert (path.parent / "course.mplstyle").is_file()
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert not any(c.get("outputs") for c in cells)
    stubs = [c for c in code if c.startswith("def ex_0_1(")]
    assert len(stubs) == 1, "the stub stays and the solution goes"
    assert "NotImplementedError" in stubs[0]
    assert sum('check("0.1")' in c for c in code) == 1
    assert any("default_exp" in c for c in code), "other folded cells stay"
    path.write_text("my work")
    with pytest.raises(LittleLMError, match="there already"):
        module.practice("00")
    assert path.read_text() == "my work"
    with pytest.raises(LittleLMError, match="no chapter 42"):
        module.practice("42")
