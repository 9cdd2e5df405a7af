"""Parts of one's own for test_swaps.py: ours, and each says that it was used."""

import functools
from collections import Counter

import torch

from littlelm_core.attention import Attention
from littlelm_core.blocks import Block, RMSNorm, SwiGLU
from littlelm_core.mixture import Mixture
from littlelm_core.model import LanguageModel, linear_cross_entropy
from littlelm_core.shards import Loader
from littlelm_core.tokenizer import Tokenizer
from littlelm_core.trainer import Precision

USED = Counter()  # by kind


def own(kind, part):
    """Return a subclass that counts its instances."""

    # The keys of a run file are checked against the signature, so that is kept.
    @functools.wraps(part.__init__)
    def __init__(self, *arguments, **keys):
        USED[kind] += 1
        part.__init__(self, *arguments, **keys)

    return type(f"Own{part.__name__}", (part,), {"__init__": __init__})


class OwnTokenizer(Tokenizer):
    """Single bytes, whatever the texts are."""

    def __init__(self, texts=(), vocab_size: int = 260):
        USED["tokenizer"] += 1
        super().__init__({bytes([i]): i for i in range(256)})

    @classmethod
    def load(cls, path):
        """Return one: there is nothing in the file that it does not know."""
        assert path.is_file()
        return cls()


OwnAttention = own("attention", Attention)
OwnSwiGLU = own("ffn", SwiGLU)
OwnRMSNorm = own("norm", RMSNorm)
OwnBlock = own("block", Block)
OwnModel = own("model", LanguageModel)
OwnAdamW = own("optimizer", torch.optim.AdamW)
OwnPrecision = own("precision", Precision)
OwnMixture = own("mixture", Mixture)
OwnLoader = own("loader", Loader)


@functools.wraps(linear_cross_entropy)
def own_loss(*arguments, **keys):
    """Ours, counted."""
    USED["loss"] += 1
    return linear_cross_entropy(*arguments, **keys)


def own_schedule(step: int, total: int, warmup: int = 0) -> float:
    """Two rates."""
    USED["schedule"] += 1
    return 1.0 if step < total // 2 else 0.5
