"""`data prepare core`: the bundle of CORE's tasks from a local server, or by hand.

Small files stand for the published ones, by sums of their own in the table; where
../shared/core is, the real files are packed, served and compared too.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import yaml
from file_server import serving

from littlelm_core import cli
from littlelm_core.config import DataError
from littlelm_core.ingest import core_bundle, download
from littlelm_core.ingest.core_bundle import core_folder, prepare_core
from littlelm_core.ingest.core_table import FILES, TASKS, URL, core_yaml

ZIP = ("", "eval_bundle.zip")
REAL = Path(__file__).resolve().parents[3] / "shared" / "core"
PUBLISHED = dict(FILES)  # before a test puts others there
real = pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/core here")


def digest(content):
    return hashlib.sha256(content).hexdigest()


def git_blob(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def bundle(contents, folder="eval_bundle/eval_data/", more=()):
    """Return a zip with the files in the bundle's layout; more: put in first."""
    out = BytesIO()
    with ZipFile(out, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("eval_bundle/core.yaml", "icl_tasks: []\n")
        for path, content in more:
            archive.writestr(path, content)
        for name, content in contents.items():
            archive.writestr(folder + PUBLISHED[name].member, content)
    return out.getvalue()


@pytest.fixture
def small(monkeypatch):
    """Files of a few kB in place of the published ones; copa and piqa of one size."""
    contents = {}
    for number, (name, file) in enumerate(FILES.items()):
        records = 3 if name in ("copa.jsonl", "piqa.jsonl") else 4 + number
        lines = [json.dumps({"query": f"{name[:4]} {n} " * 9}) for n in range(records)]
        content = contents[name] = "\n".join(lines).encode() + b"\n"
        changed = file._replace(
            size=len(content),
            records=records,
            git_blob_sha1=git_blob(content),
            sha256=digest(content),
        )
        monkeypatch.setitem(FILES, name, changed)
    assert len(contents["copa.jsonl"]) == len(contents["piqa.jsonl"])
    return contents


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(download, "FIRST_WAIT", 0.001)
    with serving() as hub:
        monkeypatch.setenv("LITTLELM_CORE_URL", f"{hub.url}/{ZIP[1]}")
        yield hub


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("LITTLELM_DATA", str(tmp_path / "data"))
    return SimpleNamespace(
        out=tmp_path / "data" / "core",
        zip=tmp_path / "data" / "downloads" / "core" / ZIP[1],
    )


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def there(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def complete(folder, contents):
    found = there(folder)
    table = yaml.safe_load(found.pop("core.yaml"))
    return found == contents and table == yaml.safe_load(core_yaml())


def stamps(folder):
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}


def run_command(*arguments):
    """Run `data prepare` and return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["data", "prepare", *arguments])
    return stopped.value.code


def fails(*arguments, **keywords):
    with pytest.raises(DataError) as caught:
        prepare_core(*arguments, **keywords)
    (line,) = str(caught.value).splitlines()
    return line


# ---- What comes out


def test_the_folder_holds_the_files_and_the_table(hub, place, small):
    hub.files[ZIP] = bundle(small)
    assert prepare_core() == core_folder() == place.out
    assert complete(place.out, small)
    assert not place.zip.exists(), "the zip stays though it was not asked for"
    table = yaml.safe_load((place.out / "core.yaml").read_text("utf-8"))
    assert [*table] == ["icl_tasks"]
    assert [t["label"] for t in table["icl_tasks"]] == [t.label for t in TASKS]
    for task in table["icl_tasks"]:
        content = small[task["dataset_uri"]]
        assert task["git_blob_sha1"] == git_blob(content)
        assert task["num_examples"] == content.count(b"\n")


def test_a_finished_folder_is_not_touched_and_nothing_is_fetched(hub, place, small):
    hub.files[ZIP] = bundle(small)
    prepare_core(keep=True)
    assert place.zip.read_bytes() == hub.files[ZIP]
    before, asked = stamps(place.out), len(hub.requests)
    prepare_core()
    assert stamps(place.out) == before
    assert len(hub.requests) == asked
    assert place.zip.exists(), "what was kept is not this call's to delete"


def test_a_half_folder_is_mended_from_a_kept_bundle(hub, place, small):
    hub.files[ZIP] = bundle(small)
    prepare_core(keep=True)
    before, asked = stamps(place.out), len(hub.requests)
    (place.out / "squad.jsonl").unlink()
    altered = small["coqa.jsonl"].replace(b"coqa 1", b"coqa 2")
    assert len(altered) == len(small["coqa.jsonl"])
    (place.out / "coqa.jsonl").write_bytes(altered)
    prepare_core(keep=True)
    assert complete(place.out, small)
    after = stamps(place.out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"squad.jsonl", "coqa.jsonl"}
    assert len(hub.requests) == asked


def test_files_are_found_by_their_content(hub, place, small):
    decoys = [("x/eval_data/commonsense_reasoning/copa.jsonl", small["piqa.jsonl"])]
    decoys += [("__MACOSX/._squad.jsonl", b"x" * len(small["squad.jsonl"]))]
    decoys += [("empty.jsonl", b"")]
    hub.files[ZIP] = bundle(small, "another/place/", decoys)
    prepare_core()
    assert complete(place.out, small)


def test_a_folder_of_other_data_is_refused(hub, place, small):
    hub.files[ZIP] = bundle(small)
    table = yaml.safe_load(core_yaml())
    other = yaml.safe_dump({"name": "mini CORE", **table}).encode()
    baseline = core_yaml().replace("v1: 62", "v1: 50").encode()
    for content in (other, baseline, b"icl_tasks: [", b"\xff"):
        put(place.out / "core.yaml", content)
        assert "is not the table of CORE" in fails()
        assert there(place.out) == {"core.yaml": content}
    shutil.rmtree(place.out)
    put(place.out / "manifest.json", b"{}")
    assert "holds shards" in fails()
    assert hub.requests == []
    again = yaml.safe_dump(table, sort_keys=True).encode()  # the same in other words
    put(place.out.with_name("same") / "core.yaml", again)
    prepare_core(place.out.with_name("same"))
    assert there(place.out.with_name("same"))["core.yaml"] == again


# ---- Downloads that break


@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_download_goes_on_where_it_stopped(hub, place, small, reset):
    hub.files[ZIP], hub.reset, hub.broken[ZIP[1]] = bundle(small), reset, 3
    prepare_core()
    assert complete(place.out, small)
    size = len(hub.files[ZIP])
    assert hub.given[ZIP] == size, "bytes came twice"
    asked = [how for _, how in hub.requests]
    assert asked[:3] == ["HEAD", "", f"bytes={size // 2}-"]
    assert len(asked) == 5


def test_a_partial_file_is_used_and_one_of_another_bundle_is_replaced(
    hub, place, small
):
    hub.files[ZIP] = bundle(small)
    partial = place.zip.with_name(ZIP[1] + ".partial")
    put(partial, hub.files[ZIP][:1000])
    prepare_core()
    assert complete(place.out, small)
    assert hub.given[ZIP] == len(hub.files[ZIP]) - 1000
    shutil.rmtree(place.out)
    put(partial, bytes(1000))
    prepare_core()
    assert complete(place.out, small)


def test_a_damaged_bundle_is_fetched_again_once(hub, place, small):
    hub.files[ZIP], hub.wrong[ZIP[1]] = bundle(small), 1
    prepare_core()
    assert complete(place.out, small)
    assert [how for _, how in hub.requests] == ["HEAD", ""] * 2


@pytest.mark.parametrize("change", ["altered", "missing"])
def test_a_member_that_is_not_the_published_one_is_named(hub, place, small, change):
    changed = dict(small)
    member = PUBLISHED["winograd.jsonl"].member
    if change == "altered":
        changed["winograd.jsonl"] = small["winograd.jsonl"].replace(b"9", b"8") + b"\n"
        word = f"has an altered eval_bundle/eval_data/{member}"
    else:
        del changed["winograd.jsonl"]
        word = f"has no {member}"
    hub.files[ZIP] = bundle(changed)
    line = fails()
    assert word in line
    assert "came twice" in line
    assert f"{hub.url}/{ZIP[1]}" in line
    assert not (place.out / "winograd.jsonl").exists()
    assert not (place.out / "core.yaml").exists()
    assert not place.zip.exists()
    put(place.zip, hub.files[ZIP])  # the user's own stays, and is told of
    line = fails()
    assert word in line
    assert "delete it" in line
    assert place.zip.read_bytes() == hub.files[ZIP]


def test_what_is_no_zip_or_not_there_is_one_line(hub, place, small):
    hub.files[ZIP] = b"<html>sign in to this network</html>"
    assert "is no whole zip" in fails()
    del hub.files[ZIP]
    line = fails()
    assert "answers 404" in line
    assert str(place.zip) in line
    hub.files[ZIP], hub.busy[ZIP[1]] = bundle(small), download.ATTEMPTS
    assert "503" in fails()
    hub.busy[ZIP[1]] = download.ATTEMPTS - 1
    prepare_core()
    assert complete(place.out, small)


def test_a_disk_that_is_too_small_is_refused_before_anything_comes(
    hub, place, small, monkeypatch
):
    hub.files[ZIP] = bundle(small)
    free = len(hub.files[ZIP]) + sum(map(len, small.values())) - 1
    usage = SimpleNamespace(total=10**9, used=0, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = fails()
    assert "of the bundle and" in line
    assert line.endswith("give folders on a larger disk")
    assert hub.given[ZIP] == 0
    usage.free += 1
    prepare_core()


# ---- Without a network


def test_the_published_address_is_asked_by_default(place, small, monkeypatch):
    asked = []

    def offline(file):
        asked.append(file.url)
        raise download.Unreachable(f"cannot reach {file.url}")

    monkeypatch.delenv("LITTLELM_CORE_URL", raising=False)
    monkeypatch.setattr(core_bundle, "sized", offline)
    line = fails()
    assert asked == [URL]
    assert URL in line


def test_without_a_network_one_line_says_what_to_put_where(place, small, monkeypatch):
    monkeypatch.setenv("LITTLELM_CORE_URL", "http://127.0.0.1:9/eval_bundle.zip")
    monkeypatch.setattr(download, "FIRST_WAIT", 0.001)
    line = fails()
    for word in (
        "http://127.0.0.1:9/eval_bundle.zip",
        f"put it into {place.zip.parent}",
    ):
        assert word in line
    assert not place.out.exists()
    content = bundle(small)
    put(place.zip, content)
    prepare_core()
    assert complete(place.out, small)
    assert place.zip.read_bytes() == content, "deleted the user's file"
    elsewhere = place.out.with_name("elsewhere")
    put(elsewhere / "eval_bundle.zip", content)
    place.zip.unlink()
    prepare_core(place.out.with_name("other"), downloads=elsewhere)
    assert complete(place.out.with_name("other"), small)


def test_files_put_by_hand_need_no_network(place, small, monkeypatch):
    monkeypatch.setenv("LITTLELM_CORE_URL", "http://127.0.0.1:9/eval_bundle.zip")
    monkeypatch.setattr(download, "FIRST_WAIT", 0.001)
    for name, content in small.items():
        put(place.out / name, content)
    before = stamps(place.out)
    prepare_core()
    assert complete(place.out, small)
    assert {**stamps(place.out), **before} == stamps(place.out)


# ---- Killed

DRIVER = """
import json, os, signal, sys
from littlelm_core.ingest import core_bundle
from littlelm_core.ingest.core_table import FILES, File
FILES.update({n: File(*f) for n, f in json.load(open(sys.argv[1])).items()})
atomic_file, left = core_bundle.atomic_file, [int(sys.argv[2])]

class Dying:
    def __init__(self, path):
        self.path, self.whole = path, atomic_file(path)
    def __enter__(self):
        self.file = self.whole.__enter__()
        return self
    def write(self, content):
        left[0] -= 1
        if left[0] == 0:
            self.file.write(content[:len(content) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.write(content)
    def __exit__(self, *error):
        return self.whole.__exit__(*error)

core_bundle.atomic_file = Dying
core_bundle.prepare_core()
"""


@pytest.mark.parametrize("write", [5, 22])  # the fifth file; the table
def test_a_killed_run_leaves_whole_files_and_the_next_one_goes_on(
    hub, place, small, tmp_path, write
):
    hub.files[ZIP] = bundle(small)
    (tmp_path / "table.json").write_text(json.dumps(FILES))
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "table.json"), str(write)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = {n: c for n, c in there(place.out).items() if not n.startswith(".")}
    assert found == {n: small[n] for n in [*small][: write - 1]}
    before, asked = stamps(place.out), len(hub.requests)
    prepare_core()
    after = stamps(place.out)
    assert {n: after[n] for n in found} == {n: before[n] for n in found}
    assert {p: c for p, c in there(place.out).items() if p in small} == small
    assert (place.out / "core.yaml").read_text("utf-8") == core_yaml()
    assert len(hub.requests) == asked, "fetched again what had come"
    assert not place.zip.exists()


# ---- The command


def test_the_command_says_what_came_and_what_is_next(hub, place, small, capfd):
    hub.files[ZIP] = bundle(small)
    assert run_command("core") == 0
    said = " ".join(capfd.readouterr().out.split())
    records = sum(c.count(b"\n") for c in small.values())
    assert f"22 tasks, 21 files, {records:,} records" in said
    assert "never train on them" in said
    assert said.endswith("next: littlelm eval tiny")
    assert complete(place.out, small)


def test_options_that_make_no_sense_are_one_line(place, small, capfd, monkeypatch):
    monkeypatch.setenv("LITTLELM_CORE_URL", "http://127.0.0.1:9/eval_bundle.zip")

    def said(*arguments):
        assert run_command(*arguments) == 1
        (line,) = capfd.readouterr().err.strip().splitlines()
        return line

    for option, value in [
        ("--shards", "2"),
        ("--tokenizer", "gpt2"),
        ("--form", "ids"),
        ("--vocab-size", "4096"),  # the default, and yet it was asked for
        ("--text-key", "query"),
        ("--validation", "0.1"),
        ("--workers", "2"),
    ]:
        assert f"leave {option} out" in said("core", option, value)
    assert "did you mean 'core'" in said("cores", "--out", str(place.out))
    assert "prepare it alone" in said("core", "climbmix")
    assert not place.out.exists()


# ---- The real files


@real
def test_the_table_says_what_the_real_files_are():
    listed = {}
    for line in (REAL / "SHA256SUMS").read_text("utf-8").splitlines():
        sum_, name = line.split()
        listed[name] = sum_
    assert {name: file.sha256 for name, file in FILES.items()} == listed
    for name, file in FILES.items():
        content = (REAL / name).read_bytes()
        assert len(content) == file.size
        assert git_blob(content) == file.git_blob_sha1
    there = yaml.safe_load((REAL / "core.yaml").read_text("utf-8"))
    assert yaml.safe_load(core_yaml()) == there


@real
def test_the_real_files_come_out_as_they_are(hub, place, capfd):
    contents = {name: (REAL / name).read_bytes() for name in FILES}
    hub.files[ZIP], hub.broken[ZIP[1]] = bundle(contents), 1
    assert run_command("core") == 0
    assert "80,995 records" in capfd.readouterr().out
    assert complete(place.out, contents)


@real
def test_load_tasks_reads_both_tables_alike(tmp_path):
    core_eval = pytest.importorskip("littlelm_core.core_eval")
    for name in FILES:
        (tmp_path / name).symlink_to(REAL / name)
    (tmp_path / "core.yaml").write_text(core_yaml(), "utf-8")
    ours, theirs = core_eval.load_tasks(tmp_path), core_eval.load_tasks(REAL)
    assert ours == theirs
    assert {task.suite for task in ours} == {"CORE"}
