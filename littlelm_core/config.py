# From chapters/00_config.md by `littlelm book export`: edit the chapter.
"""How a run is described: run files, parts and the registry.

A run is one TOML file. It names every part that can be swapped (`use = "gqa"`,
`use = "pkg.mod:Name"` or `use = "my_code.py:Name"`) and the keys of that part. Without
this a change of optimizer would be an edit of the trainer; with it, it is one line.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import importlib.resources
import importlib.util
import inspect
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    model_validator,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Count",
    "DataConfig",
    "DataError",
    "KINDS",
    "Kind",
    "Limit",
    "LittleLMError",
    "Part",
    "ROLES",
    "RUNS",
    "RunConfig",
    "build",
    "check_part",
    "load_object",
    "load_run",
    "nearest",
    "parse_override",
    "register",
    "resolve",
]


# ---- Errors in one line


class LittleLMError(ValueError):
    """An error whose message names the cause and the mend in one line."""


class ConfigError(LittleLMError):
    """A run file, an override or a part that cannot be used as written."""


class DataError(LittleLMError):
    """Text, a shard or a folder of data that cannot be used."""


class CheckpointError(LittleLMError):
    """A checkpoint that is missing, incomplete or made by another model."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest valid name, or the list of all."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (valid: {', '.join(names)})" if names else ""


# ---- Kinds of parts


class Kind(NamedTuple):
    """One kind of part: what it is when a run says nothing, and how it is called."""

    default: str
    modules: tuple[str, ...]  # looked through, in order, for registered names
    given: str  # the arguments that the trainer brings, those after * by name
    shared: tuple[str, ...] = ()  # keys of every part of the kind, kept by a swap

    @property
    def signature(self) -> str:
        """How a part is called; **keys come from its table in the run file."""
        return f"({', '.join(filter(None, (self.given, *self.shared, '**keys')))})"


KINDS: dict[str, Kind] = {
    "tokenizer": Kind("bpe", ("tokenizer",), "texts", ("vocab_size",)),
    "attention": Kind(
        "gqa", ("attention",), "dim, heads, kv_heads, *, head_dim, qk_norm, window"
    ),
    "ffn": Kind("swiglu", ("blocks",), "dim, ffn_dim"),
    "norm": Kind("rmsnorm", ("blocks",), "dim, *, eps"),
    "block": Kind("llama", ("blocks",), "cfg, layer"),
    "model": Kind("llama", ("model",), "cfg"),  # its table fills in the ModelConfig
    "loss": Kind("chunked", ("model",), "x, weight, targets, *, softcap, reduction"),
    "optimizer": Kind("torch.optim:AdamW", ("optim",), "params"),
    "schedule": Kind("cosine", ("schedule",), "step", ("total", "warmup")),
    "precision": Kind(
        "autocast", ("trainer", "fp8"), "", ("dtype", "compile", "masters")
    ),
    "mixture": Kind("proportional", ("mixture",), "sources, *, seed, total"),
    "loader": Kind(
        "packed", ("shards",), "shards, batch_rows, row_len, seed, rank, world"
    ),
    "callback": Kind("", ("trainer",), ""),  # none unless the run names one
}

# Every parameter of a model has one of these roles; an optimizer section may hold a
# table of keys for each.
ROLES = ("matrix", "embedding", "head", "value_embeddings", "norm", "scalars")


# ---- Register and resolve

_REGISTRY: dict[tuple[str, str], Any] = {}


