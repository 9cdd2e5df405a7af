"""One thread for every test: on busy cores two OpenMP threads cost five times more."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
