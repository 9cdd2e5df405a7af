"""Small runs: text of a few letters, a run file, a script that trains it, its log."""

import json
import sys
from pathlib import Path

import numpy as np
from processes import JOIN, LEAVE, torchrun

from littlelm_core.config import load_run
from littlelm_core.ingest import prepare
from littlelm_core.tokenizer import Tokenizer

SCRIPT = """
import sys

from littlelm_core.config import LittleLMError, load_run
from littlelm_core.trainer import train

try:
    result = train(load_run(sys.argv[1], sys.argv[2:]))
except LittleLMError as error:
    sys.exit(f"error: {error}")
print("ended at", result.steps, "interrupted" if result.interrupted else "finished")
"""
TABLES = """
[tokenizer]
vocab_size = 260
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1
ffn_dim = 64
context = 32
[optimizer]
lr = 3e-3
[schedule]
warmup = 5
[precision]
dtype = "fp32"
"""


def prepare_letters(folder, domains, seed=5, lengths=(20, 200)):
    """Write and prepare texts of single bytes; return the prepared folder.

    domains: {name: (its letters, number of documents)}. lengths: from, up to.
    """
    rng = np.random.default_rng(seed)
    for domain, (letters, files) in domains.items():
        (folder / domain).mkdir()
        for i in range(files):
            text = "".join(rng.choice(list(letters), rng.integers(*lengths)))
            (folder / domain / f"{i}.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    sources = [f"{domain}={folder / domain}" for domain in domains]
    prepare(sources, folder / "data", tokenizer, workers=1, validation_share=0.1)
    return folder / "data"


def write_run(folder, *lines):
    """Write run.toml with these lines at its top, for folder/data, and the scripts."""
    top = [*lines, f'data.source = "{folder / "data"}"']
    (folder / "run.toml").write_text("\n".join(top) + TABLES, encoding="utf-8")
    alone = "import torch\n\ntorch.set_num_threads(1)\n" + SCRIPT
    (folder / "script.py").write_text(alone, encoding="utf-8")
    (folder / "ranks.py").write_text(JOIN + SCRIPT + LEAVE, encoding="utf-8")


def run_of(home, where, *keys):
    """Return the run of home/run.toml with these changes, in home/where."""
    return load_run(home / "run.toml", [f"run_dir={home / where}", *keys])


def command(home, where, *keys, ranks=1):
    """Return the command line that trains `run_of` in processes of its own."""
    alone = [sys.executable, str(home / "script.py")]
    start = alone if ranks == 1 else [*torchrun(ranks), str(home / "ranks.py")]
    return [*start, str(home / "run.toml"), f"run_dir={home / where}", *keys]


def records(where, event="train"):
    """Return what a run has logged of one event, while it is running too."""
    path = Path(where) / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # half a line of the process that is writing it
    return [r for r in found if r["event"] == event]
