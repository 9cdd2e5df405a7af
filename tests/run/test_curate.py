"""data curate: the same clean text for any workers and any kill; nothing is lost."""

import base64
import datetime
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from littlelm_core import curation, ingest
from littlelm_core.cli import main
from littlelm_core.config import ConfigError, DataError
from littlelm_core.ingest import curate_dedup, curate_steps, curate_write, pool, read
from littlelm_core.ingest.curate import Options, curate, filter_names
from littlelm_core.ingest.curate_options import Examples
from littlelm_core.ingest.find import cut, find_parts
from littlelm_core.ingest.read import Bad, read_part
from littlelm_core.tokenizer import Tokenizer, train_bpe

NONE = Options(filters=())  # duplicates alone
STARTS, MIDDLES = ("ba", "de", "fi", "go", "lu"), ("ras", "nem", "til")
ENDS = ("dor", "vus", "kin", "pel", "mo", "ta")
WORDS = [a + b + c for a in STARTS for b in MIDDLES for c in ENDS]


def prose(draw, words=80):
    """Sentences that every filter keeps: no line and no run of words twice."""
    text = []
    while words > 0:
        line = draw.choices(WORDS, k=8) + draw.choices(["the", "of", "and", "to"], k=4)
        draw.shuffle(line)
        text.append(" ".join(line).capitalize() + ".")
        words -= len(line)
    return "\n".join(text)


def corpus(seed=1, count=60, near=0.3, equal=0.2, words=80):
    """Records of which some are copies, or nearly, of earlier ones."""
    draw, records = random.Random(seed), []
    for i in range(count):
        text = prose(draw, words)
        kind = draw.random()
        if records and kind < equal:
            text = draw.choice(records)["text"]
        elif records and kind < equal + near:
            changed = draw.choice(records)["text"].split(" ")
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] = "changed"
            text = " ".join(changed)
        records.append({"id": i, "url": f"https://example.org/{i}", "text": text})
    return records


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(records))
    return path


def outcome(folder):
    """Return the records that were kept, in order."""
    manifest = json.loads((folder / "curated.json").read_text())
    found = []
    for part in manifest["parts"]:
        path = folder / part["name"]
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += [json.loads(line) for line in read.raw_lines(path)]
    return found


def files_of(folder):
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def test_everything_read_is_kept_or_counted(tmp_path):
    records = corpus(count=80)
    records[3]["text"] = "the menu of the day and of the night\n" * 20
    records[5]["text"] = "short"
    records[7]["text"] += " Größe."
    text = lines(records[:40]) + "no json\n" + '{"id": 7}\n' + lines(records[40:])
    (tmp_path / "in.jsonl").write_text(text + '{"text": "  "}\n')
    manifest = curate([tmp_path / "in.jsonl"], tmp_path / "out", workers=1)
    kept = outcome(tmp_path / "out")
    removed = sum(r["documents"] for r in manifest["removed"].values())
    assert manifest["records"] == 83
    assert manifest["bad"] == {
        "total": 3,
        "reasons": {"empty": 1, "no key 'text'": 1, "not JSON": 1},
    }
    assert len(kept) == manifest["kept"]["documents"]
    assert len(kept) + removed + 3 == 83
    size = sum(len(r["text"].encode()) for r in records)
    lost = sum(r["bytes"] for r in manifest["removed"].values())
    assert manifest["read"]["bytes"] == size == manifest["kept"]["bytes"] + lost
    assert manifest["removed"]["gopher_repetition: repeated lines"]["documents"] == 1
    assert manifest["removed"]["duplicates: exact"]["documents"] > 3
    assert manifest["removed"]["duplicates: near"]["documents"] > 3
    by_id = {r["id"]: r for r in records}
    for record in kept:  # all fields, and the text as `normalize` writes it
        whole = by_id[record["id"]]
        assert record == {**whole, "text": curation.normalize(whole["text"])}
    assert len({r["id"] for r in kept}) == len(kept)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["bad_places"][0] == f"{tmp_path}/in.jsonl:41: not JSON"
    assert not (tmp_path / "out" / ".curate").exists()


# ---- Duplicates


