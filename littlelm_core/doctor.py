"""What this machine can do, and which runs fit it (`littlelm doctor`).

Doctor recommends; the resolved run file decides. Sizes are counted on the run's own
model (built without memory), times come from the matrix rate measured here.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from littlelm_core.config import RUNS, LittleLMError, RunConfig, load_run
from littlelm_core.report.terminal import table as text_table

if TYPE_CHECKING:
    from littlelm_core.model import ModelConfig

__all__ = ["Fit", "fit", "machine", "matmul_rates", "show"]

# Share of the matrix rate that a whole training step reaches. Measured on one CPU core:
# 0.7 in fp32 (8.5M shape), 0.25 in bf16 (`tiny`, where all that is not a matrix product
# takes longer than the products). On a GPU not measured yet: 0.4 is what compiled bf16
# runs are reported to reach.
STEP_SHARE = {"cpu": {"fp32": 0.7, "bf16": 0.25}, "cuda": {"fp32": 0.4, "bf16": 0.4}}


# ---- The machine


def memory_bytes() -> tuple[int | None, int | None]:
    """Return (all, available) bytes of main memory; None where the system won't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        table = {k: int(v.split()[0]) * 1024 for k, v in (x.split(":") for x in lines)}
        return table["MemTotal"], table["MemAvailable"]
    except (OSError, KeyError, ValueError):
        pass
    try:  # macOS
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, None
    except (AttributeError, ValueError, OSError):
        return None, None  # Windows has neither


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_bf16() -> str:
    """Return which instructions multiply bf16 on this CPU, or "" for none.

    Without them bf16 is emulated: right, but slower than fp32.
    """
    asks = {
        "AMX": "_is_amx_tile_supported",
        "AVX-512 BF16": "_is_avx512_bf16_supported",
    }
    found = [n for n, ask in asks.items() if getattr(torch.cpu, ask, bool)()]
    if not found:
        try:
            flags = Path("/proc/cpuinfo").read_text()
            names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", " bf16": "ARM"}
            found = [name for flag, name in names.items() if flag in flags]
        except OSError:
            pass
    return ", ".join(found)


