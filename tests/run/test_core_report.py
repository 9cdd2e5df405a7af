"""A CORE report in the terminal, as a page of its own, and in the page of a run."""

import io
import json
import math
import random
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from rich.console import Console

from littlelm_core.config import DataError
from littlelm_core.core_eval import evaluate, load_tasks
from littlelm_core.report import Progress, write_report
from littlelm_core.report.core import (
    CLIMBMIX,
    GPT_2,
    core_page,
    core_record,
    show_core,
    write_core_page,
)
from littlelm_core.tokenizer import Tokenizer

MINI_CORE = Path(__file__).resolve().parents[2] / "data" / "mini_core"

# label, kind, shots, category, and the baselines in percent where the tables differ.
LM, MC, SCHEMA = "language_modeling", "multiple_choice", "schema"
WORLD, LANGUAGE, SENSE = "world knowledge", "language understanding", "commonsense"
SYMBOLS, READING = "symbolic problem solving", "reading comprehension"
TASKS = [
    ("hellaswag_zeroshot", MC, 0, LANGUAGE, 25, 25, 10042),
    ("jeopardy", LM, 10, WORLD, 0, 0, 2117),
    ("bigbench_qa_wikidata", LM, 10, WORLD, 0, 0, 20321),
    ("arc_easy", MC, 10, WORLD, 25, 25, 2376),
    ("arc_challenge", MC, 10, WORLD, 25, 25, 1172),
    ("copa", MC, 0, SENSE, 50, 50, 100),
    ("commonsense_qa", MC, 10, SENSE, 20, 40.3, 1221),
    ("piqa", MC, 10, SENSE, 50, 50, 1838),
    ("openbook_qa", MC, 0, SENSE, 25, 25, 500),
    ("lambada_openai", LM, 0, LANGUAGE, 0, 0, 5153),
    ("hellaswag", MC, 10, LANGUAGE, 25, 25, 10042),
    ("winograd", SCHEMA, 0, LANGUAGE, 50, 50, 273),
    ("winogrande", SCHEMA, 0, LANGUAGE, 50, 50, 1267),
    ("bigbench_dyck_languages", LM, 10, SYMBOLS, 0, 0, 1000),
    ("agi_eval_lsat_ar", MC, 3, SYMBOLS, 20, 25, 230),
    ("bigbench_cs_algorithms", LM, 10, SYMBOLS, 0, 0, 1320),
    ("bigbench_operators", LM, 10, SYMBOLS, 0, 0, 210),
    ("bigbench_repeat_copy_logic", LM, 10, SYMBOLS, 0, 0, 32),
    ("squad", LM, 10, READING, 0, 0, 10570),
    ("coqa", LM, 0, READING, 0, 0, 7983),
    ("boolq", MC, 10, READING, 62, 62, 3270),
    ("bigbench_language_identification", MC, 10, LANGUAGE, 9.1, 25, 10000),
]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """With TERM=dumb rich takes 80 columns, whatever width is asked for."""
    monkeypatch.setenv("TERM", "xterm")


