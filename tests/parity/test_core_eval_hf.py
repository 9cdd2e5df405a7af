"""Models of transformers get the answers that reading each item alone gives them."""

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.45")

from littlelm_core import core_eval  # noqa: E402
from littlelm_core.config import CheckpointError, ConfigError, LittleLMError  # noqa: E402
from littlelm_core.core_eval import Reader, Rules, Text, evaluate  # noqa: E402
from littlelm_core.ingest.hugging_face import (  # noqa: E402
    CausalLM,
    TheirTokenizer,
    load_causal_lm,
)

ROOT = Path(__file__).parents[2]
MINI, REAL = ROOT / "data" / "mini_core", ROOT.parent / "shared" / "core"
VOCAB = 400

# Class, settings beside the common ones, can make logits apart, has a cache to divide.
MODELS = {
    "llama": ("LlamaForCausalLM", {}, True, True),
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 96}, True, True),
    "gemma2": (  # caps logits and scores; every other layer sees a window
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": 24, "final_logit_softcapping": 4.0},
        True,
        True,
    ),
    "qwen2": ("Qwen2ForCausalLM", {}, True, True),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}, True, True),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}, True, True),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 0.25}, True, True),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}, True, True),
    "recurrent": (  # a state that cannot be taken up by several tokens at once
        "RecurrentGemmaForCausalLM",
        {"head_dim": 8, "lru_width": 32, "attention_window_size": 24},
        True,
        False,
    ),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32}, True, False),
}
COMMON = {
    "vocab_size": VOCAB + 16,  # padded, as is usual
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def _model(name, dtype=torch.float32, **changes):
    class_name, settings = MODELS[name][:2]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**COMMON, **settings, **changes}))
    with torch.no_grad():  # fresh weights are so small that no context matters
        for weight in model.parameters():
            weight += 0.15 * torch.randn(weight.shape)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def tasks():
    """Three items of each task of mini CORE, with one example each to keep it short."""
    return core_eval.load_tasks(MINI)


