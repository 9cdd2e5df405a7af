"""Evaluators that are wrong in ways people have shipped."""

import math
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from littlelm_core import core_eval as ours
from littlelm_core.core_eval import (
    CoreReport,
    Example,
    Item,
    Reader,
    Row,
    TaskResult,
    Text,
    Work,
)


def wrong(report=None, **parts):
    """Return our evaluator with other parts while it runs; `report` changes its end."""

    def evaluate(model, tokenizer, tasks, **keys):
        with mock.patch.multiple(ours, **parts):
            found = ours.evaluate(model, tokenizer, tasks, **keys)
        return report(found) if report else found

    return evaluate


def asked(change, **fixed):
    """Return our evaluator asked in another way: change(tasks, keys) -> tasks."""

    def evaluate(model, tokenizer, tasks, **keys):
        return ours.evaluate(model, tokenizer, change(tasks, keys), **keys, **fixed)

    return evaluate


# ---- Prompts and examples


def shots_with_itself(task, index, pool=None):
    """Draws from all items: one in so many has its own answer in front."""
    count = pool or len(task.items)
    drawn = random.Random(1234 + index).sample(range(count), task.shots)
    return [task.items[i] for i in drawn]


def shots_of_one_seed(task, index, pool=None):
    """Draws with one seed for all items."""
    others = [r for i, r in enumerate(task.items[:pool]) if i != index]
    return random.Random(1234).sample(others, task.shots)


def as_many_shots_as_there_are(task, index, pool=None):
    """Takes fewer examples where there are too few, without a word."""
    count = len(task.items) if pool is None else pool
    return ours.shots_of(replace(task, shots=min(task.shots, count - 1)), index, pool)


def not_shuffled(tasks, keys):
    """Asks the items in the order of the alphabet, not in the shuffled one."""
    return [replace(t, items=tuple(sorted(t.items, key=repr))) for t in tasks]


def from_the_sample(tasks, keys):
    """Cuts the task to its first items before examples are drawn."""
    count = keys.get("max_per_task")
    return [replace(t, items=t.items[:count]) for t in tasks]


def solved_tidily(task, record):
    """Strips what it joins."""
    tidy = {k: v.strip() if isinstance(v, str) else v for k, v in record.items()}
    return SOLVED(task, tidy)


SOLVED = ours.solved


def prompts_of_one_line_end(task, index, shots):
    """Joins examples by one line end."""
    rows, prompt = PROMPTS(task, index, shots)
    rows = [row.replace("\n\n", "\n") for row in rows]
    return rows, prompt and prompt.replace("\n\n", "\n")


PROMPTS = ours.prompts


def prompts_not_stripped(task, index, shots):
    """Leaves the context of language modeling as it is."""
    rows, prompt = PROMPTS(task, index, shots)
    if prompt is None:
        return rows, prompt
    record = task.items[index]
    front = rows[0][: len(rows[0]) - len(record["continuation"])]
    front = front.removesuffix(record["context"].strip() + task.delimiter)
    start = front + record["context"] + task.delimiter
    return [start + record["continuation"]], start.strip()


# ---- Tokens


class TwoBos(Text):
    """The tokenizer has put a BOS in front, and so does the evaluator."""

    def encode(self, texts):
        return [np.concatenate((ids[:1], ids)) for ids in super().encode(texts)]


class NoBos(Text):
    """Begins with the text itself."""

    def encode(self, texts):
        return [ids[1:] for ids in super().encode(texts)]


def shifted(by):
    """Return spans that begin `by` tokens off."""

    def example_of(task, index, rows, prompt):
        example = EXAMPLE_OF(task, index, rows, prompt)
        moved = [Row(r.ids, min(max(r.start + by, 1), len(r.ids) - 1))
                 for r in example.rows]  # fmt: skip
        return example._replace(rows=tuple(moved))

    return example_of


EXAMPLE_OF = ours.example_of


def whole_row_scored(task, index, rows, prompt):
    """Scores the question with the answer, where the contexts differ."""
    example = EXAMPLE_OF(task, index, rows, prompt)
    if task.kind != "schema":
        return example
    start = ours.common_prefix(rows)
    return example._replace(rows=tuple(Row(r, start) for r in rows))


def border_by_length(task, index, rows, prompt):
    """Cuts the answer off behind as many tokens as the prompt alone has."""
    example = EXAMPLE_OF(task, index, rows, prompt)
    if prompt is None:
        return example
    start = min(len(prompt), len(rows[0]) - 1)
    return Example(index, (Row(rows[0], start),), border=example.border)


