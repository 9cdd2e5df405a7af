# From chapters/06_trainer.md by `littlelm book export`: edit the chapter.
"""The training loop: whole steps, whole checkpoints, and a log without gaps.

A step is the gradient of one big batch, taken in pieces that fit in memory, clipped
once, and refused when it is not finite; otherwise a run trains another objective than
the one on paper. A checkpoint is all that the next step depends on, and it is whole or
absent; otherwise a lost machine costs the run.

The hardware wants few, large calls: one wait for the device a step, and matrix products
in the fastest format that it multiplies.

Shapes: B rows of a micro-batch, T tokens of a row, N rows times tokens.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from littlelm_core.config import (
    ROLES,
    CheckpointError,
    ConfigError,
    LittleLMError,
    Part,
    RunConfig,
    build,
    check_part,
    load_run,
    nearest,
    register,
    resolve,
)
from littlelm_core.ingest import Prepared, prepare_run
from littlelm_core.ingest.write import hold
from littlelm_core.model import flops_per_token, model_config, parameter_role
from littlelm_core.report import Report, mfu, read_metrics, write_text
from littlelm_core.report.log import part_sources
from littlelm_core.shards import IGNORED, ValidationRows
from littlelm_core.tokenizer import Tokenizer

__all__ = [
    "FORMAT",
    "Loop",
    "MAY_CHANGE",
    "NOT_DECAYED",
    "Precision",
    "TrainResult",
    "Trainer",
    "World",
    "accumulate_gradients",
    "accumulation",
    "changed_keys",
    "checkpoints",
    "checksum",
    "clip_gradients",
    "find_checkpoint",
    "is_complete",
    "load_checkpoint",
    "load_weights",
    "multiplies_bf16",
    "newest_checkpoint",
    "parameter_groups",
    "plain_name",
    "plain_weights",
    "prune_checkpoints",
    "read_checkpoint",
    "schedule_of",
    "score",
    "train",
    "write_checkpoint",
]


# ---- One big batch from small ones


def accumulate_gradients(
    loss: Callable[..., Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    tokens: float,
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Add the gradient of (summed loss / tokens) over all micro-batches to `.grad`.

    loss: called as loss(ids_BT, targets_BT, reduction="sum"), in nats.
    tokens: valid targets of the whole step, over micro-batches and processes.
    Returns the summed loss of this process.
    """
    total = 0.0
    for ids_BT, targets_BT in batches:
        with context():
            nats = loss(ids_BT, targets_BT, reduction="sum")
        (nats / max(tokens, 1)).backward()
        total = total + nats.detach().double()  # a Tensor: no wait for the device
    return float(total)


class World(NamedTuple):
    """This process among its peers: alone, unless torch.distributed runs."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """Return this process's place."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def sum(self, *values: float) -> list[float]:
        """Sum each value over all processes, in fp64: counts stay exact."""
        if self.size == 1:
            return [float(v) for v in values]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum (the loss was divided by all tokens already), once a step."""
        for parameter in parameters if self.size > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def accumulation(run: RunConfig, context: int, world: int = 1) -> int:
    """Return the micro-batches of a step. Raises ConfigError for a part of one."""
    micro = run.rows * context * world
    if run.tokens_per_step == -1:
        return max(run.grad_accum, 1)
    steps = run.tokens_per_step // micro if run.grad_accum == -1 else run.grad_accum
    if steps * micro != run.tokens_per_step:
        near = max(round(run.tokens_per_step / micro), 1) * micro
        raise ConfigError(
            f"tokens_per_step = {run.tokens_per_step} is not rows {run.rows} * context "
            f"{context} * {world} process(es) * grad_accum {max(steps, 1)}: "
            f"the nearest that fits is {near}, or change rows"
        )
    return steps


# ---- Clip once, and refuse what is not finite


def clip_gradients(parameters: Iterable[nn.Parameter], clip: float) -> float:
    """Scale the gradients to a global norm of at most `clip`; return the norm before.

    clip = -1 is off. A norm that is not finite scales nothing: do not take that step.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in with_gradient
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if clip > 0 and torch.isfinite(norm):
        clip_grads_with_norm_(with_gradient, clip, norm)
    return float(norm)


