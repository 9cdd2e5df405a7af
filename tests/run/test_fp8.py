"""FP8 in whole runs: training, checkpoints, torch.compile, two processes."""

import functools
import json
import sys

import pytest
import torch
from processes import run_ranks

from littlelm_core import check, fp8
from littlelm_core.config import ConfigError, load_run
from littlelm_core.doctor import compiler
from littlelm_core.fp8 import Float8, Float8Linear, convert_to_fp8
from littlelm_core.model import LanguageModel, ModelConfig, model_config
from littlelm_core.trainer import load_checkpoint, parameter_groups, train

CPU = torch.device("cpu")
SMALL = ModelConfig(
    dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64, vocab_size=256, context=32
)


def small_batch(rows=2):
    ids = torch.arange(rows * 33).reshape(rows, 33) * 11 % 251
    return ids[:, :-1], ids[:, 1:]


@functools.cache
def contract():
    """The trainer's own contract has a small run, and data for it."""
    return check.load_contract("trainer")


def run_of(folder, recipe="tensorwise", **keys):
    """The small run of the trainer's contract, in FP8 and of widths that it takes."""
    precision = {"use": "fp8", "dtype": "fp32", "recipe": recipe}
    model = {"dim": 32, "ffn_dim": 64, "context": 32}
    loader = {"use": "packed", "rest": "keep"}
    keys |= {"steps": 12, "checkpoint_every": 6, "precision": precision}
    return contract().make_run(folder, model=model, loader=loader, **keys)


@pytest.fixture(scope="module")
def data():
    return contract().prepared()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_precision_keeps_its_contract(recipe, dtype):
    class Part(Float8):
        def __init__(self, **keys):
            super().__init__(**keys, recipe=recipe)

    failed = [r for r in check.run_contract("precision", Part) if not r.ok]
    assert not failed, failed
    part = Part(dtype=dtype)
    model = LanguageModel(SMALL)
    loss = part.prepare(model, CPU)
    with part.context():
        loss(*small_batch()).backward()
    assert len(part.report.converted) == 2 * 7


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_checkpoint_is_plain_and_evaluates_anywhere(tmp_path, data, recipe):
    run = run_of(tmp_path, recipe)
    result = train(run, data, quiet=True)
    assert result.steps == 12
    start = json.loads((tmp_path / "metrics.jsonl").read_text().split("\n")[0])
    assert start["event"] == "start"
    assert start["conversion"]["recipe"] == recipe
    assert "blocks.0.ffn.w_up" in start["conversion"]["converted"]
    assert "head" in start["conversion"]["skipped"]
    model, *_ = load_checkpoint(tmp_path)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    # The run validated what it saved: a plain model measures the same.
    from littlelm_core.shards import ValidationRows
    from littlelm_core.trainer import score

    model.eval()
    bytes_V = torch.as_tensor(data.tokenizer.token_byte_counts())
    for domain, shards in data.validation.items():
        rows = ValidationRows(shards, 2, 32, 0, 1, -1)
        nats, tokens, _ = score(model.loss, rows, bytes_V)
        assert nats / tokens == pytest.approx(result.validation[domain]["loss"], 1e-6)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, data):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(run_of(whole), data, quiet=True)
    train(run_of(parts, stop_step=6), data, quiet=True)
    train(run_of(parts), data, quiet=True)
    ends = [
        (f / "checkpoints" / "step_00000012" / "model.safetensors").read_bytes()
        for f in (whole, parts)
    ]
    assert ends[0] == ends[1]


def test_a_nan_in_a_batch_is_a_skipped_step(data, tmp_path):
    from littlelm_core.trainer import Loop

    loop = Loop(run_of(tmp_path), data)
    loop.take_step()
    loss = loop.loss
    loop.loss = lambda *batch, **keys: loss(*batch, **keys) * torch.nan
    record = loop.take_step()
    assert record["loss"] is None
    assert loop.skipped_steps == 1
    loop.loss = loss
    assert loop.take_step()["loss"] is not None


def test_what_cannot_train_is_refused_before_training():
    for changes, word in (({"context": 24}, "24"), ({"dim": 40, "ffn_dim": 40}, "40")):
        shape = {
            "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 64,
            "vocab_size": 64, "context": 32,
        }  # fmt: skip
        model = LanguageModel(ModelConfig(**shape | changes | {"head_dim": 20}))
        with pytest.raises(ConfigError, match=word) as error:
            Float8().prepare(model, CPU)
        assert "\n" not in str(error.value)


def test_the_reference_run_converts_and_keeps_its_roles():
    run = load_run("littlelm-3.8b")
    with torch.device("meta"):
        model = LanguageModel(model_config(run))
    part = Float8(**run.precision.options)
    report = convert_to_fp8(model, part.recipe)
    assert len(report.converted) == 168
    groups, _ = parameter_groups(model, run.optimizer.options)
    sizes = {g["name"]: sum(p.numel() for p in g["params"]) for g in groups}
    assert sizes["matrix"] == 28 * 100_663_296


def test_torchao_that_is_absent_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    for recipe in ("tensorwise", "mxfp8"):
        with pytest.raises(ConfigError, match="pip install torchao") as error:
            fp8.torchao_product(recipe)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(any(compiler()[1:]), reason="no compiler")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_equals_eager(recipe):
    layer = Float8Linear(64, 32, recipe=recipe)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for run in (layer, compiled):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = run(leaf)
        (y * y).sum().backward()
        results.append((y.detach(), leaf.grad, layer.weight.grad))
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-4)


RANKS = """
from littlelm_core.fp8 import E4M3, E5M2, quantize

rank = dist.get_rank()
whole = torch.randn(32, 48, generator=torch.Generator().manual_seed(5))
whole[20] *= 100.0
for dtype in (E4M3, E5M2):
    q, scale = quantize(whole, dtype)
    mine, mine_scale = quantize(whole.chunk(2)[rank], dtype, group=dist.group.WORLD)
    assert torch.equal(mine_scale, scale), (rank, mine_scale, scale)
    assert torch.equal(mine.float(), q.chunk(2)[rank].float())
    alone = quantize(whole.chunk(2)[rank], dtype)[1]
    assert (alone == scale) == (rank == 1)
    # Shards of columns: each row's scale is shared.
    q, scale = quantize(whole, dtype, "row")
    columns = whole.chunk(2, 1)[rank]
    mine, mine_scale = quantize(columns, dtype, "row", group=dist.group.WORLD)
    assert torch.equal(mine_scale, scale)
    assert torch.equal(mine.float(), q.chunk(2, 1)[rank].float())
bad = whole.clone()
bad[0, 0] = torch.nan
q, scale = quantize(bad.chunk(2)[rank], group=dist.group.WORLD)
assert scale.isnan(), "a NaN on one rank is not seen by the other"
"""


def test_shards_share_one_scale(tmp_path):
    run_ranks(RANKS, 2, tmp_path)
