"""Bad input through the real command: exit status 1 and one line that says what to do.

One test for each item of the list: unknown run or key, wrong type, missing file, empty
or binary text, a damaged shard, a vocabulary larger than the shard's, a checkpoint of
another model, a full disk while saving, data shorter than a row, an own part that does
not import or breaks its contract.
"""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from littlelm_core import cli, ingest
from littlelm_core.tokenizer import Tokenizer, train_bpe
from littlelm_core.trainer import load_checkpoint, newest_checkpoint

VOCABULARY = 300


def run_command(*arguments):
    """Run `littlelm` in this process; return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(a) for a in arguments])
    return stopped.value.code


@pytest.fixture
def refused(capfd):
    """Return a function: the command fails with one line that holds all the words."""

    def run(*arguments, words, started=False):
        capfd.readouterr()
        status = run_command(*arguments)
        out, err = capfd.readouterr()
        assert status == 1, f"exit status {status}: {out}{err}"
        assert "Traceback" not in out + err, out + err
        lines = err.strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1, f"{len(errors)} lines of error: {err}"
        assert started or lines == errors, f"more than the error: {err}"
        for word in words:
            assert word in errors[0], f"lacks {word!r}: {errors[0]}"
        return errors[0]

    return run


def sentences(seed, documents):
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    return [" ".join(draw.choices(words, k=120)) for _ in range(documents)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small prepared folder."""
    folder = tmp_path_factory.mktemp("data")
    texts = sentences(1, 60)
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    tokenizer = Tokenizer(train_bpe(texts, VOCABULARY - 4))
    ingest.prepare([source], folder / "out", tokenizer, workers=1, validation_share=0.1)
    return folder / "out"


RUN = """
steps = 4
rows = 2
checkpoint_every = 2
run_dir = "{folder}/run"
data.source = "{data}"
tokenizer.vocab_size = 300
precision.dtype = "fp32"
schedule.warmup = 1
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1
ffn_dim = 32
context = 16
[optimizer]
lr = 0.01
"""


@pytest.fixture
def run_file(tmp_path, prepared):
    """A run of four steps that takes a second, in a copy of the prepared folder."""
    shutil.copytree(prepared, tmp_path / "data")
    path = tmp_path / "small.toml"
    text = RUN.format(folder=tmp_path.as_posix(), data=(tmp_path / "data").as_posix())
    path.write_text(text, encoding="utf-8")
    return path


def test_the_small_run_itself_is_good(run_file, capfd):
    assert run_command("train", run_file) == 0, capfd.readouterr().err
    assert newest_checkpoint(run_file.parent / "run").name == "step_00000004"


# ---- The run


def test_an_unknown_run(refused):
    refused("train", "tinny", words=["'tinny'", "did you mean 'tiny'?"])
    refused("generate", "tinny", "a", words=["'tinny'", "did you mean 'tiny'?"])


def test_an_unknown_key(refused, run_file):
    for change, words in (
        ("stps=3", ["stps", "did you mean 'steps'?"]),
        ("model.layer=3", ["model.layer", "did you mean 'layers'?"]),
        ("optimizer.weight_deca=1.0", ["optimizer.weight_deca", "'weight_decay'"]),
        ("schedule.warmpu=3", ["schedule.warmpu", "'warmup'"]),
        ("precision.dtyp=fp32", ["precision.dtyp", "'dtype'"]),
        ("loader.sed=3", ["loader.sed"]),
        ("dim=3", ["dim", "'model.dim'"]),
    ):
        refused("train", run_file, change, words=words)


def test_a_wrong_type(refused, run_file):
    for change in (
        "steps=ten", "steps=1.5", "rows=0", "checkpoint_every=0", "model.dim=3.5",
        "model.layers=two", "optimizer.lr=0.1x", "schedule.warmup=1e", "clip=nan",
        "tokenizer.vocab_size=4k", "precision.dtype=3", "attention=3",
    ):  # fmt: skip
        refused("train", run_file, change, words=[change.partition("=")[0]])


def test_values_that_do_not_fit_together(refused, run_file):
    for change, words in (
        ("precision.dtype=fp17", ["fp17", "bf16"]),
        ("tokens_per_step=100", ["tokens_per_step", "96"]),
        ("model.heads=3", ["heads"]),
        ("schedule.warmup=400", ["warmup"]),
        ("attention=gqaa", ["gqaa", "'gqa'"]),
    ):
        refused("train", run_file, change, words=words)


