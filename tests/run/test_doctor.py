"""Doctor: what it says of a machine, and which runs it lets in."""

import json

import pytest
import torch
from rich.console import Console

from littlelm_core import doctor
from littlelm_core.config import RUNS, load_run
from littlelm_core.model import LanguageModel, model_config

RATES = {"fp32": 1e11, "bf16": 4e11}


def _machine(**changes):
    return {**doctor.machine(), "gpus": [], "memory_available": 8 * 10**9, **changes}


def test_the_machine_is_plain_values():
    here = doctor.machine()
    assert json.loads(json.dumps(here)) == here
    assert here["cores"] >= 1
    assert here["torch"] == torch.__version__
    assert here["memory"] is None or here["memory"] > 2**28
    assert here["disk_free"] > 0


def test_matmul_rates_are_of_this_world():
    rates = doctor.matmul_rates("cpu", size=128, seconds=0.02)
    assert set(rates) == {"fp32", "bf16"}
    assert all(1e7 < rate < 1e14 for rate in rates.values())


def test_parameters_are_those_of_the_model():
    run = load_run("tiny", ["model.layers=2"])
    found = doctor.fit(run, _machine(), RATES)
    model = LanguageModel(model_config(run))
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.tokens == run.steps * run.rows * model.cfg.context


def test_a_small_run_fits_and_a_large_one_does_not():
    small = doctor.fit(load_run("tiny"), _machine(), RATES)
    assert small.fits, small.reason
    large = [
        "model.dim=8192",
        "model.head_dim=64",
        "model.layers=64",
        "model.ffn_dim=32768",
    ]
    found = doctor.fit(load_run("tiny", large), _machine(), RATES)
    assert not found.fits
    assert "8 GB" in found.reason


def test_memory_counts_weights_gradients_and_states():
    run = load_run("tiny-adamw", ["rows=1", "model.context=8"])
    cfg = model_config(run)
    parameters = doctor.fit(run, _machine(), RATES).parameters
    needed = doctor.memory_needed(run, cfg, bf16=False)
    assert needed["weights"] == needed["gradients"] == 4 * parameters
    assert needed["optimizer"] == 8 * parameters


@pytest.mark.parametrize("bf16", [False, True])
def test_activations_are_what_autograd_keeps(bf16):
    """The constants per block still hold: counted again on two depths."""
    kept = {}
    for layers in (2, 4):
        run = load_run("tiny", [f"model.layers={layers}", "rows=4", "model.context=64"])
        cfg = model_config(run)
        model = LanguageModel(cfg)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen = {}

        def pack(tensor, seen=seen, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        ids = torch.randint(0, 100, (4, 64))
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        ):
            model.loss(ids, ids)
        matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
        casts = 2 * matrices if bf16 else 0  # bf16 copies of weights, kept as well
        kept[layers] = sum(size for size, _ in seen.values()) - casts
        needed = doctor.memory_needed(run, cfg, bf16)["activations"]
        kept[layers, "estimate"] = needed
    measured = kept[4] - kept[2]
    estimate = kept[4, "estimate"] - kept[2, "estimate"]
    assert estimate == pytest.approx(measured, rel=0.12)


def test_a_gpu_and_its_fp8():
    ada = doctor.GPU("RTX 4090", (8, 9), 24 * 10**9)
    ampere = doctor.GPU("RTX 3090", (8, 6), 24 * 10**9)
    assert ada.fp8
    assert not ampere.fp8
    assert doctor.GPU("B200", (10, 0), 180 * 10**9).fp8
    here = _machine(gpus=[ampere._asdict() | {"fp8": ampere.fp8}])
    text = dict(doctor._facts(here, RATES))["GPU"]
    assert "no FP8" in text
    assert "8.6" in text
    large = [
        "model.dim=4096",
        "model.head_dim=64",
        "model.layers=32",
        "model.ffn_dim=16384",
    ]
    found = doctor.fit(load_run("tiny", large), here, RATES)
    assert not found.fits
    assert "GPU memory" in found.reason


def test_time_follows_the_rate():
    fast = doctor.fit(load_run("tiny"), _machine(), {"fp32": 4e11, "bf16": 4e11})
    slow = doctor.fit(load_run("tiny"), _machine(), {"fp32": 1e11, "bf16": 1e11})
    assert slow.seconds == pytest.approx(4 * fast.seconds)
    assert doctor.fit(load_run("tiny"), _machine(), {}).seconds is None
    forever = doctor.fit(load_run("tiny", ["steps=100000000"]), _machine(), RATES)
    assert not forever.fits
    assert "would take" in forever.reason


def test_show_names_every_run():
    console = Console(record=True, width=100)
    doctor.show(console, quick=True)
    text = console.export_text()
    for path in RUNS.glob("*.toml"):
        assert path.stem in text
    for word in ("torch", "memory", "CPU", "GPU", "FP8", "torch.compile"):
        assert word in text


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    path, lacks = doctor.compiler()
    assert path is None
    assert "g++" in lacks


def test_sizes_and_times_read_well():
    assert doctor.size(1.5e9) == "1.5 GB"
    assert doctor.number(8_524_032) == "8.52M"
    assert doctor.duration(45) == "45 s"
    assert doctor.duration(300) == "5.0 min"
    assert doctor.duration(3 * 86400) == "3.0 days"
