"""FP8 against torchao's dynamic scaling (emulated) and torch's own product.

torchao is no requirement: without it only torch is compared.
"""

import pytest
import torch
from torch import nn

from littlelm_core import fp8
from littlelm_core.fp8 import E4M3, E5M2, Float8Linear, Operand, quantize


def _random(*shape, seed=0, size=1.0):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("size", [1e-14, 1e-6, 1.0, 1e5])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_scales_and_bytes_are_torchaos(dtype, scaling, size, kind):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    x = _random(32, 48, size=size).to(kind)
    x[3] = 0.0
    how = config.ScalingGranularity
    how = how.AXISWISE if scaling == "row" else how.TENSORWISE
    theirs = utils.tensor_to_scale(
        x, dtype, scaling_granularity=how, axiswise_dim=-1 if scaling == "row" else None
    )
    bytes_ = utils.to_fp8_saturated(x.float() * theirs, dtype)
    q, scale = quantize(x, dtype, scaling)
    assert torch.equal(scale, theirs.reciprocal())
    assert torch.equal(q.view(torch.uint8), bytes_.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [(32, 64, 48), (128, 192, 64)])
def test_layer_is_torchaos(recipe, shape):
    pytest.importorskip("torchao.float8")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    # torchao rounds the scales of rows down to powers of two, tensorwise ones not.
    object.__setattr__(config, "round_scales_to_power_of_2", False)
    tokens, inputs, outputs = shape
    plain = nn.Linear(inputs, outputs, bias=True)
    ours = Float8Linear.from_linear(plain, recipe=recipe)
    theirs = Theirs.from_float(plain, config=config)
    x, g = _random(tokens, inputs, size=2.0), _random(tokens, outputs, size=1e-4)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        plain.zero_grad()
        y = layer(leaf)
        y.backward(g)
        results.append((y, leaf.grad, plain.weight.grad.clone(), plain.bias.grad))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max() + 1e-30


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_as_engine_inside_our_layer(recipe):
    pytest.importorskip("torchao.float8")
    plain = nn.Linear(64, 48, bias=True)
    product = fp8.torchao_product(recipe, emulate=True)
    layer = Float8Linear.from_linear(plain, recipe=recipe, product=product)
    ours = Float8Linear.from_linear(plain, recipe=recipe)
    x = _random(2, 16, 64).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert plain.weight.grad is not None
    assert torch.isfinite(x.grad).all()
    assert y.shape == (2, 16, 48)
    # Scales of rows are powers of two there: other roundings of the same size.
    limit = 1e-5 if recipe == "tensorwise" else 0.06
    assert (y - ours(x)).norm() <= limit * y.norm()
    assert layer.eval()(x[:, :7]).shape == (2, 7, 48)


def test_mxfp8_of_torchao_imports():
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    assert callable(fp8.torchao_product("mxfp8"))


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_product_is_torchs(pair, out):
    a = Operand(*quantize(_random(32, 64, seed=1), pair[0]))
    b = Operand(*quantize(_random(48, 64, seed=2), pair[1]))
    try:
        theirs = torch._scaled_mm(
            a.q, b.q.T, scale_a=a.scale, scale_b=b.scale, out_dtype=out
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch._scaled_mm on this CPU: {error}")
    ours = fp8.emulated_product(a, b, out)
    limit = 1e-6 if out == torch.float32 else 2**-8
    assert ours.dtype == theirs.dtype == out
    assert (ours - theirs).abs().max() <= limit * theirs.abs().max()


def test_all_bytes_widen_as_torch_casts_them():
    for dtype in (E4M3, E5M2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        every = every[every.float().isfinite()][:240].reshape(15, 16)
        assert torch.equal(fp8.widen(every), every.float())
        assert torch.equal(fp8.widen(every.T), every.float().T)
