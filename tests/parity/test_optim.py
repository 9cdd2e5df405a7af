"""Muon and its AdamW groups against torch's own optimizers, step by step."""

import io

import pytest
import torch

from littlelm_core.config import load_run
from littlelm_core.model import LanguageModel, ModelConfig, model_config, parameter_role
from littlelm_core.optim import Muon, build_optimizer, newton_schulz

pytest.importorskip("torch.optim._muon", reason="torch has no Muon")

SHAPES = [(48, 48), (32, 80), (80, 32), (32, 80), (500, 640)]
MODEL = {
    "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 90,
    "context": 16, "residual_scales": True, "value_embeddings": True, "softcap": 15.0,
}  # fmt: skip


def _pair(dtype=torch.float32, shapes=SHAPES):
    draw = torch.Generator().manual_seed(2)
    start = [torch.randn(s, generator=draw).mul(0.1).to(dtype) for s in shapes]
    return [[w.clone().requires_grad_() for w in start] for _ in range(2)]


def _give(params, step):
    draw = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_torch_step_by_step_in_bf16(scale, nesterov, decay):
    """torch's products are always bf16; ours are with dtype = "bf16".

    The same kernels give the same bits. Stacked or in panels a product may be added up
    in another order: then one rounding of bf16, 2^-8 of an entry, is carried through
    five rounds, which stays below 2 % of the update.
    """
    ours, theirs = _pair()
    keys = {"lr": 0.02, "momentum": 0.95, "nesterov": nesterov, "weight_decay": decay}
    one = Muon(ours, dtype="bf16", scale=scale, **keys)
    other = torch.optim.Muon(theirs, adjust_lr_fn=scale, **keys)
    for step in range(5):
        _give(ours, step)
        _give(theirs, step)
        before = [p.detach().clone() for p in theirs]
        one.step()
        other.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            moved = (b - old).norm()
            assert moved > 0.01
            assert (a - b).norm() < 0.02 * moved * (step + 1), tuple(a.shape)


def test_own_coefficients_equal_torch():
    ours, theirs = _pair()
    triple = (2.0, -1.5, 0.5)
    one = Muon(ours, lr=0.1, dtype="bf16", coefficients=triple, steps=7)
    other = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.0, ns_coefficients=triple, ns_steps=7
    )
    _give(ours, 0)
    _give(theirs, 0)
    one.step()
    other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-3)


def test_bf16_weights_stay_near_torch_and_are_rounded_once():
    """torch rounds after the decay and after the update, ours once, at the end."""
    ours, theirs = _pair(torch.bfloat16)
    keys = {"lr": 0.02, "weight_decay": 0.1}
    one, other = Muon(ours, **keys), torch.optim.Muon(theirs, **keys)
    wide = [p.detach().float().requires_grad_() for p in ours]
    exact = Muon(wide, dtype="bf16", **keys)
    for some in (ours, theirs, wide):
        _give(some, 0)
    for a, b in zip(wide, ours, strict=True):
        a.grad = b.grad.float()
    for optimizer in (one, other, exact):
        optimizer.step()
    for a, b, c in zip(ours, theirs, wide, strict=True):
        mine, torchs = ((x.detach().float() - c.detach()).abs() for x in (a, b))
        assert mine.mean() <= torchs.mean()
        assert (a.detach().float() - b.detach().float()).abs().max() < 4e-3


def test_newton_schulz_leads_to_the_polar_factor():
    """Against torch's SVD: U V^T, once the coefficients lead to 1."""
    g = torch.randn(40, 100, dtype=torch.float64)
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    got = newton_schulz(g, steps=30, coefficients=(15 / 8, -10 / 8, 3 / 8))
    assert torch.allclose(got, u @ v, atol=1e-9)


def _model():
    model = LanguageModel(ModelConfig(**MODEL))
    model.init_weights(3)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():  # a zero weight would hide its neighbors' gradients
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw), alpha=0.02)
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_all_other_groups_equal_adamw(fused):
    """Rates, betas and decays of the reference run, scalars decayed as there."""
    run = load_run("littlelm-3.8b")
    options = run.optimizer.options
    ours, theirs = _model(), _model()
    one = build_optimizer(ours, run.optimizer, quiet=True)
    roles = {}
    for name, p in theirs.named_parameters():
        roles.setdefault(parameter_role(name), []).append(p)
    matrices = roles.pop("matrix")
    other = torch.optim.AdamW(
        [{"params": ps, **options[role]} for role, ps in roles.items()], fused=fused
    )
    muon = Muon(matrices, lr=0.02)
    assert set(roles) == {"embedding", "head", "value_embeddings", "norm", "scalars"}
    draw = torch.Generator().manual_seed(6)
    for _ in range(4):
        ids = torch.randint(90, (3, 17), generator=draw)
        for model in (ours, theirs):
            model.zero_grad()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad.clone()  # the same gradients: steps are compared, not paths
        one.step()
        other.step()
        muon.step()
        pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
        for (name, p), q in pairs:
            assert torch.allclose(p, q, atol=1e-5), name


def test_a_state_moves_to_the_3_8b_run_and_back(capsys):
    """The reference run's optimizer over its own parameters, without their memory."""
    run = load_run("littlelm-3.8b")
    with torch.device("meta"):
        model = LanguageModel(model_config(run, 50257))
    optimizer = build_optimizer(model, run.optimizer)
    printed = capsys.readouterr().out
    counts = {
        g["name"]: sum(p.numel() for p in g["params"]) for g in optimizer.param_groups
    }
    assert counts["matrix"] == 28 * 100_663_296
    assert counts["embedding"] == counts["head"] == 154_533_888
    assert counts["value_embeddings"] == 721_158_144
    assert counts["norm"] == 172_032 + 3072
    rates = {g["name"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {
        "matrix": 0.02, "embedding": 0.1414, "head": 0.002828,
        "value_embeddings": 0.0707, "norm": 0.005, "scalars": 0.005,
    }  # fmt: skip
    for name, count in counts.items():
        assert any(
            name in line and f"{count:,}" in line for line in printed.split("\n")
        )
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)  # no statistics yet, but all the keys
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
