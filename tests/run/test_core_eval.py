"""The CORE evaluator as a whole: processes, kills, memory, and the real files.

Models, tokenizers, tasks and the plain reading of the rules are the contract's.
"""

import collections
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from processes import run_ranks

from littlelm_core import core_eval
from littlelm_core.bench.core import planned
from littlelm_core.check import load_contract
from littlelm_core.config import ConfigError, DataError, LittleLMError
from littlelm_core.core_eval import (
    Example,
    Reader,
    Row,
    Rules,
    Score,
    Text,
    Work,
    crop,
    encode,
    evaluate,
    is_close,
    judge,
    load_tasks,
    packed,
    prompts,
    score_alone,
    score_rows,
    shots_of,
    spread,
)
from littlelm_core.ingest import core_table
from littlelm_core.report.core_run import EvaluationStopped, merge
from littlelm_core.tokenizer import Tokenizer, train_bpe

rules = load_contract("core_eval")

MINI = Path(__file__).parents[2] / "data" / "mini_core"
REAL = Path(__file__).parents[3] / "shared" / "core"
real_files = pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/core here")


def answers(report):
    """What an evaluation found out, without how and how fast."""
    facts = report.to_dict()
    scores = [facts[k] for k in ("mean_of_tasks", "interval", "core_uncropped")]
    return rules._items(report), scores


# ---- Several processes

SCRIPT = """
import sys, time
from pathlib import Path
from littlelm_core import core_eval
from littlelm_core.check import load_contract
from littlelm_core.core_eval import evaluate, load_tasks
from littlelm_core.report.core_run import EvaluationStopped

rank, world = dist.get_rank(), dist.get_world_size()
folder, rules = Path(sys.argv[1]), load_contract("core_eval")
tokenizer = rules.Pieces()
model, tasks = rules._transformer(tokenizer), load_tasks(folder)
keys = {"rank": rank, "world": world, "token_cache": folder / "tokens"}
encode = core_eval.encode
def noted(task, *rest):
    with open(folder / f"{world}-{rank}.encoded", "a") as file:
        file.write(task.label + "\\n")
    return encode(task, *rest)
core_eval.encode = noted
time.sleep(rank / 2)  # the journal has items of others when a late rank reads it
report = evaluate(model, tokenizer, tasks, journal=folder / f"journal-{world}", **keys)
(folder / f"{world}-{rank}.json").write_text(report.to_json(), "utf-8")
told = iter([True, True, False])
try:
    only = (lambda label, items: next(told)) if rank == 1 else lambda label, items: None
    evaluate(model, tokenizer, tasks, progress=only, **keys)
except EvaluationStopped:
    (folder / f"{world}-{rank}.stopped").touch()
"""


@pytest.mark.parametrize("world", [2, 3])
def test_every_process_has_the_whole_report_of_one(tmp_path, world):
    rules._write(tmp_path, rules._drawn(5, 10))
    run_ranks(SCRIPT, world, tmp_path, tmp_path)
    texts = {(tmp_path / f"{world}-{r}.json").read_text("utf-8") for r in range(world)}
    assert len(texts) == 1, "the ranks have different reports"
    facts = json.loads(texts.pop())
    tokenizer = rules.Pieces()
    model = rules._transformer(tokenizer)
    one = json.loads(evaluate(model, tokenizer, load_tasks(tmp_path)).to_json())
    for label, items in one["items"].items():
        for mine, theirs in zip(facts["items"][label], items, strict=True):
            assert mine["scores"] == pytest.approx(theirs["scores"], abs=1e-4)
            assert {**mine, "scores": 0, "settled": 0} == {
                **theirs, "scores": 0, "settled": 0,
            }  # fmt: skip
    for key in ("mean_of_tasks", "interval", "data_sha256", "table_sha256", "notes"):
        assert facts[key] == one[key], key
    assert facts["tokens"]["alone"] == one["tokens"]["alone"]
    assert facts["settings"]["world"] == world
    stopped = [(tmp_path / f"{world}-{r}.stopped").exists() for r in range(world)]
    assert all(stopped), f"one rank was told to stop, {stopped} did"
    encoded = [(tmp_path / f"{world}-{r}.encoded").read_text() for r in range(world)]
    labels = "".join(encoded).split()
    assert sorted(labels) == sorted(one["items"]), "each task's tokens are made once"


def test_ranks_that_read_a_journal_late_leave_no_item_out(tmp_path):
    """One rank has finished before the next one starts: its items are its own."""
    tokenizer = rules.Pieces()
    model, tasks = rules._transformer(tokenizer), rules._load(*rules._drawn(3, 10))
    whole = evaluate(model, tokenizer, tasks)
    keys = {"journal": tmp_path / "journal"}
    parts = [evaluate(model, tokenizer, tasks, rank=r, world=3, **keys)
             for r in range(3)]  # fmt: skip
    assert answers(merge(parts)) == answers(whole)
    again = evaluate(model, tokenizer, tasks, **keys)
    assert answers(again) == answers(whole)
    for result in again.tasks.values():
        assert result.tokens_run == 0, "it was read again"
        assert result.tokens_alone == 0, "what is saved is of items that were read"


def test_shares_are_not_a_score_and_all_of_them_are_wanted():
    tokenizer = rules.Pieces()
    model, tasks = rules._random_bigram(tokenizer), rules._load(*rules._drawn())
    parts = [evaluate(model, tokenizer, tasks, rank=r, world=2) for r in range(2)]
    with pytest.raises(LittleLMError, match="merge the reports of all ranks"):
        _ = parts[0].core
    for some in (parts[:1], [parts[1], parts[1]]):
        with pytest.raises(LittleLMError, match="lack"):
            merge(some)


