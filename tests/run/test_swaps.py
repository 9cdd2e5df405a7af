"""Any part of any run file is swapped by one line.

Each run file times each part: the run is built at its full size on the meta device,
with its optimizer and precision, and really stepped at a shrunken size, saved and
resumed. A part that is named and not used fails here, whichever run names it.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import prepare_letters

from littlelm_core import config
from littlelm_core.config import (
    KINDS,
    RUNS,
    Part,
    build,
    load_object,
    load_run,
    resolve,
)
from littlelm_core.ingest import open_prepared
from littlelm_core.model import model_config
from littlelm_core.trainer import (
    Loop,
    parameter_groups,
    plain_weights,
    schedule_of,
    write_checkpoint,
)

RUN_FILES = sorted(path.stem for path in RUNS.glob("*.toml"))

# ---- The parts

OWN_FILE = Path(__file__).with_name("own_parts.py")
OWN = {
    "tokenizer": "OwnTokenizer", "attention": "OwnAttention", "ffn": "OwnSwiGLU",
    "norm": "OwnRMSNorm", "block": "OwnBlock", "model": "OwnModel", "loss": "own_loss",
    "optimizer": "OwnAdamW", "schedule": "own_schedule", "precision": "OwnPrecision",
    "mixture": "OwnMixture", "loader": "OwnLoader",
}  # fmt: skip

REGISTERED = {
    "tokenizer": ("bpe", "gpt2"), "ffn": ("swiglu", "relu2"),
    "optimizer": ("muon", "torch.optim:AdamW", "torch.optim:SGD"),
    "schedule": ("cosine", "wsd"), "precision": ("autocast", "fp8"),
    "mixture": ("proportional", "weighted"),
}  # fmt: skip
SWAPS = [(kind, use) for kind, uses in REGISTERED.items() for use in uses]
SWAPS += [(kind, f"{OWN_FILE}:{name}") for kind, name in OWN.items()]


def test_every_kind_and_every_name_is_swapped():
    assert OWN.keys() == KINDS.keys() - {"callback"}, "a kind of part without a swap"
    for kind in KINDS:
        for module in config._home_modules(kind):
            __import__(module)
    ours = {
        k: p for k, p in config._REGISTRY.items() if "littlelm_core" in p.__module__
    }
    registered = [(k, n) for k, n in ours if k != "callback"]
    kinds = [kind for kind, _ in registered]
    choices = {(k, n) for k, n in registered if kinds.count(k) > 1}
    assert choices <= {*SWAPS}, "a registered part that no swap names"


# ---- The same run, small enough to step


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder with the domains of the default corpus and single bytes."""
    folder = tmp_path_factory.mktemp("swaps")
    letters = {"code": "ab (", "docs": "cd.", "literature": "ef,"}
    domains = {name: (some, 60) for name, some in letters.items()}
    return prepare_letters(folder, domains, seed=3, lengths=(10, 45))


SMALL = [
    "steps=6", "stop_step=-1", "rows=2", "tokens_per_step=-1", "grad_accum=2",
    "tokenizer.vocab_size=260", "model.dim=64", "model.layers=2", "model.heads=4",
    "model.kv_heads=2", "model.head_dim=16", "model.ffn_dim=128", "model.context=32",
    "schedule.total=6", "schedule.warmup=1", "precision.compile=false",
]  # fmt: skip


def shrunken(name, change, data):
    """Return the run of `littlelm train NAME CHANGE`, at a size that steps at once."""
    run = load_run(name, change)
    keys = [*SMALL, f"data.source={data}"]
    if run.schedule.options.get("decay"):
        keys.append("schedule.decay=3")
    return load_run(name, [*change, *keys])


def parts_in(loop):
    """Return what a loop uses, by kind, where an object of the part is at hand."""
    block = loop.model.blocks[0]
    return {
        "tokenizer": loop.tokenizer, "attention": block.attention, "ffn": block.ffn,
        "norm": loop.model.norm, "block": block, "model": loop.model,
        "optimizer": loop.optimizer, "precision": loop.precision,
        "mixture": loop.mixture, "loader": loop.loader,
    }  # fmt: skip


