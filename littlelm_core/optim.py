# From chapters/08_optim.md by `littlelm book export`: edit the chapter.
"""Muon for the matrices of the blocks, AdamW for all other parameters.

The gradient of a matrix is lopsided: a few directions hold nearly all of its length,
and a step along it moves the rest of the matrix hardly at all. Muon replaces the
averaged gradient U S V^T by (nearly) U V^T, a step of the same size in every direction.
No decomposition is needed: five rounds of three matrix products, which is what the
hardware does best, in bf16 where it is a GPU.

Shapes: N matrices of R rows (outputs) and C columns (inputs).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from littlelm_core.config import ConfigError, Part, build, nearest, register
from littlelm_core.report.terminal import table
from littlelm_core.trainer import multiplies_bf16, parameter_groups

__all__ = [
    "COEFFICIENTS",
    "LIMITS",
    "Muon",
    "MuonAdamW",
    "PANEL",
    "REFERENCE",
    "ROW_BETA",
    "SCALES",
    "STACKED",
    "Triple",
    "build_optimizer",
    "decay",
    "even_rows",
    "group_table",
    "newton_schulz",
    "round_stochastically",
    "rounds",
    "stacks",
    "times_transpose",
    "wide",
    "working_dtype",
    "write_back",
]


# ---- Singular values to one

Triple = tuple[float, float, float]
# What the Frobenius norm is multiplied by before dividing (a margin for bf16), and
# a, b, c of each round; the last triple stands for all that follow.
COEFFICIENTS: dict[str, tuple[float, tuple[Triple, ...]]] = {
    # Jordan et al. 2024: the steepest start. Values above 0.01 of the norm end between
    # 0.68 and 1.14.
    "quintic": (1.0, ((3.4445, -4.7750, 2.0315),)),
    # Amsel et al., 2505.16932: the best polynomial for each round. Values above 0.001
    # of the norm end between 0.85 and 1.14.
    "polar_express": (
        1.01,
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7098827382687081, 0.42323551169305323),
        ),
    ),
}


def rounds(
    coefficients: str | Triple | tuple[Triple, ...], steps: int
) -> tuple[float, list[Triple]]:
    """Return the factor of the norm and (a, b, c) of each of `steps` rounds.

    coefficients: a name of COEFFICIENTS, one triple for all rounds, or one for each;
    the last is used again when there are more rounds.
    Raises ConfigError for an unknown name, anything else, or no round at all.
    """
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            close = nearest(coefficients, COEFFICIENTS)
            raise ConfigError(f"no coefficients are called {coefficients!r}{close}")
        factor, triples = COEFFICIENTS[coefficients]
    else:
        one = len(coefficients) > 0 and not isinstance(coefficients[0], Sequence)
        factor, triples = 1.0, (coefficients,) if one else coefficients
    if not triples or any(len(triple) != 3 for triple in triples):
        raise ConfigError(f"coefficients {coefficients!r} are not triples (a, b, c)")
    if not 1 <= steps < 100:
        raise ConfigError(f"steps = {steps}: Newton-Schulz takes 1 to 99, 5 will do")
    return factor, list(islice(chain(triples, repeat(triples[-1])), steps))


def working_dtype(g: Tensor, dtype: str = "auto") -> torch.dtype:
    """Return the format of the products: "fp32", "bf16", or "auto".

    auto: bf16 for what is bf16 already and on a GPU that multiplies it, else at least
    fp32.
    """
    if dtype not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"dtype = {dtype!r} is not auto, fp32 or bf16")
    if dtype == "auto":
        fast = g.is_cuda and multiplies_bf16(g.device)
        dtype = "bf16" if fast or g.dtype == torch.bfloat16 else "fp32"
    if dtype == "bf16":
        return torch.bfloat16
    return torch.promote_types(g.dtype, torch.float32)


PANEL = 192  # rows of a symmetric product that a CPU multiplies at once


def times_transpose(
    x: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Return beta plus + alpha x x^T, symmetric like `plus`, for a matrix or a batch.

    Of a large product a CPU multiplies the panels up to the diagonal alone and mirrors
    them: the same bits, a quarter to a third sooner.
    """

    def product(left: Tensor, right: Tensor, plus: Tensor | None) -> Tensor:
        if plus is None:
            return left @ right
        add = torch.addmm if left.ndim == 2 else torch.baddbmm
        return add(plus, left, right, beta=beta, alpha=alpha)

    size = x.shape[-2]
    if x.ndim == 3 or size <= 2 * PANEL or x.device.type != "cpu":
        return product(x, x.mT, plus)
    whole = x.new_empty(size, size)
    for i in range(0, size, PANEL):
        j = min(i + PANEL, size)
        some = None if plus is None else plus[i:j, :j]
        whole[i:j, :j] = product(x[i:j], x[:j].mT, some)
        whole[:i, i:j] = whole[i:j, :i].mT
    return whole