# ---- Killed, and gone on


def interrupted(after, by=None):
    """A progress that ends the evaluation after so many items."""
    calls = []

    def progress(label, items):
        calls.append(label)
        if len(calls) == after and by is not None:
            raise by
        return len(calls) < after

    return progress


def finished(journal):
    """Return the (label, index) of the items in a journal."""
    lines = (journal / "rank-0.jsonl").read_text("utf-8").split("\n")
    found = [json.loads(line) for line in lines if line]
    return [tuple(record[:2]) for record in found if isinstance(record, list)]


@pytest.mark.parametrize("by", [KeyboardInterrupt, None])
@pytest.mark.parametrize("after", [1, 7, 17, 31])
def test_a_killed_evaluation_goes_on_and_reads_nothing_twice(tmp_path, after, by):
    tokenizer, specs = rules.Pieces(), rules._drawn(6)
    tasks = rules._load(*specs)
    whole = evaluate(rules._random_bigram(tokenizer), tokenizer, tasks)
    assert sum(r.count("settled") for r in whole.tasks.values()) == 0
    first, second = (rules._random_bigram(tokenizer) for _ in range(2))
    keys = {"journal": tmp_path / "journal", "batch_tokens": 200}
    with pytest.raises(by or EvaluationStopped):
        evaluate(first, tokenizer, tasks, progress=interrupted(after, by), **keys)
    done = finished(tmp_path / "journal")
    assert len(done) == after, f"{len(done)} items are kept of {after}"
    calls = []
    report = evaluate(
        second, tokenizer, tasks, **keys,
        progress=lambda label, items: calls.append(label),
    )  # fmt: skip
    assert answers(report) == answers(whole)
    assert collections.Counter(calls) == dict.fromkeys(whole.tasks, 9), (
        "progress counts those that were finished before, too"
    )
    by_label = {spec["label"]: spec for spec in specs}
    # A padded row: what stands behind its own tokens is id 0.
    read = [tuple(row) for ids_BT in second.seen for row in ids_BT.tolist()]
    assert len(read) < 9 * (4 + 2 + 1 + 1), "everything was read again"
    for label, index in done:
        for ids, _ in rules._spans(by_label[label], tokenizer, index):
            again = [row for row in read if row[: len(ids)] == tuple(ids)
                     and not any(row[len(ids) :])]  # fmt: skip
            assert not again, f"item {index} of {label} was read again"


def test_a_journal_is_of_one_model_with_its_buffers_and_settings(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self, seed, scale=1.0):
            super().__init__()
            size = tokenizer.vocab_size
            draw = torch.Generator().manual_seed(seed)
            self.register_buffer("table_VV", torch.randn(size, size, generator=draw))
            self.cfg = SimpleNamespace(
                vocab_size=size, context=None, scale=scale, act=lambda x: x
            )

        def forward(self, ids_BT):
            return self.table_VV[ids_BT] * self.cfg.scale

    tokenizer, tasks = rules.Pieces(), rules._load(*rules._drawn(2))
    keys = {"journal": tmp_path / "journal"}
    whole = evaluate(Scaled(1), tokenizer, tasks, **keys)
    other_ids = rules.Pieces(rules.LETTERS[::-1])
    tokenizer.fingerprint = other_ids.fingerprint = None  # nor has every one
    evaluate(Scaled(1), tokenizer, tasks, journal=tmp_path / "nameless")
    with pytest.raises(ConfigError, match="another model, tokenizer"):
        evaluate(Scaled(1), other_ids, tasks, journal=tmp_path / "nameless")
    tokenizer = rules.Pieces()
    for other in (Scaled(2), Scaled(1, scale=2.0)):
        with pytest.raises(ConfigError, match="another model"):
            evaluate(other, tokenizer, tasks, **keys)
    assert answers(evaluate(Scaled(1), tokenizer, tasks, **keys)) == answers(whole)


@pytest.mark.parametrize("many", [False, True])
def test_a_tokenizer_that_adds_bos_itself_is_refused(many):
    class Adds(rules.Pieces):
        def encode(self, text):
            return [self.bos_id, *super().encode(text)]

    tokenizer, tasks = Adds(), rules._load(*rules._drawn(2))
    if many:
        tokenizer.encode_batch = lambda texts: list(map(tokenizer.encode, texts))
    model = rules._random_bigram(tokenizer)
    with pytest.raises(ConfigError, match=r"BOS .* by itself"):
        evaluate(model, tokenizer, tasks)
    plain = rules.Pieces()
    plain.bos_id = plain.ids["j"]  # by chance what all texts begin with
    starts = [{"query": f"j{c}", "choices": ["b", "c"], "gold": 0} for c in "bcd"]
    evaluate(model, plain, rules._load(rules._spec("multiple_choice", starts)))
    tokenizer.bos_id = None
    with pytest.raises(ConfigError, match="bos_id = None"):
        evaluate(model, tokenizer, tasks)


