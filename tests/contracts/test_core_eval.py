"""The CORE evaluator: twenty-two exams, every answer by the written rules.

The part is called as evaluate(model, tokenizer, tasks, **keys) and returns a report. A
test's own reading of the rules (`_read`) draws, joins, encodes and scores each item
alone, in plain loops; models and tokenizers are made by hand and remember what they
were given.
"""

import hashlib
import json
import math
import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from torch import nn

from littlelm_core.core_eval import load_tasks
from littlelm_core.model import LanguageModel, ModelConfig
from littlelm_core.report.core_run import merge

PART = "littlelm_core.core_eval:evaluate"

LETTERS = [*"abcdefghijklmnopqrstuvwxyz :.\n"]
MC, SCHEMA, LM = "multiple_choice", "schema", "language_modeling"


def _refused(call, accepted):
    """Return the one line of the error that a call must raise."""
    message = None
    try:
        call()
    except ValueError as error:
        message = str(error)
    assert message is not None, f"{accepted} was accepted"
    assert "\n" not in message, f"the error has more than one line: {message}"
    return message


class Pieces:
    """A tokenizer: the longest piece that fits, id by place, BOS last."""

    def __init__(self, pieces=LETTERS):
        self.ids = {piece: number for number, piece in enumerate(pieces)}
        longest = sorted(pieces, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest)))
        self.bos_id, self.vocab_size = len(pieces), len(pieces) + 1
        self.fingerprint = hashlib.sha256(repr(pieces).encode()).hexdigest()
        self.texts = []

    def encode(self, text):
        self.texts.append(text)
        found = self.pattern.findall(text)
        assert "".join(found) == text, f"no pieces for {text!r}"
        return [self.ids[piece] for piece in found]


class Bigram(nn.Module):
    """The next token depends on the last one alone: row i of the table is p(. | i)."""

    def __init__(self, probabilities_VV, vocab_size=None, context=None):
        super().__init__()
        self.table_VV = nn.Parameter(torch.as_tensor(probabilities_VV).log())
        self.seen = []
        if vocab_size or context:
            self.cfg = SimpleNamespace(vocab_size=vocab_size, context=context)

    def forward(self, ids_BT):
        self.seen.append(ids_BT.clone())
        return self.table_VV[ids_BT]


def _random_bigram(tokenizer, seed=0, **cfg):
    draw = torch.Generator().manual_seed(seed)
    size = tokenizer.vocab_size
    return Bigram(torch.rand(size, size, generator=draw).pow(3).softmax(1), **cfg)


def _known(tokenizer, **rows):
    """A bigram model of these probabilities ("a": {"b": 0.3}), the rest shared out."""
    size = tokenizer.vocab_size
    table_VV = torch.full((size, size), 1 / size)
    for last, given in rows.items():
        row_V = torch.full((size,), (1 - sum(given.values())) / (size - len(given)))
        for piece, probability in given.items():
            row_V[tokenizer.ids[piece]] = probability
        table_VV[tokenizer.ids[last]] = row_V
    return Bigram(table_VV)


def _transformer(tokenizer, seed=1, **changes):
    """A small LanguageModel whose weights are large enough to have opinions."""
    shape = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    shape |= {"vocab_size": tokenizer.vocab_size, "context": 512, **changes}
    model = LanguageModel(ModelConfig(**shape))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    return model.eval()


# ---- Tasks, written to a folder and read from it


def _spec(kind, records, shots=0, delimiter=" ", label="", v1=0, v2=0):
    return {
        "label": label or kind, "kind": kind, "records": records, "shots": shots,
        "delimiter": delimiter, "v1": v1, "v2": v2,
    }  # fmt: skip


def _write(folder, specs):
    rows = []
    for spec in specs:
        file = f"{spec['label']}.jsonl"
        lines = "".join(json.dumps(r) + "\n" for r in spec["records"])
        (Path(folder) / file).write_text(lines, "utf-8")
        rows.append({
            "label": spec["label"], "dataset_uri": file,
            "num_fewshot": [spec["shots"]], "icl_task_type": spec["kind"],
            "continuation_delimiter": spec["delimiter"],
            "random_baseline_v1": spec["v1"], "random_baseline_v2": spec["v2"],
        })  # fmt: skip
    text = yaml.safe_dump({"icl_tasks": rows})
    (Path(folder) / "core.yaml").write_text(text, "utf-8")


def _load(*specs):
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, specs)
        return load_tasks(folder)


def _words(draw, low=1, high=4):
    letters = "abcdefghij"
    count = draw.randint(low, high)
    return " ".join("".join(draw.choices(letters, k=3)) for _ in range(count))


def _drawn(seed=0, count=9):
    """A task of each kind, and stories that several items ask about."""
    draw = random.Random(seed)
    choice = [
        {
            "query": _words(draw, 2, 9),
            "choices": [_words(draw) for _ in range(4)],
            "gold": draw.randrange(4),
        }
        for _ in range(count)
    ]
    schema = [
        {
            "context_options": [_words(draw, 2, 5) for _ in range(2)],
            "continuation": _words(draw),
            "gold": draw.randrange(2),
        }
        for _ in range(count)
    ]
    model = [
        {"context": _words(draw, 2, 5) + " ", "continuation": draw.choice("abc")}
        for _ in range(count)
    ]
    stories = [_words(draw, 20, 24) for _ in range(3)]
    story = [
        {
            "context": f"{stories[n % 3]}\n{_words(draw)}:",
            "continuation": draw.choice("abcdef"),
        }
        for n in range(count)
    ]
    return [
        _spec(MC, choice, 3, ":"),
        _spec(SCHEMA, schema, 2),
        _spec(LM, model, 2, label="words"),
        _spec(LM, story, 0, label="stories"),
    ]