def empty_is_fine(task, index, rows, prompt):
    """Scores the last token of the prompt where an answer has none."""
    if prompt is not None and not task.items[index]["continuation"]:
        return Example(index, (Row(rows[0], len(rows[0]) - 1),))
    return EXAMPLE_OF(task, index, rows, prompt)


def cut_at_the_right(example, context, policy="bos"):
    """Keeps the first tokens: of a long row the answer is lost."""
    if context is None or policy == "none":
        return example
    rows = [Row(ids[:context], min(start, len(ids[:context]) - 1))
            for ids, start in example.rows]  # fmt: skip
    cut = any(len(row.ids) > context for row in example.rows)
    return example._replace(rows=tuple(rows), truncated=cut)


CROP = ours.crop


def cut_without_bos(example, context, policy="bos"):
    """Keeps the last tokens; BOS is lost with the first ones."""
    return CROP(example, context, "plain" if policy == "bos" else policy)


def cut_in_silence(example, context, policy="bos"):
    """Cuts, and counts nothing."""
    return CROP(example, context, policy)._replace(truncated=False)


def cut_answers_in_silence(example, context, policy="bos"):
    """Does not say that an answer itself was cut."""
    return CROP(example, context, policy)._replace(cut_answer=False)


def plain_is_bos(example, context, policy="bos"):
    """Knows one way to cut."""
    return CROP(example, context, "bos")


def shots_are_enough(example, context, policy="bos"):
    """Cuts nothing where examples are dropped, though the item alone may not fit."""
    return example if policy == "shots" else CROP(example, context, policy)


def cut_answers_of_choices_alone(example, context, policy="bos"):
    """Takes a long answer of language modeling for a whole one."""
    found = CROP(example, context, policy)
    return found if len(found.rows) > 1 else found._replace(cut_answer=False)


ENCODE = ours.encode


def newest_first(task, text, rules):
    """Drops the examples next to the item."""
    shots_of = ours.shots_of
    turned = mock.patch.object(
        ours, "shots_of", lambda *a: [*reversed(shots_of(*a))]
    )  # fmt: skip
    if rules.crop != "shots":
        return ENCODE(task, text, rules)
    with turned:
        return ENCODE(task, text, rules)


def stored_by_label(task, text, rules, folder):
    """Keeps tokens on disk by the task's name."""
    text.fingerprint = text.fingerprint and "a tokenizer"
    return ENCODED(task, text, rules, folder)


ENCODED = ours.encoded


def stored_without_delimiter(task, text, rules, folder):
    """Keeps tokens on disk by the file of a task, however it is asked."""

    def encode(_, text, rules):
        return ENCODE(task, text, rules)

    with mock.patch.object(ours, "encode", encode):
        return ENCODED(replace(task, delimiter="", shots=0), text, rules, folder)


def stored_without_context(task, text, rules, folder):
    """Keeps tokens of whatever examples were left, for any context."""

    def encode(task, text, _):
        return ENCODE(task, text, rules)

    with mock.patch.object(ours, "encode", encode):
        return ENCODED(task, text, rules._replace(context=None), folder)


def stored_without_bos(task, text, rules, folder):
    """Keeps tokens by the tokenizer's pieces, whichever of them is BOS."""

    class AnyBos(Text):
        bos = 0

        def __init__(self, text):
            self.fingerprint = text.fingerprint

        def encode(self, texts):
            return text.encode(texts)

    return ENCODED(task, AnyBos(text), rules, folder)


def stored_by_file(task, text, rules, folder):
    """Keeps tokens by the file that the items are from, whichever they are."""
    task.__dict__["digest"] = task.sha256
    return ENCODED(task, text, rules, folder)


# ---- Scores and answers

JUDGE = ours.judge


def rescored(change):
    """Return a judge of losses that change(loss, row, task, option text) has made."""

    def judge(task, example, scores, legacy_nan=False):
        record = task.items[example.index]
        texts = record.get("choices") or [record["continuation"]] * len(scores)
        scores = [
            score._replace(loss=change(score.loss, row, text))
            for score, row, text in zip(scores, example.rows, texts, strict=True)
        ]
        return JUDGE(task, example, scores, legacy_nan)

    return judge


def last_of_equals(task, example, scores, legacy_nan=False):
    """Lets the last of equal losses win."""
    item = JUDGE(task, example, scores, legacy_nan)
    if task.kind == "language_modeling" or None in item.scores:
        return item
    choice = len(scores) - 1 - item.scores[::-1].index(min(item.scores))
    right = choice == task.items[example.index]["gold"]
    return item._replace(choice=choice, correct=right)


