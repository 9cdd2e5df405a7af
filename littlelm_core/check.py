"""The callers of the contracts: one set of tests grades our part and yours.

A contract is a file of the clone, `tests/contracts/test_<name>.py`: a `PART` (our own)
and test functions that take nothing but `part`. pytest calls them, a notebook calls
them through `check("attention", MyAttention)`, and the command line through
`littlelm check attention --with my.py:MyAttention`. An exercise has one grader,
`exercise_2_3(answer)` in `tests/exercises/chapter_02.py`, which `check("2.3")` calls.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import random
import re
import shutil
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from littlelm_core.config import KINDS, LittleLMError, load_object, nearest, resolve

__all__ = [
    "Result",
    "check",
    "check_part_cli",
    "contracts",
    "load_part",
    "run_contract",
]

ROOT = Path(__file__).resolve().parent.parent

# A contract that is not called as its kind of part is in a run file.
KIND_OF = {"mlp": "ffn"}


class Result(NamedTuple):
    """What one test of a contract said."""

    test: str
    ok: bool
    message: str  # empty when ok; else what is wrong, in one line
    error: str = ""  # the type of the exception, such as "AssertionError"


class NotCorrect(AssertionError):
    """A part or an answer that is not right; a notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"AssertionError: {self}"]


# ---- Find contracts, graders and parts


def _tests(folder: str) -> Path:
    path = ROOT / "tests" / folder
    if not path.is_dir():
        raise LittleLMError(
            f"no folder {path}: the course is used from its clone, installed with "
            "pip install -e ."
        )
    return path


def contracts() -> list[str]:
    """Return the names of the contracts in this clone, sorted."""
    files = _tests("contracts").glob("test_*.py")
    return sorted(path.stem.removeprefix("test_") for path in files)


def _load_file(path: Path, name: str) -> ModuleType:
    """Import one of the clone's own files afresh; what it misses is said in a line."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        if error.name in ("pytest", "hypothesis"):
            raise LittleLMError(
                f"the contracts need {error.name}: pip install -e .[test]"
            ) from error
        raise
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_contract(name: str) -> ModuleType:
    """Import `tests/contracts/test_<name>.py`.

    name: a contract ("mlp") or the kind of part that it grades ("ffn").
    Raises LittleLMError: no such contract, a clone without its tests.
    """
    known = contracts()
    by_kind = {kind: contract for contract, kind in KIND_OF.items()}
    name = by_kind.get(name, name)
    if name not in known:
        raise LittleLMError(f"no contract is called {name!r}{nearest(name, known)}")
    path = _tests("contracts") / f"test_{name}.py"
    return _load_file(path, f"littlelm_contract_{name}")


def load_part(use: str, kind: str | None = None) -> Any:
    """Return what `use` names: "pkg.mod:Name", "file.py:Name", or a whole module.

    A module ("pkg.mod" or "file.py") is a part where the contract grades functions.
    A name without a dot is one that a run file could give for this kind ("gqa").
    Raises ConfigError when it does not import or lacks the name.
    """
    if kind in KINDS and ":" not in use and "." not in use:
        return resolve(kind, use)
    return load_object(use)


# ---- Run a contract


def contract_tests(module: ModuleType) -> dict[str, Callable[[Any], None]]:
    """Return the contract's `test_*` functions of one argument, in their order."""
    return {
        name: function
        for name, function in vars(module).items()
        if name.startswith("test_")
        and inspect.isfunction(function)
        and list(inspect.signature(function).parameters) == ["part"]
    }