# ---- The rules, read one item at a time


def _records(spec):
    """The order in which a task's items are asked."""
    records = list(spec["records"])
    random.Random(1337).shuffle(records)
    return records


def _texts(spec, index, pool=None):
    """Return (the texts of an item's rows, the stripped prompt or None)."""
    records = _records(spec)
    record, shots = records[index], []
    if spec["shots"]:
        others = [i for i in range(pool or len(records)) if i != index]
        drawn = random.Random(1234 + index).sample(others, spec["shots"])
        shots = [records[i] for i in drawn]

    def parts(record, option):
        if spec["kind"] == MC:
            return record["query"], record["choices"][option]
        if spec["kind"] == SCHEMA:
            return record["context_options"][option], record["continuation"]
        return record["context"].strip(), record["continuation"]

    mark = spec["delimiter"]
    front = [mark.join(parts(s, s.get("gold"))) for s in shots]
    options = record.get("choices", record.get("context_options", [None]))
    rows = ["\n\n".join([*front, mark.join(parts(record, o))])
            for o in range(len(options))]  # fmt: skip
    if spec["kind"] != LM:
        return rows, None
    start = "\n\n".join([*front, parts(record, 0)[0] + mark])
    return rows, start.strip()


def _spans(spec, tokenizer, index, pool=None):
    """Return (ids, where the scored ones start) of an item's rows."""
    texts, prompt = _texts(spec, index, pool)
    rows = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]

    def common(rows):
        count = 0
        while all(len(r) > count and r[count] == rows[0][count] for r in rows):
            count += 1
        return count

    if spec["kind"] == MC:
        return [(row, common(rows)) for row in rows]
    if spec["kind"] == SCHEMA:
        same = common([row[::-1] for row in rows])
        return [(row, max(len(row) - same, 1)) for row in rows]  # BOS is not scored
    front = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    return [(rows[0], common([front, rows[0]]))]


def _cut(spans, context, bos):
    """The last tokens of rows, behind a BOS."""
    return [
        (ids, start) if len(ids) <= context
        else ([bos, *ids[len(ids) - context + 1 :]], max(start - len(ids) + context, 1))
        for ids, start in spans
    ]  # fmt: skip


def _score(spec, model, index, spans, width):
    """Return (right, choice, mean losses) of an item in tokens."""
    losses, best = [], []
    for ids, start in spans:
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids]))[0, :, :width].double()
        each = [
            float(logits_TV[at - 1].logsumexp(0) - logits_TV[at - 1, ids[at]])
            for at in range(start, len(ids))
        ]
        losses.append(sum(each) / len(each))
        best += [int(logits_TV[t - 1].argmax()) == ids[t]
                 for t in range(start, len(ids))]  # fmt: skip
    if spec["kind"] == LM:
        return all(best), 0, losses
    choice = min(range(len(losses)), key=losses.__getitem__)
    return choice == _records(spec)[index]["gold"], choice, losses


def _read(spec, model, tokenizer, context=None, pool=None, count=None):
    """Return what every item of a task must come to."""
    found = []
    for index in range(count or len(spec["records"])):
        spans = _spans(spec, tokenizer, index, pool)
        if context is not None:
            spans = _cut(spans, context, tokenizer.bos_id)
        width = tokenizer.vocab_size
        found.append(_score(spec, model, index, spans, width))
    return found


def _agree(report, spec, expected, what=""):
    items = report.tasks[spec["label"]].items
    told = f"{spec['label']}{what and f' ({what})'}"
    assert len(items) == len(expected), f"{told}: {len(items)} items were scored"
    for number, (item, (right, choice, losses)) in enumerate(
        zip(items, expected, strict=True)
    ):
        assert item.index == number, f"{told}: items are {[i.index for i in items]}"
        for option, (got, loss) in enumerate(zip(item.scores, losses, strict=True)):
            assert got is not None, f"{told}: item {number} has no score"
            assert abs(got - loss) < 1e-4, (
                f"{told}: option {option} of item {number} scores {got:.5f}, "
                f"by the rules {loss:.5f}"
            )
        assert item.choice == choice, f"{told}: item {number} chose {item.choice}"
        assert item.correct == right, f"{told}: item {number} is judged wrongly"


def _one(part, model, tokenizer, spec, **keys):
    """Evaluate one task; return (the task's result, its items)."""
    report = part(model, tokenizer, _load(spec), **keys)
    result = report.tasks[spec["label"]]
    return result, result.items


def _items(report):
    """Everything that an item says but how it was read; scores to 4 places."""
    return {
        label: [
            (i.index, i.correct, i.choice, i.tie, i.truncated, i.border,
             tuple(None if s is None else round(s, 3) for s in i.scores))
            for i in result.items
        ]
        for label, result in report.tasks.items()
    }  # fmt: skip


# ---- By hand, on a few words