@torch.no_grad()
def newton_schulz(
    g: Tensor,
    steps: int = 5,
    coefficients: str | Triple | tuple[Triple, ...] = "quintic",
    dtype: str = "auto",
) -> Tensor:
    """Return a matrix with g's singular vectors and all singular values near 1.

    g: (R, C), or (N, R, C), a batch of matrices. steps, coefficients: see `rounds`.
    dtype: of the products, see `working_dtype`; the result has g's own. Each round
    maps X to aX + b(XX^T)X + c(XX^T)^2 X, hence each singular value s to
    as + bs^3 + cs^5. The scale of g does not matter; zeros stay zeros.
    Raises ConfigError (a ValueError) for other shapes and unknown coefficients.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    if g.ndim not in (2, 3):
        raise ConfigError(
            f"newton_schulz takes a matrix or a batch, not shape {tuple(g.shape)}"
        )
    factor, triples = rounds(coefficients, steps)
    x = g.to(working_dtype(g, dtype))
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the products with the short side first are the small ones
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # Smaller squares vanish in the sum: a momentum that fades out then fades here too.
    x = x / (factor * norm).clamp_(min=1e-20)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in triples:
        gram = times_transpose(x)
        gram = times_transpose(gram, gram, b, c)  # b G + c G^2: G is symmetric
        x = add(x, gram, x, beta=a)
    return (x.mT if tall else x).to(g.dtype)


# ---- How long is a step?

SCALES: dict[str, Callable[[int, int], float]] = {
    # Jordan et al.: as if a tall matrix were several square ones.
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    # Liu et al., 2502.16982: the size of AdamW's updates, so that its rates carry over.
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


# ---- Weights in bf16


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to one of the two bf16 neighbors, the nearer one more often.

    The mean of many roundings is x: a change too small for bf16 is made now and then,
    and not lost every time. Values that are not finite stay.
    """
    bits = x.view(torch.int32)  # bf16 is the upper half of an fp32
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def wide(p: Tensor) -> Tensor:
    """Return a weight's values in at least fp32: itself, or a copy."""
    return p.to(torch.promote_types(p.dtype, torch.float32))


def write_back(p: Tensor, value: Tensor, noise: torch.Generator | None = None) -> None:
    """Store what became of `wide(p)`; nothing to do when that is p itself.

    noise: where the random bits come from when bf16 is rounded stochastically.
    """
    if value is not p:
        random = noise is not None and p.dtype == torch.bfloat16
        p.copy_(round_stochastically(value, noise) if random else value)


# ---- Decay, and the rows


def decay(
    weight: Tensor, amount: float, update: Tensor, cautious: bool = False
) -> None:
    """Shrink a weight by the share `amount`; cautiously: where the update does too."""
    if amount and cautious:
        weight.addcmul_(weight, (weight * update >= 0).to(weight.dtype), value=-amount)
    elif amount:
        weight.mul_(1 - amount)


ROW_BETA = 0.95  # NorMuon's memory (Li et al., 2510.05491)


