"""Text to shards: every record is in a shard or in the report, killed or not."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from littlelm_core import corpus, ingest
from littlelm_core.config import DataError, load_run
from littlelm_core.ingest import find, pool, read, runs, write
from littlelm_core.ingest.read import Bad, Text
from littlelm_core.ingest.write import split_of
from littlelm_core.shards import Shard
from littlelm_core.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_bpe(["a record of the text "] * 20, 270))


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def records(count, word="record"):
    return [{"text": f"{word} {i}", "id": i} for i in range(count)]


def read_back(folder, manifest):
    """Return {domain: {split: [texts]}} decoded from the shards."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    result = {}
    for domain, splits in manifest["domains"].items():
        result[domain] = {}
        for split, counts in splits.items():
            texts = []
            for entry in counts["shards"]:
                for ids in Shard(folder / entry["name"]):
                    assert ids[0] == tokenizer.bos_id, "a document without BOS"
                    assert (ids == tokenizer.bos_id).sum() == 1, "more than one BOS"
                    texts.append(tokenizer.decode(ids[1:].tolist()))
            assert len(texts) == counts["documents"]
            result[domain][split] = texts
    return result


def everything(folder, manifest):
    read = read_back(folder, manifest)
    return sorted(t for d in read.values() for texts in d.values() for t in texts)


def files_of(folder):
    """Return {name: bytes} of all shards and of the manifest."""
    names = [*folder.glob("*.shard"), folder / "manifest.json"]
    return {p.name: p.read_bytes() for p in names}


# ---- Formats


def write_all_formats(folder):
    """Write 20 good records in each format; return the texts."""
    texts = []
    for name in ("plain", "gz", "zst", "parquet"):
        batch = records(20, name)
        texts += [r["text"] for r in batch]
        if name == "plain":
            (folder / "a.jsonl").write_text(lines(batch))
        elif name == "gz":
            (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(batch).encode()))
        elif name == "zst":
            packed = zstandard.ZstdCompressor().compress(lines(batch).encode())
            (folder / "c.jsonl.zst").write_bytes(packed)
        else:
            table = pa.table({"text": [r["text"] for r in batch]})
            pq.write_table(table, folder / "d.parquet")
    (folder / "sub").mkdir()
    for i in range(5):
        (folder / "sub" / f"{i}.txt").write_text(f"text file {i}\n")
        texts.append(f"text file {i}\n")
    return sorted(texts)


def test_every_format_comes_back_as_it_was(tmp_path, tokenizer):
    source = tmp_path / "My Texts"
    source.mkdir()
    texts = write_all_formats(source)
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    assert everything(tmp_path / "out", manifest) == texts
    assert list(manifest["domains"]) == ["my_texts"]
    counts = ingest.total(manifest, "train"), ingest.total(manifest, "validation")
    size = sum(len(t.encode()) for t in texts)
    assert sum(c["bytes"] for c in counts) == size
    assert manifest["bad_records"]["total"] == 0


def test_domains_are_named(tmp_path, tokenizer):
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(lines(records(200, name)))
    sources = [f"prose={tmp_path / 'x.jsonl'}", str(tmp_path / "y.jsonl")]
    manifest = ingest.prepare(sources, tmp_path / "out", tokenizer, 1)
    assert sorted(manifest["domains"]) == ["prose", "y"]
    names = [p.name for p in (tmp_path / "out").glob("*.shard")]
    assert "train-prose-00000.shard" in names


def test_a_dataset_on_disk_and_another_key(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i}" for i in range(300)]
    made = datasets.Dataset.from_dict({"body": [*texts, None]})
    made.save_to_disk(str(tmp_path / "stored"))
    manifest = ingest.prepare(
        [tmp_path / "stored"], tmp_path / "out", tokenizer, 1, text_key="body"
    )
    assert everything(tmp_path / "out", manifest) == sorted(texts)
    (place,) = manifest["bad_records"]["places"]
    assert "row 301" in place
    with pytest.raises(DataError, match=r"no column 'text'.*body"):
        ingest.prepare([tmp_path / "stored"], tmp_path / "other", tokenizer, 1)


