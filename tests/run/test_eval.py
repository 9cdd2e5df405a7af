"""Evaluations from end to end: in a run, by the command, killed and gone on with.

Tasks are always named, and $LITTLELM_DATA is a folder of these tests: no real CORE is
read, whatever is prepared on the machine. What is right for an item is the contract's.
"""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from processes import torchrun
from rich.console import Console
from small_runs import command, prepare_letters, records, run_of, write_run

from littlelm_core import cli, core_eval, corpus
from littlelm_core.config import DataError, LittleLMError
from littlelm_core.core_eval import evaluate, load_tasks
from littlelm_core.report import evaluation
from littlelm_core.report.eval_progress import EvalProgress
from littlelm_core.report.journal import Journal, recorded, remove
from littlelm_core.tokenizer import Tokenizer
from littlelm_core.trainer import (
    World,
    load_checkpoint,
    newest_checkpoint,
    read_metrics,
    train,
)

MINI = Path(__file__).parents[2] / "data" / "mini_core"
FEW = ("piqa", "winograd", "jeopardy")  # one of each kind
OWN = '''
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent


class Bare(nn.Module):
    """Two matrices: no cfg, no hidden, no make_cache. It counts what it reads."""

    READ = []

    def __init__(self, cfg):
        super().__init__()
        self.embedding = nn.Embedding(cfg.padded_vocab_size, cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.padded_vocab_size, bias=False)

    def init_weights(self, seed=0):
        draw = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=draw)

    def forward(self, ids_BT):
        Bare.READ.append(ids_BT.shape)
        if torch.is_inference_mode_enabled():  # neither training nor validation
            (HERE / "evaluating").touch()
            if (HERE / "slow").exists():
                time.sleep(0.02)
        return self.head(self.embedding(ids_BT))

    def loss(self, ids_BT, targets_BT, reduction="mean"):
        logits = self.head(self.embedding(ids_BT)).flatten(0, 1)
        return F.cross_entropy(logits, targets_BT.flatten(), reduction=reduction)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run file over letters, own.py beside it; data that is made goes there too."""
    folder = tmp_path_factory.mktemp("eval")
    prepare_letters(folder, {"up": ("ABCD ", 20), "down": ("abcd ", 20)})
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    write_run(
        folder, "steps = 6", "rows = 2", "checkpoint_every = 2", "validate_every = 3",
        "checkpoints_kept = 9", 'loader.rest = "keep"',
    )  # fmt: skip
    some = yaml.safe_load((MINI / "core.yaml").read_text("utf-8"))
    some["icl_tasks"] = [t for t in some["icl_tasks"] if t["label"] in FEW]
    (folder / "few").mkdir()
    (folder / "few" / "core.yaml").write_text(yaml.safe_dump(some), "utf-8")
    for label in FEW:
        shutil.copy(MINI / f"{label}.jsonl", folder / "few")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITTLELM_DATA", str(folder / "prepared"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def trained(home):
    """A run of six steps that evaluated at two of them and at the end."""
    keys = "eval_every=2", f"eval_tasks={MINI}"
    train(run_of(home, "trained", *keys), quiet=True)
    return home / "trained"


@pytest.fixture(scope="module")
def bare(home):
    """The same with a model of one's own."""
    use = f"model.use={home / 'own.py'}:Bare"
    keys = use, "eval_every=6", f"eval_tasks={MINI}"
    train(run_of(home, "bare", *keys), quiet=True)
    return home / "bare"


def littlelm(*arguments):
    """Run the command in this process; return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(a) for a in arguments])
    return stopped.value.code


def stored(folder):
    """Return a folder's report."""
    return json.loads((Path(folder) / "report.json").read_text("utf-8"))


def timeless(record):
    return {k: v for k, v in record.items() if k != "seconds"}


def weights(run_dir):
    return (newest_checkpoint(run_dir) / "model.safetensors").read_bytes()


def wait_for(path, process):
    end = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists(), process.communicate()


# ---- In a run


def test_a_run_evaluates_after_its_checkpoints_and_trains_on_unchanged(
    home, monkeypatch
):
    found = []

    def watched(trainer, validation):
        folder = newest_checkpoint(trainer.run_dir)
        before = torch.get_rng_state()
        record = original(trainer, validation)
        same = torch.equal(torch.get_rng_state(), before)
        found.append((int(folder.name[-8:]), same, trainer.model.training))
        return record

    original = evaluation.evaluate_run
    monkeypatch.setattr(evaluation, "evaluate_run", watched)
    # 5 is the last step, and no multiple.
    keys = "steps=5", "schedule.total=6", f"eval_tasks={home / 'few'}"
    train(run_of(home, "watched", *keys, "eval_every=2"), quiet=True)
    assert found == [(2, True, True), (4, True, True), (5, True, True)]
    logged = records(home / "watched", "core")
    assert [record["step"] for record in logged] == [2, 4, 5]
    train(run_of(home, "plain", *keys), quiet=True)
    assert len(found) == 3, "eval_every is off unless it is asked for"
    with_it, without = ([r["loss"] for r in records(home / w)]
                        for w in ("watched", "plain"))  # fmt: skip
    assert with_it == without
    assert weights(home / "watched") == weights(home / "plain")
    for record in logged:
        report = stored(home / "watched" / "mini_core" / f"step_{record['step']:08d}")
        assert report["model"] == f"run, step {record['step']}"
        assert report["mean_of_tasks"] == record["mean_of_tasks"]
        assert [len(items) for items in report["items"].values()] == [12, 12, 12]
        assert (report["bits_per_byte"] != {}) == (record["step"] == 5)  # validated


def test_a_run_that_saves_only_its_end_saves_before_it_evaluates(home, monkeypatch):
    found = []
    monkeypatch.setattr(
        evaluation, "evaluate_run",
        lambda trainer, _: found.append(newest_checkpoint(trainer.run_dir).name),
    )  # fmt: skip
    keys = "checkpoint_every=-1", "eval_every=3", f"eval_tasks={home / 'few'}"
    train(run_of(home, "rarely", *keys), quiet=True)
    assert found == ["step_00000003", "step_00000006"]


def test_the_pages_show_the_score(trained):
    last = records(trained, "core")[-1]
    score = f"{last['core']:.4f}"
    assert last["suite"] == "mini CORE"
    assert len(last["tasks"]) == 22
    page = (trained / "report.html").read_text("utf-8")
    assert "mini CORE" in page
    assert score in page
    own = trained / "mini_core" / "step_00000006"
    assert score in (own / "report.html").read_text("utf-8")
    domains = records(trained, "validation")[-1]["domains"]
    bits = {name: value["bits_per_byte"] for name, value in domains.items()}
    assert stored(own)["bits_per_byte"] == bits


def test_nothing_is_evaluated_twice(home, trained, monkeypatch):
    calls = []
    original = evaluation.evaluate_run
    monkeypatch.setattr(
        evaluation, "evaluate_run", lambda *a: calls.append(a[0].step) or original(*a)
    )
    keys = "eval_every=2", f"eval_tasks={home / 'few'}"
    train(run_of(home, "twice", *keys, "stop_step=4"), quiet=True)
    train(run_of(home, "twice", *keys, "stop_step=4"), quiet=True)
    assert calls == [2, 4]
    train(run_of(home, "twice", *keys), quiet=True)
    assert calls == [2, 4, 6]
    assert [r["step"] for r in records(home / "twice", "core")] == [2, 4, 6]


def test_other_tasks_are_owed_once(home, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    few = f"eval_tasks={home / 'few'}"
    mini, three = f"eval_tasks={MINI}", "eval_max_per_task=3"
    for more in ((few, three), (few,), (few, three), (mini,), (few,)):
        train(run_of(home, tmp_path / "run", "eval_every=2", *more), quiet=True)
    shown = [r["tasks"].keys() for r in records(tmp_path / "run", "core")]
    assert [len(tasks) for tasks in shown] == [22, 22, 22, 3, 3]


def test_a_signal_ends_an_evaluation_which_the_run_then_owes(home, bare):
    """Prompt, with exit status 0; the same command evaluates the same weights."""
    use = f"model.use={home / 'own.py'}:Bare"
    keys = use, "eval_every=6", f"eval_tasks={MINI}"
    (home / "evaluating").unlink()
    (home / "slow").touch()  # the whole evaluation would take half a minute
    process = subprocess.Popen(
        command(home, home / "signal", *keys), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    wait_for(home / "evaluating", process)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 5
    assert process.returncode == 0, err
    assert "ended at 6 interrupted" in out
    assert "Traceback" not in err
    assert records(home / "signal", "end")[-1]["status"] == "interrupted"
    assert not records(home / "signal", "core")
    assert not (home / "signal" / "mini_core").exists()
    assert newest_checkpoint(home / "signal").name == "step_00000006"
    (home / "slow").unlink()
    assert not train(run_of(home, "signal", *keys), quiet=True).interrupted
    unbroken, owed = (records(w, "core") for w in (bare, home / "signal"))
    assert list(map(timeless, owed)) == list(map(timeless, unbroken))


def test_two_processes_log_the_record_of_one(home, trained):
    where = home / "two"
    shutil.copytree(trained, where)
    shutil.rmtree(where / "mini_core")
    kept = [r for r in read_metrics(where / "metrics.jsonl") if r["event"] != "core"]
    lines = "".join(json.dumps(record) + "\n" for record in kept)
    (where / "metrics.jsonl").write_text(lines, "utf-8")  # it owes the last one
    keys = "eval_every=2", f"eval_tasks={MINI}", "rows=1", "tokens_per_step=64"
    done = subprocess.run(
        command(home, where, *keys, ranks=2), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mini CORE at step 6") == 1
    one, two = records(trained, "core")[-1:], records(where, "core")
    assert list(map(timeless, one)) == list(map(timeless, two))
    one, two = (stored(w / "mini_core" / "step_00000006") for w in (trained, where))
    assert two["settings"]["world"] == 2
    for label, items in one["items"].items():
        assert choices(two["items"][label]) == choices(items)


def choices(items):
    return [(item["index"], item["choice"], item["correct"]) for item in items]


def test_a_sample_of_each_task(home, capsys):
    keys = "eval_every=6", "eval_max_per_task=5", f"eval_tasks={home / 'few'}"
    train(run_of(home, "sample", *keys))
    line = "exam: mini CORE, 15 items of 3 tasks, every 6 steps and at the end"
    assert line in capsys.readouterr().out.splitlines()
    step = home / "sample" / "mini_core" / "step_00000006"
    assert [path.name for path in step.iterdir()] == ["part"], "the whole's place"
    report = stored(step / "part" / "max_per_task_5")
    enough = "eval_max_per_task=12"  # items of each task
    train(run_of(home, "all", keys[0], enough, keys[2]))
    assert not stored(home / "all" / "mini_core" / "step_00000006")["sample"]
    tasks = load_tasks(home / "few")
    exams = {n: evaluation.exam_of(tasks, n) for n in (-1, 5, 12, 500)}
    assert exams[5] != exams[-1] == exams[12] == exams[500], "the same items"
    assert records(home / "sample", "core")[-1]["sample"]
    assert {(t["n"], t["of"]) for t in report["tasks"].values()} == {(5, 12)}
    assert not report["settings"]["legacy_pool"]


def test_a_run_scores_in_its_own_precision(home):
    keys = "precision.dtype=bf16", "eval_every=6", f"eval_tasks={home / 'few'}"
    train(run_of(home, "bf16", *keys), quiet=True)
    report = stored(home / "bf16" / "mini_core" / "step_00000006")
    assert report["settings"]["dtype"] == "bfloat16"
    model, tokenizer, *_ = load_checkpoint(home / "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = evaluate(model, tokenizer, load_tasks(home / "few"), context=32)
    assert report["items"] == json.loads(wanted.to_json())["items"]


def broken(folder, home, change):
    """Return a copy of the few tasks with one thing wrong."""
    shutil.copytree(home / "few", folder)
    change(folder)
    return folder


def forget(folder):
    (folder / "piqa.jsonl").unlink()


def shorten(folder):
    path = folder / "jeopardy.jsonl"
    path.write_text("\n".join(path.read_text("utf-8").splitlines()[:10]), "utf-8")


def spoil(folder):
    (folder / "winograd.jsonl").write_text('{"gold": 3}\n', "utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [(forget, "piqa lacks its file"), (spoil, "winograd.jsonl:1 lacks"),
     (shorten, "jeopardy wants 10 examples .* has 10 items"), (None, "no core.yaml")],
)  # fmt: skip
def test_tasks_that_cannot_work_are_refused_before_the_first_step(
    home, tmp_path, change, words, capfd
):
    folder = tmp_path / "tasks"
    if change:
        broken(folder, home, change)
    keys = "eval_every=6", f"eval_tasks={folder}"
    with pytest.raises(DataError, match=words) as error:
        train(run_of(home, tmp_path / "run", *keys), quiet=True)
    assert "\n" not in str(error.value)
    assert not read_metrics(tmp_path / "run" / "metrics.jsonl")
    train(
        run_of(home, tmp_path / "run", keys[1], "stop_step=1"), quiet=True
    )  # it is off
    assert littlelm("eval", tmp_path / "run", "--data", folder) == 1
    error = capfd.readouterr().err.strip()
    assert re.search(words, error), error
    assert "\n" not in error


def test_a_full_disk_keeps_no_tokens_and_ends_no_run(home, tmp_path, monkeypatch):
    (tmp_path / "core-tokens").write_text("no folder")
    monkeypatch.setenv("LITTLELM_DATA", str(tmp_path))
    keys = "eval_every=6", f"eval_tasks={home / 'few'}"
    with pytest.warns(UserWarning, match="not kept in .*core-tokens"):
        train(run_of(home, tmp_path / "run", *keys), quiet=True)
    assert len(records(tmp_path / "run", "core")) == 1


def test_a_long_evaluation_says_how_far_it_is(home, monkeypatch, capsys):
    monkeypatch.setattr("littlelm_core.report.eval_progress.LINE_EVERY", 0.0)
    keys = "eval_every=6", f"eval_tasks={home / 'few'}"
    train(run_of(home, "spoken", *keys))
    lines = re.findall(r"^piqa \d+/12, [\d.,]+ items/s, .* left$",
                       capsys.readouterr().out, re.MULTILINE)  # fmt: skip
    assert len(lines) == 12


# ---- By the command


def test_by_checkpoint_by_folder_and_by_name(home, trained, tmp_path, monkeypatch):
    """Each gives what the run itself measured at that step."""
    names = {
        trained / "checkpoints" / "step_00000004": 4,
        trained: 6,
        "tiny": 6,
    }
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "tiny")
    for number, (name, step) in enumerate(names.items()):
        out = tmp_path / str(number)
        assert littlelm("eval", name, "--data", MINI, "--out", out) == 0
        mine, logged = stored(out), stored(trained / "mini_core" / f"step_{step:08d}")
        assert mine["model"] == f"run, step {step}"
        assert mine["items"] == logged["items"]
        assert mine["core"] == logged["core"]
        assert sorted(p.name for p in out.iterdir()) == ["report.html", "report.json"]
    folder = tmp_path / "runs" / "tiny" / "mini_core" / "step_00000006"
    shutil.rmtree(folder.parent)
    assert littlelm("eval", "tiny", "--data", home / "few") == 0
    whole = (folder / "report.json").read_bytes()
    Journal(folder / "journal", "of a killed evaluation").close()
    parts = {
        "piqa": ["--tasks", "piqa"],
        "max_per_task_2": ["--max-per-task", 2],
        "context_24": ["--context", 24],
        "crop_plain": ["--crop", "plain"],
        "baselines_v2": ["--baselines", "v2"],
        "precision_bf16": ["--precision", "bf16"],
        "legacy_pool": ["--legacy-pool"],
        "piqa-legacy_nan": ["--legacy-nan", "--tasks", "piqa"],
    }
    before = {}
    for name, other in parts.items():
        assert littlelm("eval", "tiny", "--data", home / "few", *other) == 0
        assert stored(folder / "part" / name)["items"].keys() <= {*FEW}, other
        assert (folder / "report.json").read_bytes() == whole, other
        assert (folder / "journal" / "rank-0.jsonl").exists(), other
        for path, text in before.items():
            assert path.read_bytes() == text, f"{other} changed {path}"
        path = folder / "part" / name / "report.json"
        before[path] = path.read_bytes()
    assert {p.name for p in (folder / "part").iterdir()} == {*parts}
    # A limit above every task's items cuts nothing: the whole, in its own place.
    (folder / "report.json").unlink()
    assert littlelm("eval", "tiny", "--data", home / "few", "--max-per-task", 12) == 0
    assert not stored(folder)["sample"]
    assert {p.name for p in (folder / "part").iterdir()} == {*parts}


def test_the_report_of_another_exam_stays(home, tmp_path):
    """Other numbers, or other tasks of the same name: each beside the other."""
    keys = "eval_every=6", f"eval_tasks={home / 'few'}", "precision.dtype=bf16"
    train(run_of(home, "bf16", *keys), quiet=True)
    suite = home / "bf16" / "mini_core"
    logged = (suite / "step_00000006" / "report.json").read_bytes()
    assert json.loads(logged)["settings"]["dtype"] == "bfloat16"
    assert littlelm("eval", home / "bf16", "--data", home / "few") == 0
    other = tmp_path / "few"
    shutil.copytree(home / "few", other)
    lines = (other / "piqa.jsonl").read_text("utf-8").splitlines(keepends=True)
    (other / "piqa.jsonl").write_text("".join(lines[:-1]), "utf-8")
    assert littlelm("eval", home / "bf16", "--data", other) == 0
    assert (suite / "step_00000006" / "report.json").read_bytes() == logged
    beside = [path for path in suite.iterdir() if path.name != "step_00000006"]
    assert all(path.name.startswith("step_00000006-") for path in beside)
    found = [
        (r["settings"]["dtype"], r["tasks"]["piqa"]["n"]) for r in map(stored, beside)
    ]
    assert sorted(found) == [("float32", 11), ("float32", 12)]
    # The same exam once more, read in another way, takes its own place again.
    assert littlelm(
        "eval", home / "bf16", "--data", other, "--batch-tokens", 64
    ) == 0  # fmt: skip
    assert {*suite.iterdir()} == {*beside, suite / "step_00000006"}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("CORE", "core"),
        ("mini CORE", "mini_core"),
        ("tasks of my-own", "tasks_of_my_own"),
        ("../up", "up"),
        ("/abs/x", "abs_x"),
        ("Part", "tasks_part"),
        ("checkpoints", "tasks_checkpoints"),
        ("..", "tasks_"),
    ],
)
def test_no_name_of_tasks_leads_out_of_the_runs_folder(name, folder):
    assert evaluation.short(name) == folder


def test_a_part_is_named_by_what_was_asked():
    name = evaluation.part_name
    assert name([]) == name([], context=None, legacy_nan=False) == ""
    assert name(["b", "a"], legacy_nan=True, max_per_task=2) == (
        "part/a-b-legacy_nan-max_per_task_2"
    )
    odd = {name([label]) for label in ("a b", "a/b", "a-b")} | {name(["a", "b"])}
    assert len(odd) == 4, "labels of odd characters are one"
    assert len(name(["\u8a9e" * 95]).encode()) < 100
    labels = [f"a_long_label_{n:02}" for n in range(22)]
    many = {name(labels), name(labels[:-1]), name(labels, context=24)}
    assert len(many) == 3, "the ends of long names tell nothing apart"
    assert all(len(each) < 100 for each in many)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("", {}),
        ("--max-per-task 5", {"max_per_task": 5}),
        ("--context 24", {"context": 24}),
        ("--crop plain", {"crop": "plain"}),
        ("--crop shots", {"crop": "shots"}),
        ("--baselines v2", {"baselines": "v2"}),
        ("--max-per-task 11 --legacy-pool", {"max_per_task": 11, "legacy_pool": True}),
        ("--legacy-nan", {"legacy_nan": True}),
        ("--batch-tokens 64", {"batch_tokens": 64}),
        ("--precision bf16", {}),
    ],
)
def test_options_do_what_they_say(home, trained, tmp_path, options, keys):
    where = ["--data", home / "few", "--out", tmp_path]
    assert littlelm("eval", trained, *where, *options.split()) == 0
    model, tokenizer, *_ = load_checkpoint(trained)
    bf16 = "bf16" in options
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        wanted = evaluate(model, tokenizer, load_tasks(home / "few"), **keys)
    wanted, got = json.loads(wanted.to_json()), stored(tmp_path)
    for key in ("items", "settings", "mean_of_tasks", "baselines", "interval"):
        assert got[key] == wanted[key], key
    assert got["settings"]["dtype"] == ("bfloat16" if bf16 else "float32")


def test_some_tasks_are_no_core(trained, tmp_path, capfd):
    where = ["--data", MINI, "--out", tmp_path]
    assert littlelm("eval", trained, *where, "--tasks", "jeopardy, piqa") == 0
    assert list(stored(tmp_path)["tasks"]) == ["jeopardy", "piqa"]
    assert stored(tmp_path)["core"] is None
    assert "2 of 22 tasks: no mini CORE" in capfd.readouterr().out


def test_beside_another_report(home, trained, bare, tmp_path):
    other = bare / "mini_core" / "step_00000006" / "report.json"
    where = ["--data", MINI, "--out", tmp_path]
    assert littlelm("eval", trained, *where, "--against", other) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "run, step 6" in page
    assert f"{stored(other.parent)['core']:.4f}" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "piqqa"], "did you mean 'piqa'?"),
        (["--max-per-task", 0], "--max-per-task 0"),
        (["--max-per-task", -2], "--max-per-task -2"),
        (["--max-per-task", 3, "--legacy-pool"], "wants 10 examples"),
        (["--context", 0], "--context 0 must be"),
        (["--context", 33], "made for 32"),
        (["--crop", "bso"], "did you mean 'bos'?"),
        (["--crop", "none"], "the model reads no more than 32 tokens"),
        (["--baselines", "v3"], "valid: v1, v2"),
        (["--precision", "fp8"], "valid: auto, bf16, fp32"),
        (["--batch-tokens", 0], "--batch-tokens 0"),
        (["--data", "nowhere"], "nowhere has no core.yaml"),
        (["--out", "own.py"], "own.py/journal: "),
        (["--against", "none.json"], "none.json is no report"),
        (["--against", "own.py"], "own.py is no report"),
        (["--against", "few"], "few is no report of littlelm eval: Is a directory"),
        (
            ["--against", "half.json"],
            "half.json is no report of littlelm eval: it lacks",
        ),
        (["--against", "other.json"], "no task with the same data"),
        (["--tasks", " , "], "names no task"),
        (["--against", "new.json"], "it has the format 99"),
    ],
)
def test_a_wrong_option_is_one_line(home, trained, options, words, capfd, monkeypatch):
    monkeypatch.chdir(home)
    report = stored(trained / "mini_core" / "step_00000006")
    changed = {k: {**t, "sha256": "0"} for k, t in report["tasks"].items()}
    for name, content in (
        ("half", {"format": 1}), ("new", {**report, "format": 99}),
        ("other", {**report, "tasks": changed}),
    ):  # fmt: skip
        Path(f"{name}.json").write_text(json.dumps(content), "utf-8")
    where = [] if "--data" in options else ["--data", "few"]
    assert littlelm("eval", trained, *where, *options) == 1
    out, error = capfd.readouterr()
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
    # Most are refused before the model is loaded, and all before a table is printed.
    asks_the_model = "the model reads", "made for", "own.py/journal"
    assert out.count("\n") == any(word in error for word in asks_the_model)


def test_a_wrong_command_line_is_one_line(trained, capfd):
    for wrong in (["--max-per-task", "x"], ["--taks", "piqa"]):
        assert littlelm("eval", trained, *wrong) == 2
        error = capfd.readouterr().err
        assert "littlelm eval --help shows examples" in error
        assert error.count("\n") == 1


def test_a_wrong_model_is_one_line(home, trained, tmp_path, capfd):
    damaged = tmp_path / "run" / "checkpoints" / "step_00000006"
    shutil.copytree(trained / "checkpoints" / "step_00000006", damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    half = tmp_path / "half" / "checkpoints" / "step_00000006"
    shutil.copytree(damaged, half)
    (half / "tokenizer.json").unlink()
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("tinny", "did you mean 'tiny'?"), (damaged, "damaged"), (half, "incomplete"),
        (trained / "checkpoints" / "step_00000005", "no checkpoint"),
        (tmp_path / "empty", "no checkpoint"), (home / "own.py", "own.py"),
        (f"hf:{tmp_path}/nowhere", "is no folder"),
        (f"hf:{tmp_path}/empty", "has no config.json"),
    ):  # fmt: skip
        assert littlelm("eval", name, "--data", MINI) == 1
        error = capfd.readouterr().err
        assert error.startswith("error: ")
        assert words in error
        assert error.count("\n") == 1


def test_help_shows_examples(capfd):
    assert littlelm("eval", "--help") == 0
    out = capfd.readouterr().out
    examples = [x for x in out.splitlines() if x.startswith(("    littlelm eval ",))]
    assert len(examples) >= 4
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_output_fits_80_columns(home, trained, tmp_path, monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr("littlelm_core.cli.evaluate.console", console)
    monkeypatch.chdir(tmp_path)
    assert littlelm("eval", trained, "--data", MINI, "--out", "[red]") == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", written.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("choice" in line or " lm " in line for line in lines) >= 20
    assert lines[-2:] == ["page:   [red]/report.html", "report: [red]/report.json"]


# ---- A model of one's own, FP8, Hugging Face


def test_a_model_without_hidden_or_a_cache(home, bare, tmp_path):
    """Nor does it say its context: that is the run's."""
    report = stored(bare / "mini_core" / "step_00000006")
    assert report["settings"]["context"] == 32
    assert not report["settings"]["prefix_cache"]
    assert littlelm("eval", bare, "--data", MINI, "--out", tmp_path) == 0
    assert stored(tmp_path)["items"] == report["items"]
    model, *_ = load_checkpoint(bare)
    assert max(tokens for _, tokens in type(model).READ) <= 32


def test_a_checkpoint_of_an_fp8_run_evaluates_in_fp32(home, tmp_path):
    keys = "precision.use=fp8", "precision.dtype=fp32", "eval_every=6"
    run = run_of(home, tmp_path / "run", *keys, f"eval_tasks={home / 'few'}")
    train(run, quiet=True)
    where = ["--data", home / "few", "--out", tmp_path / "out"]
    assert littlelm("eval", tmp_path / "run", *where) == 0
    assert stored(tmp_path / "out")["settings"]["dtype"] == "float32"
    logged = stored(tmp_path / "run" / "mini_core" / "step_00000006")
    assert stored(tmp_path / "out")["items"] == logged["items"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny random Llama with a tokenizer of single bytes, as transformers saves."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({**vocab, "<s>": 256}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        bos_token_id=256, initializer_range=0.4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_hugging_face_folder(home, llama, tmp_path, monkeypatch):
    texts = {"code": ["def f(): pass\n" * 30, "x"], "docs": ["Zwölf Boxkämpfer."]}
    monkeypatch.setattr(corpus, "domains", lambda: list(texts))
    monkeypatch.setattr(corpus, "documents", lambda domain, split: texts[domain])
    monkeypatch.chdir(tmp_path)
    assert littlelm("eval", f"hf:{llama}", "--data", home / "few") == 0
    report = stored("runs/eval-tiny-llama/mini_core")
    assert report["settings"]["context"] == 128
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    wanted = evaluate(model, tokenizer, load_tasks(home / "few"), prefix_cache=False)
    for label, result in wanted.tasks.items():
        got = choices(report["items"][label])
        assert got == choices([item._asdict() for item in result.items])
    # Bits per byte by hand: rows of 128, each id predicted from those before it there.
    for domain, documents in texts.items():
        nats = size = 0
        for text in documents:
            ids = torch.tensor([256, *tokenizer(text)["input_ids"]])
            size += len(text.encode())
            for start in range(0, len(ids) - 1, 128):
                row = ids[start : start + 129]
                with torch.no_grad():
                    loss = model(row[None], labels=row[None]).loss
                nats += float(loss) * (len(row) - 1)
        bits = nats / math.log(2) / size
        assert report["bits_per_byte"][domain] == pytest.approx(bits, rel=1e-5)


def test_a_hugging_face_folder_that_is_not_whole(llama, home, tmp_path, capfd):
    for lost, word in (("model.safetensors", "model"), ("tokenizer.json", "tokenizer")):
        folder = tmp_path / word
        shutil.copytree(llama, folder)
        (folder / lost).unlink()
        assert littlelm("eval", f"hf:{folder}", "--data", home / "few") == 1
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert f"its {word} does not load" in error


# ---- Bits per byte beside it


def test_bits_are_of_whole_documents_up_to_a_sample(llama, monkeypatch):
    """In rows of at most 1024 tokens, for a model without a limit too."""
    taken, rows = [], []

    def documents(domain, split):
        for text in ("a" * 60, "b" * 3000, "c" * 5):
            taken.append(text[0])
            yield text

    monkeypatch.setattr(corpus, "domains", lambda: ["letters"])
    monkeypatch.setattr(corpus, "documents", documents)
    monkeypatch.setattr(evaluation, "TEXT_TOKENS", 62)
    model, tokenizer = evaluation.load_causal_lm(llama)
    read = model.hidden
    monkeypatch.setattr(model, "hidden", lambda x: rows.append(x.shape[1]) or read(x))
    for context, longest in ((None, 1024), (4096, 1024), (128, 128)):
        model.cfg.context = context
        assert evaluation.text_bits(model, tokenizer).keys() == {"letters"}
        assert (taken, max(rows), sum(rows)) == (["a", "b"], longest, 3060)
        taken.clear(), rows.clear()


def test_bits_per_byte_come_from_the_log_or_are_measured(home, trained, tmp_path):
    checkpoint = "checkpoints/step_00000006"
    shutil.copytree(trained / checkpoint, tmp_path / checkpoint)
    where = ["--data", home / "few", "--out", tmp_path / "out"]
    assert littlelm("eval", tmp_path, *where) == 0
    measured = stored(tmp_path / "out")["bits_per_byte"]
    domains = records(trained, "validation")[-1]["domains"]  # the whole split
    assert measured == {
        name: pytest.approx(domains[name]["bits_per_byte"], rel=1e-5)
        for name in ("up", "down")
    }
    # Two records of a step: that of the whole split comes second.
    logged = {name: {"bits_per_byte": 1.5} for name in ("up", "down")}
    lines = [
        {"event": "validation", "step": 6, "domains": domains},
        {"event": "validation", "step": 6, "domains": logged},
        {"event": "validation", "step": 3, "domains": domains},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, "utf-8")
    assert littlelm("eval", tmp_path, *where) == 0
    assert stored(tmp_path / "out")["bits_per_byte"] == {"up": 1.5, "down": 1.5}


def test_without_the_runs_data_there_is_a_score_all_the_same(home, trained, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_00000006"
    shutil.copytree(trained / "checkpoints" / "step_00000006", checkpoint)
    shutil.move(home / "data", home / "elsewhere")
    try:
        where = ["--data", home / "few", "--out", tmp_path / "out"]
        assert littlelm("eval", checkpoint, *where) == 0
    finally:
        shutil.move(home / "elsewhere", home / "data")
    assert stored(tmp_path / "out")["bits_per_byte"] == {}


def test_data_of_another_tokenizer_measures_nothing(trained, monkeypatch):
    model, tokenizer, run, _ = load_checkpoint(trained)
    data = evaluation.prepare_run(run)
    data = replace(data, tokenizer=Tokenizer({bytes([255 - i]): i for i in range(256)}))
    monkeypatch.setattr(evaluation, "prepare_run", lambda run: data)
    arguments = run, None, 6, World()
    assert evaluation.checkpoint_bits(model, tokenizer, *arguments) == {}
    assert evaluation.checkpoint_bits(model, data.tokenizer, *arguments) != {}


def test_a_copied_checkpoint_is_of_no_run_beside_it(
    home, trained, tmp_path, monkeypatch
):
    """Reports come to lie beside it; the log there is another run's."""
    copy = tmp_path / "home" / "saved" / "step_00000006"
    shutil.copytree(trained / "checkpoints" / "step_00000006", copy)
    logged = {"up": {"bits_per_byte": 1.5}, "down": {"bits_per_byte": 1.5}}
    record = {"event": "validation", "step": 6, "domains": logged}
    (tmp_path / "home" / "metrics.jsonl").write_text(json.dumps(record), "utf-8")
    monkeypatch.chdir(copy)
    assert littlelm("eval", ".", "--data", home / "few") == 0
    report = stored(copy.parent / "mini_core" / "step_00000006")
    assert report["bits_per_byte"].keys() == {"up", "down"}
    assert 1.5 not in report["bits_per_byte"].values()
    assert not (tmp_path / "home" / "mini_core").exists()


def test_a_log_of_the_first_process_speaks_for_all(trained, tmp_path, monkeypatch):
    """The others may have none on their disks, and must not wait for it."""
    asked = []

    class Of2(World):
        def sum(self, *values):
            asked.append(self.rank)
            return [1.0]

    def never(run):
        raise AssertionError("it measures, and waits for the first one's share")

    model, tokenizer, run, _ = load_checkpoint(trained)
    monkeypatch.setattr(evaluation, "prepare_run", never)
    arguments = model, tokenizer, run
    logged = evaluation.checkpoint_bits(*arguments, trained, 6, Of2(0, 2))
    assert logged.keys() == {"up", "down", "overall"}
    assert evaluation.checkpoint_bits(*arguments, tmp_path, 6, Of2(1, 2)) == {}
    assert asked == [0, 1], "both must take part"


def test_what_one_process_lacks_none_measures(trained):
    """Else the others wait for its share of the sum."""

    class Lacking(World):
        """The second of two processes has no data; neither has a log."""

        asked = 0

        def sum(self, *values):
            Lacking.asked += 1
            return [value + (Lacking.asked == 2) for value in values]

    model, tokenizer, run, _ = load_checkpoint(trained)
    arguments = model, tokenizer, run, None, 6
    assert evaluation.checkpoint_bits(*arguments, World()).keys() == {"up", "down"}
    assert evaluation.checkpoint_bits(*arguments, Lacking()) == {}


# ---- Killed, gone on with, spread


def test_killed_it_goes_on_where_it_was_or_begins_anew(
    home, bare, tmp_path, monkeypatch, capfd
):
    """Ctrl-C, then a kill: no item is scored twice, the report is an unbroken one."""
    out = tmp_path / "out"
    options = ["--data", MINI, "--out", out, "--batch-tokens", 1]
    start = [sys.executable, "-m", "littlelm_core", "eval", bare, *options]
    (home / "slow").touch()
    counts = []
    for number, resume in ((signal.SIGINT, []), (signal.SIGKILL, ["--resume"])):
        process = subprocess.Popen(
            list(map(str, [*start, *resume])), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        end = time.monotonic() + 60
        while recorded(out / "journal").total() < sum(counts) + 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        said, err = process.communicate(timeout=60)
        counts = [recorded(out / "journal").total()]
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command with --resume goes on" in said
            assert err.strip() == "error: interrupted"
    (home / "slow").unlink()
    assert 10 <= counts[0] < 264
    assert not (out / "report.json").exists()
    (out / "journal" / "mine.txt").write_text("no part of a journal")
    shutil.copytree(out, tmp_path / "again")

    judged = []
    original = core_eval._Finish.finish

    def judge(self, reader, example, by_row):
        judged.append((self.task.label, example.index))
        return original(self, reader, example, by_row)

    monkeypatch.setattr(core_eval._Finish, "finish", judge)
    whole = stored(bare / "mini_core" / "step_00000006")
    assert littlelm("eval", bare, *options, "--resume") == 0
    assert len(judged) == len({*judged}) == 264 - counts[0]
    assert stored(out)["items"] == whole["items"]
    assert stored(out)["core"] == whole["core"]
    # Its own files alone are taken away.
    assert [p.name for p in (out / "journal").iterdir()] == ["mine.txt"]

    judged.clear()
    options[3] = tmp_path / "again"
    assert littlelm("eval", bare, *options) == 0
    assert len(judged) == 264
    assert stored(tmp_path / "again")["items"] == whole["items"]

    judged.clear()
    capfd.readouterr()
    Journal(out / "journal", "of something else").close()
    options[3] = out
    assert littlelm("eval", bare, *options, "--resume") == 1
    error = capfd.readouterr().err
    assert "is of another model, tokenizer, data or rule" in error
    assert error.count("\n") == 1
    assert not judged


def test_items_outlive_a_report_that_could_not_be_written(home, trained, tmp_path):
    out, options = tmp_path / "out", ["--data", home / "few", "--out", tmp_path / "out"]
    (out / "report.json").mkdir(parents=True)
    assert littlelm("eval", trained, *options) == 1
    assert recorded(out / "journal") == dict.fromkeys(FEW, 12)
    (out / "report.json").rmdir()
    assert littlelm("eval", trained, *options, "--resume") == 0
    report = stored(out)
    assert report["tokens"]["run"] == 0
    assert [len(items) for items in report["items"].values()] == [12, 12, 12]
    assert not (out / "journal").exists()


def test_a_journal_survives_half_lines(tmp_path):
    book = Journal(tmp_path, "key")
    book.add(["piqa", 3, True])
    book.file.write('["piqa", 4, tr')
    book.close()
    book = Journal(tmp_path, "key")
    assert book.records == [["piqa", 3, True]]
    book.add(["piqa", 4, True])
    book.close()
    assert recorded(tmp_path) == {"piqa": 2}
    # A file whose first line was cut has no key there; it gets one when it goes on.
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"ke', "utf-8")
    Journal(tmp_path, "key").close()
    with pytest.raises(LittleLMError, match="another model"):
        Journal(tmp_path, "other")
    remove(tmp_path)
    assert not tmp_path.exists()
    remove(tmp_path)
    assert recorded(tmp_path) == {}


def test_two_processes_may_clear_one_journal(tmp_path, monkeypatch):
    def cleared_meanwhile(self, pattern):
        yield self / "rank-0.jsonl"
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", cleared_meanwhile)
    remove(tmp_path / "journal")


def test_processes_share_the_items_and_one_speaks(home, bare, tmp_path):
    arguments = ["eval", bare, "--data", MINI, "--out", tmp_path]
    start = [*torchrun(2), "-m", "littlelm_core", *arguments]
    done = subprocess.run(list(map(str, start)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.json") == 1
    assert done.stdout.count("on cpu: 264 items") == 1
    report, alone = stored(tmp_path), stored(bare / "mini_core" / "step_00000006")
    assert report["settings"]["world"] == 2
    for label, items in alone["items"].items():
        assert choices(report["items"][label]) == choices(items)
    assert not (tmp_path / "journal").exists()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are unknown")
def test_no_thread_outlives_the_processes(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import os\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from littlelm_core.report.evaluation import processes\n"
        "def gloo():\n"
        "    names = Path('/proc/self/task').glob('*/comm')\n"
        "    return [n for n in map(Path.read_text, names) if 'gloo' in n]\n"
        "with processes():\n"
        "    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())\n"
        "    assert gloo()\n"
        "assert not gloo(), gloo()\n",
        "utf-8",
    )
    done = subprocess.run([*torchrun(2), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_process_clears_the_disk_that_it_has(home, bare, tmp_path):
    """Two machines that share no disk: each has its part of the journal."""
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, sys\n"
        "from littlelm_core import cli\n"
        "os.chdir(os.environ['RANK'])\n"
        "cli.main(sys.argv[1:])\n",
        "utf-8",
    )
    for rank in (0, 1):
        journal = tmp_path / str(rank) / "out" / "journal"
        Journal(journal, "of another model", rank).close()
    start = [*torchrun(2), script, "eval", bare, "--data", home / "few", "--out", "out"]
    done = subprocess.run(
        list(map(str, start)), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "0" / "out")["settings"]["world"] == 2
    assert not list(tmp_path.glob("?/out/journal"))


# ---- How far it is


class Clock:
    """A time that passes when it is told."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("littlelm_core.report.eval_progress.time", found)
    return found


def test_in_a_pipe_a_line_every_ten_seconds(home, clock, capsys):
    tasks = [task for task in load_tasks(home / "few") if task.label == "piqa"]
    with EvalProgress(tasks, None) as progress:
        for _ in range(12):
            clock.now += 4
            progress("piqa", 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "piqa 3/12, 0.2 items/s, 36 s left", "piqa 6/12, 0.2 items/s, 24 s left",
        "piqa 9/12, 0.2 items/s, 12 s left", "piqa 12/12, 0.2 items/s, 0 s left",
    ]  # fmt: skip


def test_what_is_known_takes_no_time(home, clock, capsys):
    tasks = [task for task in load_tasks(home / "few") if task.label == "piqa"]
    with EvalProgress(tasks, 10, share=2, known={"piqa": 4}) as progress:
        for _ in range(2):  # this process's share of what is known
            progress("piqa", 1)
        clock.now += 12
        progress("piqa", 1)  # two items in twelve seconds; four are left
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "piqa 6/10, 0.2 items/s, 24 s left"


def test_a_bar_in_a_terminal_and_nothing_when_quiet(home, clock, monkeypatch, capsys):
    tasks = load_tasks(home / "few")
    with EvalProgress(tasks, None, quiet=True) as progress:
        clock.now += 50
        progress("piqa", 1)
    assert progress.bar is None
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(Console, "is_terminal", True)
    with EvalProgress(tasks, None) as progress:
        for label in FEW:
            progress(label, 12)
        (task,) = progress.bar.tasks
        assert task.finished
        assert task.description.startswith(f"{FEW[-1]} 12/12")
