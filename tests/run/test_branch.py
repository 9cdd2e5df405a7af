"""Decay branches from the command line: `tiny`, shrunk, in processes of their own."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import prepare_letters

from littlelm_core.cli import main
from littlelm_core.schedule import wsd
from littlelm_core.trainer import newest_checkpoint

STEPS = 40
SMALL = (
    f"steps={STEPS}", "rows=2", "grad_accum=2", "checkpoint_every=2",
    "checkpoints_kept=99", "validate_every=-1", "sample_every=-1", "model.dim=32",
    "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=64",
    "model.context=32", "tokenizer.vocab_size=260", "precision.dtype=fp32",
    "schedule.use=wsd", "schedule.warmup=4", "schedule.decay=0",
    "schedule.shape=1-sqrt", "mixture.use=proportional",
)  # fmt: skip
SLOW = """
import time

from littlelm_core.report import Callback


class Slow(Callback):
    def on_step(self, trainer, record):
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with prepared data, and in it the trunk: tiny with its rate held."""
    folder = tmp_path_factory.mktemp("branch")
    prepare_letters(folder, {"text": ("abcd ", 60)}, seed=6)
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    littlelm(folder, "run_dir=runs/tiny", "schedule.decay=0")
    return folder


def arguments(*keys):
    return ["train", "tiny", "data.source=data", *SMALL, *keys]


def start(home, *keys):
    """The command in a process of its own, which can be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "littlelm_core", *arguments(*keys)], cwd=home,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def run(home, *keys):
    """The command in this process: (exit status, what it printed, errors)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(home),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main(arguments(*keys))
    return left.value.code or 0, out.getvalue(), err.getvalue()


def littlelm(home, *keys):
    status, out, err = run(home, *keys)
    assert status == 0, err
    return out


def refused(home, *keys):
    """The one line of a command that must fail."""
    status, _, err = run(home, *keys)
    lines = err.strip().splitlines()
    assert status == 1, "it was not refused"
    assert len(lines) == 1, err
    return lines[0]


def curve(where):
    lines = (where / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if r["event"] == "train"]
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    return [{k: r[k] for k in keys} for r in records]


def checkpoint(step):
    return f"resume=runs/tiny/checkpoints/step_{step:08d}"


def test_ends_of_5_10_20_and_50_percent(home):
    trunk = curve(home / "runs" / "tiny")
    peak = max(r["lr"]["matrix"] for r in trunk)
    for percent in (5, 10, 20, 50):
        decay = STEPS * percent // 100
        where = f"runs/last{percent}"
        keys = checkpoint(STEPS - decay), f"schedule.decay={decay}"
        out = littlelm(home, *keys, f"run_dir={where}")
        assert f"going on from step_{STEPS - decay:08d}" in out
        branch = curve(home / where)
        begins = STEPS - decay
        assert branch[:begins] == trunk[:begins], "its log begins with the trunk's"
        assert branch[begins] == trunk[begins], (
            f"{percent} %: the first step is not the trunk's next one: "
            f"{branch[begins]}, {trunk[begins]}"
        )
        for record in branch:
            share = wsd(record["step"] - 1, STEPS, 4, decay, "1-sqrt")
            assert record["lr"]["matrix"] == pytest.approx(peak * share)
        assert len(branch) == STEPS


def test_a_branch_killed_at_any_moment_is_the_run_with_its_schedule(home):
    """SIGKILL before its first checkpoint and after, then SIGTERM: nothing is lost."""
    littlelm(home, "schedule.decay=20", "run_dir=runs/whole")
    where = home / "runs" / "killed"
    keys = (checkpoint(20), "schedule.decay=20", "run_dir=runs/killed")
    slow = ("checkpoint_every=3", "callback.use=slow.py:Slow")
    for number, step in (
        (signal.SIGKILL, 21), (signal.SIGKILL, 28), (signal.SIGTERM, 33),
    ):  # fmt: skip
        process = start(home, *keys, *slow)
        begun = time.monotonic()
        while not (where / "metrics.jsonl").exists() or (
            max((r["step"] for r in whole_lines(where)), default=0) < step
        ):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - begun < 90, f"step {step} was not reached"
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
        newest = newest_checkpoint(where)
        own = 20 if newest is None else int(newest.name[-8:])
        assert own >= (20 if step == 21 else step - 3), f"{number.name}: at {own}"
    out = littlelm(home, *keys)
    assert f"going on from step_{own:08d}" in out, "its own newest, not the trunk's"
    assert curve(where) == curve(home / "runs" / "whole")
    a, b = (load_file(newest_checkpoint(home / "runs" / n) / "model.safetensors")
            for n in ("whole", "killed"))  # fmt: skip
    assert all(torch.equal(a[name], b[name]) for name in a), "the last weights differ"


def whole_lines(where):
    lines = (Path(where) / "metrics.jsonl").read_text("utf-8").split("\n")[:-1]
    return [r for r in map(json.loads, lines) if r["event"] == "train"]


def test_refusals_are_one_line(home):
    down = "schedule.decay=10"
    line = refused(home, checkpoint(36), down, "run_dir=runs/no")
    assert "step 36" in line
    assert "begins at step 30" in line
    line = refused(home, checkpoint(36), "steps=36", "run_dir=runs/no")
    assert "ends at step 36" in line
    line = refused(home, checkpoint(30), down, "run_dir=runs/no", "seed=9")
    assert "seed 1 -> 9" in line
    line = refused(home, checkpoint(30), down, "run_dir=runs/tiny")
    assert "another run_dir" in line
    line = refused(home, checkpoint(31), down, "run_dir=runs/no")
    assert "step_00000031 (did you mean" in line
    line = refused(home, "resume=runs/nothing", down, "run_dir=runs/no")
    assert "runs/nothing" in line
    assert not (home / "runs" / "no" / "checkpoints").exists()
    littlelm(
        home, "resume=runs/tiny", "steps=44", "schedule.decay=4", "run_dir=runs/on"
    )
    assert len(curve(home / "runs" / "on")) == 44, "a folder stands for its newest"


def test_a_branch_of_a_run_with_a_group_that_never_moves(home):
    muon = "optimizer.use=muon", "optimizer.matrix.lr=0.0"
    littlelm(home, *muon, "run_dir=runs/still", "stop_step=6")
    littlelm(
        home, *muon, "resume=runs/still", "steps=8", "schedule.decay=2",
        "run_dir=runs/still-2",
    )  # fmt: skip
    assert len(curve(home / "runs" / "still-2")) == 8
