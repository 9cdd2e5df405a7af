"""Graders of chapter 15's exercises (written with chapters/15_core_eval.md)."""

import math
import random

import numpy as np

from littlelm_core.core_eval import Example, Row, Task, Work, example_of, shots_of


def exercise_15_1(answer):
    """The mean centered accuracy."""
    got = answer({"a": 1.0, "b": 0.25}, {"a": 0, "b": 25})
    assert math.isclose(got, 0.5), f"one perfect task, one guessed: 0.5, not {got}"
    got = answer({"boolq": 0.5}, {"boolq": 62})
    assert math.isclose(got, -0.12 / 0.38), f"below chance is below zero; not {got}"
    got = answer({"a": 0.4, "b": 0.55, "c": 0.2}, {"a": 20, "b": 50, "c": 0})
    assert math.isclose(got, (0.25 + 0.1 + 0.2) / 3), f"the mean of three: not {got}"
    for accuracies in ({"a": 0.5}, {"a": 0.5, "c": 0.5}):
        try:
            got = answer(accuracies, {"a": 0, "b": 0})
        except ValueError:
            continue
        except KeyError as error:
            got = f"KeyError {error}"
        raise AssertionError(f"b has no accuracy: a ValueError is asked, not {got}")


def exercise_15_2(answer):
    """The scored part of each row."""
    rows = [[0, 7, 7, 1], [0, 7, 7, 2, 3]]
    got = answer(rows, "multiple_choice")
    assert isinstance(got, list), f"a list of pairs (start, end) is asked, not {got!r}"
    assert list(map(tuple, got)) == [(3, 4), (3, 5)], f"{rows}: {got}"
    rows = [[0, 1], [0, 1, 2]]
    got = answer(rows, "multiple_choice")
    assert list(map(tuple, got)) == [(2, 2), (2, 3)], f"one begins the other: {got}"
    rows = [[0, 1, 2, 5, 6], [0, 3, 5, 6]]
    got = answer(rows, "schema")
    assert list(map(tuple, got)) == [(3, 5), (2, 4)], f"{rows}: {got}"
    rng = np.random.default_rng(0)
    for _ in range(60):
        kind = ("multiple_choice", "schema")[int(rng.integers(2))]
        front, end = rng.integers(2, size=3).tolist(), rng.integers(2, size=3).tolist()
        rows = [
            [9, *front, *rng.integers(2, size=rng.integers(1, 4)).tolist(), *end]
            for _ in range(3)
        ]
        task = Task(kind, kind, 0, " ", {}, ())
        arrays = [np.array(row) for row in rows]
        wanted = [(r.start, len(r.ids)) for r in example_of(task, 0, arrays, None).rows]
        if min(start for start, _ in wanted) == 1 and kind == "schema":
            continue  # equal rows: the evaluator never scores a BOS
        got = list(map(tuple, answer(rows, kind)))
        assert got == wanted, f"{kind} of {rows}: {wanted}, not {got}"


def exercise_15_3(answer):
    """The draw of the examples."""
    items = [{"query": f"item {i}"} for i in range(40)]
    task = Task("t", "multiple_choice", 7, " ", {}, tuple(items))
    for index in (0, 1, 20, 39):
        got, wanted = answer(items[:], index, 7), shots_of(task, index)
        assert isinstance(got, list), f"a list is asked, not {got!r}"
        assert items[index] not in got, f"item {index} is among its own examples"
        assert got == wanted, f"item {index}: {wanted[:2]}..., not {got[:2]}..."
    assert answer(items, 3, 0) == [], "without shots there are no examples"
    same = [{"query": "a"}, {"query": "a"}, {"query": "b"}]
    got = answer(same, 0, 2)
    wanted = random.Random(1234).sample(same[1:], 2)
    assert got == wanted, f"another item may be equal to this one: {wanted}, not {got}"


def exercise_15_4(answer):
    """A difference in pairs."""
    got = answer([0, 1, 0, 1], [0, 1, 0, 1])
    assert np.allclose(got, (0, 0)), f"equal marks differ by 0 for sure; not {got}"
    got = answer([0, 0, 1, 1], [1, 0, 1, 1])
    wanted = (0.25, math.sqrt(0.25 - 0.0625) / 2)
    assert np.allclose(got, wanted), f"one item of four better: {wanted}, not {got}"
    rng = np.random.default_rng(1)
    for size in (10, 200):
        a, b = rng.integers(2, size=(2, size))
        gained, lost = ((b > a).mean(), (a > b).mean())
        gain = gained - lost
        wanted = (gain, math.sqrt((gained + lost - gain**2) / size))
        got = answer(a.tolist(), b.tolist())
        assert np.allclose(got, wanted), f"{size} items: {wanted}, not {got}"


def exercise_15_5(answer):
    """Tokens alone and shared, as the evaluator divides the rows."""
    got = tuple(answer([[0, 5, 5, 1], [0, 5, 5, 2, 3]]))
    assert got == (9, 5), f"9 alone; 2 once, then 1 and 2: 5. Not {got}"
    got = tuple(answer([[0, 5, 1], [0, 5, 1]]))
    assert got == (6, 2), f"two identical rows are one: (6, 2), not {got}"
    got = tuple(answer([[0, 5, 1], [0, 5, 2]]))
    assert got == (6, 2), f"alike but for the last token: (6, 2), not {got}"
    got = tuple(answer([[0, 5, 1], [0, 5, 2], [0, 5, 3, 4]]))
    assert got == (10, 4), f"1 once, then 1 and 2: (10, 4), not {got}"
    rng = np.random.default_rng(2)
    task = Task("t", "multiple_choice", 0, " ", {}, ())
    for choices in (2, 4, 5):
        front = [0, *rng.integers(1, 50, size=int(rng.integers(20, 60))).tolist()]
        rows = [
            [*front, 50 + i, *rng.integers(1, 50, size=i).tolist()]
            for i in range(choices)
        ]
        rows.append(rows[0])
        example = Example(0, tuple(Row(np.array(r), len(front)) for r in rows))
        work = Work(task, [example], share=True)
        (unit,) = work.units
        read = unit.prefix + sum(
            len(work.row(alike[0]).inputs) - unit.prefix
            for alike in work.readings(unit.rows)
        )
        wanted = (sum(map(len, rows)), read)
        got = tuple(answer(rows))
        assert got == wanted, f"{choices} choices, one of them twice: {wanted}: {got}"
