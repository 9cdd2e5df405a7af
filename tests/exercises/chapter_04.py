"""Graders of chapter 04's exercises."""

import itertools
import math

import torch
import torch.nn.functional as F

from littlelm_core.model import LanguageModel, ModelConfig


def exercise_4_1(answer):
    """Padded vocabulary and its cost."""
    assert answer(50257, 64, 3072) == (50304, 47 * 3072 * 4), (
        "47 rows more in two tables of 3072 numbers of 2 bytes"
    )
    assert answer(128, 64, 10) == (128, 0), "a multiple of 64 needs no padding"
    padded, added = answer(1, 8, 3)
    assert (padded, added) == (8, 7 * 3 * 4), f"1 padded to 8: got {padded}, {added}"


def exercise_4_2(answer):
    """Gradient of the capped mean loss."""
    for softcap in (2.0, 15.0):
        logits = (4 * torch.randn(7, 11)).requires_grad_()
        targets = torch.randint(0, 11, (7,))
        F.cross_entropy(softcap * torch.tanh(logits / softcap), targets).backward()
        got = answer(logits.detach().clone(), targets, softcap)
        assert got.shape == (7, 11), f"one number a logit, not {tuple(got.shape)}"
        assert torch.allclose(got, logits.grad, atol=1e-6), (
            f"softcap {softcap}: off by {(got - logits.grad).abs().max():.2g}; mind "
            "the slope of tanh and the mean"
        )


def exercise_4_3(answer):
    """Losses from chunks of the vocabulary, with bounded memory."""
    x, weight = torch.randn(9, 6), 3 * torch.randn(50, 6)
    targets = torch.randint(0, 50, (9,))
    wanted = F.cross_entropy(x @ weight.T, targets, reduction="none")
    for chunk in (1, 7, 50, 64):
        got = answer(x, weight, targets, chunk)
        assert torch.allclose(got, wanted, atol=1e-4), f"chunk {chunk}: wrong losses"
    large = answer(200 * x, weight, targets, 7)
    assert torch.isfinite(large).all(), (
        "large logits overflow: keep the running maximum"
    )
    wide = torch.randn(2, 6), torch.randn(4000, 6)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None:
                seen.append(out.numel())
            return out

    with Watch():
        answer(*wide, torch.tensor([1, 3999]), 100)
    assert max(seen) < 4000, f"a tensor of {max(seen)} numbers for chunks of 2 x 100"


def exercise_4_4(answer):
    """Parameters in closed form."""
    for ffn, tied, scales, values, layers in itertools.product(
        ("swiglu", "relu2"), (False, True), (False, True), (False, True), (3, 4)
    ):
        cfg = ModelConfig(
            32, layers, 4, 2, 48, 100, 16, head_dim=12, ffn=ffn, tied=tied,
            residual_scales=scales, value_embeddings=values,
        )  # fmt: skip
        with torch.device("meta"):
            wanted = sum(p.numel() for p in LanguageModel(cfg).parameters())
        got = answer(cfg)
        assert got == wanted, (
            f"{layers} layers, ffn={ffn}, tied={tied}, residual_scales={scales}, "
            f"value_embeddings={values}: {got} in place of {wanted}"
        )


def exercise_4_5(answer):
    """Bits per byte of all domains together."""
    domains = {"code": (2000.0, 1000), "prose": (300.0, 100)}
    wanted = 2300.0 / math.log(2) / 1100
    got = answer(domains)
    assert math.isclose(got, wanted, rel_tol=1e-6), (
        f"{got} in place of {wanted:.4f}: bytes weigh the domains"
    )
    assert math.isclose(answer({"one": (math.log(2) * 8, 8)}), 1.0), "8 bits, 8 bytes"
