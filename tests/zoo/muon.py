"""Muon with one mistake each."""

import torch

from littlelm_core import optim
from littlelm_core.optim import Muon


class CoupledDecay(Muon):
    """Decay goes into the gradient, where orthogonalizing takes its size away."""

    def update(self, group, params, noise=None):
        for p in params:
            p.grad = p.grad + group["weight_decay"] * p
        super().update({**group, "weight_decay": 0.0}, params, noise)


class DecayTimesScale(Muon):
    """The rate is scaled for the shape before the decay takes it."""

    def update(self, group, params, noise=None):
        for p in params:
            scale = optim.SCALES[group["scale"]](*p.shape[-2:])
            keys = {"weight_decay": group["weight_decay"] * scale}
            super().update({**group, **keys}, [p], noise)


class SumInsteadOfMean(Muon):
    """m = beta m + g with Nesterov's g + beta m: the direction of another mix."""

    def directions(self, group, batch):
        updates = []
        for p in batch:
            state = self.state[p]
            m = state.setdefault("momentum_buffer", torch.zeros_like(p))
            m.lerp_(p.grad, 1 - group["momentum"])
            updates.append(optim.newton_schulz(m + p.grad if group["nesterov"] else m))
        return updates


class RowsAndColumnsSwapped(Muon):
    def update(self, group, params, noise=None):
        for p in params:
            rows, columns = p.shape[-2:]
            scales = optim.SCALES[group["scale"]]
            keys = {"lr": group["lr"] * scales(columns, rows) / scales(rows, columns)}
            keys["weight_decay"] = group["weight_decay"] * group["lr"] / keys["lr"]
            super().update({**group, **keys}, [p], noise)


class FirstTwoDimensions(Muon):
    """Takes the shape of a stack for that of its matrices."""

    def update(self, group, params, noise=None):
        for p in params:
            scales = optim.SCALES[group["scale"]]
            right = scales(*p.shape[-2:])
            lr = group["lr"] * (scales(*p.shape[:2]) / right)
            super().update({**group, "lr": lr}, [p], noise)


class CautiousTheWrongWayRound(Muon):
    def update(self, group, params, noise=None):
        before = [p.detach().clone() for p in params]
        super().update({**group, "weight_decay": 0.0}, params, noise)
        amount = group["lr"] * group["weight_decay"]
        for p, w in zip(params, before, strict=True):
            away = (w - p) * w < 0 if group["cautious"] else torch.ones_like(p).bool()
            p.sub_(amount * w * away)


class RateKeptFromTheStart(Muon):
    def step(self, closure=None):
        given = [g["lr"] for g in self.param_groups]
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]
        super().step(closure)
        for group, lr in zip(self.param_groups, given, strict=True):
            group["lr"] = lr


class ZeroForNoGradient(Muon):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().step(closure)


class NormNotRestored(Muon):
    def directions(self, group, batch):
        updates = super().directions({**group, "normuon": False}, batch)
        if group["normuon"]:
            updates = [u / u.square().mean(-1, keepdim=True).sqrt() for u in updates]
        return updates


class NormOfThisStepOnly(Muon):
    def directions(self, group, batch):
        updates = super().directions({**group, "normuon": False}, batch)
        if not group["normuon"]:
            return updates
        even = [u / u.square().mean(-1, keepdim=True).sqrt() for u in updates]
        return [e * (u.norm() / e.norm()) for e, u in zip(even, updates, strict=True)]


class RoundsToNearest(Muon):
    def update(self, group, params, noise=None):
        super().update(group, params, None)


class StatisticsRoundedOnLoad(Muon):
    """What torch's own load_state_dict does to the statistics of bf16 weights."""

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)


class NoiseFromTheGlobalState(Muon):
    def update(self, group, params, noise=None):
        noise = torch.Generator() if noise else None
        if noise:
            noise.set_state(torch.get_rng_state())
            torch.rand(1)
        super().update(group, params, noise)


def anything_goes(params, **keys):
    """Takes weights of any shape and keys of any value."""
    try:
        return Muon(params, **keys)
    except ValueError:
        return torch.optim.SGD(params, lr=0.1)


ZOO = {
    "decay in the gradient": (CoupledDecay, "test_decay_is_decoupled_and_visible"),
    "decay at the scaled rate": (
        DecayTimesScale,
        "test_decay_is_decoupled_and_visible",
    ),
    "Nesterov of a sum": (SumInsteadOfMean, "test_equals_the_formula"),
    "rows and columns swapped": (RowsAndColumnsSwapped, "test_both_scale_rules"),
    "scale of a stack": (FirstTwoDimensions, "test_a_stack_is_a_batch_of_matrices"),
    "cautious the wrong way round": (
        CautiousTheWrongWayRound,
        "test_cautious_decay_only_where_the_update_shrinks_too",
    ),
    "rate of the start": (
        RateKeptFromTheStart,
        "test_the_rate_is_read_at_every_step",
    ),
    "no gradient taken for zero": (
        ZeroForNoGradient,
        "test_without_a_gradient_nothing_moves",
    ),
    "NorMuon without the norm": (
        NormNotRestored,
        "test_normuon_evens_out_the_rows_and_keeps_the_norm",
    ),
    "NorMuon without a memory": (
        NormOfThisStepOnly,
        "test_normuon_remembers_the_rows",
    ),
    "always the nearest": (
        RoundsToNearest,
        "test_stochastic_rounding_keeps_small_updates",
    ),
    "statistics rounded on load": (
        StatisticsRoundedOnLoad,
        "test_a_resume_is_exact",
    ),
    "noise from the global state": (
        NoiseFromTheGlobalState,
        "test_a_resume_is_exact",
    ),
    "anything goes": (anything_goes, "test_what_cannot_be_used_is_refused"),
}