def test_multiple_choice_is_the_lowest_mean_loss(part):
    """p(b|a) = .3 against p(c|a) p(b|c) = .2 * .9: the mean asks for the second."""
    words = Pieces([*"abc "])
    model = _known(words, a={"b": 0.3, "c": 0.2}, c={"b": 0.9})
    spec = _spec(MC, [{"query": "a", "choices": ["b", "cb"], "gold": 1}], 0, "")
    _, (item,) = _one(part, model, words, spec)
    expected = (-math.log(0.3), -math.log(0.2 * 0.9) / 2)
    for got, loss in zip(item.scores, expected, strict=True):
        assert abs(got - loss) < 1e-5, f"scores {item.scores}, by hand {expected}"
    assert (item.choice, item.correct) == (1, True), f"it chose {item.choice}"


def test_schema_scores_the_same_words_behind_each_context(part):
    words = Pieces([*"abc "])
    model = _known(words, a={"c": 0.3}, b={"c": 0.6}, c={"a": 0.5})
    record = {"context_options": ["aaab", "ba"], "continuation": "ca", "gold": 0}
    _, (item,) = _one(part, model, words, _spec(SCHEMA, [record], 0, ""))
    expected = [-math.log(p * 0.5) / 2 for p in (0.6, 0.3)]
    for got, loss in zip(item.scores, expected, strict=True):
        assert abs(got - loss) < 1e-5, f"scores {item.scores}, by hand {expected}"
    assert (item.choice, item.correct) == (0, True), f"it chose {item.choice}"


def test_language_modeling_wants_every_token_to_be_the_best(part):
    words = Pieces([*"abc "])
    model = _known(words, a={"b": 0.6}, b={"c": 0.4, "a": 0.5}, c={"a": 0.9})
    spec = _spec(LM, [{"context": "c", "continuation": n} for n in ("ab", "abc", "b")],
                 0, "")  # fmt: skip
    result, items = _one(part, model, words, spec)
    by_text = {r["continuation"]: i.correct
               for r, i in zip(_records(spec), items, strict=True)}  # fmt: skip
    assert by_text == {"ab": True, "abc": False, "b": False}, by_text
    assert abs(result.accuracy - 1 / 3) < 1e-9, result.accuracy


def test_every_item_is_scored_by_the_rules(part):
    tokenizer = Pieces()
    for model in (_random_bigram(tokenizer), _transformer(tokenizer)):
        specs = _drawn()
        report = part(model, tokenizer, _load(*specs))
        for spec in specs:
            _agree(report, spec, _read(spec, model, tokenizer))


# ---- Prompts and examples


def test_every_row_has_one_bos_in_front(part):
    tokenizer = Pieces()
    model = _random_bigram(tokenizer)
    part(model, tokenizer, _load(*_drawn()))
    for ids_BT in model.seen:
        starts = set(ids_BT[:, 0].tolist())
        assert starts == {tokenizer.bos_id}, f"rows start with {starts}, not with BOS"
        again = int((ids_BT[:, 1:] == tokenizer.bos_id).sum())
        assert not again, f"{again} more BOS inside of {len(ids_BT)} rows"


def _marked(count, start=0):
    """Items that name themselves: aa, ab, ac ..."""
    names = [a + b for a in "abcdefgh" for b in "abcdefgh"][start : start + count]
    return [{"query": n, "choices": ["x", "y"], "gold": 0} for n in names]


def _shots_seen(tokenizer):
    """Return {an item's name: the names of its examples} from the texts encoded."""
    found = {}
    for text in tokenizer.texts:
        *shots, item = (piece.split(":")[0] for piece in text.split("\n\n"))
        found[item] = shots
    return found


def test_examples_are_drawn_as_the_reference_draws_them(part):
    tokenizer, spec = Pieces(), _spec(MC, _marked(12), 5, ":")
    part(_random_bigram(tokenizer), tokenizer, _load(spec))
    seen, names = _shots_seen(tokenizer), [r["query"] for r in _records(spec)]
    for index, name in enumerate(names):
        others = [n for n in names if n != name]
        assert name not in seen[name], f"{name} is among its own examples"
        drawn = random.Random(1234 + index).sample(others, 5)
        assert seen[name] == drawn, f"item {index} has {seen[name]}, not {drawn}"


def test_a_part_of_the_items_takes_examples_from_all_of_them(part):
    spec = _spec(MC, _marked(20), 3, ":")
    names = [r["query"] for r in _records(spec)]
    for legacy in (False, True):
        tokenizer = Pieces()
        tasks = _load(spec)
        report = part(_random_bigram(tokenizer), tokenizer, tasks, max_per_task=6,
                      legacy_pool=legacy)  # fmt: skip
        assert [i.index for i in report.tasks[MC].items] == [*range(6)]
        seen = _shots_seen(tokenizer)
        assert [*seen] == names[:6], f"the first 6 are {names[:6]}, not {[*seen]}"
        pool = names[:6] if legacy else names
        for index, name in enumerate(names[:6]):
            others = [n for n in pool if n != name]
            drawn = random.Random(1234 + index).sample(others, 3)
            assert seen[name] == drawn, (
                f"legacy_pool={legacy}: item {index} has {seen[name]}, not {drawn}"
            )