@pytest.fixture(scope="module")
def tokenizer(tasks):
    """A byte-level BPE of mini CORE's own text."""
    from tokenizers import ByteLevelBPETokenizer

    engine = ByteLevelBPETokenizer()
    texts = [json.dumps(item) for task in tasks for item in task.items]
    engine.train_from_iterator(texts, VOCAB, special_tokens=["<|end|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine._tokenizer, eos_token="<|end|>"
    )


def _alone(model, tokenizer, tasks, count, context=None):
    """Return every item as the slow reading answers it."""
    reader, text = Reader(model), Text(tokenizer)
    rules = Rules(context or reader.context, max_per_task=count)
    found = {}
    for task in tasks:
        examples = [
            core_eval.crop(example, rules.context)
            for example in core_eval.encode(task, text, rules)
        ]
        found[task.label] = [
            core_eval.judge(task, e, core_eval.score_alone(reader, e)) for e in examples
        ]
    return found


def _assert_equal(report, wanted, tolerance):
    """The same answers; of items that rounding cannot decide, the same losses."""
    settled = items = 0
    for label, result in report.tasks.items():
        for item, alone in zip(result.items, wanted[label], strict=True):
            where = f"{label}, item {item.index}"
            assert (item.index, item.choice, item.correct) == (
                alone.index,
                alone.choice,
                alone.correct,
            ), where
            assert item.scores == pytest.approx(alone.scores, abs=tolerance), where
            settled += item.settled
            items += 1
    assert settled < items / 4, "most items were read alone: nothing was compared"


@pytest.mark.parametrize("name", MODELS)
def test_every_family_answers_as_alone(name, tasks, tokenizer):
    model, theirs = CausalLM(_model(name)), TheirTokenizer(tokenizer)
    assert model.splits == MODELS[name][2]
    assert hasattr(model, "make_cache") == MODELS[name][3]
    wanted = _alone(model, theirs, tasks, 3)
    for cached in (True, False):
        report = evaluate(
            model, theirs, tasks, max_per_task=3, batch_tokens=700, prefix_cache=cached
        )
        _assert_equal(report, wanted, 1e-4)
        used = report.to_dict()["settings"]["prefix_cache"]
        assert used == (cached and MODELS[name][3])
    assert any(r.truncated for r in report.tasks.values()), "no row met the context"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_answers_as_alone(dtype, tasks, tokenizer):
    model, theirs = CausalLM(_model("llama", dtype)), TheirTokenizer(tokenizer)
    assert model.splits
    assert hasattr(model, "make_cache")
    some = [task for task in tasks if task.label in ("arc_easy", "winograd", "coqa")]
    wanted = _alone(model, theirs, some, 3)
    report = evaluate(model, theirs, some, max_per_task=3, batch_tokens=700)
    for label, result in report.tasks.items():
        for item, alone in zip(result.items, wanted[label], strict=True):
            assert (item.choice, item.correct) == (alone.choice, alone.correct)
            assert item.scores == pytest.approx(alone.scores, abs=0.1)
    assert report.settings["dtype"] == str(dtype).removeprefix("torch.")


def test_a_cache_is_divided_without_harm_to_the_prefix():
    model = CausalLM(_model("mistral"))
    ids = torch.randint(VOCAB, (3, 60), generator=torch.Generator().manual_seed(1))
    ids[:, :40] = ids[0, :40]
    with torch.inference_mode():
        whole = model.logits(model.hidden(ids))[:, 40:]
        cache = model.make_cache(1, 40)
        model.hidden(ids[:1, :40], cache)
        for rows in ([0, 1, 2], [2, 0]):  # 40 is beyond the window of 24
            fork = [cache[0].select([0] * len(rows), 60)]
            torch.testing.assert_close(
                model.logits(model.hidden(ids[rows, 40:], fork)), whole[rows]
            )


def test_a_cache_that_errs_in_silence_is_not_used(monkeypatch):
    """As one that reorders keys and values, but not the state beside them."""
    assert hasattr(CausalLM(_model("llama")), "make_cache")
    right = transformers.DynamicCache.reorder_cache
    monkeypatch.setattr(
        transformers.DynamicCache,
        "reorder_cache",
        lambda self, rows: right(self, rows * 0),
    )
    model = CausalLM(_model("llama"))
    assert not hasattr(model, "make_cache")
    assert not Reader(model).caches


def test_a_plain_model_of_transformers_will_do(tasks, tokenizer):
    """And it comes back as it was: its mode, its own forward."""
    model = _model("gemma2").train()
    before = model.model.forward
    assert CausalLM(model).training
    assert model.model.training
    report = evaluate(model, tokenizer, tasks[:1], max_per_task=2)
    assert report.tasks[tasks[0].label].n == 2
    assert model.training
    assert model.model.forward == before
    model.eval()
    evaluate(model, tokenizer, tasks[:1], max_per_task=2)
    assert not any(module.training for module in model.modules())


def test_a_head_that_fails_leaves_the_model_whole():
    model = CausalLM(_model("llama"))
    with pytest.raises(RuntimeError):
        model.logits(torch.zeros(2, 33))  # the head wants 32
    ids = torch.tensor([[3, 4, 5]])
    want = model.model(ids).logits
    torch.testing.assert_close(model.logits(model.hidden(ids)), want)


def test_a_model_that_looks_ahead_is_refused():
    config = transformers.BertConfig(**COMMON, is_decoder=False)
    with pytest.raises(ConfigError, match="looks ahead"):
        CausalLM(transformers.BertLMHeadModel(config).eval())


def test_more_tokens_than_positions():
    model = CausalLM(_model("gpt2"))
    assert model.cfg.context == 96
    with pytest.raises(
        LittleLMError, match="97 tokens in a row do not fit a model made for 96"
    ):
        model.hidden(torch.zeros(1, 97, dtype=torch.long))


def test_longrope_is_read_within_its_first_length():
    """Beyond it all positions turn otherwise, also those of a prefix read before."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 48,
    }
    config = transformers.Phi3Config(**COMMON, original_max_position_embeddings=48)
    for name in ("rope_parameters", "rope_scaling"):
        if hasattr(config, name):
            setattr(config, name, {"rope_theta": 1e4, **scaling})
            break
    assert CausalLM(transformers.Phi3ForCausalLM(config).eval()).cfg.context == 48


# ---- Tokenizers


def test_bos_is_eos_where_there_is_none(tokenizer):
    assert TheirTokenizer(tokenizer).bos_id == tokenizer.eos_token_id


def test_bos_comes_first_and_names_the_stored_tokens(tokenizer):
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    with_both = copy.deepcopy(tokenizer)
    with_both.add_special_tokens(ends)
    turned = copy.deepcopy(with_both)
    turned.bos_token, turned.eos_token = ends["eos_token"], ends["bos_token"]
    engines = {each.backend_tokenizer.to_str() for each in (with_both, turned)}
    assert len(engines) == 1
    first, second = TheirTokenizer(with_both), TheirTokenizer(turned)
    assert first.bos_id == with_both.convert_tokens_to_ids("<s>")
    assert second.bos_id == with_both.convert_tokens_to_ids("</s>")
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == TheirTokenizer(copy.deepcopy(with_both)).fingerprint


def test_no_token_to_begin_with():
    from tokenizers import Tokenizer, models

    bare = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))
    )
    with pytest.raises(ConfigError, match="neither bos_token nor eos_token"):
        TheirTokenizer(bare)


def test_texts_are_encoded_as_they_are(tokenizer):
    """No special token is added, nothing is cut or filled up."""
    theirs = TheirTokenizer(tokenizer)
    tokenizer.model_max_length = 5
    texts = ["a", "", " two  spaces \n\n and so on, longer than five tokens "]
    ids = theirs.encode_batch(texts)
    assert [tokenizer.decode(row) for row in ids] == texts
    assert theirs.encode_batch([]) == []


def test_a_bos_that_the_tokenizer_adds_is_left_out(tasks, tokenizer):
    from tokenizers.processors import TemplateProcessing

    adding, end = copy.deepcopy(tokenizer), tokenizer.eos_token
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert adding("ab")["input_ids"][0] == tokenizer.eos_token_id
    theirs = TheirTokenizer(adding)
    assert theirs.encode_batch(["ab"]) == TheirTokenizer(tokenizer).encode_batch(["ab"])
    (found,) = core_eval.encode(tasks[0], Text(theirs), Rules(max_per_task=1))
    for row in found.rows:
        assert row.ids.tolist().count(theirs.bos_id) == 1


def test_a_slow_tokenizer(tmp_path, tasks, tokenizer):
    """Python's own, without an engine that could name it: tokens are not stored."""

    class Letters(transformers.PreTrainedTokenizer):
        vocab_size = 256

        def get_vocab(self):
            return {chr(i): i for i in range(256)}

        def _tokenize(self, text, **_):
            return list(text)

        def _convert_token_to_id(self, token):
            return min(ord(token), 255)

        def _convert_id_to_token(self, index):
            return chr(index)

    theirs = TheirTokenizer(Letters(eos_token="\x00"))
    assert theirs.bos_id == 0
    assert theirs.fingerprint is None
    assert theirs.encode_batch(["ab", "c "]) == [[97, 98], [99, 32]]
    model = CausalLM(_model("llama"))
    evaluate(model, theirs, tasks[:1], max_per_task=2, token_cache=tmp_path)
    assert not list(tmp_path.iterdir())


# ---- Folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A small model with its tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    _model("llama", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_loads_in_fp32(folder, tasks):
    model, theirs = load_causal_lm(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training
    assert next(load_causal_lm(folder, dtype=None)[0].parameters()).itemsize == 2
    report = evaluate(model, theirs, tasks[:2], max_per_task=2)
    again = evaluate(*load_causal_lm(str(folder)), tasks[:2], max_per_task=2)
    assert report.tasks[tasks[0].label].items == again.tasks[tasks[0].label].items


def _without(name):
    return lambda folder: (folder / name).unlink()


def _drop_a_weight(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def _config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_without("config.json"), "it has no config.json"),
        (_without("model.safetensors"), "its model does not load"),
        (_without("tokenizer.json"), "its tokenizer does not load"),
        (_cut, "its model does not load"),
        (_drop_a_weight, r"lack 1, such as model.layers.1.mlp.up_proj.weight"),
        (_config(hidden_size=64), "its model does not load"),
        (_config(model_type="t5"), "its model does not load"),
        (_config(model_type="not-a-model"), "its model does not load"),
        (shutil.rmtree, "is no folder: hf: reads local models only"),
    ],
)
def test_a_broken_folder_is_one_line(folder, tmp_path, harm, message):
    copy = shutil.copytree(folder, tmp_path / "model")
    harm(copy)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_causal_lm(copy)
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)