def register(kind: str, name: str) -> Callable[[Any], Any]:
    """Register a class or function as the part `name` of `kind` (a decorator).

    Raises ConfigError for an unknown kind, and for a name that another part took.
    A definition in a notebook (`__main__`) may stand in for the module's and back.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")

    def add(part: Any) -> Any:
        old = _REGISTRY.get((kind, name), part)
        there, here = (f"{p.__module__}:{p.__qualname__}" for p in (old, part))
        if there != here and "__main__" not in (old.__module__, part.__module__):
            raise ConfigError(f"{kind} {name!r} is taken by {there}: name yours anew")
        _REGISTRY[kind, name] = part
        return part

    return add


def _import_file(path: Path) -> types.ModuleType:
    """Run a Python file as a module: once, and again when its content has changed."""
    source = path.read_bytes()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    name = f"littlelm_part_{path.stem}_{digest}"
    loaded = sys.modules.get(name)
    if loaded is not None and vars(loaded).get("_source") == source:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look themselves up
    try:
        # Not the loader's exec_module: its cache misses an edit within one second.
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    module._source = source
    return module


def load_object(use: str) -> Any:
    """Return what "pkg.mod:Name" or "file.py:Name" names; a whole module without Name.

    Raises ConfigError: no such file, an import that fails, a name that is not there.
    """
    where, _, name = use.rpartition(":") if not use.endswith(".py") else (use, "", "")
    where, name = (where, name) if where else (use, "")
    path = Path(where).expanduser().resolve()
    in_file = where.endswith(".py")
    if in_file and not path.is_file():
        raise ConfigError(f"no file {path}: a part's path is relative to its run file")
    try:
        module = _import_file(path) if in_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where} does not import: {reason}") from error
    if name and not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{where} has no {name}{nearest(name, public)}")
    return getattr(module, name) if name else module


def resolve(kind: str, use: str) -> Any:
    """Return the object that `use` names for this kind of part.

    use: a registered name ("gqa"), "pkg.mod:Name", or "file.py:Name" (a relative path
    is taken from the working directory; `load_run` has made it absolute already).
    Modules are imported only when one of their names is asked for.
    Raises ConfigError: unknown kind or name, a file or module that does not import.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")
    if ":" in use:
        return load_object(use)
    if use.endswith(".py"):
        raise ConfigError(f"{kind} = {use!r} lacks the name in the file: {use}:Name")
    here = _home_modules(kind)
    if (kind, use) not in _REGISTRY:
        for module in here:
            importlib.import_module(module)
    if (kind, use) not in _REGISTRY:
        close = nearest(use, [n for k, n in _REGISTRY if k == kind])
        raise ConfigError(
            f"no {kind} is called {use!r}{close or ' in the chapters written so far'}"
        )
    return _REGISTRY[kind, use]


def _home_modules(kind: str) -> list[str]:
    """Return those modules of a kind whose chapter is in this package."""
    names = [f"littlelm_core.{m}" for m in KINDS[kind].modules]
    return [n for n in names if importlib.util.find_spec(n) is not None]


# ---- The keys of a part


def _frozen(value: Any, where: str = "") -> Any:
    """Return TOML's lists as tuples; refuse numbers that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} = {value} is no number to train with")
    if isinstance(value, list | tuple):
        return tuple(_frozen(v, where) for v in value)
    if isinstance(value, Mapping):
        return {k: _frozen(v, f"{where}.{k}".strip(".")) for k, v in value.items()}
    return value


class _Table(BaseModel):
    """A table of a run file: frozen, and strict, so that "3" is never a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _freeze(cls, table: Any) -> Any:
        return _frozen(table)


class Part(_Table, extra="allow"):
    """`use` names the part; every other key of its table belongs to the part."""

    use: str

    @property
    def options(self) -> dict[str, Any]:
        """A copy of the keys beside `use`, as they are handed to the part."""
        return copy.deepcopy(self.model_extra or {})


