"""Wrong versions of chapter 00: a copy of the module with one function replaced."""

import importlib.util
import sys
import tomllib
from pathlib import Path

from pydantic import BaseModel

from littlelm_core import config


def copy_with(**replaced):
    """A fresh copy of the module, whose own functions then call the replaced ones."""
    name = f"littlelm_zoo_config_{'_'.join(replaced)}_{len(_COPIES)}"
    spec = importlib.util.spec_from_file_location(name, config.__file__)
    module = importlib.util.module_from_spec(spec)
    _COPIES.append(module)
    sys.modules[name] = module  # where pydantic looks its annotations up
    spec.loader.exec_module(module)
    module._REGISTRY = config._REGISTRY  # where the other chapters' parts are
    for key, make in replaced.items():
        setattr(module, key, make(module))
    return module


_COPIES = []


def merge_keeps_every_key(module):
    def merge(old, new, top=True):
        merged = dict(old)
        for key, value in new.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if both else value
        return merged

    return merge


def merge_drops_shared_keys(module):
    def merge(old, new, top=True):
        merged = dict(old)
        for key, value in new.items():
            before = merged.get(key)
            if isinstance(value, dict) and isinstance(before, dict):
                if top and key in module.KINDS and "use" in value and key != "model":
                    before = {}
                value = merge(before, value, top=False)
            merged[key] = value
        return merged

    return merge


def merge_is_shallow(module):
    def merge(old, new, top=True):
        return {**old, **new}

    return merge


def override_guesses_numbers(module):
    def parse(text):
        key, _, value = text.partition("=")
        try:
            parsed = int("".join(c for c in value if c in "-0123456789"))
        except ValueError:
            parsed = value
        for name in reversed(key.split(".")):
            parsed = {name: parsed}
        return parsed

    return parse


def override_cuts_at_the_last_equals(module):
    def parse(text):
        key, _, value = text.rpartition("=")
        return config.parse_override(f"{key.partition('=')[0]}={value}")

    return parse


def paths_from_the_working_directory(module):
    def anchor(table, base):
        return config._anchor_parts(table, Path.cwd())

    return anchor


def paths_left_relative(module):
    def anchor(table, base):
        return table

    return anchor


def no_check_of_keys(module):
    return lambda kind, where, takes, options: None


def names_but_no_types(module):
    return lambda value, hint: True


def no_check_of_arguments(module):
    return lambda kind, part, takes: None


def numbers_that_are_none(module):
    def frozen(value, where=""):
        if isinstance(value, list | tuple):
            return tuple(frozen(v) for v in value)
        if isinstance(value, dict):
            return {k: frozen(v) for k, v in value.items()}
        return value

    return frozen


def inner_lists_stay_lists(module):
    def frozen(table, where=""):
        if not isinstance(table, dict):
            return table
        return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}

    return frozen


def lenient_tables(module):
    class RunConfig(module.RunConfig, extra="ignore"):
        pass

    return RunConfig


def coerced_values(module):
    class RunConfig(module.RunConfig, strict=False):
        pass

    return RunConfig


def editable(module):
    class RunConfig(module.RunConfig, frozen=False):
        pass

    return RunConfig


def options_are_the_run_itself(module):
    class Part(module.Part):
        @property
        def options(self):
            return self.model_extra

    return Part


def run_with_open_options(module):
    part = options_are_the_run_itself(module)

    class RunConfig(module.RunConfig):
        optimizer: part

    return RunConfig


def cycles_end_quietly(module):
    def layers(path, seen=()):
        if path in seen:
            return {}
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        table = module._anchor_parts(table, path.parent)
        parent = table.pop("extends", None)
        if parent is None:
            return table
        found = module._find_run(parent, path.parent)
        return module._merge(layers(found, (*seen, path)), table)

    return layers


def parents_folder_is_inherited(module):
    def layers(path, seen=()):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        table = module._anchor_parts(table, path.parent)
        if "extends" not in table:
            return table
        found = module._find_run(table.pop("extends"), path.parent)
        return module._merge(layers(found), table)

    return layers


