"""FP8: scaled rounding, products that read 8 bits, and a conversion by rule.

The part is a module with quantize, Float8Linear and convert_to_fp8.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

PART = "littlelm_core.fp8"

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = [(dtype, scaling) for dtype in (E4M3, E5M2) for scaling in ("tensor", "row")]


def _random(*shape, seed=0, size=1.0):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _back(part, x, *how):
    q, scale = part.quantize(x, *how)
    return q.float() * scale


# ---- quantize


def test_shapes_and_types(part):
    for dtype, scaling in BOTH:
        for kind in (torch.float32, torch.bfloat16):
            x = _random(3, 5, 16).to(kind)
            before = x.clone()
            q, scale = part.quantize(x, dtype, scaling)
            assert q.dtype == dtype, f"q is {q.dtype}, not {dtype}"
            assert q.shape == x.shape, f"q has shape {tuple(q.shape)}"
            assert scale.dtype == torch.float32, f"a scale in {scale.dtype} is rounded"
            wanted = (3, 5, 1) if scaling == "row" else ()
            assert scale.numel() == math.prod(wanted), (
                f'"{scaling}" gives {scale.numel()} scales for a tensor of (3, 5, 16)'
            )
            assert (q.float() * scale).shape == x.shape, "q and scale do not broadcast"
            assert torch.equal(x, before), "quantize changes its input"


def test_off_by_half_a_step_at_most(part):
    for dtype, scaling in BOTH:
        for size in (1e-8, 1.0, 1e6):
            x = _random(64, 128, seed=1, size=size)
            amax = x.abs().amax(-1, True) if scaling == "row" else x.abs().max()
            info = torch.finfo(dtype)
            # Half a step of a normal number, or of the subnormal ones.
            step = torch.maximum(x.abs(), amax * (info.tiny / info.max)) * info.eps
            off = (_back(part, x, dtype, scaling) - x).abs()
            worst = (off / step).max().item()
            assert worst <= 0.51, (
                f"{dtype} by {scaling}, values near {size:g}: off by {worst:.2f} steps"
            )


def test_the_largest_value_uses_the_whole_range(part):
    for dtype, scaling in BOTH:
        for size in (1e-6, 1.0, 1e5):
            q, _ = part.quantize(_random(8, 64, seed=2, size=size), dtype, scaling)
            top = q.float().abs().amax(-1)
            top = top if scaling == "row" else top.amax()[None]
            limit = torch.finfo(dtype).max
            assert (top >= limit * 0.93).all(), (
                f"{dtype} by {scaling}, size {size:g}: the largest q is "
                f"{top.min():g} of {limit:g}, so bits are given away"
            )


def test_what_was_fp8_stays_bit_for_bit(part):
    for dtype in (E4M3, E5M2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        every = every[every.float().isfinite()]
        q, scale = part.quantize(every.float(), dtype)
        assert torch.equal(q.float(), every.float()), "values of the format change"
        assert abs(float(scale) - 1) < 1e-6, f"scale {float(scale)} for a full range"


def test_zeros_stay_zeros(part):
    for dtype, scaling in BOTH:
        x = _random(4, 16)
        x[1] = 0.0
        for given in (torch.zeros(4, 16), x, torch.zeros(4, 16) - 0.0):
            q, scale = part.quantize(given, dtype, scaling)
            assert scale.isfinite().all(), f"amax 0 gives the scale {scale.tolist()}"
            back = q.float() * scale
            assert (back[1] == 0).all(), "a zero came back as something else"


def test_finite_values_never_overflow(part):
    for dtype, scaling in BOTH:
        for size in (1e-30, 1e-13, 1.0, 3e4, 3e38):
            x = size * torch.linspace(-1.0, 1.0, 64).reshape(4, 16)
            q, scale = part.quantize(x, dtype, scaling)
            assert q.float().isfinite().all(), (
                f"{dtype} by {scaling}: finite values up to {size:g} became "
                f"{q.float().abs().max()}"
            )
            back = q.float() * scale
            assert back.isfinite().all(), f"values up to {size:g} are not finite again"
            # Below the floor of amax the largest value is rounded like any other.
            most = x.abs().max() * (1.001 if size > 1e-11 else 1.15)
            assert (back.abs() <= most).all(), "larger than it was"


def test_not_finite_is_never_hidden(part):
    for dtype, scaling in BOTH:
        for bad in (math.inf, -math.inf, math.nan):
            x = _random(4, 16)
            x[2, 3] = bad
            back = _back(part, x, dtype, scaling)
            assert not back[2].isfinite().any(), (
                f"{dtype} by {scaling}: {bad} in a tensor left finite numbers beside it"
            )
            if scaling == "row":
                assert back[[0, 1, 3]].isfinite().all(), "another row suffers from it"


def test_rows_have_scales_of_their_own(part):
    x = _random(8, 64)
    sizes = torch.tensor([10.0**k for k in range(-8, 8, 2)])[:, None]
    for dtype in (E4M3, E5M2):
        one = _back(part, x, dtype, "row")
        many = _back(part, x * sizes, dtype, "row")
        assert torch.allclose(many / sizes, one, rtol=0.15, atol=1e-3), (
            "a row's rounding depends on the other rows"
        )
        lost = (_back(part, x * sizes, dtype, "tensor")[0] == 0).all()
        assert lost, "one scale a tensor cannot hold values 10^14 apart"


def test_another_format_or_scaling_raises(part):
    for how in ((torch.float16,), (E4M3, "column")):
        with pytest.raises(ValueError, match=r"float8|scaling"):
            part.quantize(torch.ones(2, 2), *how)


# ---- Float8Linear


def _linear(part, recipe, inputs=64, outputs=32, bias=False):
    layer = part.Float8Linear(inputs, outputs, bias=bias, recipe=recipe)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(_random(*parameter.shape, seed=number + 5))
    return layer.train()


def _run(layer, x, upstream):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    return y.detach(), x.grad, layer.weight.grad


def _plain(layer):
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(layer.weight.detach().clone())
    return plain


def test_tensorwise_is_three_products_of_rounded_numbers(part):
    layer = _linear(part, "tensorwise")
    x, g = _random(48, 64, size=3.0), _random(48, 32, seed=3, size=1e-5)
    xr, wr = _back(part, x), _back(part, layer.weight.detach())
    gr = _back(part, g, E5M2)
    wanted = xr @ wr.T, gr @ wr, gr.T @ xr
    for name, ours, right in zip(
        ("the output", "the gradient of x", "the gradient of W"),
        _run(layer, x, g), wanted, strict=True,
    ):  # fmt: skip
        off = float((ours - right).norm() / right.norm())
        assert off < 1e-5, (
            f"{name} is off by {off:.1e} from the product of e4m3 (x, W) and e5m2 (g)"
        )


def test_rowwise_scales_do_not_change_along_a_sum(part):
    layer = _linear(part, "rowwise")
    x, g = _random(48, 64), _random(48, 32, seed=3)
    # Tokens, inputs and outputs of very different sizes: a scale a tensor loses most.
    x = x * torch.logspace(-6, 6, 48)[:, None]
    g = g * torch.logspace(6, -6, 48)[:, None]
    ours, right = _run(layer, x, g), _run(_plain(layer), x, g)
    for token in (0, 24, 47):
        off = float((ours[0] - right[0])[token].norm() / right[0][token].norm())
        assert off < 0.06, f"output {token} is off by {off:.0%}"
        off = float((ours[1] - right[1])[token].norm() / right[1][token].norm())
        assert off < 0.12, f"the gradient of x {token} is off by {off:.0%}"
    x = _random(48, 64) * torch.logspace(-6, 6, 64)
    off = _run(layer.requires_grad_(), x, _random(48, 32, seed=3))[2]
    layer.weight.grad = None
    ours, right = (
        _run(m, x, _random(48, 32, seed=3))[2] for m in (layer, _plain(layer))
    )
    off = ((ours - right).norm(dim=0) / right.norm(dim=0)).max()
    assert off < 0.12, f"the gradient of W is off by {off:.0%} in one column"


def test_close_to_a_plain_linear(part):
    for recipe in ("tensorwise", "rowwise"):
        layer = _linear(part, recipe, 128, 64)
        x, g = _random(96, 128), _random(96, 64, seed=3)
        for ours, right in zip(
            _run(layer, x, g), _run(_plain(layer), x, g), strict=True
        ):
            off = float((ours - right).norm() / right.norm())
            assert 1e-4 < off < 0.12, (
                f"{recipe}: off by {off:.2%} of the norm; 8 bits are 2 to 10 %"
            )


def test_leading_dimensions_and_bias(part):
    layer = _linear(part, "tensorwise", bias=True)
    x = _random(2, 24, 64)
    y = layer(x)
    assert y.shape == (2, 24, 32)
    without = F.linear(_back(part, x), _back(part, layer.weight.detach()))
    assert torch.allclose(y, without + layer.bias, atol=1e-4), "the bias is not added"
    y.sum().backward()
    assert torch.allclose(layer.bias.grad, torch.full((32,), 48.0)), (
        "the bias's gradient is the plain sum over tokens"
    )


def test_output_has_the_autocast_type(part):
    for recipe in ("tensorwise", "rowwise"):
        layer = _linear(part, recipe)
        x = _random(32, 64).requires_grad_()
        assert layer(x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16, f"under autocast to bf16 it returns {y.dtype}"
        plain = _linear(part, recipe)(x).bfloat16()
        off = (y.float() - plain.float()).abs().max() / plain.float().abs().max()
        assert off <= 2**-8, f"rounded more than once: off by {off:.1e}"
        y.float().sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == torch.float32, (
            "gradients have the dtype of what they belong to"
        )


def test_a_gradient_that_is_not_finite_arrives(part):
    for recipe in ("tensorwise", "rowwise"):
        for bad in (math.inf, math.nan):
            g = _random(48, 32)
            g[7, 3] = bad
            _, grad_x, grad_w = _run(_linear(part, recipe), _random(48, 64), g)
            assert not grad_w.isfinite().all(), (
                f"{recipe}: {bad} in the gradient vanished on its way to W"
            )
            assert not grad_x[7].isfinite().any(), f"{recipe}: {bad} vanished for x"


def test_weights_are_not_rounded(part):
    layer = _linear(part, "tensorwise")
    before = layer.weight.detach().clone()
    _run(layer, _random(32, 64), _random(32, 32))
    assert torch.equal(layer.weight, before), "the stored weights changed"
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.dtype == torch.float32
    assert list(layer.state_dict()) == ["weight"], (
        f"a checkpoint would hold {list(layer.state_dict())}"
    )


def test_eval_mode_is_the_plain_linear_at_any_length(part):
    layer = _linear(part, "tensorwise").eval()
    x = _random(7, 64)
    assert torch.equal(layer(x), _plain(layer)(x)), "eval is not what is saved"


def test_sizes_that_do_not_fit_are_refused_in_a_line(part):
    layer = _linear(part, "tensorwise")
    for tokens in (1, 24, 40):
        with pytest.raises(ValueError, match="multiple of 16"):
            layer(_random(tokens, 64))
    with pytest.raises(ValueError, match="multiple of 16"):
        _linear(part, "tensorwise", inputs=24)(_random(32, 24))


# ---- convert_to_fp8


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "odd": nn.Linear(64, 40)})
            for _ in range(2)
        )
        self.gated = nn.Bilinear(32, 32, 32)
        self.overhead = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)


def test_conversion_is_by_rule_and_reported(part):
    net = _Net()
    report = part.convert_to_fp8(net)
    wanted = ["blocks.0.up", "blocks.1.up", "overhead"]
    assert list(report.converted) == wanted, f"converted {list(report.converted)}"
    for name, module in net.named_modules():
        is_fp8 = isinstance(module, part.Float8Linear)
        assert is_fp8 == (name in wanted), f"{name} is a {type(module).__name__}"
    for name, word in (("head", "head"), ("blocks.0.odd", "40"), ("embedding", "")):
        assert name in report.skipped, f"no reason is given for {name}"
        assert word in report.skipped[name], f"{name}: {report.skipped[name]!r}"
    assert "overhead" not in str(report).split("not ")[-1]
    assert "3" in str(report)


def test_conversion_keeps_the_parameters(part):
    net = _Net()
    before = {name: id(p) for name, p in net.named_parameters()}
    state = {name: t.clone() for name, t in net.state_dict().items()}
    net.blocks[1].eval()
    part.convert_to_fp8(net, "rowwise")
    assert {name: id(p) for name, p in net.named_parameters()} == before, (
        "an optimizer that holds the old parameters would train nothing"
    )
    assert list(net.state_dict()) == list(state)
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
    assert not net.blocks[1]["up"].training, "the mode of a module changed"
    assert net.blocks[0]["up"].training


def test_conversion_twice_changes_nothing(part):
    net = _Net()
    part.convert_to_fp8(net)
    layer = net.blocks[0]["up"]
    report = part.convert_to_fp8(net)
    assert not report.converted
    assert net.blocks[0]["up"] is layer


def test_unknown_recipe_or_engine_changes_nothing(part):
    net = _Net()
    for keys in ({"recipe": "tensorwize"}, {"engine": "torchoa"}, {"recipe": "mxfp8"}):
        with pytest.raises(ValueError, match=r"tensorwi|torcha?o|mxfp8"):
            part.convert_to_fp8(net, **keys)
    assert type(net.blocks[0]["up"]) is nn.Linear


def test_engine_that_the_device_cannot_run_is_one_line(part):
    with pytest.raises(ValueError, match=r"torchao") as error:
        part.convert_to_fp8(_Net(), engine="torchao")
    assert "\n" not in str(error.value)
    assert "littlelm" in str(error.value), "the line does not name the mend"