def test_answers_without_a_score_are_counted():
    choices = [["b", "bc"], ["bc", "b"], ["d", "d"], ["c", "d"]]
    records = [{"query": "a", "choices": c, "gold": 0} for c in choices]
    tokenizer = rules.Pieces()
    model = rules._random_bigram(tokenizer)
    tasks = rules._load(rules._spec("multiple_choice", records))
    for legacy, won in ((False, 1), (True, 2)):  # "d" has nothing against "d"
        report = evaluate(model, tokenizer, tasks, legacy_nan=legacy)
        (result,) = report.tasks.values()
        assert (result.no_score, result.won_without_score) == (3, won)
        assert result.ties == 0
        said = [note for note in report.notes if "without a token" in note]
        assert len(said) == legacy
        assert all(note.endswith(": 2 answers are such") for note in said)


def test_half_a_line_is_scored_again(tmp_path):
    tokenizer = rules.Pieces()
    model, tasks = rules._transformer(tokenizer), rules._load(*rules._drawn(6))
    keys = {"journal": tmp_path / "journal"}
    whole = evaluate(model, tokenizer, tasks)
    with pytest.raises(EvaluationStopped):
        evaluate(model, tokenizer, tasks, progress=interrupted(12), **keys)
    path = tmp_path / "journal" / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EvaluationStopped):
        evaluate(model, tokenizer, tasks, progress=interrupted(20), **keys)
    assert answers(evaluate(model, tokenizer, tasks, **keys)) == answers(whole)
    # Half a first line: no item stands behind it.
    path.write_bytes(path.read_bytes()[:20])
    assert answers(evaluate(model, tokenizer, tasks, **keys)) == answers(whole)


def test_a_journal_of_anything_else_is_refused(tmp_path):
    tokenizer, specs = rules.Pieces(), rules._drawn(6)
    model, tasks = rules._transformer(tokenizer), rules._load(*specs)
    keys = {"journal": tmp_path / "journal"}
    evaluate(model, tokenizer, tasks, **keys)
    other = rules.Pieces([*rules.LETTERS[1:], rules.LETTERS[0]])
    changed = rules._load({**specs[0], "shots": 1}, *specs[1:])
    for what, arguments in {
        "model": (rules._transformer(tokenizer, seed=2), tokenizer, tasks, {}),
        "tokenizer": (model, other, tasks, {}),
        "table": (model, tokenizer, changed, {}),
        "data": (model, tokenizer, rules._load(*rules._drawn(7)), {}),
        "half": (model, tokenizer, [replace(t, items=t.items[1:]) for t in tasks], {}),
        "context": (model, tokenizer, tasks, {"context": 40}),
        "rule": (model, tokenizer, tasks, {"legacy_nan": True}),
        "sample": (model, tokenizer, tasks, {"max_per_task": 3}),
        "crop": (model, tokenizer, tasks, {"crop": "plain"}),
    }.items():
        *three, more = arguments
        with pytest.raises(ConfigError, match="another folder") as caught:
            evaluate(*three, **more, **keys)
        assert "\n" not in str(caught.value), what
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match="another folder"),
    ):
        evaluate(model, tokenizer, tasks, **keys)
    how = {"batch_tokens": 64, "prefix_cache": False}
    report = evaluate(model, tokenizer, tasks, **how, **keys)
    assert all(r.tokens_run == 0 for r in report.tasks.values()), "how it is read"


# ---- Memory


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("limit", [1, 60, 300, 2000])
def test_no_call_holds_more_than_batch_tokens(monkeypatch, limit, settled):
    """Nor more logits than a chunk, also where all items hang on rounding."""
    tokenizer = rules.Pieces()
    model, tasks = rules._transformer(tokenizer), rules._load(*rules._drawn(8, 20))
    whole = evaluate(model, tokenizer, tasks)
    sizes, logits = [], []
    read, score = Reader.streams, Reader.logits

    def streams(self, ids_BT, cache=None):
        behind = cache[0].length if cache else 0
        sizes.append((ids_BT.shape[0], ids_BT.shape[1] + behind))
        return read(self, ids_BT, cache)

    def some_logits(self, x_NC):
        logits.append(len(x_NC))
        return score(self, x_NC)

    monkeypatch.setattr(Reader, "streams", streams)
    monkeypatch.setattr(Reader, "logits", some_logits)
    monkeypatch.setattr(core_eval, "is_close", lambda *_: settled)
    monkeypatch.setitem(core_eval.CHUNK_LOGITS, "cpu", 7 * tokenizer.vocab_size + 3)
    report = evaluate(model, tokenizer, tasks, batch_tokens=limit)
    assert answers(report) == answers(whole)
    for rows, tokens in sizes:
        assert rows == 1 or rows * tokens <= limit, f"{rows} rows of {tokens} tokens"
    assert max(logits) <= 7, f"logits at {max(logits)} positions in one call, not 7"
    if limit == 2000:
        assert max(rows for rows, _ in sizes) > 8, "rows are not read together"
    wanted = sum(r.logits for r in report.tasks.values())
    assert sum(logits) == wanted, f"{sum(logits)} positions, {wanted} are reported"


def test_a_cpu_reads_what_its_cache_holds():
    tokenizer = rules.Pieces()
    model, tasks = rules._transformer(tokenizer), rules._load(*rules._suite(2))
    settings = evaluate(model, tokenizer, tasks).settings
    assert settings["batch_tokens"] == core_eval.BATCH_TOKENS["cpu"]


