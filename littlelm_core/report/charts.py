"""The charts of a run's page: matplotlib's SVG, with colors that CSS names.

The same SVG then reads on a light and on a dark screen.
"""

from __future__ import annotations

import html
import io
import math
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from littlelm_core.report.terminal import core_name

POINTS = 600  # at most this many points of a curve are drawn

# Colors that matplotlib draws with, and the CSS variables that replace them.
INK, GRID, CARD = "#010101", "#020202", "#020203"
LINES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
CSS_NAMES = {INK: "ink", GRID: "grid", CARD: "card"}
CSS_NAMES |= {c: f"line{i}" for i, c in enumerate(LINES)}


def charts(
    train: list[dict[str, Any]],
    validation: list[dict[str, Any]],
    start: dict[str, Any],
    core: list[dict[str, Any]],
) -> list[str]:
    """Return loss, bits per byte, CORE, learning rate and speed as figures."""
    if not train:
        return ['<p class="empty">No step yet.</p>']
    steps = np.array([r["step"] for r in train])
    loss = np.array([math.nan if r["loss"] is None else r["loss"] for r in train])
    found = [_loss_chart(steps, loss, validation)]
    if validation:
        found.append(_bits_chart(validation))
    if core:
        found.append(_core_chart(core))
    found.append(_rate_chart(train, steps))
    speed = np.array([r["tokens_per_second"] for r in train])
    axes = new_axes("tokens per second")
    _curve(axes, steps, speed, LINES[0])
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(0, 1.3 * float(np.median(speed)))
    found.append(svg(axes, f"Tokens per second, median {np.median(speed):,.0f}"))
    return found


def new_axes(label: str, below: str = "optimizer step", height: float = 2.8) -> Any:
    """Return axes of a new figure, 4.8 inches wide: what a phone shows unscaled."""
    axes = Figure(figsize=(4.8, height), layout="constrained").subplots()
    axes.set_ylabel(label, color=INK)
    axes.set_xlabel(below, color=INK)
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
    axes = new_axes("loss, nats per token")
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
    return svg(axes, "Loss of the training steps and of validation")


def _bits_chart(validation: list[dict[str, Any]]) -> str:
    axes = new_axes("bits per byte")
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
    return svg(axes, "Bits per byte of the validation split, by domain")


def _rate_chart(train: list[dict[str, Any]], steps: np.ndarray) -> str:
    axes = new_axes("learning rate")
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
    return svg(axes, "Learning rate of each parameter group")


def _core_chart(core: list[dict[str, Any]]) -> str:
    """Draw the score of each suite, or of each number of tasks, as its own line."""
    axes = new_axes("mean centered accuracy")
    lines: dict[str, list[dict[str, Any]]] = {}
    for record in core:
        lines.setdefault(core_name(record), []).append(record)
    for (name, records), color in zip(lines.items(), LINES * len(lines), strict=False):
        at = [r["step"] for r in records]
        score = [r["mean_of_tasks"] for r in records]
        label = name.replace("$", r"\$")  # a suite is named by its user: no formula
        axes.plot(at, score, "o-", color=color, label=label, markersize=4)
        for record in records:
            both = [record["step"]] * 2
            axes.plot(both, record["interval"], color=color, alpha=0.5, linewidth=3)
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")  # what guessing reaches
    axes.set_xlim(left=0)
    _legend(axes)
    return svg(axes, f"{', '.join(lines)} over the run, with 95 % intervals")


def svg(axes: Any, title: str) -> str:
    """Return a chart as a figure with inline SVG, its colors named in CSS."""
    out = io.StringIO()
    salt = re.sub(r"\W", "", title)
    options = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with matplotlib.rc_context(options):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        axes.figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
    text = re.sub(r' id="(?!\w*clip|p[0-9a-f]{10}|m[0-9a-f]{10})[^"]*"', "", text)
    for color, variable in CSS_NAMES.items():
        text = text.replace(color, f"var(--{variable})")
    text = text.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1
    )
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{text}</figure>"
