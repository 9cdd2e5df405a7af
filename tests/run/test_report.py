"""The page of a run, its log, and the baselines that a run must beat."""

import itertools
import json
import math
import re
import xml.etree.ElementTree
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from littlelm_core.config import LittleLMError
from littlelm_core.report import (
    MetricsLog,
    Page,
    baselines,
    comparison,
    duration,
    mfu,
    read_metrics,
    write_report,
    write_text,
)
from littlelm_core.report.baseline import _discounts, count_grams, kneser_ney
from littlelm_core.report.charts import _smooth
from littlelm_core.shards import write_shard
from littlelm_core.tokenizer import Tokenizer

# ---- The page


def start(last=100):
    group = {"tensors": 2, "parameters": 1000, "lr": 0.01, "weight_decay": 0.1}
    return {
        "event": "start", "step": 0, "versions": {"torch": "2"}, "device": "cpu",
        "processes": 1, "precision": "fp32", "compile": False, "last_step": last,
        "parameters": {"total": 2000}, "tokens_per_step": 64, "data": "nowhere",
        "groups": [{"name": "matrix", **group}, {"name": "head", **group}],
        "parts": {"attention": {"use": "gqa", "source": "abc"}},
    }  # fmt: skip


def step(i, loss=3.0):
    return {
        "event": "train", "step": i, "tokens": 64 * i, "loss": loss, "grad_norm": 1.0,
        "lr": {"matrix": 0.01, "head": 0.001}, "tokens_per_second": 1000.0 + i,
        "mfu": None, "skipped_steps": 0, "seconds": 0.1 * i,
    }  # fmt: skip


def validation(i):
    score = {"loss": 3.5, "bits_per_byte": 1.75, "tokens": 10, "bytes": 30}
    domains = {"code": score, "overall": score}
    return {"event": "validation", "step": i, "domains": domains, "whole": True}


def sample(i, text):
    return {
        "event": "sample",
        "step": i,
        "domain": "code",
        "prompt": "<p>",
        "text": text,
    }


def page_of(folder, records, run=None):
    text = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return write_report(folder).read_text(encoding="utf-8")


def whole_run(steps=100):
    records = [start(), *(step(i, 3 + 5 / i) for i in range(1, steps + 1))]
    return [*records, validation(50), validation(steps), sample(steps, "a\nb")]


def test_the_page_loads_nothing_from_anywhere(tmp_path):
    text = page_of(tmp_path, whole_run(), {"name": "mine", "steps": 100})
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(?!#)[^\"'#\s]*//", text)
    assert "@import" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        root = xml.etree.ElementTree.fromstring(
            svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
        )
        assert root.get("viewBox"), "an SVG without viewBox does not scale to a phone"
        assert root.get("aria-label")
    assert text.count("<svg") == 4, "loss, bits per byte, rate and speed"
    assert "mine" in text


def test_every_color_is_named_for_both_schemes(tmp_path):
    """A color left in the SVG would be black on a dark screen."""
    text = page_of(tmp_path, whole_run())
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", svg)
        assert "var(--ink)" in svg
    for name in set(re.findall(r"var\(--(\w+)\)", text)):
        assert text.count(f"--{name}:") == 2, f"--{name} in the light and dark scheme"


def test_it_reloads_only_while_the_run_goes_on(tmp_path):
    records = whole_run(40)
    assert 'http-equiv="refresh"' in page_of(tmp_path, records)
    for status in ("finished", "interrupted", "failed"):
        end = {"event": "end", "step": 40, "status": status, "error": "<why>"}
        text = page_of(tmp_path, [*records, end])
        assert 'http-equiv="refresh"' not in text
        assert f'class="status {status}"' in text
        assert "&lt;why&gt;" in text


def test_what_a_model_writes_is_text_and_no_html(tmp_path):
    text = page_of(tmp_path, [start(), step(1), sample(1, "<script>alert(1)</script>")])
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>&lt;p&gt;</b>" in text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [start()],
        [start(), step(1)],
        [start(), step(1, None)],
        [start(), *(step(i, None) for i in range(1, 80))],
        [start(), step(1), validation(1)],
        [start(), *(step(i) for i in range(1, 2000))],
        [step(3), step(4)],
    ],
    ids=["nothing", "start", "one", "skip", "all-skip", "valid", "long", "no-start"],
)  # fmt: skip
def test_any_part_of_a_run_gives_a_page(tmp_path, records):
    text = page_of(tmp_path, records)
    assert "</html>" in text
    assert len(text) < 200_000
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).lower()


