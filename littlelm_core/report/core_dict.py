"""A CORE report as facts for JSON, the terminal and the page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from littlelm_core.ingest import core_table
from littlelm_core.ingest.core_files import CORE, TABLES

FORMAT = 1


def digest_of(*parts: Any) -> str:
    """Return a SHA-256 of what values print as."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def data_digest(tasks: Iterable[Any]) -> str:
    """Return a digest of the tasks' files."""
    return digest_of(*sorted((task.label, task.sha256) for task in tasks))


def table_digest(tasks: Iterable[Any]) -> str:
    """Return a digest of how tasks are asked, and of both tables of baselines."""
    return digest_of(
        *sorted(
            (t.label, t.kind, t.shots, t.delimiter, *(t.baselines[v] for v in TABLES))
            for t in tasks
        )
    )


def core_dict(report: Any) -> dict[str, Any]:
    """Return a `CoreReport` without its items; shares from 0 to 1, baselines in %."""
    results = list(report.tasks.values())
    tasks = [result.task for result in results]
    fitting, uncropped = report.uncropped
    by_table = {t: report.core_by(t) for t in TABLES}
    names = {"alone": "tokens_alone", "run": "tokens_run", "logits": "logits"}
    return {
        "format": FORMAT,
        "suite": report.suite,
        "is_core": report.suite == CORE and report.whole and not sampled(report),
        "sample": bool(sampled(report)),
        "notes": core_notes(report),
        "core": report.core if report.whole else None,
        "mean_of_tasks": report.core,
        "baselines": report.baselines,
        **{f"core_{t}": v if report.whole else None for t, v in by_table.items()},
        "interval": list(report.interval),
        "core_uncropped": uncropped,
        "tasks_uncropped": fitting,
        "tasks": {result.task.label: task_facts(result) for result in results},
        "data_sha256": data_digest(tasks),
        "table_sha256": table_digest(tasks),
        "settings": report.settings,
        "tokens": {k: sum(getattr(r, v) for r in results) for k, v in names.items()},
        "seconds": report.seconds,
    }


def sampled(report: Any) -> list[str]:
    """Return the labels of tasks of which only some items were scored."""
    whole = {label: len(result.task.items) for label, result in report.tasks.items()}
    if report.suite == CORE:  # whatever a caller has left of them
        whole |= {t.label: core_table.FILES[t.file].records for t in core_table.TASKS}
    return [label for label, r in report.tasks.items() if r.n < whole[label]]


def task_facts(result: Any) -> dict[str, Any]:
    """Return a `TaskResult` without its items."""
    task, (fitting, accuracy) = result.task, result.uncropped
    return {
        "kind": task.kind,
        "category": task.category,
        "shots": task.shots,
        "n": result.n,
        "of": len(task.items),
        "accuracy": result.accuracy,
        "error": result.error,
        **{f"centered_{t}": task.centered(result.accuracy, t) for t in TABLES},
        **{f"baseline_{t}": task.baselines[t] for t in TABLES},
        "accuracy_uncropped": accuracy,
        "n_uncropped": fitting,
        "truncated": result.truncated,
        "ties": result.ties,
        "no_score": result.no_score,
        "won_without_score": result.won_without_score,
        "border": result.count("border"),
        "cut_answers": result.count("cut_answer"),
        "settled": result.count("settled"),
        "tokens_alone": result.tokens_alone,
        "tokens_run": result.tokens_run,
        "logits": result.logits,
        "seconds": result.seconds,
        "sha256": task.sha256,
    }


def core_notes(report: Any) -> list[str]:
    """Return what must be said beside the number, a line each."""
    found = []
    if report.suite != CORE:
        found.append(
            f"{report.suite} is not CORE: its score compares with no published one"
        )
        found += next(iter(report.tasks.values())).task.unlike
    if not report.whole:
        listed = max(r.task.listed for r in report.tasks.values())
        found.append(f"{len(report.tasks)} of {listed} tasks: no {report.suite}")
    some = sampled(report)
    if some:
        found.append(f"{len(some)} tasks by a sample of their items")
    if some and report.settings["legacy_pool"]:
        found.append("examples drawn from the sample alone, as in a quick mode")
    cropped = sum(result.truncated for result in report.tasks.values())
    how = {"bos": "behind a BOS", "shots": "by whole examples"}
    if cropped and (said := how.get(report.settings["crop"])):
        found.append(
            f"cropped {said}: {cropped:,} item{'s' * (cropped != 1)}; the reference "
            "keeps the last tokens alone, as --crop plain does"
        )
    if report.settings["legacy_nan"]:
        won = sum(result.won_without_score for result in report.tasks.values())
        found.append(
            f"a first choice without a token of its own wins: {won} answers are such"
        )
    return found
