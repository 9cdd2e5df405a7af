"""Datasets with a name: fetched from a server in the Hub's layout, here a local one.

The server answers as the Hub does (paths-info with sizes and SHA-256, resolve with byte
ranges), and breaks in the ways in which downloads break.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_server import serving
from rich.console import Console

from littlelm_core import cli
from littlelm_core.config import ConfigError, DataError, load_run
from littlelm_core.ingest import download, named, open_prepared, pool, prepare_run
from littlelm_core.ingest.catalog import DATASETS
from littlelm_core.ingest.ids import Ids, clean_ids
from littlelm_core.ingest.named import prepare_named
from littlelm_core.ingest.read import Bad
from littlelm_core.shards import Shard, domain_of
from littlelm_core.tokenizer import Tokenizer

BOS = 50256
NVIDIA = DATASETS["climbmix"].forms["ids"].repo
SMALL = "climbmix_small/shard_{}.tokenized.parquet"


@pytest.fixture(scope="module")
def tokenizer():
    """50,257 ids with <|endoftext|> last, as GPT-2's, whose file is not here."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = [bytes([b]) for b in range(256)] + pairs[:50_000]
    return Tokenizer(
        {token: i for i, token in enumerate(ranks)}, special_tokens=("<|endoftext|>",)
    )


def documents(seed, count=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, BOS, int(n)).tolist() for n in rng.integers(1, 90, count)]


def parquet(columns):
    out = BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=16)
    return out.getvalue()


def stored(ids):
    clusters = [1 + n % 20 for n in range(len(ids))]
    counts = [len(i or []) for i in ids]
    return parquet({"cluster_id": clusters, "tokens": ids, "token_count": counts})


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(download, "FIRST_WAIT", 0.001)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for n in (0, 1, 2, 99):
            hub.files[NVIDIA, SMALL.format(n)] = stored(documents(n))
        yield hub


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("LITTLELM_DATA", str(tmp_path / "data"))
    return SimpleNamespace(
        out=tmp_path / "data" / "climbmix",
        downloads=tmp_path / "data" / "downloads" / NVIDIA.replace("/", "--"),
    )


def read_back(folder, split):
    manifest = json.loads((folder / "manifest.json").read_text())
    (domain,) = manifest["domains"].values()
    found = []
    for entry in domain[split]["shards"]:
        found += [ids.tolist() for ids in Shard(folder / entry["name"])]
    assert len(found) == domain[split]["documents"]
    assert sum(map(len, found)) == domain[split]["tokens"]
    return found


def contents(folder):
    names = [*folder.glob("*.shard"), folder / "manifest.json"]
    return {p.name: p.read_bytes() for p in names}


def behind_bos(ids):
    return [[BOS, *document] for document in ids]


# ---- What comes out


def test_stored_ids_are_used_as_they_are(hub, place, tokenizer):
    manifest = prepare_named("climbmix", 2, tokenizer, workers=1)
    wanted = behind_bos(documents(0) + documents(1))
    assert read_back(place.out, "train") == wanted
    assert read_back(place.out, "validation") == behind_bos(documents(99))
    counts = manifest["domains"]["climbmix"]["train"]
    sizes = tokenizer.token_byte_counts()
    assert counts["bytes"] == sum(int(sizes[d].sum()) for d in wanted)
    clusters = {int(c): n for c, n in manifest["cluster_tokens"].items()}
    every = [documents(n) for n in (0, 1, 99)]
    assert clusters[3] == sum(len(f[i]) + 1 for f in every for i in (2, 22))
    assert "CC BY-NC 4.0" in manifest["licence"]


def test_validation_is_the_same_for_any_number_of_shards(hub, place, tokenizer):
    few, many = place.out.with_name("few"), place.out.with_name("many")
    prepare_named("climbmix", 1, tokenizer, few, workers=1)
    prepare_named("climbmix", 3, tokenizer, many, workers=1)
    assert read_back(few, "validation") == read_back(many, "validation")
    assert read_back(many, "train")[:40] == read_back(few, "train")


def test_validation_is_the_first_tokens_of_its_file(hub, place, tokenizer, monkeypatch):
    monkeypatch.setattr(named, "VALIDATION_TOKENS", 300)
    prepare_named("climbmix", 1, tokenizer, workers=1)
    held_out = read_back(place.out, "validation")
    assert held_out == behind_bos(documents(99))[: len(held_out)]
    assert 300 <= sum(map(len, held_out)) < 300 + 91


