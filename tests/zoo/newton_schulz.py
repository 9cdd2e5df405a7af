"""Newton-Schulz as people write it on a first try."""

from itertools import islice, repeat

import torch

from littlelm_core import optim
from littlelm_core.config import ConfigError


def _checked(g, steps, coefficients):
    if g.ndim not in (2, 3):
        raise ConfigError("not a matrix")
    return optim.rounds(coefficients, steps)


def _iterate(x, triples):
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _norm(x):
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


@torch.no_grad()
def one_norm_for_the_batch(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    return _iterate(g / (factor * g.norm()).clamp(min=1e-30), triples)


@torch.no_grad()
def something_added_to_the_norm(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    return _iterate(g / (factor * _norm(g) + 1e-7), triples)


@torch.no_grad()
def divides_zero_by_zero(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    return _iterate(g / (factor * _norm(g)), triples)


@torch.no_grad()
def always_bf16(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    x = g.bfloat16()
    return _iterate(x / (factor * _norm(x)).clamp(min=1e-30), triples).to(g.dtype)


@torch.no_grad()
def in_place(g, steps=5, coefficients="quintic"):
    """What torch.optim.Muon does to a momentum that is bf16 already."""
    factor, triples = _checked(g, steps, coefficients)
    x = g.to(torch.bfloat16 if g.dtype == torch.bfloat16 else g.dtype)
    return _iterate(x.div_((factor * _norm(x)).clamp(min=1e-30)), triples)


@torch.no_grad()
def no_margin(g, steps=5, coefficients="quintic"):
    _, triples = _checked(g, steps, coefficients)
    return _iterate(g / _norm(g).clamp(min=1e-30), triples)


@torch.no_grad()
def first_triple_again_and_again(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    triples = islice(repeat(triples[0]), steps)
    return _iterate(g / (factor * _norm(g)).clamp(min=1e-30), triples)


@torch.no_grad()
def cubic_and_quintic_swapped(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    triples = [(a, c, b) for a, b, c in triples]
    return _iterate(g / (factor * _norm(g)).clamp(min=1e-30), triples)


@torch.no_grad()
def transposed_and_not_back(g, steps=5, coefficients="quintic"):
    factor, triples = _checked(g, steps, coefficients)
    x = g.mT.reshape(g.shape) if g.shape[-2] > g.shape[-1] else g
    return _iterate(x / (factor * _norm(x)).clamp(min=1e-30), triples)


ZOO = {
    "one norm for the batch": (
        one_norm_for_the_batch,
        "test_a_batch_is_its_matrices_one_by_one",
    ),
    "eps added to the norm": (
        something_added_to_the_norm,
        "test_scale_does_not_matter",
    ),
    "zero over zero": (divides_zero_by_zero, "test_zeros_stay_zeros"),
    "bf16 whatever the input": (
        always_bf16,
        "test_every_singular_value_follows_the_quintic",
    ),
    "divides the input in place": (in_place, "test_keeps_the_format_and_the_input"),
    "Polar Express without its margin": (
        no_margin,
        "test_polar_express_has_its_own_triples_and_margin",
    ),
    "one triple for all rounds": (
        first_triple_again_and_again,
        "test_singular_values_land_in_their_band",
    ),
    "b and c swapped": (
        cubic_and_quintic_swapped,
        "test_every_singular_value_follows_the_quintic",
    ),
    "reshaped, not transposed": (
        transposed_and_not_back,
        "test_the_transpose_of_the_result_is_the_result_of_the_transpose",
    ),
}
