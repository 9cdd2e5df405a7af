"""Contract of chapter 06: whole steps, whole checkpoints, and a log without gaps.

The part is the module, or a Trainer class (its module's functions are then graded with
it). Every run here is a model of 20,000 numbers on text generated from a seed.
"""

import contextlib
import functools
import inspect
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from littlelm_core.config import (
    CheckpointError,
    ConfigError,
    LittleLMError,
    RunConfig,
    load_object,
)
from littlelm_core.ingest import Prepared
from littlelm_core.shards import write_shard
from littlelm_core.tokenizer import Tokenizer

PART = "littlelm_core.trainer"

CONTEXT, ROWS = 16, 4
FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends

OWN_PARTS = '''
"""Parts of a run, as somebody who trains would write them."""

import math
import os

import torch

from littlelm_core.config import ConfigError


class Ragged:
    """Three batches with very different numbers of valid targets, then the end."""

    def __init__(self, shards, batch_rows, row_len, seed, rank, world, ends: int = 12):
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(256, (12, row_len + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for row in range(12):  # row r keeps r + 1 targets
            targets[row, row + 1:] = -100
        self.inputs, self.targets = ids[:ends, :-1], targets[:ends]
        self.rows, self.at = batch_rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        part = slice(self.at, self.at + self.rows)
        if self.at >= len(self.inputs):
            raise StopIteration
        self.at += self.rows
        return self.inputs[part], self.targets[part]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Recorder:
    """Sends this process a signal after a step, and keeps what it was told."""

    def __init__(self, at: int = -1, number: int = 15):
        self.at, self.number, self.seen = at, number, []

    def on_start(self, trainer):
        self.seen.append("start")

    def on_step(self, trainer, record):
        self.seen.append(record["step"])
        if record["step"] == self.at:
            os.kill(os.getpid(), self.number)

    def on_validation(self, trainer, record):
        self.seen.append("validation")

    def on_end(self, trainer, result):
        self.seen.append("end")


class NotFinite:
    """Spoils one gradient after some steps, given as "3,4"."""

    def __init__(self, after: str):
        self.steps = [int(s) for s in after.split(",")]

    def on_start(self, trainer):
        def spoil(grad):
            return grad * float("nan") if trainer.step in self.steps else grad
        trainer.parameters[3].register_hook(spoil)

    def on_step(self, trainer, record):
        pass

    def on_validation(self, trainer, record):
        pass

    def on_end(self, trainer, result):
        pass


class Deaf:
    """A callback without hooks."""


def flat(step, total, level: float = 1.0):
    return level


def trapezoid(step, total, warmup: int = 2, decay: int = 0):
    rate = min((step + 1) / warmup, 1.0)
    return rate * min((total - step) / decay, 1.0) if decay else rate


def several(step, total, keys: str = "lr,momentum,weight_decay"):
    """Momentum rises from .5 to .9, the decay of weights falls to nothing."""
    way = step / total
    values = {"lr": 1.0, "momentum": 0.5 + 0.4 * way, "weight_decay": 1 - way}
    return {key: values.get(key, 1.0) for key in keys.split(",")}


def broken(step, total, at: int, gives: str = ""):
    """No share of the rate at one step: what float() makes of a text, or None."""
    return (float(gives) if gives else None) if step == at else 1.0


def cosine(step, total, warmup: int = 0):
    if warmup > total:
        raise ConfigError(f"warmup = {warmup} is longer than total = {total}")
    if step < warmup:
        return (step + 1) / warmup
    x = (step - warmup) / max(total - warmup, 1)
    return (1 + math.cos(math.pi * min(x, 1))) / 2
'''


def cosine(step, total, warmup):
    """What the run's own schedule, of the file above, gives."""
    return load_object(f"{own_parts()}:cosine")(step, total, warmup)


def home(part):
    """The module of functions that goes with the part."""
    return part if inspect.ismodule(part) else sys.modules[part.__module__]


@functools.cache
def own_parts():
    path = Path(FOLDER.name) / "own_parts.py"
    path.write_text(OWN_PARTS, encoding="utf-8")
    return path


def use(name, **keys):
    return {"use": f"{own_parts()}:{name}", **keys}


@functools.cache
def prepared():
    """Bytes and two pairs of them; about 120 rows to train on, and two domains.

    The pairs make a token of two bytes, so that bytes and tokens differ.
    """
    rng = np.random.default_rng(3)
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, "é".encode(): 257}
    tokenizer = Tokenizer(ranks)
    letters = list("ababcdefg éü")

    def document():
        text = "".join(rng.choice(letters, rng.integers(4, 50)))
        return [tokenizer.bos_id, *tokenizer.encode(text)]

    def shard(name, documents):
        path = Path(FOLDER.name) / f"{name}-00000.shard"
        return write_shard(path, documents, tokenizer.vocab_size)

    train = shard("train-a", [document() for _ in range(70)])
    validation = {
        "a": [shard("validation-a", [document() for _ in range(7)])],
        "b": [shard("validation-b", [document() for _ in range(3)])],
    }
    return Prepared(Path(FOLDER.name), tokenizer, [train], validation, {})


def make_run(folder, **keys):
    """A run of 8 steps of 2 micro-batches; keys go on top."""
    table = {
        "name": "contract",
        "run_dir": str(folder),
        "steps": 8,
        "rows": ROWS,
        "grad_accum": 2,
        "model": {
            "use": "llama",
            "dim": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "ffn_dim": 32,
            "context": CONTEXT,
        },
        "tokenizer": {"use": "bpe", "vocab_size": 262},
        "optimizer": {"use": "torch.optim:AdamW", "lr": 0.01, "weight_decay": 0.1},
        "schedule": use("cosine", warmup=2),
        "precision": {"use": "autocast", "dtype": "fp32"},
    }
    for key, value in keys.items():
        both = isinstance(value, dict) and "use" not in value
        table[key] = {**table.get(key, {}), **value} if both else value
    return RunConfig.model_validate(table)


def make(part, folder, own_data=None, **keys):
    data = own_data or prepared()
    return home(part).Trainer(make_run(folder, **keys), data, quiet=True)


