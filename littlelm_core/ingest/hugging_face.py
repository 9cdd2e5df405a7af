"""Models and tokenizers of transformers behind the names that this course uses.

Thin: the weights, the attention and the cache are theirs. transformers is optional.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from littlelm_core.config import CheckpointError, ConfigError


class Theirs:
    """A cache of transformers, as one layer of a list of ours."""

    def __init__(self, cache: Any = None) -> None:
        self.cache = cache

    def select(self, rows: Sequence[int], length: int) -> Theirs:
        """Return a cache whose row i goes on from row rows[i]; it grows by itself."""
        new = copy.deepcopy(self.cache)
        new.batch_select_indices(torch.tensor(rows, device=new.layers[0].keys.device))
        return Theirs(new)


class CausalLM(nn.Module):
    """A causal language model of transformers with our model's methods."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        self.cfg = SimpleNamespace(
            context=getattr(config, "max_position_embeddings", None),
            vocab_size=config.vocab_size,
        )
        self.head = model.get_output_embeddings()
        self.splits = self._head_is_plain()

    @torch.inference_mode()
    def _head_is_plain(self) -> bool:
        """Whether logits are the head of the last streams, and nothing more.

        Some models scale or cap them. The model itself is asked, with a few ids.
        """
        base = self.model.base_model
        if base is self.model or self.head is None:
            return False
        ids_BT = torch.arange(4, device=self.model.device)[None] + 5
        whole = self.model(ids_BT, use_cache=False).logits
        parts = self.head(base(ids_BT, use_cache=False).last_hidden_state)
        return torch.allclose(whole.float(), parts.float(), rtol=1e-3, atol=1e-3)

    def make_cache(self, batch: int, length: int) -> list[Theirs]:
        """Return an empty cache; it grows by itself."""
        return [Theirs()]

    def hidden(self, ids_BT: Tensor, cache: list[Theirs] | None = None) -> Tensor:
        """Return what `logits` reads."""
        keys: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            keys["past_key_values"] = cache[0].cache
        # The base model alone makes no logits.
        only_reads = self.splits or (cache is not None and cache[0].cache is None)
        found = (self.model.base_model if only_reads else self.model)(ids_BT, **keys)
        if cache is not None:
            cache[0].cache = found.past_key_values
        return found.last_hidden_state if only_reads else found.logits

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of streams."""
        return self.head(x) if self.splits else x


class TheirTokenizer:
    """A tokenizer of transformers with our names. Raises ConfigError without a BOS."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        bos = next((i for i in known if i is not None), None)
        if bos is None:
            raise ConfigError("the tokenizer has no bos_token to begin a text with")
        self.bos_id = bos
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = f"{bos} {backend.to_str()}" if backend is not None else ""
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest() if text else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        keys = {"add_special_tokens": False, "verbose": False}
        return self.tokenizer(list(texts), **keys)["input_ids"]


def load_causal_lm(folder: str | Path) -> tuple[CausalLM, TheirTokenizer]:
    """Load a model and its tokenizer from a local folder, fp32, on the CPU.

    Raises ConfigError without transformers, CheckpointError for a folder that is none.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "hf: needs transformers: pip install 'littlelm[bench]'"
        ) from error
    folder = Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is no Hugging Face model: it has no config.json"
        )
    local = {"local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **local
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder} does not load: {reason}") from error
    return CausalLM(model.eval()), TheirTokenizer(tokenizer)
