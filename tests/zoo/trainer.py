"""Wrong versions of chapter 06: a copy of the module with a function replaced."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import types
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from littlelm_core import trainer

_NUMBERS = itertools.count()


def copy_with(change):
    """A fresh copy of the module, changed by `change(module)`.

    Its own functions then call what was replaced. Registering the parts once more is
    left out: they belong to the module itself.
    """
    name = f"littlelm_zoo_trainer_{next(_NUMBERS)}"
    module = types.ModuleType(name)
    module.__file__ = trainer.__file__
    sys.modules[name] = module  # where dataclasses look themselves up
    source = Path(trainer.__file__).read_text(encoding="utf-8")
    source = source.replace('@register("precision", "autocast")\n', "")
    exec(compile(source, trainer.__file__, "exec"), vars(module))
    change(module)
    return module


def means_of_micro_batches(module):
    """Each micro-batch by its own mean: rows with few targets weigh too much."""

    def accumulate(loss, batches, tokens, context=module.nullcontext):
        total, batches = 0.0, list(batches)
        for ids, targets in batches:
            with context():
                mean = loss(ids, targets, reduction="mean")
            (mean / len(batches)).backward()
            total += float(mean) * float((targets != -100).sum())
        return total

    module.accumulate_gradients = accumulate


def divides_by_the_planned_tokens(module):
    """The planned tokens of a step, also when the last window is short."""
    real = module.accumulate_gradients
    planned = 4 * 16  # rows and context of the contract's run

    def accumulate(loss, batches, tokens, context=module.nullcontext):
        return real(loss, batches, max(tokens, planned), context)

    module.accumulate_gradients = accumulate


def any_tokens_per_step(module):
    def accumulation(run, context, world=1):
        if run.grad_accum != -1:
            return run.grad_accum
        return max(run.tokens_per_step // (run.rows * context * world), 1)

    module.accumulation = accumulation


def clips_each_parameter(module):
    def clip_gradients(parameters, clip):
        parameters = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            if clip > 0:
                clip_grad_norm_([parameter], clip)
        return float(norm)

    module.clip_gradients = clip_gradients


def logs_the_norm_after_clipping(module):
    def clip_gradients(parameters, clip):
        parameters = list(parameters)
        if clip > 0:
            clip_grad_norm_(parameters, clip)
        return float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))

    module.clip_gradients = clip_gradients


def steps_with_zeros_instead(module):
    """Zeroed gradients still decay the weights and move the momenta."""

    def update(self, finite):
        if not finite:
            for parameter in self.parameters:
                parameter.grad.zero_()
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        self.optimizer.step()

    module.Loop.update = update


def counts_skips_over_the_whole_run(module):
    def update(self, finite):
        real_row = self.skipped_steps
        self.skipped_in_a_row = real_row
        real(self, finite)
        if finite:
            self.skipped_in_a_row = real_row

    real = module.Loop.update
    module.Loop.update = update


def writes_what_is_not_finite(module):
    real = module.write_checkpoint

    def write(run_dir, weights, *rest):
        weights = {n: t.nan_to_num() for n, t in weights.items()}
        return real(run_dir, weights, *rest)

    module.write_checkpoint = write


def decays_the_gains(module):
    module.NOT_DECAYED = ()


def routes_by_shape(module):
    """Every matrix into one group, whatever it is, and the rest nowhere."""

    def parameter_groups(model, options):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        shared = {k: v for k, v in options.items() if k not in trainer.ROLES}
        return [{"name": "matrix", "params": matrices}], shared

    module.parameter_groups = parameter_groups


def rate_counts_taken_steps(module):
    """The schedule asked for the steps that the optimizer took."""
    real = module.Loop.take_step

    def take_step(self):
        schedule = self.schedule
        self.schedule = lambda step: schedule(step - self.skipped_steps)
        try:
            return real(self)
        finally:
            self.schedule = schedule

    module.Loop.take_step = take_step


def schedule_ends_at_the_stop(module):
    real = module.Loop.__init__

    def init(self, run, data):
        stop = run.steps if run.stop_step == -1 else run.stop_step
        options = {**run.schedule.options, "total": stop}
        part = trainer.RunConfig.model_fields["schedule"].annotation
        schedule = part(use=run.schedule.use, **options)
        real(self, run.model_copy(update={"schedule": schedule}), data)

    module.Loop.__init__ = init


def bf16_masters(module):
    real = module.Precision.prepare

    def prepare(self, model, device):
        loss = real(self, model, device)
        if self.dtype == "bf16":
            model.to(torch.bfloat16)
        return loss

    module.Precision.prepare = prepare
    trainer_register(module)


def trainer_register(module):
    """Let this copy's Precision stand for the part, which `build` finds by name."""
    real = module.build

    def build(kind, part, *args, **kwargs):
        if kind == "precision":
            return module.Precision(**part.options)
        return real(kind, part, *args, **kwargs)

    module.build = build


