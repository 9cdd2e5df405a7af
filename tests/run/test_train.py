"""Whole small runs in processes of their own: killed, resumed, out of space, spread.

What needs no other process is in the trainer's contract.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import command, prepare_letters, records, run_of, write_run
from torch import nn

from littlelm_core.config import CheckpointError, LittleLMError
from littlelm_core.trainer import (
    Precision,
    Trainer,
    checkpoints,
    is_complete,
    newest_checkpoint,
    train,
)

OWN = '''
import time

class Slow:
    """Leaves time to kill the process in the middle."""

    def on_start(self, trainer): pass
    def on_step(self, trainer, record): time.sleep(0.02)
    def on_validation(self, trainer, record): pass
    def on_end(self, trainer, result): pass
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A prepared folder of two domains, a run file and the script that trains it."""
    folder = tmp_path_factory.mktemp("train")
    prepare_letters(folder, {"up": ("ABCD ", 60), "down": ("abcd ", 60)})
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    write_run(
        folder, "steps = 60", "rows = 2", "grad_accum = 3", "checkpoint_every = 7",
        "validate_every = 20", "sample_every = 30",
    )  # fmt: skip
    return folder


def launch(home, where, *keys, **options):
    return subprocess.Popen(
        command(home, where, *keys), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def curve(where):
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    return [tuple(str(r[k]) for k in keys) for r in records(where)]


def wait_for_step(process, where, step):
    start = time.monotonic()
    while process.poll() is None and time.monotonic() - start < 90:
        last = records(where)
        if last and last[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def test_killed_at_any_moment_it_goes_on_bit_for_bit(home):
    """SIGTERM once, SIGKILL twice, and the run is the one that nobody touched."""
    train(run_of(home, home / "whole"), quiet=True)
    where = home / "killed"
    slow = f'callback.use="{home / "own.py"}:Slow"'
    process = launch(home, where, slow)
    wait_for_step(process, where, 10)
    with pytest.raises(LittleLMError, match=f"another process writes into {where}"):
        train(run_of(home, where), quiet=True)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    saved = int(newest_checkpoint(where).name[-8:])
    assert f"ended at {saved} interrupted" in out
    assert "the same command goes on" in out
    assert saved == records(where)[-1]["step"], "SIGTERM saves the step it ended"
    for step in (saved + 5, saved + 19):
        process = launch(home, where, slow)
        wait_for_step(process, where, step)
        process.kill()
        process.communicate(timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unlucky kill leaves half a save
        at = int(newest_checkpoint(where).name[-8:])
        assert at < 60
        result = train(run_of(home, where), quiet=True)
    assert result.steps == 60
    assert curve(where) == curve(home / "whole")
    for event in ("validation", "sample"):
        a, b = records(home / "whole", event), records(where, event)
        assert a == b, f"{event} records differ"
    a, b = (load_file(newest_checkpoint(w) / "model.safetensors")
            for w in (home / "whole", where))  # fmt: skip
    assert all(torch.equal(a[n], b[n]) for n in a), "the last weights differ"
    a, b = (torch.load(newest_checkpoint(w) / "optimizer.pt")
            for w in (home / "whole", where))  # fmt: skip
    for k, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, b["optimizer"]["state"][k][name])


def test_no_space_while_saving(home):
    """The process may write no file above a limit that the weights do not fit into."""
    resource = pytest.importorskip("resource")
    where = home / "full"
    train(run_of(home, where, "stop_step=7"), quiet=True)
    good = newest_checkpoint(where)
    size = (good / "model.safetensors").stat().st_size

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    process = launch(home, where, preexec_fn=limit)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    line = [x for x in err.splitlines() if x.startswith("error: ")]
    assert len(line) == 1, err
    assert "Traceback" not in err
    assert "step_00000014" in line[0]
    assert "space" in line[0]
    assert is_complete(good)
    assert newest_checkpoint(where) == good, "the previous checkpoint is intact"
    left = sorted(p.name for p in (where / "checkpoints").iterdir())
    assert left == [good.name], "half a checkpoint stays behind"
    assert records(where, "end")[-1]["status"] == "failed"
    assert train(run_of(home, where), quiet=True).steps == 60


def test_processes_share_a_step_and_a_checkpoint(home):
    """Two processes take the steps of one, and one goes on from their checkpoint."""
    where = home / "two"
    keys = ("rows=1", "grad_accum=3", "steps=12", "schedule.total=60")
    done = subprocess.run(
        command(home, where, *keys, ranks=2), capture_output=True, encoding="utf-8",
        timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    train(run_of(home, home / "one", "steps=12", "schedule.total=60"), quiet=True)
    one, two = records(home / "one"), records(where)
    assert len(one) == len(two) == 12, "only the first process writes"
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        assert abs(a["loss"] - b["loss"]) < 1e-5, f"step {a['step']}"
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4
    a, b = records(home / "one", "validation")[-1], records(where, "validation")[-1]
    for domain, score in a["domains"].items():
        assert score["bytes"] == b["domains"][domain]["bytes"]
        assert abs(score["loss"] - b["domains"][domain]["loss"]) < 1e-5
    result = train(run_of(home, where, "steps=14", "schedule.total=60"), quiet=True)
    train(run_of(home, home / "one", "steps=14", "schedule.total=60"), quiet=True)
    assert result.steps == 14
    assert abs(result.final_loss - records(home / "one")[-1]["loss"]) < 1e-5


def test_a_checkpoint_of_another_model(home):
    """Weights that were put into the wrong folder do not load by halves."""
    where = home / "other"
    train(run_of(home, where, "stop_step=2"), quiet=True)
    train(run_of(home, home / "wide", "stop_step=2", "model.dim=64"), quiet=True)
    with pytest.raises(ValueError, match=r"model\.dim"):
        train(run_of(home, where, "model.dim=64"), quiet=True)
    mine, theirs = newest_checkpoint(where), newest_checkpoint(home / "wide")
    weights = (theirs / "model.safetensors").read_bytes()
    (mine / "model.safetensors").write_bytes(weights)
    state = json.loads((mine / "state.json").read_text("utf-8"))
    state["files"]["model.safetensors"] = len(weights)
    state["sha256"]["model.safetensors"] = hashlib.sha256(weights).hexdigest()
    (mine / "state.json").write_text(json.dumps(state), "utf-8")
    with pytest.raises(CheckpointError, match="another model"):
        train(run_of(home, where), quiet=True)


def test_a_run_that_blows_up_stops_and_keeps_a_finite_checkpoint(home):
    where = home / "hot"
    train(run_of(home, where, "stop_step=7"), quiet=True)
    trainer = Trainer(run_of(home, where), quiet=True)
    for group in trainer.own.values():
        group["lr"] = 1e30
    with pytest.raises(LittleLMError, match=r"not finite|were not finite"):
        trainer.fit()
    for folder in checkpoints(where):
        weights = load_file(folder / "model.safetensors")
        assert all(torch.isfinite(t).all() for t in weights.values()), folder.name


def test_what_is_printed_before_it_starts(home, capsys):
    train(run_of(home, home / "said", "stop_step=2"))
    out = capsys.readouterr().out
    for group in ("embedding", "head", "matrix", "norm"):
        assert re.search(rf"^{group} +\d+ +[\d,]+ +0\.003 ", out, re.M), group
    total = re.search(r"^total +\d+ +([\d,]+)", out, re.M)[1]
    trainer = Trainer(run_of(home, home / "said", "stop_step=2"), quiet=True)
    assert total == f"{sum(p.numel() for p in trainer.parameters):,}"
    assert "192 tokens = 2 rows x 32 x 3 micro-batch(es)" in out
    assert "2 steps = 384 tokens, about" in out
    assert f"outputs: {home / 'said'}" in out
    assert "bits per byte: down" in out
    assert out.index("to do:") < out.index("step 1/2")


def test_tensorboard_gets_the_same_curves(home):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    where = home / "board"
    train(run_of(home, where, "stop_step=4", 'callback.use="tensorboard"'), quiet=True)
    folder = str(where / "tensorboard")
    board = event_accumulator.EventAccumulator(folder).Reload()
    losses = [(e.step, e.value) for e in board.Scalars("train/loss")]
    want = [(r["step"], r["loss"]) for r in records(where)]
    assert np.allclose(losses, want, rtol=1e-6)
    assert "bits_per_byte/overall" in board.Tags()["scalars"]
    assert "lr/matrix" in board.Tags()["scalars"]


def test_tensorboard_is_optional(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        train(run_of(home, home / "none", 'callback.use="tensorboard"'), quiet=True)


def test_compile_is_handed_the_loss(monkeypatch):
    """The weights keep their names: it is the loss that is compiled, not the module."""
    model = nn.Linear(2, 2)
    model.loss = lambda: 7
    monkeypatch.setattr(torch, "compile", lambda f, **_: lambda *a, **k: f(*a, **k) + 1)
    loss = Precision(compile=True, dtype="fp32").prepare(model, torch.device("cpu"))
    assert loss() == 8
    assert set(model.state_dict()) == {"weight", "bias"}