# ---- Every parameter in one group

NOT_DECAYED = ("norm", "scalars")


def parameter_groups(
    model: nn.Module, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Split a model's parameters by role; return (groups, keys for all of them).

    options: the run's [optimizer] table; a table in it that is named after a role
    ([optimizer.matrix]) holds that group's own keys. Norm gains and scalars are not
    decayed unless theirs says so. Raises ValueError for a parameter without a role.
    """
    tables = {k: v for k, v in options.items() if k in ROLES and isinstance(v, Mapping)}
    shared = {k: v for k, v in options.items() if k not in tables}
    groups = {role: {"name": role, "params": []} for role in ROLES}
    for name, parameter in model.named_parameters():  # names a tied weight once
        groups[parameter_role(plain_name(name))]["params"].append(parameter)
    for role, group in groups.items():
        undecayed = {"weight_decay": 0.0} if role in NOT_DECAYED else {}
        group.update(undecayed | tables.get(role, {}))
    return [group for group in groups.values() if group["params"]], shared


def plain_name(name: str) -> str:
    """Strip what torch.compile and DDP put into a parameter's name."""
    return ".".join(p for p in name.split(".") if p not in ("_orig_mod", "module"))


# ---- The width of the numbers


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bf16 numbers."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


@register("precision", "autocast")
class Precision:
    """fp32 weights, and matrix products in bf16 where the machine multiplies bf16.

    dtype: "fp32", "bf16", or "auto": bf16 on a GPU that has it and on a CPU with
    AVX-512 or AMX instructions for it, else fp32. compile: with torch.compile.
    masters: "bf16" keeps every matrix in bf16, and so its gradient and most optimizers'
    statistics (torch's AdamW: 6 bytes a parameter in place of 12). Updates below half a
    step of bf16 are lost unless the optimizer rounds stochastically.
    """

    def __init__(
        self, dtype: str = "auto", compile: bool = False, masters: str = "fp32"
    ):
        good = {"fp32": ("auto", "fp32", "bf16"), "bf16": ("auto", "bf16")}
        if dtype not in good.get(masters, ()):
            raise ConfigError(
                f"precision.dtype = {dtype!r} with precision.masters = {masters!r}: "
                "dtype is auto, fp32 or bf16, masters fp32 or bf16, and masters of "
                "bf16 leave no fp32 to multiply"
            )
        self.dtype, self.compile, self.masters = dtype, compile, masters

    def prepare(self, model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
        """Settle the format for a device; return the loss function to train with."""
        self.device = device
        if self.dtype == "auto":
            bf16 = self.masters == "bf16" or multiplies_bf16(device)
            self.dtype = "bf16" if bf16 else "fp32"
        if self.masters == "bf16":
            for parameter in model.parameters():
                if parameter.ndim >= 2:  # in place: a tied weight stays one object
                    parameter.data = parameter.data.bfloat16()
        return torch.compile(model.loss) if self.compile else model.loss

    def context(self) -> AbstractContextManager:
        """Return the context in which forward passes run."""
        bf16 = self.dtype == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)


# ---- A checkpoint is whole or absent

FORMAT = 2  # of a checkpoint folder; another number is refused by name


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without wrapper prefixes, a tied weight once."""
    state = model.state_dict(keep_vars=True)  # the parameters: a tied one is one object
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {plain_name(name): state[name].detach() for name in first.values()}


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy a checkpoint's weights into a model. Strict: raises CheckpointError."""
    own, saved = plain_weights(model), load_file(folder / "model.safetensors")
    ours, theirs = ({n: list(t.shape) for n, t in w.items()} for w in (own, saved))
    if wrong := [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]:
        there, here = (shapes.get(wrong[0], "absent") for shapes in (theirs, ours))
        raise CheckpointError(
            f"{folder} is of another model, {len(wrong)} weights differ: {wrong[0]} is "
            f"{there} there and {here} here"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def write_checkpoint(
    run_dir: Path,
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Any],
    tokenizer: Tokenizer,
    run: RunConfig,
    state: Mapping[str, Any],
) -> Path:
    """Write one checkpoint folder: whole, or not there at all.

    tensors: optimizer and random state, for `torch.save`; state: what fits in JSON,
    with the number of the step.
    Raises CheckpointError: weights that are not finite, a disk that is full.
    """
    final = run_dir / "checkpoints" / f"step_{state['step']:08d}"
    if is_complete(final):
        return final
    if wrong := [name for name, t in weights.items() if not t.isfinite().all()]:
        raise CheckpointError(
            f"{wrong[0]} is not finite at step {state['step']}: no checkpoint written, "
            "run again from the last one with a lower learning rate"
        )
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        for abandoned in final.parent.glob(".tmp-*"):  # by a process that was killed
            shutil.rmtree(abandoned)
        temporary.mkdir(parents=True)
        contiguous = {name: t.contiguous() for name, t in weights.items()}
        save_file(contiguous, temporary / "model.safetensors")
        torch.save(dict(tensors), temporary / "optimizer.pt")
        (temporary / "run.json").write_text(run.model_dump_json(indent=1), "utf-8")
        tokenizer.save(temporary / "tokenizer.json")
        files = {p.name: p.stat().st_size for p in temporary.iterdir()}
        sums = {name: checksum(temporary / name) for name in files}
        whole = {**state, "format": FORMAT, "files": files, "sha256": sums}
        (temporary / "state.json").write_text(json.dumps(whole, indent=1), "utf-8")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)  # an incomplete one: a rename needs the name free
        temporary.rename(final)
        _flush(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(run_dir).free / 1e6
        raise CheckpointError(
            f"cannot write {final}, {free:,.1f} MB of space are free ({error}): the "
            "earlier ones are whole, make room and run the same command again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def checksum(path: Path) -> str:
    """Return a file's SHA-256, read in blocks: it may be larger than the memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_file() or os.name != "nt":  # Windows flushes folders by itself
        handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_complete(folder: Path) -> bool:
    """Is every file of a checkpoint there with the size it was written with?"""
    try:
        files = json.loads((folder / "state.json").read_text("utf-8"))["files"]
        return all((folder / n).stat().st_size == size for n, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first."""
    return sorted(filter(is_complete, (Path(run_dir) / "checkpoints").glob("step_*")))


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None; warn of the others.

    Raises CheckpointError when there are some and none is complete.
    """
    whole = checkpoints(run_dir)
    others = {*(Path(run_dir) / "checkpoints").glob("*step_*")} - {*whole}
    if not whole and (damaged := [p for p in others if p.name[0] != "."]):
        raise CheckpointError(
            f"{max(damaged)} is damaged, and {run_dir} has no whole checkpoint: put a "
            f"copy back, or delete {run_dir} to begin anew"
        )
    for folder in sorted(others):
        warnings.warn(f"{folder} is incomplete and ignored", stacklevel=2)
    return whole[-1] if whole else None


def prune_checkpoints(run_dir: Path, keep: int, resumed: Path | None = None) -> None:
    """Delete all but the newest `keep` complete checkpoints.

    Never the one a run resumed from, nor one that holds a file named `pinned`.
    """
    for folder in checkpoints(run_dir)[: -max(keep, 1)]:
        if folder != resumed and not (folder / "pinned").exists():
            shutil.rmtree(folder)


def read_checkpoint(folder: Path, *unread: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return (run, state) of a checkpoint; check all its files but the unread ones."""
    if not is_complete(folder):
        raise CheckpointError(f"{folder} is incomplete: take an earlier checkpoint")
    state = json.loads((folder / "state.json").read_text("utf-8"))
    if (found := state.get("format")) != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {found}, this version reads {FORMAT}: use "
            "the littlelm that wrote it"
        )
    for name in state["files"].keys() - {*unread}:
        if checksum(folder / name) != state["sha256"][name]:
            raise CheckpointError(
                f"{folder / name} is damaged, it is not what was written: put a copy "
                "back, or delete that folder to go on from an earlier checkpoint"
            )
    try:
        table = json.loads((folder / "run.json").read_text("utf-8"))
        return RunConfig.model_validate(table), state
    except ValueError as error:
        raise CheckpointError(
            f"{folder / 'run.json'} is not a run of this version: use the littlelm "
            f"that wrote it ({str(error).splitlines()[0]})"
        ) from error


def find_checkpoint(path_or_run: str | Path) -> Path:
    """Return a checkpoint's folder: the given one, or the newest of a run.

    path_or_run: a checkpoint folder; or a run's folder or name.
    Raises CheckpointError: no whole checkpoint there; ConfigError: no such run.
    """
    folder = Path(path_or_run)
    named = folder.name.startswith("step_")
    if named and not folder.is_dir():
        there = [p.name for p in checkpoints(folder.resolve().parents[1])]
        raise CheckpointError(f"no checkpoint {folder}{nearest(folder.name, there)}")
    if named or (folder / "state.json").exists():
        return folder
    run_dir = folder if folder.is_dir() else Path(load_run(path_or_run).run_dir)
    if newest := newest_checkpoint(run_dir):
        return newest
    raise CheckpointError(f"no checkpoint in {run_dir}: train that run first")


def load_checkpoint(
    path_or_run: str | Path, device: str | torch.device = "cpu"
) -> tuple[nn.Module, Tokenizer, RunConfig, dict[str, Any]]:
    """Load (model in eval mode, tokenizer, run, state) from a checkpoint.

    path_or_run: as for `find_checkpoint`. Raises what that raises, and CheckpointError
    for a checkpoint of another version or model.
    """
    folder = find_checkpoint(path_or_run)
    run, state = read_checkpoint(folder, "optimizer.pt")
    own = resolve("tokenizer", run.tokenizer.use)  # a class of its own may load itself
    tokenizer = getattr(own, "load", Tokenizer.load)(folder / "tokenizer.json")
    model = resolve("model", run.model.use)(model_config(run, tokenizer.vocab_size))
    load_weights(model, folder)
    return model.to(device).eval(), tokenizer, run, state


# Where a run stops, how its rows are cut (the tokens of a step stay), what it reports,
# and the schedule, so that a decay can branch from any checkpoint.
MAY_CHANGE = (
    "name", "run_dir", "resume", "steps", "stop_step", "rows", "grad_accum",
    "tokens_per_step", "max_skipped", "checkpoint_every", "checkpoints_kept",
    "validate_every", "validation_tokens", "sample_every", "eval_every",
    "eval_max_per_task", "eval_tasks", "schedule", "precision",
    "callback",
)  # fmt: skip


def changed_keys(old: Any, new: Any, name: str = "") -> list[str]:
    """Return "key old -> new" for each key of two tables that differs and may not."""
    if name in MAY_CHANGE or old == new:
        return []
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [f"{name} {old!r} -> {new!r}"]
    keys = {k: f"{name}.{k}".strip(".") for k in sorted({*old, *new})}
    return [c for k, n in keys.items() for c in changed_keys(old.get(k), new.get(k), n)]


# ---- Validation counts bytes


@torch.no_grad()
def score(
    loss: Callable[..., Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    bytes_V: Tensor,
) -> list[float]:
    """Return the sums [nats, tokens, bytes] over batches (ids_BT, targets_BT).

    bytes_V: the bytes of each id, 0 for a special token: those count nothing.
    """
    sums = [0.0, 0.0, 0.0]
    for ids_BT, targets_BT in batches:
        ids_BT, targets_BT = ids_BT.to(bytes_V.device), targets_BT.to(bytes_V.device)
        bytes_BT = bytes_V[targets_BT.clamp(min=0)].masked_fill(targets_BT < 0, 0)
        nats = loss(ids_BT, targets_BT.masked_fill(bytes_BT == 0, IGNORED), "sum")
        for i, value in enumerate((nats, (bytes_BT > 0).sum(), bytes_BT.sum())):
            sums[i] += float(value)
    return sums


# ---- One step, and everything it depends on


def schedule_of(run: RunConfig) -> Callable[[int], dict[str, float]]:
    """Return step -> {"lr": share of the peak} of a run's schedule.

    A schedule that returns a mapping may add "momentum", the value itself, and
    "weight_decay", a share of each group's own. Raises ConfigError for anything else.
    """
    options = {"total": run.steps, **run.schedule.options}
    part = resolve("schedule", run.schedule.use)
    known = {"lr", "momentum", "weight_decay"}

    def values(step: int) -> dict[str, float]:
        given = part(step, **options)
        table = dict(given) if isinstance(given, Mapping) else {"lr": given}
        good = all(isinstance(v, Real) and 0 <= v < math.inf for v in table.values())
        good = good and table.get("momentum", 0) < 1
        if not good or not {"lr"} <= table.keys() <= known:
            raise ConfigError(
                f"schedule.use = {run.schedule.use!r} gives {given!r} for step {step}: "
                "return a finite number >= 0, or such numbers by name: lr, and perhaps "
                "momentum (below 1) and weight_decay"
            )
        return {key: float(value) for key, value in table.items()}

    for step in (0, run.steps - 1):
        values(step)
    return values


class Loop:
    """Model, optimizer and data of a run, one optimizer step at a time.

    data: what to train on; by default what `ingest.prepare_run` makes of the run.
    `step` counts steps of the loop, refused ones too: it sets the learning rate and
    goes with the data. The optimizer counts for itself the steps that it took.
    """

    COUNTERS = ("step", "tokens", "skipped_steps", "skipped_in_a_row", "seconds")

    def __init__(self, run: RunConfig, data: Prepared | None = None):
        self.schedule = schedule_of(run)
        self.data = data = data or prepare_run(run)
        torch.manual_seed(run.seed)
        self.run, self.world = run, World.current()
        local = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.device = torch.device(local if torch.cuda.is_available() else "cpu")
        self.tokenizer = data.tokenizer
        self.cfg = model_config(run, self.tokenizer.vocab_size)
        with torch.device("meta"):
            self.model = resolve("model", run.model.use)(self.cfg)
        self.model.to_empty(device=self.device)
        self.model.init_weights(run.seed)
        self.precision = build("precision", run.precision)
        self.loss = self.precision.prepare(self.model, self.device)

        check_part("optimizer", run.optimizer)  # with the tables of each role
        groups, shared = parameter_groups(self.model, run.optimizer.options)
        part = Part(use=run.optimizer.use, **shared)
        self.optimizer = build("optimizer", part, groups)
        if not all(
            {"name", "lr"} <= group.keys() for group in self.optimizer.param_groups
        ):
            raise ConfigError(
                f"optimizer.use = {run.optimizer.use!r} has groups without name or lr: "
                "keep the keys of the groups that it was given, and a rate for each"
            )
        self.own = {g["name"]: {**g} for g in self.optimizer.param_groups}
        has_momentum = any("momentum" in group for group in self.own.values())
        if "momentum" in self.schedule(0) and not has_momentum:
            raise ConfigError(
                f"schedule.use = {run.schedule.use!r} sets a momentum, and no group of "
                f"{run.optimizer.use!r} has one: take it out, or use another optimizer"
            )
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.parts = part_sources(run)  # now: a file may be edited while it trains

        self.grad_accum = accumulation(run, self.cfg.context, self.world.size)
        sizes = run.rows, self.cfg.context, run.seed, *self.world
        self.loader = build("loader", run.loader, data.train, *sizes)
        mixed = run.mixture.use != "proportional"  # the loader's own order
        self.mixture = self.mix(run) if mixed else None
        self.batches = iter(self.loader)
        self.step = self.tokens = self.skipped_steps = self.skipped_in_a_row = 0
        self.seconds, self.flops = 0.0, flops_per_token(self.cfg)

    def mix(self, run: RunConfig) -> Any:
        """Let the run's mixture choose the rows, and return it (chapter 12)."""
        if not hasattr(self.loader, "mix"):
            raise ConfigError(
                f"loader.use = {run.loader.use!r} has no mix(), and cannot follow a "
                "mixture: use packed, or take [mixture] out"
            )
        keys = {"seed": run.seed, "total": run.steps * self.tokens_per_step}
        return self.loader.mix(partial(build, "mixture", run.mixture, **keys))

    @property
    def tokens_per_step(self) -> int:
        """Targets of one whole step, over micro-batches and processes."""
        return self.run.rows * self.cfg.context * self.grad_accum * self.world.size

    def place(self, ids: Any) -> Tensor:
        """Return token ids as int64 on the device."""
        return torch.as_tensor(ids).to(self.device, torch.int64, non_blocking=True)

    def take_step(self) -> dict[str, Any] | None:
        """Take one optimizer step; return its record, or None when the data has ended.

        Fewer micro-batches than `grad_accum` at the end of the data are a step too.
        Raises LittleLMError after run.max_skipped refused steps in a row.
        """
        start = time.perf_counter()
        batches = list(islice(self.batches, self.grad_accum))
        if not batches:
            return None
        batches = [(self.place(ids), self.place(targets)) for ids, targets in batches]
        valid = sum(int((targets != IGNORED).sum()) for _, targets in batches)
        (tokens,) = self.world.sum(valid)
        scheduled = self.follow_schedule()
        self.optimizer.zero_grad(set_to_none=True)
        nats = accumulate_gradients(self.loss, batches, tokens, self.precision.context)
        (nats,) = self.world.sum(nats)
        self.world.sum_gradients(self.parameters)
        norm = clip_gradients(self.parameters, self.run.clip)
        finite = math.isfinite(nats) and math.isfinite(norm)
        self.update(finite)
        self.step += 1
        self.tokens += int(tokens)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return {
            "tokens": self.tokens,
            "loss": nats / max(tokens, 1) if finite else None,
            **scheduled,
            "grad_norm": norm if finite else None,
            "tokens_per_second": tokens / seconds,
            "mfu": mfu(self.flops * tokens / seconds / self.world.size, self.device),
            "skipped_steps": self.skipped_steps,
            "seconds": self.seconds,
            **({"epochs": self.mixture.epochs} if self.mixture else {}),
        }

    def follow_schedule(self) -> dict[str, dict[str, float]]:
        """Set what this step's schedule says; return that by key and group, to log.

        All of it is set anew from the run file's values: a checkpoint brings back what
        the schedule had set, which may have been another schedule.
        """
        values, groups = self.schedule(self.step), self.optimizer.param_groups
        for group in groups:
            own = self.own[group["name"]]
            group["lr"] = own["lr"] * values["lr"]
            if "momentum" in own:
                group["momentum"] = values.get("momentum", own["momentum"])
            if "weight_decay" in own:
                share = values.get("weight_decay", 1.0)
                group["weight_decay"] = own["weight_decay"] * share
        return {k: {g["name"]: g[k] for g in groups if k in g} for k in values}

    def update(self, finite: bool) -> None:
        """Let the optimizer step, or refuse the step and count it."""
        if finite:
            self.optimizer.step()
            self.skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.run.max_skipped:
            raise LittleLMError(
                f"{self.skipped_in_a_row} steps in a row up to step {self.step + 1} "
                "were not finite: lower the learning rate (or clip) and go on from "
                "the last checkpoint"
            )

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (tensors, plain values): all that a step depends on but weights."""
        on_gpu = self.device.type == "cuda"
        tensors = {
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state(self.device)] if on_gpu else [],
        }
        plain = {name: getattr(self, name) for name in self.COUNTERS}
        plain |= {"tokens_per_step": self.tokens_per_step, "parts": self.parts}
        return tensors, {**plain, "loader": self.loader.state_dict()}

    def load(
        self, folder: Path, mend: str = "undo the change", free: tuple[str, ...] = ()
    ) -> RunConfig:
        """Go back to a checkpoint; return its run.

        free: keys that may differ beside MAY_CHANGE.
        Raises ConfigError with the `mend` when it is of another run.
        """
        run, state = read_checkpoint(folder)
        old, new = run.model_dump(mode="json"), self.run.model_dump(mode="json")
        old["tokens a step"] = state["tokens_per_step"]
        new["tokens a step"] = self.tokens_per_step
        new |= {key: old[key] for key in free}
        if changed := "; ".join(changed_keys(old, new)):
            raise ConfigError(f"{folder} is of another run ({changed}): {mend}")
        for kind, part in self.parts.items():
            was = state["parts"].get(kind, part)
            if was["use"] == part["use"] and was["source"] != part["source"]:
                text = f"{kind} {part['use']} has changed since step {state['step']}"
                warnings.warn(text, stacklevel=2)
        load_weights(self.model, folder)
        tensors = torch.load(folder / "optimizer.pt", map_location="cpu")
        self.optimizer.load_state_dict(tensors["optimizer"])
        torch.set_rng_state(tensors["rng"])
        if self.device.type == "cuda" and tensors["cuda_rng"]:
            torch.cuda.set_rng_state(tensors["cuda_rng"][0], self.device)
        self.loader.load_state_dict(state["loader"])
        self.batches = iter(self.loader)
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        return run


# ---- The run around the loop


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. Losses are nats a token, weighted by tokens."""

    final_loss: float  # of the last step that was not skipped
    steps: int
    tokens: int
    run_dir: Path
    skipped_steps: int = 0
    validation: dict[str, dict[str, float]] = field(default_factory=dict)  # by domain
    interrupted: bool = False  # a signal came: saved, and the same command goes on


class Trainer(Loop):
    """A run: its folder, its checkpoints, and how it stops and goes on.

    quiet: print nothing. Starts from the newest checkpoint of the folder.
    Raises ConfigError when the folder holds another run, CheckpointError when it is
    damaged, LittleLMError when another process trains in it, until its `fit` ends.
    """

    def __init__(
        self, run: RunConfig, data: Prepared | None = None, quiet: bool = False
    ):
        super().__init__(run, data)
        self.run_dir, self.held = Path(run.run_dir), ExitStack()
        if self.world.rank == 0:
            self.held.enter_context(hold(self.run_dir))
        self.last = run.steps if run.stop_step == -1 else min(run.steps, run.stop_step)
        self.resumed = newest_checkpoint(self.run_dir)
        if self.resumed:
            self.go_on(self.resumed)
        elif run.resume:
            self.resumed = find_checkpoint(run.resume)
            self.branch(self.resumed)
        self.interrupted = self.stopped = False
        self.report = Report(self, quiet)

    def go_on(self, folder: Path) -> None:
        """Load the newest checkpoint of the run's own folder."""
        mend = "name another run_dir, undo the change, or delete that folder"
        asked, began = self.run.resume, self.load(folder, mend).resume
        if asked and Path(asked).resolve() != Path(began).resolve():
            raise ConfigError(
                f"{self.run_dir} holds a run of its own at step {self.step}, which did "
                f"not start from resume = {asked!r}: name another run_dir"
            )

    def branch(self, folder: Path) -> None:
        """Load another run's checkpoint: the next step is the one it would have taken.

        Raises ConfigError for one that lies past where this run's decay begins, or at
        its end: the branch would be neither run.
        """
        mend = "a branch may have another schedule, length and mixture alone"
        self.load(folder, mend, free=("mixture",))
        table = {"total": self.run.steps, "decay": 0, **self.run.schedule.options}
        total, decay = table["total"], table["decay"]
        begins = total - (decay if decay >= 1 else round(decay * total))
        if self.step >= self.last or self.step > begins:
            raise ConfigError(
                f"{folder} is at step {self.step}; this run ends at step {self.last}, "
                f"and schedule.decay = {table['decay']} begins at step {begins}: take "
                "an earlier checkpoint, a shorter decay, or more steps"
            )
        rates = [
            (g["lr"], self.own[g["name"]]["lr"]) for g in self.optimizer.param_groups
        ]
        shares = [rate / peak for rate, peak in rates if peak]  # the trunk's last ones
        was = self.schedule(self.step - 1)["lr"]
        if shares and not math.isclose(shares[0], was, rel_tol=1e-6):
            text = f"the rate jumps: {folder} ended at {shares[0]:.3g} of the peak"
            warnings.warn(text, stacklevel=2)
        if self.world.rank == 0:  # with the trunk's log before its own: a whole curve
            records = read_metrics(folder.resolve().parents[1] / "metrics.jsonl")
            lines = [json.dumps(r) + "\n" for r in records if r["step"] <= self.step]
            write_text(self.run_dir / "metrics.jsonl", "".join(lines))

    def fit(self) -> TrainResult:
        """Train to the last step and return the result.

        SIGTERM or Ctrl-C ends the step, saves, and returns with `interrupted`. What a
        killed run owed after its last checkpoint is done first.
        """
        with self._session(), self.report:
            self.report.start()
            self.after_step()
            while self.step < self.last and not self.stopped:
                if record := self.take_step():
                    self.report.tell("train", **record)
                else:
                    self.last = self.step
                self.after_step()
        log = self.report.log
        losses = [r["loss"] for r in log.records if r.get("loss") is not None]
        scores = (log.last("validation") or {"domains": {}})["domains"]
        result = TrainResult(
            losses[-1] if losses else math.nan, self.step, self.tokens, self.run_dir,
            self.skipped_steps, scores, self.stopped,
        )  # fmt: skip
        self.report.finish(result)
        return result

    def after_step(self) -> None:
        """Do what this step is due for: save first, then validate, score and sample."""
        self.stopped = self.asked_to_stop()
        evaluates = self.run.eval_every > 0 and self.due(self.run.eval_every)
        if evaluates or self.due(self.run.checkpoint_every):
            self.save()
        if self.due(self.run.validate_every):
            self.validation()
        if evaluates:
            self.report.evaluation()
        if self.run.sample_every > 0 and self.due(self.run.sample_every):
            self.report.samples()
        if self.stopped and self.step:
            self.save()
        self.report.page.refresh()

    def due(self, every: int) -> bool:
        """Is this step one of every `every` steps, or the last?"""
        done = self.step >= self.last
        return self.step > 0 and (done or (every > 0 and self.step % every == 0))

    def asked_to_stop(self) -> bool:
        """Has any process been sent a signal? All stop after the same step."""
        return any(self.world.sum(self.interrupted))

    def save(self) -> None:
        """Write this step's checkpoint, then delete those beyond the number kept."""
        if self.world.rank == 0:
            tensors, state = self.state()
            parts = plain_weights(self.model), tensors, self.tokenizer, self.run, state
            write_checkpoint(self.run_dir, *parts)
            prune_checkpoints(self.run_dir, self.run.checkpoints_kept, self.resumed)
        self.world.sum(0)  # the others wait until it is there

    def validation(self) -> None:
        """Score each domain of the pinned split and log it, unless that is done.

        A signal ends it without a record: the run that goes on owes it.
        """
        whole = self.step >= self.last
        done = self.report.log.last("validation", self.step)
        if self.stopped or (done and done["whole"] >= whole):
            return
        limit = -1 if whole else self.run.validation_tokens
        bytes_V = self.place(self.tokenizer.token_byte_counts())
        self.model.eval()
        sums = {}
        for domain, shards in self.data.validation.items():
            sizes = self.run.rows, self.cfg.context, *self.world, limit
            rows = ValidationRows(shards, *sizes)
            rows = takewhile(lambda _: not self.interrupted, rows)
            with self.precision.context():
                mine = score(self.model.loss, rows, bytes_V)
            sums[domain] = self.world.sum(*mine)
        self.model.train()
        self.stopped = self.asked_to_stop()
        if self.stopped:
            return
        sums["overall"] = [sum(column) for column in zip(*sums.values(), strict=True)]
        domains = {
            name: {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
            | {"tokens": int(tokens), "bytes": int(size)}
            for name, (nats, tokens, size) in sums.items()
        }
        self.report.tell("validation", domains=domains, whole=whole)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Turn SIGTERM and Ctrl-C into a wish; a second Ctrl-C stops at once.

        At the end the folder is free for another process.
        """

        def ask(number: int, frame: Any) -> None:
            if self.interrupted and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupted = True

        in_main = threading.current_thread() is threading.main_thread()
        names = (signal.SIGTERM, signal.SIGINT) if in_main else ()
        before = {name: signal.signal(name, ask) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
            self.held.close()


def train(
    run: RunConfig, data: Prepared | None = None, quiet: bool = False
) -> TrainResult:
    """Train a run from where its folder stands; the same call again goes on with it."""
    return Trainer(run, data, quiet).fit()
