"""Around an evaluation: what it refuses, its journal's key, the shares of its ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from littlelm_core.config import ConfigError, DataError, LittleLMError, nearest
from littlelm_core.report.core_dict import digest_of, table_digest


class EvaluationStopped(LittleLMError):
    """An evaluation that its caller ended; a journal keeps what was finished."""

    def __init__(self) -> None:
        super().__init__("stopped before all items were scored")


def context_in_force(own: int | None, wanted: int | None, crop: str) -> int | None:
    """Return the wanted context, else the model's own; None: no limit.

    Raises ConfigError for one that the model lacks.
    """
    if wanted is None:
        return own
    if wanted < 2:
        raise ConfigError(f"context = {wanted}: a scored token needs one before it")
    if crop != "none" and own and wanted > own:
        raise ConfigError(
            f"context = {wanted}, but the model was made for {own} tokens: ask for "
            "no more"
        )
    return wanted


def check_settings(
    batch_tokens: int,
    max_per_task: int | None,
    rank: int,
    world: int,
    choices: Mapping[str, tuple[str, Sequence[str]]],
) -> None:
    """Raise ConfigError for numbers out of range and names that are none.

    choices: {setting: (its value, what it may be)}.
    """
    for name, (value, valid) in choices.items():
        if value not in valid:
            raise ConfigError(f"{name} = {value!r}{nearest(value, valid)}")
    if max_per_task is not None and max_per_task < 1:
        raise ConfigError(
            f"max_per_task = {max_per_task} must be at least 1, or None for all"
        )
    if batch_tokens < 1:
        raise ConfigError(f"batch_tokens = {batch_tokens} must be at least 1")
    if not 0 <= rank < world:
        raise ConfigError(f"rank = {rank} of {world}: ranks count from 0")


def check_tasks(tasks: Sequence[Any]) -> None:
    """Raise ConfigError or DataError for tasks that are none, empty or twice there."""
    if not tasks:
        raise ConfigError("no task to evaluate: load_tasks(folder) gives them")
    labels = [task.label for task in tasks]
    for task in tasks:
        if not task.items:
            raise DataError(f"{task.label} has no item")
        if labels.count(task.label) > 1:
            raise ConfigError(f"{task.label} is given twice: a report goes by labels")


def check_ids(label: str, examples: Sequence[Any], vocab_size: int | None) -> None:
    """Raise ConfigError for ids that the model does not have."""
    if vocab_size is None:
        return
    top = max(int(row.ids.max()) for example in examples for row in example.rows)
    if top >= vocab_size:
        raise ConfigError(
            f"{label}: the tokenizer gives id {top}, the model has {vocab_size}: use "
            "the model's own tokenizer"
        )


def model_digest(model: nn.Module) -> str:
    """Return a digest of what a model's `cfg` says and some numbers of each tensor.

    Enough to tell models: some hundred numbers of each weight and buffer.
    """
    cfg = getattr(model, "cfg", None)
    told = repr(getattr(cfg, "__dict__", cfg))
    digest = hashlib.sha256(re.sub(r" at 0x\w+", "", told).encode())
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        flat = weight.detach().flatten()
        some = flat[:: max(flat.numel() // 256, 1)].float().cpu().numpy()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + some.tobytes())
    return digest.hexdigest()


def journal_key(model: nn.Module, tasks: Sequence[Any], *settings: Any) -> str:
    """Return a digest of the model, the tasks and the settings, for a journal."""
    items = sorted((task.label, task.digest) for task in tasks)
    return digest_of(model_digest(model), *settings, items, table_digest(tasks))


def merge(reports: Sequence[Any]) -> Any:
    """Return one report from those of all ranks. Raises LittleLMError if one lacks."""
    ranks, world = [r.share[0] for r in reports], reports[0].share[1]
    if sorted(ranks) != list(range(world)):
        raise LittleLMError(f"shares of ranks {sorted(ranks)} of {world}: some lack")
    tasks = {}
    for label, first in reports[0].tasks.items():
        parts = [report.tasks[label] for report in reports]
        items = sorted((i for part in parts for i in part.items), key=lambda i: i.index)
        numbers = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("tokens_alone", "tokens_run", "logits")
        }
        longest = max(part.seconds for part in parts)
        tasks[label] = replace(first, items=tuple(items), **numbers, seconds=longest)
    seconds = {k: max(r.seconds[k] for r in reports) for k in reports[0].seconds}
    return replace(reports[0], tasks=tasks, seconds=seconds, share=(0, 1))


def gather(report: Any, stopped: bool) -> Any:
    """Return the whole report on every rank; the tasks themselves are not sent.

    Raises EvaluationStopped on every rank when one was stopped.
    """
    world = report.share[1]
    numbers = {
        label: {k: v for k, v in vars(result).items() if k != "task"}
        for label, result in report.tasks.items()
    }
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (numbers, report.seconds, stopped))
    if any(stopped for _, _, stopped in found):
        raise EvaluationStopped
    reports = []
    for other, (parts, seconds, _) in enumerate(found):
        tasks = {k: replace(r, **parts[k]) for k, r in report.tasks.items()}
        reports.append(
            replace(report, tasks=tasks, seconds=seconds, share=(other, world))
        )
    return merge(reports)
