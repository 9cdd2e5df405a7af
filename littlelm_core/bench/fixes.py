"""`littlelm bench fixes`: the failed recipe in miniature, and what five fixes give.

The ladder adds one fix at a time (schedule, Muon, data and mixture, FP8 with a padded
vocabulary, half the context with twice the rows); each fix is also put alone on the
failed recipe. All arms take the same number of tokens and the same shape of model, and
each has its own best learning rate, searched with the same budget. The measure was
fixed beforehand: bits per byte on excerpts of the pinned validation split, as the plain
mean over the domains, lower is better.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from littlelm_core import corpus
from littlelm_core.bench import heap
from littlelm_core.bench.ablate import (
    PLAIN,
    SWEEP_SEED,
    Arm,
    Store,
    circumstances,
    next_jobs,
    step_costs,
    train,
)
from littlelm_core.config import ConfigError, LittleLMError, check_part, nearest
from littlelm_core.ingest.write import hold
from littlelm_core.report import ablations
from littlelm_core.report.terminal import table

__all__ = ["FOLDER", "arms", "main"]

FOLDER = ablations.FOLDER
STEPS = 320
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # of every arm: see `_optimizer` for what they set
FAILED_RATE = 2.5e-4  # that of the run that failed

# The failed recipe: a Llama block, AdamW on everything, a cosine to zero, rows in
# proportion to the domains, and a vocabulary that is no multiple of anything.
BASELINE: dict[str, Any] = {
    "steps": STEPS,
    "rows": 4,
    "clip": 1.0,
    "tokenizer": {"use": "bpe", "vocab_size": 4081},
    "model": {
        "use": "llama", "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2,
        "ffn_dim": 352, "context": 256, "qk_norm": False, "vocab_multiple": 1,
    },
    "optimizer": {
        "use": "torch.optim:AdamW", "betas": [0.9, 0.95], "eps": 1e-8,
        "weight_decay": 0.1, "fused": True,
    },
    "schedule": {"use": "cosine", "warmup": STEPS // 20, "floor": 0.0},
    "precision": {"use": "autocast", "dtype": "auto"},
    "loader": {"use": "packed", "rest": "keep"},
}  # fmt: skip


def fixes(mixture: Mapping[str, float] | None) -> dict[str, dict[str, Any]]:
    """Return what each fix changes, in the order of the ladder.

    mixture: weights by domain, or None while they are not known.
    """
    adam = {k: BASELINE["optimizer"][k] for k in ("betas", "eps", "weight_decay")}
    return {
        "schedule": {
            "schedule": {
                "use": "wsd", "warmup": STEPS // 20, "decay": STEPS // 2,
                "shape": "linear", "floor": 0.05,
            }
        },
        # match_rms_adamw gives Muon's steps the size of AdamW's: one rate serves both,
        # and the search has one number for every arm.
        "muon": {"optimizer": {"use": "muon", **adam, "scale": "match_rms_adamw"}},
        "data": {"mixture": {"use": "weighted", "weights": dict(mixture or {})}},
        "fp8": {
            "precision": {"use": "fp8", "dtype": "auto", "recipe": "tensorwise"},
            "model": {"vocab_multiple": 64},
        },
        "context": {"rows": 8, "model": {"context": 128}},
    }  # fmt: skip


def _apply(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over a recipe; a part's table is replaced, the model's filled in."""
    result = dict(base)
    for change in changes:
        model = {**result["model"], **change.get("model", {})}
        result |= {**change, "model": model}
    return result


def arms(mixture: Mapping[str, float] | None = None, quick: bool = False) -> list[Arm]:
    """Return every arm: the failed recipe at its own rate and at its best one, the
    ladder, each fix alone, and the failed recipe on a heap before and after curation.

    The first rung and the schedule alone are one arm. quick: tiny ones, without heap.
    """
    changes = fixes(mixture)
    base, sizes, rates = BASELINE, {}, RATES
    if quick:
        base = _apply(BASELINE, _QUICK)
        changes["context"] = {"rows": 4, "model": {"context": 16}}
        sizes, rates = {"excerpts": 1, "excerpt_tokens": 64}, RATES[1:3]
        changes["schedule"]["schedule"] |= {"warmup": 1, "decay": 2}
    tables = {"failed": base, "baseline": base}
    tables |= {fix: _apply(base, change) for fix, change in changes.items()}
    so_far = list(changes.values())
    for number, fix in enumerate(changes):
        if number:
            tables[f"ladder-{fix}"] = _apply(base, *so_far[: number + 1])
    found = [
        Arm(
            name,
            ablations.LABELS[name],
            table,
            (FAILED_RATE,) if name == "failed" else rates,
            **sizes,
        )
        for name, table in tables.items()
    ]
    if not quick:
        found += [
            Arm(kind, ablations.LABELS[kind], base, rates, text=kind)
            for kind in heap.KINDS
        ]
    return found


_QUICK = {
    "steps": 4,
    "rows": 2,
    "model": {
        "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 48, "context": 32
    },
    "schedule": {"use": "cosine", "warmup": 1, "floor": 0.0},
}  # fmt: skip


def known_mixture(folder: Path) -> dict[str, float] | None:
    """Return the weights that proxy runs found (`mixture.json`), or None."""
    with contextlib.suppress(LittleLMError):
        return ablations.load("mixture", folder).get("weights")  # none before its end
    return None


