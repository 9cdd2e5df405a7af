"""The optimizer `muon` inside a run: the table, refused steps, and a resume."""

import functools
import itertools
import os
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file
from small_runs import command, prepare_letters, run_of, write_run
from torch.utils.flop_counter import FlopCounterMode

from littlelm_core import check
from littlelm_core.config import ConfigError, Part, load_run
from littlelm_core.model import (
    LanguageModel,
    ModelConfig,
    flops_per_token,
    model_config,
)
from littlelm_core.optim import REFERENCE, Muon, MuonAdamW, build_optimizer
from littlelm_core.report.run import expected_seconds
from littlelm_core.trainer import Trainer, newest_checkpoint, parameter_groups

MUON = {
    "use": "muon", "normuon": True, "cautious": True, "stochastic_rounding": True,
    "matrix": {"weight_decay": 0.1}, "embedding": {"lr": 0.05},
}  # fmt: skip


@functools.cache
def contract():
    """The trainer's own contract has a small run and a way to spoil its gradients."""
    return check.load_contract("trainer")


def trainer(folder, quiet=True, **keys):
    keys = {"optimizer": MUON, "callback": (), "checkpoint_every": 3, **keys}
    run = contract().make_run(folder, **keys)
    return Trainer(run, contract().prepared(), quiet=quiet)


def snapshot(one):
    """All that an optimizer step may change: weights, state, and the groups' keys."""
    state = one.optimizer.state_dict()
    tensors = {
        (i, key): value.clone()
        for i, values in state["state"].items()
        for key, value in values.items()
    }
    weights = {n: p.detach().clone() for n, p in one.model.named_parameters()}
    keys = [{k: v for k, v in g.items() if k != "lr"} for g in state["param_groups"]]
    return weights, tensors, keys


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("precision", ["fp32", "bf16 weights"])
def test_a_resume_is_exact(tmp_path, precision):
    keys = {}
    if precision == "bf16 weights":
        keys["precision"] = {"use": "autocast", "dtype": "bf16", "masters": "bf16"}
    with contract().scratch() as folder:
        whole = trainer(folder / "whole", **keys)
        whole.fit()
        stopped = trainer(folder / "killed", stop_step=5, **keys)
        stopped.fit()
        assert newest_checkpoint(folder / "killed").name == "step_00000005"
        torch.manual_seed(4321)
        resumed = trainer(folder / "killed", **keys)
        assert resumed.step == 5
        resumed.fit()
        if precision == "bf16 weights":
            kinds = {p.dtype for p in resumed.parameters if p.ndim == 2}
            assert kinds == {torch.bfloat16}
        for a, b in zip(snapshot(whole)[:2], snapshot(resumed)[:2], strict=True):
            assert same(a, b)
        assert snapshot(whole)[2] == snapshot(resumed)[2]
        assert contract().curve(folder / "whole") == contract().curve(folder / "killed")


