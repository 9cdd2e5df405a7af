"""One thread for every test: on busy cores two OpenMP threads cost five times more."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)


def pytest_addoption(parser):
    """Add --part, which grades another part by the contracts that are run."""
    parser.addoption("--part", help="file.py:Name or pkg.mod:Name instead of our part")
