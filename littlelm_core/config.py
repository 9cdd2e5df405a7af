"""How a run is described: run files, parts and the registry.

A run is one TOML file. It names every part that can be swapped (`use = "gqa"`,
`use = "pkg.mod:Name"` or `use = "my_code.py:Name"`) and the keys of that part. Without
this a change of optimizer would be an edit of the trainer; with it, it is one line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.resources
import importlib.util
import inspect
import sys
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)

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
    signature: str  # how the trainer calls it; **keys come from the run file
    shared: tuple[str, ...] = ()  # keys of every part of the kind, kept by a swap
    keys_of: str | None = None  # what takes the keys, when not the part itself


KINDS: dict[str, Kind] = {
    "tokenizer": Kind(
        "bpe", ("tokenizer",), "(texts, vocab_size, **keys)", ("vocab_size",)
    ),
    "attention": Kind(
        "gqa",
        ("attention",),
        "(dim, heads, kv_heads, head_dim, qk_norm, window, **keys)",
    ),
    "ffn": Kind("swiglu", ("blocks",), "(dim, ffn_dim, **keys)"),
    "norm": Kind("rmsnorm", ("blocks",), "(dim, eps, **keys)"),
    "block": Kind("llama", ("blocks",), "(cfg, layer, **keys)"),
    "model": Kind("llama", ("model",), "(cfg)", ("*",), "model:ModelConfig"),
    "loss": Kind(
        "chunked",
        ("model",),
        "(x_NC, weight_VC, targets_N, softcap, reduction, **keys)",
    ),
    "optimizer": Kind("torch.optim:AdamW", ("optim",), "(groups, **keys)"),
    "schedule": Kind(
        "cosine", ("schedule",), "(step, total, **keys)", ("total", "warmup")
    ),
    "precision": Kind(
        "autocast", ("trainer", "fp8"), "(dtype, compile, **keys)", ("dtype", "compile")
    ),
    "mixture": Kind("proportional", ("mixture",), "(sources, weights, seed, **keys)"),
    "loader": Kind(
        "packed",
        ("shards",),
        "(shards, batch_rows, row_len, seed, rank, world, **keys)",
    ),
    "callback": Kind("", ("trainer",), "(**keys)"),  # none unless the run names one
}

# Every parameter of a model has one of these roles; an optimizer section may hold a
# table of keys for each.
ROLES = ("matrix", "embedding", "head", "value_embeddings", "norm", "scalars")

# ---- Register and resolve

_REGISTRY: dict[tuple[str, str], object] = {}


def register(kind: str, name: str) -> Callable[[Any], Any]:
    """Register a class or function as the part `name` of `kind` (a decorator).

    Raises ConfigError for an unknown kind, and for a name that another module took.
    A definition in a notebook (`__main__`) may stand in for the module's and back.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")

    def add(part: Any) -> Any:
        old = _REGISTRY.get((kind, name))
        modules = {getattr(old, "__module__", None), getattr(part, "__module__", None)}
        if old is not None and len(modules) == 2 and "__main__" not in modules:
            raise ConfigError(
                f"{kind} {name!r} is taken by {old.__module__}: choose another name"
            )
        _REGISTRY[kind, name] = part
        return part

    return add


def _import_file(path: Path) -> Any:
    """Import a Python file as a module, once for each path and content."""
    if not path.is_file():
        raise ConfigError(f"no file {path}: a part's path is relative to its run file")
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()
    name = f"littlelm_part_{path.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} does not import: {type(error).__name__}: {error}"
        ) from error
    return module