def test_what_equals_a_held_out_document_is_not_trained_on(hub, place, tokenizer):
    shared = documents(99)[7]
    mixed = [*documents(0)[:5], shared, *documents(0)[5:], shared]
    hub.files[NVIDIA, SMALL.format(0)] = stored(mixed)
    manifest = prepare_named("climbmix", 1, tokenizer, workers=1)
    assert manifest["equal_to_validation"] == 2
    assert read_back(place.out, "train") == behind_bos(documents(0))


def test_json_lines_with_all_of_it(hub, place, tokenizer):
    lines = [
        json.dumps({"cluster_id": 4, "tokens": ids, "token_count": len(ids)})
        for ids in documents(5)
    ]
    lines[3:3] = ['{"tokens": [1, 2', '{"text": "no ids"}', '{"tokens": "1 2"}', ""]
    hub.files[NVIDIA, "part_0.tokenized.jsonl"] = "\n".join(lines).encode()
    manifest = prepare_named("climbmix", 1, tokenizer, form="ids-full", workers=1)
    assert read_back(place.out, "train") == behind_bos(documents(5))
    assert read_back(place.out, "validation") == behind_bos(documents(99))
    bad = manifest["bad_records"]
    assert bad["total"] == 3
    assert [p.rsplit(":", 2)[-2] for p in bad["places"]] == ["4", "5", "6"]


@pytest.mark.parametrize("name", ["climbmix", "fineweb-edu"])
def test_text_is_encoded(hub, place, tokenizer, name):
    kind = DATASETS[name].forms["text"]
    texts = {n: [f"text {n} of {i} é" for i in range(9)] for n in (0, kind.files)}
    for n, rows in texts.items():
        hub.files[kind.repo, kind.pattern.format(n)] = parquet({"text": rows})
    prepare_named(name, 1, tokenizer, place.out, form="text", workers=1)
    for split, n in (("train", 0), ("validation", kind.files)):
        found = read_back(place.out, split)
        assert [d[0] for d in found] == [BOS] * 9
        assert [tokenizer.decode(d[1:]) for d in found] == texts[n]
    prepared = open_prepared(place.out)
    assert prepared.manifest["sources"] == [name]


def test_records_that_are_no_document_are_counted_with_their_place(
    hub, place, tokenizer
):
    ids = documents(0)
    ids[2:2] = [[], None, [5, 50257], [-1, 7], [3, None]]
    hub.files[NVIDIA, SMALL.format(0)] = stored(ids)
    manifest = prepare_named("climbmix", 1, tokenizer, workers=1)
    bad = manifest["bad_records"]
    assert bad["reasons"] == {"empty": 2, "an id that is not in 0 … 50256": 3}
    rows = [int(p.split(":row ")[1].split(":")[0]) for p in bad["places"]]
    assert rows == [3, 4, 5, 6, 7]
    assert read_back(place.out, "train") == behind_bos(documents(0))


def test_an_end_of_text_inside_a_record_begins_a_document():
    ids = np.array([BOS, 1, 2, BOS, BOS, 3, BOS])
    found = clean_ids(Ids(ids, 1, "here"), 50257, BOS)
    assert [d.tolist() for d in found] == [[BOS, 1, 2], [BOS, 3]]
    only = clean_ids(Ids(np.array([BOS, BOS]), 1, "here"), 50257, BOS)
    assert only == Bad("here", "empty")
    floats = clean_ids(Ids(np.array([1.5, 2.0]), 1, "here"), 50257, BOS)
    assert isinstance(floats, Bad)


def test_a_file_of_several_shards_is_one_domain(hub, place, tokenizer, monkeypatch):
    monkeypatch.setattr(named, "SHARD_TOKENS", 500)
    prepare_named("climbmix", 1, tokenizer, workers=1)
    train = open_prepared(place.out).train
    assert len(train) >= 3
    assert {domain_of(shard) for shard in train} == {"climbmix"}


# ---- Downloads that break


@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_download_goes_on_where_it_stopped(hub, place, tokenizer, reset):
    path, hub.reset = SMALL.format(0), reset
    hub.broken[path] = 3
    prepare_named("climbmix", 1, tokenizer, workers=1)
    size = len(hub.files[NVIDIA, path])
    assert hub.given[NVIDIA, path] == size, "bytes came twice"
    asked = [r for p, r in hub.requests if p == path]
    assert len(asked) == 4
    assert asked[0] == ""
    assert asked[1] == f"bytes={size // 2}-"
    assert read_back(place.out, "train") == behind_bos(documents(0))


