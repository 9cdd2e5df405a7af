"""`littlelm bench mixture`: weights for the default corpus, found by proxy runs.

RegMix and CLIMB in miniature: some dozens of runs of a very small model, each on a
mixture of its own, a regression of their scores on the weights, and the weights with
the lowest prediction; then these weights and the corpus's own proportions with seeds
that took no part in the choice. The score was fixed beforehand: bits per byte on
excerpts of the pinned validation split, the plain mean over the domains, so that
literature counts as much as code. Finished runs are kept; a killed search goes on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from littlelm_core.bench.ablate import (
    PLAIN,
    SWEEP_SEED,
    Arm,
    Store,
    circumstances,
    train,
)
from littlelm_core.bench.peers import version
from littlelm_core.config import ConfigError, load_run
from littlelm_core.ingest import prepare_run
from littlelm_core.ingest.write import hold
from littlelm_core.mixture import MixtureFit, fit_mixture, sample_weights, token_shares
from littlelm_core.report import ablations
from littlelm_core.report.measured import best_rate

__all__ = ["FOLDER", "main", "measured", "proxy", "seen"]

FOLDER = ablations.FOLDER

PROXIES = 32
DRAW_SEED = 12  # of the proxies' weights
PROXY_SEED = 1  # of every proxy: one start for all, so that they differ in data alone
CHECK_SEEDS = (2, 3, 4)  # of the comparison at the end: none of the proxies' runs
STEPS = 256
RATES = (4e-3, 8e-3, 1.6e-2)  # searched at the corpus's own proportions

TABLE: dict[str, Any] = {
    "steps": STEPS,
    "rows": 4,
    "clip": 1.0,
    "tokenizer": {"use": "bpe", "vocab_size": 4096},
    "model": {
        "use": "llama", "dim": 96, "layers": 2, "heads": 3, "kv_heads": 3,
        "ffn_dim": 256, "context": 128, "softcap": 15.0,
    },
    "optimizer": {
        "use": "torch.optim:AdamW", "betas": [0.9, 0.95], "eps": 1e-10,
        "weight_decay": 0.1, "fused": True,
    },
    "schedule": {"use": "cosine", "warmup": 12, "floor": 0.0},
    "precision": {"use": "autocast", "dtype": "auto"},
    "loader": {"use": "packed", "rest": "keep"},
}  # fmt: skip


def proxy(
    name: str,
    label: str,
    weights: Mapping[str, float],
    rates: tuple[float, ...],
    quick: bool = False,
) -> Arm:
    """Return the proxy run of one mixture, as an arm of an ablation."""
    # Six digits: what is stored is what is run, on any machine.
    rounded = {n: round(float(w), 6) for n, w in weights.items()}
    table = {**TABLE, "mixture": {"use": "weighted", "weights": rounded}}
    if not quick:
        return Arm(name, label, table, rates)
    small = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 48}
    table |= {"steps": 4, "model": {**TABLE["model"], **small, "context": 32}}
    table["schedule"] = {**TABLE["schedule"], "warmup": 1}
    return Arm(name, label, table, rates[:2], excerpts=1, excerpt_tokens=64)


def measured(stored: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (weights_RD, bits_RD) of the finished proxies, domains sorted by name."""
    rows = []
    for name, arm in stored["arms"].items():
        found = [r for r in stored["runs"].values() if r["arm"] == name]
        if name.startswith("proxy-") and found and found[0]["score"] is not None:
            bits = {d: v["bits_per_byte"] for d, v in found[0]["validation"].items()}
            weights = arm["config"]["mixture"]["weights"]
            rows.append([(weights[d], bits[d]) for d in sorted(bits)])
    if not rows:
        return np.empty((0, 0)), np.empty((0, 0))
    return tuple(np.moveaxis(np.array(rows), 2, 0))


def seen(stored: Mapping[str, Any], arm: str) -> list[float]:
    """Return the scores of a checked arm, one for each of CHECK_SEEDS."""
    found = {r["seed"]: r["score"] for r in stored["runs"].values() if r["arm"] == arm}
    return [found[s] for s in stored["check_seeds"] if found.get(s) is not None]


def best_fit(stored: Mapping[str, Any]) -> tuple[str, dict[str, MixtureFit]]:
    """Fit every model that is installed; the best is closest on runs held out."""
    names = ["ridge"]
    if importlib.util.find_spec("lightgbm"):
        names.append("lightgbm")
    fits = {name: fit_mixture(*measured(stored), name) for name in names}
    return min(names, key=lambda name: fits[name].error), fits


# ---- The command


