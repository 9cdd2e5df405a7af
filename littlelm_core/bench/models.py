"""Rows of the model: the train step, and generation with a cache."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from littlelm_core.bench.measure import Row, against, rounds
from littlelm_core.bench.peers import SHAPE_8M, llama_with_our_weights, version
from littlelm_core.generate import generate
from littlelm_core.model import LanguageModel, ModelConfig, flops_per_token

TINY = dataclasses.replace(
    SHAPE_8M, dim=64, layers=2, heads=2, kv_heads=2, ffn_dim=128, vocab_size=256
)


def filled(cfg: ModelConfig) -> LanguageModel:
    """A model that is not trained but whose every matrix is at work."""
    model = LanguageModel(cfg)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 0.05, generator=draw)
    return model.eval()


def _train_step(
    model: Any, loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """One whole step: forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    return step


def train(quick: bool = False) -> list[Row]:
    """A train step of the 8.5M shape: at equal settings, and each one's default."""
    from littlelm_core.doctor import compiler, matmul_rates
    from littlelm_core.trainer import Precision

    cfg = TINY if quick else dataclasses.replace(SHAPE_8M, context=256)
    batch, context = (2, 32) if quick else (8, 256)
    ours = filled(cfg)
    theirs = llama_with_our_weights(ours).train()
    default = filled(cfg).train()
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, cfg.vocab_size, (batch, context + 1), generator=draw)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    # A compiler pays on long runs only: it is asked at full size, and not when quick.
    compiled = not quick and not any(missing for missing in compiler()[1:])
    precision = Precision("auto", compile=compiled)
    default_loss = precision.prepare(default, torch.device("cpu"))

    def their_loss() -> torch.Tensor:
        # shift_labels: targets that are shifted already, as ours are.
        return theirs(input_ids=inputs, labels=targets, shift_labels=targets).loss

    def our_default() -> torch.Tensor:
        with precision.context():
            return default_loss(inputs, targets)

    steps = {
        "ours": _train_step(ours.train(), lambda: ours.loss(inputs, targets)),
        "theirs": _train_step(theirs, their_loss),
        "default": _train_step(default, our_default),
    }
    first = [float(steps[name]()) for name in ("ours", "theirs")]
    if abs(first[0] - first[1]) > 1e-3:
        raise AssertionError(f"the same weights have losses {first}: not the same work")
    start = time.perf_counter()
    steps["default"]()
    cold = time.perf_counter() - start
    rates: list[float] = []
    steps["matmul"] = lambda: rates.append(matmul_rates("cpu", seconds=0.2)["fp32"])
    seconds = rounds(steps, 3 if quick else 9)
    tokens = batch * context
    name = version("transformers") + " LlamaForCausalLM"
    rate = tokens / statistics.median(seconds["ours"])
    share = rate * flops_per_token(cfg, context) / statistics.median(rates)
    how = f"{precision.dtype}{', compiled' if compiled else ''}"
    return [
        against(
            "train, fp32 eager", name, seconds, tokens, "tok/s", 1.05,
            note=f"{share:.0%} of the 1024³ matmul rate, "
            f"{statistics.median(rates) / 1e9:.0f} GFLOP/s",
        ),
        against(
            "train, defaults", name + ", fp32 eager", seconds, tokens, "tok/s",
            2.0, ours="default", note=f"ours: {how}; first step {cold:.1f} s",
        ),
    ]  # fmt: skip


def generation(quick: bool = False) -> list[Row]:
    """Greedy decoding of the 8.5M shape at batch 1: the same tokens, how fast?"""
    model = filled(TINY if quick else SHAPE_8M)
    theirs = llama_with_our_weights(model)
    prompt, count = list(range(1, 33)), 24 if quick else 256
    ids = torch.tensor([prompt])
    found: dict[str, list[int]] = {}

    def their_text() -> None:
        with torch.inference_mode():
            out = theirs.generate(
                ids, max_new_tokens=count, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
        found["theirs"] = out[0, len(prompt) :].tolist()

    def our_text() -> None:
        found["ours"] = generate(model, prompt, count, temperature=0)

    contestants = {"ours": our_text, "theirs": their_text}
    seconds = rounds(contestants, 3 if quick else 11)
    if found["ours"] != found["theirs"]:
        raise AssertionError("the same weights gave other tokens: not the same work")
    return [
        against(
            "generation, batch 1", version("transformers") + " generate",
            seconds, count, "tok/s", 2.0,
            note=f"{count} equal tokens after a prompt of {len(prompt)}; the copy for "
            "decoding is counted",
        )
    ]  # fmt: skip