def test_too_few_items_for_the_examples_are_refused(part):
    tokenizer = Pieces()
    model = _random_bigram(tokenizer)
    tasks = _load(_spec(MC, _marked(5), 5, ":", label="few"))
    message = _refused(lambda: part(model, tokenizer, tasks), "5 examples of 5 items")
    assert "few" in message, f"the task is not named: {message}"
    tasks = _load(_spec(MC, _marked(6), 5, ":"))
    assert part(model, tokenizer, tasks).tasks[MC].n == 6
    small = {"max_per_task": 4, "legacy_pool": True}
    _refused(lambda: part(model, tokenizer, tasks, **small), "a pool of 4")


def test_prompts_keep_odd_spaces_and_language_modeling_strips_its_context(part):
    odd = [
        {"query": f" {n}\n\n", "choices": [f" {n}", f"b  {n} "], "gold": 1}
        for n in "cdef"
    ]
    ends = [
        {"context_options": [f" {n}  ", f"{n}\n"], "continuation": f" {n}\n", "gold": 1}
        for n in "cdef"
    ]
    model = [{"context": f"\n {n}  ", "continuation": f"{n} "} for n in "cdef"]
    for spec in (
        _spec(MC, odd, 2, "\n.:"),
        _spec(SCHEMA, ends, 2, "  "),
        _spec(LM, model, 2, " : "),
    ):
        tokenizer = Pieces()
        part(_random_bigram(tokenizer), tokenizer, _load(spec))
        expected = set()
        for index in range(4):
            rows, prompt = _texts(spec, index)
            expected |= {*rows, *([] if prompt is None else [prompt])}
        extra = sorted(set(tokenizer.texts) - expected)
        missing = sorted(expected - set(tokenizer.texts))
        assert not missing, f"{spec['kind']}: {missing[0]!r} was not asked, {extra[:1]}"


# ---- What does not fit


def test_the_last_tokens_stay_behind_a_bos_and_are_counted(part):
    tokenizer = Pieces()
    for model in (_random_bigram(tokenizer), _transformer(tokenizer)):
        specs = _drawn()
        for context in (20, 45):
            report = part(model, tokenizer, _load(*specs), context=context)
            for spec in specs:
                _agree(report, spec, _read(spec, model, tokenizer, context), context)
                long = [
                    max(len(ids) for ids, _ in _spans(spec, tokenizer, i)) > context
                    for i in range(len(spec["records"]))
                ]
                result = report.tasks[spec["label"]]
                assert [i.truncated for i in result.items] == long, spec["label"]
                assert result.truncated == sum(long), f"{result.truncated} truncated"
    seen = {row[0] for ids_BT in _seen(part, {}) for row in ids_BT.tolist()}
    assert seen == {tokenizer.bos_id}, "a cut row does not begin with BOS"


def _seen(part, keys):
    """The rows that a model reads of items that are cut to 20 tokens."""
    tokenizer = Pieces()
    model = _random_bigram(tokenizer)
    part(model, tokenizer, _load(_drawn()[0]), context=20, **keys)
    return model.seen


def test_a_plain_cut_has_no_bos_and_none_cuts_nothing(part):
    tokenizer, spec = Pieces(), _drawn()[0]
    rows = [ids for i in range(9) for ids, _ in _spans(spec, tokenizer, i)]
    got = {tuple(r) for ids_BT in _seen(part, {"crop": "plain"})
           for r in ids_BT.tolist()}  # fmt: skip
    for ids in rows:
        last = tuple(ids[-20:-1])  # nothing is asked after the last one of a row
        short = any(last == row[: len(last)] for row in got)
        assert short, "the last 20 tokens of a row were not read as they are"
    whole = _seen(part, {"crop": "none"})
    longest, all_ids = max(ids_BT.shape[1] for ids_BT in whole), max(map(len, rows))
    assert longest in (all_ids - 1, all_ids), f"crop none: {longest} tokens at most"
    got = {tuple(r) for ids_BT in whole for r in ids_BT.tolist()}
    for ids in rows:
        begun = any(tuple(ids[:-1]) == row[: len(ids) - 1] for row in got)
        assert begun, "crop none: a row was not read from its first token on"


def test_examples_are_dropped_oldest_first(part):
    tokenizer, spec = Pieces(), _spec(MC, _marked(12), 5, ":")
    model = _random_bigram(tokenizer)
    names = [r["query"] for r in _records(spec)]
    # "aa:x" and two line ends: 6 tokens an example, 5 for BOS and the item itself.
    result, _ = _one(part, model, tokenizer, spec, context=20, crop="shots")
    seen = _shots_seen(tokenizer)
    for index, name in enumerate(names):
        others = [n for n in names if n != name]
        last = random.Random(1234 + index).sample(others, 5)[-2:]
        assert seen[name] == last, f"item {index} keeps {seen[name]}, not {last}"
    assert result.truncated == 12, f"{result.truncated} of 12 are counted as cut"
    result, _ = _one(part, model, tokenizer, spec, context=35, crop="shots")
    assert result.truncated == 0, f"all fit, {result.truncated} are counted as cut"


def test_an_item_too_long_without_examples_is_cut_as_ever(part):
    tokenizer = Pieces()
    model = _transformer(tokenizer)
    for spec in _drawn()[:3]:
        tasks, alone = _load(spec), {**spec, "shots": 0}
        report = part(model, tokenizer, tasks, context=9, crop="shots")
        expected = _read(alone, model, tokenizer, 9)
        _agree(report, spec, expected, "no example fits 9 tokens")


