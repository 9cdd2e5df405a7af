"""The live page of a run: one HTML file that a browser opens from disk.

No server and no request to anywhere: the charts are matplotlib's SVG inside the page,
and the page asks the browser to load it again while the run goes on. Colors are named
in CSS, so that the same SVG reads on a light and on a dark screen.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from littlelm_core.report.log import read_metrics, write_text
from littlelm_core.report.terminal import duration

REFRESH = 20  # seconds between the browser's reloads while a run goes on
POINTS = 600  # at most this many points of a curve are drawn

# Colors that matplotlib draws with, and the CSS variables that replace them.
INK, GRID = "#010101", "#020202"
LINES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
CSS_NAMES = {INK: "ink", GRID: "grid"} | {c: f"line{i}" for i, c in enumerate(LINES)}


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
        *charts(train, by_event.get("validation", []), start),
        "</section>",
        _scores(by_event.get("validation", []), start),
        _samples(by_event.get("sample", [])),
        _groups(start),
        _config(run),
    ]
    reload = (
        "" if ended else f'<meta http-equiv="refresh" content="{REFRESH}">'
    )  # a page that is done stays where its reader has scrolled to
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{reload}
<title>{_text(name)}: {status}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{"".join(parts)}
</main>
</body>
</html>
"""


def _text(value: object) -> str:
    return html.escape(str(value))


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
    facts.append(("trained for", duration(now.get("seconds", 0.0))))
    if status == "running" and speed:
        facts.append(("left, about", duration(left)))
    cells = "".join(f"<div><dt>{k}</dt><dd>{_text(v)}</dd></div>" for k, v in facts)
    where = f"{_big(start.get('parameters', {}).get('total', 0))} parameters"
    if start:
        where += f" on {start['processes']} × {start['device']}, {start['precision']}"
        where += ", compiled" if start.get("compile") else ""
    error = f'<p class="error">{_text(end["error"])}</p>' if "error" in end else ""
    return f"""<header>
<h1>{_text(name)} <span class="status {status}">{status}</span></h1>
<p class="where">{_text(where)}; page of {time.strftime("%Y-%m-%d %H:%M:%S")}</p>
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
        f"<figure><figcaption>{_text(sample['domain'])}, step {sample['step']:,}"
        f"</figcaption><pre><b>{_text(sample['prompt'])}</b>{_text(sample['text'])}"
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
        + f"<p>{_text(versions)}</p></details>"
    )


def _config(run: dict[str, Any]) -> str:
    rows = []
    for key, value in run.items():
        if isinstance(value, dict):
            rows += [[f"{key}.{k}", json.dumps(v)] for k, v in value.items()]
        else:
            rows.append([key, json.dumps(value)])
    table = _table(["key", "value"], rows)
    return f"<details><summary>Configuration</summary>{table}</details>" if rows else ""


def _table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "".join(f"<{tag}>{_text(c)}</{tag}>" for c in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line(heads, "th")}</tr>{body}</table></div>'


# ---- The charts


def charts(
    train: list[dict[str, Any]],
    validation: list[dict[str, Any]],
    start: dict[str, Any],
) -> list[str]:
    """Return loss, bits per byte, learning rate and speed as figures."""
    if not train:
        return ['<p class="empty">No step yet.</p>']
    steps = np.array([r["step"] for r in train])
    loss = np.array([math.nan if r["loss"] is None else r["loss"] for r in train])
    found = [_loss_chart(steps, loss, validation)]
    if validation:
        found.append(_bits_chart(validation))
    found.append(_rate_chart(train, steps))
    speed = np.array([r["tokens_per_second"] for r in train])
    axes = _axes("tokens per second")
    _curve(axes, steps, speed, LINES[0])
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(0, 1.3 * float(np.median(speed)))
    found.append(_svg(axes, f"Tokens per second, median {np.median(speed):,.0f}"))
    return found


def _axes(label: str) -> Any:
    axes = Figure(figsize=(4.8, 2.8), layout="constrained").subplots()
    axes.set_ylabel(label, color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(which="both", colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    return axes


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep at most POINTS points, the last one among them."""
    if len(x) <= POINTS:
        return x, y
    kept = np.linspace(0, len(x) - 1, POINTS).round().astype(int)
    return x[kept], y[kept]