def even_rows(update: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the update with rows of equal size over time and the same norm (NorMuon).

    state: holds "row_square", the running mean square of each row.
    """
    update = wide(update)
    square = update.square().mean(-1, keepdim=True)
    if "row_square" not in state:
        state["row_square"] = torch.zeros_like(square)
    state["row_square"].lerp_(square, 1 - ROW_BETA)
    tiny = torch.finfo(update.dtype).tiny
    even = update / state["row_square"].sqrt().clamp(min=tiny)
    before, after = (
        torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (update, even)
    )
    return even * (before / after.clamp(min=tiny))


# ---- The optimizer

# Elements that one stacked call may have. On a CPU a matrix product of some size
# keeps the core busy alone, and stacking only adds copies.
STACKED = {"cpu": 1 << 16, "cuda": 1 << 26}
LIMITS = {  # of a key's value: from the first to below the second
    "lr": (0.0, math.inf),
    "momentum": (0.0, 1.0),
    "betas": (0.0, 1.0),
    "eps": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
}


def stacks(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of one shape together, as many as one call should take."""
    by_shape: dict[Any, list[Tensor]] = {}
    for p in params:
        by_shape.setdefault((p.shape, p.dtype, p.device), []).append(p)
    for (shape, _, device), same in by_shape.items():
        most = STACKED.get(device.type, STACKED["cuda"]) // max(shape.numel(), 1)
        size = max(most, 1) if len(shape) == 2 else 1
        yield from (same[i : i + size] for i in range(0, len(same), size))


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz (Jordan et al. 2024). For matrices.

    params: tensors (R, C), or (N, R, C) for a batch of N matrices; rows are outputs.
    weight_decay: decoupled, p <- p (1 - lr weight_decay); cautious: only where the
    update shrinks the weight as well (2510.12402). scale: what lr is multiplied by for
    a shape, a name of SCALES. steps, coefficients, dtype: see `newton_schulz`.
    normuon: divide each row by the root of its mean square over time, then give the
    matrix its norm back. stochastic_rounding: how bf16 weights are written; the noise
    follows from the number of steps taken, so that a resume repeats it.
    Raises ConfigError for shapes that are no matrices and for keys out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "original",
        steps: int = 5,
        coefficients: str | Triple | tuple[Triple, ...] = "quintic",
        cautious: bool = False,
        normuon: bool = False,
        stochastic_rounding: bool = False,
        dtype: str = "auto",
    ):
        keys = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov,
            "weight_decay": weight_decay, "scale": scale, "steps": steps,
            "coefficients": coefficients, "cautious": cautious, "normuon": normuon,
            "stochastic_rounding": stochastic_rounding, "dtype": dtype, "taken": 0,
        }  # fmt: skip
        super().__init__(params, keys)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ConfigError for parameters or keys that are no use."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        where = f"{group['name']}." if "name" in group else ""
        for key in LIMITS.keys() & group.keys():
            least, most = LIMITS[key]
            for value in group[key] if key == "betas" else (group[key],):
                if not least <= value < most:
                    text = f"{where}{key} = {value} is not from {least} to below {most}"
                    raise ConfigError(text)
        if not self.is_muon(group):
            return
        if group["scale"] not in SCALES:
            close = nearest(str(group["scale"]), SCALES)
            raise ConfigError(f"no scale is called {group['scale']!r}{close}")
        rounds(group["coefficients"], group["steps"])
        for p in group["params"]:
            working_dtype(p, group["dtype"])
            if p.ndim not in (2, 3):
                raise ConfigError(
                    f"Muon is for matrices: a parameter of shape {tuple(p.shape)} "
                    "needs another optimizer"
                )

    def is_muon(self, group: dict[str, Any]) -> bool:
        """Does this group take Muon's step?"""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what `closure` does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            noise = None
            if params and group["stochastic_rounding"]:
                seed = group["taken"] * len(self.param_groups) + index
                noise = torch.Generator(params[0].device).manual_seed(seed)
            self.update(group, params, noise)
            group["taken"] += 1
        return loss

    def update(
        self, group: dict[str, Any], params: list[Tensor], noise: Any = None
    ) -> None:
        """Move the parameters of one group, all of which have a gradient."""
        lr, amount = group["lr"], group["lr"] * group["weight_decay"]
        for batch in stacks(params):
            rate = lr * SCALES[group["scale"]](*batch[0].shape[-2:])
            for p, update in zip(batch, self.directions(group, batch), strict=True):
                weight = wide(p)
                decay(weight, amount, update, group["cautious"])
                weight.add_(update, alpha=-rate)
                write_back(p, weight, noise)

    def directions(self, group: dict[str, Any], batch: list[Tensor]) -> list[Tensor]:
        """Return the orthogonal updates of parameters of one shape."""
        momentum, grads, buffers = group["momentum"], [p.grad for p in batch], []
        for p in batch:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        if group["nesterov"]:
            buffers = torch._foreach_lerp(grads, buffers, momentum)
        # One matrix is not copied into a stack of one, and the result stays as it is
        # computed: a bf16 update is added to an fp32 weight without an fp32 copy of it.
        whole = torch.stack(buffers) if len(batch) > 1 else buffers[0]
        whole = whole.to(working_dtype(whole, group["dtype"]))
        keys = group["steps"], group["coefficients"], group["dtype"]
        whole = newton_schulz(whole, *keys)
        updates = list(whole.unbind()) if len(batch) > 1 else [whole]
        if group["normuon"]:
            pairs = zip(batch, updates, strict=True)
            updates = [even_rows(update, self.state[p]) for p, update in pairs]
        return updates

    def flops(self) -> int:
        """Return the FLOPs of a step's Newton-Schulz; all else is no matrix product.

        A round on an R x C matrix: 4 short^2 long + 2 short^3, whole products counted.
        """
        total = 0
        for group in filter(self.is_muon, self.param_groups):
            for p in group["params"]:
                short, long = sorted(p.shape[-2:])
                products = 4 * short**2 * long + 2 * short**3
                total += group["steps"] * p.shape[:-2].numel() * products
        return total

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a saved state, each tensor in its own format.

        torch would round the fp32 statistics of bf16 weights to bf16. The momentum is
        in the format of the gradients, which precision.masters may have changed.
        """
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, i in zip(params, saved, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                dtype = p.dtype if key == "momentum_buffer" else value.dtype
                self.state[p][key] = value.to(p.device, dtype, copy=True)


# ---- One optimizer for a whole model

# The reference run's keys for each role; a run's own come before them.
REFERENCE: dict[str, dict[str, Any]] = {
    "matrix": {"lr": 0.02, "weight_decay": 0.0},
    "embedding": {"lr": 0.1414, "betas": (0.8, 0.995), "weight_decay": 0.001},
    "head": {"lr": 0.002828, "betas": (0.8, 0.96), "weight_decay": 0.01},
    "value_embeddings": {"lr": 0.0707, "betas": (0.8, 0.995), "weight_decay": 0.01},
    "norm": {"lr": 0.005, "betas": (0.8, 0.95), "weight_decay": 0.0},
    "scalars": {"lr": 0.005, "betas": (0.8, 0.95), "weight_decay": 0.0},
}


@register("optimizer", "muon")
class MuonAdamW(Muon):
    """Muon for the group "matrix", AdamW (Loshchilov & Hutter 2019) for all others.

    params: groups with a role's name, from `parameter_groups`; a group's own keys come
    before those given here, and both before REFERENCE. betas and eps are AdamW's,
    all keys that it lacks are Muon's: see there. AdamW's statistics are at least fp32.
    Raises ConfigError for a group without a role and a key that its rule does not have.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-10,
        weight_decay: float | None = None,
        scale: str = "original",
        steps: int = 5,
        coefficients: str | Triple | tuple[Triple, ...] = "quintic",
        cautious: bool = False,
        normuon: bool = False,
        stochastic_rounding: bool = False,
        dtype: str = "auto",
    ):
        both = {
            "lr": lr, "weight_decay": weight_decay,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        of_adamw = {**both, "betas": betas, "eps": eps}
        of_muon = {
            **both, "momentum": momentum, "nesterov": nesterov, "scale": scale,
            "steps": steps, "coefficients": coefficients, "cautious": cautious,
            "normuon": normuon, "dtype": dtype,
        }  # fmt: skip
        groups = []
        for group in params:
            role = group.get("name") if isinstance(group, Mapping) else None
            if role not in REFERENCE:
                raise ConfigError(
                    f"optimizer 'muon' takes groups named {', '.join(REFERENCE)}, "
                    f"not {role!r}: make them with parameter_groups"
                )
            keys = of_muon if role == "matrix" else of_adamw
            for key in group.keys() - {"name", "params", "taken", *keys}:
                rule = "Muon" if role == "matrix" else "AdamW"
                text = f"optimizer.{role}.{key}: {rule}, which moves this group, has no"
                raise ConfigError(f"{text} such key{nearest(key, keys)}")
            given = {k: v for k, v in keys.items() if v is not None}
            groups.append({"taken": 0, **REFERENCE[role], **given, **group})
        torch.optim.Optimizer.__init__(self, groups, {})

    def is_muon(self, group: dict[str, Any]) -> bool:
        """Muon moves the matrices."""
        return group["name"] == "matrix"

    def update(
        self, group: dict[str, Any], params: list[Tensor], noise: Any = None
    ) -> None:
        """Move the parameters of one group, all of which have a gradient."""
        if self.is_muon(group):
            super().update(group, params, noise)
            return
        whole = [p for p in params if wide(p) is p]  # these in one call, and
        narrow = [[p] for p in params if wide(p) is not p]  # one fp32 copy at a time
        for batch in [whole, *narrow]:
            weights, states = [wide(p) for p in batch], [self.state[p] for p in batch]
            for weight, state in zip(weights, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), device=weight.device)
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
            means, squares, taken = (
                [state[key] for state in states]
                for key in ("exp_avg", "exp_avg_sq", "step")
            )
            grads = [wide(p.grad) for p in batch]
            beta1, beta2 = group["betas"]
            adamw(
                weights, grads, means, squares, [], taken, fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
                weight_decay=group["weight_decay"], maximize=False,
            )  # fmt: skip
            for p, weight in zip(batch, weights, strict=True):
                write_back(p, weight, noise)