def test_a_run_that_says_too_little(refused, tmp_path):
    path = tmp_path / "bare.toml"
    path.write_text("rows = 2\n", encoding="utf-8")
    refused("train", path, words=["lacks", "steps"])
    bare = "rows = 2\nsteps = 2\n"
    path.write_text(bare, encoding="utf-8")
    refused("train", path, words=["lacks", "tokenizer.vocab_size"])
    path.write_text(bare + "tokenizer.vocab_size = 300\n", encoding="utf-8")
    refused("train", path, words=["lacks", "model.dim"])


def test_a_missing_file(refused, run_file, tmp_path):
    refused("train", tmp_path / "none.toml", words=["none.toml", "small.toml"])
    refused("train", run_file, "data.source=no/where", words=["no/where", "prepare"])
    out = tmp_path / "out"
    refused("data", "prepare", tmp_path / "none.txt", "--out", out, words=["none.txt"])
    refused("generate", tmp_path / "none", "a", words=["none"])


# ---- The text


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "empty"), (b" \n\n ", "empty"), (b"\x7fELF\x00\xff\xfe\x00" * 99, "binary")],
    ids=["empty", "blank", "binary"],
)
def test_text_that_is_none(refused, tmp_path, prepared, content, word):
    (tmp_path / "text.txt").write_bytes(content)
    tokenizer = prepared / "tokenizer.json"
    refused(
        "data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "out",
        "--tokenizer", tokenizer, words=["text.txt", word], started=True,
    )  # fmt: skip
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_bad_record_is_counted_and_the_rest_is_kept(tmp_path, prepared, capfd):
    lines = [json.dumps({"text": t}) for t in sentences(2, 30)]
    lines[3:3] = ["{half", json.dumps({"text": 7}), json.dumps({"txt": "a"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    status = run_command(
        "data", "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out",
        "--tokenizer", prepared / "tokenizer.json",
    )  # fmt: skip
    said = "".join(capfd.readouterr())
    assert status == 0, said
    assert "3" in said
    assert "bad" in said, f"bad records are lost without a word: {said}"


# ---- Shards


def shards(run_file):
    return sorted((run_file.parent / "data").glob("train-*.shard"))


def test_a_truncated_shard(refused, run_file):
    path = shards(run_file)[0]
    path.write_bytes(path.read_bytes()[:-100])
    refused("train", run_file, words=[path.name, "truncated", "prepare"])
    path.write_bytes(b"")
    refused("train", run_file, words=[path.name, "prepare"])
    path.unlink()
    refused("train", run_file, words=[path.name])


def test_a_damaged_shard(refused, run_file):
    path = shards(run_file)[0]
    good = path.read_bytes()
    for place in (0, 20, 200, len(good) - 3):  # magic, header, ids, footer
        data = bytearray(good)
        data[place] ^= 1
        path.write_bytes(data)
        refused("train", run_file, words=[path.name, "prepare"], started=True)
        assert newest_checkpoint(run_file.parent / "run") is None


def test_a_vocabulary_larger_than_the_shards(refused, run_file):
    refused(
        "train", run_file, "tokenizer.vocab_size=4096", words=["4096", str(VOCABULARY)]
    )


def test_data_shorter_than_one_row(refused, run_file):
    refused(
        "train", run_file, "model.context=99999", words=["row", "100000", "context"]
    )


# ---- Checkpoints


@pytest.fixture
def trained(run_file):
    assert run_command("train", run_file, "steps=3") == 0
    return run_file


def test_a_folder_with_another_run(refused, trained):
    refused(
        "train",
        trained,
        "steps=3",
        "model.dim=64",
        words=["model.dim", "64", "run_dir"],
    )


def test_a_checkpoint_of_another_model(refused, trained, tmp_path):
    run_dir = tmp_path / "run"
    checkpoint = newest_checkpoint(run_dir)
    run = json.loads((checkpoint / "run.json").read_text("utf-8"))
    run["model"]["ffn_dim"] = 64
    text = json.dumps(run, indent=1)
    (checkpoint / "run.json").write_text(text, "utf-8")
    state = json.loads((checkpoint / "state.json").read_text("utf-8"))
    state["files"]["run.json"] = len(text)
    state["sha256"]["run.json"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state), "utf-8")
    refused("generate", checkpoint, "a", words=[checkpoint.name, "another model"])
    refused(
        "train", trained, "steps=3", "model.ffn_dim=64",
        words=[checkpoint.name, "another model"],
    )  # fmt: skip


def test_a_damaged_checkpoint(refused, trained, tmp_path, capfd):
    run_dir = tmp_path / "run"
    checkpoint = newest_checkpoint(run_dir)
    weights = checkpoint / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-10])
    refused("generate", checkpoint, "a", words=[checkpoint.name, "incomplete"])
    weights.write_bytes(b"\xff" * len(good))
    refused("generate", checkpoint, "a", words=["model.safetensors"])
    shutil.rmtree(run_dir / "checkpoints")
    refused("generate", run_dir, "a", words=["no checkpoint", "train"])


