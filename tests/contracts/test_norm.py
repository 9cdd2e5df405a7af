"""Contract of a norm: (dim, eps) -> module over the last dimension."""

import pytest
import torch

PART = "littlelm_core.blocks:RMSNorm"


def _exact(x, gain, eps):
    x = x.double()
    mean_square = (x * x).mean(-1, keepdim=True)
    return x / (mean_square + eps) ** 0.5 * gain.double()


def _gained(part, dim, eps=1e-6):
    norm = part(dim, eps=eps)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, dim))
    return norm


def test_formula(part):
    x = 3.0 * torch.randn(2, 5, 16) + 1.0
    norm = _gained(part, 16)
    error = (norm(x) - _exact(x, norm.weight, 1e-6)).abs().max()
    assert error < 1e-5, f"off by {error:.2g}: x / rms(x) * gain, the mean stays in x"


def test_by_hand(part):
    y = part(2)(torch.tensor([[3.0, 4.0]]))  # the mean square is 12.5
    wanted = [3 / 12.5**0.5, 4 / 12.5**0.5]
    assert y[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_gains_start_at_one(part):
    norm = part(8)
    assert [(n, tuple(p.shape)) for n, p in norm.named_parameters()] == [
        ("weight", (8,))
    ], "one gain per channel, called weight"
    assert torch.equal(norm.weight, torch.ones(8))


def test_eps_is_under_the_root(part):
    x = torch.full((1, 4), 1e-3)  # its mean square is 1e-6, as large as eps
    y = part(4, eps=1e-6)(x)
    assert torch.allclose(y, torch.full((1, 4), 0.5**0.5), atol=1e-4), (
        f"x / sqrt(mean(x²) + eps) = 0.7071 here, not {y[0, 0]:.4f}"
    )


def test_zeros_stay_zero_with_finite_gradients(part):
    x = torch.zeros(1, 3, 8, requires_grad=True)
    y = part(8)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(1, 3, 8))
    assert torch.isfinite(x.grad).all()


def test_low_precision_is_computed_in_fp32(part):
    # 300² is beyond fp16's 65,504, and a sum of 512 squares is lost in bf16's 8 bits.
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        x = (300 * torch.randn(4, 512)).to(dtype)
        norm = _gained(part, 512)
        for gains in (torch.float32, dtype):
            y = norm.to(gains)(x)
            assert y.dtype == dtype, f"{dtype} in, {y.dtype} out"
            exact = _exact(x, norm.weight, 1e-6)
            error = ((y.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max()
            # one rounding of the result, one more where gains are in dtype
            assert error < 2.5 * 2.0**-bits, (
                f"{dtype} with gains in {gains}: relative error {error:.4f}"
            )


def test_autocast_keeps_fp32(part):
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = part(16)(x)
    assert y.dtype == torch.float32, f"fp32 in, {y.dtype} out under autocast"
    assert torch.allclose(y, part(16)(x), atol=1e-6)


def test_tokens_are_normed_one_by_one(part):
    x = torch.randn(2, 4, 8)
    y = part(8)(x)
    x[0, 1] *= 100.0
    changed = part(8)(x)
    x[0, 1] /= 100.0
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[0, 1] = False
    assert torch.equal(changed[kept], y[kept]), "one token's size reached another's"


def test_gradients_are_right(part):
    norm = _gained(part, 6).double()
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    assert y.dtype == torch.float64
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, norm.weight), grad)
    gain = norm.weight.detach().requires_grad_()
    exact = torch.autograd.grad(_exact(x, gain, 1e-6), (x, gain), grad)
    for name, one, other in zip(("x", "the gain"), ours, exact, strict=True):
        assert torch.allclose(one, other, atol=1e-5), f"gradient of {name}"
