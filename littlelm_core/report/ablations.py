"""The measured ablations: what is stored in data/ablations, as numbers and pictures.

    load("fixes")           the file that `littlelm bench fixes` wrote
    effect(stored, a, b)    what b gains over a, seed by seed
    card("muon")            the technique's card, as Markdown
    plot_scores(axes, arms), plot_effects(axes), plot_sweep(axes, arms),
    plot_curves(axes, arms)

Scores are bits per byte on the pinned validation text, the plain mean over the domains:
lower is better. A spread is the standard deviation over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from littlelm_core.config import DataError, nearest
from littlelm_core.report.measured import (
    BEFORE,
    FIXES,
    FOLDER,
    LABELS,
    LADDER,
    Effect,
    chosen_rate,
    cost,
    effect,
    load,
    mean_and_spread,
    reported,
    scores,
    sweep,
    verdict,
)

__all__ = [
    "BEFORE",
    "FIXES",
    "FOLDER",
    "LABELS",
    "LADDER",
    "Effect",
    "card",
    "chosen_rate",
    "cost",
    "effect",
    "load",
    "mean_and_spread",
    "plot_curves",
    "plot_effects",
    "plot_scores",
    "plot_sweep",
    "reported",
    "scores",
    "sweep",
    "verdict",
]

# ---- The card of a technique


class Technique(NamedTuple):
    """What the measurement cannot say: names, and what others saw at scale."""

    title: str
    at_scale: str
    loses: str


TECHNIQUES = {
    "schedule": Technique(
        "Warm up, hold, decay instead of a cosine to zero",
        "A constant rate with a decay over the last 20 % reaches what a cosine of that "
        "length reaches {cite}`hagele2024`; MiniCPM found the last 10 % to be enough "
        "{cite}`hu2024`. The reference run decays over the last half, to 5 % "
        "{cite}`littlelm2026`.",
        "In long runs whose length is fixed from the start and whose rate is searched "
        "for each schedule: there a cosine to zero is as good {cite}`hagele2024`. It "
        "pays when the length is open, and when a run is so short, or its rate so low, "
        "that a higher mean rate counts.",
    ),
    "muon": Technique(
        "Muon on the block matrices",
        "About half of AdamW's FLOPs for the same loss in a scaling study "
        "{cite}`liu2025`; in another, with every optimizer tuned alike, 1.4 times as "
        "fast at 0.1 billion parameters and 1.1 times at 1.2 billion {cite}`wen2025`.",
        "When steps are small: Newton-Schulz costs the same for 1,000 tokens as for a "
        "million, so at few tokens a step its time is a large share. Its lead shrinks "
        "with the size of the model and with a well tuned AdamW.",
    ),
    "data": Technique(
        "A mixture found by proxy runs",
        "The largest of the five levers in the post-mortem {cite}`littlelm2026`. "
        "Regression over small runs found mixtures that beat those chosen by hand at 1 "
        "billion parameters {cite}`liu2024`, and ClimbMix was searched in the same way "
        "{cite}`diao2025`.",
        "When the proportions of the text are already those of the target, or when a "
        "favored domain is so small that it is repeated. The weights serve the score "
        "that they were searched on, and nothing else.",
    ),
    "fp8": Technique(
        "FP8 in the blocks, and a vocabulary padded to a multiple of 64",
        "+25 % tokens a second from FP8 and +33 % with the padding, on one RTX 5090 "
        "{cite}`littlelm2026`; DeepSeek-V3 reports a loss within 0.25 % of bf16's "
        "{cite}`deepseek2024`.",
        "Wherever the machine has no FP8 products: here they are emulated, so a step "
        "only takes longer. It gains speed and never loss, and on small matrices the "
        "casts cost more than the products save.",
    ),
    "context": Technique(
        "Half the context with twice the rows",
        "480k instead of 437k tokens a second on eight B200s at 1,024 instead of 2,048 "
        "tokens, with a loss about as low, but CORE .338 instead of .384: long prompts "
        "no longer fit {cite}`littlelm2026`. A model may also train short first and "
        "long later {cite}`press2021`.",
        "When documents are long and the score needs them: the reference run went back "
        "to 2,048. A model this small, trained this briefly, has little use for what "
        "lies far back, and shorter rows bring more documents into a step: a likely "
        "reason for a gain in loss, which nobody should expect of a large model.",
    ),
}


def card(fix: str, stored: Mapping[str, Any] | None = None) -> str:
    """Return a technique's card as Markdown (MyST): effect, cost, and when it loses.

    fix: one of FIXES. stored: what `load` gave; by default the shipped file.
    Raises DataError: an unknown fix, no file.
    """
    if fix not in TECHNIQUES:
        raise DataError(f"no fix is called {fix!r}{nearest(fix, TECHNIQUES)}")
    stored = load() if stored is None else stored
    technique = TECHNIQUES[fix]
    rung = fix if fix == "schedule" else f"ladder-{fix}"
    lines = [f"**{technique.title}**", "", "| | |", "|---|---|"]
    lines.append(f"| alone on the failed recipe | {_gain(stored, 'baseline', fix)} |")
    below = LADDER[LADDER.index(rung) - 1]
    if below != "baseline":
        lines.append(f"| on the ladder | {_gain(stored, below, rung)} |")
    if domains := _by_domain(stored, below, rung):
        lines.append(f"| by domain, on the ladder | {domains} |")
    if fix == "data" and "curation" in stored:
        lines.append(f"| curation | {_curation(stored)} |")
    if ratio := _step_ratio(stored, below, rung):
        lines.append(f"| cost | {ratio:.2f} times the processor time of a step |")
    lines.append(f"| seen at scale | {technique.at_scale} |")
    lines.append(f"| when it loses | {technique.loses} |")
    lines.append(f"| measured | {_circumstances(stored, rung)} |")
    return "\n".join(lines)


def _gain(stored: Mapping[str, Any], before: str, after: str) -> str:
    gain = effect(stored, before, after)
    if gain is None:
        return "not measured yet: `littlelm bench fixes`"
    was, now = (mean_and_spread(scores(stored, a).values())[0] for a in (before, after))
    return (
        f"{verdict(gain)}: {was:.3f} → {now:.3f} bits per byte, a gain of "
        f"**{gain.mean:+.4f} ± {gain.spread:.4f}** over {len(gain.by_seed)} seeds"
    )


def _by_domain(stored: Mapping[str, Any], before: str, after: str) -> str:
    runs = reported(stored, after).values()
    domains = sorted({domain for run in runs for domain in run["validation"]})
    gains = {d: effect(stored, before, after, d) for d in domains}
    return ", ".join(f"{d} {g.mean:+.4f}" for d, g in gains.items() if g)


def _curation(stored: Mapping[str, Any]) -> str:
    """Say why curation is no part of the ladder, and what it wins back on a heap."""
    facts = stored["curation"]
    twice = ", ".join(
        f"{counts['documents'] - counts['kept']} of {counts['documents']:,} in {domain}"
        for domain, counts in facts["corpus"].items()
    )
    lost, back = (effect(stored, BEFORE[arm], arm) for arm in ("heap", "curated"))
    text = f"no part of the ladder, as the default corpus has few duplicates ({twice})"
    if not (lost and back):
        return text
    before, after = (
        [domain[kind] for domain in facts["heap"].values()]
        for kind in ("heap", "curated")
    )

    def share(domains: list[dict[str, Any]]) -> float:
        good = sum(domain["good"]["characters"] for domain in domains)
        return good / sum(s["characters"] for d in domains for s in d.values())

    return (
        f"{text}. A heap, {1 - share(before):.0%} of it mirrors and junk, costs the "
        f"failed recipe {-lost.mean:.4f} ± {lost.spread:.4f}; curation (a classifier, "
        f"then the duplicates) keeps a text with {1 - share(after):.0%} of them, and "
        f"gains **{back.mean:+.4f} ± {back.spread:.4f}** over the heap"
    )


def _step_ratio(stored: Mapping[str, Any], before: str, after: str) -> float | None:
    costs = [cost(stored, arm) for arm in (before, after)]
    return costs[1] / costs[0] if all(costs) else None


def _circumstances(stored: Mapping[str, Any], arm: str) -> str:
    runs = list(reported(stored, arm).values())
    if not runs:
        return "not yet"
    first = runs[0]
    tried = ", ".join(f"{rate:g}" for rate in sweep(stored, arm))
    size, tokens = f"{first['parameters'] / 1e6:.2f}", f"{first['tokens']:,}"
    return (
        f"{size} million parameters, {tokens} tokens a run, one thread; peak rate "
        f"{first['rate']:g}, the best of {tried} on a seed of its own; "
        f"{first['time'][:10]}, commit {first['commit']}"
    )


# ---- Pictures


def plot_scores(
    axes: Any, arms: Sequence[str] = LADDER, stored: Mapping[str, Any] | None = None
) -> None:
    """Draw each arm's bits per byte, one below the other: seeds, mean and spread."""
    stored = load() if stored is None else stored
    arms = [arm for arm in arms if scores(stored, arm)]
    for row, arm in enumerate(arms):
        values = list(scores(stored, arm).values())
        mean, spread = mean_and_spread(values)
        axes.errorbar(mean, row, xerr=spread, fmt="o", color="C0", capsize=4, zorder=3)
        axes.plot(values, [row] * len(values), "|", color="C1", markersize=11)
    axes.set_yticks(range(len(arms)), [LABELS[arm] for arm in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel("bits per byte (lower is better)")


def plot_effects(axes: Any, stored: Mapping[str, Any] | None = None) -> None:
    """Draw what every fix gains, alone and on the ladder, with every seed."""
    stored = load() if stored is None else stored
    for shift, name, color in ((-0.14, "alone", "C0"), (0.14, "on the ladder", "C1")):
        label: str | None = name
        for row, fix in enumerate(FIXES):
            after = fix if name == "alone" or fix == "schedule" else f"ladder-{fix}"
            before = "baseline" if name == "alone" else BEFORE[after]
            gain = effect(stored, before, after)
            if gain is None:
                continue
            style = {"fmt": "o", "color": color, "capsize": 4, "label": label}
            axes.errorbar(gain.mean, row + shift, xerr=gain.spread, **style)
            seeds = list(gain.by_seed.values())
            axes.plot(seeds, [row + shift] * len(seeds), "|", color="0.3", markersize=9)
            label = None
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(FIXES)), FIXES)
    axes.set_ylim(len(FIXES) - 0.5, -0.5)
    axes.set_xlabel("gain in bits per byte (right of 0 is better)")
    axes.legend()