@contextmanager
def _repeatable() -> Iterator[None]:
    """Give a test the same random numbers on each call, and the caller its own back.

    Hypothesis draws the same examples each time and keeps no database: a notebook's
    output must not change from one execution to the next.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    hypothesis = sys.modules.get("hypothesis")
    saved = random.getstate()
    saved_torch = torch.get_rng_state() if torch else None
    saved_numpy = numpy.random.get_state() if numpy else None
    random.seed(0)
    if torch:
        torch.manual_seed(0)
    if numpy:
        numpy.random.seed(0)
    if hypothesis:
        settings = hypothesis.settings
        profile = settings.get_current_profile_name()
        settings.register_profile(
            "littlelm-check", derandomize=True, database=None, deadline=None
        )
        settings.load_profile("littlelm-check")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(saved)
        if torch:
            torch.set_rng_state(saved_torch)
        if numpy:
            numpy.random.set_state(saved_numpy)
        if hypothesis:
            settings.load_profile(profile)


def run_test(name: str, test: Callable[[Any], None], part: Any) -> Result:
    """Call one test of a contract. Only an interrupt gets through."""
    try:
        with _repeatable():
            test(part)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # pytest's Failed and Skipped are no Exceptions
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if type(error).__name__ == "Skipped":
            return Result(name, True, "")
        return Result(name, False, _say(error), type(error).__name__)
    return Result(name, True, "")


def run_contract(name: str, part: Any = None) -> list[Result]:
    """Run a contract's tests on a part, in the order in which the file defines them.

    part: the object itself, a name for `load_part`, or None for our own part.
    Raises LittleLMError: no such contract, no clone, a part that does not import.
    """
    module = load_contract(name)
    if part is None or isinstance(part, str):
        part = load_part(part or module.PART, KIND_OF.get(name, name))
    return [run_test(n, test, part) for n, test in contract_tests(module).items()]


# ---- Put a failure into words


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _say(error: BaseException) -> str:
    """Return what went wrong in one line, with the source where nothing says it."""
    message = _one_line(error)
    kind = type(error).__name__
    # The deepest line that is the part's or the test's own, not a library's.
    frame, line = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(frame.f_code.co_filename)
    ][-1]
    if kind == "Failed":  # pytest.raises around a call that did not raise
        call = _statement(frame, line, of=ast.With) or frame.f_code.co_name
        return f"{message.replace('DID NOT RAISE', 'did not raise')}: {call}"
    if not isinstance(error, AssertionError):
        source = linecache.getline(frame.f_code.co_filename, line).strip()
        return f"{kind}: {message} (in {frame.f_code.co_name}: {source})"
    if message:
        return message
    failed = _statement(frame, line, of=ast.Assert)
    if failed is None:
        return f"an assertion failed in {frame.f_code.co_name}"
    return f"not so: {failed}{_values(failed, frame)}"


def _is_own(filename: str) -> bool:
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    return filename.startswith(str(ROOT)) or not filename.startswith(library)


def _statement(frame: FrameType, line: int, of: type[ast.stmt]) -> str | None:
    """Return the innermost statement of this type around a line, as one line."""
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, of) and node.lineno <= line <= node.end_lineno
    ]
    if not around:
        return None
    node = max(around, key=lambda n: n.lineno)
    shown = node.test if isinstance(node, ast.Assert) else node
    text = _one_line(ast.unparse(shown))
    return text if len(text) <= 200 else text[:197] + "..."


def _values(expression: str, frame: FrameType) -> str:
    """Say the plain values of the names in a failed assertion."""
    names = dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*\b", expression))
    values = {n: frame.f_locals[n] for n in names if n in frame.f_locals}
    plain = [
        f"{name} = {value!r}"
        for name, value in values.items()
        if isinstance(value, int | float | str | bytes) and len(repr(value)) <= 40
    ]
    return f" (where {', '.join(plain)})" if plain else ""


# ---- The three doors


def check(what: str, part: Any = None) -> None:
    """Grade a part by its contract, or an answer by the exercise's grader.

    what: a contract ("attention") or an exercise ("2.3").
    part: the part (an object or a name for `load_part`; None: our own) or the answer
    (None: `ex_2_3` of the cell that calls).
    Prints a table, or a line for an exercise: an answer that raises NotImplementedError
    is not done yet, which is no failure. Raises AssertionError when something is wrong
    and LittleLMError when there is no such contract, exercise or answer.
    """
    if re.fullmatch(r"\d+\.\d+", what):
        if part is None:
            caller = inspect.currentframe().f_back
            part = _answer(what, {**caller.f_globals, **caller.f_locals})
        _check_exercise(what, part)
        return
    results = run_contract(what, part)
    print(table(what, results))
    failed = [r for r in results if not r.ok]
    if failed:
        first = f"{_title(failed[0].test)}: {failed[0].message}"
        raise NotCorrect(f"{what}: {len(failed)} of {len(results)} failed; {first}")


def _title(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def table(name: str, results: list[Result]) -> str:
    """Return a contract's results as plain text, a line for each test."""
    passed = sum(r.ok for r in results)
    lines = [f"{name}: {passed} of {len(results)} passed"]
    for result in results:
        lines.append(f"  {'pass' if result.ok else 'FAIL'}  {_title(result.test)}")
        if not result.ok:
            lines.append(f"        {result.message}")
    return "\n".join(lines)