def test_an_answer_longer_than_the_context_is_counted(part):
    """Four tokens, then an answer of ten: with a context of 10 its first is lost."""
    tokenizer = Pieces()
    model = _random_bigram(tokenizer)
    choices = [{"query": "ab", "choices": ["cdcdcdcdcd", "e"], "gold": 1}]
    words = [{"context": "ab", "continuation": "cdcdcdcdcd"}]
    for spec in (_spec(MC, choices, 0, ":"), _spec(LM, words, 0, ":")):
        for crop in ("bos", "plain", "shots"):
            for context, cut in ((14, 0), (11, 0), (10, 1), (6, 1)):
                keys = {"context": context, "crop": crop}
                result, (item,) = _one(part, model, tokenizer, spec, **keys)
                told = result.count("cut_answer")
                assert told == cut, (
                    f"{spec['kind']}, {keys}: {told} answers were cut, not {cut}"
                )
                assert all(math.isfinite(s) for s in item.scores), item.scores


def test_a_plain_cut_scores_all_but_a_first_token(part):
    tokenizer, (spec, *_) = Pieces(), _drawn()
    model = _random_bigram(tokenizer)
    for context in (5, 9):
        report = part(model, tokenizer, _load(spec), context=context, crop="plain")
        expected = []
        for index in range(9):
            spans = [
                (ids[-context:], max(start - max(len(ids) - context, 0), 1))
                for ids, start in _spans(spec, tokenizer, index)
            ]
            width = tokenizer.vocab_size
            expected.append(_score(spec, model, index, spans, width))
        _agree(report, spec, expected, f"plain, context {context}")


# ---- Tokens on the border, and choices without one


def test_a_token_across_the_border_belongs_to_the_answer(part):
    """Of "a b" and "ca" the middle is one token, "bc": it is scored, and counted."""
    pair = Pieces([*"abc", " ", "bc"])
    records = [
        {"context": "a b", "continuation": "ca"},
        {"context": "a b", "continuation": "a"},
    ]
    spec = _spec(LM, records, 0, "")
    rows = {" ": {"bc": 0.7, "b": 0.2}, "bc": {"a": 0.6}, "b": {"a": 0.4}}
    result, items = _one(part, _known(pair, **rows), pair, spec)
    for record, item in zip(_records(spec), items, strict=True):
        crosses = record["continuation"] == "ca"
        loss = -math.log(0.7 * 0.6) / 2 if crosses else -math.log(0.4)
        assert abs(item.scores[0] - loss) < 1e-5, f"{record}: {item.scores}"
        assert item.correct, f"{record} is the best and is judged wrong"
        assert item.border == crosses, f"{record}: border is {item.border}"
    assert result.count("border") == 1, f"{result.count('border')} at the border"


def test_choices_are_scored_from_the_first_token_that_differs(part):
    """Of "ab" and "ac" behind "x" the a is common; "bc" is one token of its own."""
    pair = Pieces([*"abcx", "xa"])
    model = _known(pair, xa={"b": 0.3, "c": 0.5})
    spec = _spec(MC, [{"query": "x", "choices": ["ab", "ac"], "gold": 1}], 0, "")
    _, (item,) = _one(part, model, pair, spec)
    for got, chance in zip(item.scores, (0.3, 0.5), strict=True):
        assert abs(got + math.log(chance)) < 1e-5, f"scores {item.scores}"


def test_an_answer_without_a_token_is_refused(part):
    tokenizer = Pieces()
    records = [{"context": "ab", "continuation": c} for c in "bcd"]
    for delimiter in (" ", ""):
        tasks = _load(_spec(LM, records, 0, delimiter, label="silent"))
        records_of = tasks[0].items  # a file with such a record does not load
        without = {**records_of[0], "continuation": ""}
        tasks = [replace(tasks[0], items=(without, *records_of[1:]))]
        message = _refused(
            lambda t=tasks: part(_random_bigram(tokenizer), tokenizer, t),
            "an empty continuation",
        )
        assert "silent" in message, f"the task is not named: {message}"


def test_a_choice_without_a_token_of_its_own_cannot_win(part):
    tokenizer = Pieces()
    model = _random_bigram(tokenizer)
    records = [
        {"query": "a", "choices": ["b", "bc"], "gold": 0},
        {"query": "a", "choices": ["bc", "b"], "gold": 1},
        {"query": "a", "choices": ["bd", "b", "bc"], "gold": 0},
        {"query": "a", "choices": ["d", "d"], "gold": 0},
    ]
    spec = _spec(MC, records)
    for legacy in (False, True):
        result, items = _one(part, model, tokenizer, spec, legacy_nan=legacy)
        assert result.n == 4, f"{result.n} of 4 items were scored"
        assert result.no_score == 4, f"{result.no_score} of 4 lack a score"
        for record, item in zip(_records(spec), items, strict=True):
            told = f"legacy_nan={legacy}: of {record['choices']} it chose {item.choice}"
            if record["choices"] == ["d", "d"]:
                assert item.scores == (None, None), f"{record}: {item.scores}"
                assert item.choice == 0, told
                continue
            at = record["choices"].index("b")
            assert item.scores[at] is None, f"{record['choices']}: {item.scores}"
            best = min(s for s in item.scores if s is not None)
            wins = 0 if legacy and at == 0 else item.scores.index(best)
            assert item.choice == wins, told


# ---- Ties, NaN, ids that are none


