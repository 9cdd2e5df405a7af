"""`littlelm bench fixes`: equal work, the rate by one rule, killed and gone on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from littlelm_core import corpus
from littlelm_core.bench import ablate, fixes, heap
from littlelm_core.bench.ablate import SWEEP_SEED, Arm, Job, next_jobs
from littlelm_core.cli import app
from littlelm_core.config import LittleLMError
from littlelm_core.report import ablations

QUIET = Console(quiet=True)
SOME = ["failed", "baseline", "schedule", "context"]
WEIGHTS = {"code": 0.5, "docs": 0.3, "literature": 0.2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which some arms were trained at the tiny size."""
    folder = tmp_path_factory.mktemp("ablations")
    fixes.main(QUIET, SOME, seeds=2, quick=True, folder=folder)
    return folder


def stored(folder):
    return json.loads((folder / "fixes-quick.json").read_text("utf-8"))


# ---- What is compared


def test_all_arms_take_the_same_number_of_tokens():
    for quick in (False, True):
        work = {
            arm.table["steps"] * arm.table["rows"] * arm.table["model"]["context"]
            for arm in fixes.arms(WEIGHTS, quick)
        }
        assert len(work) == 1


def test_an_arm_differs_from_the_baseline_in_its_fix_alone():
    arms = {arm.name: arm.table for arm in fixes.arms(WEIGHTS)}
    changed = {
        "schedule": {"schedule"},
        "muon": {"optimizer"},
        "data": {"mixture"},
        "fp8": {"precision", "model.vocab_multiple"},
        "context": {"rows", "model.context"},
    }

    def differences(a, b):
        flat = [
            {f"{k}.{m}" if k == "model" else k: x for k, v in t.items()
             for m, x in (v.items() if k == "model" else [("", v)])}
            for t in (a, b)
        ]  # fmt: skip
        return {k for k in flat[0] | flat[1] if flat[0].get(k) != flat[1].get(k)}

    assert arms["failed"] == arms["baseline"]
    so_far = set()
    for fix, keys in changed.items():
        so_far |= keys
        rung = fix if fix == "schedule" else f"ladder-{fix}"
        assert differences(arms["baseline"], arms[fix]) == keys
        assert differences(arms["baseline"], arms[rung]) == so_far
        assert (
            arms[rung].items()
            >= {k: arms[fix][k] for k in keys if "." not in k}.items()
        )


