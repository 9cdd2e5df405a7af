"""The tests of whole runs share small_runs.py, processes.py and others."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