def forgets_the_optimizer(module):
    """Weights alone: the momenta start again from zero."""
    real = module.Loop.load

    def load(self, folder, *mend, **free):
        fresh = json.loads(json.dumps(self.optimizer.state_dict()["param_groups"]))
        run = real(self, folder, *mend, **free)
        self.optimizer.load_state_dict({"state": {}, "param_groups": fresh})
        return run

    module.Loop.load = load


def starts_the_epoch_again(module):
    real = module.Loop.load

    def load(self, folder, *mend, **free):
        run = real(self, folder, *mend, **free)
        self.loader.load_state_dict({**self.loader.state_dict(), "position": 0})
        return run

    module.Loop.load = load


def keeps_the_old_log(module):
    class Report(module.Report):
        def __init__(self, trainer, quiet=False):
            step, trainer.step = trainer.step, 10**9
            super().__init__(trainer, quiet)
            trainer.step = step

    module.Report = Report


def never_pays_what_it_owes(module):
    def fit(self):
        self.before = self.after_step
        first = [True]

        def after_step():
            if not first:
                self.before()
            first.clear()

        self.after_step = after_step
        return real(self)

    real = module.Trainer.fit
    module.Trainer.fit = fit


def writes_in_place(module):
    """Deletes the old checkpoint, then writes the new one under its own name."""

    def write(run_dir, weights, tensors, tokenizer, run, state):
        for old in (run_dir / "checkpoints").glob("step_*"):
            shutil.rmtree(old)
        folder = run_dir / "checkpoints" / f"step_{state['step']:08d}"
        folder.mkdir(parents=True)
        try:
            module.save_file(dict(weights), folder / "model.safetensors")
            torch.save(dict(tensors), folder / "optimizer.pt")
            (folder / "run.json").write_text(run.model_dump_json(), "utf-8")
            tokenizer.save(folder / "tokenizer.json")
        except OSError as error:
            raise trainer.CheckpointError(str(error)) from error
        files = {p.name: p.stat().st_size for p in folder.iterdir()}
        whole = {**state, "format": module.FORMAT, "files": files}
        (folder / "state.json").write_text(json.dumps(whole), "utf-8")
        return folder

    module.write_checkpoint = write


def trusts_every_folder(module):
    def is_complete(folder):
        return (folder / "state.json").exists()

    module.is_complete = is_complete


def counts_the_incomplete(module):
    def prune(run_dir, keep, resumed=None):
        folders = sorted((run_dir / "checkpoints").glob("step_*"))
        for folder in folders[:-keep]:
            if folder != resumed and not (folder / "pinned").exists():
                shutil.rmtree(folder)

    module.prune_checkpoints = prune


def prunes_the_one_it_came_from(module):
    real = module.prune_checkpoints

    def prune(run_dir, keep, resumed=None):
        real(run_dir, keep)

    module.prune_checkpoints = prune


def evaluates_first(module):
    def after_step(self):
        self.stopped = self.asked_to_stop()
        if self.due(self.run.validate_every):
            self.validation()
        if self.due(self.run.checkpoint_every):
            self.save()

    module.Trainer.after_step = after_step


def keeps_wrapper_prefixes(module):
    module.plain_name = lambda name: name


