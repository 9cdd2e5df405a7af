"""doctor, train, generate, bench: the machine, a run, and talking to it."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from littlelm_core.cli.frame import app, console

# ---- Look at the machine


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option(help="Skip the timing of matmuls.")] = False,
) -> None:
    """Say what this machine can do and which runs fit it.

    \b
    Examples:
      littlelm doctor
      littlelm doctor --quick
    """
    from littlelm_core import doctor as module

    module.show(console, quick=quick)


# ---- Train and talk


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="A run by name, or a .toml file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")
    ] = None,
) -> None:
    """Train a run; a run that was stopped goes on where it was.

    \b
    Examples:
      littlelm train tiny
      littlelm train tiny steps=50 run_dir=runs/short
      littlelm train tiny attention.use=my.py:MyAttention
      littlelm train my_run.toml optimizer.lr=0.001
    """
    from littlelm_core.config import load_run
    from littlelm_core.ingest import prepare_run
    from littlelm_core.trainer import schedule_of
    from littlelm_core.trainer import train as train_run

    loaded = load_run(run, changes or [])
    schedule_of(loaded)  # a wrong one is refused before the work on the data
    with console.status("preparing the data (once for each tokenizer)"):
        data = prepare_run(loaded)
    result = train_run(loaded, data)
    if int(os.environ.get("RANK", "0")):
        return  # under torchrun the first process speaks
    if result.interrupted:
        again = shlex.join(["littlelm", "train", run, *(changes or [])])
        console.print(f"to go on: {again}", soft_wrap=True, markup=False)
        return
    _show_result(run, data, result)


def _show_result(run: str, data: Any, result: Any) -> None:
    """Print what a finished run came to, and the next command to type."""
    from littlelm_core.generate import stream_text
    from littlelm_core.report import baselines, comparison
    from littlelm_core.trainer import load_checkpoint, newest_checkpoint

    if result.validation:
        with console.status("baselines on the same text"):
            scores = baselines(data)
        console.print()
        console.print(comparison(result.validation, scores), markup=False)
    checkpoint = newest_checkpoint(result.run_dir)
    model, tokenizer, _, _ = load_checkpoint(checkpoint)
    console.print("\na sample, from nothing but the beginning of a document:")
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": 1, "slide": True}
    text = "".join(stream_text(model, tokenizer, "", 120, **settings))
    console.print(textwrap.indent(text.strip(), "  "), markup=False, soft_wrap=True)
    console.print(f"\npage:       {result.run_dir / 'report.html'}", soft_wrap=True)
    console.print(f"checkpoint: {checkpoint}", soft_wrap=True)
    name = run if str(result.run_dir) == f"runs/{run}" else result.run_dir
    console.print(f'next:       littlelm generate {name} "def "', soft_wrap=True)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A run, its folder, or a checkpoint.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="At most this many.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the K likeliest; 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from a share P; 1: off.")] = 0.95,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Same seed, same text.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep keys and values.")] = True,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text.")
    ] = None,
) -> None:
    """Continue a prompt with a trained model, token by token.

    A run means its newest checkpoint. At the end of the context the oldest text is
    forgotten.

    \b
    Examples:
      littlelm generate tiny "def read_file("
      littlelm generate tiny "To be, or" --temperature 0 --max-new-tokens 80
      littlelm generate tiny "import " --seed 7 --top-k 40 --stop "def "
      littlelm generate runs/tiny/checkpoints/step_00000400 "class "
    """
    from littlelm_core.generate import stream_text
    from littlelm_core.trainer import load_checkpoint

    loaded, tokenizer, _, state = load_checkpoint(model)
    pieces = stream_text(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens,
        stop=stop or (),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        cache=cache,
        slide=True,
    )
    print(f"step {state['step']} of {model}", file=sys.stderr)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


# ---- Measure


@app.command()
def bench(
    what: Annotated[
        list[str] | None, typer.Argument(help="Some of the rows, or: fixes, mixture.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes: does it run?")] = False,
    threads: Annotated[int, typer.Option(help="Of torch and its peers.")] = 1,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="For the JSON; data/benchmarks, fixes and mixture: data/ablations."
        ),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="fixes: some of the arms, as baseline,muon.")
    ] = "",
    seeds: Annotated[int, typer.Option(help="fixes: runs of each arm.")] = 3,
    workers: Annotated[int, typer.Option(help="fixes, mixture: runs at a time.")] = 1,
    fresh: Annotated[
        bool, typer.Option(help="fixes, mixture: train these arms anew.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="core: hf:FOLDER, to score with that model.")
    ] = "",
) -> None:
    """Measure our parts against named peers, side by side, with the bars.

    `fixes` trains the failed recipe in miniature and adds five fixes to it, one at a
    time and each alone: about an hour; what is finished is kept when it is stopped.
    `mixture` finds weights for the default corpus by some forty runs of a very small
    model: about a quarter of an hour, kept in the same way. `curate`, only when named,
    cleans 1 GB and says how much memory that took: ten minutes and 3 GB of disk.

    \b
    Examples:
      littlelm bench
      littlelm bench bpe generate
      littlelm bench train --threads 2
      littlelm bench fixes
      littlelm bench fixes --arms baseline,muon --seeds 5 --workers 2
      littlelm bench mixture
      littlelm bench core --model hf:models/SmolLM2-135M
    """
    from littlelm_core.config import ConfigError

    if model and what != ["core"]:
        raise ConfigError("--model goes with one benchmark: littlelm bench core")
    if what == ["fixes"]:
        from littlelm_core.bench import fixes

        names = [name.strip() for name in arms.split(",") if name.strip()]
        chosen = {"names": names, "seeds": seeds, "workers": workers, "fresh": fresh}
        fixes.main(console, **chosen, quick=quick, folder=folder or fixes.FOLDER)
        return
    if what == ["mixture"]:
        from littlelm_core.bench import mixture

        chosen = {"workers": workers, "fresh": fresh, "quick": quick}
        mixture.main(console, **chosen, folder=folder or mixture.FOLDER)
        return
    from littlelm_core import bench as module

    folder = folder or Path("data/benchmarks")
    keys = {"quick": quick, "threads": threads, "folder": folder, "model": model}
    module.main(what or [], console, **keys)