def test_equal_losses_go_to_the_first_and_are_counted(part):
    tokenizer = Pieces()
    model = _known(tokenizer, a={"b": 0.25, "c": 0.25, "d": 0.5})
    records = [
        {"query": "a", "choices": ["b", "c"], "gold": 0},
        {"query": "a", "choices": ["c", "b", "b"], "gold": 1},
        {"query": "a", "choices": ["b", "d", "c"], "gold": 1},
    ]
    spec = _spec(MC, records, 0, "")
    result, items = _one(part, model, tokenizer, spec)
    for record, item in zip(_records(spec), items, strict=True):
        first = record["choices"].index("d") if "d" in record["choices"] else 0
        assert item.choice == first, f"{record['choices']}: it chose {item.choice}"
    assert result.ties == 2, f"2 items have two best choices, {result.ties} are counted"


def test_of_equal_tokens_the_lowest_id_is_the_best(part):
    tokenizer = Pieces()
    model = _known(tokenizer, a={"c": 0.3, "b": 0.3, "d": 0.3})
    records = [{"context": "a", "continuation": c} for c in "bcd"]
    spec = _spec(LM, records, 0, "")
    _, items = _one(part, model, tokenizer, spec)
    right = {r["continuation"]: i.correct
             for r, i in zip(_records(spec), items, strict=True)}  # fmt: skip
    assert right == {"b": True, "c": False, "d": False}, f"of three equals: {right}"


def test_identical_choices_have_identical_scores(part):
    tokenizer = Pieces()
    draw = random.Random(3)
    records = []
    for _ in range(8):
        twice, other = _words(draw, 2, 5), _words(draw, 2, 5)
        choices = draw.sample([twice, twice, other, _words(draw)], 4)
        records.append({"query": _words(draw, 9, 20), "choices": choices, "gold": 0})
    spec = _spec(MC, records, 2)
    for keys in ({}, {"batch_tokens": 64}, {"prefix_cache": False}):
        _, items = _one(part, _transformer(tokenizer), tokenizer, spec, **keys)
        for record, item in zip(_records(spec), items, strict=True):
            for choice in record["choices"]:
                same = {s for c, s in zip(record["choices"], item.scores, strict=True)
                        if c == choice}  # fmt: skip
                assert len(same) == 1, f"{choice!r} scores {sorted(same)}"


def test_a_score_that_is_no_number_raises(part):
    tokenizer = Pieces()
    for kind, spec in zip((MC, SCHEMA, LM), _drawn(), strict=False):
        model = _random_bigram(tokenizer)
        with torch.no_grad():
            model.table_VV[tokenizer.ids[" "]] = math.nan
        tasks = _load(spec)
        message = _refused(lambda m=model, t=tasks: part(m, tokenizer, t),
                           f"NaN in {kind}")  # fmt: skip
        assert spec["label"] in message, f"the task is not named: {message}"


def test_ids_that_only_pad_the_table_are_never_the_best(part):
    tokenizer = Pieces()
    size = tokenizer.vocab_size
    spec = _spec(LM, [{"context": "a", "continuation": c} for c in "bcd"])
    model = _known(tokenizer, a={" ": 0.9}, **{" ": {"c": 0.8}})
    expected = _read(spec, model, tokenizer)
    assert sum(right for right, _, _ in expected) == 1, "nothing is tested here"
    padding_VP = torch.full((size, 5), 9.0)
    model.table_VV = nn.Parameter(torch.cat((model.table_VV.data, padding_VP), 1))
    model.cfg = SimpleNamespace(vocab_size=size, context=None)
    _agree(part(model, tokenizer, _load(spec)), spec, expected, "padded")
    spec = _drawn()[2]
    wide = _transformer(tokenizer, vocab_multiple=128)
    with torch.no_grad():
        wide.head.weight[size:] = 50 * wide.head.weight[: 128 - size]
    _agree(part(wide, tokenizer, _load(spec)), spec, _read(spec, wide, tokenizer))


# ---- The score


def _suite(count=22, **changes):
    """Tasks of 2 to 23 items of which a known number is right."""
    specs = []
    for number in range(count):
        right = (number * 7) % (number + 3)
        records = [
            {"query": "a", "choices": ["b", "c"], "gold": 0 if i < right else 1}
            for i in range(number + 2)
        ]
        specs.append(_spec(MC, records, 0, "", label=f"task{number}",
                           v1=2 * number, v2=3 * number))  # fmt: skip
    specs[-1] |= changes
    return specs


def test_accuracy_is_centered_by_each_task_and_core_is_the_plain_mean(part):
    tokenizer = Pieces()
    model, specs = _known(tokenizer, a={"b": 0.6, "c": 0.2}), _suite()
    for table in ("v1", "v2"):
        report = part(model, tokenizer, _load(*specs), baselines=table)
        for name in ("v1", "v2"):
            each, variance = [], 0.0
            for spec in specs:
                right = sum(r["gold"] == 0 for r in spec["records"])
                accuracy, chance = right / len(spec["records"]), spec[name] / 100
                result = report.tasks[spec["label"]]
                assert abs(result.accuracy - accuracy) < 1e-9, spec["label"]
                error = math.sqrt(accuracy * (1 - accuracy) / len(spec["records"]))
                assert abs(result.error - error) < 1e-9, f"{result.error} ± {error}"
                each.append((accuracy - chance) / (1 - chance))
                variance += (error / (1 - chance) / 22) ** 2
                got = [report.to_dict()["tasks"][spec["label"]][f"centered_{name}"]]
                got += [result.centered] if name == table else []
                assert all(abs(value - each[-1]) < 1e-9 for value in got), (
                    f"{accuracy:.3f} above {100 * chance:.0f} % is {each[-1]:.4f}, "
                    f"not {got}"
                )
            mean = sum(each) / 22
            got = report.to_dict()[f"core_{name}"]
            assert abs(got - mean) < 1e-9, f"CORE by {name} is {mean:.4f}, not {got}"
            if name == table:
                assert abs(report.core - mean) < 1e-9, f"{report.core}, not {mean}"
                low, high = report.interval
                assert low < mean < high, f"{mean:.3f} is not in {low:.3f}..{high:.3f}"
                half, by_hand = (high - low) / 2, 1.96 * math.sqrt(variance)
                assert abs(half / by_hand - 1) < 0.06, (
                    f"the interval is ± {half:.4f}, of binomial draws ± {by_hand:.4f}"
                )