def loads_what_fits(module):
    def load_weights(model, folder):
        saved = module.load_file(folder / "model.safetensors")
        own = module.plain_weights(model)
        with torch.no_grad():
            for name in own.keys() & saved.keys():
                if own[name].shape == saved[name].shape:
                    own[name].copy_(saved[name])

    module.load_weights = load_weights


def goes_on_with_any_run(module):
    module.changed_keys = lambda old, new, path="": []


def means_of_domains(module):
    """The overall score as the mean over domains, whatever their sizes."""

    class Report(module.Report):
        def tell(self, event, **fields):
            if event == "validation":
                scores = [v for k, v in fields["domains"].items() if k != "overall"]
                for key in ("loss", "bits_per_byte"):
                    mean = sum(s[key] for s in scores) / len(scores)
                    fields["domains"]["overall"][key] = mean
            super().tell(event, **fields)

    module.Report = Report


def counts_tokens_as_bytes(module):
    real = module.score

    def score(loss, batches, bytes_V):
        return real(loss, batches, (bytes_V > 0).long())

    module.score = score


def scores_specials(module):
    real = module.score

    def score(loss, batches, bytes_V):
        return real(loss, batches, bytes_V.clamp(min=1))

    module.score = score


def samples_take_a_batch(module):
    class Report(module.Report):
        def samples(self):
            next(self.trainer.batches)
            super().samples()

    module.Report = Report


def lets_anybody_in(module):
    module.hold = lambda folder: contextlib.nullcontext()


def locks_by_number(module):
    """A file with the number of the process: a killed one keeps the folder."""
    real = module.hold

    def hold(folder):
        try:
            os.kill(int((folder / "pid").read_text("utf-8")), 0)
        except (OSError, ValueError):
            return real(folder)
        raise trainer.LittleLMError(f"another process trains in {folder}")

    module.hold = hold


def begins_anew(module):
    def newest(run_dir):
        whole = module.checkpoints(run_dir)
        return whole[-1] if whole else None

    module.newest_checkpoint = newest


def looks_at_sizes_alone(module):
    module.checksum = lambda path: ""


def edits_in_silence(module):
    module.part_sources = lambda run: {}


def takes_any_schedule(module):
    def schedule_of(run):
        options = {"total": run.steps, **run.schedule.options}
        part = trainer.resolve("schedule", run.schedule.use)
        return lambda step: {"lr": part(step, **options)}

    module.schedule_of = schedule_of


def keeps_what_the_last_schedule_set(module):
    """Sets only what this schedule says: another one's values stay in the groups."""

    def follow_schedule(self):
        values, groups = self.schedule(self.step), self.optimizer.param_groups
        for group in groups:
            own = self.own[group["name"]]
            group["lr"] = own["lr"] * values["lr"]
            if "momentum" in values:
                group["momentum"] = values["momentum"]
            if "weight_decay" in values:
                group["weight_decay"] = own["weight_decay"] * values["weight_decay"]
        return {k: {g["name"]: g[k] for g in groups} for k in values}

    module.Loop.follow_schedule = follow_schedule


def scales_the_decay_again_and_again(module):
    real = module.Loop.follow_schedule

    def follow_schedule(self):
        before = [g.get("weight_decay") for g in self.optimizer.param_groups]
        said = real(self)
        share = self.schedule(self.step).get("weight_decay", 1.0)
        for group, decay in zip(self.optimizer.param_groups, before, strict=True):
            if decay is not None:
                group["weight_decay"] = decay * share
        return said

    module.Loop.follow_schedule = follow_schedule


def takes_any_mapping(module):
    real = module.schedule_of

    def schedule_of(run):
        options = {"total": run.steps, **run.schedule.options}
        part = trainer.resolve("schedule", run.schedule.use)
        if isinstance(part(0, **options), dict):
            return lambda step: {"lr": 1.0, **part(step, **options)}
        return real(run)

    module.schedule_of = schedule_of


def casts_gains_too(module):
    """All of the model in bf16, as `model.to(torch.bfloat16)` does it."""
    real = module.Loop.__init__

    def init(self, run, data=None):
        def build(kind, *args, **kwargs):
            part = trainer.build(kind, *args, **kwargs)
            if kind == "precision" and part.masters == "bf16":
                self.model.to(torch.bfloat16)
            return part

        module.build = build
        real(self, run, data)

    module.Loop.__init__ = init


