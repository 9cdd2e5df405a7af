"""Precisions as people write them on a first try."""

from contextlib import nullcontext

import torch

from littlelm_core.fp8 import convert_to_fp8, quantize
from littlelm_core.trainer import Precision


class CastsTheModel(Precision):
    """bf16 by casting every parameter: updates below half a step are lost."""

    def prepare(self, model, device):
        loss = super().prepare(model, device)
        if self.dtype == "bf16":
            model.to(torch.bfloat16)
        return loss


class NewParameters(Precision):
    """Replaces parameters, so that an optimizer made before holds the old ones."""

    def prepare(self, model, device):
        for module in model.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(old.detach().clone()))
        return super().prepare(model, device)


class RoundsTheWeights(Precision):
    """8 bits in the weights themselves, once, before training."""

    def prepare(self, model, device):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    q, scale = quantize(parameter)
                    parameter.copy_(q.float() * scale)
        return super().prepare(model, device)


class NeverAutocasts(Precision):
    def context(self):
        return nullcontext()


class LossInBf16(Precision):
    def prepare(self, model, device):
        loss = super().prepare(model, device)
        return lambda *batch: loss(*batch).bfloat16()


class StaysAuto(Precision):
    def prepare(self, model, device):
        asked = self.dtype
        loss = super().prepare(model, device)
        self.dtype = asked
        return loss


class LeavesAutocastOn(Precision):
    def context(self):
        torch.set_autocast_enabled("cpu", self.dtype == "bf16")
        return nullcontext()


class TakesAnyKey(Precision):
    def __init__(self, dtype="auto", compile=False, masters="fp32"):
        known = dtype in ("auto", "fp32", "bf16")
        super().__init__(dtype if known else "fp32", compile)
        self.masters = masters


class ScalesTheLossAndForgets(Precision):
    """Loss scaling, as fp16 needs it, that nobody takes out of the gradients."""

    def prepare(self, model, device):
        loss = super().prepare(model, device)
        return lambda *batch: loss(*batch) * 1024.0


class EvaluatesInEightBits(Precision):
    def prepare(self, model, device):
        convert_to_fp8(model)
        for module in model.modules():
            if type(module).__name__ == "Float8Linear":
                module.train = lambda mode=True: None  # stays in training mode
        return super().prepare(model, device)


ZOO = {
    "casts the model": (CastsTheModel, "test_parameters_stay_what_they_were"),
    "new parameters": (NewParameters, "test_parameters_stay_what_they_were"),
    "rounds the weights": (
        RoundsTheWeights, "test_validation_measures_the_plain_weights"
    ),
    "never in bf16": (
        NeverAutocasts, "test_bf16_really_multiplies_in_fewer_bits"
    ),
    "loss in bf16": (LossInBf16, "test_the_loss_is_close_to_fp32_and_has_its_type"),
    "stays auto": (StaysAuto, "test_dtype_is_settled_by_prepare"),
    "leaves autocast on": (LeavesAutocastOn, "test_the_context_ends"),
    "takes any key": (TakesAnyKey, "test_wrong_keys_raise"),
    "scales the loss and forgets": (
        ScalesTheLossAndForgets, "test_the_loss_is_close_to_fp32_and_has_its_type"
    ),
    "evaluates in eight bits": (
        EvaluatesInEightBits, "test_validation_measures_the_plain_weights"
    ),
}  # fmt: skip