def test_the_score_without_what_was_cut(part):
    """Two of four items fit; of the second task none does."""
    tokenizer = Pieces()
    model = _known(tokenizer, a={"b": 0.6, "c": 0.2})
    asked = (("a", 0), ("a", 1), ("xxxxa", 0), ("xxxxa", 0))
    records = [{"query": q, "choices": ["b", "c"], "gold": g} for q, g in asked]
    long = [{**r, "query": "xxxxa"} for r in records]
    specs = [_spec(MC, records, 0, "", "some", 20, 40),
             _spec(MC, long, 0, "", "none", 10, 30)]  # fmt: skip
    for table, chance in (("v1", 0.2), ("v2", 0.4)):
        report = part(model, tokenizer, _load(*specs), context=4, baselines=table)
        facts = report.to_dict()
        some, none = facts["tasks"]["some"], facts["tasks"]["none"]
        assert (some["n_uncropped"], some["accuracy_uncropped"]) == (2, 0.5), some
        assert (none["n_uncropped"], none["accuracy_uncropped"]) == (0, None), none
        expected = (0.5 - chance) / (1 - chance)
        got = facts["core_uncropped"]
        assert abs(got - expected) < 1e-9, f"by {table} it is {expected}, not {got}"


def test_core_is_of_all_tasks_or_not_said(part):
    tokenizer, tasks = Pieces(), _load(*_suite(22))
    for some, whole in ((tasks, True), (tasks[:21], False), (tasks[3:4], False)):
        report = part(_random_bigram(tokenizer), tokenizer, some)
        facts = report.to_dict()
        assert not facts["is_core"], "tasks of one's own are called CORE"
        assert (facts["core"] is None) is not whole, f"{len(some)} of 22 tasks"
        mean = sum(r.centered for r in report.tasks.values()) / len(some)
        assert abs(report.core - mean) < 1e-9, f"{report.core}, not {mean}"
        said = [note for note in report.notes if f"{len(some)} of 22" in note]
        assert bool(said) is not whole, f"{len(some)} of 22: {report.notes}"


def test_a_task_without_items_is_refused(part):
    tokenizer = Pieces()
    tasks = _load(*_suite(3))
    object.__setattr__(tasks[1], "items", ())
    message = _refused(lambda: part(_random_bigram(tokenizer), tokenizer, tasks),
                       "an empty task")  # fmt: skip
    assert "task1" in message, f"the task is not named: {message}"
    _refused(lambda: part(_random_bigram(tokenizer), tokenizer, []), "no task at all")
    twice = [*_load(*_suite(2)), *_load(*_suite(1))]
    _refused(lambda: part(_random_bigram(tokenizer), tokenizer, twice), "a task twice")


def test_the_report_names_data_and_table_by_their_hashes(part):
    tokenizer = Pieces()

    def hashes(specs):
        report = part(_random_bigram(tokenizer), tokenizer, _load(*specs))
        facts = json.loads(report.to_json())
        return facts["data_sha256"], facts["table_sha256"]

    data, table = hashes(_suite(4))
    assert hashes(_suite(4)) == (data, table), "the same files, another hash"
    other = _suite(4)
    other[2]["records"][0]["query"] = "b"
    assert hashes(other)[0] != data, "a changed file has the old hash"
    assert hashes(other)[1] == table, "the table's hash changed with a file"
    for change in ({"v1": 1}, {"v2": 1}, {"shots": 1}, {"delimiter": " "}):
        got = hashes(_suite(4, **change))
        assert got[1] != table, f"a table with {change} has the old hash"
        assert got[0] == data, f"the data's hash changed with {change}"


# ---- However it is read


def test_the_size_of_a_batch_and_the_prefix_cache_change_nothing(part):
    tokenizer, specs = Pieces(), _drawn(2)
    for model in (_transformer(tokenizer), _random_bigram(tokenizer)):
        expected = [_read(spec, model, tokenizer) for spec in specs]
        for batch_tokens in (1, 64, 1000, 16384):
            for cache in (True, False):
                report = part(model, tokenizer, _load(*specs), prefix_cache=cache,
                              batch_tokens=batch_tokens)  # fmt: skip
                what = f"batch_tokens={batch_tokens}, prefix_cache={cache}"
                for spec, each in zip(specs, expected, strict=True):
                    _agree(report, spec, each, what)


