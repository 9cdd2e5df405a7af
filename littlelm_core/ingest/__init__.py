"""Text in, shards out: what stands between files and the loader.

    prepare(sources, out, tokenizer)   files, folders, parquet, datasets to a folder
    prepare_named("climbmix", 8, ...)  a dataset with a name, fetched and checked
    prepare_run(run)                   the data that a run names, prepared if need be

A prepared folder holds shards named "<split>-<domain>-<00000>.shard", tokenizer.json,
parts/ (what makes it resumable) and manifest.json, written last: documents, tokens and
bytes of each split and domain, bad records, fingerprints and versions.
"""

from littlelm_core.ingest.named import prepare_named
from littlelm_core.ingest.runs import (
    Prepared,
    open_prepared,
    prepare_run,
    source_folder,
    tokenizer_sample,
    total,
)
from littlelm_core.ingest.write import prepare

__all__ = [
    "Prepared",
    "open_prepared",
    "prepare",
    "prepare_named",
    "prepare_run",
    "source_folder",
    "tokenizer_sample",
    "total",
]
