"""The README's commands: they name what exists, and they run as a newcomer runs them.

The two blocks under "## Quick start" run in a fresh virtual environment, in an empty
folder, from a clone of this repository, when LITTLELM_README=1. That takes minutes (the
second block is this very test suite, without this test), so CI sets it once.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from littlelm_core import bench, cli, config
from littlelm_core.report import ablations

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
WINDOWS = sys.platform == "win32"


def section(title):
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    assert found, f"README.md has no section '## {title}'"
    return found[1]


def bash_blocks(text):
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)


def commands(text):
    """Every shell line of the fenced blocks, with continued lines joined."""
    for block in bash_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for part in " ".join(shlex.quote(w) for w in words).split(" '&&' "):
                if part:
                    yield shlex.split(part)


def subcommands(command, prefix=()):
    """Return the names of all commands, such as ("data", "prepare")."""
    found = {prefix} if prefix else set()
    for name, inner in getattr(command, "commands", {}).items():
        found |= subcommands(inner, (*prefix, name))
    return found


def test_the_quick_start_is_two_blocks():
    blocks = bash_blocks(section("Quick start"))
    assert len(blocks) == 2, "one block runs the main job, one the tests"
    run, tests = blocks
    assert "littlelm train tiny" in run
    assert "littlelm generate" in run, "the newcomer wants to see a sample"
    assert "-m venv" in run
    assert re.search(r"pip install .*\[test\]", tests)
    assert "pytest" in tests


def test_every_command_of_the_readme_exists():
    known = subcommands(typer.main.get_command(cli.app))
    assert ("train",) in known
    used = [
        words[1:]
        for words in commands(README.read_text(encoding="utf-8"))
        if words[0] == "littlelm"
    ]
    text = README.read_text(encoding="utf-8")
    inline = re.findall(r"`littlelm ([^`\n]+)`", text)
    used += [shlex.split(line) for line in inline]
    used += [
        words[words.index("littlelm_core") + 1 :]
        for words in commands(text)
        if "littlelm_core" in words
    ]
    assert len(used) >= 3
    for words in used:
        name = tuple(words[:1])
        if any(len(k) > 1 and k[:1] == name for k in known):
            name = tuple(words[:2])
        if name and not name[0].startswith("-"):
            assert name in known, f"README.md: no command littlelm {' '.join(name)}"


def test_every_run_key_and_extra_of_the_readme_exists():
    text = README.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    named = set(re.findall(r"\.\[([\w,-]+)\]", text))
    assert named, "the README installs no extra"
    for names in named:
        assert set(names.split(",")) <= extras, f"README.md: no extra [{names}]"
    for words in commands(text):
        if words[:2] == ["littlelm", "train"]:
            own = any(".py:" in word for word in words)  # a file of the reader
            if not own:
                config.load_run(words[2], [w for w in words[3:] if "=" in w])
        for word in words:
            is_path = re.fullmatch(
                r"(chapters|tests|data|littlelm_core)/[\w./-]+", word
            )
            if is_path and "prepared" not in word:
                assert (ROOT / word).exists(), f"README.md: there is no {word}"


def test_every_link_and_picture_of_the_readme_exists():
    text = README.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    targets += re.findall(r"(?:src|href|srcset)=\"([^\"#]+)\"", text)
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    assert re.search(r"\.(svg|png)\b", " ".join(local)), "the README has no picture"
    for target in local:
        assert (ROOT / target).exists(), f"README.md: there is no {target}"


@pytest.mark.skipif(
    os.environ.get("LITTLELM_README") != "1",
    reason="minutes: CI sets LITTLELM_README=1 once",
)
@pytest.mark.skipif(WINDOWS, reason="the README's blocks are for a Unix shell")
def test_a_newcomer_runs_the_two_commands(tmp_path):
    clone = tmp_path / "littlelm"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"torch=={torch_version()}\n")
    keep = ("HOME", "LANG", "LC_ALL", "PATH", "SSL_CERT_FILE", "TMPDIR", "USER")
    environment = {
        k: v for k, v in os.environ.items() if k in keep or k.startswith("PIP_")
    }
    # A newcomer's python3 is the one under this, not the environment around it.
    base = Path(sys._base_executable).resolve().parent
    environment |= {
        "PATH": f"{base}{os.pathsep}{environment['PATH']}",
        "PIP_CONSTRAINT": str(constraints),
        "PIP_QUIET": "2",  # leave the last lines to what failed
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TERM": "dumb",
    }
    outputs = []
    for number, block in enumerate(bash_blocks(section("Quick start"))):
        script = local(block)
        activate = "" if number == 0 else ". .venv/bin/activate\n"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", activate + script],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2400,
        )
        said = done.stdout[-6000:] + done.stderr[-6000:]
        assert done.returncode == 0, f"block {number + 1} of the README fails:\n{said}"
        outputs.append(done.stdout + done.stderr)
    assert (clone / "runs/tiny/report.html").is_file()
    assert "bits per byte" in outputs[0]
    assert re.search(r"\d+ passed", outputs[1]), "the tests did not run"
    shutil.rmtree(clone)


def local(block):
    """Leave out fetching the repository: the test stands in its clone already."""
    lines = [
        line for line in block.splitlines() if not re.match(r"\s*(git clone|cd )", line)
    ]
    return "\n".join(lines)


def torch_version():
    """The build of torch that runs this: with its index, the CPU build stays one."""
    import torch

    return torch.__version__


def test_the_picture_is_the_chapters_own():
    # GitHub shows no notebook outputs on the front page, so the README has a copy.
    text = README.read_text(encoding="utf-8")
    picture = re.search(r"!\[(.+?)\]\((.+?)\)", text, re.S)
    assert picture, "the README shows no picture"
    assert len(picture[1]) > 40, "the picture needs an alt text"
    notebook = json.loads((ROOT / "chapters/00_config.ipynb").read_text("utf-8"))
    figures = [
        "".join(output["data"]["image/svg+xml"]).rstrip()
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "image/svg+xml" in output.get("data", {})
    ]
    copy = (ROOT / picture[2]).read_text(encoding="utf-8").rstrip()
    assert copy == figures[0], "copy chapter 00's first figure to " + picture[2]


def test_the_table_of_chapters_is_the_chapters_own():
    text = README.read_text(encoding="utf-8")
    for path in sorted((ROOT / "chapters").glob("[0-9][0-9]_*.md")):
        chapter = path.read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", chapter, re.M)[1]
        needs, minutes = re.search(
            r"^Prerequisites: (.+?) · about (\d+) minutes", chapter, re.M
        ).groups()
        link = f"chapters/{path.stem}.ipynb"
        row = f"| {path.stem[:2]} [{title}]({link}) | {needs} | {minutes} |"
        assert row in text.splitlines(), f"README.md lacks the row {row}"


def test_the_speeds_are_those_of_the_files_that_are_named():
    text = README.read_text(encoding="utf-8")
    names = re.findall(r"`(data/benchmarks/[\w.-]+\.json)`", text)
    files = [json.loads((ROOT / name).read_text(encoding="utf-8")) for name in names]
    rows = [row for measured in files for row in measured["rows"]]
    assert len(rows) >= 11, "a part of the bench was not run"
    for row in rows:
        verdict = "met" if row["passes"] else "missed"
        ours = f"{bench.short(row['ours'])} {row['unit']}"
        peer = "the bar itself" if row["theirs"] is None else row["peer"]
        ratio, bar = f"{row['ratio']:.2f}x", f"{row['bar']:.2f}x, {verdict}"
        line = f"| {row['what']} | {ours} | {peer} | {ratio} | {bar} |"
        assert line in text.splitlines(), f"README.md lacks the row {line}"


def test_the_ladder_is_the_measured_one():
    stored = ablations.load("fixes")
    rows = section("What the five fixes are worth").splitlines()
    for arm in ablations.LADDER:
        scores = ablations.scores(stored, arm).values()
        cells = [ablations.LABELS[arm], f"{sum(scores) / len(scores):.3f}"]
        gain = ablations.effect(stored, ablations.BEFORE[arm], arm)
        cells.append(f"{gain.mean:+.3f} ± {gain.spread:.3f}")
        cells.append(f"{ablations.cost(stored, arm):.2f}x")
        row = "| " + " | ".join(cells) + " |"
        assert row in rows, f"README.md lacks the row {row}"