def test_rows_are_packed_within_the_limit_and_with_little_padding():
    draw = random.Random(0)
    for _ in range(300):
        high, count = draw.choice([3, 40, 900]), draw.randint(1, 60)
        sizes = [draw.randint(1, high) for _ in range(count)]
        prefix, limit = draw.choice([0, 17, 300]), draw.choice([1, 100, 4000])
        groups = list(packed(sizes, prefix, limit))
        assert sorted(i for group, _ in groups for i in group) == [*range(count)]
        for group, longest in groups:
            real = sum(sizes[i] for i in group)
            assert longest == max(sizes[i] for i in group)
            assert len(group) == 1 or len(group) * (prefix + longest) <= limit
            assert len(group) * longest - real <= limit / 64, group


def test_a_batch_is_as_large_as_its_limit_and_its_shortest_prefix_allow():
    draw, (task,) = random.Random(1), rules._load(rules._spec(rules.MC, [{
        "query": "a", "choices": ["b"], "gold": 0}]))  # fmt: skip
    ends = collections.Counter()
    for _ in range(100):
        examples = []
        for index in range(draw.randint(1, 30)):
            front = [index] * draw.choice([17, 30, 31, 32, 33, 200])
            ids = [[*front, 100 + i, *[0] * draw.choice([0, 2])] for i in range(4)]
            rows = [Row(np.array(row, dtype=np.int32), len(front)) for row in ids]
            examples.append(Example(index, tuple(rows[: draw.randint(1, 4)])))
        work, limit = Work(task, examples, share=True), draw.choice([100, 700, 2048])

        def again(batch, work=work):
            least = min(unit.prefix for unit in batch)
            return sum(
                (unit.prefix - least) * (len(work.readings(unit.rows)) - 1)
                for unit in batch
            )

        batches = list(work.batches(limit))
        assert [unit for batch in batches for unit in batch] == work.units
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            longest = batch[0].prefix
            assert len(batch) == 1 or len(batch) * longest <= limit or not longest
            assert again(batch) <= limit / 64
            if following:
                full = (len(batch) + 1) * longest > limit
                apart = longest > 0 == following[0].prefix
                wasted = again([*batch, following[0]]) > limit / 64
                ends.update(full=full, apart=apart, wasted=wasted)
                assert full or apart or wasted, "a batch ended for no reason"
    assert min(ends.values()) > 5, ends


def test_unlike_rows_of_one_loss_are_close_and_like_ones_are_one():
    def close(kind, ids, losses, margin=1e-4):
        rows = tuple(Row(np.array(i, dtype=np.int32), 1) for i in ids)
        scores = [Score(loss, loss) for loss in losses]
        (task,) = rules._load(rules._spec(kind, rules._marked(1), label="one"))
        return is_close(task, Example(0, rows), scores, margin)

    a, b, c = [9, 1], [9, 2], [9, 3]
    nan = float("nan")
    for losses, expected in (
        ((1.0, 1.0, 2.0), True),
        ((1.0, 1.00009, 2.0), True),
        ((1.0, 1.0002, 1.0002), False),
        ((nan, 1.0, 2.0), False),
        ((nan, 1.0, 1.0), True),
    ):
        assert close(rules.MC, (a, b, c), losses) is expected, losses
    assert not close(rules.MC, (a, a, c), (1.0, 1.0, 2.0)), "one choice twice"
    assert not close(rules.MC, (a, a), (1.0, 1.0)), "one choice twice"


def test_a_shared_story_and_shared_examples_are_read_once():
    tokenizer = rules.Pieces()
    model, tasks = rules._transformer(tokenizer), rules._load(*rules._drawn(9, 12))
    report = evaluate(model, tokenizer, tasks)
    apart = evaluate(model, tokenizer, tasks, prefix_cache=False, batch_tokens=1)
    for label, least in (("stories", 0.6), ("multiple_choice", 0.6)):
        result = report.tasks[label]
        part = result.tokens_run / result.tokens_alone
        assert part < least, f"{label}: {part:.2f} of the tokens were read"
        rows = sum(len(item.scores) for item in result.items)
        assert apart.tasks[label].tokens_run == result.tokens_alone - rows
        assert result.tokens_alone == apart.tasks[label].tokens_alone


@pytest.mark.parametrize("cache", [True, False])
def test_a_rows_last_token_is_not_read_and_answers_of_one_token_are_one_reading(
    monkeypatch, cache
):
    tokenizer = rules.Pieces()
    model, calls, read = rules._transformer(tokenizer), [], Reader.streams

    def streams(self, *arguments):
        calls.append(arguments)
        return read(self, *arguments)

    for choices, passes, run in (
        (["a", "b", "c", "d"], 1, 40),  # BOS, query, delimiter: once
        (["a", "b", "ab", "ac"], 1 + cache, 39 + 2 * 2 if cache else 2 * 41),  # padded
        (["ab", "cd"], 1 + cache, 39 + 2 * 2 if cache else 2 * 41),
    ):
        record = {"query": "abcdefgh" * 4 + "abcdef", "choices": choices, "gold": 0}
        tasks = rules._load(rules._spec(rules.MC, [record], delimiter=":"))
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "streams", streams)
            report = evaluate(model, tokenizer, tasks, prefix_cache=cache)
        (result,) = report.tasks.values()
        assert not result.count("settled")
        assert len(calls) == passes, choices
        assert result.tokens_run == run, choices
        alone = sum(40 + len(choice) for choice in choices)
        assert result.tokens_alone == alone, choices
        assert result.logits == sum(map(len, choices))
        (example,) = encode(tasks[0], Text(tokenizer), Rules())
        slow = score_alone(Reader(model), example)
        assert result.items[0].scores == pytest.approx([s.loss for s in slow])


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("limit", [1, 100, 2000])
def test_the_bench_counts_ahead_what_is_read(limit, cache):
    tokenizer = rules.Pieces()
    model = rules._transformer(tokenizer)
    letters = [
        {"query": letter * 20, "choices": [*"abcd"], "gold": 0}
        for letter in "abcdefgha"
    ]
    one_token = rules._spec(rules.MC, letters, label="letters")
    reader = Reader(model)
    reader.batch_tokens, reader.caches = limit, cache
    for task in rules._load(*rules._drawn(9, 12), one_token):
        keys = {"batch_tokens": limit, "prefix_cache": cache, "max_per_task": 9}
        (result,) = evaluate(model, tokenizer, [task], **keys).tasks.values()
        assert not result.truncated
        assert not result.count("settled")
        plan = planned(task, Text(tokenizer), 9, reader)
        counted = plan["alone"], plan["read"], plan["logits"]
        assert counted == (result.tokens_alone, result.tokens_run, result.logits)
        if task.label == "letters":  # BOS, 20 letters and a space: once for an item
            assert plan["alone"] == 9 * 4 * 23
            assert plan["by item"] == plan["with stories"] == plan["read"] == 9 * 22