def norm_in_the_gradients_dtype(module):
    def clip_gradients(parameters, clip):
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if clip > 0 and torch.isfinite(norm):
            clip_grad_norm_(parameters, clip)
        return float(norm)

    module.clip_gradients = clip_gradients


def branches_with_fresh_statistics(module):
    """Loads a trunk's weights and place in the data, and no more."""
    real = module.Trainer.branch

    def branch(self, folder):
        fresh = self.optimizer.state_dict()
        real(self, folder)
        self.optimizer.load_state_dict(fresh)

    module.Trainer.branch = branch


def branches_from_the_first_row(module):
    real = module.Trainer.branch

    def branch(self, folder):
        fresh = self.loader.state_dict()
        real(self, folder)
        self.loader.load_state_dict(fresh)
        self.batches = iter(self.loader)

    module.Trainer.branch = branch


def branches_again_each_time(module):
    """`resume` taken at its word by a branch that was killed."""
    real = module.newest_checkpoint

    def newest(run_dir):
        own = real(run_dir)
        run = own and module.read_checkpoint(own)[0]
        return None if run and run.resume else own

    module.newest_checkpoint = newest


def branches_into_a_decay(module):
    def branch(self, folder):
        self.load(folder, "a branch may have another schedule and length alone")

    module.Trainer.branch = branch


def jumps_in_silence(module):
    real = module.Trainer.branch

    def branch(self, folder):
        with module.warnings.catch_warnings():
            module.warnings.simplefilter("ignore")
            real(self, folder)

    module.Trainer.branch = branch


def stops_without_saving(module):
    real = module.Trainer.after_step

    def after_step(self):
        real(self)
        if self.stopped and self.step < self.last:
            folder = self.run_dir / "checkpoints" / f"step_{self.step:08d}"
            shutil.rmtree(folder, ignore_errors=True)

    module.Trainer.after_step = after_step


