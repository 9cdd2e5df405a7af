"""Models with one mistake each, on top of the real one."""

import math

import torch
from torch import nn

from littlelm_core.attention import rope_table
from littlelm_core.model import LanguageModel, linear_cross_entropy


class TablesInBuffers(LanguageModel):
    """Rotary tables as buffers: lost by to_empty, rounded by .to(bfloat16)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        table = rope_table(cfg.context, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
        self.register_buffer("cos", table[0], persistent=False)
        self.register_buffer("sin", table[1], persistent=False)

    def _rope(self, start, end, device):
        return self.cos[start:end], self.sin[start:end]


class TablesByLength(LanguageModel):
    """Caches the tables by the number of tokens, whatever their positions."""

    def _rope(self, start, end, device):
        tables = self.__dict__.setdefault("_by_length", {})
        if end - start not in tables:
            tables[end - start] = super()._rope(start, end, device)
        return tables[end - start]


class ChecksTheLengthAlone(LanguageModel):
    def _rope(self, start, end, device):
        cfg = self.cfg
        at = torch.arange(start, end) % cfg.context
        return rope_table(at, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)

    def hidden(self, ids_BT, cache=None):
        if ids_BT.shape[1] > self.cfg.context:
            raise ValueError("longer than the context")
        start = cache[0].length if cache else 0
        for layer in cache or ():
            layer.capacity = 10**6
            shape = (*layer.keys.shape[:2], 64, layer.keys.shape[3])
            if layer.keys.shape[2] < 64:
                layer.keys, layer.values = (
                    torch.cat((t, t.new_zeros(shape)), 2)
                    for t in (layer.keys, layer.values)
                )
        rope = self._rope(start, start + ids_BT.shape[1], ids_BT.device)
        x = self.embedding(ids_BT)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, cache=cache[i] if cache else None, ids_BT=ids_BT)
        return self.norm(x)


class TiesWithAnAttribute(LanguageModel):
    """Ties by assigning a Parameter once; to_empty makes two of it again."""

    def __init__(self, cfg):
        super().__init__(cfg)
        if cfg.tied:
            self.head = nn.Linear(cfg.dim, cfg.padded_vocab_size, bias=False)
            self.head.weight = self.embedding.weight


class ShiftsAgain(LanguageModel):
    def loss(self, ids_BT, targets_BT, reduction="mean"):
        return super().loss(ids_BT[:, :-1], targets_BT[:, 1:], reduction)


class ForgetsTheCapInTheLoss(LanguageModel):
    def loss(self, ids_BT, targets_BT, reduction="mean"):
        x = self.hidden(ids_BT).flatten(0, 1)
        targets = targets_BT.flatten()
        return linear_cross_entropy(x, self.head_weight, targets, reduction=reduction)


class LargeHead(LanguageModel):
    """torch's default for nn.Embedding and std .5 for the head."""

    def init_weights(self, seed=0):
        super().init_weights(seed)
        with torch.no_grad():
            self.head_weight.normal_(0.0, 0.5)


class UsesTheGlobalGenerator(LanguageModel):
    def init_weights(self, seed=0):
        super().init_weights(seed)
        with torch.no_grad():
            self.embedding.weight.normal_()


class SkipsTheGains(LanguageModel):
    """Initializes matrices only: the rest keeps what lay in memory."""

    def init_weights(self, seed=0):
        kept = {n: p.clone() for n, p in self.named_parameters() if p.ndim < 2}
        super().init_weights(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in kept and kept[name].isnan().any():
                    parameter.copy_(kept[name])


class PaddingLikeAnyOther(LanguageModel):
    def next_token_logits(self, ids_BT, cache=None):
        return self(ids_BT, cache)[:, -1]


class TablesFromGeneration(LanguageModel):
    """Keeps whatever table the first call made, also an inference tensor."""

    def _rope(self, start, end, device):
        if not hasattr(self, "_kept"):
            cfg = self.cfg
            object.__setattr__(self, "_kept", rope_table(
                cfg.context, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling
            ))  # fmt: skip
        return self._kept[0][start:end], self._kept[1][start:end]


class HardCap(LanguageModel):
    def logits(self, x):
        cap = self.cfg.softcap or math.inf
        return (x @ self.head_weight.T).float().clamp(-cap, cap)


ZOO = {
    "rotary tables as buffers": (
        TablesInBuffers,
        "test_rotary_tables_stay_fp32_and_belong_to_their_positions",
    ),
    "tables cached by length": (TablesByLength, "test_cached_equals_uncached"),
    "context checked without the start": (
        ChecksTheLengthAlone,
        "test_running_past_the_context_raises_before_a_wrong_token",
    ),
    "tie lost by to_empty": (
        TiesWithAnAttribute,
        "test_tied_weights_are_one_storage_all_the_way",
    ),
    "targets shifted twice": (ShiftsAgain, "test_a_perfect_predictor_has_no_loss"),
    "loss without the softcap": (
        ForgetsTheCapInTheLoss,
        "test_loss_is_the_cross_entropy_of_the_logits",
    ),
    "head too large at the start": (LargeHead, "test_a_fresh_model_knows_nothing"),
    "torch's global generator": (
        UsesTheGlobalGenerator,
        "test_the_seed_decides_the_start",
    ),
    "gains left uninitialized": (
        SkipsTheGains,
        "test_meta_construction_gives_the_same_bits",
    ),
    "padding can be sampled": (PaddingLikeAnyOther, "test_padding_is_never_sampled"),
    "inference tensors kept": (
        TablesFromGeneration,
        "test_generation_before_training_leaves_training_intact",
    ),
    "clamp for a softcap": (HardCap, "test_softcap_bounds_the_logits_smoothly"),
}