@contextlib.contextmanager
def no_space(monkeypatch, how):
    """Let writing fail as on a full disk: while a large file grows, or at its end."""
    if how == "at the flush":

        def full(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            yield
        return
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (how, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_space_while_saving_keeps_the_last_checkpoint(
    refused, run_file, monkeypatch, tmp_path
):
    assert run_command("train", run_file, "stop_step=2") == 0
    run_dir = tmp_path / "run"
    last = newest_checkpoint(run_dir)
    sizes = {p.name: p.stat().st_size for p in last.iterdir()}
    small, large = sizes["model.safetensors"], sizes["optimizer.pt"]
    assert 20_000 < small < large
    before = {p.name: p.read_bytes() for p in last.iterdir()}
    for how in (small // 2, (small + large) // 2, "at the flush"):
        with no_space(monkeypatch, how):
            refused("train", run_file, words=["cannot write", "step_00000004"],
                    started=True)  # fmt: skip
        assert newest_checkpoint(run_dir) == last
        assert {p.name: p.read_bytes() for p in last.iterdir()} == before
        assert not list((run_dir / "checkpoints").glob(".tmp*")), "a half one is left"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(run_dir)
    assert run_command("train", run_file) == 0, "it goes on when there is room again"


# ---- Own parts


OWN = '''
import torch
from torch import nn

class Narrow(nn.Module):
    """Another constructor than the kind's."""
    def __init__(self, width):
        super().__init__()

class Shapeless(nn.Module):
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w = nn.Linear(dim, ffn_dim)

    def forward(self, x_BTC):
        return self.w(x_BTC)[..., :3]

class Future(nn.Module):
    """Looks like a feed-forward part, and mixes tokens."""
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x_BTC):
        return self.down(self.up(x_BTC.flip(1)))
'''


def test_an_own_part_that_does_not_import(refused, run_file):
    own = run_file.parent / "own.py"
    refused("train", run_file, f"ffn.use={own}:Mine", words=["no file", "own.py"])
    own.write_text("import no_such_module\n", encoding="utf-8")
    for command in (("train", run_file, f"ffn.use={own}:Mine"),
                    ("check", "mlp", "--with", f"{own}:Mine")):  # fmt: skip
        refused(*command, words=["own.py", "no_such_module"])
    own.write_text("def half(:\n", encoding="utf-8")
    refused("train", run_file, f"ffn.use={own}:Mine", words=["own.py", "SyntaxError"])
    own.write_text(OWN, encoding="utf-8")
    refused("train", run_file, f"ffn.use={own}:Narow", words=["own.py", "'Narrow'"])


def test_an_own_part_that_breaks_its_contract(refused, run_file, capfd):
    own = run_file.parent / "own.py"
    own.write_text(OWN, encoding="utf-8")
    refused("train", run_file, f"ffn.use={own}:Narrow", words=["ffn", "dim, ffn_dim"])
    refused(
        "train", run_file, f"ffn.use={own}:Shapeless", words=["Error"], started=True
    )
    capfd.readouterr()
    assert run_command("check", "mlp", "--with", f"{own}:Future") == 1
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    *failed, last = out.strip().splitlines()
    assert failed
    assert all(line.startswith("FAIL  ") for line in failed)
    assert last.startswith("mlp: ")


def test_a_schedule_is_refused_before_the_data(refused, run_file, monkeypatch):
    monkeypatch.setattr("littlelm_core.ingest.prepare_run", None)
    refused("train", run_file, "schedule.warmup=400", words=["warmup"])
    own = run_file.parent / "own.py"
    own.write_text("def none(step, total, warmup):\n    pass\n")
    words = ["schedule.use", "None for step 0"]
    refused("train", run_file, f"schedule.use={own}:none", words=words)


def test_a_callback_without_hooks(refused, run_file):
    own = run_file.parent / "own.py"
    own.write_text("class Deaf:\n    pass\n")
    words = ["Deaf", "on_start", "littlelm_core.report.Callback"]
    refused("train", run_file, f'callback.use="{own}:Deaf"', words=words, started=True)


def test_a_mixture_that_cannot_be_drawn(refused, run_file):
    weighted = "mixture.use=weighted"
    refused("train", run_file, "mixture.use=temperature", words=["mixture", "weighted"])
    refused("train", run_file, "mixture.weights={a=1}", words=["mixture.weights"])
    for keys, words in (
        ("mixture.weights={kode=1}", ["mixture", "kode"]),
        ("mixture.weights={}", ["mixture", "weight"]),
        ("mixture.temperature=0", ["mixture.temperature", "above 0"]),
        ("mixture.when_exhausted=wrap", ["when_exhausted", "redistribute"]),
    ):
        refused("train", run_file, weighted, keys, words=words)


def test_a_run_dir_that_cannot_be_one(refused, run_file, tmp_path):
    (tmp_path / "file").write_text("text")
    for where in (tmp_path / "file", tmp_path / "file" / "run"):
        words = [f"cannot write {where}", "another folder"]
        refused("train", run_file, f"run_dir={where}", words=words, started=True)


@pytest.mark.skipif(os.name == "nt", reason="folders are locked through fcntl")
def test_two_processes_that_prepare_one_folder(refused, tmp_path):
    """The second would delete what the first is just writing."""
    source, out = tmp_path / "text.jsonl", tmp_path / "out"
    texts = sentences(5, 40)
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    holds = (
        "import sys, pathlib\n"
        "from littlelm_core.ingest.write import hold\n"
        "held = hold(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = ("data", "prepare", source, "--out", out, "--vocab-size", 300)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", holds, out], stdin=pipe, stdout=pipe, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        refused(*command, words=["another process", "another folder"])
        other.communicate("")
    assert run_command(*command) == 0


def test_a_source_without_a_name(refused, tmp_path, monkeypatch):
    """An unset variable: the working directory must not be read in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.txt").write_text("a text that nobody named " * 50)
    for source in ("", "code="):
        options = ("--out", tmp_path / "out", "--vocab-size", 300)
        refused("data", "prepare", source, *options, words=["names no file"])
    assert not (tmp_path / "out").exists()


def test_a_model_larger_than_the_memory(refused, run_file):
    change = "model.ffn_dim=99999999999999"
    words = ["not enough memory", "lower rows"]
    refused("train", run_file, change, words=words, started=True)


def test_a_warning_is_one_line(tmp_path):
    source = tmp_path / "few.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"ab {i}"}) + "\n" for i in range(30))
    )
    options = ("--out", tmp_path / "out", "--vocab-size", 4000)
    command = [sys.executable, "-m", "littlelm_core", "data", "prepare", source]
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("warning: the text has no more pairs")


def test_a_wrong_command_line(capfd):
    for arguments in (("trian", "tiny"), ("train",), ("train", "tiny", "--fast")):
        assert run_command(*arguments) == 2
        err = capfd.readouterr().err.strip().splitlines()
        assert len(err) == 1
        assert err[0].startswith("error: ")


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="tinny"):
        cli.main(["train", "tinny", "--debug"])


def test_the_module_is_the_command():
    assert Path(sys.modules["littlelm_core"].__file__).with_name("__main__.py").exists()


def test_an_optimizer_that_refuses_its_keys(refused, run_file):
    words = ["AdamW", "learning rate", "-1.0"]
    refused("train", run_file, "optimizer.lr=-1.0", words=words, started=True)
