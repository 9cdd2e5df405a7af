"""Counts that are plausible and wrong: the module with one function replaced."""

import dataclasses
import math
from types import SimpleNamespace

import torch

from littlelm_core import model


def _with(**replaced):
    names = {n: getattr(model, n) for n in model.__all__}
    return SimpleNamespace(**names | replaced)


def counts_real_ids_only(of):
    counts = model.count_parameters(of)
    cfg = of if isinstance(of, model.ModelConfig) else of.cfg
    spare = (cfg.padded_vocab_size - cfg.vocab_size) * cfg.dim
    for role in ("embedding", "head"):
        counts[role] -= spare
        counts["total"] -= spare
    return counts


def counts_tied_twice(of):
    counts = model.count_parameters(of)
    cfg = of if isinstance(of, model.ModelConfig) else of.cfg
    if cfg.tied:
        counts["head"] = counts["embedding"]
        counts["total"] += counts["embedding"]
    return counts


def everything_else_is_a_matrix(name):
    for word, role in (
        ("norm", "norm"), ("embedding", "embedding"), ("head", "head"),
        ("value_table", "value_embeddings"), ("scale", "scalars"), ("gate", "scalars"),
        ("bias", "scalars"),
    ):  # fmt: skip
        if word in name:
            return role
    return "matrix"


def six_per_parameter(cfg, context=None):
    attention = 12 * cfg.heads * cfg.head_dim * (context or cfg.context) * cfg.layers
    return float(6 * model.count_parameters(cfg)["total"] + attention)


def no_window(cfg, context=None):
    return model.flops_per_token(dataclasses.replace(cfg, window=None), context)


def mean_of_ratios(losses, targets, byte_counts):
    counts = torch.as_tensor(byte_counts)
    if losses.shape != targets.shape:
        raise ValueError("losses")
    if int(targets.max()) >= len(counts):
        raise ValueError("byte")
    keep = targets >= 0
    size = counts[targets[keep]]
    real = size > 0
    if not real.any():
        raise ValueError("byte")
    return float((losses[keep][real] / size[real]).mean() / math.log(2))


def specials_count(losses, targets, byte_counts):
    """Bytes of special tokens are 0, but their loss is counted."""
    model.bits_per_byte(losses, targets, byte_counts)
    keep = targets >= 0
    size = torch.as_tensor(byte_counts)[targets[keep]].sum().item()
    return losses[keep].sum().item() / math.log(2) / size


class _RoundsDown(model.ModelConfig):
    @property
    def padded_vocab_size(self):
        return max(1, self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def forgets_the_parts(run, vocab_size=None):
    return dataclasses.replace(model.model_config(run, vocab_size), part_options={})


ZOO = {
    "padding left out of the count": (
        _with(count_parameters=counts_real_ids_only),
        "test_the_reference_run_has_its_parameters",
    ),
    "tied matrix counted twice": (
        _with(count_parameters=counts_tied_twice),
        "test_counts_are_those_of_the_model",
    ),
    "unknown names are matrices": (
        _with(parameter_role=everything_else_is_a_matrix),
        "test_every_parameter_has_one_role_and_unknown_names_raise",
    ),
    "6 FLOPs for a lookup too": (
        _with(flops_per_token=six_per_parameter),
        "test_flops_per_token_follow_the_formula",
    ),
    "window not seen": (
        _with(flops_per_token=no_window),
        "test_flops_per_token_follow_the_formula",
    ),
    "mean of each token's ratio": (
        _with(bits_per_byte=mean_of_ratios),
        "test_bits_per_byte_by_hand",
    ),
    "loss of special tokens counted": (
        _with(bits_per_byte=specials_count),
        "test_bits_per_byte_by_hand",
    ),
    "vocabulary rounded down": (
        _with(ModelConfig=_RoundsDown),
        "test_the_vocabulary_is_padded_up",
    ),
    "keys of parts lost": (
        _with(model_config=forgets_the_parts),
        "test_a_run_becomes_a_config",
    ),
}