def test_a_dataset_that_cannot_be_had_is_one_line(tmp_path, tokenizer, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "from littlelm_core.ingest.read import open_dataset\n"
        "from littlelm_core.config import DataError\n"
        "try:\n    open_dataset('nobody/nothing')\n"
        "except DataError as e:\n    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    (line,) = done.stdout.strip().splitlines()
    assert "nobody/nothing" in line
    assert "network" in line

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(read.importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"littlelm\[hub\]"):
        read.open_dataset("nobody/nothing")


# ---- Bad records


def test_bad_records_are_counted_and_placed(tmp_path, tokenizer):
    source = tmp_path / "mix.jsonl"
    bad = ["{broken", '{"txt": "x"}', '{"text": 3}', '{"text": " "}', "[1]", '"x"']
    raw = lines(records(100)) + "\n".join(bad) + "\n\n" + lines(records(5, "late"))
    source.write_bytes(raw.encode() + b'{"text": "caf\xe9"}\n')
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    assert manifest["bad_records"]["reasons"] == {
        "not JSON": 1,
        "no key 'text' (did you mean 'txt'?)": 1,
        "text is int, not a string": 1,
        "empty": 1,
        "not a JSON object": 2,
        "not UTF-8": 1,
    }
    places = manifest["bad_records"]["places"]
    assert places[0] == f"{source}:101: not JSON"
    assert places[-1] == f"{source}:113: not UTF-8"
    assert manifest["bad_records"]["total"] == len(places) == 7
    assert len(everything(tmp_path / "out", manifest)) == 105


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_cut_archive_is_reported_and_its_whole_records_kept(
    tmp_path, tokenizer, suffix
):
    rng = np.random.default_rng(0)
    noise = [{"text": f"{i} {rng.bytes(60).hex()}"} for i in range(9000)]
    data = lines(noise).encode()
    packed = (
        gzip.compress(data)
        if suffix == "gz"
        else zstandard.ZstdCompressor().compress(data)
    )
    source = tmp_path / f"cut.jsonl.{suffix}"
    source.write_bytes(packed[: len(packed) * 2 // 3])
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    kept = everything(tmp_path / "out", manifest)
    assert 3000 < len(kept) < 9000
    assert set(kept) <= {r["text"] for r in noise}
    assert any("ends too early" in p for p in manifest["bad_records"]["places"])


def test_an_archive_of_several_members_is_read_to_its_end(tmp_path):
    first, second = lines(records(3, "one")), lines(records(3, "two"))
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(first.encode()) + gzip.compress(second.encode())
    )
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "b.jsonl.zst").write_bytes(pack(first.encode()) + pack(second.encode()))
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        got = list(read._read_jsonl(tmp_path / name, "text"))
        assert [r.text for r in got] == [
            r["text"] for r in records(3, "one") + records(3, "two")
        ], name


def test_binary_and_empty_files_are_one_line(tmp_path, tokenizer):
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "nul.txt").write_bytes(b"text\0more")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none.parquet").write_bytes(b"not one")
    for name, reason in {
        "binary.txt": "binary",
        "nul.txt": "binary",
        "empty.txt": "empty",
        "empty.jsonl": "empty",
        "none.parquet": "not a parquet file",
    }.items():
        with pytest.raises(DataError, match=reason) as caught:
            ingest.prepare([tmp_path / name], tmp_path / "out", tokenizer, 1)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(DataError, match=r"nowhere\.txt"):
        ingest.prepare([tmp_path / "nowhere.txt"], tmp_path / "out", tokenizer, 1)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match="hollow"):
        ingest.prepare([tmp_path / "hollow"], tmp_path / "out", tokenizer, 1)


def test_lone_surrogates_do_not_stop_anything(tmp_path, tokenizer):
    source = tmp_path / "odd.jsonl"
    source.write_text(lines(records(50)) + '{"text": "\\ud800 alone"}\n')
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    assert "� alone" in everything(tmp_path / "out", manifest)


# ---- The split