def report_of(seed=1, labels=None, suite="CORE", model="d12", **more):
    """A report as `CoreReport.to_dict()` has it, its numbers drawn with a seed."""
    rng = random.Random(seed)
    tasks = {}
    for label, kind, shots, category, v1, v2, n in TASKS:
        p = min(0.95, max(0.001, v1 / 100 + rng.uniform(-0.02, 0.3)))
        right = round(p * n)
        cropped = round(n * {"squad": 0.63, "boolq": 0.06}.get(label, 0))
        row = {
            "kind": kind, "category": category, "shots": shots, "n": n, "of": n,
            "accuracy": right / n, "error": math.sqrt(p * (1 - p) / n),
            "centered_v1": (right / n - v1 / 100) / (1 - v1 / 100),
            "centered_v2": (right / n - v2 / 100) / (1 - v2 / 100),
            "baseline_v1": v1, "baseline_v2": v2, "accuracy_uncropped": right / n,
            "n_uncropped": n - cropped, "truncated": cropped, "ties": rng.randrange(5),
            "no_score": 0, "won_without_score": 0, "border": 0, "cut_answers": 0,
            "settled": 0,
            "tokens_alone": n * 2000, "tokens_run": n * 800, "logits": n * 20,
            "seconds": n / 100, "sha256": f"{label}-sha",
        }  # fmt: skip
        if labels is None or label in labels:
            tasks[label] = row
    mean = {
        v: sum(t[f"centered_{v}"] for t in tasks.values()) / len(tasks)
        for v in ("v1", "v2")
    }
    whole = len(tasks) == len(TASKS)
    items = sum(t["n"] for t in tasks.values())
    notes = [] if suite == "CORE" else [f"{suite} is not CORE: it has own items"]
    notes += [] if whole else [f"{len(tasks)} of 22 tasks: no CORE"]
    return {
        "format": 1, "suite": suite, "is_core": whole and suite == "CORE",
        "sample": False,
        "notes": notes, "core": mean["v1"] if whole else None,
        "mean_of_tasks": mean["v1"], "baselines": "v1",
        "core_v1": mean["v1"] if whole else None,
        "core_v2": mean["v2"] if whole else None,
        "interval": [mean["v1"] - 0.011, mean["v1"] + 0.012],
        "core_uncropped": mean["v1"] - 0.02, "tasks_uncropped": len(tasks),
        "tasks": tasks, "data_sha256": "d" * 64, "table_sha256": "e" * 64,
        "settings": {
            "context": 2048, "crop": "bos", "max_per_task": None, "legacy_pool": False,
            "legacy_nan": False, "prefix_cache": True, "batch_tokens": 65536,
            "world": 1, "dtype": "bfloat16",
        },
        "tokens": {"alone": items * 2000, "run": items * 800, "logits": items * 20},
        "seconds": {"tokenize": 40.0, "model": 620.0, "total": 671.0},
        "model": model,
    } | more  # fmt: skip


def said(report, width=200):
    out = io.StringIO()
    show_core(report, Console(file=out, width=width, force_terminal=True))
    return re.sub(r"\x1b\[\d*m", "", out.getvalue())


def svgs(text):
    return re.findall(r"<svg.*?</svg>", text, re.S)


# ---- The terminal


def test_the_table_has_every_task_with_its_numbers():
    report = report_of()
    text = said(report)
    for label, task in report["tasks"].items():
        (line,) = re.findall(rf"^{label} .*$", text, re.M)
        accuracy = f"{100 * task['accuracy']:.1f} ± {100 * task['error']:.1f}"
        assert accuracy in line
        cells = line.replace(" ± ", "±").split()
        assert cells[2:4] == [f"{task['n']:,}", str(task["shots"])]
        assert cells[5:8] == [
            f"{task['centered_v1']:+.3f}",
            f"{task['truncated']:,}",
            str(task["ties"]),
        ]


def test_the_baselines_that_are_quoted_are_those_of_the_table():
    report = report_of() | {"baselines": "v2"}
    task = report["tasks"]["commonsense_qa"]
    assert f"{task['centered_v2']:+.3f}" in said(report)
    assert f"{task['centered_v1']:+.3f}" not in said(report)
    assert "v2 is quoted" in said(report)
    assert (
        core_record(report)["tasks"]["commonsense_qa"]["centered"]
        == (task["centered_v2"])
    )


def test_the_lines_say_what_the_score_hangs_on():
    bits = {"code": 0.8123, "overall": 0.9555}
    report = report_of(bits_per_byte=bits)
    low, high = report["interval"]
    text = said(report)
    assert f"{report['core']:.4f} (95 % interval {low:.4f} to {high:.4f})" in text
    assert f"v1 {report['core_v1']:.4f}, v2 {report['core_v2']:.4f}" in text
    assert f"{report['core_uncropped']:.4f} over 22 tasks; 6,855 items in 2" in text
    assert "code 0.812, overall 0.956" in text
    assert "ratio 2.50" in text
    assert "11 min 11 s (tokens 40 s, model 10 min 20 s)" in text
    assert "data dddddddddddddddd, table of tasks eeeeeeeeeeeeeeee" in text
    assert CLIMBMIX in text
    assert "without a token" not in text
    report["tasks"]["piqa"]["no_score"] = 7
    assert re.search("choices without a token +items: 7", said(report))