@pytest.mark.parametrize("reset", [False, True])
def test_a_server_without_ranges_gives_all_again(hub, place, tokenizer, reset):
    hub.ranges, hub.broken[SMALL.format(0)], hub.reset = False, 1, reset
    prepare_named("climbmix", 1, tokenizer, workers=1)
    assert read_back(place.out, "train") == behind_bos(documents(0))
    hub.broken[SMALL.format(1)] = 10**6  # never more than half: it must end
    with pytest.raises(DataError, match="cannot reach"):
        prepare_named("climbmix", 2, tokenizer, workers=1)


def test_a_partial_file_of_a_killed_process_is_used(hub, place, tokenizer):
    path = place.downloads / (SMALL.format(0) + ".partial")
    path.parent.mkdir(parents=True)
    data = hub.files[NVIDIA, SMALL.format(0)]
    path.write_bytes(data[:1000])
    prepare_named("climbmix", 1, tokenizer, workers=1)
    assert hub.given[NVIDIA, SMALL.format(0)] == len(data) - 1000
    assert read_back(place.out, "train") == behind_bos(documents(0))


def test_a_wrong_sum_is_fetched_again_and_twice_is_refused(hub, place, tokenizer):
    hub.wrong[SMALL.format(0)] = 1
    prepare_named("climbmix", 1, tokenizer, workers=1)
    assert [p for p, _ in hub.requests].count(SMALL.format(0)) == 2
    hub.wrong[SMALL.format(1)] = 2
    with pytest.raises(DataError, match=r"came twice with the SHA-256"):
        prepare_named("climbmix", 2, tokenizer, workers=1)
    assert not [*place.out.glob("*00001.shard")], "damaged data became a shard"


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(hub, place, tokenizer):
    hub.busy[SMALL.format(0)] = download.ATTEMPTS - 1
    prepare_named("climbmix", 1, tokenizer, workers=1)
    hub.busy[SMALL.format(1)] = download.ATTEMPTS
    with pytest.raises(DataError, match="503"):
        prepare_named("climbmix", 2, tokenizer, workers=1)
    del hub.files[NVIDIA, SMALL.format(1)]
    with pytest.raises(DataError, match=r"has no file climbmix_small/shard_1"):
        prepare_named("climbmix", 2, tokenizer, workers=1)
    gone = download.RemoteFile(NVIDIA, "gone.parquet", 10, "0" * 64)
    before = len(hub.requests)
    with pytest.raises(DataError, match="404"):
        download.fetch(gone, place.downloads)
    assert len(hub.requests) == before + 1, "a 404 was asked again"


def test_waits_grow(monkeypatch):
    waits = []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(download.time, "sleep", waits.append)
    with pytest.raises(download.Unreachable, match=r"127.0.0.1:9"):
        download.list_files(NVIDIA, ["x"])
    assert waits == [1, 2, 4, 8, 16]


# ---- Disk, network, folders


def test_a_disk_that_is_too_small_is_refused_with_numbers(
    hub, place, tokenizer, monkeypatch
):
    size = sum(len(hub.files[NVIDIA, SMALL.format(n)]) for n in (0, 99))
    usage = SimpleNamespace(total=10**9, used=0, free=int(1.4 * size))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"GB of shards and .* GB of files .* free"):
        prepare_named("climbmix", 1, tokenizer, workers=1)
    assert hub.requests == [], "fetched before the disk was looked at"
    usage.free = 10 * size
    prepare_named("climbmix", 1, tokenizer, workers=1)


def test_a_full_disk_is_not_taken_for_a_broken_line(hub, place, monkeypatch):
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    (file,) = download.list_files(NVIDIA, [SMALL.format(0)])
    write = download._write
    on_full = SimpleNamespace(write=full)
    monkeypatch.setattr(download, "_write", lambda out, *rest: write(on_full, *rest))
    with pytest.raises(DataError, match=r"No space left.*make room"):
        download.fetch(file, place.downloads)
    assert len(hub.requests) == 1, "the network was asked again"


