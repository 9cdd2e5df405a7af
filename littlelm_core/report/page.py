"""The live page of a run: one HTML file that a browser opens from disk.

No server and no request to anywhere: the charts are matplotlib's SVG inside the page,
and the page asks the browser to load it again while the run goes on. Colors are named
in CSS, so that the same SVG reads on a light and on a dark screen.
"""

from __future__ import annotations

import html
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from littlelm_core.report.charts import charts
from littlelm_core.report.log import read_metrics, write_text
from littlelm_core.report.terminal import core_name, core_score, duration

REFRESH = 20  # seconds between the browser's reloads while a run goes on

# Said beside every score: Diao et al., CLIMB (arXiv 2504.13161).
CLIMBMIX = (
    "ClimbMix's mixture was searched with PIQA, ARC-easy and HellaSwag as its score: "
    "four of CORE's 22 tasks, as HellaSwag is in it twice."
)


class Page:
    """Writes a run's page now and then, and never more than 2 % of the time."""

    def __init__(self, run_dir: str | Path, writes: bool = True):
        self.run_dir, self.writes = Path(run_dir), writes
        self.next = 0.0

    def refresh(self) -> None:
        """Write the page if it is old enough."""
        if self.writes and time.monotonic() >= self.next:
            start = time.monotonic()
            self.write()
            end = time.monotonic()
            self.next = end + max(10.0, 50 * (end - start))

    def write(self) -> None:
        """Write the page."""
        if self.writes:
            write_report(self.run_dir)


def write_report(run_dir: str | Path) -> Path:
    """Write run_dir/report.html from its metrics.jsonl and run.json; return its path.

    Replaced in one move, so that a browser never sees half a page.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    run = _read_json(run_dir / "run.json")
    path = run_dir / "report.html"
    write_text(path, page(run_dir.name, records, run))
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# ---- The page


def page(name: str, records: list[dict[str, Any]], run: dict[str, Any]) -> str:
    """Return the whole page of a run as HTML."""
    by_event: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_event.setdefault(record["event"], []).append(record)
    train = by_event.get("train", [])
    start = by_event.get("start", [{}])[-1]
    ended = bool(records) and records[-1]["event"] == "end"
    status = records[-1]["status"] if ended else "running"
    name = str(run.get("name", name))
    parts = [
        _header(name, status, records[-1] if ended else {}, start, train, by_event),
        '<section class="charts">',
        *charts(train, by_event.get("validation", []), start, by_event.get("core", [])),
        "</section>",
        _scores(by_event.get("validation", []), start),
        _core(by_event.get("core", [])),
        _samples(by_event.get("sample", [])),
        _groups(start),
        _config(run),
    ]
    reload = (
        "" if ended else f'<meta http-equiv="refresh" content="{REFRESH}">'
    )  # a page that is done stays where its reader has scrolled to
    return whole_page(f"{name}: {status}", "".join(parts), reload)


def whole_page(title: str, body: str, head: str = "") -> str:
    """Return HTML in this page's style; body and head (more of its head) are HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
{head}
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def escape(value: object) -> str:
    """Return a value as text in HTML."""
    return html.escape(str(value))


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table as HTML; cells are HTML already."""

    def line(cells: list[str], tag: str) -> str:
        return "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line(heads, "th")}</tr>{body}</table></div>'


def _header(
    name: str,
    status: str,
    end: dict[str, Any],
    start: dict[str, Any],
    train: list[dict[str, Any]],
    by_event: dict[str, list[dict[str, Any]]],
) -> str:
    last = start.get("last_step") or 0
    now = train[-1] if train else {}
    step = now.get("step", 0)
    share = min(step / last, 1.0) if last else 0.0
    rate = [r["tokens_per_second"] for r in train[-50:]]
    speed = float(np.median(rate)) if rate else 0.0
    left = (last - step) * start.get("tokens_per_step", 0) / speed if speed else 0.0
    finite = [r["loss"] for r in train if r["loss"] is not None]
    facts = [("step", f"{step:,} of {last:,}"), ("tokens", _big(now.get("tokens", 0)))]
    if finite:
        facts.append(("training loss", f"{finite[-1]:.3f}"))
    if validation := by_event.get("validation"):
        overall = validation[-1]["domains"]["overall"]
        facts.append(("bits per byte", f"{overall['bits_per_byte']:.3f}"))
    if speed:
        facts.append(("tokens/s", _big(speed)))
    if now.get("mfu") is not None:
        facts.append(("MFU", f"{now['mfu']:.1%}"))
    if now.get("skipped_steps"):
        facts.append(("skipped steps", f"{now['skipped_steps']}"))
    if epochs := now.get("epochs"):  # where a mixture draws the rows
        read = ", ".join(f"{name} {times:.2f}" for name, times in epochs.items())
        facts.append(("epochs read", read))
    facts.append(("trained for", duration(now.get("seconds", 0.0))))
    if status == "running" and speed:
        facts.append(("left, about", duration(left)))
    cells = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    where = f"{_big(start.get('parameters', {}).get('total', 0))} parameters"
    if start:
        where += f" on {start['processes']} × {start['device']}, {start['precision']}"
        where += ", compiled" if start.get("compile") else ""
    error = f'<p class="error">{escape(end["error"])}</p>' if "error" in end else ""
    return f"""<header>
