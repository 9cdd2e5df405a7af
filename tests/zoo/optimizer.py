"""Optimizers of a whole model with one mistake each."""

import torch

from littlelm_core.optim import MuonAdamW


class DecayInTheGradient(torch.optim.Adam):
    """Adam's decay: added to the gradient and then divided by its size."""


def decays_everything(groups, **keys):
    """One decay for all, norm gains and scalars too."""
    decay = max(
        [keys.get("weight_decay", 0.0)] + [g.get("weight_decay", 0.0) for g in groups]
    )
    return MuonAdamW([{**g, "weight_decay": decay} for g in groups], **keys)


def two_lists(groups, **keys):
    """Muon for all matrices by their shape: embedding and head are among them."""
    lr = keys.get("lr", 0.01)
    params = [p for group in groups for p in group["params"]]
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    groups = [
        {"name": "matrix", "params": matrices},
        {"name": "scalars", "params": rest},
    ]
    return MuonAdamW(groups, lr=lr)


class RateKeptFromTheStart(MuonAdamW):
    def __init__(self, groups, **keys):
        super().__init__(groups, **keys)
        self.rates = [g["lr"] for g in self.param_groups]

    def step(self, closure=None):
        given = [g["lr"] for g in self.param_groups]
        for group, lr in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = lr
        super().step(closure)
        for group, lr in zip(self.param_groups, given, strict=True):
            group["lr"] = lr


class DecayWithoutTheRate(MuonAdamW):
    """Shrinks by weight_decay alone: a rate of 0 does not stop it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.1 * group["weight_decay"])
        kept = [g["weight_decay"] for g in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay


class ForgetsOnLoad(MuonAdamW):
    """The groups come back and the statistics do not."""

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})


class StatisticsRoundedOnLoad(MuonAdamW):
    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)


class ZeroForNoGradient(MuonAdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().step(closure)


class GoesUphill(MuonAdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else -p.grad
        super().step(closure)


def own_keys_lost(groups, **keys):
    """Only names and parameters of the groups are taken over."""
    plain = [{"name": g["name"], "params": g["params"]} for g in groups]
    for group in plain:
        group["weight_decay"] = 0.0
    return MuonAdamW(plain, **{"lr": 0.01, **keys})


class RateOfTheFirstStep(MuonAdamW):
    """The rate of AdamW's groups is kept when it is first seen."""

    def update(self, group, params, noise=None):
        rate = group["lr"]
        if not self.is_muon(group):
            group["lr"] = group.setdefault("first", rate)
        super().update(group, params, noise)
        group["lr"] = rate


ZOO = {
    "decay in the gradient": (
        DecayInTheGradient,
        "test_decay_is_decoupled_and_only_where_it_is_wanted",
    ),
    "decays norms": (
        decays_everything,
        "test_decay_is_decoupled_and_only_where_it_is_wanted",
    ),
    "groups by shape": (
        two_lists,
        "test_every_parameter_is_in_the_group_of_its_role",
    ),
    "rate of the start": (
        RateKeptFromTheStart,
        "test_the_rate_of_a_group_is_read_at_every_step",
    ),
    "rate of the first step": (
        RateOfTheFirstStep,
        "test_the_rate_of_a_group_is_read_at_every_step",
    ),
    "decay without the rate": (
        DecayWithoutTheRate,
        "test_the_rate_of_a_group_is_read_at_every_step",
    ),
    "statistics lost on load": (ForgetsOnLoad, "test_a_resume_is_exact"),
    "statistics rounded on load": (StatisticsRoundedOnLoad, "test_a_resume_is_exact"),
    "no gradient taken for zero": (
        ZeroForNoGradient,
        "test_without_a_gradient_nothing_moves",
    ),
    "uphill": (GoesUphill, "test_it_learns"),
    "keys of a group lost": (own_keys_lost, "test_a_group_has_its_own_keys"),
}