def case(kind, use):
    return pytest.param(kind, use, id=f"{kind}-{use.rpartition('/')[2]}")


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize(("kind", "use"), [case(*swap) for swap in SWAPS])
def test_one_line_swaps_a_part_of_any_run(name, kind, use, data, tmp_path):
    change = [f"{kind}.use={use}"]
    run = shrunken(name, change, data)
    assert getattr(run, kind).use == use
    used = load_object(f"{OWN_FILE}:USED")
    used.clear()
    loop = Loop(run, open_prepared(data, run))
    part = resolve(kind, use)
    first, second = loop.take_step(), loop.take_step()
    if str(OWN_FILE) in use:
        assert used[kind], f"{kind} = {use} was never called"
    there = parts_in(loop).get(kind)
    if isinstance(part, type) and (kind, use) != ("mixture", "proportional"):
        assert type(there) is part, f"{kind} is {type(there)}"
    if kind == "schedule":
        shares = [part(s, **{"total": 6, **run.schedule.options}) for s in range(6)]
        assert [loop.schedule(s)["lr"] for s in range(6)] == shares
    for record in (first, second):
        assert np.isfinite(record["loss"])
        assert record["skipped_steps"] == 0
    assert 0 < first["loss"] < 2 * np.log(260)

    tensors, state = loop.state()
    weights = plain_weights(loop.model)
    saved = write_checkpoint(
        tmp_path, weights, tensors, loop.tokenizer, loop.run, state
    )
    resumed = Loop(run, open_prepared(data, run))
    resumed.load(saved)
    assert resumed.take_step()["loss"] == loop.take_step()["loss"]
    assert resumed.step == loop.step == 3


# ---- The run at its full size, without its memory


@functools.cache
def full_size(name, change=()):
    """Return (run, parameters by group) of a run built on the meta device."""
    run = load_run(name, change)
    cfg = model_config(run)
    with torch.device("meta"):
        model = resolve("model", run.model.use)(cfg)
    build("precision", run.precision).prepare(model, torch.device("cpu"))
    groups, shared = parameter_groups(model, run.optimizer.options)
    optimizer = build("optimizer", Part(use=run.optimizer.use, **shared), groups)
    owned = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert len(owned) == len({*owned}) == len([*model.parameters()])
    assert all(p.is_meta for p in model.parameters())
    schedule_of(run)
    sizes = {
        g["name"]: sum(p.numel() for p in g["params"]) for g in optimizer.param_groups
    }
    return run, sizes


@pytest.mark.parametrize("name", RUN_FILES)
def test_every_swap_builds_at_full_size(name):
    base, sizes = full_size(name)
    for kind, use in SWAPS:
        run, swapped = full_size(name, (f"{kind}.use={use}",))
        expected = dict(sizes)
        if kind == "ffn":  # SwiGLU has three matrices, relu2 two
            matrices = {"relu2": 2, "swiglu": 3}
            more = matrices.get(use, 3) - matrices.get(base.ffn.use, 3)
            shape = base.model.options
            expected["matrix"] += (
                more * shape["layers"] * shape["dim"] * shape["ffn_dim"]
            )
        assert swapped == expected, f"{kind} = {use}"
        for other, part in run.parts():
            if other != kind:
                was = dict(base.parts())[other]
                assert part == was, f"{kind} = {use} changed [{other}] too"


def test_the_sizes_are_those_that_the_files_name():
    totals = {name: sum(full_size(name)[1].values()) for name in RUN_FILES}
    assert totals["failed-858m"] == 858_000_000
    # Padding adds 47 rows to the embedding and to the head.
    assert totals["fixed-858m"] == 858_000_000 + 2 * 47 * 1408
    assert totals["littlelm-3.8b"] == 3_848_798_208 + 172_032 + 3072 + 168


def test_fixed_differs_from_failed_by_the_five_changes():
    failed, fixed = (load_run(f"{name}-858m") for name in ("failed", "fixed"))
    old, new = failed.model_dump(), fixed.model_dump()
    changed = {k for k in old if old[k] != new[k]} - {"name", "run_dir"}
    tables = {"data", "model", "optimizer", "schedule", "precision", "rows"}
    assert changed == tables
    shapes = failed.model.options, fixed.model.options
    differ = {k for k in shapes[0] if shapes[0][k] != shapes[1][k]}
    assert differ == {"context", "vocab_multiple"}
    for run in (failed, fixed):
        tokens = run.steps * run.tokens_per_step
        assert abs(tokens / 16.4e9 - 1) < 1e-3
        assert run.schedule.options["warmup"] == run.steps // 20
    assert failed.rows * shapes[0]["context"] == fixed.rows * shapes[1]["context"]