def compiler() -> tuple[str | None, str]:
    """Return (the C++ compiler that torch.compile would call, what is missing)."""
    candidates = [os.environ.get("CXX"), "g++", "clang++", "cl"]
    found = next((shutil.which(c) for c in candidates if c and shutil.which(c)), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if found is None:
        return None, "no C++ compiler: install g++ (Linux) or clang (macOS)"
    if not headers.is_file():
        return found, f"no {headers}: install python3-dev"
    return found, ""


class GPU(NamedTuple):
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    memory: int

    @property
    def fp8(self) -> bool:
        """FP8 matrix products need compute capability 8.9 (Ada) or newer."""
        return self.capability >= (8, 9)


def gpus() -> list[GPU]:
    """Return the CUDA devices that torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(GPU(p.name, (p.major, p.minor), p.total_memory))
    return found


def machine() -> dict[str, Any]:
    """Return what this machine is, as plain values (also written beside benchmarks)."""
    total, available = memory_bytes()
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        usable = os.cpu_count() or 1
    path, lacks = compiler()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "memory": total,
        "memory_available": available,
        "disk_free": shutil.disk_usage(Path.cwd()).free,
        "cpu_bf16": cpu_bf16(),
        "gpus": [gpu._asdict() | {"fp8": gpu.fp8} for gpu in gpus()],
        "mps": torch.backends.mps.is_available(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": path,
        "compiler_lacks": lacks,
    }


def matmul_rates(
    device: str | None = None, size: int = 1024, seconds: float = 0.25
) -> dict[str, float]:
    """Measure FLOP/s of a size x size matrix product in fp32 and bf16.

    device: "cpu", "cuda" or None for the best here. The best of several repeats: a
    busy machine only ever makes a product slower.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        size *= 4  # a GPU is not filled by 1024
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        torch.mm(a, b)
        best, end = float("inf"), time.perf_counter() + seconds
        while best == float("inf") or time.perf_counter() < end:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            torch.mm(a, b)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        rates[name] = 2 * size**3 / best
    return rates


# ---- Which runs fit


class Fit(NamedTuple):
    """What a run needs, and whether this machine has it."""

    name: str
    parameters: int
    tokens: int
    memory: int  # bytes, on the device that would train it
    seconds: float | None
    fits: bool
    reason: str


# Bytes that a block keeps for its backward pass, for each token: of the model's width
# and of the MLP's. Counted through saved_tensors_hooks on this package's blocks, eager.
KEPT_WIDTH = {"fp32": 46, "bf16": 40}
KEPT_MLP = {("swiglu", "fp32"): 16, ("swiglu", "bf16"): 8}
KEPT_MLP |= {("relu2", "fp32"): 8, ("relu2", "bf16"): 4}


def uses_bf16(run: RunConfig, here: dict[str, Any]) -> bool:
    """Would this run multiply in bf16 here?"""
    dtype = run.precision.options.get("dtype", "auto")
    return dtype == "bf16" or (
        dtype == "auto" and bool(here["gpus"] or here["cpu_bf16"])
    )


def memory_needed(run: RunConfig, cfg: ModelConfig, bf16: bool) -> dict[str, int]:
    """Estimate the bytes that eager training takes on one device, by category.

    Weights, gradients and optimizer states are fp32: 4 bytes each; AdamW keeps two
    states, Muon one of its matrices. Chapter 14 counts it exactly, also when sharded.
    """
    from littlelm_core.model import count_parameters

    roles = count_parameters(cfg)
    one_state = roles["matrix"] if "muon" in run.optimizer.use.lower() else 0
    dtype, tokens = "bf16" if bf16 else "fp32", run.rows * cfg.context
    mlp = KEPT_MLP.get((cfg.ffn, dtype), KEPT_MLP["swiglu", dtype])
    kept = cfg.layers * (KEPT_WIDTH[dtype] * cfg.dim + mlp * cfg.ffn_dim)
    chunk = min(tokens, 1024) * cfg.padded_vocab_size
    return {
        "weights": 4 * roles["total"],
        "gradients": 4 * roles["total"],
        "optimizer": 8 * roles["total"] - 4 * one_state,
        "activations": tokens * kept + 8 * chunk,
    }


def run_tokens(run: RunConfig, context: int, world: int = 1) -> tuple[int, int]:
    """Return (tokens of one optimizer step, tokens of the whole run)."""
    step = run.rows * context * max(run.grad_accum, 1) * world
    if run.grad_accum == -1 and run.tokens_per_step != -1:
        step = run.tokens_per_step
    steps = run.stop_step if run.stop_step != -1 else run.steps
    return step, step * steps


def fit(run: RunConfig, here: dict[str, Any], rates: dict[str, float]) -> Fit:
    """Say what a run needs in memory and time, and whether `here` has it.

    here: from `machine()`. rates: from `matmul_rates()`, or {} for no time.
    """
    from littlelm_core.model import count_parameters, flops_per_token, model_config

    cfg = model_config(run)
    parameters = count_parameters(cfg)["total"]
    _, tokens = run_tokens(run, cfg.context)
    bf16 = uses_bf16(run, here)
    memory = sum(memory_needed(run, cfg, bf16).values())
    device = "cuda" if here["gpus"] else "cpu"
    seconds = None
    if rates:
        dtype = "bf16" if bf16 else "fp32"
        rate = rates[dtype] * STEP_SHARE[device][dtype]
        seconds = tokens * flops_per_token(cfg) / rate
    if here["gpus"]:
        room, where = here["gpus"][0]["memory"], "of GPU memory"
    else:
        room, where = here["memory_available"] or here["memory"], "of memory free"
    fits, reason = True, ""
    if room is not None and memory > 0.9 * room:
        fits = False
        reason = f"needs {size(memory)}, and there are {size(room)} {where}"
    elif seconds is not None and seconds > 14 * 86400:
        fits, reason = False, f"would take {duration(seconds)} here"
    elif seconds is not None and seconds > 86400:
        reason = "fits, but slowly"
    return Fit(run.name, parameters, tokens, memory, seconds, fits, reason)


# ---- Say it


def size(count: float) -> str:
    """Return bytes as text: "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def number(count: float) -> str:
    """Return a count as text: "8.5M"."""
    for unit in ("", "k", "M", "B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def duration(seconds: float) -> str:
    """Return a time as text: "4 min", "2.5 h", "12 days"."""
    units = {"years": 365 * 86400, "days": 86400, "h": 3600, "min": 60}
    for unit, length in units.items():
        if seconds >= 2 * length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.0f} s"


def _facts(here: dict[str, Any], rates: dict[str, float]) -> list[tuple[str, str]]:
    lines = [
        ("system", f"{here['system']}, Python {here['python']}"),
        ("torch", f"{here['torch']}, {here['threads']} threads"),
        ("CPU", f"{here['cpu']}, {here['cores']} cores"),
        ("bf16 on the CPU", here["cpu_bf16"] or "no instructions for it: use fp32"),
    ]
    if here["memory"] is not None:
        free = here["memory_available"]
        free_text = f" ({size(free)} available)" if free is not None else ""
        lines.append(("memory", size(here["memory"]) + free_text))
    lines.append(("disk", f"{size(here['disk_free'])} free here"))
    for gpu in here["gpus"]:
        fp8 = "FP8" if gpu["fp8"] else "no FP8 (needs 8.9)"
        capability = ".".join(map(str, gpu["capability"]))
        text = f"{gpu['name']}, {size(gpu['memory'])}, capability {capability}, {fp8}"
        lines.append(("GPU", text))
    if not here["gpus"]:
        apple = "none for CUDA; Apple's GPU is there, but runs use the CPU"
        lines.append(
            ("GPU", apple if here["mps"] else "none: runs use the CPU, no FP8")
        )
    lacks = here["compiler_lacks"]
    text = here["compiler"] or ""
    lines.append(("torch.compile", f"{text} ({lacks})" if lacks else text))
    if rates:
        text = ", ".join(f"{n} {rate / 1e9:,.0f} GFLOP/s" for n, rate in rates.items())
        lines.append(("matmul rate", text))
    return lines


def fits_here(here: dict[str, Any], rates: dict[str, float]) -> list[Fit | str]:
    """Return a Fit for every run file; a run that does not load gives its reason."""
    found: list[Fit | str] = []
    for path in sorted(RUNS.glob("*.toml")):
        try:
            found.append(fit(load_run(path), here, rates))
        except LittleLMError as error:
            found.append(f"{path.stem}: {error}")
    return found


def show(console: Console, quick: bool = False) -> None:
    """Print what this machine is and which runs fit it."""
    here = machine()
    rates = {} if quick else matmul_rates()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(here, rates):
        facts.add_row(name, value)
    console.print(facts)
    found = fits_here(here, rates)
    fits = sorted((f for f in found if isinstance(f, Fit)), key=lambda f: f.parameters)
    lines = [["run", "parameters", "tokens", "memory", "time here", "fits"]]
    for item in fits:
        time_here = "-" if item.seconds is None else duration(item.seconds)
        lines.append(
            [
                item.name,
                number(item.parameters),
                number(item.tokens),
                size(item.memory),
                time_here,
                "yes" if item.fits else "no",
            ]
        )
    console.print("\n" + text_table(lines), markup=False, soft_wrap=True)
    notes = [f"{item.name}: {item.reason}" for item in fits if item.reason]
    notes += [item for item in found if isinstance(item, str)]
    for line in notes:
        console.print(line, markup=False, soft_wrap=True)
    if here["threads"] > 1:
        console.print(
            "While other work keeps the cores busy, set OMP_NUM_THREADS=1: threads "
            "that wait for each other cost more than they bring.",
            soft_wrap=True,
        )