def test_the_update_is_the_same_for_1_2_and_4_ranks(tmp_path):
    """The rows of a step, read by one process or shared by several: equal weights."""
    prepare_letters(tmp_path, {"a": ("abcd ", 60)})
    write_run(tmp_path, "steps = 6", "rows = 2", "tokens_per_step = 256")
    muon = ("optimizer.use=muon", "optimizer.matrix={lr=0.02,weight_decay=0.1}")
    weights = {}
    for ranks in (1, 2, 4):
        where = f"ranks{ranks}"
        done = subprocess.run(
            command(tmp_path, where, *muon, ranks=ranks), capture_output=True,
            encoding="utf-8", timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        folder = newest_checkpoint(tmp_path / where)
        weights[ranks] = load_file(folder / "model.safetensors")
    fresh = Trainer(run_of(tmp_path, "fresh", *muon), quiet=True)
    fresh.held.close()
    name = "blocks.0.attention.wq.weight"
    moved = weights[1][name] - fresh.model.get_parameter(name).detach()
    assert moved.abs().max() > 1e-2, "nothing was learned: the test shows nothing"
    for ranks in (2, 4):
        for name, tensor in weights[1].items():
            off = (weights[ranks][name] - tensor).abs().max()
            assert off <= 1e-5, f"{name} on {ranks} ranks is off by {off:.1e}"


def test_a_resume_may_have_weights_of_another_format(tmp_path):
    bf16 = {"use": "autocast", "dtype": "bf16", "masters": "bf16"}
    for before, after in ((None, bf16), (bf16, None)):
        with contract().scratch() as folder:
            first = {"precision": before} if before else {}
            trainer(folder, stop_step=3, **first).fit()
            resumed = trainer(folder, **({"precision": after} if after else {}))
            assert resumed.step == 3
            resumed.fit()
            for p in resumed.parameters:
                assert p.isfinite().all()
                for key, value in resumed.optimizer.state[p].items():
                    kind = p.dtype if key == "momentum_buffer" else torch.float32
                    assert value.dtype == kind, key


def test_a_momentum_that_fades_out_leaves_the_weights_finite():
    """An expert that is never chosen again has gradients of zeros from there on."""
    for normuon in (False, True):
        p = torch.nn.Parameter(torch.zeros(2, 6, 4))
        optimizer = Muon([p], lr=0.1, momentum=0.5, normuon=normuon)
        for _ in range(200):
            if p.grad is None:
                p.grad = torch.randn_like(p)
            else:
                p.grad[1] = 0
            optimizer.step()
            assert p.isfinite().all()
            assert p.abs().max() < 30, "no step is longer than a step"


def test_a_refused_step_changes_nothing_of_the_optimizer():
    spoiled = contract().use("NotFinite", after="2")
    with contract().scratch() as folder:
        one = trainer(folder, steps=4, callback=(spoiled,))
        kept = []
        one.report.callbacks[0].on_step = lambda t, record: kept.append(snapshot(t))
        assert one.fit().skipped_steps == 1
        (w2, s2, g2), (w3, s3, g3), (w4, s4, g4) = kept[1:]
        assert s2, "there are statistics to be spoiled"
        assert same(w2, w3)
        assert same(s2, s3)
        assert g2 == g3
        assert [g["taken"] for g in g2] == [2] * len(g2), "refused steps do not count"
        assert not same(w3, w4)
        assert not same(s3, s4)
        assert g4[0]["taken"] == 3


def test_the_table_is_printed_at_the_start(capsys):
    with contract().scratch() as folder:
        one = trainer(folder, quiet=False)
        one.report.start()
        printed = capsys.readouterr().out
    for group in one.optimizer.param_groups:
        count = sum(p.numel() for p in group["params"])
        line = [x for x in printed.splitlines() if x.startswith(group["name"])]
        assert line, group["name"]
        assert f"{count:,}" in line[0]
        assert f"{group['lr']:g}" in line[0]


def test_its_flops_are_those_that_torch_counts():
    for normuon, steps in ((False, 5), (True, 3)):
        shapes = (6, 4), (4, 9), (9, 4), (3, 6, 4)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = Muon(params, normuon=normuon, steps=steps)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert optimizer.flops() == counter.get_total_flops() > 0
    groups, _ = parameter_groups(small(), {})
    alone = Muon(next(g for g in groups if g["name"] == "matrix")["params"]).flops()
    assert build_optimizer(small(), {"lr": 0.1}, quiet=True).flops() == alone > 0


def test_the_time_announced_counts_the_optimizers_flops(monkeypatch):
    """By a clock on which every micro-batch takes one second."""
    ticks = itertools.count()
    with contract().scratch() as folder:
        for name, table in (("muon", MUON), ("adamw", {"use": "torch.optim:AdamW"})):
            one = trainer(folder / name, optimizer=table, steps=6)
            with monkeypatch.context() as patch:
                patch.setattr(time, "perf_counter", lambda: float(next(ticks)))
                seconds = expected_seconds(one)
            of_model = flops_per_token(one.cfg) * one.tokens_per_step
            own = one.optimizer.flops() / of_model if name == "muon" else 0.0
            assert own > 0.01 or name == "adamw", "too little to be seen"
            assert seconds == pytest.approx(6 * one.grad_accum * (1 + own))


class OneGroup(torch.optim.SGD):
    """Puts all parameters into a group of its own, as many optimizers' examples do."""

    def __init__(self, params, lr=0.1):
        super().__init__([p for group in params for p in group["params"]], lr)


def test_an_optimizer_that_drops_the_groups_is_refused_by_name(tmp_path):
    with contract().scratch() as folder:
        use = f"{__file__}:OneGroup"
        with pytest.raises(ConfigError, match=r"OneGroup.*without name or lr"):
            trainer(folder, optimizer={"use": use, "lr": 0.1})


def test_one_line_makes_a_run_use_muon(tmp_path):
    """The keys of the part before mean nothing to it; its own stand in REFERENCE."""
    path = tmp_path / "sgd.toml"
    text = 'extends = "tiny"\n[optimizer]\nuse = "torch.optim:SGD"\nnesterov = true'
    path.write_text(text, encoding="utf-8")
    run = load_run(path, ["optimizer=muon"])
    assert run.optimizer.options == {}
    with torch.device("meta"):
        model = LanguageModel(model_config(run, 300))
    optimizer = build_optimizer(model, run.optimizer, quiet=True)
    assert isinstance(optimizer, MuonAdamW)
    rates = {g["name"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {g: keys["lr"] for g, keys in REFERENCE.items() if g in rates}


def small():
    cfg = {
        "dim": 8, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_dim": 8, "context": 4,
        "vocab_size": 9,
    }  # fmt: skip
    return LanguageModel(ModelConfig(**cfg))


def test_a_parameter_without_a_role_is_refused():
    model = small()
    model.blocks[0].mystery = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"blocks\.0\.mystery"):
        build_optimizer(model, {"lr": 0.1}, quiet=True)


def test_a_key_of_the_other_rule_is_refused():
    for table, said in (
        ({"matrix": {"betas": [0.9, 0.95]}}, r"optimizer\.matrix\.betas.*Muon"),
        ({"head": {"momentum": 0.9}}, r"optimizer\.head\.momentum.*AdamW"),
        ({"embedding": {"betas": [0.9, 1.0]}}, r"embedding\.betas"),
        ({"matrix": {"scale": "orginal"}}, "original"),
        ({"matrix": {"momentun": 0.9}}, r"momentun.*momentum"),
        ({"lr": "0.1"}, r"lr.*type"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_optimizer(small(), Part(use="muon", **table), quiet=True)


def test_groups_without_a_role_are_refused():
    for params in ([torch.nn.Parameter(torch.ones(2, 2))], [{"params": []}]):
        with pytest.raises(ConfigError, match="parameter_groups"):
            MuonAdamW(params)


def test_bf16_weights_of_all_groups_keep_small_updates():
    """Weights near 1 under a rate that bf16 cannot show: the mean still moves."""
    far = {}
    for random in (False, True):
        model = small()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        model.to(torch.bfloat16)
        keys = {"lr": 5e-4, "stochastic_rounding": random}
        optimizer = build_optimizer(model, keys, quiet=True)
        for _ in range(40):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        far[random] = 1 - model.embedding.weight.detach().float().mean().item()
        still = (model.embedding.weight.detach() == 1).float().mean().item()
        assert not random or still < 0.05, f"{still:.0%} never moved: the same noise?"
        squares = [s["exp_avg_sq"] for s in optimizer.state.values() if "step" in s]
        assert squares
        assert {s.dtype for s in squares} == {torch.float32}
    assert far[False] == 0.0, "this test needs updates that bf16 loses"
    assert abs(far[True] / (40 * 5e-4) - 1) < 0.25, far[True]
