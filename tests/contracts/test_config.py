"""Contract of chapter 00: run files, overrides, parts and the registry.

The part is the whole module. Whatever is wrong with a run is said in one line which
names the key, and nothing that a run says is lost, guessed or half read.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PART = "littlelm_core.config"

OWN = '''
"""A learner's own parts."""

class Wide:
    def __init__(self, dim, ffn_dim, width: int = 2, names: list[str] = ()):
        self.dim, self.ffn_dim, self.width = dim, ffn_dim, width

class Open:
    def __init__(self, dim, ffn_dim, **keys):
        self.keys = keys

class Needs:
    def __init__(self, d, f, width: int):
        self.width = width

class Hinted:
    def __init__(self, dim, ffn_dim, width: "Missing" = 1):
        pass

def one(dim):
    pass

def ramp(step, total, warmup, slope: float = 1.0):
    return min(1.0, slope * step / warmup)

class MyModel:
    def __init__(self, cfg):
        self.cfg = cfg

class Hook:
    def __init__(self, every: int = 1):
        self.every = every

NUMBER = 3
'''

MODEL = """
tokenizer.vocab_size = 300
model = { dim = 8, layers = 1, heads = 2, kv_heads = 1, ffn_dim = 8, context = 8 }
"""
BARE = MODEL + "schedule.warmup = 1\n"


@contextlib.contextmanager
def folder(**files):
    """A folder with run files (`a="steps = 3"` is a.toml) and own.py."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name).resolve()
        (path / "own.py").write_text(OWN, encoding="utf-8")
        for stem, text in files.items():
            (path / f"{stem}.toml").write_text(text, encoding="utf-8")
        yield path


@contextlib.contextmanager
def working_in(path):
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def refused(part, call, *words):
    """The call raises a ConfigError of one line that holds all the words."""
    try:
        call()
    except part.ConfigError as error:
        message = str(error)
    else:
        raise AssertionError(f"accepted, though it should be refused: {words}")
    assert "\n" not in message, f"the message has more than one line: {message!r}"
    for word in words:
        assert word in message, f"the message lacks {word!r}: {message}"


def tiny(part, *overrides):
    return part.load_run("tiny-adamw", list(overrides))


# ---- Keys and values


def test_an_unknown_key_names_the_nearest_one(part):
    for override, key, close in (
        ("stps=3", "stps", "'steps'"),
        ("checkpoint_evry=3", "checkpoint_evry", "'checkpoint_every'"),
        ("data.sorce=x", "data.sorce", "'source'"),
        ("optimizer.weight_deca=0.1", "optimizer.weight_deca", "'weight_decay'"),
        ("optimizer.matrix.beta=[0.9, 0.9]", "optimizer.matrix.beta", "'betas'"),
        ("optimizer.matrx.lr=0.1", "optimizer.matrx", "'matrix'"),
    ):
        refused(part, lambda o=override: tiny(part, o), key, close)


def test_a_key_at_the_wrong_place_names_its_table(part):
    refused(part, lambda: tiny(part, "layers=3"), "layers", "'model.layers'")


def test_a_key_that_the_trainer_sets_is_refused(part):
    with folder() as path:
        use = f"ffn.use={path}/own.py:Wide"
        assert tiny(part, use, "ffn.width=3").ffn.options == {"width": 3}
        refused(part, lambda: tiny(part, use, "ffn.dim=3"), "ffn.dim")


def test_a_wrong_type_names_the_key(part):
    for override in (
        'steps="10"', "steps=1.5", "steps=2.0", "steps=true", "rows=[1]",
        'clip="1.0"', "name=3", "run_dir=7", 'optimizer.lr="0.1"', "optimizer.lr=true",
        "optimizer.betas=[0.9]", 'optimizer.betas=[0.9, "b"]', "optimizer.matrix.lr=[]",
        "optimizer.matrix=3", "optimizer.fused=1", "data.source=1", "seed=2020-01-01",
    ):  # fmt: skip
        refused(part, lambda o=override: tiny(part, o), override.partition("=")[0])
    assert tiny(part, "clip=2").clip == 2, "an integer is a number too"
    assert tiny(part, "optimizer.lr=1").optimizer.options["lr"] == 1


def test_a_half_parsed_number_is_refused(part):
    for override in (
        "steps=10k", "steps=1e3", "steps=1_", "steps=0x", "rows=8 rows", "seed=--1",
        "optimizer.lr=3e-", "optimizer.lr=0.1x", "optimizer.lr=1,5", "clip=1.0.0",
        "steps=", "steps=1\nrows=2",
    ):  # fmt: skip
        refused(part, lambda o=override: tiny(part, o), override.partition("=")[0])


def test_numbers_that_are_none_are_refused(part):
    for value in ("nan", "inf", "-inf"):
        for key in ("clip", "optimizer.lr", "optimizer.matrix.lr"):
            refused(part, lambda o=f"{key}={value}": tiny(part, o), f"{key} = {value}")


def test_minus_one_is_off_and_zero_is_refused(part):
    for key in (
        "stop_step", "grad_accum", "tokens_per_step", "checkpoint_every",
        "validate_every", "validation_tokens", "sample_every", "clip", "eval_every",
        "eval_max_per_task",
    ):  # fmt: skip
        assert getattr(tiny(part, f"{key}=-1"), key) == -1
        for value in (0, -2):
            refused(part, lambda o=f"{key}={value}": tiny(part, o), key)
    for key in ("steps", "rows", "checkpoints_kept", "max_skipped"):
        for value in (0, -1):
            refused(part, lambda o=f"{key}={value}": tiny(part, o), key)


def test_a_run_must_say_what_nobody_else_can(part):
    with folder(a="rows = 2", b=f"{MODEL}steps = 1\nrows = 1") as path:
        refused(part, lambda: part.load_run(path / "a.toml"), "lacks", "steps")
        own = f"schedule={path}/own.py:ramp"
        bare = path / "b.toml"
        refused(part, lambda: part.load_run(bare, [own]), "lacks", "schedule.warmup")
        run = part.load_run(bare, [own, "schedule.warmup=2"])  # total: from the steps
        assert run.schedule.options == {"warmup": 2}


# ---- Files


def test_an_unknown_run_or_missing_file_is_named(part):
    refused(part, lambda: part.load_run("tinny"), "'tinny'", "'tiny'")
    with folder(mine="steps = 1\nrows = 1") as path:
        refused(part, lambda: part.load_run(path / "mne.toml"), "mne.toml", "mine.toml")
        (path / "folder.toml").mkdir()
        refused(part, lambda: part.load_run(path / "folder.toml"), "folder.toml")
        (path / "bytes.toml").write_bytes(b"\xff\xfe\x00\x01")
        refused(part, lambda: part.load_run(path / "bytes.toml"), "bytes.toml")
        (path / "half.toml").write_text("steps = \n", encoding="utf-8")
        refused(part, lambda: part.load_run(path / "half.toml"), "half.toml", "line 1")
        (path / "twice.toml").write_text("steps = 1\nsteps = 2\n", encoding="utf-8")
        refused(part, lambda: part.load_run(path / "twice.toml"), "twice.toml")


def test_extends_lays_one_file_over_another(part):
    with folder(
        grand=f"""{BARE}steps = 1\nrows = 1\nseed = 1
            [optimizer]\nlr = 0.1\nbetas = [0.5, 0.6]""",
        parent='extends = "grand.toml"\nrows = 2\n[optimizer]\nlr = 0.2',
        child='extends = "parent.toml"\nseed = 3',
        named='extends = "tiny"\nseed = 7',
    ) as path:
        run = part.load_run(path / "child.toml", ["optimizer.lr=0.4"])
        assert (run.steps, run.rows, run.seed) == (1, 2, 3)
        assert run.optimizer.options == {"lr": 0.4, "betas": (0.5, 0.6)}
        named = part.load_run(path / "named.toml")
        assert named.seed == 7
        assert named.steps == part.load_run("tiny").steps


def test_extends_finds_its_file_from_any_folder(part):
    with folder(base=f"{BARE}steps = 5\nrows = 1") as path:
        (path / "deep").mkdir()
        child = path / "deep" / "child.toml"
        child.write_text('extends = "../base.toml"', encoding="utf-8")
        with tempfile.TemporaryDirectory() as elsewhere, working_in(elsewhere):
            assert part.load_run(child).steps == 5
        with working_in(path / "deep"):
            assert part.load_run("child.toml").steps == 5


def test_a_run_that_extends_itself_is_refused(part):
    with folder(
        a='extends = "b.toml"', b='extends = "a.toml"', c='extends = "c.toml"',
        d='extends = "nothing.toml"', e="extends = 3", f='extends = ["a", "b"]',
    ) as path:  # fmt: skip
        for name in "abc":
            refused(part, lambda n=name: part.load_run(path / f"{n}.toml"), "extends")
        refused(part, lambda: part.load_run(path / "d.toml"), "nothing.toml")
        for name in "ef":
            refused(part, lambda n=name: part.load_run(path / f"{n}.toml"), "extends")


def test_a_child_does_not_share_its_parents_folder(part):
    with folder(
        parent=f'{BARE}name = "p"\nrun_dir = "runs/there"\nsteps = 1\nrows = 1',
        child='extends = "parent.toml"\nseed = 3',
    ) as path:
        parent, child = (part.load_run(path / f"{n}.toml") for n in ("parent", "child"))
        assert (parent.name, parent.run_dir) == ("p", "runs/there")
        assert child.name == "child"
        assert child.run_dir != parent.run_dir, "it would resume the parent's run"


# ---- Overrides


def test_overrides_come_last_and_reach_inside(part):
    run = tiny(
        part, "steps=7", "optimizer.matrix.lr=0.02",
        "optimizer.matrix.betas=[0.8, 0.9]", "run_dir=out/a=b", 'name="x y"', "steps=8",
        "data.source = folder/x ",
    )  # fmt: skip
    assert run.steps == 8, "the last of two overrides counts"
    given = {"lr": 0.02, "betas": (0.8, 0.9)}
    assert run.optimizer.options["matrix"].items() >= given.items()
    assert run.optimizer.options["lr"] == tiny(part).optimizer.options["lr"]
    assert (run.run_dir, run.name) == ("out/a=b", "x y")
    assert run.data.source == "folder/x"


def test_an_override_without_key_or_value_is_refused(part):
    for override in ("steps", "=3", "optimizer..lr=3", ".steps=3", ""):
        refused(part, lambda o=override: tiny(part, o), repr(override))


@settings(max_examples=30)
@given(
    seed=st.integers(-(2**31), 2**31),
    rate=st.floats(1e-12, 1e12),
    text=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1),
)
def test_an_override_is_read_exactly(part, seed, rate, text):
    quoted = json.dumps(text)  # of printable ASCII: JSON and TOML quote alike
    run = tiny(part, f"seed={seed}", f"optimizer.lr={rate!r}", f"name={quoted}")
    assert (run.seed, run.optimizer.options["lr"], run.name) == (seed, rate, text)


# ---- Parts


def test_a_new_part_drops_the_old_ones_keys(part):
    with folder(
        parent=f"""{MODEL}steps = 1\nrows = 1\n[schedule]\nuse = "own.py:ramp"
            warmup = 4\nslope = 2.0\n[optimizer]\nlr = 0.1\nbetas = [0.5, 0.6]
            [optimizer.matrix]\nbetas = [0.1, 0.2]""",
        other="""extends = "parent.toml"\n[schedule]\nuse = "cosine"
            [optimizer]\nuse = "torch.optim:SGD"\nlr = 0.3""",
        same='extends = "parent.toml"\n[schedule]\nuse = "own.py:ramp"\nslope = 3.0',
    ) as path:
        other = part.load_run(path / "other.toml")
        assert other.optimizer.options == {"lr": 0.3}, "betas mean nothing to SGD"
        assert other.schedule.options == {"warmup": 4}, (
            "every schedule takes warmup, only the old one takes slope"
        )
        same = part.load_run(path / "same.toml")
        assert same.schedule.options == {"warmup": 4, "slope": 3.0}
        late = part.load_run(
            path / "parent.toml", ["optimizer.lr=0.7", "optimizer.use=torch.optim:SGD"]
        )
        assert late.optimizer.options == {"lr": 0.7}, "an override's own keys stay"
        short = part.load_run(path / "parent.toml", ["optimizer=torch.optim:SGD"])
        assert short.optimizer.use == "torch.optim:SGD"
        assert short.optimizer.options == {}


def test_a_new_model_keeps_the_sizes(part):
    with folder() as path:
        run = tiny(part, f"model.use={path}/own.py:MyModel")
        assert run.model.options == tiny(part).model.options
        assert run.model.options["dim"] > 0


def test_a_file_is_found_beside_the_run_that_names_it(part):
    own = f'{BARE}steps = 1\nrows = 1\n[ffn]\nuse = "own.py:Wide"'
    with folder(a=own) as path:
        (path / "deep").mkdir()
        child = path / "deep" / "child.toml"
        child.write_text('extends = "../a.toml"\nseed = 2', encoding="utf-8")
        with tempfile.TemporaryDirectory() as elsewhere, working_in(elsewhere):
            for run in (path / "a.toml", child):
                use = part.load_run(run).ffn.use
                assert part.resolve("ffn", use).__name__ == "Wide"
        with working_in(path):
            run = tiny(part, "ffn.use=own.py:Wide")  # an override: from here
        assert part.build("ffn", run.ffn, 3, 4).dim == 3, "it works from anywhere"


def test_a_file_is_loaded_once_and_again_when_edited(part):
    with folder() as path:
        use = f"{path}/own.py:Wide"
        first = part.resolve("ffn", use)
        assert part.resolve("ffn", use) is first, "one class, however often it is named"
        text = OWN.replace("width: int = 2", "width: int = 7")
        (path / "own.py").write_text(text, encoding="utf-8")
        assert part.resolve("ffn", use)(1, 1).width == 7, "the edit was not seen"


def test_a_part_that_does_not_import_is_one_line(part):
    for text, word in (
        ("def broken(:\n", "SyntaxError"),
        ("import not_a_module_of_anyone\n", "not_a_module_of_anyone"),
        ("raise RuntimeError('two\\nlines')\n", "two lines"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
    ):
        with folder() as path:
            (path / "bad.py").write_text(text, encoding="utf-8")
            use = f"{path}/bad.py:Wide"
            refused(part, lambda u=use: tiny(part, f"ffn.use={u}"), "bad.py", word)
            refused(part, lambda u=use: part.resolve("ffn", u), "bad.py", word)
    with folder() as path:
        own = f"{path}/own.py"
        refused(part, lambda: tiny(part, f"ffn.use={own}:Wode"), "Wode", "'Wide'")
        refused(part, lambda: tiny(part, f"ffn.use={own}:NUMBER"), "called")
        refused(part, lambda: tiny(part, f"ffn.use={own}"), "own.py:Name")
        refused(part, lambda: tiny(part, f"ffn.use={path}/none.py:A"), "none.py")
    refused(part, lambda: tiny(part, "optimizer.use=torch.optim:AdamWW"), "'AdamW'")
    refused(part, lambda: tiny(part, "optimizer.use=torch.optimm:AdamW"), "optimm")
    refused(part, lambda: part.resolve("ffn", ":"), "import")


def test_an_unknown_kind_or_name_is_refused(part):
    refused(part, lambda: part.resolve("atention", "gqa"), "'attention'")
    refused(part, lambda: part.register("atention", "mine"), "'attention'")
    refused(part, lambda: part.resolve("ffn", "contract-none"), "'contract-none'")


def test_every_default_resolves_where_its_chapter_exists(part):
    for kind, entry in part.KINDS.items():
        homes = [f"littlelm_core.{m}" for m in entry.modules]
        if entry.default and (
            ":" in entry.default or all(importlib.util.find_spec(m) for m in homes)
        ):
            assert callable(part.resolve(kind, entry.default)), kind


def test_a_name_is_registered_once(part):
    def first(dim, ffn_dim):
        return "first"

    def second(dim, ffn_dim):
        return "second"

    name = f"contract-{uuid.uuid4().hex}"  # the registry outlives this test
    assert part.register("ffn", name)(first) is first
    part.register("ffn", name)(first)  # the same definition, run again
    refused(part, lambda: part.register("ffn", name)(second), name)
    assert part.resolve("ffn", name) is first
    part.register("norm", name)(second)  # another kind, another name
    assert part.resolve("ffn", name) is first


def test_a_notebooks_definition_may_stand_in(part):
    def cell(dim, ffn_dim):
        return "cell"

    def module(dim, ffn_dim):
        return "module"

    name = f"contract-{uuid.uuid4().hex}"
    cell.__module__ = "__main__"
    for order in ((module, cell), (cell, module)):
        for function in order:
            part.register("ffn", name)(function)
        assert part.resolve("ffn", name) is order[-1]
        part.register("ffn", name)(cell)


def test_build_hands_over_arguments_and_keys(part):
    with folder() as path:
        wide = part.Part(use=f"{path}/own.py:Wide", width=5)
        built = part.build("ffn", wide, 3, ffn_dim=4)
        assert (built.dim, built.ffn_dim, built.width) == (3, 4, 5)
        opened = part.Part(use=f"{path}/own.py:Open", anything=[1, 2])
        assert part.build("ffn", opened, 3, 4).keys == {"anything": (1, 2)}
        typo = part.Part(use=f"{path}/own.py:Wide", widht=5)
        refused(part, lambda: part.build("ffn", typo, 3, 4), "ffn.widht", "'width'")
        wrong = part.Part(use=f"{path}/own.py:Wide", width="5")
        refused(part, lambda: part.build("ffn", wrong, 3, 4), "ffn.width", "int")
        named = part.Part(use=f"{path}/own.py:Wide", names=["a", "b"])
        part.build("ffn", named, 3, 4)  # an array may fill a list or a tuple


def test_a_part_that_refuses_its_keys_is_one_line(part):
    weights = [torch.nn.Parameter(torch.zeros(2))]
    uphill = part.Part(use="torch.optim:SGD", lr=-1.0)
    refused(part, lambda: part.build("optimizer", uphill, weights), "SGD", "-1.0")
    refused(part, lambda: tiny(part, "run_dir="), "run_dir")


def test_a_part_must_take_what_its_kind_is_given(part):
    """Refused when the run is loaded, not when the model is built."""
    with folder() as path:
        own = f"{path}/own.py"
        refused(part, lambda: tiny(part, f"ffn.use={own}:one"), "dim, ffn_dim")
        refused(part, lambda: tiny(part, f"norm.use={own}:one"), "eps")
        refused(part, lambda: tiny(part, f"attention.use={own}:Needs"), "kv_heads")
        refused(part, lambda: tiny(part, f"ffn.use={own}:Needs"), "ffn.width")
        run = tiny(part, f"ffn.use={own}:Needs", "ffn.width=3")
        assert part.build("ffn", run.ffn, 1, 2).width == 3
        hinted = f"ffn.use={own}:Hinted"  # a hint that nobody can read checks nothing
        tiny(part, hinted, "ffn.width=3")
        refused(part, lambda: tiny(part, hinted, "ffn.widht=3"), "'width'")


def test_callbacks_may_be_one_or_many(part):
    with folder(
        one='extends = "tiny"\ncallback = "own.py:Hook"',
        table='extends = "tiny"\n[callback]\nuse = "own.py:Hook"\nevery = 2',
        many="""extends = "tiny"\n[[callback]]\nuse = "own.py:Hook"
            [[callback]]\nuse = "own.py:Hook"\nevery = 3""",
    ) as path:
        runs = [part.load_run(path / f"{n}.toml") for n in ("one", "table", "many")]
        every = [[c.options.get("every") for c in run.callback] for run in runs]
        assert every == [[None], [2], [None, 3]]
        for run in runs:
            for hook in run.callback:
                assert part.build("callback", hook).every in (1, 2, 3)
        many = str(path / "many.toml")
        refused(part, lambda: part.load_run(many, ["callback=own.py:H"]), "own.py")
    assert tiny(part).callback == ()


# ---- The run as a value


def test_a_run_is_frozen(part):
    run = tiny(part, "optimizer.matrix.betas=[0.8, 0.9]")
    before = run.model_dump_json()
    for target, key in ((run, "steps"), (run.data, "source"), (run.optimizer, "use")):
        try:
            setattr(target, key, getattr(target, key))
        except ValueError:
            continue
        raise AssertionError(f"{key} of a run can be changed after it was checked")
    run.optimizer.options["lr"] = 5.0
    run.optimizer.options["matrix"]["lr"] = 5.0
    assert run.model_dump_json() == before, "editing `options` has changed the run"


def test_a_run_comes_back_equal_from_json(part):
    """A checkpoint stores its run as JSON, which knows no tuples."""
    with folder(
        a="""extends = "tiny"\n[ffn]\nuse = "own.py:Open"\nnested = [[1, 2], [3]]
            table = { inner = [0.5, 1.0], word = "\u00fc" }
            [[callback]]\nuse = "own.py:Hook"\nevery = 3"""
    ) as path:
        run = part.load_run(path / "a.toml", ["optimizer.matrix.betas=[0.8, 0.9]"])
        text = run.model_dump_json()
        for back in (
            part.RunConfig.model_validate_json(text),
            part.RunConfig.model_validate(json.loads(text)),
        ):
            assert back == run, "the run differs after a round trip"
            for (kind, old), (_, new) in zip(run.parts(), back.parts(), strict=True):
                assert new.options == old.options, kind
            assert back.optimizer.options["matrix"]["betas"] == (0.8, 0.9)
            assert back.model_dump_json() == text


def test_parts_lists_every_kind(part):
    with folder() as path:
        run = tiny(part, f"callback.use={path}/own.py:Hook")
        assert [kind for kind, _ in run.parts()] == list(part.KINDS)
        assert run.parts()[-1][1].options == {}
        assert all(p.use for _, p in run.parts())


def test_loading_a_run_leaves_no_module_of_a_failed_file(part):
    with folder() as path:
        (path / "fails.py").write_text("x = 1\nraise KeyError('x')", encoding="utf-8")
        refused(part, lambda: part.resolve("ffn", f"{path}/fails.py:x"), "fails.py")
        assert not [name for name in sys.modules if "fails" in name and "part" in name]
