"""A CORE report for the terminal and as a page: what was reached, and how sure it is.

Works on the dict of `CoreReport.to_dict()`, to which a caller adds "model" (a name) and
"bits_per_byte" ({domain: value}); accuracies are shares there and percent here. The
page is one HTML file, without a script or a request to anywhere; its charts are
matplotlib's SVG with colors that CSS names. GPT-2 is drawn where its numbers are
published; another report, of GPT-2 or of any model, gives marks for all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from littlelm_core.config import DataError
from littlelm_core.report.charts import CARD, INK, LINES, new_axes, svg
from littlelm_core.report.log import write_text
from littlelm_core.report.page import CLIMBMIX, escape, table, whole_page
from littlelm_core.report.terminal import core_name, core_score, duration

__all__ = [
    "GPT_2",
    "GPT_2_CORE",
    "core_page",
    "core_record",
    "core_table",
    "show_core",
    "write_core_page",
]

KINDS = {"multiple_choice": "choice", "language_modeling": "lm"}
ODD = {
    "no_score": "choices without a token", "border": "tokens across the border",
    "cut_answers": "answers that were cut",
}  # fmt: skip

# GPT-2 with 1.5B parameters, v1 baselines. The score: README of github.com/karpathy/
# nanochat. The tasks: its dev/estimate_gpt3_core.ipynb (January 2026), which prints
# these six from the result file behind the score. All are whole thousandths, and no
# number of right items among the 1,172 of arc_challenge gives .299: they were probably
# measured over the first 1,000 items of a task.
GPT_2_CORE = 0.256525
GPT_2 = {
    "hellaswag_zeroshot": 0.502, "lambada_openai": 0.523, "hellaswag": 0.512,
    "piqa": 0.725, "arc_easy": 0.595, "arc_challenge": 0.299,
}  # fmt: skip
GPT_2_NAME = "GPT-2 1.5B"
GPT_2_SOURCE = (
    f"{GPT_2_NAME}: CORE {GPT_2_CORE:.4f} with v1 baselines (nanochat's README); its "
    "accuracy is published for six tasks (nanochat's dev/estimate_gpt3_core.ipynb, "
    "January 2026), probably over the first 1,000 items of each"
)


RECORDED = ("suite", "sample", "core", "mean_of_tasks", "interval")


def core_record(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a "core" record of metrics.jsonl, as log.py lists them."""
    chosen = f"centered_{report['baselines']}"
    return {
        **{key: report[key] for key in RECORDED},
        "tasks": {
            label: {"accuracy": task["accuracy"], "centered": task[chosen]}
            for label, task in report["tasks"].items()
        },
        "seconds": report["seconds"]["total"],
    }


# ---- What both show