def test_questions_that_are_one_reading_and_a_journal_that_knows_some():
    """Three items of a story read the same; one is known, two ranks share the rest."""
    tokenizer = rules.Pieces()
    model, story = rules._transformer(tokenizer), "abcdefgh" * 5
    records = [{"context": story, "continuation": letter} for letter in "abc"]
    records += [{"context": story + "ab", "continuation": "cd"}]
    records += [{"context": "hgfedcba" * n, "continuation": "a"} for n in (3, 4)]
    (task,) = rules._load(rules._spec(rules.LM, records))
    whole = evaluate(model, tokenizer, [task]).tasks[task.label]
    # Two prefixes, cut to 24; behind them 21, 18 (three items) and 10 ids, and 2.
    assert whole.tokens_run == 2 * 24 + 3 * 21 + 2
    slow = []
    examples = encode(task, Text(tokenizer), Rules())
    for example in examples:
        slow += score_alone(Reader(model), example)
    for item, score in zip(whole.items, slow, strict=True):
        assert item.scores == pytest.approx([score.loss])
    for done in range(len(records)):
        found = []
        for rank in range(2):
            work = Work(task, examples, True, rank, 2, done={done})
            for batch in work.batches(2000):
                found += [
                    (examples[n].index, score.loss)
                    for (n, _), score, _ in score_rows(Reader(model), work, batch, 2000)
                ]
        assert sorted(i for i, _ in found) == [i for i in range(6) if i != done]
        for index, loss in found:
            assert loss == pytest.approx(slow[index].loss)


@pytest.mark.parametrize("cache", [True, False])
def test_identical_choices_are_read_once(cache):
    tokenizer = rules.Pieces()
    choices = [["ab", "ab", "cd", "ab"], ["dc", "ba", "dc", "ba"]]
    records = [
        {"query": "abcdefgh" * 4, "choices": four, "gold": 0} for four in choices
    ]
    once = [{**r, "choices": [*dict.fromkeys(r["choices"])]} for r in records]
    model, read = rules._transformer(tokenizer), []
    for each in (records, once):
        tasks = rules._load(rules._spec(rules.MC, each))
        (result,) = evaluate(model, tokenizer, tasks, prefix_cache=cache).tasks.values()
        assert not result.count("settled")
        read.append((result.tokens_run, result.logits))
    assert read[0] == read[1]


def test_identical_choices_that_are_settled_have_identical_scores(monkeypatch):
    tokenizer = rules.Pieces()
    records = [{"query": "abcdefgh", "choices": ["ab", "cd", "ab"], "gold": 0}]
    tasks = rules._load(rules._spec(rules.MC, records * 2))
    monkeypatch.setattr(core_eval, "is_close", lambda *_: True)
    # Rows read together round otherwise than each by itself.
    model = rules.Rounding(rules._random_bigram(tokenizer).table_VV.data.exp())
    (result,) = evaluate(model, tokenizer, tasks).tasks.values()
    for item in result.items:
        assert item.settled
        assert item.scores[0] == item.scores[2] != item.scores[1]


def test_leads_are_asked_for_or_no_numbers():
    logits_NV, targets_N = torch.tensor([[1.0, 3.0, 3.0]] * 3), torch.arange(3)
    _, leads_N = core_eval.losses_and_leads(logits_NV, targets_N, leads=True)
    assert leads_N[0] == -2
    assert leads_N[1] == 0
    assert -1e-30 < leads_N[2] < 0, "of equal ids the first is the best"
    _, none_N = core_eval.losses_and_leads(logits_NV, targets_N, leads=False)
    assert none_N.isnan().all()


def test_items_of_an_older_version_are_not_gone_on_with(tmp_path, monkeypatch):
    tokenizer = rules.Pieces()
    model, tasks = rules._random_bigram(tokenizer), rules._load(*rules._drawn())
    evaluate(model, tokenizer, tasks, journal=tmp_path)
    monkeypatch.setattr(core_eval, "VERSION", core_eval.VERSION + 1)
    with pytest.raises(ConfigError, match="of another model, tokenizer, data or rule"):
        evaluate(model, tokenizer, tasks, journal=tmp_path)


# ---- What is said beside the number