ZOO = {
    name: (copy_with(change), test)
    for name, change, test in (
        (
            "means of micro-batches",
            means_of_micro_batches,
            "test_accumulation_is_one_big_batch",
        ),
        (
            "the short window divided by the planned tokens",
            divides_by_the_planned_tokens,
            "test_a_short_last_window_is_a_step",
        ),
        (
            "tokens per step rounded",
            any_tokens_per_step,
            "test_tokens_per_step_must_come_out",
        ),
        (
            "clipping each parameter",
            clips_each_parameter,
            "test_clipping_is_global_once_and_logged_before",
        ),
        (
            "the norm after clipping",
            logs_the_norm_after_clipping,
            "test_clipping_is_global_once_and_logged_before",
        ),
        (
            "a step with zeroed gradients",
            steps_with_zeros_instead,
            "test_a_step_that_is_not_finite_changes_nothing",
        ),
        (
            "skips counted over the run",
            counts_skips_over_the_whole_run,
            "test_several_in_a_row_stop_the_run",
        ),
        (
            "non-finite weights written",
            writes_what_is_not_finite,
            "test_weights_that_are_not_finite_are_never_written",
        ),
        ("gains decayed", decays_the_gains, "test_every_parameter_is_in_one_group"),
        ("routing by shape", routes_by_shape, "test_every_parameter_is_in_one_group"),
        (
            "the rate counts taken steps",
            rate_counts_taken_steps,
            "test_the_rate_is_a_function_of_the_step",
        ),
        (
            "the schedule ends at the stop",
            schedule_ends_at_the_stop,
            "test_schedule_total_and_stop_are_separate",
        ),
        (
            "bf16 masters",
            bf16_masters,
            "test_masters_are_fp32_and_formats_are_checked",
        ),
        (
            "another schedule's values kept",
            keeps_what_the_last_schedule_set,
            "test_a_schedule_may_set_momentum_and_weight_decay",
        ),
        (
            "shares of shares",
            scales_the_decay_again_and_again,
            "test_a_schedule_may_set_momentum_and_weight_decay",
        ),
        (
            "any mapping for a schedule",
            takes_any_mapping,
            "test_a_mapping_has_known_keys_that_some_group_has",
        ),
        (
            "gains in bf16",
            casts_gains_too,
            "test_masters_in_bf16_are_asked_for_by_name",
        ),
        (
            "a norm in bf16",
            norm_in_the_gradients_dtype,
            "test_the_norm_of_bf16_gradients_is_summed_in_fp32",
        ),
        (
            "a branch with fresh statistics",
            branches_with_fresh_statistics,
            "test_a_branch_takes_the_trunks_next_step",
        ),
        (
            "a branch from the first row",
            branches_from_the_first_row,
            "test_a_branch_takes_the_trunks_next_step",
        ),
        (
            "branched again after a kill",
            branches_again_each_time,
            "test_a_killed_branch_goes_on_with_its_own",
        ),
        (
            "a branch past the decay",
            branches_into_a_decay,
            "test_a_branch_that_would_be_neither_run_is_refused",
        ),
        (
            "a jump in silence",
            jumps_in_silence,
            "test_a_jump_of_the_rate_is_named",
        ),
        ("momenta forgotten", forgets_the_optimizer, "test_resume_is_exact_to_the_bit"),
        (
            "the epoch begun again",
            starts_the_epoch_again,
            "test_resume_is_exact_to_the_bit",
        ),
        (
            "two points for one step",
            keeps_the_old_log,
            "test_a_killed_run_leaves_no_gap_and_no_double_point",
        ),
        (
            "a lost validation",
            never_pays_what_it_owes,
            "test_a_validation_that_was_owed_is_done_first",
        ),
        (
            "written in place",
            writes_in_place,
            "test_a_crash_while_saving_costs_no_checkpoint",
        ),
        (
            "every folder trusted",
            trusts_every_folder,
            "test_incomplete_checkpoints_are_ignored_aloud",
        ),
        (
            "incomplete ones counted",
            counts_the_incomplete,
            "test_retention_counts_whole_ones_and_spares_some",
        ),
        (
            "the resumed one deleted",
            prunes_the_one_it_came_from,
            "test_retention_counts_whole_ones_and_spares_some",
        ),
        (
            "evaluation first",
            evaluates_first,
            "test_the_checkpoint_comes_before_the_evaluation",
        ),
        (
            "wrapper prefixes kept",
            keeps_wrapper_prefixes,
            "test_weights_on_disk_are_plain_and_loading_is_strict",
        ),
        (
            "whatever fits is loaded",
            loads_what_fits,
            "test_weights_on_disk_are_plain_and_loading_is_strict",
        ),
        (
            "any run goes on",
            goes_on_with_any_run,
            "test_another_run_in_the_folder_is_refused",
        ),
        (
            "two processes in one folder",
            lets_anybody_in,
            "test_one_process_at_a_time",
        ),
        ("a number for a lock", locks_by_number, "test_one_process_at_a_time"),
        (
            "sizes for checksums",
            looks_at_sizes_alone,
            "test_a_file_that_was_altered_is_refused",
        ),
        (
            "begun anew over a damaged one",
            begins_anew,
            "test_a_run_never_begins_anew_over_a_damaged_checkpoint",
        ),
        (
            "an edited part in silence",
            edits_in_silence,
            "test_a_part_that_was_edited_is_named",
        ),
        (
            "any schedule taken",
            takes_any_schedule,
            "test_a_schedule_that_is_none_is_refused_at_once",
        ),
        (
            "domains averaged",
            means_of_domains,
            "test_validation_is_weighted_by_tokens_and_counts_bytes",
        ),
        (
            "tokens for bytes",
            counts_tokens_as_bytes,
            "test_validation_is_weighted_by_tokens_and_counts_bytes",
        ),
        (
            "specials scored",
            scores_specials,
            "test_specials_count_neither_loss_nor_bytes",
        ),
        (
            "a sample that takes a batch",
            samples_take_a_batch,
            "test_looking_at_a_run_does_not_change_it",
        ),
        (
            "stopped without saving",
            stops_without_saving,
            "test_a_signal_saves_and_ends_cleanly",
        ),
    )
}
