"""Mixtures in whole runs: shares, resume, world sizes, branches, and the search."""

import json
import os
import subprocess
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from small_runs import command, prepare_letters, records, run_of, write_run

from littlelm_core.bench import mixture as search
from littlelm_core.config import ConfigError, DataError
from littlelm_core.mixture import fit_mixture, token_shares
from littlelm_core.trainer import Trainer, train

WEIGHTS = "mixture.weights={code=0.4,docs=0.2,rest=0.4}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A prepared folder of three domains of very different sizes, and a run file."""
    folder = tmp_path_factory.mktemp("mixture")
    prepare_letters(
        folder,
        {"code": ("{}();", 40), "docs": ("abc ", 90), "rest": ("XYZ ", 12)},
        lengths=(40, 200),
    )
    write_run(
        folder, "steps = 30", "rows = 2", "tokens_per_step = 256",
        "checkpoint_every = 10", 'loader.rest = "keep"', 'mixture.use = "weighted"',
    )  # fmt: skip
    return folder


def losses(home, where):
    return [r["loss"] for r in records(home / where)]


def opened(run):
    """Return a run's mixture as its newest checkpoint left it."""
    trainer = Trainer(run, quiet=True)
    trainer.held.close()
    return trainer.mixture


@pytest.mark.parametrize(
    "pick",
    [
        SimpleNamespace(domain="kode", epoch=0, index=0),
        SimpleNamespace(domain="code", epoch=0, index=10**6),
        SimpleNamespace(domain="code", epoch=0, index=-1),
        ("code", 0, 0),
        "code",
    ],
)
def test_an_own_mixture_that_names_no_row(home, pick):
    trainer = Trainer(run_of(home, "picks", WEIGHTS), quiet=True)
    trainer.held.close()
    loader = trainer.loader
    loader.mix(lambda rows: SimpleNamespace(pick=lambda: pick))
    with pytest.raises(ConfigError, match=r"pick\(\) gave .*Pick\(domain, ") as caught:
        next(loader)
    assert "\n" not in str(caught.value)
    for domain, rows in loader.domains.items():
        assert f"{domain} ({len(rows)} rows)" in str(caught.value)
    loader.rank, loader.world = 1, 2  # whose rows are all there
    good = [SimpleNamespace(domain="code", epoch=0, index=0)] * 3
    picks = iter([pick, *good])
    loader.mix(lambda rows: SimpleNamespace(pick=lambda: next(picks)))
    with pytest.raises(ConfigError, match=r"pick\(\) gave"):
        next(loader)


def test_a_run_trains_on_the_shares_of_its_file(home):
    run = run_of(home, "shares", WEIGHTS)
    result = train(run, quiet=True)
    mixture = opened(run)
    assert sum(mixture.tokens.values()) == result.tokens == 30 * 256
    for name, share in {"code": 0.4, "docs": 0.2, "rest": 0.4}.items():
        off = abs(mixture.tokens[name] - share * result.tokens)
        assert off <= 32, f"{name} is {off} tokens off: a row has 32"
    logged = records(home / "shares")[-1]["epochs"]
    assert logged == mixture.epochs
    assert logged["rest"] > 1.5 > 0.2 > logged["docs"], logged
    page = (home / "shares" / "report.html").read_text("utf-8")
    assert f"code {logged['code']:.2f}, docs {logged['docs']:.2f}" in page


def test_what_the_shares_mean_is_what_the_model_reads(home):
    """The ids of the batches themselves: each domain has letters of its own."""
    trainer = Trainer(run_of(home, "ids", WEIGHTS), quiet=True)
    trainer.held.close()
    letters = {"code": b"{}();", "docs": b"abc", "rest": b"XYZ"}
    of = {byte: name for name, own in letters.items() for byte in own}
    seen = Counter()
    for _ in range(100):
        for row in next(trainer.batches)[1].tolist():
            seen[Counter(of[i] for i in row if i in of).most_common(1)[0][0]] += 1
    assert seen == {"code": 80, "docs": 40, "rest": 80}, seen


def test_it_stops_in_an_epoch_and_goes_on_exactly(home):
    whole = train(run_of(home, "whole", WEIGHTS), quiet=True)
    for stop in (4, 13, 27):  # none is a checkpoint of its own interval
        train(run_of(home, "parts", WEIGHTS, f"stop_step={stop}"), quiet=True)
    result = train(run_of(home, "parts", WEIGHTS), quiet=True)
    assert losses(home, "parts") == losses(home, "whole")
    assert result.final_loss == whole.final_loss