def main(
    console: Console,
    quick: bool = False,
    fresh: bool = False,
    workers: int = 1,
    folder: Path = FOLDER,
    proxies: int = PROXIES,
) -> Path:
    """Train what is missing, fit, check; store after every run. Return the JSON's path.

    fresh: drop all runs first.
    Raises ConfigError: fewer proxies than a fit takes, no worker; LittleLMError:
    another process is at it.
    """
    if proxies < 8 or workers < 1:
        raise ConfigError(f"proxies = {proxies} (>= 8), workers = {workers} (>= 1)")
    path = folder / ("mixture-quick.json" if quick else "mixture.json")
    with hold(folder / f".{path.stem}"):
        return _search(console, path, quick, fresh, workers, proxies)


def _search(
    console: Console, path: Path, quick: bool, fresh: bool, workers: int, proxies: int
) -> Path:
    data = prepare_run(load_run("tiny", ["tokenizer.vocab_size=4096"]))
    domains = sorted(data.validation)
    tokens = {d: data.manifest["domains"][d]["train"]["tokens"] for d in domains}
    own = token_shares(None, tokens)
    store = Store(path)
    if fresh:
        store.runs.clear()
    arms: list[Arm] = []

    def train_all(some: list[Arm], seeds: Sequence[int]) -> None:
        _describe(store, arms, tokens)
        for arm in some:
            store.drop_old(arm)  # runs of another recipe, or of weights found before
        train(store, some, seeds, workers, console)

    arms.append(
        proxy("proportional", "the corpus's own proportions", own, RATES, quick)
    )
    train_all(arms, ())  # the search for the rate alone
    rate = _rate(store, arms[0])
    draws = sample_weights(proxies, len(domains), DRAW_SEED)
    for number, row in enumerate(draws):
        weights = dict(zip(domains, row, strict=True))
        arms.append(proxy(f"proxy-{number:02d}", "proxy", weights, (rate,), quick))
    train_all(arms[1:], (PROXY_SEED,))

    best, fits = best_fit(store.table)
    found = dict(zip(domains, fits[best].weights_D.tolist(), strict=True))
    found = {n: round(w, 3) for n, w in found.items()}
    found[domains[0]] = round(1 - sum(found[d] for d in domains[1:]), 3)
    arms.append(proxy("found", "the weights that were found", found, (rate,), quick))
    arms[0] = proxy("proportional", arms[0].label, own, (rate,), quick)
    store.table |= {
        "weights": found,
        "model": best,
        "fits": {
            name: {
                "weights": dict(
                    zip(domains, fit.weights_D.round(4).tolist(), strict=True)
                ),
                "loss": fit.loss,
                "rank_correlation": fit.rank_correlation,
                "error": fit.error,
            }
            for name, fit in fits.items()
        },
    }
    train_all([arms[0], arms[-1]], CHECK_SEEDS)
    _describe(store, arms, tokens)
    store.write()
    console.print(summary(store.table), **PLAIN)
    console.print(f"wrote {path}", **PLAIN)
    return path


def _rate(store: Store, arm: Arm) -> float:
    """Return the best rate of the sweep at the corpus's own proportions."""
    swept = [r for r in store.runs.values() if r["arm"] == arm.name]
    swept = [r for r in swept if r["seed"] == SWEEP_SEED and r["score"] is not None]
    return best_rate({r["rate"]: r["score"] for r in swept})


def _describe(store: Store, arms: Sequence[Arm], tokens: Mapping[str, int]) -> None:
    """Write the head of the file: what is searched, where, and each arm's config."""
    store.table |= circumstances(arms[0]) | {
        "what": "weights of the default corpus's domains, by proxy runs",
        "metric": "bits per byte on excerpts of the validation split, plain mean over "
        "the domains, fp32; lower is better; fixed before the first run",
        "tokens": dict(tokens),
        "draw_seed": DRAW_SEED,
        "proxy_seed": PROXY_SEED,
        "check_seeds": list(CHECK_SEEDS),
    }
    store.table["versions"].append(version("lightgbm"))
    for arm in arms:
        entry = {"label": arm.label, "config": arm.config()}
        store.table["arms"][arm.name] = entry


def summary(stored: Mapping[str, Any]) -> str:
    """Return what was found as text."""
    fit = stored["fits"][stored["model"]]
    lines = [
        f"weights {stored['weights']} by {stored['model']}: rank correlation "
        f"{fit['rank_correlation']:.2f} on held-out proxies, error {fit['error']:.4f}"
    ]
    for arm in ("proportional", "found"):
        scores = seen(stored, arm)
        if len(scores) > 1:
            mean, spread = ablations.mean_and_spread(scores)
            lines.append(f"{arm}: {mean:.4f} ± {spread:.4f} bits per byte")
    return "\n".join(lines)