def core_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a report says beside its tasks, as (name, text) pairs."""
    tasks, chosen = report["tasks"], report["baselines"]
    facts = [(core_name(report), core_score(report))]
    if report["core"] is not None:
        both = f"v1 {report['core_v1']:.4f}, v2 {report['core_v2']:.4f}"
        facts.append(("baselines", f"{both}; {chosen} is quoted"))
    done, of = (sum(t[key] for t in tasks.values()) for key in ("n", "of"))
    if done != of:
        facts.append(("items", f"only {done:,} of {of:,}"))
    cropped = [task["truncated"] for task in tasks.values() if task["truncated"]]
    if cropped:
        whole = report["core_uncropped"]
        kept = report["tasks_uncropped"]
        score = "-" if whole is None else f"{whole:.4f} over {kept} tasks"
        many = f"{sum(cropped):,} items in {len(cropped)} of the tasks were cropped"
        facts.append(("without cropped items", f"{score}; {many}"))
    for key, name in ODD.items():
        if number := sum(task[key] for task in tasks.values()):
            facts.append((name, f"items: {number:,}"))
    if bits := report.get("bits_per_byte"):
        by_domain = ", ".join(f"{d} {value:.3f}" for d, value in bits.items())
        facts.append(("bits per byte", by_domain))
    alone, run = report["tokens"]["alone"], report["tokens"]["run"]
    ratio = f", ratio {alone / run:.2f}" if run else ""
    facts.append(("tokens", f"{alone:,} item by item, {run:,} run{ratio}"))
    spent = report["seconds"]
    parts = f"tokens {duration(spent['tokenize'])}, model {duration(spent['model'])}"
    facts.append(("time", f"{duration(spent['total'])} ({parts})"))
    settings = report.get("settings", {}).items()
    facts.append(("settings", ", ".join(f"{k} {v}" for k, v in settings)))
    data, other = report["data_sha256"], report["table_sha256"]
    facts.append(("sha256", f"data {data[:16]}, table of tasks {other[:16]}"))
    return facts


def _accuracy(task: Mapping[str, Any]) -> str:
    return f"{100 * task['accuracy']:.1f} ± {100 * task['error']:.1f}"


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    chosen = f"centered_{report['baselines']}"
    return [
        [
            label,
            KINDS.get(task["kind"], task["kind"]),
            f"{task['n']:,}" + f"/{task['of']:,}" * (task["n"] != task["of"]),
            str(task["shots"]),
            _accuracy(task),
            f"{task[chosen]:+.3f}",
            f"{task['truncated']:,}",
            f"{task['ties']:,}",
            f"{task['seconds']:.1f}",
        ]
        for label, task in report["tasks"].items()
    ]


HEADS = [
    "task", "kind", "items", "shots", "accuracy %", "centered", "cropped", "ties", "s",
]  # fmt: skip


# ---- The terminal


def core_table(report: Mapping[str, Any], gap: int = 2) -> Group:
    """Return a report for a rich console: a table of tasks, then a line a fact.

    centered: (accuracy - baseline) / (1 - baseline), with the report's own baselines.
    gap: blanks between columns.
    """
    found = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for i, head in enumerate(HEADS):  # a narrow terminal breaks the labels alone
        side = "left" if i < 2 else "right"
        found.add_column(head, justify=side, overflow="fold", no_wrap=i > 0)
    for row in _rows(report):
        found.add_row(*map(Text, row))
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", overflow="fold")
    facts.add_column(overflow="fold")
    for name, text in core_facts(report):
        facts.add_row(Text(name), Text(text))
    name = Text(str(report.get("model", "")), style="bold")
    return Group(name, found, "", facts, *map(Text, [*report["notes"], CLIMBMIX]))


def show_core(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a report; in a file no line is broken for want of a terminal's width."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=120, highlight=False)
    console.print(core_table(report, 1 if console.width < 104 else 2))


# ---- The page


def write_core_page(
    report: Mapping[str, Any],
    path: str | Path,
    against: Mapping[str, Any] | None = None,
) -> Path:
    """Write a report as a page of its own, in one move; return its path.

    against: the report of another model, drawn as marks in place of GPT-2's.
    Raises DataError when no task of it has the same data; LittleLMError when the file
    cannot be written.
    """
    path = Path(path)
    write_text(path, core_page(report, against))
    return path


def core_page(
    report: Mapping[str, Any], against: Mapping[str, Any] | None = None
) -> str:
    """Return the page as HTML. See `write_core_page`."""
    model = str(report.get("model", "model"))
    name, marks, said = _other(report, against)
    facts = core_facts(report)
    shown = [facts[0], *(fact for fact in facts if fact[0] == "bits per byte")]
    if against is not None and name is not None:
        shown.insert(1, (name, f"{core_name(against)} {core_score(against)}"))
    elif report["is_core"]:
        shown.insert(1, (f"{GPT_2_NAME}, v1 baselines", f"{GPT_2_CORE:.4f}"))
    head = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in shown)
    notes = (
        f'<p class="note">{escape(note)}</p>' for note in [*report["notes"], CLIMBMIX]
    )
    suite = f'<span class="status">{escape(report["suite"])}</span>'
    body = [
        f"<header><h1>{escape(model)} {suite}</h1><dl>",
        *(*head, "</dl>", *notes, "</header>"),
        "<h2>Accuracy of each task</h2>",
        _legend(model, name),
        *('<section class="packed">', *_charts(report, marks), "</section>"),
        f'<p class="where">{escape(said)}</p>' if said else "",
        "<h2>The same in numbers</h2>",
        f'<section class="numbers">{_numbers(report, marks, name)}</section>',
        "<h2>How it was measured</h2>",
        table(["", ""], [[escape(k), escape(v)] for k, v in facts]),
    ]
    title = f"{model}: {core_name(report)}"
    return whole_page(title, "".join(body), f"<style>{STYLE}</style>")


def _other(
    report: Mapping[str, Any], against: Mapping[str, Any] | None
) -> tuple[str | None, dict[str, float], str]:
    """Return the other model's name (None: none), its accuracies, and what to say."""
    tasks = report["tasks"]
    if against is None and report["suite"] != "CORE":
        return None, {}, f"No marks of GPT-2: {report['suite']} has items of its own."
    if against is None:
        said = GPT_2_SOURCE + "; a report of GPT-2 gives marks for all tasks."
        return GPT_2_NAME, {k: GPT_2[k] for k in tasks if k in GPT_2}, said
    name, theirs = str(against.get("model", "the other")), against["tasks"]
    marks = {
        label: theirs[label]["accuracy"]
        for label, task in tasks.items()
        if label in theirs and theirs[label]["sha256"] == task["sha256"]
    }
    if not marks:
        raise DataError(
            f"{name} and this report have no task with the same data in common: "
            "evaluate both on the same files"
        )
    said = []
    if missing := len(tasks) - len(marks):
        said.append(f"{missing} tasks without a mark: not run by {name}, or other data")
    mine, other = report.get("settings", {}), against.get("settings", {})
    for key in ("context", "crop", "max_per_task", "legacy_pool", "legacy_nan"):
        if mine.get(key) != other.get(key):
            said.append(f"{key}: {mine.get(key)} here, {other.get(key)} for {name}")
    return name, marks, "; ".join(said)