def ties_uncounted(task, example, scores, legacy_nan=False):
    """Says nothing about ties."""
    return JUDGE(task, example, scores, legacy_nan)._replace(tie=False)


def nan_is_bad_luck(task, example, scores, legacy_nan=False):
    """Takes a NaN for a very bad score."""
    scores = [s if r.scored and math.isfinite(s.loss) else s._replace(loss=99.0)
              for s, r in zip(scores, example.rows, strict=True)]  # fmt: skip
    return JUDGE(task, example, scores, legacy_nan)


def empty_wins(task, example, scores, legacy_nan=False):
    """Takes the mean of nothing for 0: a choice without a token always wins."""
    item = JUDGE(task, example, scores, legacy_nan)
    if None not in item.scores:
        return item
    return item._replace(choice=item.scores.index(None))


def never_legacy(task, example, scores, legacy_nan=False):
    """Knows no legacy_nan."""
    return JUDGE(task, example, scores)


def first_token_decides(task, example, scores, legacy_nan=False):
    """Calls an answer right whose loss is small, whatever the argmax."""
    item = JUDGE(task, example, scores, legacy_nan)
    if task.kind != "language_modeling":
        return item
    return item._replace(correct=scores[0].loss < 1)


def each_for_itself(example, scores):
    """Scores identical choices in rows of their own, each with its rounding."""
    return [s._replace(loss=s.loss + 1e-7 * n) for n, s in enumerate(scores)]


def any_of_equals(logits_NV, targets_N, leads):
    """Calls a token right that is as likely as the best, whichever is the argmax."""
    losses_N, leads_N = LOSSES_AND_LEADS(logits_NV, targets_N, leads)
    return losses_N, torch.where(leads_N.abs() < 1e-30, 0.0, leads_N)


LOSSES_AND_LEADS = ours.losses_and_leads


# ---- Reading


class AllIds(Reader):
    """Asks for the best of all columns, padding too."""

    def logits(self, x_NC):
        return (self.model.logits(x_NC) if self.splits else x_NC).float()


class OffByOne(Reader):
    """Goes on from a cache one position late."""

    def fork(self, cache, rows, length):
        fork = super().fork(cache, rows, length)
        for layer in fork:
            layer.length -= 1
        return fork


class FirstRow(Reader):
    """Lets all rows go on from the first prefix of a batch."""

    def fork(self, cache, rows, length):
        return super().fork(cache, [0] * len(rows), length)


class LosesTheRest(Work):
    """Gives each rank the same number of units; the rest is dropped."""

    def __init__(self, task, examples, share, rank=0, world=1, done=()):
        even = len(examples) // world * world
        super().__init__(task, examples[:even], share, rank, world, done)


class AllForEach(Work):
    """Lets every rank score everything."""

    def __init__(self, task, examples, share, rank=0, world=1, done=()):
        super().__init__(task, examples, share, 0, 1, done)


def still_training(model, tokenizer, tasks, **keys):
    """Leaves the model in evaluation mode: the training that goes on has no dropout."""
    try:
        return ours.evaluate(model, tokenizer, tasks, **keys)
    finally:
        model.eval()


# ---- The score


class Weighted(CoreReport):
    """Weighs tasks by their items."""

    def core_by(self, table):
        each = [(r.n, r.task.centered(r.accuracy, table)) for r in self.tasks.values()]
        return sum(n * c for n, c in each) / sum(n for n, _ in each)


class NotCentered(CoreReport):
    """Means the accuracies."""

    def core_by(self, table):
        return sum(r.accuracy for r in self.tasks.values()) / len(self.tasks)


class ByV1(TaskResult):
    """Centers each task by v1, whatever the report goes by."""

    @property
    def centered(self):
        return self.task.centered(self.accuracy)


class OneError(CoreReport):
    """Takes one standard error for the interval of 95 %."""

    @property
    def interval(self):
        low, high = CoreReport.interval.fget(self)
        half = (high - low) / 2 / 1.96
        return self.core - half, self.core + half


class CutByV1(CoreReport):
    """Has one table for what was cut."""

    @property
    def uncropped(self):
        return CoreReport.uncropped.fget(mock.Mock(tasks=self.tasks, baselines="v1"))


class AnyTasks(CoreReport):
    """Calls the mean of whatever was run CORE."""

    whole = True


def baselines_of(change):
    """Return an evaluator of tasks with other baselines, {"v1": ..., "v2": ...}."""
    return asked(
        lambda tasks, keys: [replace(t, baselines=change(t.baselines)) for t in tasks]
    )