def curation(base: Arm) -> dict[str, Any]:
    """Return counts of documents, by domain: duplicates in the default corpus (there
    are next to none, so that the ladder's third fix is the mixture alone), and what the
    heap is made of, before curation and after it.
    """
    from littlelm_core.curation import deduplicate

    own = {}
    for domain in corpus.domains():
        documents = list(corpus.documents(domain, "train"))
        kept, _ = deduplicate(documents)
        own[domain] = {"documents": len(documents), "kept": len(kept)}
    run = base.run(base.rates[0], SWEEP_SEED)
    return {"corpus": own, "heap": heap.prepare("heap", run).manifest["heap"]}


def obstacle(arm: Arm) -> str | None:
    """Return in one line why an arm cannot be trained, or None."""
    if "mixture" in arm.table and not arm.table["mixture"]["weights"]:
        return "the weights are missing: littlelm bench mixture finds them"
    try:
        for kind, part in arm.run(arm.rates[0], SWEEP_SEED).parts():
            check_part(kind, part)
    except LittleLMError as error:
        return str(error)
    return None


# ---- The command


def main(
    console: Console,
    names: Sequence[str] = (),
    seeds: int = 3,
    workers: int = 1,
    quick: bool = False,
    fresh: bool = False,
    folder: Path = FOLDER,
) -> Path:
    """Train what is missing of the arms (all unless named), store and print it.

    fresh: drop the runs of these arms first. Returns the path of the JSON file.
    Raises ConfigError: an unknown arm, fewer than one seed or worker; LittleLMError:
    another process is at it.
    """
    for what, value in (("seeds", seeds), ("workers", workers)):
        if value < 1:
            raise ConfigError(f"{what} = {value} must be at least 1")
    everything = arms(known_mixture(folder), quick)
    for name in names:
        if name not in (known := [arm.name for arm in everything]):
            raise ConfigError(f"no arm is called {name!r}{nearest(name, known)}")
    chosen = []
    for arm in everything:
        if names and arm.name not in names:
            continue
        if reason := obstacle(arm):
            console.print(f"{arm.name}: left out, {reason}", **PLAIN)
        else:
            chosen.append(arm)
    path = folder / ("fixes-quick.json" if quick else "fixes.json")
    with hold(folder / f".{path.stem}"):
        store = Store(path)
        for arm in chosen:
            store.drop_old(arm, fresh)
        _describe(store, everything, range(1, seeds + 1))
        train(store, chosen, range(1, seeds + 1), workers, console)
        _describe(store, everything, range(1, seeds + 1))
        _time_steps(store, everything, quick, console)
        store.write()
    console.print("\n" + summary(store.table), **PLAIN)
    console.print(f"wrote {path}", **PLAIN)
    return path


def _time_steps(store: Store, everything: list[Arm], quick: bool, out: Console) -> None:
    """Measure what a step of each arm costs, once all that were trained are known."""
    trained = [a for a in everything if ablations.reported(store.table, a.name)]
    tried = {arm.name: arm for arm in trained if arm.name != "failed"}
    if "baseline" not in tried or {*tried} == {*store.table.get("cost", {})}:
        return
    with out.status("timing the steps of all arms, in turns"):
        sizes = {"count": 2, "steps": 1} if quick else {}
        store.table["cost"] = step_costs(tried, "baseline", **sizes)
    if arm := tried.get("curated"):
        store.table["curation"] = curation(arm)


def _describe(store: Store, everything: list[Arm], seeds: Sequence[int]) -> None:
    """Write the head of the file: what was compared, where, and each arm's config."""
    store.table |= circumstances(everything[1]) | {
        "what": "the failed recipe in miniature, five fixes on a ladder and alone",
        "metric": "bits per byte on excerpts of the validation split, plain mean over "
        "the domains, fp32, each arm at its own context; lower is better",
        "corpus": corpus.fingerprint(),
        "seeds": list(seeds),
    }
    for arm in everything:
        entry: dict[str, Any] = {"label": arm.label, "rates": list(arm.rates)}
        if obstacle(arm) is None:
            entry["config"] = arm.config()
            tried = [r for r in store.runs.values() if r["arm"] == arm.name]
            entry["rates"] = sorted({r["rate"] for r in tried} | {*arm.rates})
            wanted = next_jobs(arm, store.score, seeds)
            entry["complete"] = not wanted
            if ablations.reported(store.table, arm.name):
                entry["rate"] = ablations.chosen_rate(store.table, arm.name)
        store.table["arms"][arm.name] = entry


def summary(stored: Mapping[str, Any]) -> str:
    """Return the ladder and the fixes alone as text."""
    rows = [["bits per byte, mean ± sd over seeds", "score", "gain", "rate", "cost"]]
    for name in stored["arms"]:
        scores = ablations.scores(stored, name)
        if not scores:
            continue
        mean, spread = ablations.mean_and_spread(scores.values())
        before = ablations.BEFORE.get(name)
        effect = before and ablations.effect(stored, before, name)
        cost = ablations.cost(stored, name)
        rows.append(
            [
                ablations.LABELS[name],
                f"{mean:.4f} ± {spread:.4f}",
                f"{effect.mean:+.4f} ± {effect.spread:.4f}" if effect else "-",
                f"{ablations.chosen_rate(stored, name):g}",
                f"{cost:.2f}x" if cost else "-",
            ]
        )
    return table(rows)