def _answer(exercise: str, names: dict[str, Any]) -> Any:
    name = f"ex_{exercise.replace('.', '_')}"
    if names.get(name) is None:
        raise LittleLMError(f"no {name} here: run the cell that defines it first")
    return names[name]


def load_grader(exercise: str) -> Callable[[Any], None]:
    """Return `exercise_2_3` of `tests/exercises/chapter_02.py` for "2.3".

    Raises LittleLMError: no such exercise, a clone without its tests.
    """
    chapter, number = (int(n) for n in exercise.split("."))
    path = _tests("exercises") / f"chapter_{chapter:02d}.py"
    if not path.is_file():
        raise LittleLMError(f"no exercises for chapter {chapter} in {path.parent}")
    module = _load_file(path, f"littlelm_exercises_{chapter:02d}")
    name = f"exercise_{chapter}_{number}"
    graders = [n for n in vars(module) if n.startswith("exercise_")]
    if name not in graders:
        known = sorted(n.removeprefix("exercise_").replace("_", ".") for n in graders)
        raise LittleLMError(f"no exercise {exercise}: there are {', '.join(known)}")
    return getattr(module, name)


def _check_exercise(exercise: str, answer: Any) -> None:
    grader = load_grader(exercise)
    try:
        with _repeatable():
            grader(answer)
    except NotImplementedError:
        print(f"{exercise}: not done yet")
        return
    except (KeyboardInterrupt, GeneratorExit, SystemExit):
        raise
    except BaseException as error:
        raise NotCorrect(f"{exercise}: {_say(error)}") from None
    print(f"{exercise}: correct")


def check_part_cli(name: str, use: str | None = None) -> int:
    """Grade a part for `littlelm check`; return the exit status, 1 if it broke a test.

    use: what `--with` named, None for our own part. A line for each failing test.
    Raises LittleLMError (which the command prints in one line): no such contract, a
    part that does not import.
    """
    results = run_contract(name, use)
    failed = [r for r in results if not r.ok]
    for result in failed:
        print(f"FAIL  {_title(result.test)}: {result.message}")
    print(f"{name}: {len(results) - len(failed)} of {len(results)} passed")
    return 1 if failed else 0


# ---- A working copy


def practice(chapter: str | int) -> Path:
    """Write a chapter without outputs and without solutions; return the notebook.

    chapter: its number ("02", "2"). The copy goes to practice/ in the clone, beside
    the look of the figures; the chapter itself stays as it is.
    Raises LittleLMError: no such chapter, a copy that is there already (your work is
    never overwritten), jupytext missing.
    """
    folder = ROOT / "chapters"
    sources = {p.stem[:2]: p for p in folder.glob("[0-9][0-9]_*.md")}
    number = str(chapter).zfill(2)
    if number not in sources:
        known = ", ".join(sorted(sources)) or f"none in {folder}: use a clone"
        raise LittleLMError(f"no chapter {chapter} (valid: {known})")
    target = ROOT / "practice" / f"{sources[number].stem}.ipynb"
    if target.exists():
        raise LittleLMError(f"{target} is there already: rename it to start afresh")
    try:
        jupytext = importlib.import_module("jupytext")
    except ModuleNotFoundError as error:
        raise LittleLMError(
            "practice needs jupytext: pip install -e .[book]"
        ) from error
    notebook = jupytext.read(sources[number])
    notebook.cells = [cell for cell in notebook.cells if not _is_solution(cell)]
    notebook.metadata.pop("jupytext", None)  # the copy is paired with nothing
    target.parent.mkdir(exist_ok=True)
    for name in ("course.mplstyle", "figures"):  # what cells name by a relative path
        if (folder / name).is_dir():
            shutil.copytree(folder / name, target.parent / name, dirs_exist_ok=True)
        elif (folder / name).is_file():
            shutil.copy(folder / name, target.parent / name)
    jupytext.write(notebook, target)
    return target


def _is_solution(cell: Any) -> bool:
    """A folded cell that grades its own answer."""
    folded = "hide-cell" in cell.metadata.get("tags", ())
    return folded and re.search(r"""check\(["']\d+\.\d+["']""", cell.source) is not None