def empty_left_out(tasks, keys):
    """Leaves an empty task out without a word."""
    return [task for task in tasks if task.items]


def no_table_hash(report):
    """Hashes the data, not the table."""

    class Report(CoreReport):
        def to_dict(self):
            return {**super().to_dict(), "table_sha256": "none"}

    return Report(**vars(report))


def hash_of_names(report):
    """Knows files by their names."""

    class Report(CoreReport):
        def to_dict(self):
            return {**super().to_dict(), "data_sha256": str(sorted(self.tasks))}

    return Report(**vars(report))


def first_items_of_the_rest(report):
    """Numbers items as they were finished."""
    tasks = {
        label: replace(r, items=tuple(Item(n, *i[1:]) for n, i in enumerate(r.items)))
        for label, r in report.tasks.items()
    }
    return replace(report, tasks=tasks)


def any_setting(model, tokenizer, tasks, **keys):
    """Takes a context for the model's own where that is shorter."""
    limit = getattr(getattr(model, "cfg", None), "context", None)
    if limit and keys.get("context"):
        keys["context"] = min(keys["context"], limit)
    return ours.evaluate(model, tokenizer, tasks, **keys)


BY_THE_RULES = "test_every_item_is_scored_by_the_rules"
BY_HAND = "test_multiple_choice_is_the_lowest_mean_loss"
CENTERED = "test_accuracy_is_centered_by_each_task_and_core_is_the_plain_mean"
DRAWN = "test_examples_are_drawn_as_the_reference_draws_them"
PROMPTS_TEST = "test_prompts_keep_odd_spaces_and_language_modeling_strips_its_context"
ONE_BOS = "test_every_row_has_one_bos_in_front"
LAST_TOKENS = "test_the_last_tokens_stay_behind_a_bos_and_are_counted"
EVERY_WAY = "test_the_size_of_a_batch_and_the_prefix_cache_change_nothing"
RANKS = "test_any_number_of_ranks_scores_every_item_once"
STORED = "test_stored_tokens_are_those_of_the_same_tokenizer_and_rules"
HASHES = "test_the_report_names_data_and_table_by_their_hashes"