def test_a_crop_that_is_not_the_references_is_noted():
    tokenizer = rules.Pieces()
    model, tasks = rules._random_bigram(tokenizer), rules._load(*rules._drawn())
    for context, policy, noted in (
        (30, "bos", "behind a BOS"), (30, "shots", "by whole examples"),
        (30, "plain", ""), (None, "bos", ""),
    ):  # fmt: skip
        report = evaluate(model, tokenizer, tasks, context=context, crop=policy)
        cropped = sum(result.truncated for result in report.tasks.values())
        line = f"cropped {noted}: {cropped:,} item{'s' * (cropped != 1)}; the reference"
        assert any(n.startswith(line) for n in report.notes) is bool(noted)
        assert any("cropped" in n for n in report.notes) is bool(noted)
        assert bool(cropped) is (context == 30)


def test_examples_of_a_sample_are_noted_where_there_is_one():
    tokenizer = rules.Pieces()
    model, tasks = rules._random_bigram(tokenizer), rules._load(*rules._drawn())
    for most in (6, None):
        usual, other = (
            evaluate(model, tokenizer, tasks, max_per_task=most, legacy_pool=pool).notes
            for pool in (False, True)
        )
        added = [note for note in other if note not in usual]
        assert len(added) == (most is not None)
        assert all("examples" in note for note in added)


# ---- Any of our models


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 24},
        {"value_embeddings": True, "residual_scales": True},
        {"softcap": 8.0, "tied": True},
        {"kv_heads": 4, "head_dim": 16, "qk_norm": False},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_model_is_read_fast_as_slowly(changes, dtype):
    """Under autocast too, where a rounding is a hundredth: close items are settled."""
    tokenizer = rules.Pieces()
    model = rules._transformer(tokenizer, seed=4, **changes)
    tasks, reader = rules._load(*rules._drawn(10, 12)), Reader(model)
    for context, policy in ((512, "bos"), (50, "plain"), (60, "shots")):
        asked = Rules(context, policy)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            keys = {"context": context, "crop": policy, "batch_tokens": 400}
            report = evaluate(model, tokenizer, tasks, **keys)
            for task in tasks:
                expected = []
                for example in encode(task, Text(tokenizer), asked):
                    example = crop(example, context, policy)
                    scores = spread(example, score_alone(reader, example))
                    expected.append(judge(task, example, scores))
                got = report.tasks[task.label].items
                strip = [i._replace(scores=(), settled=False) for i in got]
                assert strip == [i._replace(scores=()) for i in expected], task.label
        assert report.to_dict()["settings"]["dtype"] == str(dtype).split(".")[1]


# ---- Text and files


def test_a_special_token_spelled_out_in_a_text_is_only_text():
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    name = tokenizer.special_tokens[0]
    spec = rules._spec(rules.LM, [{"context": f"a {name}", "continuation": "b"}])
    model = rules.Bigram(torch.full((tokenizer.vocab_size,) * 2, 1.0).softmax(1))
    evaluate(model, tokenizer, rules._load(spec))
    (ids,) = {tuple(row) for ids_BT in model.seen for row in ids_BT.tolist()}
    assert ids.count(tokenizer.bos_id) == 1, ids
    assert bytes(ids[1:]) == f"a {name} ".encode()


def broken(folder, change=None, file=None):
    """Write three tasks, then change the table or a file."""
    rules._write(folder, rules._suite(3))
    path = folder / "core.yaml"
    table = yaml.safe_load(path.read_text("utf-8"))
    if change:
        change(table)
        path.write_text(yaml.safe_dump(table), "utf-8")
    if file is not None:
        (folder / "task1.jsonl").write_bytes(file)


RECORD = b'{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (b"", "task1.jsonl is empty"),
        (b"\n  \n", "task1.jsonl is empty"),
        (RECORD + b"{", "task1.jsonl:2 is no JSON"),
        (RECORD + b"\n" + RECORD.replace(b"gold", b"g"), "jsonl:3 lacks 'gold'"),
        (RECORD + b"7\n", "task1.jsonl:2"),
        (RECORD.replace(b"0", b"2"), "gold = 2"),
        (RECORD.replace(b"0", b"-1"), "gold = -1"),
        (RECORD.replace(b'"c"', b"3"), "task1.jsonl:1"),
        (RECORD.replace(b'"b", "c"', b""), "task1.jsonl:1"),
        (RECORD.replace(b"query", b"context"), "task1.jsonl:1 lacks 'query'"),
        (RECORD.replace(b"0", b"true"), "gold = True is no whole number"),
        (RECORD.replace(b"0", b'"1"'), "gold = '1' is no whole number"),
        (RECORD.replace(b'"c"', b'"\\ud83d"'), "task1.jsonl:1 has half a character"),
        (b"\xff\xfe" + RECORD, "task1.jsonl"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, file, told):
    broken(tmp_path, file=file)
    with pytest.raises(DataError) as caught:
        load_tasks(tmp_path)
    assert told in str(caught.value), caught.value
    assert "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("kind", ["schema", "language_modeling"])