def resolve(kind: str, use: str) -> Any:
    """Return the object that `use` names for this kind of part.

    use: a registered name ("gqa"), "pkg.mod:Name", or "file.py:Name" (a relative path
    is taken from the working directory; `load_run` has made it absolute already).
    Modules are imported only when one of their names is asked for.
    Raises ConfigError: unknown kind or name, a file or module that does not import.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")
    where, colon, name = use.rpartition(":")
    if colon:
        if where.endswith(".py"):
            module = _import_file(Path(where).expanduser().resolve())
        else:
            try:
                module = importlib.import_module(where)
            except Exception as error:
                raise ConfigError(
                    f"{kind}.use = {use!r}: {where} does not import: {error}"
                ) from error
        if not hasattr(module, name):
            public = [n for n in vars(module) if not n.startswith("_")]
            raise ConfigError(
                f"{kind}.use = {use!r}: {where} has no {name}{nearest(name, public)}"
            )
        return getattr(module, name)
    if (kind, use) not in _REGISTRY:
        for module in _home_modules(kind):
            importlib.import_module(module)
    if (kind, use) not in _REGISTRY:
        known = [n for k, n in _REGISTRY if k == kind]
        if len(_home_modules(kind)) < len(KINDS[kind].modules) and not known:
            raise ConfigError(
                f"{kind} {use!r} belongs to a chapter that is not in this version: "
                f'name your own with {kind}.use = "file.py:Name"'
            )
        raise ConfigError(f"no {kind} is called {use!r}{nearest(use, known)}")
    return _REGISTRY[kind, use]


def _home_modules(kind: str) -> list[str]:
    """Return those modules of a kind whose chapter is in this package."""
    names = [f"littlelm_core.{m}" for m in KINDS[kind].modules]
    return [n for n in names if importlib.util.find_spec(n) is not None]


# ---- The keys of a part


class Part(BaseModel):
    """`use` names the part; every other key of its table belongs to the part."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    use: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `use`, as they are handed to the part."""
        return dict(self.model_extra or {})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _check_keys(kind: str, where: str, takes: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that `takes` does not take, or a wrong type."""
    parameters = inspect.signature(takes).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    hints = typing.get_type_hints(takes.__init__ if inspect.isclass(takes) else takes)
    for key, value in options.items():
        if kind == "optimizer" and key in ROLES and isinstance(value, Mapping):
            _check_keys(kind, f"{where}.{key}", takes, value)
        elif key not in parameters:
            valid = set(parameters) - {"self", "cfg", "groups", "params"}
            raise ConfigError(f"unknown key {where}.{key}{nearest(key, valid)}")
        elif key in hints:
            adapter = TypeAdapter(
                hints[key], config=ConfigDict(arbitrary_types_allowed=True, strict=True)
            )
            try:
                adapter.validate_python(_tuples(value))
            except ValidationError as error:
                wanted = inspect.formatannotation(hints[key])
                raise ConfigError(
                    f"{where}.{key} = {value!r} is not of type {wanted}"
                ) from error


def check_part(kind: str, part: Part) -> None:
    """Raise ConfigError when a part does not resolve or its keys do not fit it.

    A registered name whose chapter is not in this package (a chapter runs with only the
    earlier modules present) is left to whoever builds the part.
    """
    complete = len(_home_modules(kind)) == len(KINDS[kind].modules)
    try:
        takes = resolve(kind, part.use)
    except ConfigError:
        if ":" not in part.use and not complete:
            return
        raise
    if KINDS[kind].keys_of:
        module, name = KINDS[kind].keys_of.split(":")
        takes = getattr(importlib.import_module(f"littlelm_core.{module}"), name)
    _check_keys(kind, kind, takes, part.options)


def build(kind: str, part: Part, *args: Any, **kwargs: Any) -> Any:
    """Call the part that a run names with the trainer's arguments and its own keys."""
    check_part(kind, part)
    return resolve(kind, part.use)(*args, **kwargs, **part.options)


# ---- The run


class DataConfig(BaseModel):
    """Where the tokens come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = "default"  # the default corpus, or a folder from `data prepare`


def _part(kind: str) -> Any:
    return Part(use=KINDS[kind].default)


class RunConfig(BaseModel):
    """A whole run. Frozen; an interval or limit of -1 is off.

    Steps are optimizer steps; rows are per micro-batch and per GPU. The tokens of one
    step are rows * context * grad_accum * GPUs and must equal tokens_per_step if given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    run_dir: str
    seed: int = 1
    steps: int  # planned optimizer steps; schedule.total is this unless it is set
    stop_step: int = -1  # stop before the schedule ends
    rows: int
    grad_accum: int = -1  # -1: from tokens_per_step, or 1
    tokens_per_step: int = -1
    clip: float = 1.0  # largest global gradient norm
    max_skipped: int = 5  # non-finite steps in a row before the run stops
    checkpoint_every: int = -1  # the last step always writes one
    checkpoints_kept: int = 2
    validate_every: int = -1  # the last step always validates
    validation_tokens: int = -1  # of each domain; -1: all
    sample_every: int = -1

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

    @model_validator(mode="after")
    def _sizes(self) -> RunConfig:
        for key in ("steps", "rows", "checkpoints_kept", "max_skipped"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)} must be at least 1")
        for key in (
            "stop_step", "grad_accum", "tokens_per_step", "checkpoint_every",
            "validate_every", "validation_tokens", "sample_every",
        ):  # fmt: skip
            value = getattr(self, key)
            if value != -1 and value < 1:
                raise ValueError(f"{key} = {value} must be at least 1, or -1 for off")
        if self.clip != -1 and not self.clip > 0:
            raise ValueError(f"clip = {self.clip} must be above 0, or -1 for off")
        return self

    def parts(self) -> list[tuple[str, Part]]:
        """Return (kind, part) for every part of the run, callbacks last."""
        single = [(k, getattr(self, k)) for k in KINDS if k != "callback"]
        return single + [("callback", part) for part in self.callback]