@pytest.mark.parametrize("seed", range(4))
def test_duplicates_are_those_of_the_whole_input_at_once(tmp_path, seed, monkeypatch):
    """Over files, parts, chunks and buckets: as `deduplicate` on one list."""
    monkeypatch.setattr(curate_dedup, "BUCKET_BYTES", 500)
    monkeypatch.setattr(curate_dedup, "CHUNK", 7)
    monkeypatch.setattr(curate_steps, "BATCH_CHARACTERS", 1000)
    records = corpus(seed, 120, near=0.5, words=60)
    records += [{"id": 200 + i, "text": t} for i, t in enumerate(["a b", "a c", "a b"])]
    sources = [
        write_lines(tmp_path / f"{name}.jsonl", records[at : at + 41])
        for name, at in (("a", 0), ("b", 41), ("c", 82))
    ]
    manifest = curate(sources, tmp_path / "out", NONE, 1, part_bytes=8000)
    assert len(manifest["parts"]) > 5
    texts = [curation.normalize(r["text"]) for r in records]
    kept, report = curation.deduplicate(texts)
    assert [r["id"] for r in outcome(tmp_path / "out")] == [
        records[i]["id"] for i in kept
    ]
    removed = manifest["removed"]
    assert removed["duplicates: exact"]["documents"] == report.exact
    assert removed["duplicates: near"]["documents"] == report.near > 10
    sizes = {str(k): v for k, v in report.sizes.items()}
    assert manifest["clusters"]["sizes"] == sizes