def test_the_split_hangs_on_the_record_alone():
    texts = [Text(f"document {i}") for i in range(2000)]
    share = sum(split_of(t, 0.1) == "validation" for t in texts) / len(texts)
    assert 0.07 < share < 0.13
    assert [split_of(t, 0.1) for t in texts[::-1]] == [split_of(t, 0.1) for t in texts][
        ::-1
    ]
    held = {t.text for t in texts if split_of(t, 0.1) == "validation"}
    more = {t.text for t in texts if split_of(t, 0.2) == "validation"}
    assert held < more, "a larger share must keep what was held out"
    assert split_of(Text("document 3"), 0.05) == "train", "the hash has changed"
    named = {split_of(Text(f"piece {i}", "one/file.txt"), 0.5) for i in range(50)}
    assert len(named) == 1, "a file's pieces must stay together"


def test_more_files_move_nothing(tmp_path, tokenizer):
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(60):
        (source / f"{i:03d}.txt").write_text(f"file number {i}")
    few = ingest.prepare([source], tmp_path / "few", tokenizer, 1, validation_share=0.2)
    for i in range(60, 120):
        (source / f"{i - 60:03d}b.txt").write_text(f"file number {i}")
    many = ingest.prepare(
        [source], tmp_path / "many", tokenizer, 1, validation_share=0.2
    )
    before = read_back(tmp_path / "few", few)["texts"]
    after = read_back(tmp_path / "many", many)["texts"]
    assert set(before["validation"]) <= set(after["validation"])
    assert set(before["train"]) <= set(after["train"])


def test_the_validation_split_is_never_empty(tmp_path, tokenizer):
    source = tmp_path / "few.jsonl"
    source.write_text(lines(records(3)))
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    assert ingest.total(manifest, "validation")["documents"] >= 1
    assert ingest.total(manifest, "train")["documents"] >= 1
    source.write_text(lines(records(1)))
    with pytest.raises(DataError, match="one document"):
        ingest.prepare([source], tmp_path / "other", tokenizer, 1)


def test_one_long_text_is_cut_and_nothing_is_lost(tmp_path, tokenizer):
    book = "\n\n".join(f"Paragraph {i}. " + "words " * 300 for i in range(300))
    source = tmp_path / "book.txt"
    source.write_text(book)
    manifest = ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    texts = read_back(tmp_path / "out", manifest)["book"]
    assert len(texts["validation"]) >= 1
    whole = texts["train"] + texts["validation"]
    assert len(whole) > 5
    assert sum(map(len, whole)) == len(book)
    assert all(t in book for t in whole)
    assert all(t.startswith("Paragraph") for t in whole)
    solid = "x" * (6 * read.PIECE)
    assert "".join(read._pieces(solid)) == solid


# ---- Workers, kills, repeats


@pytest.fixture
def many_parts(tmp_path, monkeypatch):
    """A source that is read in eight parts."""
    source = tmp_path / "parts"
    source.mkdir()
    for i in range(8):
        (source / f"{i}.jsonl").write_text(lines(records(300, f"file {i}")) + "oops\n")
    monkeypatch.setattr(write, "PART_BYTES", 1000)
    return source


def test_the_output_is_the_same_for_any_number_of_workers(
    tmp_path, tokenizer, many_parts, monkeypatch
):
    one = ingest.prepare([many_parts], tmp_path / "one", tokenizer, 1)
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    two = ingest.prepare([many_parts], tmp_path / "two", tokenizer, 2)
    assert one == two
    assert one["bad_records"]["total"] == 8
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert len(everything(tmp_path / "two", two)) == 2400


def test_a_run_that_broke_off_goes_on_with_what_is_missing(
    tmp_path, tokenizer, many_parts, monkeypatch
):
    whole = ingest.prepare([many_parts], tmp_path / "whole", tokenizer, 1)
    out, work = tmp_path / "out", write.prepare_part
    done = []

    def dies(part, label, *rest, **keys):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(label)
        return work(part, label, *rest, **keys)

    monkeypatch.setattr(write, "prepare_part", dies)
    with pytest.raises(KeyboardInterrupt):
        ingest.prepare([many_parts], out, tokenizer, 1)
    assert not (out / "manifest.json").exists(), "an unfinished folder looks finished"
    with pytest.raises(DataError, match="manifest"):
        ingest.open_prepared(out)
    (out / ".train-parts-00004.shard.123.tmp").write_bytes(b"half")
    monkeypatch.setattr(
        write,
        "prepare_part",
        lambda part, label, *rest, **keys: (
            done.append(label) or work(part, label, *rest, **keys)
        ),
    )
    assert ingest.prepare([many_parts], out, tokenizer, 1) == whole
    assert len(done) == len(set(done)) == 8, f"parts were done twice: {done}"
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not list(out.glob(".*.tmp"))


