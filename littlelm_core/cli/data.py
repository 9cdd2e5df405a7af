"""data prepare: text to shards; data curate: text to clean text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from littlelm_core.cli.frame import console, data_app

CORE = "core"  # the one name that is tasks to score, not text to train on


@data_app.command("prepare")
def data_prepare(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (text, .jsonl, .gz, .zst, .parquet), folders of them, or "
            "datasets OWNER/NAME:CONFIG:SPLIT; DOMAIN=SOURCE names a domain. Or one of "
            "climbmix, fineweb-edu, with --shards; or core, the tasks of CORE.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write; what has a name has its own."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, its folder, gpt2 or vocab.bpe.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Of a new tokenizer, special tokens included.")
    ] = 4096,
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    validation: Annotated[float, typer.Option(help="Share held out.")] = 0.01,
    workers: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    shards: Annotated[
        int | None, typer.Option(help="Of a named dataset: how many of its files.")
    ] = None,
    form: Annotated[
        str, typer.Option(help="Of climbmix: ids (the default), ids-full or text.")
    ] = "",
    downloads: Annotated[
        Path | None, typer.Option(help="Where what is fetched comes to lie.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep those files once read.")] = False,
) -> None:
    """Turn text into shards that a run names as data.source; goes on if stopped.

    Without --tokenizer one is trained on a sample of the sources, once. ClimbMix is
    400 billion stored GPT-2 ids, for research only: as ids it comes in files of .3 to
    1.1 GB, as ids-full in files of 20 GB with 4 billion ids each.

    \b
    Examples:
      littlelm data prepare books/ --out data/prepared/books
      littlelm data prepare code=src/ prose=wiki.jsonl.gz --out data/prepared/mix
      littlelm data prepare HuggingFaceFW/fineweb-edu:sample-10BT:train \\
          --out data/prepared/edu --tokenizer gpt2
      littlelm data prepare climbmix --shards 4
      littlelm data prepare core
      littlelm train tiny data.source=data/prepared/books \\
          mixture.use=proportional run_dir=runs/books
    """
    from littlelm_core.config import ConfigError
    from littlelm_core.ingest import prepare
    from littlelm_core.ingest.catalog import DATASETS
    from littlelm_core.ingest.find import parse
    from littlelm_core.tokenizer import Tokenizer

    names = [*DATASETS, CORE]
    named = [s for s in sources if s in names and not Path(s).exists()]
    if named and len(sources) > 1:
        raise ConfigError(f"{named[0]} has a folder of its own: prepare it alone")
    if named == [CORE]:
        _prepare_core(context, out, downloads, keep)
        return
    if named:
        keywords = {"downloads": downloads, "keep": keep}
        _prepare_named(sources[0], shards, tokenizer, out, form, workers, **keywords)
        return
    for source in sources:
        parse(source, names)  # what is not there is said first
    if shards is not None or form or downloads or keep:
        raise ConfigError(
            "--shards, --form, --downloads and --keep belong to one named dataset: "
            + ", ".join(DATASETS)
        )
    if out is None:
        raise ConfigError("name the folder of shards: --out data/prepared/mine")
    saved = out / "tokenizer.json"
    if tokenizer is not None:
        chosen = _load_tokenizer(tokenizer)
    elif saved.is_file():  # of a run of this command that was stopped
        chosen = Tokenizer.load(saved)
        console.print(
            f"tokenizer: {saved} with {chosen.vocab_size} tokens; "
            "delete it for a new one",
            soft_wrap=True,
            markup=False,
        )
    else:
        chosen = _new_tokenizer(sources, out, vocab_size, text_key)
    manifest = prepare(
        sources,
        out,
        chosen,
        workers,
        text_key=text_key,
        validation_share=validation,
        console=console,
    )
    _show_prepared(manifest, out)


def _prepare_named(
    name: str,
    shards: int | None,
    tokenizer: str | None,
    out: Path | None,
    form: str,
    workers: int,
    **keywords: Any,
) -> None:
    """Fetch a dataset that has a name and turn it into shards."""
    from littlelm_core.config import ConfigError
    from littlelm_core.corpus import data_folder
    from littlelm_core.ingest.catalog import find_form
    from littlelm_core.ingest.named import prepare_named

    kind = find_form(name, form)
    if shards is None:
        raise ConfigError(f"how many files of {name}? --shards 1 to {kind.files}")
    kind.check(shards)  # before a vocabulary is fetched
    chosen = _load_tokenizer(tokenizer or "gpt2")
    manifest = prepare_named(
        name, shards, chosen, out, form, workers, console=console, **keywords
    )
    _show_prepared(manifest, out or data_folder() / name)


def _prepare_core(
    context: typer.Context, out: Path | None, downloads: Path | None, keep: bool
) -> None:
    """Fetch the tasks of CORE; refuse what is only about text to train on."""
    from littlelm_core.config import ConfigError
    from littlelm_core.ingest.core_bundle import prepare_core
    from littlelm_core.ingest.core_table import FILES, LICENCES, TASKS

    useful = {"sources", "out", "downloads", "keep"}
    for name in context.params:
        given = context.get_parameter_source(name)
        if name not in useful and given is not None and given.name != "DEFAULT":
            raise ConfigError(
                f"core is tasks to score, not text to train on: leave --"
                f"{name.replace('_', '-')} out (it takes --out, --downloads, --keep)"
            )
    folder = prepare_core(out, downloads=downloads, keep=keep, console=console)
    records = sum(file.records for file in FILES.values())
    for line in (
        f"{folder}: {len(TASKS)} tasks, {len(FILES)} files, {records:,} records",
        LICENCES,
        "next: littlelm eval tiny",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _load_tokenizer(given: str) -> Any:
    """Return what --tokenizer names."""
    from littlelm_core.tokenizer import Tokenizer

    path = Path(given)
    if given == "gpt2":
        return Tokenizer.gpt2()
    if path.suffix == ".bpe":  # GPT-2's own file, where nothing can be fetched
        return Tokenizer.gpt2(path)
    return Tokenizer.load(path / "tokenizer.json" if path.is_dir() else path)


@data_app.command("curate")
def data_curate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Files (.jsonl, .gz, .zst, .parquet, text), folders of them or "
            "datasets, DOMAIN=SOURCE to name one; then the folder to write.",
        ),
    ],
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    filters: Annotated[
        str,
        typer.Option(
            help="prose, all, none, or names: language, gopher_quality, "
            "gopher_repetition, fineweb, c4."
        ),
    ] = "prose",
    language: Annotated[str, typer.Option(help="For the language filter.")] = "en",
    normalize: Annotated[bool, typer.Option(help="Unicode and white space.")] = True,
    dedup: Annotated[str, typer.Option(help="near, exact or none.")] = "near",
    threshold: Annotated[
        float, typer.Option(help="Least similarity of a near duplicate.")
    ] = 0.8,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER|JSONL",
            help="Evaluation items: documents that hold one are dropped.",
        ),
    ] = None,
    overlap: Annotated[
        float, typer.Option(help="Share of an item's 13-grams that makes a hit.")
    ] = 0.5,
    classifier: Annotated[
        Path | None, typer.Option(help="A QualityClassifier's file.")
    ] = None,
    min_quality: Annotated[float, typer.Option(help="Least score to stay.")] = 0.5,
    output: Annotated[
        str, typer.Option("--format", help="jsonl.zst, jsonl.gz or parquet.")
    ] = "jsonl.zst",
    workers: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
) -> None:
    """Clean text: filter, deduplicate, decontaminate; goes on if stopped.

    Any size in bounded memory; while it runs, the folder needs about twice the room of
    the text that passes the filters. All fields of a record are kept. What was dropped
    and why: OUT/report.html. The filters are for English prose: for code or another
    language choose with --filters.

    \b
    Examples:
      littlelm data curate web.jsonl.gz data/curated/web
      littlelm data curate code=src/ data/curated/code --filters none
      littlelm data curate crawl/ wiki.parquet data/curated/all \\
          --against tasks/ --workers 8
      littlelm data prepare data/curated/all --out data/prepared/all
    """
    from littlelm_core.config import ConfigError
    from littlelm_core.ingest.curate import Options, curate, filter_names

    if len(paths) < 2:
        raise ConfigError("name what to read and then the folder to write: IN... OUT")
    *sources, out = paths
    options = Options(
        text_key=text_key,
        normalize=normalize,
        filters=filter_names(filters),
        language=language,
        dedup=dedup,
        threshold=threshold,
        against=tuple(against or ()),
        overlap=overlap,
        classifier=str(classifier or ""),
        min_quality=min_quality,
        format=output,
    )
    manifest = curate(sources, out, options, workers, console=console)
    _show_curated(manifest, Path(out))


def _show_curated(manifest: dict[str, Any], out: Path) -> None:
    from rich.table import Table

    read, kept = manifest["read"], manifest["kept"]
    table = Table(title=str(out), title_justify="left")
    for column in ("", "documents", "bytes"):
        table.add_column(column, justify="right" if column else "left")
    rows = {"read": read, **manifest["removed"], "kept": kept}
    for name, counts in rows.items():
        sign = "" if name in ("read", "kept") else "-"
        cells = (f"{sign}{counts.get(k, 0):,}" for k in ("documents", "bytes"))
        table.add_row(name, *cells)
    console.print(table)
    if manifest["bad"]["total"]:
        reasons = ", ".join(
            f"{count:,} × {reason}"
            for reason, count in manifest["bad"]["reasons"].items()
        )
        console.print(
            f"{manifest['bad']['total']:,} records could not be read: {reasons}",
            soft_wrap=True,
            markup=False,
        )
    console.print(f"examples: {out / 'report.html'}", soft_wrap=True, markup=False)
    if kept["documents"]:
        name = out.name
        console.print(
            f"next: littlelm data prepare {out} --out data/prepared/{name}",
            soft_wrap=True,
            markup=False,
        )


def _new_tokenizer(
    sources: list[str], out: Path, vocab_size: int, text_key: str
) -> Any:
    """Train a tokenizer on the beginnings of all parts of the sources."""
    from littlelm_core.config import DataError
    from littlelm_core.ingest.find import find_parts
    from littlelm_core.ingest.read import Bad, read_part
    from littlelm_core.ingest.runs import SAMPLE_BYTES
    from littlelm_core.ingest.write import PART_BYTES
    from littlelm_core.tokenizer import bpe_tokenizer

    parts = find_parts(sources, PART_BYTES, out)
    texts: list[str] = []
    bad: list[Bad] = []
    with console.status(f"training a tokenizer of {vocab_size} tokens"):
        for part in parts:
            room = SAMPLE_BYTES // len(parts)
            for record in read_part(part, text_key):
                if isinstance(record, Bad):
                    bad.append(record)
                else:
                    texts.append(record.text[:room])
                    room -= len(texts[-1])
                if room <= 0:
                    break
        if not any(texts):
            first = f"{bad[0].place}: {bad[0].reason}" if bad else ", ".join(sources)
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise DataError(f"no text to train on: {first}{more}")
        return bpe_tokenizer(texts, vocab_size)


def _show_prepared(manifest: dict[str, Any], out: Path) -> None:
    from rich.table import Table

    table = Table(title=str(out), title_justify="left")
    for column in ("domain", "split", "documents", "tokens", "bytes"):
        numbers = column not in ("domain", "split")
        table.add_column(column, justify="right" if numbers else "left")
    for domain, splits in manifest["domains"].items():
        for split in ("train", "validation"):
            counts = splits[split]
            cells = (f"{counts[k]:,}" for k in ("documents", "tokens", "bytes"))
            table.add_row(domain, split, *cells)
    console.print(table)
    _show_bad(manifest["bad_records"], out)
    size = manifest["tokenizer"]["vocab_size"]
    console.print(
        f"next: littlelm train tiny data.source={out} tokenizer.vocab_size={size} "
        f"mixture.use=proportional run_dir=runs/{out.name}",
        soft_wrap=True,
    )


def _show_bad(bad: dict[str, Any], out: Path) -> None:
    """Say how many records could not be used, why, and where the first ones are."""
    if not bad["total"]:
        return
    console.print(f"{bad['total']:,} records could not be used:", soft_wrap=True)
    for reason, count in sorted(bad["reasons"].items(), key=lambda r: (-r[1], r[0])):
        console.print(f"  {count:,} × {reason}", soft_wrap=True, markup=False)
    for place in bad["places"][:3]:
        console.print(f"  {place}", soft_wrap=True, markup=False)
    if len(bad["places"]) > 3:
        console.print(f"  … all places: {out / 'manifest.json'}", soft_wrap=True)