def build_optimizer(
    model: nn.Module, options: Part | Mapping[str, Any], quiet: bool = False
) -> torch.optim.Optimizer:
    """Return an optimizer with every parameter of a model in the group of its role.

    options: the run's `optimizer`, or a mapping of its keys; `use` is "muon" unless
    given. Prints `group_table` unless quiet. Raises ConfigError for a parameter
    without a role and for keys that the optimizer refuses.
    """
    keys = options.options if isinstance(options, Part) else dict(options)
    use = options.use if isinstance(options, Part) else keys.pop("use", "muon")
    groups, shared = parameter_groups(model, keys)
    optimizer = build("optimizer", Part(use=use, **shared), groups)
    if not quiet:
        print(group_table(optimizer))
    return optimizer


def group_table(optimizer: torch.optim.Optimizer) -> str:
    """Return the groups as text: what is in each, and how it is moved."""
    keys = ("lr", "momentum", "betas", "weight_decay")
    rows = [["group", "tensors", "parameters", *keys]]
    for group in optimizer.param_groups:
        row = [group.get("name", "-"), str(len(group["params"]))]
        row.append(f"{sum(p.numel() for p in group['params']):,}")
        for value in (group.get(key) for key in keys):
            if isinstance(value, Sequence):
                row.append(", ".join(f"{v:g}" for v in value))
            else:
                row.append("-" if value is None else f"{value:g}")
        rows.append(row)
    return table(rows)