def test_without_a_network_files_are_put_by_hand(hub, place, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError) as caught:
        prepare_named("climbmix", 1, tokenizer, workers=1)
    (line,) = str(caught.value).splitlines()
    for word in (str(place.downloads), NVIDIA, SMALL.format(99), SMALL.format(0)):
        assert word in line
    for n in (0, 99):
        path = place.downloads / SMALL.format(n)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hub.files[NVIDIA, SMALL.format(n)])
    prepare_named("climbmix", 1, tokenizer, workers=1)
    assert read_back(place.out, "train") == behind_bos(documents(0))
    assert (place.downloads / SMALL.format(0)).is_file(), "deleted the user's file"


def test_a_file_put_by_hand_is_compared_with_the_listed_sum(hub, place, tokenizer):
    path = place.downloads / SMALL.format(0)
    path.parent.mkdir(parents=True)
    data = bytearray(hub.files[NVIDIA, SMALL.format(0)])
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard_0.*SHA-256 differs.*delete it"):
        prepare_named("climbmix", 1, tokenizer, workers=1)


def test_fetched_files_go_once_they_are_read_unless_kept(hub, place, tokenizer):
    prepare_named("climbmix", 1, tokenizer, workers=1)
    assert [*place.downloads.rglob("*.parquet*")] == []
    prepare_named("climbmix", 2, tokenizer, workers=1, keep=True)
    assert (place.downloads / SMALL.format(1)).is_file()
    fetched = [p for p, _ in hub.requests]
    assert len(fetched) == len(set(fetched)) == 3, "a file that was done came again"
    again = place.out.with_name("again")
    prepare_named("climbmix", 2, tokenizer, again, workers=1, keep=True)
    assert [p for p, _ in hub.requests].count(SMALL.format(1)) == 1
    assert contents(again) == contents(place.out)


def test_a_damaged_shard_is_made_again(hub, place, tokenizer):
    prepare_named("climbmix", 2, tokenizer, workers=1)
    good = contents(place.out)
    shard = place.out / "train-climbmix-00001.shard"
    shard.write_bytes(shard.read_bytes()[:-8])
    prepare_named("climbmix", 2, tokenizer, workers=1)
    assert contents(place.out) == good
    shutil.copy(place.out / "train-climbmix-00000.shard", shard)  # whole, but another
    prepare_named("climbmix", 2, tokenizer, workers=1)
    assert contents(place.out) == good
    assert [p for p, _ in hub.requests].count(SMALL.format(0)) == 1


def test_what_was_held_out_is_known_again_before_more_is_trained_on(
    hub, place, tokenizer
):
    prepare_named("climbmix", 1, tokenizer, workers=1)
    (place.out / "parts" / "held-out.bin").unlink()
    prepare_named("climbmix", 2, tokenizer, workers=1)
    assert read_back(place.out, "train") == behind_bos(documents(0) + documents(1))
    # Another file is held out now: what was done is compared with it too.
    hub.files[NVIDIA, SMALL.format(99)] = stored([*documents(98), documents(0)[3]])
    (place.out / "validation-climbmix-00000.shard").unlink()
    manifest = prepare_named("climbmix", 2, tokenizer, workers=1)
    assert manifest["equal_to_validation"] == 1
    kept = documents(0)[:3] + documents(0)[4:] + documents(1)
    assert read_back(place.out, "train") == behind_bos(kept)


def test_another_tokenizer_prepares_text_anew(hub, place, tokenizer):
    kind = DATASETS["fineweb-edu"].forms["text"]
    for n in (0, kind.files):
        rows = [f"text {n} of {i}" for i in range(9)]
        hub.files[kind.repo, kind.pattern.format(n)] = parquet({"text": rows})
    prepare_named("fineweb-edu", 1, tokenizer, place.out, workers=1)
    small = Tokenizer({bytes([b]): b for b in range(256)})
    prepare_named("fineweb-edu", 1, small, place.out, workers=1)
    prepared = open_prepared(place.out)
    assert prepared.train[0].vocab_size == small.vocab_size
    found = [small.decode(d[1:]) for d in read_back(place.out, "train")]
    assert found == [f"text 0 of {i}" for i in range(9)]


