"""Graders of chapter 08's exercises."""

import math

import torch


def exercise_8_1(answer):
    """The polynomial of one singular value."""
    quintic = (3.4445, -4.7750, 2.0315)
    assert answer(0.5, []) == 0.5, "no round leaves the value as it is"
    once = 3.4445 * 0.5 - 4.7750 * 0.125 + 2.0315 * 0.03125
    assert math.isclose(answer(0.5, [quintic]), once), "a s + b s³ + c s⁵"
    twice = 2.0 * once - 1.5 * once**3 + 0.5 * once**5
    assert math.isclose(answer(0.5, [quintic, (2.0, -1.5, 0.5)]), twice), (
        "each round starts from the result of the one before, with its own triple"
    )


def exercise_8_2(answer):
    """Newton-Schulz in plain torch, against the SVD."""
    for shape in ((12, 12), (8, 20), (20, 8), (3, 8, 20)):
        g = torch.randn(shape)
        u, s, v = torch.linalg.svd(g.double(), full_matrices=False)
        s = s / s.norm(dim=-1, keepdim=True)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        error = (answer(g).double() - (u * s[..., None, :]) @ v).abs().max()
        assert error < 1e-4, f"a matrix of shape {shape} is off by {error:.2g}"
    g = torch.randn(2, 6, 9) * torch.tensor([1.0, 1e-3])[:, None, None]
    alone = torch.stack([answer(m) for m in g])
    assert torch.allclose(answer(g), alone, atol=1e-4), "each matrix has its own norm"
    assert not answer(torch.zeros(3, 4)).any(), "zeros stay zeros, never nan"


def exercise_8_3(answer):
    """From one scale rule to the other."""
    assert math.isclose(answer(0.02, 100, 100), 0.02 / 2), "0.2 · √100 is 2"
    assert math.isclose(answer(0.02, 400, 100), 0.02 * 2 / 4), "a tall one: √(400/100)"
    assert math.isclose(answer(0.02, 100, 400), 0.02 / 4), "a wide one: √max is 20"


def exercise_8_4(answer):
    """Arithmetic of the rounds."""
    assert answer(3, 5, 1) == 2 * 9 * 5 + 2 * 27 + 2 * 9 * 5, "X X', its square, P X"
    assert answer(5, 3, 1) == answer(3, 5, 1), "a tall matrix is transposed first"
    assert answer(768, 3072, 5) == 5 * (4 * 768**2 * 3072 + 2 * 768**3)


def exercise_8_5(answer):
    """Stochastic rounding to a grid."""
    draw = torch.Generator().manual_seed(0)
    x = torch.full((20_000,), -0.30)
    got = answer(x, 0.25, draw)
    values = {round(v, 4) for v in got.unique().tolist()}
    assert values == {-0.5, -0.25}, f"-0.30 lies between -0.5 and -0.25, not {values}"
    assert abs(float(got.mean()) + 0.30) < 0.003, f"the mean is {got.mean():.4f}"
    exact = torch.tensor([-0.5, 0.0, 0.75])
    assert torch.equal(answer(exact, 0.25, draw), exact), "multiples stay"
    one, two = (answer(x[:50], 0.25, torch.Generator().manual_seed(s)) for s in (1, 1))
    assert torch.equal(one, two), "all chance comes from the generator"
    each = answer(torch.full((200,), 0.1), 0.25, draw)
    assert 0 < float((each > 0).float().mean()) < 1, "each entry has its own chance"
