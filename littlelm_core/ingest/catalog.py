"""Datasets with a name, and where they are.

What the repositories hold, as their cards and the tools of others that read them say
(looked up in November 2026; nothing could be downloaded where this was written):

climbmix ids       nvidia/Nemotron-ClimbMix (once nvidia/ClimbMix), climbmix_small/
                   shard_0 … shard_99.tokenized.parquet, .3 to 1.1 GB each, columns
                   cluster_id, tokens (GPT-2 ids) and token_count
climbmix ids-full  the same repository, part_0 … part_99.tokenized.jsonl, about 20 GB
                   each, the same three keys; all of the 400 billion tokens
climbmix text      karpathy/climbmix-400b-shuffle, shard_00000 … shard_06542.parquet,
                   about 88 MB each, column text: nanochat's shuffled copy
fineweb-edu text   karpathy/fineweb-edu-100b-shuffle, shard_00000 … shard_01822.parquet,
                   about 90 MB each, column text: nanochat's data before ClimbMix

Sources: the card huggingface.co/datasets/nvidia/Nemotron-ClimbMix with its
detokenize_climbmix.py; nanochat's nanochat/dataset.py (BASE_URL, MAX_SHARD).
"""

from __future__ import annotations

from typing import NamedTuple

from littlelm_core.config import ConfigError, nearest


class Form(NamedTuple):
    """One way in which a dataset can be had."""

    repo: str
    pattern: str  # of the files to train on, numbered from 0
    files: int  # how many there are
    validation: str  # the file that is held out
    ids: bool  # stored ids, else text
    shard_bytes: float  # at most, for each byte of a file; for the disk estimate

    def check(self, shards: int) -> None:
        """Raise ConfigError unless there are so many files to train on."""
        if not 1 <= shards <= self.files:
            raise ConfigError(
                f"shards = {shards}: 1 to {self.files} are there to train on"
            )


class Dataset(NamedTuple):
    """A dataset with a name; its first form is the default."""

    licence: str
    forms: dict[str, Form]


_NVIDIA = "nvidia/Nemotron-ClimbMix"
_SMALL = "climbmix_small/shard_{}.tokenized.parquet"
_HELD_OUT, _PART = _SMALL.format(99), "part_{}.tokenized.jsonl"
_SHARD, _KARPATHY = "shard_{:05d}.parquet", "karpathy/{}-shuffle"
DATASETS = {
    "climbmix": Dataset(
        "ClimbMix: CC BY-NC 4.0, for research and development only "
        "(https://huggingface.co/datasets/nvidia/Nemotron-ClimbMix)",
        {
            "ids": Form(_NVIDIA, _SMALL, 99, _HELD_OUT, True, 1.5),
            "ids-full": Form(_NVIDIA, _PART, 100, _HELD_OUT, True, 0.5),
            "text": Form(
                _KARPATHY.format("climbmix-400b"), _SHARD, 6542,
                _SHARD.format(6542), False, 1.6,
            ),
        },
    ),
    "fineweb-edu": Dataset(
        "FineWeb-Edu: ODC-By 1.0, and Common Crawl's terms of use "
        "(https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu)",
        {
            "text": Form(
                _KARPATHY.format("fineweb-edu-100b"), _SHARD, 1822,
                _SHARD.format(1822), False, 1.6,
            ),
        },
    ),
}  # fmt: skip


def find_form(name: str, form: str = "") -> Form:
    """Return a form of a dataset, the first one for "". Raises ConfigError."""
    if name not in DATASETS:
        raise ConfigError(f"no dataset is called {name!r}{nearest(name, DATASETS)}")
    forms = DATASETS[name].forms
    if form and form not in forms:
        raise ConfigError(f"no form {form!r} of {name}{nearest(form, forms)}")
    return forms[form or next(iter(forms))]
