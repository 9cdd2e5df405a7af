"""Contract of Newton-Schulz: (g, steps, coefficients) -> g with singular values near 1.

Every expectation is computed here by another way: from a matrix that is put together
from known singular values, each of which must follow the polynomial on its own.
"""

import numpy as np
import pytest
import torch

from littlelm_core.config import ConfigError

PART = "littlelm_core.optim:newton_schulz"

QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7098827382687081, 0.42323551169305323),
)


def known(rows, columns, least=1e-3):
    """A matrix with singular values from `least` to 1, with them and its vectors."""
    size = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, size, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, size, dtype=torch.float64)).Q
    values = torch.logspace(np.log10(least), 0, size, dtype=torch.float64)
    return (left * values @ right.T).float(), values, left, right


def followed(values, triples, factor=1.0):
    """Each singular value's own way through the rounds, in fp64."""
    s = values / values.norm() / factor
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


def off(got, wanted):
    return float((got.double() - wanted).abs().max())


def _exact(part, shape, name, triples, factor):
    g, values, left, right = known(*shape)
    wanted = left * followed(values, triples, factor) @ right.T
    error = off(part(g, coefficients=name), wanted)
    assert error < 2e-5, (
        f"{name} of a {shape} matrix is off by {error:.2g} in fp32: five rounds of "
        "aX + b(XX')X + c(XX')²X on X / (factor · Frobenius norm)"
    )


def test_every_singular_value_follows_the_quintic(part):
    for shape in ((48, 48), (32, 80), (80, 32), (450, 640)):
        _exact(part, shape, "quintic", [QUINTIC] * 5, 1)


def test_polar_express_has_its_own_triples_and_margin(part):
    for shape in ((48, 48), (32, 80), (80, 32)):
        _exact(part, shape, "polar_express", POLAR, 1.01)


def test_singular_values_land_in_their_band(part):
    # The least value is 1e-3 of the Frobenius norm, as far down as Polar Express aims.
    for name, low, high in (("quintic", 0.3, 1.21), ("polar_express", 0.85, 1.145)):
        u, _, v = torch.linalg.svd(torch.randn(24, 60), full_matrices=False)
        values = torch.logspace(-3, -0.8, 24)
        values[-1] = (1 - values[:-1].square().sum()).sqrt()
        got = torch.linalg.svdvals(part((u * values) @ v, coefficients=name))
        assert low < got.min(), f"{name} leaves {got.min():.3f}, below {low}"
        assert got.max() < high, f"{name} leaves {got.max():.3f}, above {high}"


def test_the_transpose_of_the_result_is_the_result_of_the_transpose(part):
    for shape in ((20, 50), (33, 33)):
        g = torch.randn(shape)
        for name in ("quintic", "polar_express"):
            one, other = part(g, coefficients=name), part(g.T, coefficients=name).T
            assert torch.allclose(one, other, atol=2e-5), f"{shape} {name}"


def test_scale_does_not_matter(part):
    g = torch.randn(12, 30)
    wanted = part(g)
    for scale in (1e-12, 1e-5, 1e6):
        error = off(part(scale * g), wanted.double())
        assert error < 1e-4, (
            f"a gradient {scale:g} times as large gives another result ({error:.2g} "
            "off): nothing may be added to the norm"
        )


def test_zeros_stay_zeros(part):
    for shape in ((4, 6), (6, 4), (3, 4, 6)):
        assert torch.equal(part(torch.zeros(shape)), torch.zeros(shape)), f"{shape}"
    g = torch.randn(2, 4, 6)
    g[0] = 0
    got = part(g)
    assert torch.equal(got[0], torch.zeros(4, 6)), "a matrix of zeros in a batch"
    assert torch.isfinite(got).all()


def test_a_batch_is_its_matrices_one_by_one(part):
    for shape in ((3, 16, 40), (3, 40, 16)):
        g = torch.randn(shape) * torch.tensor([1.0, 1e-4, 1e3])[:, None, None]
        wanted = torch.stack([part(m) for m in g])
        error = off(part(g), wanted.double())
        assert error < 2e-5, f"{shape}: each matrix has a norm of its own ({error:.2g})"


def test_own_coefficients(part):
    g, values, left, right = known(20, 36, least=0.2)
    one = part(g, steps=3, coefficients=(2.0, -1.5, 0.5))
    wanted = left * followed(values, [(2.0, -1.5, 0.5)] * 3) @ right.T
    assert off(one, wanted) < 2e-5, "one triple stands for all rounds"
    several = ((3.0, -3.0, 1.0), (1.5, -0.5, 0.0))
    wanted = left * followed(values, [several[0], *[several[1]] * 3]) @ right.T
    got = part(g, steps=4, coefficients=several)
    assert off(got, wanted) < 2e-5, "one triple a round; the last is used again"
    many = part(g, steps=40, coefficients=(1.5, -0.5, 0.0))
    assert off(many, left @ right.T) < 1e-4, "(1.5, -0.5, 0) leads to exactly 1"


def test_keeps_the_format_and_the_input(part):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((8, 20), (20, 8)):
            g = torch.randn(shape).to(dtype).requires_grad_()
            before = g.detach().clone()
            got = part(g)
            assert got.dtype == dtype, f"{dtype} went in, {got.dtype} came out"
            assert torch.equal(g.detach(), before), f"the given {dtype} tensor changed"
            assert not got.requires_grad, "no graph: nothing learns through this"


def test_bf16_is_near_fp32(part):
    g = torch.randn(64, 160)
    values = torch.linalg.svdvals(part(g.bfloat16()).float())
    wanted = torch.linalg.svdvals(part(g))
    # bf16 has 8 bits, and five rounds add their errors up: 2 % is usual, 5 % allowed.
    assert off(values, wanted.double()) < 0.05


def test_what_is_no_matrix_is_refused(part):
    for shape in ((5,), (), (2, 2, 3, 3)):
        with pytest.raises(ConfigError, match="matri"):
            part(torch.randn(shape))


def test_unknown_coefficients_and_steps_are_refused(part):
    g = torch.randn(4, 4)
    with pytest.raises(ConfigError, match="quintic"):
        part(g, coefficients="quintik")
    for wrong in ((1.5, -0.5), (), ((1.0, 2.0, 3.0), (1.0, 2.0))):
        with pytest.raises(ConfigError, match="triple"):
            part(g, coefficients=wrong)
    for steps in (0, -1, 100):
        with pytest.raises(ConfigError, match="steps"):
            part(g, steps=steps)
