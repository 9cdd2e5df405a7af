"""Every contract rejects the mistakes that it was written against.

`tests/zoo/<part>.py` holds `ZOO = {"mistake": (wrong part, "test_that_must_fail")}`.
The named test must pass on our part and fail on the wrong one, and fail for the
mistake: an error in the zoo's own code would make any test fail and prove nothing.
"""

import functools
from pathlib import Path

import pytest
import torch

from littlelm_core import check

HERE = Path(__file__).parent
NOT_THE_MISTAKE = {
    "AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "SyntaxError",
    "TypeError", "UnboundLocalError",  # the zoo's own code is broken
    "DeadlineExceeded", "FailedHealthCheck", "Flaky", "FlakyFailure", "InvalidArgument",
    "Unsatisfiable",  # hypothesis could not run the test
}  # fmt: skip


@functools.cache
def zoo(name):
    return check._load_file(HERE / f"{name}.py", f"littlelm_zoo_{name}").ZOO


@functools.cache
def contract(name):
    module = check.load_contract(name)
    return check.load_part(module.PART), check.contract_tests(module)


@functools.cache
def ours(name, test):
    part, tests = contract(name)
    return check.run_test(test, tests[test], part)


ANIMALS = [
    pytest.param(path.stem, mistake, id=f"{path.stem}-{mistake}")
    for path in sorted(HERE.glob("*.py"))
    if path.stem != "test_zoo"
    for mistake in zoo(path.stem)
]


@pytest.mark.parametrize("name", check.contracts())
def test_every_contract_has_a_zoo(name):
    assert (HERE / f"{name}.py").is_file(), f"no wrong versions in tests/zoo/{name}.py"
    assert len(zoo(name)) >= 4, f"only {len(zoo(name))} wrong versions of {name}"


@pytest.mark.parametrize("name", check.contracts())
def test_a_contract_has_tests_that_check_can_call(name):
    module = check.load_contract(name)
    tests = check.contract_tests(module)
    other = [n for n in vars(module) if n.startswith("test_") and n not in tests]
    assert not other, f"{other} of {name} take more than `part`: check can't run them"
    assert tests, f"no test in the contract {name}"


@pytest.fixture(autouse=True)
def _autocast_is_off():
    """One of the animals leaves it on: the next ones must not feel it."""
    yield
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize(("name", "mistake"), ANIMALS)
def test_the_contract_rejects(name, mistake):
    wrong, test = zoo(name)[mistake]
    _, tests = contract(name)
    assert test in tests, f"no test {test} in the contract {name}"
    assert ours(name, test).ok, f"our own part fails too: {ours(name, test).message}"
    result = check.run_test(test, tests[test], wrong)
    assert not result.ok, f"{test} accepts a part with this mistake"
    assert result.error not in NOT_THE_MISTAKE, (
        f"{test} fails for another reason, {result.error}: {result.message}"
    )