def test_exact_and_none(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", corpus(2, 50))
    texts = [r["text"] for r in corpus(2, 50)]
    exact = curate([source], tmp_path / "a", Options(filters=(), dedup="exact"), 1)
    assert exact["kept"]["documents"] == len(set(texts)) < 50
    none = curate([source], tmp_path / "b", Options(filters=(), dedup="none"), 1)
    assert none["kept"]["documents"] == 50
    assert none["removed"] == {}


def test_the_threshold_is_used(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", corpus(3, 80, near=0.6, words=40))
    kept = [
        curate([source], tmp_path / str(t), Options(filters=(), threshold=t), 1)["kept"]
        for t in (0.5, 0.9)
    ]
    assert kept[0]["documents"] < kept[1]["documents"]


def test_a_group_without_end_is_given_up_and_said(monkeypatch):
    """n documents with one key and nothing else in common are not n^2 comparisons."""
    monkeypatch.setattr(curate_dedup, "PATIENCE", 2)
    asked = []

    def alike(first, second):
        asked.append((first, second))
        return False

    numbers = list(range(50))
    pairs, compared, hasty = curate_dedup._compare_group(numbers, numbers, alike)
    assert (pairs, compared, hasty) == ([], 100, True)
    assert len(asked) == 100


def test_all_members_of_a_group_are_compared():
    """1 is like 0 and 2 like 1 only: one cluster, though 2 is not like 0."""
    like = {(0, 1), (1, 2)}
    pairs, _, hasty = curate_dedup._compare_group(
        [0, 1, 2, 3], [0, 1, 2, 3], lambda a, b: tuple(sorted((a, b))) in like
    )
    assert (sorted(pairs), hasty) == ([(0, 1), (1, 2)], False)


# ---- Workers, kills


def sources_of_three(folder):
    records = corpus(5, 240)
    write_lines(folder / "a.jsonl", records[:120])
    packed = gzip.compress(lines(records[120:180]).encode(), mtime=0)
    (folder / "b.jsonl.gz").write_bytes(packed)
    table = pa.Table.from_pylist(records[180:])
    pq.write_table(table, folder / "c.parquet", row_group_size=10)
    return [f"web={folder / 'a.jsonl'}", f"web={folder / 'b.jsonl.gz'}",
            f"books={folder / 'c.parquet'}"]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl.zst", "parquet"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch, form):
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    sources, options = sources_of_three(tmp_path), Options(format=form)
    counts = (1, 2, 3) if form == "jsonl.zst" else (1, 2)
    for workers in counts:
        curate(sources, tmp_path / str(workers), options, workers, part_bytes=9000)
    first = files_of(tmp_path / "1")
    assert len([name for name in first if name.startswith("web/")]) > 3
    for workers in counts[1:]:
        assert files_of(tmp_path / str(workers)) == first


KILLED = """
import sys
from littlelm_core.ingest import curate, curate_dedup, curate_steps, curate_write
from littlelm_core.ingest.pool import Pool
import os, signal
what, after = sys.argv[1], int(sys.argv[2])
module = {"sift": curate_steps, "find_pairs": curate_dedup, "write": curate_write}[what]
real, count = getattr(module, what), 0
def killed(*arguments, **more):
    global count
    count += 1
    if count > after:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **more)
setattr(module, what, killed)
curate.curate(sys.argv[4:], sys.argv[3], workers=1, part_bytes=9000)
"""


@pytest.mark.parametrize(
    ("what", "after"),
    [("sift", 0), ("sift", 3), ("find_pairs", 2), ("find_pairs", 30), ("write", 4)],
)
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, monkeypatch, what, after):
    sources, out = sources_of_three(tmp_path), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, what, str(after), str(out), *sources]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (out / "curated.json").exists()
    calls = []
    module = {"sift": curate_steps, "find_pairs": curate_dedup, "write": curate_write}
    real = getattr(module[what], what)

    def counted(*arguments, **more):
        calls.append(arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(module[what], what, counted)
    curate(sources, out, workers=1, part_bytes=9000)
    resumed = len(calls)
    curate(sources, tmp_path / "whole", workers=1, part_bytes=9000)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert len(calls) - resumed == resumed + after, "what was done was done again"


def test_killed_at_any_moment_with_workers(tmp_path):
    """SIGKILL to the parent and its processes, whatever they do just then."""
    sources, out = sources_of_three(tmp_path), tmp_path / "out"
    code = (
        "import sys\nfrom littlelm_core.ingest import curate, pool\n"
        "pool.IN_PROCESS_BYTES = 0\n"
        "if __name__ == '__main__':\n"
        "    curate.curate(sys.argv[2:], sys.argv[1], workers=2, part_bytes=9000)\n"
    )
    (tmp_path / "run.py").write_text(code)
    command = [sys.executable, str(tmp_path / "run.py"), str(out), *sources]
    process = subprocess.Popen(command, start_new_session=True)
    until = time.monotonic() + 60
    while len(list(out.glob(".curate/*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(out.glob(".curate/*.json")), "killed too early to test a resume"
    with pytest.raises(DataError, match="has not finished"):
        find_parts([str(out)], 10**6)
    curate(sources, out, workers=1, part_bytes=9000)
    curate(sources, tmp_path / "whole", workers=1, part_bytes=9000)
    assert files_of(out) == files_of(tmp_path / "whole")


def stop_while_writing(source, out, options):
    """Curate, but stop when the third part is to be written."""
    real, calls = curate_write.write, []

    def stopped(*arguments, **more):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curate_write, "write", stopped)
        with pytest.raises(KeyboardInterrupt):
            curate([source], out, options, 1, part_bytes=6000)


def test_killed_after_a_change_is_not_the_folder_of_before(tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", corpus(6, 60)), tmp_path / "out"
    curate([source], out, NONE, 1, part_bytes=6000)
    other = Options(filters=(), dedup="none")
    stop_while_writing(source, out, other)
    with pytest.raises(DataError, match="has not finished"):
        find_parts([str(out)], 10**6)
    curate([source], out, other, 1, part_bytes=6000)
    curate([source], tmp_path / "whole", other, 1, part_bytes=6000)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("change", ["dedup", "classifier", "code"])
def test_what_another_run_has_left_is_not_gone_on_with(tmp_path, monkeypatch, change):
    records = corpus(6, 60)
    source, out = write_lines(tmp_path / "in.jsonl", records), tmp_path / "out"
    texts = [r["text"] for r in records]
    model = curation.QualityClassifier(bits=12)
    model.fit(texts[:30], texts[30:])
    model.save(tmp_path / "model.npz")
    options = Options(filters=(), classifier=str(tmp_path / "model.npz"))
    stop_while_writing(source, out, options)
    if change == "dedup":
        options = Options(filters=(), dedup="none", classifier=options.classifier)
    elif change == "classifier":
        model.fit(texts[30:], texts[:30])
        model.save(tmp_path / "model.npz")
    else:
        monkeypatch.setattr("littlelm_core.ingest.curate.CODE", "other code")
    real, sifted = curate_steps.sift, []
    monkeypatch.setattr(
        curate_steps, "sift", lambda *a, **k: sifted.append(a) or real(*a, **k)
    )
    curate([source], out, options, 1, part_bytes=6000)
    again = len(sifted)
    curate([source], tmp_path / "whole", options, 1, part_bytes=6000)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert again == len(sifted) - again > 3, "parts of another run were taken over"


def test_damaged_files_are_written_anew(tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", corpus(6, 60)), tmp_path / "out"
    curate([source], tmp_path / "whole", NONE, 1, part_bytes=6000)
    stop_while_writing(source, out, NONE)
    written, docs = out / "in" / "in-00000.jsonl.zst", out / ".curate" / "in-00001.docs"
    for path in (written, docs):
        path.write_bytes(path.read_bytes()[:-8])
    curate([source], out, NONE, 1, part_bytes=6000)
    assert files_of(out) == files_of(tmp_path / "whole")
    written.write_bytes(written.read_bytes()[:-8])
    curate([source], out, NONE, 1, part_bytes=6000)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_done_is_done_and_a_change_is_not(tmp_path, monkeypatch, capsys):
    source = write_lines(tmp_path / "in.jsonl", corpus(6, 60))
    first = curate([source], tmp_path / "out", workers=1, part_bytes=6000)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("[!.]*.*")}
    assert curate([source], tmp_path / "out", workers=2, part_bytes=6000) == first
    assert "done already" in capsys.readouterr().err
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("[!.]*.*")}
    assert after == before
    write_lines(source, corpus(7, 20))
    second = curate([source], tmp_path / "out", workers=1, part_bytes=6000)
    assert second["records"] == 20
    names = {part["name"] for part in second["parts"]}
    found = {f"in/{p.name}" for p in (tmp_path / "out" / "in").iterdir()}
    assert found == names, "parts of the former input are left"
    other = curate([source], tmp_path / "out", NONE, 1, part_bytes=6000)
    assert other["options"]["filters"] == []


# ---- Formats


def test_a_cut_file_gives_each_line_once(tmp_path):
    texts = ["x" * n + "é" for n in (1, 5, 30, 2, 100, 1, 1, 60)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    whole = find_parts([str(path)], 10**9)
    for size in range(1, 400, 7):
        parts = cut(whole, size)
        found = [r for part in parts for r in read_part(part, "text")]
        assert [r.text for r in found] == texts, size
        assert sum(part.size for part in parts) == path.stat().st_size
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    (part,) = cut(find_parts([str(packed)], 10**9), 20)
    assert [r.text for r in read_part(part, "text")] == texts
    bad = path.read_text() + "\nnonsense\n"
    path.write_text(bad)
    (found,) = (
        r
        for part in cut(find_parts([str(path)], 10**9), 50)
        for r in read_part(part, "text")
        if isinstance(r, Bad)
    )
    assert found.place == f"{path}:byte {bad.encode().index(b'nonsense')}"


def test_a_cut_parquet_file_gives_each_row_once(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": f"row {i} " + "x" * i, "id": i} for i in range(90)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    parts = cut(find_parts([str(path)], 10**9), 600)
    assert len(parts) > 3
    found = [r for part in parts for r in read_part(part, "text", whole=True)]
    assert [r.record for r in found] == rows
    assert found[89].place == f"{path}:row 90"


def test_a_long_text_file_is_cut_as_a_short_one(tmp_path, monkeypatch):
    draw = random.Random(1)
    paragraphs = [prose(draw, 20) for _ in range(400)]
    text = "\n\n".join(paragraphs[:200]) + "x" * 3000 + "\n".join(paragraphs[200:])
    text += "é" * 3000
    path = tmp_path / "a.txt"
    path.write_text(text)
    monkeypatch.setattr(read, "PIECE", 300)
    whole = [r.text for r in read._read_text(path, None)]
    assert "".join(whole) == text
    monkeypatch.setattr(read, "HELD_TEXT", 1000)
    assert [r.text for r in read._read_text(path, None)] == whole
    path.write_bytes(text.encode()[:-3000] + b"\xff" + b"more")
    *good, bad = read._read_text(path, None)
    line = text[:-1500].count("\n") + 1
    assert bad == Bad(f"{path}:{line}", "not UTF-8")
    assert "".join(r.text for r in good) == text.encode()[:-3000].decode()


def test_parquet_keeps_its_types(tmp_path):
    draw = random.Random(2)
    when = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    rows = [
        {
            "text": prose(draw) + "  ", "when": when, "raw": bytes([i, 255]),
            "tags": ["a", None], "n": i, "meta": {"x": 1.5, "y": None},
        }
        for i in range(20)
    ]  # fmt: skip
    rows[4]["text"], rows[7]["text"] = rows[2]["text"], None
    schema = pa.schema(
        [
            ("text", pa.large_string()), ("when", pa.timestamp("ns", "UTC")),
            ("raw", pa.binary()), ("tags", pa.list_(pa.string())), ("n", pa.int16()),
            ("meta", pa.struct([("x", pa.float32()), ("y", pa.string())])),
        ]
    )  # fmt: skip
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=3)
    for size in (100, 10**9):
        out = tmp_path / str(size)
        options = Options(format="parquet")
        manifest = curate([path], out, options, 1, part_bytes=size)
        tables = [pq.read_table(out / p["name"]) for p in manifest["parts"]]
        table = pa.concat_tables(tables)
        assert table.schema.remove_metadata() == schema
        expected = [
            {**row, "text": row["text"].strip()}
            for i, row in enumerate(rows)
            if i not in (4, 7)
        ]
        assert table.to_pylist() == expected
        assert manifest["bad"]["reasons"] == {"text is NoneType, not a string": 1}
    curate([path], tmp_path / "lines", workers=1)  # what JSON can say of them
    first = outcome(tmp_path / "lines")[0]
    assert first["raw"] == base64.b64encode(b"\x00\xff").decode()
    assert first["when"].startswith("2024-05-01T12:00:00")
    assert first["meta"] == {"x": 1.5, "y": None}


def test_json_of_any_shape_becomes_parquet(tmp_path):
    draw = random.Random(3)
    records = [{"text": prose(draw), "id": i} for i in range(6)]
    records[0]["mixed"], records[1]["mixed"] = 5, {"a": "é"}
    records[2]["float"], records[3]["float"] = 1, 2.5
    records[4]["nothing"] = {}
    records[5]["list"] = [1, 2]
    source = write_lines(tmp_path / "in.jsonl", records)
    curate([source], tmp_path / "out", Options(format="parquet"), 1)
    found = outcome(tmp_path / "out")
    assert [r["mixed"] for r in found[:3]] == ["5", '{"a": "é"}', None]
    assert [r["float"] for r in found[2:4]] == [1.0, 2.5]
    assert found[4]["nothing"] == "{}"
    assert found[5]["list"] == [1, 2]
    assert [r["text"] for r in found] == [r["text"] for r in records]


def test_parquet_takes_what_has_no_type_in_it(tmp_path):
    """Integers that a float cannot hold, and halves of characters: one is enough."""
    draw = random.Random(5)
    records = [{"text": prose(draw), "id": i} for i in range(4)]
    records[0] |= {"n": 2**60 + 1, "in": {"n": [2**60 + 1]}, "half": "a\ud800"}
    records[1] |= {"n": 1.5, "in": {"n": [0.5]}, "half": "\ud83d\ude00 \\ud800"}
    source = write_lines(tmp_path / "in.jsonl", records)
    curate([source], tmp_path / "out", Options(format="parquet"), 1)
    found = outcome(tmp_path / "out")
    assert [r["n"] for r in found] == [str(2**60 + 1), "1.5", None, None]
    assert json.loads(found[0]["in"]) == records[0]["in"]
    assert [r["half"] for r in found[:2]] == ["a\ufffd", "\U0001f600 \\ud800"]
    assert [r["id"] for r in found] == [0, 1, 2, 3]
    assert [r["text"] for r in found] == [r["text"] for r in records]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    data = "".join(json.dumps({"text": t}) + "\n" for t in ("a b", "c d")).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + data)
    (part,) = find_parts([str(tmp_path / "in.jsonl")], 10**6)
    assert [found.text for found in read_part(part, "text")] == ["a b", "c d"]


def test_text_files_and_another_key(tmp_path):
    draw = random.Random(4)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a.txt").write_text(prose(draw))
    (tmp_path / "in" / "b.txt").write_text(prose(draw))
    (tmp_path / "in" / "c.bin").write_bytes(b"\0\1\2")
    manifest = curate([tmp_path / "in"], tmp_path / "out", Options(text_key="body"), 1)
    assert [r["path"] for r in outcome(tmp_path / "out")] == ["b.txt", "sub/a.txt"]
    assert all(r["body"] for r in outcome(tmp_path / "out"))
    assert manifest["bad"]["reasons"] == {"binary file": 1}


def test_odd_records_come_through(tmp_path):
    draw = random.Random(5)
    odd = {
        "text": prose(draw) + "\u200b\r\nÄrger", "big": 2**70, "x": [{"y": None}],
        "lone": "\ud800", "float": 0.1,
    }  # fmt: skip
    source = write_lines(tmp_path / "a.jsonl", [odd, {"text": "\u200b\u200b"}])
    manifest = curate([source], tmp_path / "out", workers=1)
    (found,) = outcome(tmp_path / "out")
    assert found == {**odd, "text": odd["text"].replace("\u200b\r", "")}
    assert manifest["removed"]["normalize: nothing left"]["documents"] == 1
    raw = curate([source], tmp_path / "raw", Options(normalize=False, filters=()), 1)
    assert outcome(tmp_path / "raw")[0] == odd
    assert raw["kept"]["documents"] == 2


def test_prepare_reads_what_curate_writes(tmp_path):
    sources = sources_of_three(tmp_path)
    tokenizer = Tokenizer(train_bpe(["a record of the text "] * 20, 270))
    for form in ("jsonl.zst", "jsonl.gz", "parquet"):
        out = tmp_path / form
        curated = curate(sources, out, Options(format=form), 1, part_bytes=9000)
        assert all(part["name"].endswith(f".{form}") for part in curated["parts"])
        if form == "jsonl.gz":  # else the same text has other bytes a second later
            packed = [(out / part["name"]).read_bytes() for part in curated["parts"]]
            assert {head[3:8] for head in packed} == {bytes(5)}, "a name or a time"
        manifest = ingest.prepare([out], tmp_path / f"p-{form}", tokenizer, 1)
        assert sorted(manifest["domains"]) == ["books", "web"]
        splits = ("train", "validation")
        counts = [ingest.total(manifest, split)["documents"] for split in splits]
        assert sum(counts) == curated["kept"]["documents"]
        assert manifest["bad_records"]["total"] == 0


# ---- Steps


def test_evaluation_items_are_found(tmp_path):
    draw = random.Random(6)
    question = (
        "which of these things would a fox in winter most likely hide from others"
    )
    items = [
        {"query": question.capitalize() + "?", "choices": ["its food", "x"], "gold": 0},
        {"context": "the cat", "continuation": "sat"},  # too short to be found
        {"odd": {"deep": [" ".join(draw.choices(WORDS, k=30))]}},
    ]
    tasks = tmp_path / "tasks"
    write_lines(tasks / "foxes.jsonl", items)
    (tasks / "README.md").write_text("These are tasks. " * 20)
    records = [{"id": i, "text": prose(draw)} for i in range(6)]
    records[1]["text"] += "\n" + question.upper().replace(" ", "\n ") + " ITS FOOD."
    records[2]["text"] += "\nIt was the cat that sat on it."
    records[3]["text"] += "\nWhich of these things would a fox hide."
    records[4]["text"] += "\n" + items[2]["odd"]["deep"][0] + "."
    source = write_lines(tmp_path / "in.jsonl", records)
    options = Options(filters=(), against=(str(tasks),))
    manifest = curate([source], tmp_path / "out", options, 1)
    assert [r["id"] for r in outcome(tmp_path / "out")] == [0, 2, 3, 5]
    name = "decontamination: foxes.jsonl"
    assert manifest["removed"][name]["documents"] == 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("fox in winter" in e["detail"] for e in report["examples"][name])
    strict = Options(filters=(), against=(str(tasks / "foxes.jsonl"),), overlap=1.0)
    (tmp_path / "in.jsonl").write_text(
        lines([{"text": prose(draw) + "\n" + question[: len(question) - 7]}])
    )
    assert curate([source], tmp_path / "s", strict, 1)["kept"]["documents"] == 1


def test_the_classifier_decides(tmp_path):
    draw = random.Random(7)
    good = [prose(draw) for _ in range(20)]
    bad = [" ".join(draw.choices(["buy", "cheap", "pills", "now"], k=80))
           for _ in range(20)]  # fmt: skip
    model = curation.QualityClassifier(bits=12)
    model.fit(good[:10], bad[:10])
    model.save(tmp_path / "model.npz")
    records = [{"id": i, "text": t} for i, t in enumerate(good[10:] + bad[10:])]
    source = write_lines(tmp_path / "in.jsonl", records)
    options = Options(filters=(), dedup="none", classifier=str(tmp_path / "model.npz"))
    manifest = curate([source], tmp_path / "out", options, 1)
    assert [r["id"] for r in outcome(tmp_path / "out")] == list(range(10))
    assert manifest["removed"]["classifier: low score"]["documents"] == 10
    assert curate([source], tmp_path / "all", Options(
        filters=(), dedup="none", classifier=options.classifier, min_quality=0.0
    ), 1)["kept"]["documents"] == 20  # fmt: skip


def test_each_filter_can_be_named(tmp_path):
    assert filter_names("prose") == tuple(f.name for f in curation.PROSE_FILTERS)
    assert filter_names("none") == ()
    assert filter_names("c4, language") == ("c4", "language")
    german = "Der Hund und die Katze sind nicht in dem Haus, das auf der Straße ist. "
    records = [{"text": f"{german * 3} {i}"} for i in range(3)]
    source = write_lines(tmp_path / "in.jsonl", records)
    options = Options(filters=("language",), dedup="exact")
    manifest = curate([source], tmp_path / "en", options, 1)
    assert list(manifest["removed"]) == ["language: looks like de"]
    options = Options(filters=("language",), dedup="exact", language="de")
    assert curate([source], tmp_path / "de", options, 1)["kept"]["documents"] == 3


# ---- The report


def test_the_page_stands_alone_and_tells_all(tmp_path):
    records = corpus(8, 60)
    records[2]["text"] = "<script>alert(1)</script>\n" * 40
    source = write_lines(tmp_path / "in.jsonl", records)
    manifest = curate([source], tmp_path / "out", workers=1)
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|<iframe|src=|@import|url\(", page)
    assert "&lt;script&gt;alert(1)" in page
    for reason, counts in manifest["removed"].items():
        assert reason.replace("_", " ") in page
        assert f"{counts['documents']:,}" in page
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["examples"]) == set(manifest["removed"])
    texts = {str(r["id"]): curation.normalize(r["text"]) for r in records}
    stay = {str(r["id"]) for r in outcome(tmp_path / "out")}
    for kind in ("near", "exact"):
        for example in report["examples"][f"duplicates: {kind}"]:
            dropped, kept = example["fields"]["id"], example["kept"]["fields"]["id"]
            assert dropped not in stay
            assert kept in stay
            assert int(kept) < int(dropped), "the first of a cluster stays"
            for shown, number in ((example, dropped), (example["kept"], kept)):
                start = shown["start"]
                assert shown["text"] == texts[number][start : start + 600]
            assert kind == "exact" or example["text"] != example["kept"]["text"]


def test_examples_are_the_same_in_any_order_and_any_division():
    draw, digests = random.Random(9), list(range(0, 900, 9))
    for _ in range(5):
        draw.shuffle(digests)
        whole, halves = Examples(), [Examples(), Examples()]
        for digest in digests:
            for held in (whole, draw.choice(halves)):
                held.add("why", digest, lambda digest=digest: {"n": digest})
        assert [e["n"] for e in whole.to_json()["why"]] == [0, 9, 18, 27]
        merged = Examples()
        for half in halves:
            merged.merge(half.to_json())
        assert merged.to_json() == whole.to_json()


# ---- Bounds


def test_memory_does_not_grow_with_the_input(tmp_path, monkeypatch):
    """Eight times the text in one file, which one process reads in one go."""
    monkeypatch.setattr(curate_steps, "BATCH_CHARACTERS", 50_000)
    peaks = []
    for count in (150, 1200):
        records = corpus(9, count, near=0, equal=0, words=200)
        source = write_lines(tmp_path / f"{count}.jsonl", records)
        tracemalloc.start()
        curate([source], tmp_path / f"out{count}", NONE, 1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    small, large = peaks
    size = source.stat().st_size
    assert large < small + size / 4, f"{peaks} for {size} bytes more"


# ---- What is wrong is said in one line


def failure(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", "curate", *map(str, arguments)])
    error = capsys.readouterr().err.strip()
    assert stop.value.code in (1, 2)
    assert error.startswith("error: ")
    assert "\n" not in error
    return error


def test_bad_input_is_one_line(tmp_path, capsys):
    good = write_lines(tmp_path / "good.jsonl", corpus(1, 5))
    out = tmp_path / "out"
    (tmp_path / "t.csv").write_text("text\nhello\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    other = tmp_path / "prepared"
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    assert ".csv is no format" in failure([tmp_path / "t.csv", out], capsys)
    error = failure([good, out, "--text-key", "txt"], capsys)
    assert "no key 'txt'" in error
    assert "did you mean 'text'" in error
    assert "empty" in failure([tmp_path / "empty.jsonl", out], capsys)
    assert "no files" in failure([tmp_path / "folder", out], capsys)
    assert "something else" in failure([good, other], capsys)
    assert "is a file" in failure([good, good], capsys)
    assert "IN... OUT" in failure([good], capsys)
    assert "gopher_quality" in failure(
        [good, out, "--filters", "gopher_qualty"], capsys
    )
    assert "one of near" in failure([good, out, "--dedup", "fuzzy"], capsys)
    assert "one of jsonl.zst" in failure([good, out, "--format", "csv"], capsys)
    assert "threshold" in failure([good, out, "--threshold", "80"], capsys)
    nowhere = tmp_path / "nowhere"
    assert "nowhere" in failure([good, out, "--against", nowhere], capsys)
    assert "empty: not an item" in failure(
        [good, out, "--against", tmp_path / "empty.jsonl"], capsys
    )
    assert "classifier" in failure([good, out, "--classifier", good], capsys)
    assert not out.exists(), "a mistake leaves nothing behind"


def test_a_folder_in_use_is_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", corpus(1, 5))
    code = (
        "import sys, time\nfrom littlelm_core.ingest.write import hold\n"
        "from pathlib import Path\n"
        "with hold(Path(sys.argv[1])):\n    print('held', flush=True)\n"
        "    time.sleep(30)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(Exception, match="another process writes"):
            curate([source], tmp_path / "out", workers=1)
    finally:
        process.kill()
        process.wait()


def test_options_are_checked():
    with pytest.raises(ConfigError, match="did you mean"):
        Options(filters=("gopher_qality",))
    with pytest.raises(ConfigError, match="min_quality"):
        Options(min_quality=2)
    with pytest.raises(ConfigError, match="language"):
        Options(language="xx")


def test_the_command(tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", corpus(1, 40))
    with pytest.raises(SystemExit) as stop:
        main(["data", "curate", str(source), str(tmp_path / "out"), "--workers", "1"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "duplicates: near" in shown
    assert "report.html" in shown
    assert f"littlelm data prepare {tmp_path / 'out'}" in shown.replace("\n", "")
    with pytest.raises(SystemExit):
        main(["data", "curate", "--help"])
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert "littlelm data curate web.jsonl.gz data/curated/web" in shown


def test_a_packed_file_that_breaks_off_is_counted(tmp_path):
    records = corpus(1, 200, near=0, equal=0)
    packed = zstandard.ZstdCompressor().compress(lines(records).encode())
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    write_lines(tmp_path / "good.jsonl", corpus(2, 5))
    manifest = curate(
        [tmp_path / "cut.jsonl.zst", tmp_path / "good.jsonl"], tmp_path / "out", NONE, 1
    )
    assert manifest["bad"]["total"] >= 1
    assert any("ends too early" in reason for reason in manifest["bad"]["reasons"])
    assert manifest["domains"]["good"]["read"]["documents"] == 5


# ---- datatrove


def test_the_pipeline_of_datatrove_writes_the_same_bytes(tmp_path):
    pytest.importorskip("datatrove")
    from functools import partial

    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor

    from littlelm_core.ingest.datatrove_pipeline import Clean, executors

    sources = sources_of_three(tmp_path)
    local = partial(LocalPipelineExecutor, workers=1)
    plan = {"tasks": 3, "part_bytes": 9000}
    executors(local, sources, tmp_path / "theirs", **plan).run()
    curate(sources, tmp_path / "ours", workers=1, part_bytes=9000)
    assert files_of(tmp_path / "theirs") == files_of(tmp_path / "ours")
    executors(local, sources, tmp_path / "theirs", **plan).run()  # done: nothing to do
    records = [*corpus(5, 240)[:120], {"id": 1, "text": "short"}]
    documents = [Document(r["text"] + "  ", str(r["id"])) for r in records]
    kept = list(Clean().run(iter(documents)))
    expected = [
        r["text"]
        for r in records
        if curation.judge(r["text"], curation.PROSE_FILTERS) is None
    ]
    assert [doc.text for doc in kept] == expected
    assert Clean().filter(Document("short", "1")) == (
        False, "language: no known language",
    )  # fmt: skip