def test_the_page_shows_baselines_of_its_data(tmp_path):
    scores = {"bigram": {"code": 2.468, "overall": 2.468}}
    kept = {"key": "x", "scores": scores}
    (tmp_path / "baselines.json").write_text(json.dumps(kept))
    first = {**start(), "data": str(tmp_path)}
    text = page_of(tmp_path, [first, step(1), validation(1)])
    assert "2.468" in text
    assert "1.750" in text


def test_a_page_is_written_now_and_then(tmp_path, monkeypatch):
    times = []
    clock = [1000.0]
    monkeypatch.setattr("littlelm_core.report.page.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "littlelm_core.report.page.write_report", lambda d: times.append(clock[0])
    )
    page = Page(tmp_path)
    for _ in range(100):
        page.refresh()
        clock[0] += 1
    assert 5 <= len(times) <= 10, "about every ten seconds when writing costs nothing"
    Page(tmp_path, writes=False).write()
    assert len(times) <= 10


def test_the_mean_does_not_lag():
    """A curve that falls in a straight line is its own symmetric mean."""
    line = np.linspace(5, 1, 200)
    assert np.allclose(_smooth(line), line)
    line[50] = math.nan
    assert np.isfinite(_smooth(line)).all()


# ---- The log


def test_half_a_line_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 1}\n\n[1]\n{"event": "tr', "utf-8")
    assert read_metrics(path) == [{"event": "train", "step": 1}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_log_opened_at_a_step_forgets_what_came_after(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for i in (1, 2, 3):
        log.write("train", i, loss=float(i))
    log.write("end", 3, status="finished")
    log = MetricsLog(tmp_path, 2)
    assert [r["step"] for r in read_metrics(log.path)] == [1, 2]
    assert log.last("train")["loss"] == 2.0
    assert log.last("train", 1)["loss"] == 1.0
    assert log.last("end") is None
    assert MetricsLog(tmp_path, 0).records == [], "a run that starts has no past"
    silent = MetricsLog(tmp_path / "other", 0, writes=False)
    silent.write("train", 1)
    assert not (tmp_path / "other").exists(), "only the first process writes"


def test_a_log_that_cannot_be_written_says_so_in_one_line(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(LittleLMError, match=r"metrics\.jsonl.*checkpoint"):
        log.write("train", 1)
    with pytest.raises(ValueError, match="JSON"):
        log.write("train", 2, loss=math.nan)
    (tmp_path / "file").write_text("")
    with pytest.raises(LittleLMError, match="another folder"):
        write_text(tmp_path / "file" / "x", "text")


def test_durations_and_mfu():
    import torch

    assert duration(59.4) == "59 s"
    assert duration(245) == "4 min 05 s"
    assert duration(12_000) == "3 h 20 min"
    assert mfu(1e12, torch.device("cpu")) is None, "no peak, no percentage"


# ---- The baselines

BOS, VOCAB = 7, 8


def documents(rng, number):
    found = []
    for _ in range(number):
        words = [0]
        for _ in range(rng.integers(1, 25)):
            words.append((3 * words[-1] + rng.integers(0, 3)) % 7)
        found.append([BOS, *words])
    return found


def kneser_ney_by_hand(training, order, document):
    """The same model with dictionaries, a token at a time (Chen and Goodman, 1998)."""
    raw = [Counter() for _ in range(order + 1)]
    for text in training:
        for end in range(1, len(text)):
            for n in range(1, order + 1):
                if end - n + 1 >= 0:
                    raw[n][tuple(text[end - n + 1 : end + 1])] += 1
    for n in range(2, order + 1):  # BOS may only open an n-gram
        raw[n] = Counter({g: c for g, c in raw[n].items() if BOS not in g[1:]})
    tables = []
    for n in range(1, order + 1):
        counts = raw[n]
        if n < order:
            before = Counter(g[1:] for g in raw[n + 1])
            counts = Counter({g: before.get(g, c) for g, c in counts.items()})
        tables.append(counts)
    grams_of_one = Counter({(w,): 0 for w in range(VOCAB)})

    def probability(history, word):
        p = 1.0 / VOCAB
        for n, counts in enumerate(tables, 1):
            context = tuple(history[len(history) - n + 1 :]) if n > 1 else ()
            if len(history) < n - 1:
                break
            values = np.array(
                list((counts | grams_of_one if n == 1 else counts).values())
            )
            size = _discounts(values)
            table = dict(zip((counts | grams_of_one if n == 1 else counts), size,
                             strict=True))  # fmt: skip
            follow = {g: c for g, c in counts.items() if g[:-1] == context}
            total = sum(follow.values())
            if total == 0:
                break
            taken = sum(table[g] for g in follow)
            gram = (*context, word)
            kept = follow.get(gram, 0) - table[gram] if gram in follow else 0.0
            p = (kept + taken * p) / total
        return p

    return [probability(document[:i], document[i]) for i in range(1, len(document))]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_kneser_ney_equals_dictionaries(order):
    rng = np.random.default_rng(11)
    training = documents(rng, 12)
    grams = count_grams(np.concatenate(training), VOCAB, BOS, order)
    for document in documents(rng, 4) + training[:1]:
        got = kneser_ney(grams, np.array(document), BOS)[1:]
        want = kneser_ney_by_hand(training, order, document)
        assert np.allclose(got, want, atol=1e-12), f"order {order}"


def test_probabilities_sum_to_one_in_every_context():
    rng = np.random.default_rng(12)
    grams = count_grams(np.concatenate(documents(rng, 30)), VOCAB, BOS, 3)
    for context in itertools.product(range(7), repeat=2):
        for past in ([BOS, *context], [BOS, context[0]], [BOS], [BOS, 4, *context]):
            texts = [np.array([*past, word]) for word in range(VOCAB)]
            total = sum(kneser_ney(grams, text, BOS)[-1] for text in texts)
            assert abs(total - 1) < 1e-12, past


def test_documents_do_not_leak_into_each_other():
    """What stands before a BOS changes nothing behind it."""
    rng = np.random.default_rng(13)
    training = documents(rng, 20)
    grams = count_grams(np.concatenate(training), VOCAB, BOS, 4)
    one, two = documents(rng, 2)
    alone = kneser_ney(grams, np.array(two), BOS)[1:]
    behind = kneser_ney(grams, np.array(one + two), BOS)[len(one) + 1 :]
    assert np.array_equal(alone, behind)
    turned = count_grams(np.concatenate(training[::-1]), VOCAB, BOS, 4)
    assert np.array_equal(kneser_ney(turned, np.array(two), BOS)[1:], alone)


@pytest.fixture
def prepared(tmp_path):
    """A text in which a token depends on the two before it."""
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)} | {b"ab": 256})
    rng = np.random.default_rng(14)

    def texts(number):
        found = []
        for _ in range(number):
            text = "ab"
            while len(text) < 120:
                right = "abc"[(ord(text[-1]) + ord(text[-2])) % 3]
                text += right if rng.random() < 0.9 else rng.choice(list("abc"))
            found.append([tokenizer.bos_id, *tokenizer.encode(text)])
        return found

    def shard(name, number):
        path = tmp_path / f"{name}-00000.shard"
        return write_shard(path, texts(number), tokenizer.vocab_size)

    held_out = {d: [shard(f"validation-{d}", n)] for d, n in (("x", 3), ("y", 9))}
    return SimpleNamespace(
        folder=tmp_path, tokenizer=tokenizer, train=[shard("train-x", 60)],
        validation=held_out,
    )  # fmt: skip


def test_baselines_are_bits_per_byte_of_each_domain(prepared):
    scores = baselines(prepared)
    assert set(scores) == {"bigram", "5-gram", "lzma"}
    for name, by_domain in scores.items():
        assert set(by_domain) == {"x", "y", "overall"}, name
    # 0.9 right, 0.1 spread over three: H = 0.57 bits a byte is the best possible.
    best = -(0.9 + 0.1 / 3) * math.log2(0.9 + 0.1 / 3) - (0.2 / 3) * math.log2(0.1 / 3)
    assert best < scores["5-gram"]["overall"] < 1.4 * best
    assert scores["bigram"]["overall"] > 1.5 * scores["5-gram"]["overall"]
    sizes = {d: 120 * len(s[0]) for d, s in prepared.validation.items()}
    for by_domain in scores.values():
        mean = sum(by_domain[d] * n for d, n in sizes.items()) / sum(sizes.values())
        assert math.isclose(by_domain["overall"], mean)


def test_baselines_are_kept_for_these_shards_alone(prepared, monkeypatch):
    scores = baselines(prepared)
    again = "littlelm_core.report.baseline._compute"
    monkeypatch.setattr(again, lambda p: pytest.fail("they were computed before"))
    assert baselines(prepared) == scores
    other = SimpleNamespace(**vars(prepared))
    other.validation = {"x": prepared.validation["x"]}
    monkeypatch.setattr(again, lambda p: {"new": {}})
    assert baselines(other) == {"new": {}}, "another split has other numbers"
    (prepared.folder / "baselines.json").write_text("{half")
    assert baselines(prepared) == {"new": {}}


def test_the_comparison_is_a_table():
    validation = {"code": {"bits_per_byte": 1.5}, "overall": {"bits_per_byte": 1.6}}
    text = comparison(validation, {"bigram": {"code": 2.0, "overall": 2.1}})
    assert text.splitlines()[0].split() == [
        "bits",
        "per",
        "byte",
        "this",
        "run",
        "bigram",
    ]
    assert text.splitlines()[1].split() == ["code", "1.500", "2.000"]
