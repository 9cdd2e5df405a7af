"""The GPU paths, against the CPU's answers. Skipped where no GPU is present.

LITTLELM_TEST_DEVICE=cpu runs the same tests on the CPU, to check the tests themselves.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from small_runs import prepare_letters, run_of, write_run

from littlelm_core import cli
from littlelm_core.attention import Attention, rope_table
from littlelm_core.config import ConfigError
from littlelm_core.core_eval import (
    BATCH_TOKENS,
    MARGINS,
    Reader,
    Rules,
    Text,
    crop,
    encode,
    evaluate,
    judge,
    load_tasks,
    score_alone,
    spread,
)
from littlelm_core.fp8 import (
    E4M3,
    E5M2,
    Float8,
    Operand,
    convert_to_fp8,
    emulated_product,
    multiplies_fp8,
    quantize,
    scaled_product,
)
from littlelm_core.generate import generate
from littlelm_core.model import LanguageModel, ModelConfig, linear_cross_entropy
from littlelm_core.report.evaluation import precision_context
from littlelm_core.tokenizer import Tokenizer
from littlelm_core.trainer import multiplies_bf16, train

DEVICE = os.environ.get("LITTLELM_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"
)


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 products in fp32: TF32 rounds far more than the tolerances allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def small_model(**keys):
    shape = {
        "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 96,
        "vocab_size": 130, "context": 48, "softcap": 15.0, "residual_scales": True,
        "value_embeddings": True,
    }  # fmt: skip
    model = LanguageModel(ModelConfig(**{**shape, **keys}))
    model.init_weights(3)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():  # zero starts would hide the layers
        if name.endswith(("wo.weight", "w_down.weight")):
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("window", [None, 7])
def test_fused_and_manual_attention_agree(window):
    torch.manual_seed(0)
    layer = Attention(64, 4, 2, window=window).to(DEVICE)
    x_BTC = torch.randn(2, 40, 64, device=DEVICE)
    rope = rope_table(torch.arange(40, device=DEVICE), layer.head_dim)
    fused = layer(x_BTC, rope=rope)
    layer.manual = True
    torch.testing.assert_close(layer(x_BTC, rope=rope), fused, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_logits_loss_and_gradients_equal_the_cpus(window):
    torch.manual_seed(1)
    ids_BT, targets_BT = torch.randint(130, (2, 3, 32))
    results = []
    for device in ("cpu", DEVICE):
        model = small_model(window=window).to(device)
        loss = model.loss(ids_BT.to(device), targets_BT.to(device))
        loss.backward()
        gradients = [p.grad.cpu() for p in model.parameters()]
        logits = model(ids_BT.to(device)).detach().cpu()
        results.append([loss.detach().cpu(), logits, *gradients])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-5)


def test_the_chunked_loss_equals_the_plain_one():
    torch.manual_seed(2)
    x_NC = torch.randn(300, 32, device=DEVICE, requires_grad=True)
    weight_VC = torch.randn(96, 32, device=DEVICE, requires_grad=True)
    targets_N = torch.randint(96, (300,), device=DEVICE)
    ours = linear_cross_entropy(x_NC, weight_VC, targets_N, chunk=64)
    plain = torch.nn.functional.cross_entropy(x_NC @ weight_VC.T, targets_N)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    inputs = (x_NC, weight_VC)
    for got, wanted in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(plain, inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_cached_generation_equals_uncached(window):
    model = small_model(window=window).to(DEVICE).eval()
    prompt = [1, 5, 9, 2]
    cached = generate(model, prompt, 30, temperature=0)
    assert cached == generate(model, prompt, 30, temperature=0, cache=False)
    assert len(set(cached)) > 1, "a constant text compares nothing"


def test_the_compiled_bf16_loss_is_near_the_plain_one():
    model = small_model().to(DEVICE)
    ids_BT, targets_BT = torch.randint(130, (2, 3, 32), device=DEVICE)
    plain = model.loss(ids_BT, targets_BT).detach()
    with torch.autocast(DEVICE, torch.bfloat16):
        compiled = torch.compile(model.loss)(ids_BT, targets_BT)
    compiled.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    # bf16 has 8 bits of precision; a mean over 96 targets is well inside 2 %.
    torch.testing.assert_close(compiled.detach(), plain, rtol=0.02, atol=0.0)


def needs_fp8():
    """Skip where the device has no FP8 products (the CPU checks the tests alone)."""
    if DEVICE == "cuda" and not multiplies_fp8(torch.device(DEVICE)):
        pytest.skip("no FP8 products: compute capability below 8.9")


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_products_equal_the_emulated_ones(scaling, dtype):
    needs_fp8()
    torch.manual_seed(5)
    a, b = torch.randn(64, 96), torch.randn(48, 96)
    a[3] = 0.0
    ours = Operand(*quantize(a, dtype, scaling)), Operand(*quantize(b, E4M3, scaling))
    on_gpu = [
        Operand(*quantize(x.to(DEVICE), kind, scaling))
        for x, kind in ((a, dtype), (b, E4M3))
    ]
    for there, here in zip(on_gpu, ours, strict=True):
        torch.testing.assert_close(there.scale.cpu(), here.scale, rtol=1e-6, atol=0)
        same = there.q.cpu().view(torch.uint8) == here.q.view(torch.uint8)
        assert same.float().mean() > 0.999  # a scale's last bit may move a tie
    wanted = emulated_product(*ours, torch.bfloat16).float()
    for fast_sums in (False, True):
        got = scaled_product(*on_gpu, torch.bfloat16, fast_sums).float().cpu()
        # bf16 outputs, and Hopper's sums of about 14 bits.
        torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_training_is_near_the_emulated_one(recipe, compiled):
    needs_fp8()
    torch.manual_seed(6)
    ids_BT, targets_BT = torch.randint(130, (2, 2, 48))
    losses, gradients = [], []
    for device in ("cpu", DEVICE):
        model = small_model().to(device)
        part = Float8("bf16", compile=compiled and device != "cpu", recipe=recipe)
        loss = part.prepare(model, torch.device(device))
        with part.context():
            value = loss(ids_BT.to(device), targets_BT.to(device))
        value.backward()
        losses.append(value.detach().cpu())
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)
    for name, wanted in gradients[0].items():
        cosine = torch.cosine_similarity(
            gradients[1][name].flatten(), wanted.flatten(), dim=0
        )
        assert cosine > 0.97, f"{name}: {cosine:.3f}"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_fp8_by_torchao(recipe):
    pytest.importorskip("torchao")
    needs_fp8()
    model = small_model().to(DEVICE).bfloat16()
    try:
        report = convert_to_fp8(model, recipe, engine="torchao")
    except ConfigError as error:
        pytest.skip(str(error))
    assert report.converted
    ids_BT, targets_BT = torch.randint(130, (2, 2, 48), device=DEVICE)
    torch.compile(model.loss)(ids_BT[:, :32], targets_BT[:, :32]).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


MINI = Path(__file__).parents[2] / "data" / "mini_core"


def one_at_a_time(model, tokenizer, tasks):
    """Return {label: items} of score_alone: a pass and all logits for each item."""
    reader, text = Reader(model), Text(tokenizer)
    rules = Rules(reader.context)
    found = {}
    for task in tasks:
        examples = [crop(e, rules.context) for e in encode(task, text, rules)]
        found[task.label] = [
            judge(task, example, spread(example, score_alone(reader, example)))
            for example in examples
        ]
    return found


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 40])
def test_core_read_fast_equals_core_read_item_by_item(kind, window):
    """All kinds of task; what hangs on rounding was read alone, and is not most."""
    keys = {"vocab_size": 260, "context": 256, "window": window}
    model = small_model(**keys).to(DEVICE).eval()
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    tasks = load_tasks(MINI)
    with precision_context(kind, torch.device(DEVICE)):
        wanted = one_at_a_time(model, tokenizer, tasks)
        fast = evaluate(model, tokenizer, tasks)
        small = evaluate(model, tokenizer, tasks, batch_tokens=600, prefix_cache=False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    settled = unlike = 0
    for report in (fast, small):
        assert report.settings["dtype"] == str(dtype).removeprefix("torch.")
        for label, result in report.tasks.items():
            settled += result.count("settled")
            for item, alone in zip(result.items, wanted[label], strict=True):
                where = f"{label}, item {item.index}"
                # Whether right, and the choice; rows read together round otherwise.
                assert item.settled or item[1:3] == alone[1:3], where
                unlike += item[1:3] != alone[1:3]
                for score, other in zip(item.scores, alone.scores, strict=True):
                    assert score == pytest.approx(other, abs=MARGINS[dtype]), where
    assert settled < 0.3 * 2 * 264
    assert unlike <= (0 if kind == "fp32" else 0.02 * 2 * 264)
    for label, result in fast.tasks.items():
        one, other = result.items, small.tasks[label].items
        assert [i[:3] for i in one] == [i[:3] for i in other], label
    tokens = fast.to_dict()["tokens"]
    assert tokens["run"] < 0.9 * tokens["alone"]


def test_a_model_that_makes_all_logits_at_once_reads_small_batches():
    """65,536 tokens of a vocabulary of 50,000 would be 13 GB of logits."""

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(260, 260)
            self.most = 0

        def forward(self, ids_BT):
            self.most = max(self.most, ids_BT.numel())
            return self.table(ids_BT)

    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    bare = Bare().to(DEVICE)
    evaluate(bare, tokenizer, load_tasks(MINI)[:2])
    assert 0 < bare.most <= BATCH_TOKENS["cpu"]


def test_a_model_of_transformers_that_makes_all_logits_reads_small_batches():
    transformers = pytest.importorskip("transformers")
    from littlelm_core.ingest.hugging_face import CausalLM

    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 1024}
    config = transformers.GPT2Config(vocab_size=260, **shape)
    model = CausalLM(transformers.GPT2LMHeadModel(config).to(DEVICE))
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    for apart in (True, False):
        if not apart:
            model.output = None  # as for a head that is no plain product
        report = evaluate(model, tokenizer, load_tasks(MINI)[:2], max_per_task=1)
        kind = "cpu" if not apart or DEVICE == "cpu" else "gpu"
        assert report.settings["batch_tokens"] == BATCH_TOKENS[kind]


def test_core_of_a_run_on_this_device(tmp_path, monkeypatch):
    """The run, the command and both precisions; auto takes bf16 on a GPU alone."""
    monkeypatch.setenv("LITTLELM_DATA", str(tmp_path / "prepared"))
    prepare_letters(tmp_path, {"up": ("ABCD ", 20)})
    write_run(tmp_path, "steps = 6", "rows = 2", 'loader.rest = "keep"')
    keys = "eval_every=6", f"eval_tasks={MINI}"
    train(run_of(tmp_path, "run", *keys), quiet=True)
    found = {}
    for kind in ("auto", "fp32", "bf16"):
        arguments = ["eval", tmp_path / "run", "--data", MINI, "--precision", kind]
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(a) for a in (*arguments, "--out", tmp_path / kind)])
        assert stopped.value.code == 0
        found[kind] = json.loads((tmp_path / kind / "report.json").read_text("utf-8"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    auto = "bf16" if device.type == "cuda" and multiplies_bf16(device) else "fp32"
    assert found["auto"]["items"] == found[auto]["items"]
    logged = tmp_path / "run" / "mini_core" / "step_00000006" / "report.json"
    logged = json.loads(logged.read_text("utf-8"))  # the run is in fp32
    for label, items in found["fp32"]["items"].items():
        for item, other in zip(items, logged["items"][label], strict=True):
            assert item["choice"] == other["choice"]
