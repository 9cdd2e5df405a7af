"""Blocks that are wrong in ways people have shipped."""

import torch
from torch import nn

from littlelm_core.blocks import Block, _scaled


class PostNorm(Block):
    """The norm stands on the stream itself."""

    def forward(self, x, rope, cache=None, ids_BT=None):
        extra = {}
        if self.value_table is not None:
            extra["value_embed"] = self._value_embed(ids_BT)
        read = self.attention(x, rope, cache=cache, **extra)
        x = self.attention_norm(x + _scaled(read, self.attention_scale))
        return self.ffn_norm(x + _scaled(self.ffn(x), self.ffn_scale))


class Parallel(Block):
    """The MLP reads the stream from before the attention."""

    def forward(self, x, rope, cache=None, ids_BT=None):
        middle = super().forward(x, rope, cache, ids_BT)
        middle = middle - _scaled(self.ffn(self.ffn_norm(middle)), self.ffn_scale)
        return middle + _scaled(self.ffn(self.ffn_norm(x)), self.ffn_scale)


class NoResidual(Block):
    def forward(self, x, rope, cache=None, ids_BT=None):
        return super().forward(x, rope, cache, ids_BT) - x


class ScaledStream(Block):
    """The scalar multiplies the stream, not what is added."""

    def forward(self, x, rope, cache=None, ids_BT=None):
        if self.attention_scale is not None:
            x = x * self.attention_scale
        return super().forward(x, rope, cache, ids_BT)


class ForgetsCache(Block):
    def forward(self, x, rope, cache=None, ids_BT=None):
        return super().forward(x, rope, None, ids_BT)


class FromTheFirst(Block):
    """Value tables on layers 0, 2, 4, ..., however many there are."""

    def __init__(self, cfg, layer, init="zero"):
        super().__init__(cfg, cfg.layers - 1 - layer % 2, init)


class UnpaddedTable(Block):
    def __init__(self, cfg, layer, init="zero"):
        super().__init__(cfg, layer, init)
        if self.value_table is not None:
            width = self.value_table.embedding_dim
            self.value_table = nn.Embedding(cfg.vocab_size, width)


class HalfGate(Block):
    """sigmoid(g) without the 2: half of the table from the start."""

    def _value_embed(self, ids):
        return super()._value_embed(ids) / 2


class NoGate(Block):
    def _value_embed(self, ids):
        return self.value_table(ids).unflatten(-1, (len(self.value_gate), -1))


class OneEps(Block):
    """norm_eps of the run never reaches the norms."""

    def __init__(self, cfg, layer, init="zero"):
        super().__init__(cfg, layer, init)
        self.attention_norm.eps = self.ffn_norm.eps = 1e-6


class NoOptions(Block):
    """The keys of a part stay in the run file."""

    def __init__(self, cfg, layer, init="zero"):
        kept, cfg.part_options = cfg.part_options, {}
        super().__init__(cfg, layer, init)
        cfg.part_options = kept


class LargeOutputs(Block):
    """Output matrices start like all others."""

    def __init__(self, cfg, layer, init="zero"):
        super().__init__(cfg, layer, init)
        self.residual_scale = 1.0


class OneLayerScale(Block):
    """1 / sqrt(layers): each layer adds twice."""

    def __init__(self, cfg, layer, init="zero"):
        super().__init__(cfg, layer, init)
        if init == "scaled":
            self.residual_scale = cfg.layers**-0.5


class GlobalDraws(Block):
    """One global seed, numbers in the order of the parameters."""

    def init_weights(self, seed, prefix=""):
        super().init_weights(seed, prefix)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim > 1 and "wo" not in name and "w_down" not in name:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


class SameLayers(Block):
    """The prefix is forgotten: every layer starts with the same numbers."""

    def init_weights(self, seed, prefix=""):
        super().init_weights(seed, "")


class LeftToConstruction(Block):
    """What the constructor filled is not filled again: lost on the meta device."""

    def init_weights(self, seed, prefix=""):
        kept = [p.clone() for p in self.parameters() if p.ndim == 1]
        super().init_weights(seed, prefix)
        with torch.no_grad():
            vectors = (p for p in self.parameters() if p.ndim == 1)
            for parameter, old in zip(vectors, kept, strict=True):
                parameter.copy_(old)


ZOO = {
    "norm after the sum": (PostNorm, "test_formula"),
    "attention and MLP side by side": (Parallel, "test_formula"),
    "no residual": (NoResidual, "test_formula"),
    "the scalar on the stream": (ScaledStream, "test_formula"),
    "the cache is not handed on": (ForgetsCache, "test_cached_equals_uncached"),
    "value tables counted from the first layer": (
        FromTheFirst,
        "test_value_tables_stand_on_every_other_layer_from_the_last",
    ),
    "value table without padding": (UnpaddedTable, "test_value_table_has_padded_rows"),
    "half a gate": (HalfGate, "test_value_embeddings_are_gated_by_head"),
    "no gate": (NoGate, "test_gradients_reach_every_parameter"),
    "norm_eps ignored": (OneEps, "test_sizes_reach_the_parts"),
    "keys of parts ignored": (NoOptions, "test_every_piece_is_swapped_by_name"),
    "outputs start large": (LargeOutputs, "test_a_fresh_block_is_the_identity"),
    "scaled by one sum a layer": (OneLayerScale, "test_matrices_start_at_their_size"),
    "drawn from the global generator": (
        GlobalDraws,
        "test_initial_numbers_depend_on_seed_and_name_alone",
    ),
    "all layers alike": (
        SameLayers,
        "test_initial_numbers_depend_on_seed_and_name_alone",
    ),
    "gains left to the constructor": (
        LeftToConstruction,
        "test_meta_construction_gives_the_same_bits",
    ),
}