class Rounding(Bigram):
    """Sums in another order for another shape of the batch, as real kernels do."""

    def forward(self, ids_BT):
        logits_BTV = super().forward(ids_BT)
        turn = 7.0 * ids_BT.shape[0] + 13.0 * ids_BT.shape[1]
        places_V = torch.arange(logits_BTV.shape[-1])
        return logits_BTV + 1e-5 * torch.sin(turn * places_V)


def test_rounding_decides_nothing(part):
    """Options that are equal but for rounding: the answer is that of one reading."""
    tokenizer = Pieces()
    equal = dict.fromkeys("bcdef", 0.19)
    model = Rounding(_known(tokenizer, a=equal, g=equal).table_VV.data.exp())
    ends = [{"query": "a" * n + "ga"[n % 2], "choices": [*"fedcb"], "gold": n % 5}
            for n in range(1, 9)]  # fmt: skip
    words = [{"context": "a" * n, "continuation": "bcdef"[n % 5]} for n in range(1, 9)]
    tasks = _load(_spec(MC, ends, 1, ""), _spec(LM, words, 1, ""))
    found = [
        [(i.choice, i.correct) for r in report.tasks.values() for i in r.items]
        for report in (
            part(model, tokenizer, tasks, batch_tokens=size) for size in (1, 40, 9999)
        )
    ]
    assert found[0] == found[1] == found[2], "the size of a batch decides answers"


def test_any_number_of_ranks_scores_every_item_once(part):
    tokenizer, specs = Pieces(), _drawn(3, 10)
    model, tasks = _transformer(tokenizer), _load(*specs)
    whole = part(model, tokenizer, tasks)
    for world in (2, 3):
        parts = [part(model, tokenizer, tasks, rank=r, world=world)
                 for r in range(world)]  # fmt: skip
        for label in whole.tasks:
            shares = [[i.index for i in p.tasks[label].items] for p in parts]
            assert sorted(i for share in shares for i in share) == [*range(10)], (
                f"{world} ranks score items {shares} of {label}"
            )
            assert max(map(len, shares)) < 10, f"one rank does all: {shares}"
        merged = merge(parts)
        assert _items(merged) == _items(whole), f"{world} ranks answer differently"
        assert merged.core == whole.core, f"{merged.core} of {world} ranks"


def test_stored_tokens_are_those_of_the_same_tokenizer_and_rules(part):
    model_of = {name: Pieces(pieces) for name, pieces in
                (("a", LETTERS), ("b", LETTERS[::-1]))}  # fmt: skip
    specs = _drawn(4)
    rules = ({}, {"context": 30}, {"context": 60, "crop": "shots"},
             {"context": 40, "crop": "shots"},
             {"max_per_task": 5, "legacy_pool": True}, {"max_per_task": 5})  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b", "a", "b"):
            tokenizer = model_of[name]
            model = _transformer(tokenizer)
            for keys in rules:
                fresh = part(model, tokenizer, _load(*specs), **keys)
                stored = part(model, tokenizer, _load(*specs),
                              token_cache=Path(folder), **keys)  # fmt: skip
                assert _items(stored) == _items(fresh), (
                    f"tokens from the folder answer differently, {keys}"
                )
        tokenizer.texts.clear()
        part(model, tokenizer, _load(*specs), token_cache=Path(folder))
        assert not tokenizer.texts, f"{len(tokenizer.texts)} texts were encoded again"
        changed = [{**spec, "delimiter": "."} for spec in specs]
        got = part(model, tokenizer, _load(*changed), token_cache=Path(folder))
        for spec in changed:
            _agree(got, spec, _read(spec, model, tokenizer), "another delimiter")
        for half in (slice(0, 4), slice(4, 8)):
            (task, *_) = _load(*specs)
            some = [replace(task, items=task.items[half])]
            got = part(model, tokenizer, some, token_cache=Path(folder))
            fresh = part(model, tokenizer, some)
            assert _items(got) == _items(fresh), "tokens of other items of the file"
        tokenizer.bos_id = tokenizer.ids["j"]
        got = part(model, tokenizer, _load(*specs), token_cache=Path(folder))
        for spec in specs:
            _agree(got, spec, _read(spec, model, tokenizer), "another BOS")


def test_the_model_is_read_as_it_predicts_and_left_as_it_was(part):
    class Noisy(Bigram):
        def forward(self, ids_BT):
            assert not self.training, "the model was read in training mode"
            logits_BTV = super().forward(ids_BT)
            assert not logits_BTV.requires_grad, "gradients are kept"
            return logits_BTV

    tokenizer, spec = Pieces(), _drawn()[0]
    model = Noisy(_random_bigram(tokenizer).table_VV.data.exp())
    for training in (True, False):
        model.train(training)
        part(model, tokenizer, _load(spec))
        assert model.training == training, "the model's mode has changed"


def test_settings_that_mean_nothing_are_refused(part):
    tokenizer = Pieces()
    model, tasks = _random_bigram(tokenizer, context=64), _load(_drawn()[0])
    for keys in (
        {"crop": "left"},
        {"baselines": "v3"},
        {"context": 1},
        {"context": 65},
        {"max_per_task": 0},
        {"batch_tokens": 0},
        {"rank": 2, "world": 2},
    ):
        _refused(lambda k=keys: part(model, tokenizer, tasks, **k), keys)
    less = Bigram(torch.full((9, 9), 1 / 9), vocab_size=9)
    _refused(lambda: part(less, tokenizer, tasks), "a model of 9 ids for 32")
