"""Every row of `littlelm bench` runs at a tiny size and reports ratios.

No time is asserted: what is fast enough is for `littlelm bench` itself to say.
"""

import json
import math

import pytest
from rich.console import Console
from typer.testing import CliRunner

from littlelm_core import bench
from littlelm_core.bench import measure
from littlelm_core.cli import app
from littlelm_core.config import LittleLMError

NEEDS = {
    "train": "transformers", "generate": "transformers", "bpe": "rustbpe",
    "minhash": "datasketch", "heuristics": "datatrove",
}  # fmt: skip


@pytest.mark.parametrize("what", bench.ROWS)
def test_a_row_runs_and_reports(what):
    if what in NEEDS:
        pytest.importorskip(NEEDS[what])
    rows = bench.run(what, quick=True)
    assert rows
    for row in rows:
        assert row.ratio > 0
        assert math.isfinite(row.ratio)
        assert min(row.ratios) <= row.ratio <= max(row.ratios)
        assert row.bar is not None
        assert len(row.ratios) >= 3
        json.dumps(row.to_json())


def test_the_memory_of_curate_is_measured():
    memory, speed = bench.run("curate", quick=True)
    assert 20 < memory.theirs < 5_000, "megabytes of a process that imports numpy"
    assert 20 < memory.ours < 5_000
    assert memory.ratio == pytest.approx(memory.theirs / memory.ours)
    assert speed.ours > 0
    assert "2 MB" in memory.note


def test_the_file_says_where_it_was_measured(tmp_path, capsys):
    console = Console(width=120)
    rows = bench.main(["loader"], console, quick=True, folder=tmp_path)
    (path,) = tmp_path.glob("*-loader-quick.json")
    found = json.loads(path.read_text())
    assert [row["what"] for row in found["rows"]] == [row.what for row in rows]
    assert found["threads"] == 1
    assert found["machine"]["cpu"]
    assert any(version.startswith("torch ") for version in found["versions"])
    out = capsys.readouterr().out
    for row in rows:
        assert row.what in out
        assert ("met" if row.passes else "MISSED") in out


def test_an_unknown_row_names_the_nearest(tmp_path):
    with pytest.raises(LittleLMError, match="'encode'"):
        bench.main(["encod"], Console(), folder=tmp_path)


def test_the_ablations_are_known_names_and_run_alone(tmp_path):
    for wrong, near in (("fixs", "fixes"), ("mixtur", "mixture")):
        result = CliRunner().invoke(app, ["bench", wrong, "--folder", str(tmp_path)])
        assert f"did you mean {near!r}?" in str(result.exception)
    with pytest.raises(LittleLMError, match=r"'ab'.*encode.*fixes.*mixture.*train"):
        bench.main(["ab"], Console(), folder=tmp_path)
    for names in (["loader", "fixes"], ["mixture", "loader"]):
        result = CliRunner().invoke(app, ["bench", *names, "--folder", str(tmp_path)])
        assert "runs alone: littlelm bench" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_ratios_are_taken_within_a_round():
    # The machine slows down fourfold: the ratio of each round stays 2.
    seconds = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 4.0, 8.0]}
    row = measure.against("x", "peer", seconds, 100, "tok/s", 1.5)
    assert row.ratios == [2.0, 2.0, 2.0]
    assert row.ratio == 2.0
    assert (row.ours, row.theirs) == (50.0, 25.0)
    assert row.passes
    assert not measure.against("x", "peer", seconds, 100, "tok/s", 2.5).passes


def test_contestants_take_turns():
    order = []
    contestants = {n: lambda n=n: order.append(n) for n in ("a", "b")}
    seconds = measure.rounds(contestants, 2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert {len(s) for s in seconds.values()} == {2}


def test_a_plain_number_is_a_bar_too():
    row = measure.alone("loading", [0.5, 1.0, 2.0], 200, "tok/s", 100)
    assert row.ours == 200
    assert row.ratio == 2.0
    assert row.passes


def test_a_model_that_is_no_llama_is_refused():
    pytest.importorskip("transformers")
    from littlelm_core.bench.peers import SHAPE_8M, llama_with_our_weights
    from littlelm_core.model import LanguageModel, ModelConfig, count_parameters

    assert count_parameters(SHAPE_8M)["total"] == 8_524_032
    model = LanguageModel(ModelConfig(32, 1, 2, 2, 48, 64, 32, softcap=15.0))
    with pytest.raises(LittleLMError, match="softcap"):
        llama_with_our_weights(model)