def test_a_continuation_that_is_empty_is_named_with_its_line(tmp_path, kind):
    records = [{"context": "ab", "context_options": ["a", "b"], "gold": 0,
                "continuation": c} for c in ("b", " ")]  # fmt: skip
    rules._write(tmp_path, [rules._spec(kind, records, 0, "", "task")])
    with pytest.raises(DataError, match="jsonl:2: an empty continuation"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.clear(), "icl_tasks"),
        (lambda t: t["icl_tasks"][1].pop("label"), "label"),
        (lambda t: t["icl_tasks"][1].pop("random_baseline_v2"), "random_baseline_v2"),
        (lambda t: t["icl_tasks"][1].update(random_baseline_v1="a lot"), "task1"),
        (lambda t: t["icl_tasks"][1].update(random_baseline_v1=100), "task1"),
        (lambda t: t["icl_tasks"][1].update(num_fewshot="some"), "task1"),
        (lambda t: t["icl_tasks"][1].update(num_fewshot=[]), "task1"),
        (lambda t: t["icl_tasks"][1].update(num_fewshot=[-1]), "task1"),
        (lambda t: t["icl_tasks"][1].update(icl_task_type="choice"), "choice"),
        (lambda t: t["icl_tasks"][1].update(label="task0"), "task0 twice"),
        (lambda t: t["icl_tasks"][1].update(dataset_uri="no.jsonl"), "no.jsonl"),
        (lambda t: t["icl_tasks"].insert(0, "task"), "core.yaml"),
        (lambda t: t.update(icl_tasks=7), "icl_tasks"),
        (lambda t: t["icl_tasks"][1].update(label=False), "label = False"),
        (lambda t: t["icl_tasks"][1].update(dataset_uri=7), "dataset_uri = 7"),
        (lambda t: t["icl_tasks"][1].update(icl_task_type=None), "icl_task_type"),
        (lambda t: t["icl_tasks"][1].update(continuation_delimiter=1), "delimiter = 1"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path, change, told):
    broken(tmp_path, change)
    with pytest.raises(DataError) as caught:
        load_tasks(tmp_path)
    assert told in str(caught.value), caught.value
    assert "\n" not in str(caught.value), caught.value


def test_a_folder_without_a_table_or_with_no_yaml_is_one_line(tmp_path):
    with pytest.raises(DataError, match="no core\\.yaml in"):
        load_tasks(tmp_path)
    for text in (b"icl_tasks: [\n  a: b\n c", b"icl_tasks: \xff"):
        (tmp_path / "core.yaml").write_bytes(text)
        with pytest.raises(DataError, match="is no YAML") as caught:
            load_tasks(tmp_path)
        assert "\n" not in str(caught.value), caught.value


@pytest.fixture
def called_core(tmp_path, monkeypatch):
    """mini CORE's files in a table without a name, as if they were the real ones."""
    table = yaml.safe_load((MINI / "core.yaml").read_text("utf-8"))
    del table["name"]
    for row in table["icl_tasks"]:
        name = row["dataset_uri"]
        data = (MINI / name).read_bytes()
        (tmp_path / name).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        records = data.count(b"\n")
        file = core_table.FILES[name]._replace(sha256=sha256, records=records)
        monkeypatch.setitem(core_table.FILES, name, file)
    return table


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: None, None),
        (lambda rows: rows[3].update(num_fewshot=[0]), "shots, delimiter or baselines"),
        (lambda rows: rows[3].update(random_baseline_v2=0), "delimiter or baselines"),
        (lambda rows: rows[3].update(continuation_delimiter=" "), "or baselines"),
        (lambda rows: rows[3].update(dataset_uri="piqa.jsonl"), "the published files"),
        (lambda rows: rows[3].update(label="arc"), "not among CORE's tasks: arc"),
        (lambda rows: rows.pop(3), "a table of 21 tasks: CORE has 22"),
    ],
)
def test_what_is_called_core_is_compared_with_it(called_core, tmp_path, change, told):
    rows = called_core["icl_tasks"]
    change(rows)
    (tmp_path / "core.yaml").write_text(yaml.safe_dump(called_core), "utf-8")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    model = torch.nn.Embedding(tokenizer.vocab_size, tokenizer.vocab_size)
    tasks = load_tasks(tmp_path)
    few = [replace(task, items=task.items[:11]) for task in tasks]
    for asked, most in ((tasks, None), (tasks, 2), (few, None)):
        facts = evaluate(
            model, tokenizer, asked, max_per_task=most, context=64
        ).to_dict()
        assert facts["is_core"] is (told is None and asked is tasks and most is None)
        if told is None:
            assert facts["suite"] == "CORE"
            assert len(facts["notes"]) == 1 + (not facts["is_core"])
            assert "cropped behind a BOS" in facts["notes"][-1]
            if most:
                assert facts["sample"], "of which only some items were scored"
            continue
        assert facts["suite"] == f"tasks of {tmp_path.name}"
        assert facts["notes"][0].startswith(f"tasks of {tmp_path.name} is not CORE")
        assert told in facts["notes"][1]
        assert len(rows) < 22 or rows[3]["label"] in facts["notes"][1]


# ---- The real files


@pytest.fixture(scope="module")
def real():
    """The 22 tasks, and what the contract's plain reading wants of each."""
    tasks = load_tasks(REAL)
    rows = yaml.safe_load((REAL / "core.yaml").read_text("utf-8"))["icl_tasks"]
    specs = []
    for row in rows:
        lines = (REAL / row["dataset_uri"]).read_text("utf-8").split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        assert len(records) == row["num_examples"], row["label"]
        specs.append(
            rules._spec(row["icl_task_type"], records, row["num_fewshot"][0],
                        row["continuation_delimiter"], row["label"],
                        row["random_baseline_v1"], row["random_baseline_v2"])
        )  # fmt: skip
    return tasks, specs


@real_files
def test_the_real_files_are_whole_and_the_published_ones(real):
    tasks, specs = real
    assert len(tasks) == 22
    assert sum(len(task.items) for task in tasks) == 91037
    for task, spec in zip(tasks, specs, strict=True):
        assert task.label == spec["label"]
        assert len(task.items) == len(spec["records"]), task.label
        assert (task.suite, task.unlike) == ("CORE", ()), task.label
        assert list(task.items[:50]) == rules._records(spec)[:50], task.label


