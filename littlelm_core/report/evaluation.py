"""Evaluations of runs and checkpoints: where their tasks, tokens and reports lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from littlelm_core.core_eval import (
    CoreReport,
    EvaluationStopped,
    evaluate,
    load_tasks,
)
from littlelm_core.corpus import data_folder
from littlelm_core.ingest.core_bundle import tasks_folder
from littlelm_core.report.core import core_record, write_core_page
from littlelm_core.report.log import write_text


def token_folder() -> Path:
    """Return where the tokens of prompts are kept from one evaluation to the next."""
    return data_folder() / "core-tokens"


def evaluate_run(
    trainer: Any, validation: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Score a trainer's model as it stands; return the "core" record of its log.

    validation: the record of the same step, whose bits per byte stand beside the score.
    The report with every item comes to lie in the run's folder under core/. None when a
    signal has come.
    """
    run, world = trainer.run, trainer.world
    with trainer.precision.context():
        try:
            report = evaluate(
                trainer.model,
                trainer.tokenizer,
                load_tasks(tasks_folder(run.eval_tasks)),
                max_per_task=None
                if run.eval_max_per_task == -1
                else run.eval_max_per_task,
                rank=world.rank,
                world=world.size,
                token_cache=token_folder(),
                progress=lambda label, items: not trainer.interrupted,
            )
        except EvaluationStopped:
            return None
    facts = named(report, f"{run.name}, step {trainer.step}", bits_of(validation))
    if world.rank == 0:
        save(report, facts, trainer.run_dir / "core" / f"step_{trainer.step:08d}")
    return core_record(facts)


def bits_of(validation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return bits per byte by domain of a "validation" record; none without one."""
    scores = validation["domains"] if validation else {}
    return {domain: score["bits_per_byte"] for domain, score in scores.items()}


def named(report: CoreReport, model: str, bits: Mapping[str, float]) -> dict[str, Any]:
    """Return a report's facts with the model's name and its bits per byte."""
    return {**report.to_dict(), "model": model, "bits_per_byte": dict(bits)}


def save(
    report: CoreReport,
    facts: Mapping[str, Any],
    folder: Path,
    against: Mapping[str, Any] | None = None,
) -> None:
    """Write report.json, with every item, and report.html into a folder."""
    write_text(folder / "report.json", report.to_json(facts))
    write_core_page(facts, folder / "report.html", against)