def test_the_vocabulary_is_padded_by_its_fix_alone():
    arms = {arm.name: arm.table for arm in fixes.arms(WEIGHTS)}
    for name, table in arms.items():
        vocabulary = table["tokenizer"]["vocab_size"]
        multiple = table["model"]["vocab_multiple"]
        padded = -(-vocabulary // multiple) * multiple
        rungs = ("fp8", "ladder-fp8", "ladder-context")
        assert (padded % 64 == 0) == (name in rungs)


def test_every_context_is_scored_on_the_same_targets():
    ids = torch.arange(64).reshape(2, 32)
    for context in (32, 16, 8):
        inputs, targets = ablate.windows((ids, ids + 1), context, bos_id=99)
        assert inputs.shape == targets.shape == (64 // context, context)
        assert targets.flatten().tolist() == list(range(1, 65))
        assert (inputs[:, 0] == 99).all()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert ids[0, 0] == 0  # the batch itself is left as it was


def test_a_heap_is_half_good_and_curation_finds_the_half():
    texts = [
        " ".join(f"w{n * 31 % 97} of" for n in range(k, k + 200)) for k in range(60)
    ]
    pages = heap.heap("docs", texts)
    assert pages == heap.heap("docs", texts)
    sizes = {sort: sum(len(t) for s, t in pages if s == sort)
             for sort in ("good", "mirror", "junk")}  # fmt: skip
    assert sizes["good"] == sum(map(len, texts))
    for sort in ("mirror", "junk"):
        assert sizes[sort] == pytest.approx(sizes["good"] / 2, rel=0.1)
    assert [t for s, t in pages if s == "good"] != texts  # shuffled


def test_curation_of_a_heap_keeps_one_of_each():
    docs = list(corpus.documents("docs", "train"))[:150]
    pages = heap.heap("docs", docs)
    kept = [pages[i] for i in heap.curate(pages)]
    counts = {s: sum(k == s for k, _ in kept) for s in ("good", "mirror", "junk")}
    assert counts["junk"] == 0
    assert counts["mirror"] <= heap.MIRRORED
    assert 150 - heap.MIRRORED - 3 <= counts["good"] + counts["mirror"] <= 150


def test_an_arm_on_other_text_is_another_run():
    arms = {arm.name: arm for arm in fixes.arms(WEIGHTS)}
    keys = {Job(arms[n], 4e-3, 1).key for n in ("baseline", "heap", "curated")}
    assert len(keys) == 3
    assert arms["heap"].table == arms["curated"].table == arms["baseline"].table


# ---- Which rate, which seeds


def train_all(arm, score, seeds=(1, 2, 3)):
    """Follow next_jobs with made-up scores; return the jobs in order."""
    done = {}
    order = []
    for _ in range(50):
        jobs = next_jobs(arm, lambda job: done.get((job.rate, job.seed)), seeds)
        if not jobs:
            return order
        order.append(jobs[0])
        done[jobs[0].rate, jobs[0].seed] = score(jobs[0].rate)
    raise AssertionError("it never ends")


def arm_of(*rates):
    return Arm("a", "an arm", {"optimizer": {"use": "x"}}, rates)


def test_a_best_rate_inside_the_grid_is_taken():
    jobs = train_all(arm_of(1.0, 2.0, 4.0, 8.0), lambda rate: abs(rate - 4.1))
    assert [(j.rate, j.seed) for j in jobs[:4]] == [
        (rate, SWEEP_SEED) for rate in (1.0, 2.0, 4.0, 8.0)
    ]
    assert [(j.rate, j.seed) for j in jobs[4:]] == [(4.0, 1), (4.0, 2), (4.0, 3)]
    assert SWEEP_SEED not in (1, 2, 3)


def test_a_best_rate_at_an_edge_moves_the_edge():
    jobs = train_all(arm_of(1.0, 2.0, 4.0, 8.0), lambda rate: abs(rate - 15))
    assert [j.rate for j in jobs[4:]] == [16.0, 32.0, 16.0, 16.0, 16.0]
    jobs = train_all(arm_of(1.0, 2.0, 4.0, 8.0), lambda rate: rate)
    assert [j.rate for j in jobs[4:]] == [0.5, 0.25, 0.125, *[0.125] * 3]


def test_a_run_that_failed_is_never_the_best():
    score = lambda rate: float("inf") if rate > 2 else 1 / rate  # noqa: E731
    jobs = train_all(arm_of(1.0, 2.0, 4.0, 8.0), score)
    assert [j.rate for j in jobs[4:]] == [2.0] * 3


def test_a_run_that_breaks_down_has_no_score_and_is_not_tried_again(tmp_path):
    (arm,) = [a for a in fixes.arms(WEIGHTS, quick=True) if a.name == "baseline"]
    wild = Arm(arm.name, arm.label, {**arm.table, "steps": 9}, (1e30,), 1, 64)
    job = Job(wild, 1e30, 1)
    record = ablate.measure(job)
    assert record["score"] is None
    assert "not finite" in record["error"]
    store = ablate.Store(tmp_path / "a.json")
    assert store.score(job) is None
    store.add(job, record)
    assert ablate.Store(tmp_path / "a.json").score(job) == float("inf")
    assert next_jobs(wild, store.score, (1,)) == []


def test_a_single_rate_is_not_searched():
    jobs = train_all(arm_of(2.5e-4), lambda rate: rate)
    assert [(j.rate, j.seed) for j in jobs] == [(2.5e-4, 1), (2.5e-4, 2), (2.5e-4, 3)]


# ---- Run, stop, go on


def test_the_file_holds_all_that_explains_a_number(measured):
    found = stored(measured)
    assert {run["tokens"] for run in found["runs"].values()} == {4 * 2 * 32}
    assert {arm for arm in SOME if found["arms"][arm]["complete"]} == {*SOME}
    for name in SOME:
        assert found["arms"][name]["config"]["optimizer"]["use"]
        runs = ablations.reported(found, name)
        assert set(runs) == {1, 2}
        for run in runs.values():
            domains = [d["bits_per_byte"] for d in run["validation"].values()]
            assert run["score"] == pytest.approx(sum(domains) / 3)
            assert len(domains) == 3
            assert run["curve"][-1][0] == 4
            assert run["seconds"] > 0
            assert run["cpu_seconds"] > 0
            assert run["sources"] == ablate.sources()
    texts = {
        tuple((d["tokens"], d["bytes"]) for d in run["validation"].values())
        for run in found["runs"].values()
    }
    assert len(texts) == 1  # each arm was scored on the same text
    assert {*found["cost"]} == {"baseline", "schedule", "context"}
    assert found["cost"]["baseline"]["ratio"] == 1.0
    assert any(version.startswith("torch ") for version in found["versions"])


def test_what_is_finished_is_not_trained_again(measured, monkeypatch):
    before = stored(measured)["runs"]
    monkeypatch.setattr(ablate, "measure", lambda job: pytest.fail("trained again"))
    fixes.main(QUIET, SOME, seeds=2, quick=True, folder=measured)
    assert stored(measured)["runs"] == before


def test_a_changed_recipe_is_a_new_one(measured):
    (arm,) = [a for a in fixes.arms(WEIGHTS, quick=True) if a.name == "baseline"]
    store = ablate.Store(measured / "fixes-quick.json")
    rate, seed = ablations.chosen_rate(store.table, "baseline"), 1
    assert store.score(Job(arm, rate, seed)) is not None
    longer = Arm(arm.name, arm.label, {**arm.table, "steps": 5}, arm.rates, 1, 64)
    assert store.score(Job(longer, rate, seed)) is None
    count = len(store.runs)
    mine = sum(run["arm"] == "baseline" for run in store.runs.values())
    store.drop_old(arm)
    assert len(store.runs) == count
    store.drop_old(longer)
    assert len(store.runs) == count - mine > 0


def test_killed_it_goes_on_and_ends_at_the_same_numbers(measured, tmp_path):
    command = [sys.executable, "-m", "littlelm_core", "bench", "fixes", "--quick"]
    command += ["--arms", "baseline", "--seeds", "2", "--folder", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    path = tmp_path / "fixes-quick.json"
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if path.is_file() and stored(tmp_path)["runs"]:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    first = stored(tmp_path)["runs"]
    assert first
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = stored(tmp_path)["runs"]
    for key, run in first.items():
        assert whole[key] == run  # its time of day too: it was not made again
    unbroken = stored(measured)["runs"]
    assert len(first) < len(whole)
    for key, run in whole.items():
        assert run["validation"] == unbroken[key]["validation"]
        assert run["curve"] == unbroken[key]["curve"]


def test_workers_change_no_number(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    fixes.main(QUIET, ["baseline"], seeds=2, workers=2, quick=True, folder=tmp_path)
    unbroken, found = stored(measured)["runs"], stored(tmp_path)["runs"]
    assert {*found} == {k for k, r in unbroken.items() if r["arm"] == "baseline"}
    for key, run in found.items():
        assert run["validation"] == unbroken[key]["validation"]


# ---- The numbers


def made_up():
    """Two arms with known scores, and runs that must not count."""
    runs = {}

    def run(arm, rate, seed, score):
        part = {"x": {"bits_per_byte": score}} if score else {}
        runs[f"{arm} {rate} {seed}"] = {
            "arm": arm, "rate": rate, "seed": seed, "score": score, "validation": part
        }  # fmt: skip

    for rate, score in ((1.0, 2.5), (2.0, 2.0), (4.0, None)):
        run("baseline", rate, SWEEP_SEED, score)
        run("muon", rate, SWEEP_SEED, score)
    for seed, base, muon in ((1, 2.0, 1.9), (2, 2.2, 2.08), (3, 2.1, 1.96)):
        run("baseline", 2.0, seed, base)
        run("muon", 2.0, seed, muon)
    run("muon", 1.0, 1, 9.0)  # of a rate that was not chosen
    return {"sweep_seed": SWEEP_SEED, "runs": runs, "cost": {}}


def test_an_effect_is_the_mean_over_pairs_of_seeds():
    data = made_up()
    assert ablations.chosen_rate(data, "muon") == 2.0
    assert ablations.scores(data, "muon") == {1: 1.9, 2: 2.08, 3: 1.96}
    gain = ablations.effect(data, "baseline", "muon")
    assert gain.mean == pytest.approx(0.12)  # of 0.10, 0.12 and 0.14
    assert gain.spread == pytest.approx(0.02)
    assert ablations.verdict(gain) == "gains"
    back = ablations.effect(data, "muon", "baseline")
    assert ablations.verdict(back) == "loses"
    assert ablations.effect(data, "baseline", "fp8") is None


def test_a_verdict_needs_the_interval_to_leave_out_zero():
    # A spread of 1 over three seeds: the interval reaches 4.30 / sqrt(3) = 2.48 far.
    seeds = {1: 1.0, 2: 2.0, 3: 3.0}
    assert ablations.verdict(ablations.Effect(2.0, 1.0, seeds)) == "within the noise"
    assert ablations.verdict(ablations.Effect(2.4, 1.0, seeds)) == "within the noise"
    assert ablations.verdict(ablations.Effect(2.6, 1.0, seeds)) == "gains"
    assert ablations.verdict(ablations.Effect(-2.6, 1.0, seeds)) == "loses"
    one = ablations.Effect(2.0, 0.0, {1: 2.0})  # a single seed tells nothing
    assert ablations.verdict(one) == "within the noise"


@pytest.mark.parametrize("fix", ablations.FIXES)
def test_a_card_says_what_was_measured_and_what_was_not(fix, measured):
    text = ablations.card(fix, stored(measured))
    known = fix in SOME
    assert ("bits per byte, a gain of" in text) == known
    assert ("not measured yet" in text) == (fix != "schedule")
    assert "{cite}`" in text


def test_the_picture_shows_the_scores(measured):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    data = stored(measured)
    axes = figure.subplots()
    ablations.plot_scores(axes, stored=data)
    drawn = [line.get_xdata() for line in axes.lines if line.get_markersize() == 11]
    wanted = [
        list(ablations.scores(data, a).values()) for a in ("baseline", "schedule")
    ]
    assert [list(x) for x in drawn] == wanted  # the caps of the bars are no scores
    for draw in (ablations.plot_sweep, ablations.plot_curves):
        axes = figure.add_subplot()
        draw(axes, SOME, data)
        assert axes.lines
    axes = figure.add_subplot()
    ablations.plot_effects(axes, data)
    assert axes.lines


# ---- What cannot be done is said in one line


def test_a_file_that_is_missing_names_the_command(tmp_path):
    with pytest.raises(LittleLMError, match="littlelm bench fixes measures it"):
        ablations.load("fixes", tmp_path)
    (tmp_path / "fixes.json").write_text("{")
    with pytest.raises(LittleLMError, match="damaged"):
        ablations.load("fixes", tmp_path)


def test_an_arm_without_its_weights_is_left_out(tmp_path):
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    fixes.main(console, ["data"], quick=True, folder=tmp_path)
    assert "data: left out, the weights are missing" in console.export_text()
    assert stored(tmp_path)["runs"] == {}


def test_wrong_names_and_numbers_are_one_line(tmp_path):
    for arguments, words in (
        ({"names": ["muom"]}, "'muon'"),
        ({"seeds": 0}, "seeds = 0"),
        ({"workers": 0}, "workers = 0"),
    ):
        with pytest.raises(LittleLMError, match=words):
            fixes.main(QUIET, folder=tmp_path, **arguments)


def test_the_command_reaches_it(measured):
    command = ["bench", "fixes", "--quick", "--arms", "baseline, schedule"]
    command += ["--seeds", "2", "--folder", str(measured)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "failed recipe, rate searched" in result.output


def test_the_shipped_file_is_whole_and_of_these_recipes():
    data = ablations.load()
    mixture = fixes.known_mixture(ablations.FOLDER)
    for arm in fixes.arms(mixture):
        runs = ablations.reported(data, arm.name)
        assert len(runs) >= 3, arm.name
        tried = ablations.sweep(data, arm.name)
        assert arm.name == "failed" or {*arm.rates} <= {*tried}
        for seed, run in runs.items():
            assert Job(arm, run["rate"], seed).key in data["runs"]
    assert len({run["tokens"] for run in data["runs"].values()}) == 1