def test_ranks_train_on_the_same_rows_and_take_each_others_checkpoints(home):
    """One process, two, and two that go on where one stopped: the same losses."""
    alone = run_of(home, "alone", WEIGHTS)
    train(alone, quiet=True)
    train(run_of(home, "moved", WEIGHTS, "stop_step=15"), quiet=True)
    for where in ("two", "moved"):
        done = subprocess.run(
            command(home, where, WEIGHTS, ranks=2), capture_output=True,
            encoding="utf-8", timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert np.allclose(losses(home, where), losses(home, "alone"), atol=2e-5)
        assert opened(run_of(home, where, WEIGHTS)).state_dict() == (
            opened(alone).state_dict()
        )


def test_without_a_mixture_the_rows_are_the_loaders_own(home):
    """The default draws nothing: what a Part I run trained on stays what it was."""
    trainer = Trainer(run_of(home, "plain", "mixture.use=proportional"), quiet=True)
    trainer.held.close()
    assert trainer.mixture is None
    assert trainer.loader.mixture is None
    assert "mixture" not in trainer.loader.state_dict()


def test_a_domain_runs_out(home):
    keys = WEIGHTS, "mixture.max_epochs={rest=1}"
    mixture = opened_after(home, "out", *keys)
    assert mixture.epochs["rest"] == 1.0
    assert mixture.shares == pytest.approx({"code": 2 / 3, "docs": 1 / 3})
    stopped = train(
        run_of(home, "stop", *keys, "mixture.when_exhausted=stop"), quiet=True
    )
    assert stopped.steps < 30, "the run went on without the domain"
    with pytest.raises(DataError, match="rest has been read 1 times"):
        train(run_of(home, "raise", *keys, "mixture.when_exhausted=raise"), quiet=True)


def opened_after(home, where, *keys):
    run = run_of(home, where, *keys)
    train(run, quiet=True)
    return opened(run)


def test_the_decay_has_weights_of_its_own(home):
    keys = (
        WEIGHTS,
        "mixture.decay_weights={code=0,docs=0,rest=1}",
        "mixture.decay_start=0.5",
    )
    tokens = opened_after(home, "decay", *keys).tokens
    assert tokens["rest"] == pytest.approx(15 * 256 * 1.4, abs=32), tokens
    assert tokens["code"] == pytest.approx(15 * 256 * 0.4, abs=32), tokens


def test_a_branch_may_change_the_weights_and_a_run_may_not(home):
    train(run_of(home, "trunk", WEIGHTS, "stop_step=20"), quiet=True)
    with pytest.raises(ValueError, match=r"mixture\.weights\.code 0\.4 -> 0"):
        train(run_of(home, "trunk", "mixture.weights={code=0,docs=0,rest=1}"))
    before = opened(run_of(home, "trunk", WEIGHTS)).tokens
    keys = "mixture.weights={code=0,docs=0,rest=1}", f"resume={home / 'trunk'}"
    after = opened_after(home, "branch", *keys).tokens
    assert after == {**before, "rest": before["rest"] + 10 * 256}


def test_a_checkpoint_made_without_a_mixture_is_refused_with_one(home):
    train(
        run_of(home, "unmixed", "mixture.use=proportional", "stop_step=20"), quiet=True
    )
    with pytest.raises(DataError, match="was made without a mixture"):
        train(run_of(home, "mixed", WEIGHTS, f"resume={home / 'unmixed'}"), quiet=True)


def test_the_search_goes_on_where_it_was_and_finds_weights(tmp_path):
    """The quick form of `littlelm bench mixture`, twice: the second trains nothing."""
    out = Console(file=(tmp_path / "out").open("w"), width=200)
    path = search.main(out, quick=True, folder=tmp_path, proxies=8)
    stored = json.loads(path.read_text("utf-8"))
    assert sum(stored["weights"].values()) == pytest.approx(1)
    weights_RD, bits_RD = search.measured(stored)
    assert weights_RD.shape == bits_RD.shape == (8, 3)
    assert weights_RD.sum(1) == pytest.approx(1, abs=1e-5)
    fit = fit_mixture(weights_RD, bits_RD, stored["model"])
    again = stored["fits"][stored["model"]]["rank_correlation"]
    assert fit.rank_correlation == pytest.approx(again)
    for arm in ("proportional", "found"):
        assert len(search.seen(stored, arm)) == len(stored["check_seeds"])
    runs = stored["runs"]
    assert all(
        {"seconds", "seed", "sources", "commit"} <= r.keys() for r in runs.values()
    )
    lost = next(key for key, run in runs.items() if run["arm"] == "proxy-03")
    killed = {key: run for key, run in runs.items() if key != lost}
    path.write_text(json.dumps({**stored, "runs": killed}), "utf-8")
    search.main(out, quick=True, folder=tmp_path, proxies=8)
    after = json.loads(path.read_text("utf-8"))["runs"]
    fresh = [key for key in after if after[key] != runs.get(key)]
    assert fresh == [lost], f"{fresh} were trained anew, {lost} was missing"
    assert after[lost]["score"] == runs[lost]["score"], "a run is not repeatable"


def test_a_cold_temperature_leaves_the_largest_and_a_typing_error_is_named():
    assert token_shares({"a": 2, "b": 1}, {"a": 9, "b": 9}, 1e-4) == {"a": 1, "b": 0}
    with pytest.raises(ConfigError, match=r"no domain 'codes'.*did you mean 'code'"):
        token_shares({"codes": 1, "z": 1}, {"code": 9, "z": 9})