# Fields of a ModelConfig that other tables of the run fill in.
_FROM_ELSEWHERE = {*KINDS, "vocab_size", "part_options"}


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a run file's value is of a type; an array may stand for a tuple or list.

    Strict, so that "3" is never a number; JSON, since that has arrays only as TOML.
    """
    config = ConfigDict(arbitrary_types_allowed=True, strict=True)
    try:
        TypeAdapter(hint, config=config).validate_json(json.dumps(value))
    except PydanticUserError:  # a type that pydantic cannot check
        return True
    except (ValidationError, TypeError):  # TypeError: a date, which JSON lacks
        return False
    return True


def _check_keys(kind: str, where: str, takes: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that `takes` does not take, or a wrong type."""
    parameters = inspect.signature(takes).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    try:
        hints = typing.get_type_hints(
            takes.__init__ if inspect.isclass(takes) else takes
        )
    except (NameError, TypeError):  # hints that only a type checker can read
        hints = {}
    valid = set(parameters) - set(KINDS[kind].given.split(", "))
    valid -= _FROM_ELSEWHERE if kind == "model" else set()
    roles = ROLES if kind == "optimizer" and where == kind else ()
    for key, value in options.items():
        if key in roles and isinstance(value, Mapping):
            _check_keys(kind, f"{where}.{key}", takes, value)
        elif key in roles:
            raise ConfigError(f"{where}.{key} = {value!r} is not a table of keys")
        elif key in parameters and key not in valid:
            raise ConfigError(
                f"{where}.{key} is no key of this table: the trainer sets it"
            )
        elif key not in valid:
            raise ConfigError(
                f"unknown key {where}.{key}{nearest(key, {*valid, *roles})}"
            )
        elif key in hints and not _is_a(value, hints[key]):
            wanted = inspect.formatannotation(hints[key])
            raise ConfigError(f"{where}.{key} = {value!r} is not of type {wanted}")


def _check_call(kind: str, part: Part, takes: Any) -> None:
    """Raise ConfigError unless `takes` can be called as every part of its kind is."""
    first, _, named = KINDS[kind].given.partition("*, ")
    positional, by_name = (list(filter(None, g.split(", "))) for g in (first, named))
    signature = inspect.signature(takes)
    try:
        bound = signature.bind_partial(*positional, **dict.fromkeys(by_name)).arguments
    except TypeError as error:
        called = f"it is called with {KINDS[kind].signature}"
        raise ConfigError(f"{kind} {part.use!r}: {error}; {called}") from error
    if kind != "optimizer":  # its keys may stand in each role's own table
        _check_required(kind, takes, {*bound, *part.options, "total"})


def _check_required(kind: str, takes: Any, has: set[str]) -> None:
    """Raise ConfigError when `takes` needs a key that nobody gives."""
    for name, parameter in inspect.signature(takes).parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic and name not in has:
            raise ConfigError(f"the run lacks the key {kind}.{name}")


def check_part(kind: str, part: Part) -> None:
    """Raise ConfigError when a part does not resolve or its keys do not fit it.

    A registered name whose chapter is not in this package (a chapter runs with only the
    earlier modules present) is left to whoever builds the part.
    """
    here = _home_modules(kind)
    try:
        takes = resolve(kind, part.use)
    except ConfigError:
        named = ":" not in part.use and not part.use.endswith(".py")
        if named and len(here) < len(KINDS[kind].modules):
            return
        raise
    try:
        inspect.signature(takes)
    except TypeError as error:
        raise ConfigError(f"{kind} {part.use!r} can't be called: {error}") from error
    except ValueError:  # built in, without a signature to check against
        return
    _check_call(kind, part, takes)
    if kind != "model":
        _check_keys(kind, kind, takes, part.options)
    elif here:  # its table fills in a ModelConfig
        takes = importlib.import_module(here[0]).ModelConfig
        _check_keys(kind, kind, takes, part.options)
        _check_required(kind, takes, {*part.options, *_FROM_ELSEWHERE})


def build(kind: str, part: Part, *args: Any, **kwargs: Any) -> Any:
    """Call the part that a run names with the trainer's arguments and its own keys.

    Raises ConfigError when the part cannot be called as its kind is, its keys do not
    fit, or it refuses them itself (a negative learning rate).
    """
    check_part(kind, part)
    try:
        return resolve(kind, part.use)(*args, **kwargs, **part.options)
    except LittleLMError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{kind} {part.use!r} refuses its keys: {reason}") from error


