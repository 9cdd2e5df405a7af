"""The files of CORE: a table of tasks, core.yaml, and a jsonl file for each.

The format is that of the public evaluation bundle, see `littlelm data prepare core`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from littlelm_core.config import DataError, nearest
from littlelm_core.ingest import core_table

CORE = "CORE"
WORDS = {str: "text", list: "list", int: "whole number"}
KINDS = ("multiple_choice", "schema", "language_modeling")
TABLES = ("v1", "v2")  # of random baselines
FIELDS = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}


def read_tasks(folder: Path) -> list[dict[str, Any]]:
    """Return the fields of `core_eval.Task` for each task of a folder.

    Raises DataError, in one line with file and line number: a file that is missing or
    empty, a record that lacks a field or has another kind of value there, half a
    character, an empty continuation, a gold answer that is not among the choices.
    """
    path = folder / "core.yaml"
    try:
        table = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(
            f"no core.yaml in {folder}: name a folder of CORE's files, or get them "
            "with littlelm data prepare core"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is no YAML: {reason}") from error
    rows = table.get("icl_tasks") if isinstance(table, dict) else None
    if not rows or not isinstance(rows, list):
        raise DataError(f"{path} lists no icl_tasks")
    labels: set[str] = set()
    tasks, suite = [], str(table.get("name", CORE))
    for row in rows:
        task = _read_task(path, row)
        if task["label"] in labels:
            raise DataError(f"{path} lists {task['label']} twice")
        labels.add(task["label"])
        tasks.append(task)
    unlike = departures(tasks) if suite == CORE else []
    if unlike:
        suite = f"tasks of {folder.resolve().name}"
    of_all = {"suite": suite, "listed": len(rows), "unlike": tuple(unlike)}
    return [task | of_all for task in tasks]


def departures(tasks: list[dict[str, Any]]) -> list[str]:
    """Return in what tasks are other ones than CORE's, a line each."""
    known = {task.label: task for task in core_table.TASKS}
    foreign, changed, asked = [], [], []
    for task in tasks:
        label = task["label"]
        if label not in known:
            foreign.append(label)
            continue
        own = known[label]
        if task["sha256"] != core_table.FILES[own.file].sha256:
            changed.append(label)
        mine = [task[key] for key in ("kind", "shots", "delimiter", "baselines")]
        if mine != [own.kind, own.shots, own.delimiter, {"v1": own.v1, "v2": own.v2}]:
            asked.append(label)
    count, listed = len(known), len(tasks)
    found = [] if listed == count else [f"a table of {listed} tasks: CORE has {count}"]
    named = {
        "not among CORE's tasks": foreign,
        "not the published files": changed,
        "not CORE's kind, shots, delimiter or baselines": asked,
    }
    for what, labels in named.items():
        more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
        found += [f"{what}: {', '.join(labels[:4])}{more}"] if labels else []
    return found


def _read_task(table: Path, row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{table} lists {row!r}, which is no task")
    row = {"continuation_delimiter": " ", **row}
    try:
        label, uri = row["label"], row["dataset_uri"]
        kind, shots = row["icl_task_type"], row["num_fewshot"]
        baselines = {t: row[f"random_baseline_{t}"] for t in TABLES}
    except KeyError as error:
        raise DataError(
            f"{table}: a task ({row.get('label')}) lacks {error}"
        ) from error
    # YAML reads `no`, 7 and an empty value as what they look like.
    for name in ("label", "dataset_uri", "icl_task_type", "continuation_delimiter"):
        if not isinstance(row[name], str):
            raise DataError(f"{table}: {label} has {name} = {row[name]!r}, no text")
    path = table.parent / uri
    shots = shots[0] if isinstance(shots, list) and shots else shots
    if not isinstance(shots, int) or shots < 0:
        raise DataError(f"{table}: {label} has num_fewshot = {shots!r}, no count")
    for name, value in baselines.items():
        if not isinstance(value, int | float) or not 0 <= value < 100:
            raise DataError(
                f"{table}: {label} has random_baseline_{name} = {value!r}: it is a "
                "per cent, from 0 to less than 100"
            )
    if kind not in KINDS:
        raise DataError(f"{table}: {label} is of kind {kind!r}{nearest(kind, KINDS)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{label} lacks its file {path}: littlelm data prepare core gets it"
        ) from error
    items = list(_records(path, data, kind))
    random.Random(1337).shuffle(items)
    return {
        "label": label,
        "kind": kind,
        "shots": shots,
        "delimiter": row["continuation_delimiter"],
        "baselines": {t: float(value) for t, value in baselines.items()},
        "items": tuple(items),
        "sha256": hashlib.sha256(data).hexdigest(),
        "category": row.get("task_category", ""),
    }


def _records(path: Path, data: bytes, kind: str) -> Iterator[dict[str, Any]]:
    count = 0
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # half a pair of them is no text
                json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where} has half a character: {error}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON: {error}") from error
        for name, type_ in FIELDS[kind].items():
            if not isinstance(record, dict) or name not in record:
                raise DataError(f"{where} lacks {name!r}, which {kind} items have")
            if type(record[name]) is not type_:
                raise DataError(
                    f"{where}: {name} = {record[name]!r} is no {WORDS[type_]}"
                )
        lists = (record[name] for name, type_ in FIELDS[kind].items() if type_ is list)
        options = next(lists, ())
        if not all(isinstance(option, str) for option in options):
            raise DataError(f"{where}: an option is no text: {options}")
        if "continuation" in FIELDS[kind] and not record["continuation"].strip():
            raise DataError(f"{where}: an empty continuation leaves nothing to score")
        if kind != "language_modeling" and not 0 <= record["gold"] < len(options):
            raise DataError(
                f"{where}: gold = {record['gold']}, but there are {len(options)} "
                "options, counted from 0"
            )
        count += 1
        yield record
    if not count:
        raise DataError(f"{path} is empty: get it again")
