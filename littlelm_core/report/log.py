"""metrics.jsonl: what a run did, one JSON object a line.

Every record has an "event" and the "step" after which it was written:

start       versions, device, parameters by role, groups, parts and their source hashes;
            conversion: what an FP8 precision converted, and why not the rest
train       one a step: tokens so far, loss (nats, weighted by tokens; null if
            skipped), lr of each group, grad_norm before clipping, tokens_per_second,
            mfu (null on a device whose peak is unknown), skipped_steps so far, seconds
            trained so far; where a mixture draws the rows, epochs: how often each
            domain has been read; where the schedule sets them, momentum and
            weight_decay of each group
validation  domains: loss, bits_per_byte, tokens, bytes of each and "overall"; whole:
            whether that was all of the split
core        suite ("CORE", "mini CORE", or whose tasks they are else); sample: whether
            only some items were scored; core: the mean
            centered accuracy of all its tasks, null where only some ran;
            mean_of_tasks: of those that ran, and the 95 % interval of it; tasks:
            accuracy and centered of each label; seconds that it took; exam: a digest
            of the tasks and how many items of each
sample      domain, prompt and the text that the model wrote
end         status "finished", "interrupted" or "failed", and then the error
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import inspect
import json
import platform
from pathlib import Path
from typing import Any

import torch

import littlelm_core
from littlelm_core.config import LittleLMError, RunConfig, resolve


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl; none if there is no such file.

    A line that a killed process wrote only half of is passed over.
    """
    records = []
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):  # the latter: write_text says it
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"event", "step"} <= record.keys():
            records.append(record)
    return records


def write_text(path: Path, text: str) -> None:
    """Write a file in one move: who reads it meanwhile sees the old one, whole.

    Raises LittleLMError when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        full = error.errno in (errno.ENOSPC, errno.EFBIG)
        mend = "make room for it" if full else "give another folder"
        raise LittleLMError(f"cannot write {path}: {error.strerror}: {mend}") from error


class MetricsLog:
    """The log of a run, opened at the step from which the run goes on.

    What a killed run wrote after that step is dropped: those steps are taken again, and
    a curve must not have two points for one step. At step 0 it begins anew.
    writes: False on all processes but the first, which keep the records in memory.
    """

    def __init__(self, run_dir: str | Path, step: int, writes: bool = True):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.writes = writes
        self.records = [
            record
            for record in read_metrics(self.path)
            if step > 0 and record["step"] <= step and record["event"] != "end"
        ]
        if writes:
            text = "".join(json.dumps(record) + "\n" for record in self.records)
            write_text(self.path, text)

    def write(self, event: str, step: int, **fields: Any) -> dict[str, Any]:
        """Append a record and return it. Raises LittleLMError when the disk is full."""
        record = {"event": event, "step": step, **fields}
        self.records.append(record)
        if self.writes:
            line = json.dumps(record, allow_nan=False) + "\n"
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                raise LittleLMError(
                    f"cannot write {self.path}: {error}: make room and run the same "
                    "command again, it goes on from the last checkpoint"
                ) from error
        return record

    def last(self, event: str, step: int | None = None) -> dict[str, Any] | None:
        """Return the newest record of an event (of one step), or None."""
        for record in reversed(self.records):
            if step is not None and record["step"] < step:
                return None
            if record["event"] == event and step in (None, record["step"]):
                return record
        return None


# Dense bf16 FLOP/s by a part of the device's name; another device gets no percentage.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12,
    "RTX 5090": 209.5e12, "RTX 4090": 165.2e12,
}  # fmt: skip


def mfu(flops_per_second: float, device: torch.device) -> float | None:
    """Return the model FLOPs utilization of one device, None where it is unknown.

    flops_per_second: `model.flops_per_token` (forward and backward, nothing counted
    twice for recomputation) times tokens per second, of one device. The peak is that of
    dense bf16 products, also for a run in FP8.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = [peak for part, peak in PEAK_FLOPS.items() if part in name]
    return flops_per_second / peaks[0] if peaks else None


def start_facts(trainer: Any) -> dict[str, Any]:
    """Return what the "start" record says: all that explains a trainer's curve."""
    groups = [
        {
            "name": group["name"],
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
            "lr": trainer.own[group["name"]]["lr"],
            "weight_decay": group.get("weight_decay"),
        }
        for group in trainer.optimizer.param_groups
    ]
    device = trainer.device
    on_gpu = device.type == "cuda"
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {
            "littlelm": littlelm_core.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "processes": trainer.world.size,
        "precision": getattr(trainer.precision, "dtype", None),
        "compile": getattr(trainer.precision, "compile", None),
        "conversion": _conversion(trainer),
        "parameters": {g["name"]: g["parameters"] for g in groups}
        | {"total": sum(g["parameters"] for g in groups)},
        "groups": groups,
        "rows": trainer.run.rows,
        "context": trainer.cfg.context,
        "grad_accum": trainer.grad_accum,
        "tokens_per_step": trainer.tokens_per_step,
        "last_step": trainer.last,
        "resumed": trainer.resumed.name if trainer.resumed else None,
        "data": str(trainer.data.folder),
        "parts": trainer.parts,
    }


def _conversion(trainer: Any) -> dict[str, Any] | None:
    """Return what the precision converted and what not; None if it converts nothing."""
    report = getattr(trainer.precision, "report", None)
    if not dataclasses.is_dataclass(report):
        return None
    return {"text": str(report), **dataclasses.asdict(report)}


def part_sources(run: RunConfig) -> dict[str, dict[str, str | None]]:
    """Return {kind: {use, source}} of a run: 16 hex digits of each part's source text.

    source is None where there is none to read: built in, or not in this version.
    """
    sources: dict[str, dict[str, str | None]] = {}
    for kind, part in run.parts():
        try:
            text = inspect.getsource(resolve(kind, part.use))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        except (LittleLMError, OSError, TypeError):
            digest = None
        name = kind
        while name in sources:  # a run may have several callbacks
            name += "'"
        sources[name] = {"use": part.use, "source": digest}
    return sources