# ---- The run


class DataConfig(_Table):
    """Where the tokens come from."""

    source: str = "default"  # the default corpus, or a folder from `data prepare`


def _positive(value: float) -> float:
    if value != -1 and value <= 0:
        raise ValueError("must be above 0, or -1 for off")
    return value


Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, AfterValidator(_positive)]  # -1 is off


def _part(kind: str) -> Any:
    return Part(use=KINDS[kind].default)


class RunConfig(_Table):
    """A whole run. Frozen; an interval or limit of -1 is off.

    Steps are optimizer steps; rows are per micro-batch and per GPU. The tokens of one
    step are rows * context * grad_accum * GPUs and must equal tokens_per_step if given.
    """

    name: str
    run_dir: Annotated[str, Field(min_length=1)]
    resume: str = ""  # another run's checkpoint (or folder) to start from: a branch
    seed: int = 1
    steps: Count  # planned optimizer steps; schedule.total is this unless it is set
    stop_step: Limit = -1  # stop before the schedule ends
    rows: Count
    grad_accum: Limit = -1  # -1: from tokens_per_step, or 1
    tokens_per_step: Limit = -1
    clip: Annotated[float, AfterValidator(_positive)] = 1.0  # global gradient norm
    max_skipped: Count = 5  # non-finite steps in a row before the run stops
    checkpoint_every: Limit = -1  # evaluated steps and the last one write one too
    checkpoints_kept: Count = 2
    validate_every: Limit = -1  # the last step always validates
    validation_tokens: Limit = -1  # of each domain; -1: all
    sample_every: Limit = -1
    eval_every: Limit = -1  # CORE's tasks; if it is on, the last step evaluates too
    eval_max_per_task: Limit = -1  # only the first so many items of each; -1: all
    eval_tasks: str = ""  # their folder; "": CORE if it is prepared, else mini CORE

    data: DataConfig = DataConfig()
    tokenizer: Part = _part("tokenizer")
    model: Part = _part("model")
    attention: Part = _part("attention")
    ffn: Part = _part("ffn")
    norm: Part = _part("norm")
    block: Part = _part("block")
    loss: Part = _part("loss")
    optimizer: Part = _part("optimizer")
    schedule: Part = _part("schedule")
    precision: Part = _part("precision")
    mixture: Part = _part("mixture")
    loader: Part = _part("loader")
    callback: tuple[Part, ...] = ()

    def parts(self) -> list[tuple[str, Part]]:
        """Return (kind, part) for every part of the run, callbacks last."""
        single = [(k, getattr(self, k)) for k in KINDS if k != "callback"]
        return single + [("callback", part) for part in self.callback]


# ---- Load a run file

RUNS = Path(str(importlib.resources.files("littlelm_core"))) / "runs"


