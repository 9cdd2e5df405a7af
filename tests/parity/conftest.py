"""A real model for the tests that ask for one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "run"))

from smollm2 import smollm2_folder  # noqa: F401
