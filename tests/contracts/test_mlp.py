"""Contract of a block's MLP: (dim, ffn_dim) -> module that treats tokens alone.

The formula is checked for a part with the matrices of ours: w_gate, w_up and w_down
(SwiGLU), or w_up and w_down alone (relu²).
"""

import copy

import torch

PART = "littlelm_core.blocks:SwiGLU"


def _exact(ffn, x):
    """The formula in fp64 from the part's own matrices, or None for another kind."""
    names = {name for name, _ in ffn.named_parameters()}
    weights = {n: p.detach().double() for n, p in ffn.named_parameters()}
    up = x.double() @ weights.get("w_up.weight", torch.zeros(1, x.shape[-1])).double().T
    if names == {"w_gate.weight", "w_up.weight", "w_down.weight"}:
        gate = x.double() @ weights["w_gate.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ weights["w_down.weight"].T
    if names == {"w_up.weight", "w_down.weight"}:
        return up.clamp(min=0.0) ** 2 @ weights["w_down.weight"].T
    return None


def test_formula(part):
    ffn = part(8, 24)
    x = 2.0 * torch.randn(2, 5, 8)
    exact = _exact(ffn, x)
    if exact is not None:
        error = (ffn(x) - exact).abs().max()
        assert error < 1e-5, (
            f"off by {error:.2g}: w_down(silu(w_gate x) * w_up x), or w_down(relu(w_up "
            "x)²) without a gate"
        )


def test_no_parameter_is_hidden(part):
    names = {n for n, _ in part(8, 24).named_parameters()}
    if {"w_up.weight", "w_down.weight"} <= names:
        extra = names - {"w_gate.weight", "w_up.weight", "w_down.weight"}
        assert not extra, f"the projections carry no bias: {sorted(extra)}"


def test_shape_and_dtype_return(part):
    for dtype in (torch.float32, torch.bfloat16):
        ffn = part(8, 20).to(dtype)
        y = ffn(torch.randn(3, 4, 8, dtype=dtype))
        assert y.shape == (3, 4, 8), f"shape {tuple(y.shape)}"
        assert y.dtype == dtype, f"{dtype} in, {y.dtype} out"


def test_width_is_ffn_dim(part):
    small = sum(p.numel() for p in part(8, 16).parameters())
    large = sum(p.numel() for p in part(8, 32).parameters())
    assert large >= 1.8 * small, "twice ffn_dim must be about twice the parameters"


def test_tokens_do_not_see_each_other(part):
    ffn = part(8, 24)
    x = torch.randn(2, 5, 8)
    before = ffn(x)
    x[1, 3] += 1.0
    after = ffn(x)
    changed = (before - after).abs().amax(-1) > 1e-6
    assert changed.nonzero().tolist() == [[1, 3]], (
        f"a change at row 1, token 3 reached {changed.nonzero().tolist()}"
    )


def test_it_is_not_linear(part):
    ffn = part(8, 24)
    x = torch.randn(1, 16, 8)
    difference = (ffn(-x) + ffn(x)).abs().max()
    assert difference > 1e-3, "ffn(-x) = -ffn(x): a linear map adds nothing"


def test_gradients_reach_every_parameter(part):
    ffn = part(8, 24)
    ffn(torch.randn(4, 16, 8)).square().sum().backward()
    for name, parameter in ffn.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name}: no gradient"
        assert torch.isfinite(grad).all(), f"{name}: the gradient is not finite"
        assert grad.abs().max() > 0, f"{name}: the gradient is zero"


def test_bf16_stays_near_fp32(part):
    ffn = part(32, 96)
    x = torch.randn(4, 16, 32)
    wanted = ffn(x)
    got = copy.deepcopy(ffn).bfloat16()(x.bfloat16()).float()
    # 8 bits a number: weights, input and two intermediate results are rounded
    error = (got - wanted).abs().max() / wanted.abs().max()
    assert error < 0.05, f"bf16 is off by {error:.3f} of the largest value"
