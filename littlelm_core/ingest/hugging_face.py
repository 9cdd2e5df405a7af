"""Models and tokenizers of transformers behind the names that this course uses.

Thin: the weights, the attention and the cache are theirs. What such a model can do
beyond mapping ids to logits (make logits of chosen positions only, go on from a prefix
that was read once) differs between models and versions and stands in no config. So the
model itself is asked, with a dozen ids, when it is wrapped: a short cut is taken only
where it gives the numbers of the long way. transformers (4.45 or later) is optional.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from littlelm_core.config import CheckpointError, ConfigError, LittleLMError

# What the argument and the output with the cache are called, newest version first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
POSITION_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


# ---- The cache


class Theirs:
    """A cache of transformers, as one layer of a list of ours."""

    def __init__(self, cache: Any = None) -> None:
        self.cache = cache

    def select(self, rows: Sequence[int] | Tensor, length: int) -> Theirs:
        """Return a cache whose row i goes on from row rows[i]; it grows by itself."""
        # All but the tensors is copied: reordering puts new ones in their place.
        tensors = _tensors(self.cache, set())
        new = copy.deepcopy(self.cache, {id(tensor): tensor for tensor in tensors})
        new.reorder_cache(torch.as_tensor(rows, device=tensors[0].device))
        return Theirs(new)


def _tensors(thing: Any, seen: set[int]) -> list[Tensor]:
    """Return all tensors that an object holds."""
    if isinstance(thing, Tensor):
        return [thing]
    if id(thing) in seen or isinstance(thing, type):
        return []
    seen.add(id(thing))
    if isinstance(thing, (list, tuple)):
        parts = thing
    else:
        held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        parts = held.values()
    return [tensor for part in parts for tensor in _tensors(part, seen)]


def _empty_cache(batch: int, length: int) -> list[Theirs]:
    """Return a cache that the model fills at its first reading."""
    return [Theirs()]


# ---- The model


class CausalLM(nn.Module):
    """A causal language model of transformers with our model's methods.

    It has `make_cache` only where the model's cache can be shared out among rows:
    recurrent states and buffers of a fixed size mostly cannot. `cfg` has the context
    (None: no limit), the vocabulary and their own configuration; ids beyond the
    tokenizer's stay in, as padding that the model has learned not to use.
    Raises ConfigError for a model that looks ahead.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        self.cfg = SimpleNamespace(
            context=_positions(config),
            vocab_size=config.vocab_size,
            theirs=config.to_json_string(),
        )
        # What makes the streams that the head reads: the model itself, if it is one.
        self.body = model.base_model
        names = inspect.signature(self.body.forward).parameters
        self.cache_name = next((name for name in CACHE_NAMES if name in names), None)
        self.output: Any = None  # the body's, where logits can be made of it
        self.training = model.training
        self.model.eval()
        self._ask()
        self.model.train(self.training)

    @property
    def splits(self) -> bool:
        """Whether logits can be made of some positions alone."""
        return self.output is not None

    def hidden(self, ids_BT: Tensor, cache: list[Theirs] | None = None) -> Tensor:
        """Return what `logits` reads: the streams, or the logits if it must be.

        Raises LittleLMError for more tokens than a table of positions has.
        """
        keys: dict[str, Any] = {"use_cache": cache is not None}
        first = cache is not None and cache[0].cache is None
        if cache is not None and not first:
            keys[self.cache_name] = cache[0].cache
        # Of a shared prefix nothing but the cache is wanted.
        part = self.body if self.splits or first else self.model
        try:
            found = part(ids_BT, **keys)
        except IndexError as error:
            raise LittleLMError(
                f"{ids_BT.shape[1]} tokens in a row do not fit a model made for "
                f"{self.cfg.context}: set a smaller context"
            ) from error
        if cache is not None:
            cache[0].cache = getattr(found, self.cache_name)
        return found.logits if "logits" in found else found.last_hidden_state

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of streams x of shape ... x C, by the model's own forward.

        What stands behind the head (a cap, a scale) is known to nothing else.
        """
        if not self.splits:
            return x
        x_1NC = x.reshape(1, -1, x.shape[-1])
        with self._streams(x_1NC):
            no_ids = torch.zeros(x_1NC.shape[:2], dtype=torch.long, device=x.device)
            logits_1NV = self.model(no_ids, use_cache=False).logits
        return logits_1NV.view(*x.shape[:-1], -1)

    @contextmanager
    def _streams(self, x_BTC: Tensor) -> Iterator[None]:
        """Let the body return given streams, whatever it is asked."""
        output = type(self.output)(**{**self.output, "last_hidden_state": x_BTC})
        before = vars(self.body).get("forward")
        self.body.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self.body.forward
            if before is not None:
                self.body.forward = before

    @torch.inference_mode()
    def _ask(self) -> None:
        """Find out which short cuts give the numbers of the long way.

        Two rows of ids end alike; rounding may change little of what the other
        beginning does.
        """
        weight = next(self.model.parameters())
        draw = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(self.cfg.vocab_size, (2, 9), generator=draw)
        ids_BT[1, 6:] = ids_BT[0, 6:]
        ids_BT = ids_BT.to(weight.device)
        whole_BTV = self.model(ids_BT, use_cache=False).logits.float()
        effect = (whole_BTV[0, 6:] - whole_BTV[1, 6:]).abs().max()
        noise = effect * (0.01 if weight.dtype.itemsize > 2 else 0.25)

        def agree(got: Tensor, wanted: Tensor) -> bool:
            return bool((got.float() - wanted).abs().max() <= noise)

        other_BT = ids_BT.clone()
        other_BT[:, 6:] = other_BT[:, 6:].flip(1)
        before_BTV = self.model(other_BT, use_cache=False).logits[:, :6]
        if whole_BTV.isfinite().all() and not agree(before_BTV, whole_BTV[:, :6]):
            raise ConfigError(
                f"{type(self.model).__name__} looks ahead: its logits depend on later "
                "tokens, so that its losses would mean nothing"
            )
        # Whatever a model raises from here on, it does not know this way.
        for body in (self.model.get_decoder(), self.model.base_model):
            with suppress(Exception):
                self.body = body
                self.output = body(ids_BT, use_cache=False)
                if agree(self.logits(self.output.last_hidden_state), whole_BTV):
                    break
            self.output = None
        with suppress(Exception):
            cache = [Theirs()]
            self.hidden(ids_BT[:, :6], cache)
            # Twice: the first must leave what both go on from as it was.
            for rows in ([1, 0, 1], [0, 0, 1, 1]):
                fork = [cache[0].select(rows, 9)]
                logits_BTV = self.logits(self.hidden(ids_BT[rows, 6:], fork))
                if not agree(logits_BTV, whole_BTV[rows, 6:]):
                    return
            self.make_cache = _empty_cache


def _positions(config: Any) -> int | None:
    """Return how many tokens a model reads at most; None for no limit."""
    found = [getattr(config, name, None) for name in POSITION_NAMES]
    limit = next((n for n in found if isinstance(n, int) and n > 0), None)
    scaling = getattr(config, "rope_parameters", None)  # 5.x
    scaling = scaling or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (scaling.get("rope_type"), scaling.get("type")):
        # Beyond it all positions are turned otherwise: a row's answers would depend on
        # the length of the rows beside it.
        return scaling.get(
            "original_max_position_embeddings",
            getattr(config, "original_max_position_embeddings", limit),
        )
    return limit


# ---- The tokenizer


class TheirTokenizer:
    """A tokenizer of transformers with our names.

    A text begins with its BOS token, else with its EOS token, which ends documents.
    Raises ConfigError where it has neither.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        bos = next((i for i in known if i is not None), None)
        if bos is None:
            raise ConfigError(
                "the tokenizer has neither bos_token nor eos_token to begin a text "
                "with: name one in its tokenizer_config.json"
            )
        self.bos_id = bos
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = f"{bos} {backend.to_str()}" if hasattr(backend, "to_str") else ""
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest() if text else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens and never cut."""
        if not texts:
            return []
        return self.tokenizer(
            list(texts),
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]


# ---- A folder


def load_causal_lm(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> tuple[CausalLM, TheirTokenizer]:
    """Load a model and its tokenizer from a local folder; nothing is downloaded.

    dtype: of the weights; None for that of the files.
    Raises ConfigError without transformers or for a model that is not causal,
    CheckpointError for a folder that holds no whole model with its tokenizer.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: hf: reads local models only; "
            f"`hf download OWNER/NAME --local-dir {folder}` would fetch one"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is no Hugging Face model: it has no config.json"
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "hf: needs transformers: pip install 'littlelm[bench]'"
        ) from error
    local = {"local_files_only": True, "trust_remote_code": False}
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    type_name = "dtype" if version >= (4, 56) else "torch_dtype"
    kind = "auto" if dtype is None else dtype
    with _reading(folder, "model", transformers):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **{type_name: kind}, **local
        )
        if missing := sorted(report["missing_keys"]):
            # transformers would draw them at random and go on.
            raise ValueError(f"its weights lack {len(missing)}, such as {missing[0]}")
    with _reading(folder, "tokenizer", transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
    return CausalLM(model.to(device).eval()), TheirTokenizer(tokenizer)


@contextmanager
def _reading(folder: Path, what: str, transformers: Any) -> Iterator[None]:
    """Turn whatever a broken folder raises into one line; show no bar."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{folder}: its {what} does not load: {reason}"
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()