def _legend(model: str, other: str | None) -> str:
    keys = [("fill", f"{model}, with one standard error"), ("tick", "guessing")]
    if other is not None:
        keys.append(("mark", other))
    items = (f'<span><i class="{key}"></i>{escape(text)}</span>' for key, text in keys)
    return f'<p class="legend">{"".join(items)}</p>'


def _charts(report: Mapping[str, Any], marks: Mapping[str, float]) -> list[str]:
    """Return a chart for each category of tasks."""
    found: dict[str, dict[str, Any]] = {}
    for label, task in report["tasks"].items():
        found.setdefault(str(task["category"] or "other"), {})[label] = task
    chosen = f"baseline_{report['baselines']}"
    return [_chart(name, found[name], chosen, marks) for name in sorted(found)]


def _chart(
    category: str, tasks: Mapping[str, Any], chosen: str, marks: Mapping[str, float]
) -> str:
    """Draw a bar a task, its label above it so that a phone has the whole width."""
    axes = new_axes("", "accuracy, %", height=0.75 + 0.44 * len(tasks))
    for i, (label, task) in enumerate(tasks.items()):
        y, percent = -i, 100 * task["accuracy"]
        axes.barh(y, percent, height=0.34, color=LINES[0])
        error, base = 100 * task["error"], task[chosen]
        axes.plot([percent - error, percent + error], [y, y], color=INK, lw=1.2)
        axes.plot([base, base], [y - 0.19, y + 0.19], color=INK, lw=2.2, clip_on=False)
        if label in marks:
            style = {"color": LINES[1], "mec": CARD, "ms": 7, "clip_on": False}
            axes.plot(100 * marks[label], y, "D", zorder=3, **style)
        options = {"va": "bottom", "color": INK, "fontsize": 9, "parse_math": False}
        axes.text(0, y + 0.26, label, ha="left", **options)
        axes.text(100, y + 0.26, _accuracy(task), ha="right", **options)
    axes.set_xlim(0, 100)
    axes.set_ylim(-len(tasks) + 0.6, 0.7)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return svg(axes, category.capitalize())


def _numbers(
    report: Mapping[str, Any], marks: Mapping[str, float], other: str | None
) -> str:
    chosen = f"baseline_{report['baselines']}"
    named = [] if other is None else [f"{other} %"]
    rows = []
    for row, (label, task) in zip(_rows(report), report["tasks"].items(), strict=True):
        mark = f"{100 * marks[label]:.1f}" if label in marks else "-"
        numbers = [f"{task[chosen]:g}", *([mark] * len(named)), *row[5:]]
        rows.append([*row[:5], *numbers, f"{task['tokens_run']:,}"])
    heads = [*HEADS[:5], "guessing %", *named, *HEADS[5:], "tokens run"]
    return table([*map(escape, heads)], [[*map(escape, row)] for row in rows])


STYLE = """
h1,dd{overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;overflow-wrap:anywhere}
.legend i{display:inline-block;margin-right:.45rem;vertical-align:-.08em}
.legend .fill{width:1.6rem;height:.7rem;background:var(--line0)}
.legend .tick{width:.18rem;height:1rem;background:var(--ink);vertical-align:-.2em}
.legend .mark{width:.62rem;height:.62rem;background:var(--line1);
transform:rotate(45deg)}
.note{max-width:46rem}
.packed{columns:26rem 2;column-gap:1rem}
.packed figure{break-inside:avoid;margin-bottom:1rem}
.numbers th,.numbers td{white-space:nowrap}
.numbers :is(th,td):nth-child(2){text-align:left}
"""
