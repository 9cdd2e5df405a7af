"""All that follows a run: the log, the terminal, the page, samples and callbacks."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from littlelm_core.config import ConfigError, LittleLMError, Part, build
from littlelm_core.report.callbacks import Callback
from littlelm_core.report.log import MetricsLog, start_facts, write_text
from littlelm_core.report.page import Page
from littlelm_core.report.terminal import Progress

HOOKS = {"train": "on_step", "validation": "on_validation"}


class Report:
    """What a trainer tells goes to the log, the terminal, the page and the callbacks.

    Made at the step from which the run goes on; around the loop it is a context, which
    logs how the run ended. On all processes but the first it keeps the records alone.
    Nothing here changes the trainer or draws from the global random state.
    """

    def __init__(self, trainer: Any, quiet: bool = False):
        first = trainer.world.rank == 0
        self.exam = ""
        if trainer.run.eval_every > 0:  # refused now, not when a step is due for it
            from littlelm_core.report.evaluation import announced

            self.exam = announced(trainer.run)
        self.trainer, self.first = trainer, first
        self.callbacks = [callback(p) for p in trainer.run.callback if first]
        self.log = MetricsLog(trainer.run_dir, trainer.step, first)
        self.page = Page(trainer.run_dir, first)
        self.progress = Progress(trainer.last, trainer.step, quiet or not first)

    def start(self) -> None:
        """Log and print what is about to run, and how long it may take."""
        run = self.trainer.run
        facts = start_facts(self.trainer)
        facts["seconds_expected"] = expected_seconds(self.trainer)
        self.log.write("start", self.trainer.step, **facts)
        if self.first:
            path = self.trainer.run_dir / "run.json"
            write_text(path, run.model_dump_json(indent=1))
        self.progress.announce(run, facts)
        if self.exam:
            self.progress.say(self.exam)
        self._call("on_start")

    def tell(self, event: str, **fields: Any) -> None:
        """Take a "train", "validation", "core" or "sample" record of this step."""
        record = self.log.write(event, self.trainer.step, **fields)
        getattr(self.progress, event)(record)
        if event in HOOKS:
            self._call(HOOKS[event], record)

    def samples(self) -> None:
        """Continue one validation document of each domain, unless that is done."""
        trainer = self.trainer
        if self.log.last("sample", trainer.step):
            return
        trainer.model.eval()
        for domain, shards in trainer.data.validation.items():
            prompt = trainer.tokenizer.decode(shards[0][0][1:9].tolist())
            with trainer.precision.context():
                text = sample_text(trainer.model, trainer.tokenizer, prompt)
            self.tell("sample", domain=domain, prompt=prompt, text=text)
        trainer.model.train()

    def evaluation(self) -> None:
        """Score the run's tasks and log it, unless that is done; on all processes.

        A signal ends it without a record: the run that goes on owes it.
        """
        from littlelm_core.report import evaluation  # needs chapter 15

        trainer = self.trainer
        if trainer.stopped or evaluation.is_scored(trainer):
            return
        record = evaluation.evaluate_run(
            trainer, self.log.last("validation", trainer.step)
        )
        if record is None:
            trainer.stopped = trainer.asked_to_stop()
        else:
            self.tell("core", **record)

    def finish(self, result: Any) -> None:
        """Say what the run came to."""
        self.progress.finish(result)
        self._call("on_end", result)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.progress.stop()
        status = {"status": "interrupted" if self.trainer.stopped else "finished"}
        hide: Any = contextlib.nullcontext()
        if error is not None:
            status = {"status": "failed", "error": str(error) or type(error).__name__}
            hide = contextlib.suppress(LittleLMError, OSError)  # the first one is shown
        with hide:
            self.log.write("end", self.trainer.step, **status)
            self.page.write()

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.trainer, *arguments)


def callback(part: Part) -> Any:
    """Return the callback that a run names. Raises ConfigError for a missing hook."""
    built = build("callback", part)
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    if missing := [h for h in hooks if not callable(getattr(built, h, None))]:
        raise ConfigError(
            f"callback {part.use!r} has no {', '.join(missing)}: derive it from "
            "littlelm_core.report.Callback"
        )
    return built


def expected_seconds(trainer: Any) -> float:
    """Time one micro-batch of random ids, keep nothing of it; scale to the rest.

    An optimizer with `flops()`, matrix products of each step as Muon has them, adds its
    share of the step's FLOPs, as if these took as long as the model's.
    """
    steps = max(trainer.last - trainer.step, 0)
    shape = (2, trainer.run.rows, trainer.cfg.context)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(trainer.tokenizer.vocab_size, shape, generator=draw)
    ids_BT, targets_BT = trainer.place(ids)
    seconds = 0.0
    for _ in range(2 if steps else 0):  # the first one warms up
        start = time.perf_counter()
        with trainer.precision.context():
            nats = trainer.loss(ids_BT, targets_BT, reduction="sum")
        nats.backward()
        nats.item()  # waits for the device
        seconds = time.perf_counter() - start
    trainer.optimizer.zero_grad(set_to_none=True)
    of_model = trainer.flops * trainer.tokens_per_step / trainer.world.size
    own = getattr(trainer.optimizer, "flops", lambda: 0)() / of_model
    return seconds * trainer.grad_accum * steps * (1 + own)


@torch.no_grad()
def sample_text(
    model: Any, tokenizer: Any, prompt: str, tokens: int = 64, temperature: float = 0.8
) -> str:
    """Continue a prompt by up to `tokens` tokens; return the continuation alone.

    Every token costs a whole forward pass: chapter 07 does it with a cache. Draws from
    a generator of its own, so that a sample changes nothing in the run.
    """
    generator = torch.Generator().manual_seed(0)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    start, device = len(ids), next(model.parameters()).device
    for _ in range(tokens):
        ids_1T = torch.tensor([ids[-model.cfg.context :]], device=device)
        logits_V = model(ids_1T)[0, -1, : tokenizer.vocab_size].float().cpu()
        p_V = (logits_V / temperature).softmax(-1)
        drawn = int(torch.multinomial(p_V, 1, generator=generator))
        if drawn in tokenizer.special_ids.values():
            break
        ids.append(drawn)
    return tokenizer.decode(ids[start:])