def test_a_killed_process_leaves_what_can_go_on(tmp_path, tokenizer, many_parts):
    """SIGKILL in the middle, no chance to clean up."""
    tokenizer.save(tmp_path / "t.json")
    code = (
        "import sys, time\n"
        "from littlelm_core import ingest\n"
        "from littlelm_core.ingest import write as p\n"
        "from littlelm_core.tokenizer import Tokenizer\n"
        "p.PART_BYTES = 1000\n"
        "work = p.prepare_part\n"
        "def slow(*a, **k):\n"
        "    report = work(*a, **k)\n"
        "    print('part', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    return report\n"
        "p.prepare_part = slow\n"
        "ingest.prepare([sys.argv[1]], sys.argv[2], Tokenizer.load(sys.argv[3]), 1)\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", code, many_parts, out, tmp_path / "t.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "part\n"
        process.send_signal(signal.SIGKILL)
    assert not (out / "manifest.json").exists()
    manifest = ingest.prepare([many_parts], out, tokenizer, 1)
    assert manifest == ingest.prepare([many_parts], tmp_path / "w", tokenizer, 1)
    assert files_of(out) == files_of(tmp_path / "w")


def test_a_changed_source_is_read_again_and_a_gone_one_is_dropped(
    tmp_path, tokenizer, many_parts
):
    out = tmp_path / "out"
    ingest.prepare([many_parts], out, tokenizer, 1)
    (many_parts / "7.jsonl").unlink()
    (many_parts / "0.jsonl").write_text(lines(records(10, "new")))
    manifest = ingest.prepare([many_parts], out, tokenizer, 1)
    texts = everything(out, manifest)
    assert "new 3" in texts
    assert len(texts) == 6 * 300 + 10
    named = {
        s["name"]
        for d in manifest["domains"].values()
        for split in d.values()
        for s in split["shards"]
    }
    assert {p.name for p in out.glob("*.shard")} == named


def test_the_output_is_no_source(tmp_path, tokenizer):
    """A folder of shards inside its source: a second time, nothing is added."""
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text file {i}\n")
    out = tmp_path / "out"
    first = ingest.prepare([tmp_path], out, tokenizer, 1)
    assert ingest.prepare([tmp_path], out, tokenizer, 1) == first
    assert first["bad_records"]["total"] == 0
    with pytest.raises(DataError, match="the folder of shards"):
        ingest.prepare([out], out, tokenizer, 1)


def test_a_large_part_becomes_several_shards(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(write, "BATCH_CHARACTERS", 200)
    source = tmp_path / "long.jsonl"
    source.write_text(lines(records(500)))
    manifest = ingest.prepare(
        [source], tmp_path / "out", tokenizer, 1, shard_tokens=1000
    )
    shards = manifest["domains"]["long"]["train"]["shards"]
    assert len(shards) > 2
    assert len(everything(tmp_path / "out", manifest)) == 500


def test_a_full_disk_is_one_line(tmp_path, tokenizer, monkeypatch):
    source = tmp_path / "a.jsonl"
    source.write_text(lines(records(50)))

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(write, "write_shard", full)
    with pytest.raises(DataError, match="No space left") as caught:
        ingest.prepare([source], tmp_path / "out", tokenizer, 1)
    assert "\n" not in str(caught.value)


# ---- The data of a run


@pytest.fixture
def small_corpus(monkeypatch, tmp_path):
    """The default corpus, of a few documents, in a data folder of its own."""
    texts = {
        (d, s): [f"{d} {s} document {i} says something\n" for i in range(n)]
        for d in corpus.domains()
        for s, n in (("train", 30), ("validation", 4))
    }
    monkeypatch.setenv("LITTLELM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(corpus, "documents", lambda d, s: iter(texts[d, s]))
    monkeypatch.setattr(corpus, "fingerprint", lambda: "small")
    return texts


def tiny(*overrides):
    return load_run("tiny", ["tokenizer.vocab_size=300", *overrides])


def test_a_run_finds_its_data_again(small_corpus, monkeypatch):
    first = ingest.prepare_run(tiny())
    assert sorted(first.validation) == corpus.domains()
    assert first.tokenizer.vocab_size == 300
    assert [s.path.name for s in first.train] == [
        f"train-{d}-00000.shard" for d in corpus.domains()
    ]
    text = first.tokenizer.decode(first.validation["code"][0][0][1:].tolist())
    assert text == small_corpus["code", "validation"][0]
    monkeypatch.setattr(runs, "prepare_default", None)  # not called a second time
    again = ingest.prepare_run(tiny())
    assert again.folder == first.folder
    assert again.manifest == first.manifest
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert not list(first.folder.parent.glob(".*.tmp"))


def test_another_tokenizer_has_a_folder_of_its_own(small_corpus):
    first = ingest.prepare_run(tiny())
    other = ingest.prepare_run(tiny("tokenizer.vocab_size=290"))
    assert other.folder != first.folder
    assert other.tokenizer.vocab_size == 290


def test_a_damaged_or_unfinished_folder_is_made_again(small_corpus):
    first = ingest.prepare_run(tiny())
    shard = first.train[0].path
    good = shard.read_bytes()
    shard.write_bytes(good[:-10])
    again = ingest.prepare_run(tiny())
    assert again.train[0].path.read_bytes() == good
    (first.folder / "manifest.json").unlink()
    assert ingest.prepare_run(tiny()).manifest == first.manifest


def test_two_processes_that_start_at_once_see_a_whole_folder(small_corpus):
    results, barrier = [], threading.Barrier(3)

    def start():
        barrier.wait()
        try:
            results.append(ingest.prepare_run(tiny()).manifest)
        except Exception as error:
            results.append(error)

    # Threads stand for processes: they need names of their own for what is unfinished.
    names = iter(range(10_000, 20_000))
    local = threading.local()

    def own_number():
        if not hasattr(local, "number"):
            local.number = next(names)
        return local.number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", own_number)
        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 3
    assert results[0] == results[1] == results[2], results
    assert isinstance(results[0], dict), results[0]


def test_a_run_names_a_prepared_folder(tmp_path, tokenizer):
    source = tmp_path / "a.jsonl"
    source.write_text(lines(records(200)))
    out = tmp_path / "out"
    ingest.prepare([source], out, tokenizer, 1)
    size = tokenizer.vocab_size
    run = load_run("tiny", [f"data.source={out}", f"tokenizer.vocab_size={size}"])
    prepared = ingest.prepare_run(run)
    assert prepared.tokenizer.fingerprint == tokenizer.fingerprint
    assert list(prepared.validation) == ["a"]
    larger = load_run("tiny", [f"data.source={out}", "tokenizer.vocab_size=4096"])
    with pytest.raises(DataError, match="vocabulary is 4096"):
        ingest.prepare_run(larger)
    missing = load_run("tiny", ["data.source=/nowhere/at/all"])
    with pytest.raises(DataError, match="data prepare"):
        ingest.prepare_run(missing)


def test_a_folder_whose_shards_were_exchanged_is_refused(tmp_path, tokenizer):
    out = tmp_path / "out"
    source = tmp_path / "a.jsonl"
    source.write_text(lines(records(200)))
    manifest = ingest.prepare([source], out, tokenizer, 1)
    name = manifest["domains"]["a"]["train"]["shards"][0]["name"]
    validation = manifest["domains"]["a"]["validation"]["shards"][0]["name"]
    (out / name).write_bytes((out / validation).read_bytes())
    with pytest.raises(DataError, match=name):
        ingest.open_prepared(out)
    (out / name).unlink()
    with pytest.raises(DataError, match=name):
        ingest.open_prepared(out)


def test_the_tokenizer_sample_covers_all_domains(small_corpus):
    sample = ingest.tokenizer_sample(size=1500)
    assert 1000 <= sum(map(len, sample)) <= 2000
    for domain in corpus.domains():
        assert any(domain in text for text in sample), domain
    assert not any("validation" in text for text in sample)


def test_records_are_text_or_bad_and_nothing_else(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(records(2)) + "no\n")
    (part,) = find.find_parts([str(tmp_path / "a.jsonl")], 10**6)
    kinds = [type(r) for r in read.read_part(part, "text")]
    assert kinds == [Text, Text, Bad]
