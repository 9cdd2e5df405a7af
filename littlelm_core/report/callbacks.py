"""What a run calls on its way: the hooks, and the curves for TensorBoard.

A run file names callbacks like any other part:

    [[callback]]
    use = "tensorboard"        # or "my_code.py:MyCallback", with its keys below
"""

from __future__ import annotations

import importlib
from typing import Any

from littlelm_core.config import ConfigError, register


class Callback:
    """Base of a callback part: override what you need; the keys go to `__init__`.

    Called on the first process only, with the trainer. It must not change the trainer
    nor draw from the global random state: a run with it is the run without it.
    """

    def on_start(self, trainer: Any) -> None:
        """Before the first step of this process."""

    def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
        """After each step, with its line of metrics.jsonl."""

    def on_validation(self, trainer: Any, record: dict[str, Any]) -> None:
        """After each validation, with its line of metrics.jsonl."""

    def on_end(self, trainer: Any, result: Any) -> None:
        """When the run has finished, or was interrupted and saved: a TrainResult."""


@register("callback", "tensorboard")
class TensorBoard(Callback):
    """The same curves for TensorBoard, in a folder of the run's folder.

    Raises ConfigError when the optional package is missing.
    """

    def __init__(self, folder: str = "tensorboard"):
        try:
            board = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ConfigError(
                "callback 'tensorboard' needs a package: pip install tensorboard"
            ) from error
        self.folder, self.writer_class = folder, board.SummaryWriter

    def on_start(self, trainer: Any) -> None:
        folder = str(trainer.run_dir / self.folder)
        # What a killed run wrote after the step it goes on from is taken back.
        self.writer = self.writer_class(folder, purge_step=trainer.step + 1)

    def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
        keys = ("loss", "grad_norm", "mfu", "tokens_per_second")
        scalars = {f"train/{key}": record[key] for key in keys}
        scalars |= {f"lr/{group}": lr for group, lr in record["lr"].items()}
        self._add(scalars, record["step"])

    def on_validation(self, trainer: Any, record: dict[str, Any]) -> None:
        scores = record["domains"].items()
        bits = {f"bits_per_byte/{d}": s["bits_per_byte"] for d, s in scores}
        self._add(bits, record["step"])

    def on_end(self, trainer: Any, result: Any) -> None:
        self.writer.close()

    def _add(self, scalars: dict[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
