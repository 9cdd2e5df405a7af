"""A CORE report as facts for JSON, the terminal and the page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from littlelm_core.ingest import core_table
from littlelm_core.ingest.core_files import TABLES

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


def departures(tasks: Iterable[Any]) -> list[str]:
    """Return in what tasks that are called CORE are other ones, a line each."""
    tasks = list(tasks)
    known = {task.label: task for task in core_table.TASKS}
    foreign, changed, asked = [], [], []
    for task in tasks:
        if task.label not in known:
            foreign.append(task.label)
            continue
        if not task.published:
            changed.append(task.label)
        its = known[task.label]
        mine = task.kind, task.shots, task.delimiter, task.baselines
        if mine != (its.kind, its.shots, its.delimiter, {"v1": its.v1, "v2": its.v2}):
            asked.append(task.label)
    named = {
        "not among CORE's tasks": foreign,
        "not the published files": changed,
        "not CORE's kind, shots, delimiter or baselines": asked,
    }
    listed, own = tasks[0].listed, len(core_table.TASKS)
    found = [] if listed == own else [f"a table of {listed} tasks: CORE has {own}"]
    found += [f"{what}: {_some(labels)}" for what, labels in named.items() if labels]
    return found


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
    return ", ".join(labels[:4]) + more


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
        "is_core": report.suite == "CORE"
        and len(tasks) == len(core_table.TASKS)
        and not departures(tasks),
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
        "published": task.published,
    }


def core_notes(report: Any) -> list[str]:
    """Return what must be said beside the number, a line each."""
    found = []
    if report.suite != "CORE":
        found.append(
            f"{report.suite} is not CORE: its score compares with no published one"
        )
    else:
        found += departures(result.task for result in report.tasks.values())
    if not report.whole:
        listed = max(r.task.listed for r in report.tasks.values())
        found.append(f"{len(report.tasks)} of {listed} tasks: no {report.suite}")
    sampled = [r for r in report.tasks.values() if r.n < len(r.task.items)]
    if sampled:
        found.append(f"{len(sampled)} tasks by a sample of their items")
    if sampled and report.settings["legacy_pool"]:
        found.append("examples drawn from the sample alone, as in a quick mode")
    if report.settings["legacy_nan"]:
        won = sum(result.won_without_score for result in report.tasks.values())
        found.append(
            f"a first choice without a token of its own wins: {won} answers are such"
        )
    return found