def test_a_task_that_is_cropped_everywhere_is_not_in_the_mean_without():
    report = report_of()
    report["tasks"]["squad"] |= {"n_uncropped": 0, "accuracy_uncropped": None}
    report["tasks_uncropped"] = 21
    assert "over 21 tasks" in said(report)
    assert "over 21 tasks" in core_page(report)


def test_a_part_of_the_items_is_shown_as_a_part():
    report = report_of() | {"is_core": False, "sample": True}
    report["tasks"]["piqa"]["n"] = 100
    items = sum(task["of"] for task in report["tasks"].values())
    for text in (said(report), core_page(report)):
        assert "100/1,838" in text
        assert f"only {items - 1738:,} of {items:,}" in re.sub(" +", " ", text)
        assert "CORE (a sample)" in text
    marks = re.sub(r'<p class="where">.*?</p>', "", core_page(report))
    assert "0.2565" not in marks, "a sample stands beside the whole of GPT-2"


@pytest.mark.parametrize("show", [said, core_page], ids=["terminal", "page"])
def test_some_tasks_are_no_core_and_it_is_said(show):
    report = report_of(labels={"piqa", "copa", "squad"})
    text = show(report)
    assert "3 of 22 tasks: no CORE" in text
    assert f"{report['mean_of_tasks']:.4f}" in text
    assert "centered mean of 3 CORE tasks" in text
    assert ">CORE</dt>" not in text
    assert "0.2565" not in re.sub(r'<p class="where">.*?</p>', "", text), "GPT-2's CORE"


@pytest.mark.parametrize("show", [said, core_page], ids=["terminal", "page"])
def test_another_suite_goes_by_its_own_name(show):
    text = show(report_of(suite="mini CORE"))
    assert "mini CORE is not CORE" in text
    assert "GPT-2 1.5B" not in text, "other items: its accuracy is no comparison"