def _anchor_parts(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make every `use = "file.py:Name"` absolute, seen from the file that says it."""

    def anchor(part: Any) -> Any:
        if isinstance(part, list):
            return [anchor(p) for p in part]
        part = {"use": part} if isinstance(part, str) else part  # optimizer = "adam"
        use = str(part.get("use", "")) if isinstance(part, dict) else ""
        where, _, name = use.rpartition(":")
        if where.endswith(".py"):
            path = (base / Path(where).expanduser()).resolve()
            return {**part, "use": f"{path}:{name}"}
        return part

    return {k: anchor(v) if k in KINDS else v for k, v in table.items()}


def _find_run(name: Any, base: Path) -> Path:
    known = [p.stem for p in RUNS.glob("*.toml")]
    if str(name) in known:
        return RUNS / f"{name}.toml"
    if not isinstance(name, str | Path):
        raise ConfigError(f"extends = {name!r} is not the name of one run")
    path = base / Path(name).expanduser()
    if path.suffix != ".toml":
        raise ConfigError(f"no run is called {str(name)!r}{nearest(str(name), known)}")
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.toml")]
        raise ConfigError(f"no run file {path}{nearest(path.name, beside + known)}")
    return path.resolve()


def _merge(
    old: Mapping[str, Any], new: Mapping[str, Any], top: bool = True
) -> dict[str, Any]:
    """Lay `new` over `old`, table by table.

    Where a part's `use` changes, the old part's own keys go: they mean nothing to
    the new one. Keys that every part of the kind takes stay, and all of the model's.
    """
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if top and key in KINDS and key != "model":
                use = before.get("use", KINDS[key].default)
                if value.get("use", use) != use:
                    before = {k: before[k] for k in KINDS[key].shared if k in before}
            value = _merge(before, value, top=False)
        merged[key] = value
    return merged


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a run file on top of everything that it extends."""
    if path in seen:
        chain = " -> ".join(p.stem for p in (*seen, path))
        raise ConfigError(f"{path} extends itself: {chain}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    table = _anchor_parts(table, path.parent)
    if "extends" not in table:
        return table
    parent = _layers(_find_run(table.pop("extends"), path.parent), (*seen, path))
    # A child with its parent's folder would resume the parent's checkpoints.
    own = ("name", "run_dir", "resume")
    parent = {k: v for k, v in parent.items() if k not in own}
    return _merge(parent, table)


def parse_override(text: str) -> dict[str, Any]:
    """Turn "optimizer.matrix.lr=0.02" into a nested table.

    The value is read as TOML; what is not TOML is a string ("fp32", "my.py:Mine"), and
    a half-written number becomes one too, which the type of its key then refuses.
    """
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"override {text!r} is not of the form key=value")
    try:
        (parsed,) = tomllib.loads(f"value = {value}").values()
    except ValueError:  # not TOML, or more than one line of it
        parsed = value.strip()
    for name in reversed(names):
        parsed = {name: parsed}
    return parsed


def _explain(error: ValidationError, name: str, table: Mapping[str, Any]) -> str:
    """Put the first of pydantic's complaints into one line with the nearest key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        fields = (DataConfig if first["loc"][0] == "data" else RunConfig).model_fields
        tables = [t for t, keys in table.items() if isinstance(keys, Mapping)]
        inside = [f"{t}.{key}" for t in tables if key in table[t]]
        close = f" (did you mean {inside[0]!r}?)" if inside else ""
        close = close or nearest(str(first["loc"][-1]), fields)
        return f"unknown key {key} in run {name!r}{close}"
    if first["type"] == "missing":
        return f"run {name!r} lacks the key {key}"
    reason = first["msg"].removeprefix("Value error, ")
    given = f"{key} = {first['input']!r}: " if key else ""
    return f"run {name!r}: {given}{reason}"


def load_run(path_or_name: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load a run by name ("tiny") or from a .toml file, with overrides on top.

    overrides: "key=value" lines, such as "steps=100" or "optimizer.matrix.lr=0.02".
    Raises ConfigError: unknown run or key (with the nearest valid one), a value of the
    wrong type, a part that does not resolve.
    """
    path = _find_run(path_or_name, Path())
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = _merge(changes, parse_override(text), top=False)
    table = _merge(_layers(path), _anchor_parts(changes, Path()))
    table.setdefault("name", path.stem)
    table.setdefault("run_dir", f"runs/{table['name']}")
    for kind in KINDS:
        if kind != "callback" and isinstance(table.get(kind), Mapping):
            table[kind] = {"use": KINDS[kind].default, **table[kind]}
    if isinstance(table.get("callback"), Mapping):
        table["callback"] = [table["callback"]]
    try:
        run = RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, path.stem, table)) from error
    for kind, part in run.parts():
        check_part(kind, part)
    return run