ZOO = {
    "two BOS": (wrong(Text=TwoBos), ONE_BOS),
    "no BOS": (wrong(Text=NoBos), ONE_BOS),
    "an item among its own examples": (wrong(shots_of=shots_with_itself), DRAWN),
    "one seed for all items": (wrong(shots_of=shots_of_one_seed), DRAWN),
    "items that are not shuffled": (asked(not_shuffled), DRAWN),
    "fewer examples where items lack": (
        wrong(shots_of=as_many_shots_as_there_are),
        "test_too_few_items_for_the_examples_are_refused",
    ),
    "examples from the sample alone": (
        asked(from_the_sample),
        "test_a_part_of_the_items_takes_examples_from_all_of_them",
    ),
    "examples are stripped": (wrong(solved=solved_tidily), PROMPTS_TEST),
    "one line end between examples": (
        wrong(prompts=prompts_of_one_line_end),
        PROMPTS_TEST,
    ),
    "a context that is not stripped": (
        wrong(prompts=prompts_not_stripped),
        PROMPTS_TEST,
    ),
    "the span begins a token late": (wrong(example_of=shifted(1)), BY_THE_RULES),
    "the span begins a token early": (wrong(example_of=shifted(-1)), BY_THE_RULES),
    "contexts are scored, not what follows": (
        wrong(example_of=whole_row_scored),
        "test_schema_scores_the_same_words_behind_each_context",
    ),
    "the border by the prompt's length": (
        wrong(example_of=border_by_length),
        "test_a_token_across_the_border_belongs_to_the_answer",
    ),
    "an empty answer is scored": (
        wrong(example_of=empty_is_fine),
        "test_an_answer_without_a_token_is_refused",
    ),
    "cut at the right": (wrong(crop=cut_at_the_right), LAST_TOKENS),
    "cut without BOS": (wrong(crop=cut_without_bos), LAST_TOKENS),
    "cut rows are not counted": (wrong(crop=cut_in_silence), LAST_TOKENS),
    "cut answers are not counted": (
        wrong(crop=cut_answers_in_silence),
        "test_an_answer_longer_than_the_context_is_counted",
    ),
    "cut answers of language modeling are not counted": (
        wrong(crop=cut_answers_of_choices_alone),
        "test_an_answer_longer_than_the_context_is_counted",
    ),
    "dropping examples is enough": (
        wrong(crop=shots_are_enough),
        "test_an_item_too_long_without_examples_is_cut_as_ever",
    ),
    "one way to cut": (
        wrong(crop=plain_is_bos),
        "test_a_plain_cut_has_no_bos_and_none_cuts_nothing",
    ),
    "the nearest example goes first": (
        wrong(encode=newest_first),
        "test_examples_are_dropped_oldest_first",
    ),
    "the sum, not the mean": (
        wrong(judge=rescored(lambda loss, row, text: loss * row.scored)),
        BY_HAND,
    ),
    "the mean over letters": (
        wrong(judge=rescored(lambda loss, row, text: loss * row.scored / len(text))),
        "test_choices_are_scored_from_the_first_token_that_differs",
    ),
    "a small loss is right": (
        wrong(judge=first_token_decides),
        "test_language_modeling_wants_every_token_to_be_the_best",
    ),
    "the last of equals wins": (
        wrong(judge=last_of_equals),
        "test_equal_losses_go_to_the_first_and_are_counted",
    ),
    "ties are not counted": (
        wrong(judge=ties_uncounted),
        "test_equal_losses_go_to_the_first_and_are_counted",
    ),
    "NaN is a bad score": (
        wrong(judge=nan_is_bad_luck),
        "test_a_score_that_is_no_number_raises",
    ),
    "nothing scores 0": (
        wrong(judge=empty_wins),
        "test_a_choice_without_a_token_of_its_own_cannot_win",
    ),
    "no legacy_nan": (
        wrong(judge=never_legacy),
        "test_a_choice_without_a_token_of_its_own_cannot_win",
    ),
    "identical choices differ by rounding": (
        wrong(spread=each_for_itself),
        "test_identical_choices_have_identical_scores",
    ),
    "padding ids count": (
        wrong(Reader=AllIds),
        "test_ids_that_only_pad_the_table_are_never_the_best",
    ),
    "the cache is one position off": (wrong(Reader=OffByOne), EVERY_WAY),
    "all rows behind the first prefix": (wrong(Reader=FirstRow), EVERY_WAY),
    "rounding decides": (
        wrong(is_close=lambda *_: False),
        "test_rounding_decides_nothing",
    ),
    "the highest of equal ids is the best": (
        wrong(losses_and_leads=any_of_equals),
        "test_of_equal_tokens_the_lowest_id_is_the_best",
    ),
    "what was cut is centered by v1": (
        wrong(CoreReport=CutByV1),
        "test_the_score_without_what_was_cut",
    ),
    "ranks lose the rest": (wrong(Work=LosesTheRest), RANKS),
    "every rank does all": (wrong(Work=AllForEach), RANKS),
    "items numbered by each rank": (wrong(first_items_of_the_rest), RANKS),
    "tokens stored by the task's name": (wrong(encoded=stored_by_label), STORED),
    "tokens stored by the file": (wrong(encoded=stored_by_file), STORED),
    "tokens stored without the context": (
        wrong(encoded=stored_without_context),
        STORED,
    ),
    "tokens stored without BOS": (wrong(encoded=stored_without_bos), STORED),
    "tokens stored without the delimiter": (
        wrong(encoded=stored_without_delimiter),
        STORED,
    ),
    "the model stays in evaluation mode": (
        still_training,
        "test_the_model_is_read_as_it_predicts_and_left_as_it_was",
    ),
    "a baseline that is no per cent": (
        baselines_of(lambda b: {k: v / 100 for k, v in b.items()}),
        CENTERED,
    ),
    "one table for both": (
        baselines_of(lambda b: {"v1": b["v1"], "v2": b["v1"]}),
        CENTERED,
    ),
    "CORE weighs tasks by their items": (wrong(CoreReport=Weighted), CENTERED),
    "CORE of accuracies": (wrong(CoreReport=NotCentered), CENTERED),
    "tasks are centered by v1": (wrong(TaskResult=ByV1), CENTERED),
    "an interval of one standard error": (wrong(CoreReport=OneError), CENTERED),
    "CORE of any tasks": (
        wrong(CoreReport=AnyTasks),
        "test_core_is_of_all_tasks_or_not_said",
    ),
    "an empty task is left out": (
        asked(empty_left_out),
        "test_a_task_without_items_is_refused",
    ),
    "a table without a hash": (wrong(no_table_hash), HASHES),
    "data known by its names": (wrong(hash_of_names), HASHES),
    "a context that the model lacks": (
        any_setting,
        "test_settings_that_mean_nothing_are_refused",
    ),
}