@contextlib.contextmanager
def scratch():
    """A folder, and a page that costs nothing: these tests are about the loop."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("littlelm_core.report.page.write_report"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield Path(folder)


def records(folder, event="train"):
    lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["event"] == event]


def curve(folder):
    keys = ("step", "tokens", "loss", "lr", "grad_norm", "skipped_steps")
    return [{k: r[k] for k in keys} for r in records(folder)]


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def refused(kind, *words):
    """A context in which an error of this kind must come whose line has these words."""

    @contextlib.contextmanager
    def expects():
        said = None
        try:
            yield
        except kind as error:
            said = str(error)
        assert said is not None, f"no {kind.__name__} that says {words}"
        missing = [w for w in words if w not in said]
        assert not missing, f"the error does not say {missing}: {said}"
        assert "\n" not in said, f"the error is not one line: {said}"

    return expects()


# ---- The step


def test_accumulation_is_one_big_batch(part):
    """Micro-batches with 10, 26, 42 targets give what one batch of all 78 gives."""
    after, losses = [], []
    for rows, accum in ((12, 1), (4, 3), (1, 12)):
        with scratch() as folder:
            trainer = make(
                part, folder, rows=rows, grad_accum=accum, steps=1,
                loader=use("Ragged"), clip=-1.0, schedule=use("flat"),
                optimizer={"use": "torch.optim:SGD", "lr": 1.0},
            )  # fmt: skip
            losses.append(trainer.fit().final_loss)
            after.append(weights(trainer))
    for rows, other, loss in zip((4, 1), after[1:], losses[1:], strict=True):
        for name, value in after[0].items():
            assert torch.allclose(value, other[name], atol=1e-6), (
                f"{name} differs between one batch of 12 rows and micro-batches of "
                f"{rows}: divide by the valid targets of all micro-batches"
            )
        assert abs(loss - losses[0]) < 1e-5, "the logged loss depends on the split"


def test_a_short_last_window_is_a_step(part):
    """5 rows in micro-batches of 2, 4 of them a step: the second window has 1 of 4."""
    with scratch() as folder:
        sgd = {"use": "torch.optim:SGD", "lr": 1.0}
        keys = {"clip": -1.0, "optimizer": sgd, "schedule": use("flat")}
        loader = use("Ragged", ends=5)
        trainer = make(part, folder / "a", rows=1, grad_accum=4, loader=loader, **keys)
        result = trainer.fit()
        assert result.steps == 2, f"{result.steps} steps of 5 batches in windows of 4"
        assert result.tokens == 15, "tokens are the valid targets of both windows"
        whole = make(part, folder / "b", rows=5, grad_accum=1, loader=loader, **keys)
        ids, targets = whole.loader.inputs, whole.loader.targets
        want = []
        for part_of in (slice(0, 4), slice(4, 5)):
            whole.optimizer.zero_grad()
            loss = whole.model.loss(ids[part_of], targets[part_of], reduction="mean")
            loss.backward()
            whole.optimizer.step()
            want.append(float(loss))
        got = [r["loss"] for r in records(folder / "a")]
        assert np.allclose(got, want, atol=1e-5), f"losses {got}, by hand {want}"
        for name, value in weights(whole).items():
            close = torch.allclose(value, weights(trainer)[name], atol=1e-5)
            assert close, f"{name}: the short window is not divided by its own targets"


def test_tokens_per_step_must_come_out(part):
    accumulation = home(part).accumulation
    with scratch() as folder:
        run = make_run(folder, tokens_per_step=192, grad_accum=-1)
        assert accumulation(run, CONTEXT) == 3, "192 tokens are 3 x 4 rows x 16"
        assert accumulation(run, CONTEXT, 3) == 1, "192 tokens on 3 processes"
        assert accumulation(make_run(folder, grad_accum=-1), CONTEXT) == 1
        with refused(ConfigError, "tokens_per_step", "192"):
            accumulation(run, CONTEXT, 2)
        with refused(ConfigError, "tokens_per_step", "200"):
            make(part, folder, tokens_per_step=200, grad_accum=-1)
        with refused(ConfigError, "tokens_per_step", "256"):
            make(part, folder, tokens_per_step=256, grad_accum=2)


def test_clipping_is_global_once_and_logged_before(part):
    with scratch() as folder:
        keys = {
            "optimizer": {"use": "torch.optim:SGD", "lr": 1.0},
            "schedule": use("flat"),
            "steps": 1,
        }
        norms = {}
        for clip in (-1.0, 0.25):
            trainer = make(part, folder / str(clip), clip=clip, **keys)
            before = weights(trainer)
            trainer.fit()
            moved = [weights(trainer)[n] - before[n] for n in before]
            norms[clip] = math.sqrt(sum(float((m**2).sum()) for m in moved))
        logged = [records(folder / str(c))[0]["grad_norm"] for c in norms]
        assert norms[-1.0] > 0.5, "the test needs a gradient that is clipped"
        assert abs(norms[0.25] - 0.25) < 1e-3, (
            f"a step of rate 1 moved by {norms[0.25]:.4f}, clip = 0.25: one norm over "
            "all parameters, after all micro-batches"
        )
        assert np.allclose(logged, norms[-1.0], rtol=1e-4), (
            f"logged {logged}, the norm before clipping is {norms[-1.0]:.4f}"
        )


def test_a_step_that_is_not_finite_changes_nothing(part):
    with scratch() as folder:
        keys = {
            "steps": 4,
            "optimizer": {"use": "torch.optim:AdamW", "lr": 0.01, "weight_decay": 0.5},
        }
        trainer = make(part, folder, callback=(use("NotFinite", after="2"),), **keys)
        kept = []

        def keep(trainer, record):
            state = trainer.optimizer.state_dict()["state"]
            kept.append((weights(trainer), {k: dict(v) for k, v in state.items()}))
            kept[-1][1].update(
                {k: {n: t.clone() for n, t in v.items()} for k, v in state.items()}
            )

        trainer.report.callbacks[0].on_step = keep
        result = trainer.fit()
        (w2, s2), (w3, s3), (w4, _) = kept[1], kept[2], kept[3]
        assert same(w2, w3), "a gradient was NaN and the weights moved (or decayed)"
        for k in s2:
            for name, value in s2[k].items():
                assert torch.equal(value, s3[k][name]), (
                    f"a gradient was NaN and the optimizer's {name} changed"
                )
        assert not same(w3, w4), "the step after a refused one must go on"
        assert result.skipped_steps == 1, "skipped steps are counted in the result"
        got = [r["skipped_steps"] for r in records(folder)]
        assert got == [0, 0, 1, 1], f"skipped_steps in the log: {got}"
        assert records(folder)[2]["loss"] is None, "JSON has no NaN: log null"
        assert result.steps == 4, "the loop counts a refused step: its data is gone"
        assert math.isfinite(result.final_loss)


def test_several_in_a_row_stop_the_run(part):
    with scratch() as folder:
        keys = {"checkpoint_every": 2, "max_skipped": 3, "validation_tokens": 16}
        apart = make(part, folder / "a", callback=(use("NotFinite", after="2,3,5,6"),),
                     **keys)  # fmt: skip
        assert apart.fit().skipped_steps == 4, "two, then two: never three in a row"
        row = make(part, folder / "b", callback=(use("NotFinite", after="3,4,5"),),
                   **keys)  # fmt: skip
        with refused(LittleLMError, "3 steps in a row", "rate"):
            row.fit()
        newest = home(part).newest_checkpoint(folder / "b")
        assert newest is not None, "the last good checkpoint must stay"
        assert records(folder / "b", "end")[-1]["status"] == "failed"


def test_weights_that_are_not_finite_are_never_written(part):
    with scratch() as folder:
        trainer = make(part, folder, checkpoint_every=2, steps=4)
        trainer.take_step()
        trainer.save()
        good = home(part).newest_checkpoint(folder)
        trainer.take_step()
        with torch.no_grad():
            trainer.parameters[0].view(-1)[0] = math.inf
        with refused(CheckpointError, "not finite"):
            trainer.save()
        assert home(part).newest_checkpoint(folder) == good
        assert [p.name for p in (folder / "checkpoints").iterdir()] == [good.name]


# ---- Groups, precision, schedule


def test_every_parameter_is_in_one_group(part):
    groups_of = home(part).parameter_groups
    with scratch() as folder:
        full = {"residual_scales": True, "value_embeddings": True, "layers": 2}
        for shape in ({}, full, {**full, "tied": True}):
            model = make(part, folder / str(len(shape)), model=shape).model
            options = {"lr": 0.1, "weight_decay": 0.3, "matrix": {"lr": 0.2}}
            groups, shared = groups_of(model, options)
            ids = [id(p) for g in groups for p in g["params"]]
            assert len(ids) == len(set(ids)), "a parameter is in two groups"
            assert set(ids) == {id(p) for p in model.parameters()}, (
                "a parameter is in no group: it would never learn"
            )
            assert shared == {"lr": 0.1, "weight_decay": 0.3}, "keys of all groups"
            by_name = {g["name"]: g for g in groups}
            assert by_name["matrix"]["lr"] == 0.2, "[optimizer.matrix] has its own lr"
            assert by_name["norm"]["weight_decay"] == 0.0, "gains must not decay to 0"
            assert "weight_decay" not in by_name["matrix"], "matrices take the shared"
            assert ("scalars" in by_name) == bool(shape)
            if shape:
                assert by_name["scalars"]["weight_decay"] == 0.0
        own, _ = groups_of(model, {"lr": 1.0, "norm": {"weight_decay": 0.7}})
        decay = {g["name"]: g.get("weight_decay") for g in own}
        assert decay["norm"] == 0.7, "a table that says so decays norms"
        stranger = nn.Module()
        stranger.mystery = nn.Parameter(torch.zeros(2))
        with refused(ValueError, "mystery"):
            groups_of(stranger, {"lr": 1.0})


def test_decay_is_decoupled_and_spares_gains(part):
    """With all gradients 0, AdamW leaves only the decay: p(1 - lr · decay)."""
    with scratch() as folder:
        loader = use("Ragged", ends=4)
        trainer = make(
            part, folder, steps=1, rows=4, grad_accum=1, loader=loader,
            schedule=use("flat"),
            optimizer={"use": "torch.optim:AdamW", "lr": 0.1, "weight_decay": 0.5},
        )  # fmt: skip
        trainer.loader.targets.fill_(-100)  # no valid target: loss 0, gradient 0
        before = weights(trainer)
        result = trainer.fit()
        assert result.skipped_steps == 0, "no valid target is a loss of 0, no NaN"
        for name, value in weights(trainer).items():
            factor = 1.0 if "norm" in name else 1 - 0.1 * 0.5
            assert torch.allclose(value, before[name] * factor), f"{name} * {factor}"


def test_the_rate_is_a_function_of_the_step(part):
    with scratch() as folder:
        keys = {
            "optimizer": {
                "use": "torch.optim:AdamW", "lr": 0.01, "head": {"lr": 0.003}
            },
            "validation_tokens": 16,
        }  # fmt: skip
        make(part, folder, stop_step=3, **keys).fit()
        make(part, folder, callback=(use("NotFinite", after="4"),), **keys).fit()
        for record in records(folder):
            want = cosine(record["step"] - 1, 8, 2)
            rates = record["lr"]
            assert rates["matrix"] == 0.01 * want, (
                f"step {record['step']}: rate {rates['matrix']}, peak 0.01 * {want}"
            )
            assert rates["head"] == 0.003 * want, "each group has its own peak"
        got = [r["lr"]["matrix"] for r in records(folder)]
        assert got[0] > 0, "the first step must not be lost"
        assert max(got) == 0.01, "the peak is reached exactly"


def test_schedule_total_and_stop_are_separate(part):
    with scratch() as folder:
        keys = {"schedule": {"total": 20}, "steps": 8, "stop_step": 5}
        result = make(part, folder, **keys).fit()
        assert result.steps == 5
        last = records(folder)[-1]["lr"]["matrix"]
        assert last == 0.01 * cosine(4, 20, 2), "the curve belongs to schedule.total"
        with refused(ConfigError, "warmup"):
            make(part, folder / "b", schedule={"warmup": 9})


def test_a_schedule_that_is_none_is_refused_at_once(part):
    """At the first and the last step before the data, at another when it comes."""
    with scratch() as folder:
        for gives in ("", "nan", "inf", "-0.5"):
            for at in (0, 7):
                run = make_run(folder, schedule=use("broken", at=at, gives=gives))
                where = f"{home(part).__name__}.prepare_run"
                with (
                    mock.patch(where, side_effect=OSError("the data first")),
                    refused(ConfigError, "schedule.use", f"step {at}"),
                ):
                    home(part).Trainer(run, quiet=True)
        trainer = make(part, folder, schedule=use("broken", at=3, gives="nan"))
        with refused(ConfigError, "schedule.use", "step 3"):
            trainer.fit()


def test_a_schedule_may_set_momentum_and_weight_decay(part):
    """With a decay of 0.5 on matrices alone, a gain's stays 0 whatever its share."""
    with scratch() as folder:
        sgd = {"use": "torch.optim:SGD", "lr": 0.1, "momentum": 0.3}
        keys = {"optimizer": {**sgd, "weight_decay": 0.5}, "validation_tokens": 16}
        trainer = make(part, folder / "a", schedule=use("several"), **keys)
        groups = {g["name"]: g for g in trainer.optimizer.param_groups}
        used, real = [], trainer.optimizer.step

        def step():
            pairs = [(groups[n]["momentum"], groups[n]["weight_decay"])
                     for n in ("matrix", "norm")]  # fmt: skip
            used.append(pairs)
            return real()

        trainer.optimizer.step = step
        trainer.fit()
        for at, ((momentum, decay), (_, gains)) in enumerate(used):
            want = 0.5 + 0.4 * at / 8, 0.5 * (1 - at / 8)
            assert (momentum, decay) == want, (
                f"step {at} runs with momentum {momentum} and weight decay {decay}, "
                f"the schedule says {want}"
            )
            assert gains == 0.0, "a share of no decay is no decay"
        for at, record in enumerate(records(folder / "a")):
            for key in ("momentum", "weight_decay"):
                said = record.get(key, {}).get("matrix")
                now = used[at][0][key == "weight_decay"]
                assert said == now, f"the log of step {at} has {key} {said}, not {now}"
        cut = {**keys, "stop_step": 4}
        make(part, folder / "b", schedule=use("several"), **cut).fit()
        plain = make(part, folder / "b", schedule=use("flat"), **keys)
        plain.take_step()
        group = plain.optimizer.param_groups[0]
        assert (group["momentum"], group["weight_decay"]) == (0.3, 0.5), (
            "a schedule that says nothing leaves the run file's own values, also after "
            "a checkpoint that another one had changed"
        )