def files_loaded_each_time(module):
    def load(path):
        spec = importlib.util.spec_from_file_location("own", path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return load


def files_loaded_once_for_ever(module):
    loaded = {}

    def load(path):
        if path not in loaded:
            loaded[path] = config._import_file(path)
        return loaded[path]

    return load


def last_registration_wins(module):
    def register(kind, name):
        if kind not in module.KINDS:
            raise module.ConfigError(f"unknown kind {kind!r} (attention?)")

        def add(part):
            module._REGISTRY[kind, name] = part
            return part

        return add

    return register


def zero_means_off(module):
    fields = {
        name: (int, field.default)
        for name, field in module.RunConfig.model_fields.items()
        if field.annotation is int and field.default == -1
    }
    assert len(fields) > 4
    namespace = {"__annotations__": {n: int for n in fields}}
    namespace |= {n: -1 for n in fields}
    namespace["__module__"] = __name__
    return type(BaseModel)("RunConfig", (module.RunConfig,), namespace)


def unhelpful_nearest(module):
    return lambda word, valid: ""


ZOO = {
    "a new part keeps the old part's keys": (
        copy_with(_merge=merge_keeps_every_key),
        "test_a_new_part_drops_the_old_ones_keys",
    ),
    "a new part loses shared keys, and naming the same part is a change": (
        copy_with(_merge=merge_drops_shared_keys),
        "test_a_new_part_drops_the_old_ones_keys",
    ),
    "a table in a child replaces the parent's": (
        copy_with(_merge=merge_is_shallow),
        "test_extends_lays_one_file_over_another",
    ),
    "10k is read as 10": (
        copy_with(parse_override=override_guesses_numbers),
        "test_a_half_parsed_number_is_refused",
    ),
    "an override is cut at its last equals sign": (
        copy_with(parse_override=override_cuts_at_the_last_equals),
        "test_overrides_come_last_and_reach_inside",
    ),
    "a part's path is taken from the working directory": (
        copy_with(_anchor_parts=paths_from_the_working_directory),
        "test_a_file_is_found_beside_the_run_that_names_it",
    ),
    "a part's path stays relative": (
        copy_with(_anchor_parts=paths_left_relative),
        "test_a_file_is_found_beside_the_run_that_names_it",
    ),
    "a part's keys are not looked at": (
        copy_with(_check_keys=no_check_of_keys),
        "test_an_unknown_key_names_the_nearest_one",
    ),
    "a part is called before its arguments are looked at": (
        copy_with(_check_call=no_check_of_arguments),
        "test_a_part_must_take_what_its_kind_is_given",
    ),
    "a part's keys are checked by name alone": (
        copy_with(_is_a=names_but_no_types),
        "test_a_wrong_type_names_the_key",
    ),
    "not-a-number is a number": (
        copy_with(_frozen=numbers_that_are_none),
        "test_numbers_that_are_none_are_refused",
    ),
    "arrays inside a table come back from JSON as lists": (
        copy_with(_frozen=inner_lists_stay_lists),
        "test_a_run_comes_back_equal_from_json",
    ),
    "unknown keys are ignored": (
        copy_with(RunConfig=lenient_tables),
        "test_an_unknown_key_names_the_nearest_one",
    ),
    '"10" is read as a number': (
        copy_with(RunConfig=coerced_values),
        "test_a_wrong_type_names_the_key",
    ),
    "a run can be changed": (copy_with(RunConfig=editable), "test_a_run_is_frozen"),
    "options hand out the run's own table": (
        copy_with(RunConfig=run_with_open_options),
        "test_a_run_is_frozen",
    ),
    "a cycle of extends ends quietly": (
        copy_with(_layers=cycles_end_quietly),
        "test_a_run_that_extends_itself_is_refused",
    ),
    "a child trains in its parent's folder": (
        copy_with(_layers=parents_folder_is_inherited),
        "test_a_child_does_not_share_its_parents_folder",
    ),
    "a part's file is run again for each layer": (
        copy_with(_import_file=files_loaded_each_time),
        "test_a_file_is_loaded_once_and_again_when_edited",
    ),
    "an edited file is not seen": (
        copy_with(_import_file=files_loaded_once_for_ever),
        "test_a_file_is_loaded_once_and_again_when_edited",
    ),
    "the last registration of a name wins": (
        copy_with(register=last_registration_wins),
        "test_a_name_is_registered_once",
    ),
    "0 is off": (
        copy_with(RunConfig=zero_means_off),
        "test_minus_one_is_off_and_zero_is_refused",
    ),
    "an unknown key without the nearest one": (
        copy_with(nearest=unhelpful_nearest),
        "test_an_unknown_key_names_the_nearest_one",
    ),
}