def test_a_narrow_terminal_and_a_file_lose_nothing(capsys):
    report = report_of()
    text = said(report, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    long = r"^(bigbench_language_\w+) .*\n(\w+) *$"
    assert "".join(re.search(long, text, re.M).groups()) == list(report["tasks"])[-1]
    for task in report["tasks"].values():
        assert f"{task['centered_v1']:+.3f}" in text
        accuracy = f"{100 * task['accuracy']:.1f} ± {100 * task['error']:.1f}"
        assert accuracy in said(report, 64), "numbers stay whole"
    show_core(report)
    lines = capsys.readouterr().out.splitlines()
    for label in report["tasks"]:
        assert any(line.startswith(f"{label} ") for line in lines), "not broken"
    report["tasks"]["[red]y"] = report["tasks"]["piqa"]
    show_core(report | {"model": "[bold]x[/nope]"})
    out = capsys.readouterr().out
    assert "[bold]x[/nope]" in out, "a name is no markup"
    assert "[red]y" in out


# ---- The page


def test_the_page_stands_alone(tmp_path):
    path = write_core_page(report_of(), tmp_path / "new" / "core.html")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(?!#)[^\"'#\s]*//", text)
    assert "@import" not in text
    assert 'name="viewport"' in text
    assert len(text) < 200_000
    for svg in svgs(text):
        named = svg.replace(
            "<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1
        )
        root = xml.etree.ElementTree.fromstring(named)
        assert root.get("viewBox")
        assert root.get("aria-label")


def test_all_tasks_are_in_the_charts_sorted_by_category():
    report = report_of()
    text = core_page(report)
    charts = svgs(text)
    titles = [re.search(r'aria-label="([^"]*)"', svg).group(1) for svg in charts]
    assert titles == sorted(titles)
    assert len(titles) == 5
    for label, task in report["tasks"].items():
        (found,) = [
            title
            for title, svg in zip(titles, charts, strict=True)
            if f">{label}</text>" in svg
        ]
        assert found == task["category"].capitalize()
        accuracy = f"{100 * task['accuracy']:.1f} ± {100 * task['error']:.1f}"
        assert text.count(accuracy) == 2, "in the chart and in the table"


def test_marks_stand_where_the_other_model_is():
    report, other = report_of(1), report_of(2, model="<gpt2>")
    del other["tasks"]["copa"]
    other["tasks"]["piqa"]["sha256"] = "other data"
    other["settings"] = other["settings"] | {"context": 1024}
    text = core_page(report, other)
    diamonds = sum(svg.count('style="fill: var(--line1)') for svg in svgs(text))
    assert diamonds == 20
    assert "&lt;gpt2&gt; %" in text
    assert "2 tasks without a mark" in text
    assert "context: 2048 here, 1024 for &lt;gpt2&gt;" in text
    assert "GPT-2 1.5B" not in text
    for label in set(report["tasks"]) - {"copa", "piqa"}:
        row = re.search(rf"<tr><td>{label}</td>.*?</tr>", text).group(0)
        assert f"<td>{100 * other['tasks'][label]['accuracy']:.1f}</td>" in row
    alike = core_page(report, report_of(1, model="twin"))
    assert "without a mark" not in alike


@pytest.mark.parametrize("table", ["v1", "v2"])
def test_bars_marks_and_guessing_are_on_one_scale(table):
    """Of a model as good as guessing, and another as good, all three stand at once."""
    report = report_of() | {"baselines": table}
    for task in report["tasks"].values():
        task["accuracy"] = task[f"baseline_{table}"] / 100
    number = r"(-?[\d.]+)"
    for svg in svgs(core_page(report, report)):
        bars = re.findall(
            rf'd="M [\d.]+ [\d.]+ \nL {number} [^"]*z\n"[^>]*fill: var\(--line0\)', svg
        )
        marks = re.findall(rf'<use [^>]*x="{number}"[^>]*fill: var\(--line1\)', svg)
        ticks = re.findall(rf'd="M {number} [^"]*"[^>]*stroke-width: 2.2', svg)
        assert len(bars) == len(marks) == len(ticks) >= 3
        for bar, mark, tick in zip(bars, marks, ticks, strict=True):
            assert abs(float(bar) - float(mark)) < 0.01
            assert abs(float(bar) - float(tick)) < 0.01


def test_gpt_2_is_drawn_where_its_numbers_are_published():
    text = core_page(report_of())
    diamonds = sum(svg.count('style="fill: var(--line1)') for svg in svgs(text))
    assert diamonds == len(GPT_2) == 6
    assert "estimate_gpt3_core.ipynb" in text, "the source"
    assert "<td>50.2</td>" in text
    other = core_page(report_of(suite="tasks of mine"))
    for number in ("<td>72.5</td>", "0.2565"):
        assert number in text
        assert number not in other, "its number is of other tasks"


def test_models_without_a_task_in_common_are_not_compared(tmp_path):
    other = report_of(2, model="other", suite="mini CORE")
    for task in other["tasks"].values():
        task["sha256"] = "mini"
    with pytest.raises(DataError, match=r"other.*same data.*evaluate both"):
        write_core_page(report_of(), tmp_path / "x.html", other)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><b>', r"$\frac{$", "&"]
)
def test_names_are_text_and_no_html(name):
    report = report_of(model=name, bits_per_byte={name: 1.0}, notes=[name])
    report["tasks"][name] = report["tasks"].pop("squad") | {"category": name}
    text = core_page(report, report_of(2, model=name))
    assert "<script>" not in text
    assert '"><b>' not in text
    assert "&lt;script&gt;" in text or not name.startswith("<")
    if name == r"$\frac{$":
        assert f">{name}</text>" in text, "no formula"


def test_every_color_is_named_for_both_schemes():
    text = core_page(report_of(), report_of(2, model="other"))
    for svg in svgs(text):
        assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", svg)
        assert "var(--ink)" in svg
    for name in set(re.findall(r"var\(--(\w+)\)", text)):
        assert text.count(f"--{name}:") == 2, f"--{name} in the light and dark scheme"
    assert "prefers-color-scheme:dark" in text


# ---- The page of a run


def page_of(folder, records):
    first = {
        "event": "start", "step": 0, "versions": {}, "device": "cpu", "processes": 1,
        "precision": "fp32", "compile": False, "last_step": 9, "parts": {},
        "parameters": {"total": 2}, "tokens_per_step": 64, "data": "x", "groups": [],
    }  # fmt: skip
    step = {
        "event": "train", "step": 1, "tokens": 64, "loss": 3.0, "grad_norm": 1.0,
        "lr": {"matrix": 0.01}, "tokens_per_second": 1000.0, "mfu": None,
        "skipped_steps": 0, "seconds": 0.1,
    }  # fmt: skip
    lines = [json.dumps(r, allow_nan=False) for r in (first, step, *records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return write_report(folder).read_text(encoding="utf-8")


def record_of(step, **more):
    return {"event": "core", "step": step, **core_record(report_of(step, **more))}


def test_a_run_shows_its_score_over_the_steps(tmp_path):
    records = [record_of(i) for i in (3, 6, 9)]
    text = page_of(tmp_path, records)
    (chart,) = [svg for svg in svgs(text) if 'aria-label="CORE over the run' in svg]
    assert chart.count("<use ") >= 3
    assert f"Step 9: {records[-1]['core']:.4f} (95 % interval" in text
    assert CLIMBMIX in text.replace("&#x27;", "'")
    for label, task in records[-1]["tasks"].items():
        row = f"<td>{label}</td><td>{task['accuracy']:.1%}</td>"
        assert f"{row}<td>{task['centered']:+.3f}</td>" in text
    assert "is not CORE" not in text
    assert "over the run" not in page_of(tmp_path, [])


def test_a_run_keeps_what_is_no_core_apart(tmp_path):
    records = [
        record_of(3, suite="mini CORE"),
        record_of(5, labels={"piqa", "copa"}),
        record_of(6, suite="mini $x$", labels={"piqa"}),
    ]
    text = page_of(tmp_path, records)
    names = "mini CORE, centered mean of 2 CORE tasks, centered mean of 1 mini $x$ task"
    assert f'aria-label="{names} over the run' in text
    assert "mini $x$ is not CORE" in text
    assert "1 mini $x$ task</text>" in text, "no formula"
    assert records[1]["core"] is None
    assert f"{records[2]['mean_of_tasks']:.4f}" in text


def test_the_terminal_says_one_line(capsys):
    progress = Progress(9)
    progress.core(record_of(3, suite="mini CORE"))
    progress.core(record_of(6, labels={"piqa", "copa"}))
    progress.core(record_of(6, sample=True))
    one, two, some = capsys.readouterr().out.splitlines()
    assert re.match(r"mini CORE at step 3: 0\.\d{4} \(95 % .*\), in 11 min 11 s$", one)
    assert re.match(r"centered mean of 2 CORE tasks at step 6: 0\.\d{4} \(", two)
    assert re.match(r"CORE \(a sample\) at step 6: 0\.\d{4} \(", some)


# ---- What the evaluator itself reports


def test_what_the_evaluator_reports_is_what_these_show(capsys):
    """mini CORE by a model of bytes that knows nothing, cropped to 512 tokens."""
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    torch.manual_seed(0)
    model = torch.nn.Embedding(tokenizer.vocab_size, tokenizer.vocab_size)
    tasks = load_tasks(MINI_CORE)
    found = evaluate(model, tokenizer, tasks, context=512).to_dict()
    assert found.keys() <= report_of().keys(), "the fixture has all that it has"
    assert found["tasks"]["piqa"].keys() == report_of()["tasks"]["piqa"].keys()
    report = found | {"model": "bytes"}
    text = core_page(report, report)
    for label in (task.label for task in tasks):
        assert f">{label}</text>" in text
    assert "mini CORE is not CORE" in text
    assert "without cropped items" in text
    show_core(report)
    out = capsys.readouterr().out
    assert re.search(rf"^mini CORE +{report['core']:.4f} \(95 % interval", out, re.M)
    numbers = core_page(report).split("The same in numbers")[1]
    assert f"<td>{found['tasks']['piqa']['tokens_run']:,}</td>" in numbers
    record = core_record(report)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    part = evaluate(model, tokenizer, tasks[:2], context=512).to_dict()
    assert "2 of 22 tasks: no mini CORE" in said(part)
    assert "centered mean of 2 mini CORE tasks" in said(part)