def _smooth(y: np.ndarray) -> np.ndarray:
    """Return the mean of about 1/15 of the curve around each point; gaps count nothing.

    Symmetric, and shorter toward the ends: a mean of the past would lag behind a curve
    that falls.
    """
    reach = max(len(y) // 30, 1)
    there = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(there, y, 0.0))])
    number = np.concatenate([[0], np.cumsum(there)])
    i = np.arange(len(y))
    half = np.minimum(np.minimum(i, len(y) - 1 - i), reach)
    low, high = i - half, i + half + 1
    with np.errstate(invalid="ignore"):
        return (total[high] - total[low]) / (number[high] - number[low])


def _curve(
    axes: Any, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None
) -> None:
    """Draw what was measured faintly, and its running mean on top."""
    if len(y) > 60:
        axes.plot(*_thin(x, y), color=color, alpha=0.3, linewidth=1)
        y = _smooth(y)
    mark = "o" if len(y) == 1 else ""
    axes.plot(*_thin(x, y), color=color, linewidth=2, marker=mark, label=label)


def _legend(axes: Any) -> None:
    axes.figure.legend(
        loc="outside upper left",
        ncols=4,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _loss_chart(
    steps: np.ndarray, loss: np.ndarray, validation: list[dict[str, Any]]
) -> str:
    axes = _axes("loss, nats per token")
    _curve(axes, steps, loss, LINES[0], "training")
    at = [v["step"] for v in validation]
    scores = [v["domains"]["overall"]["loss"] for v in validation]
    if at:
        axes.plot(at, scores, "o-", color=LINES[1], label="validation", linewidth=1.5)
    finite = loss[np.isfinite(loss)]
    if len(finite) > 20:  # the first steps would squeeze all others into a line
        top = max(float(np.quantile(finite, 0.95)), *(scores or [0.0]))
        bottom = min(float(finite.min()), *(scores or [float(finite.min())]))
        margin = max(0.1 * (top - bottom), 0.01)
        axes.set_ylim(bottom - margin, top + margin)
    _legend(axes)
    return _svg(axes, "Loss of the training steps and of validation")


def _bits_chart(validation: list[dict[str, Any]]) -> str:
    axes = _axes("bits per byte")
    at = [v["step"] for v in validation]
    domains = list(validation[-1]["domains"])
    for i, domain in enumerate(domains):
        kept = [v["domains"][domain]["bits_per_byte"] for v in validation]
        overall = domain == "overall"
        axes.plot(
            at,
            kept,
            "o--" if overall else "o-",
            color=INK if overall else LINES[i % len(LINES)],
            label=domain,
            markersize=4,
        )
    axes.set_xlim(left=0)
    _legend(axes)
    return _svg(axes, "Bits per byte of the validation split, by domain")


def _rate_chart(train: list[dict[str, Any]], steps: np.ndarray) -> str:
    axes = _axes("learning rate")
    curves: dict[tuple[float, ...], list[str]] = {}
    for group in train[-1]["lr"]:
        rates = tuple(r["lr"].get(group, math.nan) for r in train)
        curves.setdefault(rates, []).append(group)
    for i, (rates, groups) in enumerate(curves.items()):
        label = "all groups" if len(curves) == 1 else ", ".join(groups)
        color = LINES[i % len(LINES)]
        axes.plot(*_thin(steps, np.array(rates)), color=color, label=label)
    if len(curves) > 1:
        highest = max(rate for rates in curves for rate in rates)
        lowest = min(max(rates) for rates in curves)
        axes.set_yscale("log")
        axes.set_ylim(max(lowest, 1e-12) / 100, max(highest, 1e-12) * 2)
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.yaxis.get_offset_text().set_color(INK)
    _legend(axes)
    return _svg(axes, "Learning rate of each parameter group")


def _svg(axes: Any, title: str) -> str:
    """Return a chart as a figure with inline SVG, its colors named in CSS."""
    out = io.StringIO()
    salt = re.sub(r"\W", "", title)
    options = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with matplotlib.rc_context(options):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        axes.figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    svg = re.sub(r' id="(?!\w*clip|p[0-9a-f]{10}|m[0-9a-f]{10})[^"]*"', "", svg)
    for color, variable in CSS_NAMES.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{_text(title)}" ', 1)
    return f"<figure><figcaption>{_text(title)}</figcaption>{svg}</figure>"


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
