"""The command itself: help, errors, a run from text to talk, and Ctrl-C."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from littlelm_core import cli
from littlelm_core.config import load_run

COMMANDS = (
    ["doctor"], ["train"], ["eval"], ["generate"], ["practice"], ["check"], ["bench"],
    ["data", "prepare"], ["book", "export"], ["book", "execute"], ["book", "check"],
    ["book", "build"],
)  # fmt: skip
SMALL = (
    "steps=12", "rows=4", "schedule.warmup=2", "tokenizer.vocab_size=300",
    "model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1",
    "model.ffn_dim=48", "model.context=32", "precision.compile=false",
    "checkpoint_every=4", "validate_every=-1", "sample_every=-1",
    "mixture.use=proportional",
)  # fmt: skip


def run(*arguments):
    """Run `littlelm` in this process; return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(a) for a in arguments])
    return stopped.value.code


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder of text from a seed."""
    folder = tmp_path_factory.mktemp("cli")
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    (folder / "text").mkdir()
    for number in range(60):
        text = " ".join(draw.choices(words, k=150))
        (folder / "text" / f"{number}.txt").write_text(text)
    out = folder / "prepared"
    arguments = ["--out", out, "--vocab-size", 300, "--workers", 1]
    assert run("data", "prepare", folder / "text", *arguments) == 0
    return out


@pytest.fixture(scope="module")
def trained(data):
    """A finished run on that folder."""
    run_dir = data.parent / "run"
    arguments = [*SMALL, f"data.source={data}", f"run_dir={run_dir}"]
    assert run("train", "tiny", *arguments) == 0
    return run_dir


# ---- Help and errors


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom littlelm_core.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as stopped: status = stopped.code\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'tiktoken'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"--help imports {done.stderr}"
    assert "train" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_examples(command, capsys):
    assert run(*command, "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"littlelm {' '.join(command)}" in text.split("Examples:")[1]


def test_examples_name_real_options(capsys):
    for command in COMMANDS:
        run(*command, "--help")
        text = capsys.readouterr().out
        examples = text.split("Examples:")[1].split("\n\n")[0]
        options = text.split("Options:")[1]
        own = [
            line
            for line in examples.splitlines()
            if line.strip().startswith((f"littlelm {' '.join(command)}", "--"))
        ]
        for option in re.findall(r"--[a-z-]+", " ".join(own)):
            assert option in options, f"{command}: no option {option}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "tiny"], ["trian", "'train'"]),
        (["data", "prepar"], ["prepar", "'prepare'"]),
        (["book", "exprot"], ["exprot", "'export'"]),
        (["train"], ["Missing argument", "littlelm train --help"]),
        (["train", "tiny", "--speed"], ["--speed"]),
        (["generate", "tiny", "x", "--top-p", "much"], ["--top-p"]),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, words, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    for word in words:
        assert word in error


def test_unknown_names_say_the_nearest(capsys):
    for arguments, nearest in (
        (["train", "tinny"], "tiny"),
        (["generate", "tinny", "x"], "tiny"),
        (["check", "atention"], "attention"),
        (["bench", "bpee"], "bpe"),
    ):
        assert run(*arguments) == 1
        error = capsys.readouterr().err.strip()
        assert f"did you mean {nearest!r}" in error
        assert "\n" not in error


def test_a_model_to_measure_is_refused_where_nothing_is_measured_with_it(capsys):
    for names in ([], ["fixes"], ["mixture"], ["bpe", "core"]):
        assert run("bench", *names, "--model", "hf:x") == 1
        assert "littlelm bench core" in capsys.readouterr().err


def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "littlelm_core", "train", "tinny"]
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 1
    assert len(plain.stderr.strip().splitlines()) == 1
    for extra, environment in ((["--debug"], {}), ([], {"LITTLELM_DEBUG": "1"})):
        done = subprocess.run(
            [*command, *extra],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        assert "Traceback" in done.stderr
        assert done.returncode == 1


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise RuntimeError("the disk\nis on fire")

    monkeypatch.setattr("littlelm_core.doctor.show", fail)
    assert run("doctor") == 1
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    path = re.search(r"traceback in (\S+)\)", error).group(1)
    with open(path) as file:  # noqa: PTH123
        assert "on fire" in file.read()
    os.unlink(path)  # noqa: PTH108


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            ModuleNotFoundError("No module", name="datasets"),
            "datasets is not installed",
        ),
    ],
)
def test_errors_of_the_system_are_one_line(error, words, monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr("littlelm_core.doctor.show", fail)
    assert run("doctor") == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ")
    assert words in message
    assert "\n" not in message


def test_threads_wait_quietly():
    code = "from littlelm_core.cli import main; import os\ntry: main(['--help'])\n"
    code += "except SystemExit: print(os.environ['OMP_WAIT_POLICY'])"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split()[-1] == "PASSIVE"


# ---- From text to talk


def test_train_says_sizes_first_and_scores_last(data, tmp_path, capfd):
    run_dir = tmp_path / "run"
    arguments = [*SMALL, f"data.source={data}", f"run_dir={run_dir}"]
    assert run("train", "tiny", *arguments) == 0
    out = capfd.readouterr().out
    before, _, after = out.partition("step 1/12")
    assert "parameters" in before
    assert "to do: 12 steps" in before
    assert "bits per byte" in after
    assert "bigram" in after
    assert "report.html" in after
    assert "step_00000012" in after
    assert f"littlelm generate {run_dir}" in after
    assert (run_dir / "report.html").is_file()


def test_generate_streams_and_repeats(trained, capfd):
    how = ["--max-new-tokens", 30, "--seed", 5]
    texts = []
    for extra in ([], [], ["--no-cache"], ["--seed", 6]):
        assert run("generate", trained, "abc", *how, *extra) == 0
        out = capfd.readouterr()
        assert out.out.startswith("abc")
        assert "step 12" in out.err
        texts.append(out.out)
    assert texts[0] == texts[1] == texts[2], "same seed, other text"
    assert texts[3] != texts[0], "another seed, same text"
    # Longer than the context of 32: it slides.
    assert run("generate", trained, "abc", "--max-new-tokens", 100) == 0


def test_generate_takes_a_checkpoint_and_stops(trained, capfd):
    checkpoint = trained / "checkpoints" / "step_00000012"
    how = ["--max-new-tokens", 25, "--temperature", 0]
    assert run("generate", checkpoint, "abc", *how) == 0
    whole = capfd.readouterr().out.removeprefix("abc").rstrip("\n")
    stop = whole[len(whole) // 2 :][:2]
    assert run("generate", checkpoint, "abc", *how, "--stop", stop) == 0
    cut = capfd.readouterr().out.removeprefix("abc").removesuffix("\n")
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "-3"], "top_k"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
    ],
)
def test_generate_refuses_wrong_settings(trained, extra, word, capsys):
    assert run("generate", trained, "abc", *extra) == 1
    error = capsys.readouterr().err.strip()
    assert word in error
    assert "\n" not in error


def test_generate_before_training_says_so(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert run("generate", tmp_path, "abc") == 1
    assert "no checkpoint" in capsys.readouterr().err


def test_ctrl_c_saves_and_says_how_to_go_on(data, tmp_path):
    run_dir = tmp_path / "run"
    changes = [*SMALL, "steps=4000", f"data.source={data}", f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "littlelm_core", "train", "tiny", *changes]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log, end = run_dir / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if '"train"' in log.read_text():
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "Traceback" not in out
    again = next(x for x in out.splitlines() if x.startswith("to go on: "))
    assert again.startswith("to go on: littlelm train tiny steps=12")
    steps = [json.loads(x)["step"] for x in log.read_text().splitlines() if x]
    saved = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    assert int(saved.name[5:]) == steps[-1], "the last step was not saved"
    # The printed command, with an end in sight.
    last = steps[-1] + 2
    rest = again.removeprefix("to go on: littlelm ").split()
    assert run(*rest, f"stop_step={last}") == 0
    assert (run_dir / "checkpoints" / f"step_{last:08d}").is_dir()


def test_overrides_reach_the_run():
    assert load_run("tiny", ["steps=7"]).steps == 7


def test_check_takes_an_own_part(tmp_path, capfd):
    good = "from littlelm_core.generate import sample as mine\n"
    bad = "def mine(logits, *a, **k): return logits.argmax(-1)\n"
    for text, status in ((good, 0), (bad, 1)):
        (tmp_path / f"part{status}.py").write_text(text)
        use = f"{tmp_path / f'part{status}.py'}:mine"
        assert run("check", "sampling", "--with", use) == status
    assert "FAIL" in capfd.readouterr().out


def test_book_export_is_forwarded(capfd):
    assert run("book", "export", "07", "--check") == 0
    assert run("book", "export", "88") == 1
    assert "88" in capfd.readouterr().err