# The prompts' format by its description, in a template language: examples and the item
# joined by a blank line, each a question, the delimiter, an answer.
TEMPLATES = {
    rules.MC: (
        "{% for s in shots %}{{ s.query }}{{ mark }}{{ s.choices[s.gold] }}\n\n"
        "{% endfor %}{{ item.query }}{{ mark }}{{ option }}"
    ),
    rules.SCHEMA: (
        "{% for s in shots %}{{ s.context_options[s.gold] }}{{ mark }}"
        "{{ s.continuation }}\n\n{% endfor %}{{ option }}{{ mark }}"
        "{{ item.continuation }}"
    ),
    rules.LM: (
        "{% for s in shots %}{{ s.context | trim }}{{ mark }}{{ s.continuation }}\n\n"
        "{% endfor %}{{ item.context | trim }}{{ mark }}{{ option }}"
    ),
}  # fmt: skip


def rendered(template, spec, records, index):
    """Return the texts of an item's rows by a template, and the stripped prompt."""
    others = [record for i, record in enumerate(records) if i != index]
    shots = random.Random(1234 + index).sample(others, spec["shots"])
    item = records[index]
    found = (item.get("choices"), item.get("context_options"))
    options = next(filter(None, found), [item.get("continuation")])
    keys = {"shots": shots, "item": item, "mark": spec["delimiter"]}
    rows = [template.render(option=option, **keys) for option in options]
    if spec["kind"] != rules.LM:
        return rows, None
    return rows, template.render(option="", **keys).strip()


# SHA-256 of the texts of the first 20 items of each task, the first 12 digits.
PROMPTS = {
    "hellaswag_zeroshot": "5d659cc1df3a",
    "jeopardy": "63f06e6fc6c7",
    "bigbench_qa_wikidata": "7aa2808105e6",
    "arc_easy": "8d49cab3691a",
    "arc_challenge": "4690bba5da7e",
    "copa": "6fa71700d800",
    "commonsense_qa": "c8f71e08698d",
    "piqa": "fec6ca9de18c",
    "openbook_qa": "041dba13bb22",
    "lambada_openai": "5724451db87f",
    "hellaswag": "5cb99c9b9329",
    "winograd": "f6721e028f3f",
    "winogrande": "81cf15b84a4f",
    "bigbench_dyck_languages": "d2448fa17bc3",
    "agi_eval_lsat_ar": "51ef84d7b201",
    "bigbench_cs_algorithms": "3f6d20241403",
    "bigbench_operators": "e58891e1564e",
    "bigbench_repeat_copy_logic": "b34fb82c8875",
    "squad": "61001d674e54",
    "coqa": "ac499515a757",
    "boolq": "dc64e7b772d9",
    "bigbench_language_identification": "c4058f1df83e",
}


@real_files
def test_the_prompts_of_the_real_items_are_those_of_the_reference(real):
    jinja2 = pytest.importorskip("jinja2")
    for task, spec in zip(*real, strict=True):
        template = jinja2.Template(TEMPLATES[task.kind], keep_trailing_newline=True)
        records, digest = rules._records(spec), hashlib.sha256()
        for index in range(20):
            expected = rendered(template, spec, records, index)
            texts, prompt = prompts(task, index, shots_of(task, index))
            assert (texts, prompt) == expected, f"item {index} of {task.label}"
            for text in [*texts, prompt or ""]:
                digest.update(text.encode() + b"\0")
        got = digest.hexdigest()[:12]
        assert got == PROMPTS[task.label], f"{task.label}: {got}"


@pytest.fixture(scope="module")
def trained(real):
    """A tokenizer of 600 ids, made of text of all tasks."""
    texts = [text for task in real[0] for i in range(8)
             for text in prompts(task, i, [])[0]]  # fmt: skip
    return Tokenizer(train_bpe(texts, 600))


@real_files
@pytest.mark.parametrize(("context", "name"), [(256, "bytes"), (1024, "trained")])
def test_real_items_read_fast_and_slowly_score_alike(real, trained, context, name):
    """Two items of each task: the contract's reading, ours alone, and ours."""
    byte = {bytes([i]): i for i in range(256)}
    tokenizer = trained if name == "trained" else Tokenizer(byte)
    tasks, specs = real
    model = rules._transformer(tokenizer, layers=1, context=context)
    report = evaluate(model, tokenizer, tasks, max_per_task=2)
    asked = Rules(context, max_per_task=2)
    for task, spec in zip(tasks, specs, strict=True):
        result = report.tasks[task.label]
        expected = rules._read(spec, model, tokenizer, context, count=2)
        rules._agree(report, spec, expected, name)
        for item, example in zip(
            result.items, encode(task, Text(tokenizer), asked), strict=True
        ):
            example = crop(example, context)
            scores = spread(example, score_alone(Reader(model), example))
            alone = judge(task, example, scores)
            assert (alone.correct, alone.choice) == (item.correct, item.choice)
            assert item.scores == pytest.approx(alone.scores, abs=1e-5), task.label
    facts = report.to_dict()
    assert (facts["is_core"], facts["suite"]) == (False, "CORE")  # a sample
    assert "22 tasks by a sample of their items" in facts["notes"]
    assert report.tasks["squad"].truncated == 2, "10 stories in 1024 tokens"