# ---- A real model


@pytest.fixture(scope="module")
def smollm2(smollm2_folder):
    return load_causal_lm(smollm2_folder)


@pytest.fixture(scope="module")
def real_tasks():
    """CORE's own files where they are, else mini CORE."""
    return core_eval.load_tasks(REAL if REAL.is_dir() else MINI)


def test_smollm2_answers_as_alone(smollm2, real_tasks):
    """One item of each task, in a context that cuts the long ones."""
    model, theirs = smollm2
    assert model.splits
    assert model.cfg.context == 8192
    wanted = _alone(model, theirs, real_tasks, 1, context=112)
    report = evaluate(model, theirs, real_tasks, max_per_task=1, context=112)
    _assert_equal(report, wanted, 1e-3)


def test_smollm2_chooses_better_than_chance(smollm2, real_tasks):
    """What a wrong weight, position, prompt or place of the answer would cost it."""
    labels = {"arc_easy", "openbook_qa", "hellaswag_zeroshot", "commonsense_qa"}
    if REAL.is_dir():
        labels = {"arc_easy"}
    # Without examples: a tenth of the time.
    tasks = [replace(t, shots=0) for t in real_tasks if t.label in labels]
    report = evaluate(*smollm2, tasks, max_per_task=60)
    items = [item for result in report.tasks.values() for item in result.items]
    right = sum(item.correct for item in items) / len(items)
    assert right > 0.25 + 3 * math.sqrt(0.25 * 0.75 / len(items))


def test_smollm2_finds_the_very_words(smollm2, real_tasks):
    """Of 50,000 tokens the right one, where chance is nothing."""
    labels = ("bigbench_qa_wikidata", "lambada_openai")
    tasks = [task for task in real_tasks if task.label in labels]
    report = evaluate(*smollm2, tasks, max_per_task=16)
    assert all(result.accuracy > 0.12 for result in report.tasks.values())


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
def test_what_is_cut_at_1024_are_examples(smollm2, real_tasks):
    """What chapter 15 says of the two tasks that made most of a gain at 2048."""
    text = Text(smollm2[1])
    by_label = {task.label: task for task in real_tasks}
    for label, own, above in (("squad", 195, 0.64), ("boolq", 150, 0.07)):
        task = by_label[label]
        sizes, alone = (
            [
                max(len(row.ids) for row in example.rows)
                for example in core_eval.encode(asked, text, Rules(max_per_task=400))
            ]
            for asked in (task, replace(task, shots=0))
        )
        assert sum(alone) / 400 == pytest.approx(own, rel=0.05)
        assert min(sizes) > 1024
        assert sum(size > 1024 for size in alone) <= 1
        assert sum(size > 2048 for size in sizes) / 400 == pytest.approx(
            above, abs=0.03
        )
