"""Graders of chapter 00's exercises (written together with chapters/00_config.md)."""

import math
import tempfile
from pathlib import Path

from littlelm_core.config import load_run


def exercise_0_1(answer):
    """Tokens of one optimizer step."""
    assert answer(rows=2, context=8, grad_accum=3, gpus=1) == 48, "2 rows of 8, 3 times"
    got = answer(rows=20, context=2048, grad_accum=7, gpus=8)
    assert got == 2_293_760, f"the $998 run takes 2,293,760 tokens a step, not {got:,}"


def exercise_0_2(answer):
    """Hours and dollars of a run."""
    hours, dollars = answer(
        tokens=7.2e9, tokens_per_second=1e6, gpus=2, dollars_per_gpu_hour=5.0
    )
    assert math.isclose(hours, 2.0), f"7.2e9 at 1e6 a second are 2 h, not {hours}"
    assert math.isclose(dollars, 20.0), f"2 GPUs for 2 h at $5 are $20, not {dollars}"
    _, one = answer(tokens=7.2e9, tokens_per_second=1e6, gpus=1, dollars_per_gpu_hour=5)
    assert math.isclose(one, 10.0), "the price is per GPU and hour"


def exercise_0_3(answer):
    """Lay one table over another, with the rule for parts."""
    old = {"use": "adamw", "lr": 0.001, "betas": (0.9, 0.95)}
    kept = dict(old)
    assert answer(old, {"lr": 0.01}) == {**old, "lr": 0.01}, "same part: keys stay"
    got = answer(old, {"use": "sgd", "momentum": 0.9})
    assert got == {"use": "sgd", "momentum": 0.9}, f"old part's keys must go: {got}"
    assert answer(old, {"use": "adamw", "lr": 1.0})["betas"] == (0.9, 0.95), (
        "naming the same part again is no change"
    )
    assert old == kept, "the table underneath must not be changed"


def exercise_0_4(answer):
    """Read the value of an override."""
    for text, value in (
        ("3", 3), ("0.5", 0.5), ("1e-3", 1e-3), ("true", True), ("fp32", "fp32"),
        ("1e-3x", "1e-3x"), ("my.py:Mine", "my.py:Mine"), ("[1, 2]", [1, 2]),
    ):  # fmt: skip
        got = answer(text)
        assert got == value, f"{text!r} became {got!r}"
        assert type(got) is type(value), f"{text!r} became a {type(got).__name__}"


def exercise_0_5(answer):
    """A run file of four lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(answer(), encoding="utf-8")
        run, tiny = load_run(path), load_run("tiny")
    assert run.ffn.use == "relu2", f"ffn.use is {run.ffn.use!r}, not 'relu2'"
    assert run.steps == 50, f"steps is {run.steps}, not 50"
    assert run.model.options["dim"] == tiny.model.options["dim"], "extend tiny"
    assert run.rows == tiny.rows, "what the file does not say comes from tiny"