# ---- Load a run file

RUNS = Path(str(importlib.resources.files("littlelm_core"))) / "runs"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return _anchor_parts(table, path.parent)


def _anchor_parts(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make every `use = "file.py:Name"` absolute, seen from the file that says it."""
    for kind in KINDS:
        section = table.get(kind)
        if isinstance(section, str):  # optimizer = "adam" is short for its use
            table[kind] = section = {"use": section}
        for part in section if isinstance(section, list) else [section]:
            use = part.get("use") if isinstance(part, dict) else None
            where, colon, name = (
                use.rpartition(":") if isinstance(use, str) else 3 * ("",)
            )
            if colon and where.endswith(".py"):
                part["use"] = f"{(base / Path(where).expanduser()).resolve()}:{name}"
    return table


def _find_run(path_or_name: str | Path, base: Path) -> Path:
    path = base / Path(path_or_name).expanduser()
    if path.suffix == ".toml":
        if path.is_file():
            return path.resolve()
        raise ConfigError(f"no run file {path}")
    named = RUNS / f"{path_or_name}.toml"
    if named.is_file():
        return named
    known = [p.stem for p in RUNS.glob("*.toml")]
    raise ConfigError(
        f"no run is called {path_or_name!r}{nearest(str(path_or_name), known)}"
    )


def _merge(
    old: Mapping[str, Any], new: Mapping[str, Any], top: bool = True
) -> dict[str, Any]:
    """Lay `new` over `old`, table by table.

    Where a part's `use` changes, the old part's own keys go: they mean nothing to
    the new one. Keys that every part of the kind takes stay.
    """
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if top and key in KINDS:
                use = before.get("use", KINDS[key].default)
                if value.get("use", use) != use and "*" not in KINDS[key].shared:
                    before = {k: before[k] for k in KINDS[key].shared if k in before}
            merged[key] = _merge(before, value, top=False)
        else:
            merged[key] = value
    return merged


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a run file on top of everything that it extends."""
    if path in seen:
        raise ConfigError(
            f"{path} extends itself: " + " -> ".join(p.stem for p in seen)
        )
    table = _read_toml(path)
    parent = table.pop("extends", None)
    if parent is None:
        return table
    return _merge(_layers(_find_run(parent, path.parent), (*seen, path)), table)


def parse_override(text: str) -> dict[str, Any]:
    """Turn "optimizer.matrix.lr=0.02" into a nested table.

    The value is read as TOML; what is not TOML is a string ("fp32", "my.py:Mine"), and
    a half-written number becomes one too, which the type of its key then refuses.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for name in reversed(key.strip().split(".")):
        parsed = {name: parsed}
    return parsed


def _explain(error: ValidationError, name: str, table: Mapping[str, Any]) -> str:
    """Put the first of pydantic's complaints into one line with the nearest key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = DataConfig if first["loc"][0] == "data" else RunConfig
        close = nearest(str(first["loc"][-1]), section.model_fields)
        return f"unknown key {key} in run {name!r}{close}"
    if first["type"] == "missing":
        return f"run {name!r} lacks the key {key}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"run {name!r}: {key} = {first['input']!r}: {reason}" if key else reason


def load_run(path_or_name: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load a run by name ("tiny") or from a .toml file, with overrides on top.

    overrides: "key=value" lines, such as "steps=100" or "optimizer.matrix.lr=0.02".
    Raises ConfigError: unknown run or key (with the nearest valid one), a value of the
    wrong type, a part that does not resolve.
    """
    path = _find_run(path_or_name, Path())
    table = _layers(path)
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = _merge(changes, parse_override(text), top=False)
    table = _merge(table, _anchor_parts(changes, Path()))
    table.setdefault("name", path.stem)
    table.setdefault("run_dir", f"runs/{table['name']}")
    for kind in KINDS:
        if kind != "callback" and isinstance(table.get(kind), dict):
            table[kind].setdefault("use", KINDS[kind].default)
    if isinstance(table.get("callback"), dict):
        table["callback"] = [table["callback"]]
    try:
        # Strict: a string is never read as a number. Lists stand for tuples in TOML.
        run = RunConfig.model_validate({k: _tuples(v) for k, v in table.items()})
    except ValidationError as error:
        raise ConfigError(_explain(error, path.stem, table)) from error
    for kind, part in run.parts():
        check_part(kind, part)
    return run