def test_requests_that_make_no_sense_are_one_line(hub, place, tokenizer):
    small = Tokenizer({bytes([b]): b for b in range(256)})
    for arguments, words in [
        (("climbmax", 1, tokenizer), "did you mean 'climbmix'"),
        (("climbmix", 0, tokenizer), "1 to 99"),
        (("climbmix", 100, tokenizer), "1 to 99"),
        (("climbmix", 1, small), "50,257"),
        (("climbmix", 1, tokenizer, None, "txt"), "did you mean 'text'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            prepare_named(*arguments)
    prepare_named("climbmix", 1, tokenizer, workers=1)
    with pytest.raises(DataError, match="holds other data"):
        prepare_named("climbmix", 1, tokenizer, form="text", workers=1)
    (place.out / "parts" / "recipe.json").unlink()
    with pytest.raises(DataError, match="holds other data"):
        prepare_named("climbmix", 1, tokenizer, workers=1)


# ---- Many processes, and one that is killed


def test_several_processes_write_the_same(hub, place, tokenizer, monkeypatch):
    one, two = place.out.with_name("one"), place.out.with_name("two")
    prepare_named("climbmix", 3, tokenizer, one, workers=1)
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    prepare_named("climbmix", 3, tokenizer, two, workers=2)
    assert contents(one) == contents(two)


def test_a_killed_run_goes_on_and_gives_the_same(hub, place, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "gpt2.json")
    command = [
        sys.executable, "-m", "littlelm_core", "data", "prepare", "climbmix",
        "--shards", "3", "--tokenizer", str(tmp_path / "gpt2.json"), "--workers", "1",
    ]  # fmt: skip
    last = SMALL.format(2)
    hub.files[NVIDIA, last] = stored(documents(2, 4000))
    whole = place.out.with_name("whole")
    prepare_named("climbmix", 3, tokenizer, whole, workers=1)
    before, size = Counter(hub.given), len(hub.files[NVIDIA, last])
    hub.pause = 0.05
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while hub.given[NVIDIA, last] - before[NVIDIA, last] < size // 4:
        assert time.monotonic() < deadline, "nothing was fetched"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (place.out / "manifest.json").exists()
    hub.pause = 0.0
    time.sleep(0.1)  # the server's thread sees the closed socket
    middle = Counter(hub.given)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CC BY-NC 4.0" in done.stdout + done.stderr
    assert hub.given[NVIDIA, SMALL.format(0)] == middle[NVIDIA, SMALL.format(0)]
    assert hub.given[NVIDIA, last] - middle[NVIDIA, last] < size
    assert contents(place.out) == contents(whole)


# ---- A run that names it


def test_a_run_finds_it_by_its_name(hub, place, tokenizer):
    run = load_run("littlelm-3.8b")
    with pytest.raises(DataError) as caught:
        prepare_run(run)
    (line,) = str(caught.value).splitlines()
    assert "littlelm data prepare climbmix --shards" in line
    assert str(place.out) in line
    prepare_named("climbmix", 1, tokenizer, workers=1)
    data = prepare_run(run)
    assert data.folder == place.out
    assert [*data.validation] == ["climbmix"]
    assert data.train[0].vocab_size == 50257


def test_the_estimate_is_told_before_anything_is_fetched(hub, place, tokenizer):
    console = Console(file=None, record=True, width=200, quiet=False)
    with console.capture() as captured:
        prepare_named("climbmix", 1, tokenizer, workers=1, console=console)
    text = captured.get()
    assert "research and development only" in text
    assert "2 files, " in text
    assert "are free at" in text


def test_the_command_says_what_is_missing(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def said(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["data", "prepare", *arguments])
        assert stopped.value.code == 1
        (line,) = capfd.readouterr().err.strip().splitlines()
        return line

    def offline(*arguments):
        raise DataError("no GPT-2 vocabulary")

    monkeypatch.setattr(Tokenizer, "gpt2", offline)
    assert "--shards 1 to 99" in said("climbmix")
    assert "shards = 0: 1 to 99" in said("climbmix", "--shards", "0")
    meant = "no file, folder or dataset climbmixx (did you mean 'climbmix'?)"
    for options in ((), ("--out", "x"), ("--shards", "1")):
        assert meant in said("climbmixx", *options)
    unlike = said("note.txt", "--out", "x")
    assert "no file, folder or dataset note.txt: check the path" in unlike
    (tmp_path / "notes.txt").write_text("A note.")
    assert "alone" in said("climbmix", "notes.txt", "--out", "x", "--shards", "1")
    assert "--out" in said("notes.txt")
    assert "named dataset" in said("notes.txt", "--shards", "2", "--out", "x")