<h1>{escape(name)} <span class="status {status}">{status}</span></h1>
<p class="where">{escape(where)}; page of {time.strftime("%Y-%m-%d %H:%M:%S")}</p>
<div class="bar"><i style="width:{share:.1%}"></i></div>
{error}<dl>{cells}</dl>
</header>
"""


def _big(number: float) -> str:
    """Return a count with three digits and k, M, B or T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _scores(validation: list[dict[str, Any]], start: dict[str, Any]) -> str:
    if not validation:
        return ""
    newest = validation[-1]
    base = _read_json(Path(start.get("data", "")) / "baselines.json").get("scores", {})
    heads = ["domain", "this run", *base, "loss", "tokens"]
    rows = []
    for domain, score in newest["domains"].items():
        best = score["bits_per_byte"]
        others = [base[b].get(domain, math.nan) for b in base]
        rows.append(
            [
                domain,
                *(f"{x:.3f}" for x in (best, *others, score["loss"])),
                f"{score['tokens']:,}",
            ]
        )
    split = "the whole split" if newest["whole"] else "a part of the split"
    return (
        f"<h2>Validation, bits per byte</h2><p>Step {newest['step']:,}, {split}. "
        "Lower is better; loss is in nats a token.</p>" + _table(heads, rows)
    )


def _core(core: list[dict[str, Any]]) -> str:
    if not core:
        return ""
    last = core[-1]
    rows = [
        [label, f"{task['accuracy']:.1%}", f"{task['centered']:+.3f}"]
        for label, task in last["tasks"].items()
    ]
    said = "" if last["suite"] == "CORE" else f" {last['suite']} is not CORE."
    return (
        f"<h2>{escape(core_name(last))}</h2><p>Step {last['step']:,}: "
        f"{escape(core_score(last))}, in {duration(last['seconds'])}."
        f"{escape(said)} {escape(CLIMBMIX)}</p><details><summary>Its tasks</summary>"
        + _table(["task", "accuracy", "centered"], rows)
        + "</details>"
    )


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    shown = [s for s in samples if s["step"] == samples[-1]["step"]]
    older = [s for s in samples if s["step"] != samples[-1]["step"]][-12:]
    more = "".join(_sample(s) for s in reversed(older))
    if more:
        more = f"<details><summary>Earlier samples</summary>{more}</details>"
    return "<h2>Samples</h2>" + "".join(_sample(s) for s in shown) + more


def _sample(sample: dict[str, Any]) -> str:
    return (
        f"<figure><figcaption>{escape(sample['domain'])}, step {sample['step']:,}"
        f"</figcaption><pre><b>{escape(sample['prompt'])}</b>{escape(sample['text'])}"
        "</pre></figure>"
    )


def _groups(start: dict[str, Any]) -> str:
    if not start:
        return ""
    rows = [
        [g["name"], f"{g['parameters']:,}", f"{g['lr']:g}", str(g["weight_decay"])]
        for g in start["groups"]
    ]
    heads = ["group", "parameters", "peak rate", "weight decay"]
    parts = [[k, p["use"], p["source"] or "-"] for k, p in start["parts"].items()]
    versions = ", ".join(f"{k} {v}" for k, v in start["versions"].items())
    return (
        "<details><summary>Parameters and parts</summary>"
        + _table(heads, rows)
        + _table(["part", "use", "source"], parts)
        + f"<p>{escape(versions)}</p></details>"
    )


def _config(run: dict[str, Any]) -> str:
    rows = []
    for key, value in run.items():
        if isinstance(value, dict):
            rows += [[f"{key}.{k}", json.dumps(v)] for k, v in value.items()]
        else:
            rows.append([key, json.dumps(value)])
    found = _table(["key", "value"], rows)
    return f"<details><summary>Configuration</summary>{found}</details>" if rows else ""


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return table([*map(escape, heads)], [[*map(escape, row)] for row in rows])


STYLE = """
:root{--paper:#fff;--card:#f6f8fa;--ink:#1f2933;--soft:#5b6773;--grid:#e1e6eb;
--line0:#0072b2;--line1:#d55e00;--line2:#009e73;--line3:#b0568c;--line4:#b77f00;
--line5:#3d8fc4;--good:#00734f;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#12161b;--card:#1b2128;--ink:#e3e8ee;
--soft:#9aa6b2;--grid:#333c46;--line0:#56b4e9;--line1:#f0894a;--line2:#33c99a;
--line3:#dd8fbf;--line4:#e6b84c;--line5:#8cc8f0;--good:#33c99a;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:70rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;margin:.4rem 0 0}h2{font-size:1.2rem;margin:1.6rem 0 .4rem}
p{margin:.3rem 0}.where,.empty,figcaption,dt{color:var(--soft);font-size:.88rem}
.status{font-size:.85rem;font-weight:600;padding:.15rem .6rem;border-radius:1rem;
border:1px solid;vertical-align:.2em;color:var(--line0)}
.finished{color:var(--good)}.failed,.error{color:var(--bad)}
.interrupted{color:var(--line4)}
.bar{height:.5rem;border-radius:.25rem;background:var(--grid);margin:.7rem 0;
overflow:hidden}
.bar i{display:block;height:100%;background:var(--line0)}
dl{display:flex;flex-wrap:wrap;gap:.6rem 1.8rem;margin:.6rem 0 1rem}
dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
figure{margin:0;background:var(--card);border-radius:.6rem;padding:.7rem;min-width:0}
figure svg{display:block;width:100%;height:auto}
figure+figure:has(pre){margin-top:.7rem}
pre{margin:.3rem 0 0;white-space:pre-wrap;overflow-wrap:anywhere;
font:.88rem/1.45 ui-monospace,SFMono-Regular,Menlo,monospace}
.wide{overflow-x:auto;margin:.4rem 0}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child,.wide td:nth-child(2):last-child{text-align:left}
details{margin:1.2rem 0}summary{cursor:pointer;font-weight:600}
"""
