"""The part that a contract grades: the module's own, or the one named by --part."""

import pytest

from littlelm_core.check import KIND_OF, load_part


@pytest.fixture(scope="module")
def part(request):
    """Resolve the contract's PART; `--part file.py:Name` puts another in its place.

    One part a module: hypothesis calls a test many times with the same fixture.
    """
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    use = request.config.getoption("--part") or request.module.PART
    return load_part(use, KIND_OF.get(name, name))


@pytest.fixture(autouse=True)
def _seeded():
    """Start every test from the same random state, as `check` does."""
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