def test_a_mapping_has_known_keys_that_some_group_has(part):
    with scratch() as folder:
        for keys in ("momentum", "lr,beta", "beta"):
            with refused(ConfigError, "schedule.use", "step 0", "weight_decay"):
                make(part, folder, schedule=use("several", keys=keys))
        adam = {"use": "torch.optim:AdamW", "lr": 0.01}
        with refused(ConfigError, "momentum", "AdamW"):
            make(part, folder, schedule=use("several"), optimizer=adam)
        make(part, folder, schedule=use("several", keys="lr,weight_decay"))


def test_masters_in_bf16_are_asked_for_by_name(part):
    """Matrices alone, a tied one once; saved as they are; exact after a resume."""
    with scratch() as folder:
        full = {"residual_scales": True, "value_embeddings": True, "tied": True}
        half = {"masters": "bf16", "dtype": "bf16"}
        keys = {"model": full, "precision": half}
        trainer = make(part, folder / "whole", **keys)
        trainer.fit()
        for name, value in trainer.model.named_parameters():
            want = torch.bfloat16 if value.ndim >= 2 else torch.float32
            assert value.dtype == want, f"{name} of shape {value.shape}: {value.dtype}"
        named = [n for n, _ in trainer.model.named_parameters()]
        assert len(named) == len(trainer.parameters), "the tied matrix was split"
        newest = home(part).newest_checkpoint(folder / "whole")
        saved = home(part).load_file(newest / "model.safetensors")
        assert saved["embedding.weight"].dtype == torch.bfloat16, "half the bytes"
        model, *_ = home(part).load_checkpoint(folder / "whole")
        assert torch.equal(model.embedding.weight, saved["embedding.weight"].float())
        make(part, folder / "cut", stop_step=3, **keys).fit()
        make(part, folder / "cut", **keys).fit()
        assert curve(folder / "cut") == curve(folder / "whole"), "a resume in bf16"
        auto = make(
            part, folder / "auto", precision={**half, "dtype": "auto"}
        ).precision
        with auto.context():
            kind = torch.get_autocast_dtype(trainer.device.type)
            assert torch.is_autocast_enabled(trainer.device.type)
            assert kind == torch.bfloat16, "bf16 weights are multiplied in bf16"
        fp32 = {"masters": "bf16", "dtype": "fp32"}
        with refused(ConfigError, "masters", "dtype"):
            make(part, folder / "no", precision=fp32)
        with refused(ConfigError, "masters", "fp8"):
            make(part, folder / "no", precision={"masters": "fp8"})