def plot_sweep(
    axes: Any, arms: Sequence[str], stored: Mapping[str, Any] | None = None
) -> None:
    """Draw the search for the rate: score over rate, the chosen one marked."""
    stored = load() if stored is None else stored
    for arm in arms:
        tried = {r: s for r, s in sweep(stored, arm).items() if s is not None}
        if not tried:
            continue
        (line,) = axes.plot(*zip(*tried.items(), strict=True), "o-", label=LABELS[arm])
        best = chosen_rate(stored, arm)
        axes.plot(best, tried[best], "o", markersize=11, mfc="none", c=line.get_color())
    axes.set_xscale("log", base=2)
    ticks = sorted({rate for arm in arms for rate in sweep(stored, arm)})
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.set(xlabel="peak learning rate", ylabel="bits per byte")
    axes.legend()


def plot_curves(
    axes: Any, arms: Sequence[str], stored: Mapping[str, Any] | None = None
) -> None:
    """Draw training losses over tokens: the mean of the seeds, and their range."""
    stored = load() if stored is None else stored
    for arm in arms:
        runs = list(reported(stored, arm).values())
        if not runs:
            continue
        tokens = [s * r["tokens"] / r["steps"] for r in runs[:1] for s, _ in r["curve"]]
        losses = list(zip(*([y for _, y in r["curve"]] for r in runs), strict=True))
        means = [statistics.fmean(point) for point in losses]
        (line,) = axes.plot(tokens, means, label=LABELS[arm])
        low, high = [min(p) for p in losses], [max(p) for p in losses]
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="tokens", ylabel="training loss (nats a token)")
    axes.legend()