def test_the_norm_of_bf16_gradients_is_summed_in_fp32(part):
    """In bf16 a length of 300 numbers near 1 is 17.25 or 17.375, not 17.32."""
    weights = [nn.Parameter(torch.zeros(150, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    norm = home(part).clip_gradients(weights, -1.0)
    assert math.isclose(norm, math.sqrt(300), rel_tol=1e-6), f"norm {norm}"


def test_masters_are_fp32_and_formats_are_checked(part):
    with scratch() as folder:
        losses = {}
        for dtype in ("fp32", "bf16", "auto"):
            keys = {"precision": {"dtype": dtype}, "steps": 3}
            trainer = make(part, folder / dtype, **keys)
            losses[dtype] = trainer.fit().final_loss
            for name, value in weights(trainer).items():
                assert value.dtype == torch.float32, f"{name} is {value.dtype}"
            state = trainer.optimizer.state_dict()["state"][0]
            assert state["exp_avg"].dtype == torch.float32
        assert losses["bf16"] != losses["fp32"], "bf16 must reach the products"
        # Products of 8-bit mantissas: relative errors of 2**-9 in each of a few sums.
        assert abs(losses["bf16"] - losses["fp32"]) < 0.02 * losses["fp32"]
        assert losses["auto"] in (losses["bf16"], losses["fp32"])
        with refused(ConfigError, "fp16"):
            make(part, folder / "no", precision={"dtype": "fp16"})


# ---- Checkpoints


def test_resume_is_exact_to_the_bit(part):
    """Stopped in the middle of an epoch, under accumulation, at several places.

    24 steps of 8 rows are more than one epoch of this data.
    """
    with scratch() as folder:
        keys = {"steps": 24, "schedule": {"total": 24}, "validation_tokens": 16}
        whole = make(part, folder / "whole", **keys)
        whole.fit()
        assert whole.loader.epoch >= 1, "the test must cross an epoch"
        broken = folder / "broken"
        for stop in (1, 7, 19, -1):
            # The rest of the process must not matter: only what is on the disk.
            torch.manual_seed(1000 + stop)
            trainer = make(part, broken, stop_step=stop, **keys)
            trainer.fit()
        for a, b in zip(curve(folder / "whole"), curve(broken), strict=True):
            assert a == b, f"after a resume step {b['step']} is {b}, unbroken {a}"
        assert same(weights(whole), weights(trainer)), "the last weights differ"
        a, b = (t.optimizer.state_dict()["state"] for t in (whole, trainer))
        for k in a:
            assert all(torch.equal(a[k][n], b[k][n]) for n in a[k]), "optimizer state"
        assert torch.equal(torch.get_rng_state(), whole.state()[0]["rng"])


def test_a_killed_run_leaves_no_gap_and_no_double_point(part):
    """What ran after the last checkpoint is taken again, and logged once."""
    with scratch() as folder:
        keys = {"checkpoint_every": 3, "validate_every": 3, "validation_tokens": 16}
        make(part, folder / "whole", **keys).fit()
        make(part, folder / "cut", stop_step=3, **keys).fit()
        killed = make(part, folder / "cut", **keys)
        killed.report.start()
        for _ in range(2):  # steps 4 and 5, and then the power goes
            killed.report.tell("train", **killed.take_step())
        with (folder / "cut" / "metrics.jsonl").open("a") as file:
            file.write('{"event": "train", "step": 6, "tok')
        make(part, folder / "cut", **keys).fit()
        steps = [r["step"] for r in records(folder / "cut")]
        assert steps == list(range(1, 9)), f"steps in the log: {steps}"
        assert curve(folder / "cut") == curve(folder / "whole")
        at = [r["step"] for r in records(folder / "cut", "validation")]
        assert at == [3, 6, 8], f"validations at {at}, every 3 and the last"
        make(part, folder / "cut", **keys).fit()  # nothing left to do
        assert [r["step"] for r in records(folder / "cut")] == steps
        assert [r["step"] for r in records(folder / "cut", "validation")] == at


def test_a_validation_that_was_owed_is_done_first(part):
    """Killed between the checkpoint and the validation of the same step."""
    with scratch() as folder:
        keys = {"checkpoint_every": 4, "validate_every": 4, "validation_tokens": 16}
        make(part, folder, stop_step=4, **keys).fit()
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        kept = [x for x in lines if json.loads(x)["event"] in ("start", "train")]
        (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n", "utf-8")
        make(part, folder, **keys).fit()
        at = [r["step"] for r in records(folder, "validation")]
        assert at == [4, 8], f"validations at {at}"


def test_a_crash_while_saving_costs_no_checkpoint(part):
    """The disk fills up, or the process ends, at each write of a save in turn."""
    module = home(part)
    with scratch() as folder:
        trainer = make(part, folder, steps=6, checkpoint_every=1)
        trainer.take_step()
        trainer.save()
        good = module.newest_checkpoint(folder)
        trainer.take_step()
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            for fails in range(12):
                calls = [0]

                def counted(real, error=error, fails=fails, calls=calls):
                    def call(*args, **kwargs):
                        calls[0] += 1
                        if calls[0] > fails:
                            raise error
                        return real(*args, **kwargs)

                    return call

                with (
                    mock.patch.object(module, "save_file", counted(module.save_file)),
                    mock.patch("torch.save", counted(torch.save)),
                    mock.patch.object(Path, "write_text", counted(Path.write_text)),
                    mock.patch("os.fsync", counted(os.fsync)),
                    mock.patch.object(Path, "rename", counted(Path.rename)),
                    mock.patch("os.replace", counted(os.replace)),
                ):
                    said = ""
                    try:
                        trainer.save()
                    except CheckpointError as raised:
                        said = str(raised)
                    except KeyboardInterrupt:
                        said = "No space left: not this time"
                    if not said:
                        break
                assert "No space left" in said, f"the cause is not named: {said}"
                newest = module.newest_checkpoint(folder)
                done = newest is not None and newest.name == "step_00000002"
                assert newest == good or done, f"{newest} after a crash at {calls[0]}"
                model, *_ = module.load_checkpoint(folder)
                assert all(torch.isfinite(p).all() for p in model.parameters())
            assert fails > 6, "a save has weights, optimizer, run, state, and a rename"


def test_incomplete_checkpoints_are_ignored_aloud(part):
    module = home(part)
    with scratch() as folder:
        make(part, folder, checkpoint_every=2, checkpoints_kept=9).fit()
        newest = module.newest_checkpoint(folder)
        assert newest.name == "step_00000008"
        (newest / "model.safetensors").write_bytes(b"cut off")
        (folder / "checkpoints" / "step_00000006" / "optimizer.pt").unlink()
        (folder / "checkpoints" / ".tmp-step_00000099-1").mkdir()
        (folder / "checkpoints" / "step_00000777").mkdir()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert module.newest_checkpoint(folder).name == "step_00000004"
        said = " ".join(str(w.message) for w in caught)
        for name in ("step_00000008", "step_00000006", "step_00000777"):
            assert name in said, f"nothing warns of {name}"
        with refused(CheckpointError, "incomplete"):
            module.load_checkpoint(newest)
        trainer = make(part, folder, checkpoint_every=2, checkpoints_kept=9)
        assert trainer.step == 4
        trainer.fit()
        assert module.newest_checkpoint(folder).name == "step_00000008"


def test_a_file_that_was_altered_is_refused(part):
    """The same size, other bytes: the run must not go on from it, nor be loaded."""
    module = home(part)
    with scratch() as folder:
        make(part, folder, steps=2).fit()
        newest = module.newest_checkpoint(folder)
        for name in ("model.safetensors", "optimizer.pt", "tokenizer.json", "run.json"):
            good = (newest / name).read_bytes()
            bad = bytearray(good)
            bad[len(bad) // 2] ^= 1
            (newest / name).write_bytes(bad)
            with refused(CheckpointError, name, "damaged", "delete"):
                make(part, folder, steps=4)
            if name != "optimizer.pt":  # a model is loaded without
                with refused(CheckpointError, name, "damaged"):
                    module.load_checkpoint(folder)
            (newest / name).write_bytes(good)
        assert make(part, folder, steps=4).fit().steps == 4


def test_a_run_never_begins_anew_over_a_damaged_checkpoint(part):
    module = home(part)
    with scratch() as folder:
        make(part, folder, steps=2).fit()
        log = (folder / "metrics.jsonl").read_bytes()
        newest = module.newest_checkpoint(folder)
        (folder / "checkpoints" / ".tmp-step_00000099").mkdir()
        for text in ("{", "[]", '{"files": []}', '{"files": {}}'):
            (newest / "state.json").write_text(text, "utf-8")
            with refused(CheckpointError, str(newest)):
                make(part, folder, steps=4)
        assert (folder / "metrics.jsonl").read_bytes() == log, "the log was emptied"
        newest.rename(folder / "elsewhere")
        assert make(part, folder, steps=4).step == 0, "half a save is no checkpoint"


def test_a_part_that_was_edited_is_named(part):
    with scratch() as folder:
        own = folder / "own.py"
        own.write_text("def flat(step, total):\n    return 1.0\n", "utf-8")
        schedule = {"use": f"{own}:flat"}
        trainer = make(part, folder / "r", schedule=schedule, stop_step=3)
        edited = "def flat(step, total):\n    return 0.5\n"
        own.write_text(edited, "utf-8")  # while it trains, as it was
        trainer.fit()
        for text, words in ((own.read_text("utf-8"), ["schedule", "step 3"]), ("", [])):
            keys = {"schedule": schedule} if text else {}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                make(part, folder / "r", **keys)
            said = [str(w.message) for w in caught if "has changed" in str(w.message)]
            assert len(said) == bool(text), f"{len(said)} warnings: {said}"
            assert all(w in said[0] for w in words), said


def test_retention_counts_whole_ones_and_spares_some(part):
    module = home(part)
    with scratch() as folder:

        def names():
            return sorted(p.name[-1] for p in module.checkpoints(folder))

        keys = {"checkpoint_every": 1, "checkpoints_kept": 2, "validation_tokens": 16}
        make(part, folder, stop_step=4, **keys).fit()
        assert names() == ["3", "4"], f"kept {names()}, wanted the two newest"
        (folder / "checkpoints" / "step_00000003" / "pinned").touch()
        for fake in ("98", "99"):
            (folder / "checkpoints" / f"step_000000{fake}").mkdir()
        make(part, folder, stop_step=8, **keys).fit()
        assert names() == ["3", "4", "7", "8"], (
            f"kept {names()}: 7 and 8 are the newest whole ones, 3 is pinned, and the "
            "run resumed from 4"
        )
        module.prune_checkpoints(folder, 0)
        assert "8" in names(), "the newest is never deleted"


def test_the_checkpoint_comes_before_the_evaluation(part):
    with scratch() as folder:
        gone = {"a": [Path(folder) / "validation-gone-00000.shard"]}
        data = prepared()
        data = Prepared(data.folder, data.tokenizer, data.train, gone, {})
        keys = {"checkpoint_every": 4, "validate_every": 4}
        with refused(ValueError, "gone"):
            make(part, folder, data, **keys).fit()
        newest = home(part).newest_checkpoint(folder)
        assert newest is not None, "a failed validation cost the steps before it"
        assert newest.name == "step_00000004"


def test_weights_on_disk_are_plain_and_loading_is_strict(part):
    module = home(part)
    with scratch() as folder:
        trainer = make(part, folder, model={"tied": True})
        trainer.fit()
        newest = module.newest_checkpoint(folder)
        plain = {n for n, _ in trainer.model.named_parameters()}
        wrapped = nn.Module()
        wrapped.module = nn.Module()
        wrapped.module._orig_mod = trainer.model
        assert set(module.plain_weights(wrapped)) == plain, "wrapper prefixes on disk"
        saved = module.load_file(newest / "model.safetensors")
        assert set(saved) == plain, f"{set(saved) ^ plain} differ from the model's own"
        module.load_weights(wrapped, newest)
        name = sorted(plain)[-1]
        spoiled = {
            "lacks": {n: t for n, t in saved.items() if n != name},
            "has": {**saved, "extra.weight": torch.zeros(1)},
            "shape": {**saved, name: torch.zeros(1, 1)},
        }
        for case, table in spoiled.items():
            module.save_file(table, newest / "model.safetensors")
            with refused(CheckpointError, "another model"):
                module.load_weights(trainer.model, newest)
            assert case  # named in the loop for the reader
        other = make(part, folder / "b", model={"dim": 32, "tied": True})
        module.save_file(saved, newest / "model.safetensors")
        with refused(CheckpointError, "another model", "[32"):
            module.load_weights(other.model, newest)


def test_load_checkpoint_gives_what_was_saved(part):
    module = home(part)
    with scratch() as folder:
        trainer = make(part, folder / "r", checkpoint_every=4, checkpoints_kept=9)
        trainer.fit()
        ids = torch.arange(CONTEXT)[None]
        with torch.no_grad():
            want = trainer.model.eval()(ids)
        for where in (
            folder / "r",
            str(folder / "r" / "checkpoints" / "step_00000008"),
        ):
            model, tokenizer, run, state = module.load_checkpoint(where)
            with torch.no_grad():
                assert torch.equal(model(ids), want), f"{where} gives other logits"
            assert not model.training, "a loaded model is in eval mode"
            assert tokenizer.fingerprint == prepared().tokenizer.fingerprint
            assert run == trainer.run, "the resolved run lies beside the weights"
            assert state["step"] == 8
            assert state["tokens"] == trainer.tokens
        early = folder / "r" / "checkpoints" / "step_00000004"
        assert module.load_checkpoint(early)[3]["step"] == 4
        state = json.loads((early / "state.json").read_text("utf-8"))
        (early / "state.json").write_text(json.dumps({**state, "format": 99}), "utf-8")
        with refused(CheckpointError, "format 99"):
            module.load_checkpoint(early)
        with refused(CheckpointError, "no checkpoint"):
            module.load_checkpoint(folder)
        with refused(ConfigError, "no-such-run"):
            module.load_checkpoint("no-such-run")


def test_another_run_in_the_folder_is_refused(part):
    with scratch() as folder:
        make(part, folder, steps=2).fit()
        for key, value in (
            ("model", {"dim": 32}),
            ("seed", 5),
            ("optimizer", {"lr": 0.02}),
            ("data", {"source": "elsewhere"}),
        ):
            with refused(ConfigError, key, str(folder)):
                make(part, folder, **{key: value})
        with refused(ValueError, "tokens a step"):
            make(part, folder, rows=2)
        make(part, folder, rows=2, grad_accum=4, steps=3, sample_every=5).fit()


def test_one_process_at_a_time(part):
    """A process that trains keeps the others out; what a dead one left does not."""
    with scratch() as folder:
        make(part, folder, steps=2).fit()
        log = (folder / "metrics.jsonl").read_bytes()
        locks = (
            "import fcntl, sys\n"
            "file = open(sys.argv[1], 'w')\n"
            "fcntl.lockf(file, fcntl.LOCK_EX)\n"
            "print('locked', flush=True)\n"
            "sys.stdin.read()\n"
        )
        waits = "print('alive', flush=True); import sys; sys.stdin.read()"
        for script in (locks, waits) if os.name != "nt" else (waits,):
            command = [sys.executable, "-c", script, folder / ".lock"]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
                other.stdout.readline()
                if script is locks:
                    with refused(LittleLMError, "another process", str(folder)):
                        make(part, folder, steps=4)
                    assert (folder / "metrics.jsonl").read_bytes() == log, "its log"
                    continue
                for name in ("pid", ".lock"):  # of a dead one; the number is reused
                    (folder / name).write_text(str(other.pid), "utf-8")
                assert make(part, folder, steps=4).fit().steps == 4


# ---- Decay branches

TRUNK = {"steps": 24, "checkpoint_every": 4, "checkpoints_kept": 9,
         "validation_tokens": 16}  # fmt: skip


def test_a_branch_takes_the_trunks_next_step(part):
    """A branch is the run that had its schedule from the start, to the last bit."""
    with scratch() as folder:
        held, down = use("trapezoid"), use("trapezoid", decay=8)
        make(part, folder / "trunk", schedule=held, **TRUNK).fit()
        whole = make(part, folder / "whole", schedule=down, **TRUNK)
        whole.fit()
        at = str(folder / "trunk" / "checkpoints" / "step_00000012")
        torch.manual_seed(99)
        keys = {"schedule": down, "resume": at, **TRUNK}
        branch = make(part, folder / "branch", **keys)
        assert (branch.step, branch.tokens) == (12, 12 * ROWS * CONTEXT * 2)
        branch.fit()
        for a, b in zip(curve(folder / "whole"), curve(folder / "branch"), strict=True):
            assert a == b, f"step {b['step']} of the branch is {b}, of one run {a}"
        assert same(weights(whole), weights(branch)), "the last weights differ"
        at = [r["step"] for r in records(folder / "branch", "start")]
        assert at == [0, 12], f"the log begins with the trunk's: starts at {at}"
        left = [p.name for p in home(part).checkpoints(folder / "trunk")]
        assert len(left) == 6, f"the branch must leave the trunk's alone: {left}"
        assert len(curve(folder / "trunk")) == 24, "and its log"


def test_a_killed_branch_goes_on_with_its_own(part):
    """Also when the trunk is gone, and when the command says no more where it began."""
    with scratch() as folder:
        held, down = use("trapezoid"), use("trapezoid", decay=8)
        make(part, folder / "trunk", schedule=held, **TRUNK).fit()
        whole = make(part, folder / "whole", schedule=down, **TRUNK)
        whole.fit()
        keys = {"schedule": down, "resume": str(folder / "trunk"), **TRUNK}
        keys["resume"] += "/checkpoints/step_00000012"
        killed = make(part, folder / "branch", **keys)
        for _ in range(2):  # before its first checkpoint: it begins anew
            killed.report.tell("train", **killed.take_step())
        assert make(part, folder / "branch", **{**keys, "stop_step": 18}).fit().steps
        shutil.rmtree(folder / "trunk")
        again = make(part, folder / "branch", **{**keys, "stop_step": 19})
        assert again.step == 18, f"went on from step {again.step}, not its own 18"
        again.fit()
        make(part, folder / "branch", **{**keys, "resume": ""}).fit()
        assert curve(folder / "branch") == curve(folder / "whole")


def test_a_branch_that_would_be_neither_run_is_refused(part):
    with scratch() as folder:
        held = use("trapezoid")
        make(part, folder / "trunk", schedule=held, **TRUNK).fit()
        at = folder / "trunk" / "checkpoints" / "step_00000012"
        keys = {"resume": str(at), **TRUNK}

        def down(decay=8, **more):
            return {"schedule": use("trapezoid", decay=decay), **keys, **more}

        with refused(ConfigError, "step 12", "decay = 13", "step 11"):
            make(part, folder / "b", **down(13))
        make(part, folder / "b", **down(12))  # the decay begins at this very step
        for more in ({"steps": 12}, {"stop_step": 9}, {"steps": 10}):
            with refused(ConfigError, "step 12", "more steps"):
                make(part, folder / "b", **down(0, **more))
        for key, value in (("seed", 5), ("model", {"dim": 32}), ("rows", 2)):
            with refused(ConfigError, "another run", "a branch may"):
                make(part, folder / "b", **down(**{key: value}))
        with refused(ConfigError, "trunk", "of its own", "another run_dir"):
            make(part, folder / "trunk", **down())
        missing = str(at.with_name("step_00000013"))
        with refused(CheckpointError, "step_00000013", "step_0000001"):
            make(part, folder / "b", **down(resume=missing))
        with refused(CheckpointError, "no checkpoint in"):
            make(part, folder / "b", **down(resume=str(folder)))
        late = {**down(decay=4, steps=40), "resume": str(folder / "trunk")}
        assert make(part, folder / "c", **late).step == 24, "a folder: its newest"


def test_a_jump_of_the_rate_is_named(part):
    """A branch from a run that had decayed already starts with a jump."""
    with scratch() as folder:
        make(part, folder / "down", schedule=use("trapezoid", decay=8), **TRUNK).fit()
        newest = {"resume": str(folder / "down"), **TRUNK, "steps": 40}
        early = {**newest, "resume": f"{newest['resume']}/checkpoints/step_00000016"}
        for keys, jumps in ((newest, True), (early, False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                make(part, folder / "b", schedule=use("trapezoid", decay=9), **keys)
            said = [str(w.message) for w in caught if "rate jumps" in str(w.message)]
            assert bool(said) == jumps, f"{keys['resume']}: warned {said}"
            assert "0.125" in "".join(said) or not jumps, said


# ---- Validation and the log


def test_validation_is_weighted_by_tokens_and_counts_bytes(part):
    """The same for every batch size, and equal to a count by hand from the logits."""
    data = prepared()
    found = []
    for rows in (1, 3, 64):
        with scratch() as folder:
            trainer = make(part, folder, rows=rows, loader=use("Ragged"))
            trainer.validation()
            found.append(trainer.report.log.last("validation")["domains"])
    for other in found[1:]:
        for domain, score in found[0].items():
            for key, value in score.items():
                assert math.isclose(value, other[domain][key], rel_tol=1e-5), (
                    f"{key} of {domain} depends on the rows of a batch"
                )
    tokens = {}
    for domain, shards in data.validation.items():
        documents = [s[i][1:].tolist() for s in shards for i in range(len(s))]
        tokens[domain] = sum(map(len, documents))
        size = sum(len(data.tokenizer.decode_bytes(d)) for d in documents)
        score = found[0][domain]
        assert size > tokens[domain]
        assert score["bytes"] == size, "every byte of the split counts once"
        assert score["tokens"] == tokens[domain], "every token is a target once"
        bits = score["loss"] * score["tokens"] / math.log(2) / size
        assert math.isclose(score["bits_per_byte"], bits, rel_tol=1e-9)
    overall = found[0]["overall"]
    want = sum(found[0][d]["loss"] * n for d, n in tokens.items()) / sum(
        tokens.values()
    )
    assert math.isclose(overall["loss"], want, rel_tol=1e-9), (
        "the overall loss is weighted by tokens, not the mean of the domains"
    )
    # By hand: one row from the model's logits.
    shard = data.validation["a"][0]
    document = max((shard[i] for i in range(len(shard))), key=len)
    with torch.no_grad():
        ids = torch.tensor(document[:CONTEXT].astype(np.int64))
        logits = trainer.model.eval()(ids[None, :-1])[0]
        nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        batch = [(ids[None, :-1], ids[None, 1:])]
        counts = torch.as_tensor(data.tokenizer.token_byte_counts())
        sums = home(part).score(trainer.model.loss, batch, counts)
    assert math.isclose(sums[0], float(nats), rel_tol=1e-4)
    assert sums[1:] == [CONTEXT - 1, int(counts[ids[1:]].sum())]


def test_specials_count_neither_loss_nor_bytes(part):
    counts = torch.tensor([0, 1, 2, 3])
    targets = torch.tensor([[0, 1, -100, 3]])
    seen = []

    def loss(ids, targets, reduction):
        seen.append(targets.clone())
        return (targets != -100).sum() * 2.0

    sums = home(part).score(loss, [(torch.zeros(1, 4).long(), targets)], counts)
    assert seen[0].tolist() == [[-100, 1, -100, 3]], "id 0 is a special token"
    assert sums == [4.0, 2.0, 4.0], f"nats, tokens and bytes are {sums}"


def test_looking_at_a_run_does_not_change_it(part):
    with scratch() as folder:
        make(part, folder / "plain").fit()
        looks = {
            "validate_every": 1,
            "sample_every": 2,
            "checkpoint_every": 1,
            "validation_tokens": 32,
            "callback": (use("Recorder"),),
        }
        trainer = make(part, folder / "watched", **looks)
        trainer.fit()
        assert curve(folder / "plain") == curve(folder / "watched"), (
            "validation, samples or checkpoints changed the run"
        )
        samples = records(folder / "watched", "sample")
        assert {s["domain"] for s in samples} == {"a", "b"}
        assert [s["step"] for s in samples][::2] == [2, 4, 6, 8]
        assert any(s["text"] for s in samples), "the samples are empty"
        scores = records(folder / "watched", "validation")
        tokens = [r["domains"]["overall"]["tokens"] for r in scores]
        assert [r["whole"] for r in scores] == [False] * 7 + [True]
        assert max(tokens[:-1]) < tokens[-1], "the last step scores the whole split"
        seen = trainer.report.callbacks[0].seen
        assert seen[:4] == ["start", 1, "validation", 2], seen
        assert seen[-1] == "end"


def test_a_callback_has_all_hooks(part):
    with scratch() as folder, refused(ConfigError, ":Deaf", "on_start", "Callback"):
        make(part, folder, callback=(use("Deaf"),))


def test_the_log_says_what_ran(part):
    with scratch() as folder:
        trainer = make(part, folder)
        result = trainer.fit()
        start = records(folder, "start")[0]
        assert start["tokens_per_step"] == ROWS * CONTEXT * 2
        total = sum(p.numel() for p in trainer.model.parameters())
        assert start["parameters"]["total"] == total
        assert start["parts"]["attention"]["use"] == "gqa"
        assert start["parts"]["attention"]["source"], "the source hash of a part"
        for step, record in enumerate(records(folder), 1):
            assert record["step"] == step
            assert record["tokens"] == step * ROWS * CONTEXT * 2
            assert record["mfu"] is None or torch.cuda.is_available(), (
                "no percentage on a device whose peak is unknown"
            )
            assert record["tokens_per_second"] > 0
        assert result.final_loss == records(folder)[-1]["loss"]
        assert result.tokens == records(folder)[-1]["tokens"]
        assert set(result.validation) == {"a", "b", "overall"}, (
            "the last step validates"
        )
        run = json.loads((folder / "run.json").read_text("utf-8"))
        assert run["steps"] == 8, "the resolved run lies in the folder"


# ---- Signals


def test_a_signal_saves_and_ends_cleanly(part):
    for number in (signal.SIGTERM, signal.SIGINT):
        with scratch() as folder:
            before = signal.getsignal(number)
            keys = {"validation_tokens": 16}
            asked = use("Recorder", at=3, number=int(number))
            result = make(part, folder / "cut", callback=(asked,), **keys).fit()
            assert result.interrupted, f"{number.name}: the result does not say so"
            assert result.steps == 3, (
                f"{number.name} at step 3, ended at {result.steps}"
            )
            saved = [p.name for p in home(part).checkpoints(folder / "cut")]
            assert saved == ["step_00000003"], f"{number.name}: saved {saved}"
            assert records(folder / "cut", "end")[-1]["status"] == "interrupted"
            assert signal.getsignal(number) == before, "the handler must be put back"
            result = make(part, folder / "cut", **keys).fit()
            assert not result.interrupted
            make(part, folder / "whole", **keys).fit()
            assert curve(folder / "cut") == curve(folder / "whole"), number.name
