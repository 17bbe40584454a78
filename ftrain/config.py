"""The config of a run: its keys, their rules, and what may change when a run is continued.

Validated once, in the supervisor; a worker gets the resolved form as JSON. Beside each key stands
its meaning, its unit and what a larger value costs. A field's description is its rule, for the
messages: `<value> is not <description>`.
"""

from __future__ import annotations

import difflib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from ftrain.config_rules import broken_rules
from ftrain.errors import ConfigError
from ftrain.yaml_lines import Document, Path, dump_yaml, is_text, read_document, show

_NAME = r"[^\W\d]\w*"  # of any script, as Python takes it
_TRAINER = rf"^(?:[^:]+\.py|{_NAME}(?:\.{_NAME})*):{_NAME}$"
HOST_OWN_KEYS = frozenset({"run_dir", "compile_cache"})  # where each host keeps what it has
_INT32 = 2**31 - 1  # the step is an int32 on the device


def _no_url(text: str) -> str:
    if "://" in text:
        raise PydanticCustomError("url", "is a URL, not a folder; mount the store, or copy to it")
    return text


Natural = Annotated[int, Field(ge=0, description="an integer >= 0")]
Count = Annotated[int, Field(ge=1, description="an integer >= 1")]
Count32 = Annotated[int, Field(ge=1, le=_INT32, description=f"an integer from 1 to {_INT32}")]
Length = Annotated[int | None, Field(ge=1, le=_INT32, description=f"an integer from 1 to {_INT32}")]
Seed = Annotated[int, Field(ge=0, lt=2**32, description=f"an integer from 0 to {2**32 - 1}")]
Delay = Annotated[float, Field(ge=0, description="a number >= 0")]
Seconds = Annotated[float, Field(gt=0, description="a number > 0")]
Heartbeat = Annotated[float, Field(ge=2, description="a number >= 2")]
Switch = Annotated[bool, Field(description="true or false")]
Folder = Annotated[str, AfterValidator(_no_url), Field(min_length=1, description="a folder's path")]
Cache = Annotated[
    str, AfterValidator(_no_url), Field(min_length=1, description="auto, off or a folder's path")
]
Every = Annotated[float | None, Field(gt=0, description="a number > 0")]
Multiple = Annotated[int | None, Field(ge=1, description="an integer >= 1")]
Best = Annotated[
    str | None, Field(pattern=r"^(max|min) \S+$", description="`max METRIC` or `min METRIC`")
]
Memory = Annotated[
    str, AfterValidator(_no_url), Field(min_length=1, description="auto or a folder's path")
]
OnSaveError = Annotated[Literal["continue", "stop"], Field(description="continue or stop")]
Platform = Annotated[Literal["auto", "cpu", "gpu"], Field(description="auto, cpu or gpu")]
Dtype = Annotated[Literal["float32", "param"], Field(description="float32 or param")]
Reaction = Annotated[Literal["stop", "skip", "ignore"], Field(description="stop, skip or ignore")]
Commit = Annotated[Literal["ahead", "lean"], Field(description="ahead or lean")]
Reduction = Annotated[Literal["fast", "reproducible"], Field(description="fast or reproducible")]
ClassName = Annotated[
    str, Field(pattern=_TRAINER, description="path.py:Class or package.module:Class")
]
File = Annotated[str | None, Field(min_length=1, description="the path of a source")]
Patterns = Annotated[list[str], Field(description="a list of regular expressions")]
Renames = Annotated[
    dict[str, str], Field(description="a mapping of regular expressions to their replacements")
]
Port = Annotated[int | None, Field(ge=1, le=65535, description="a port from 1 to 65535")]
Address = Annotated[str, Field(min_length=1, description="an address of this machine")]
EventFiles = Annotated[bool | str, Field(description="true, false or a folder's path")]
ClassNames = Annotated[
    list[Annotated[str, Field(pattern=_TRAINER)]],
    Field(description="a list of path.py:Class or package.module:Class"),
]
Arguments = Annotated[dict[str, Any], Field(description="a mapping of names to values")]


class Section(BaseModel):
    """Strict: no unknown key, nothing converted but an integer to a float; read-only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Data(Section):
    """How each worker reads its samples."""

    shuffle: Switch = True  # a new order each epoch, drawn from the seed; false: the data's own
    prefetch_steps: Natural = 1  # steps read ahead; each holds one more batch in memory
    threads: Count = 1  # reading threads a worker; each takes CPU, from 2 on data be thread-safe


class Eval(Section):
    """When the held-out data is evaluated."""

    every_steps: Natural = 0  # steps between evaluations, 0: at the end only; larger: known later


class Cluster(Section):
    """The workers, and how long, in seconds, each is waited for."""

    workers: Count = 1  # processes in all, over all hosts; each costs memory and a start
    min_workers: Count = 1  # train on with no fewer; larger: the run stops at fewer failures
    platform: Platform = "auto"  # what workers compute on; auto: the GPU where there is one
    start_timeout_s: Seconds = 120.0  # process start to ready, not compiling; larger: seen later
    heartbeat_timeout_s: Heartbeat = 10.0  # a silent worker is dead after; larger: seen later
    hang_timeout_s: Seconds = 60.0  # a worker the others wait for is killed after; larger: later
    below_min_timeout_s: Delay = 600.0  # below min_workers so long: exit 75; larger: idle longer


class Restart(Section):
    """How failed workers are started again; the first restart is at once."""

    max_failures: Natural = 10  # of a worker in a row, then quarantine; 0: stop at the first
    renew_after_steps: Count = 10  # a worker's commits that end a row; larger: rare faults add up
    backoff_s: Delay = 0.5  # seconds before the second restart, then doubled; larger: fewer work
    backoff_max_s: Delay = 30.0  # longest such wait in seconds; larger: a late return


class Checkpoint(Section):
    """When state is saved, and what of it is kept; the end of a run and a stop always save."""

    every_steps: Natural = (
        100  # steps between saves to disk, 0: none; larger: more lost with a host
    )
    every_s: Every = None  # seconds between them, beside every_steps; larger: the same
    keep: Count = 3  # newest ones kept; each takes the state's bytes on disk
    keep_every: Multiple = None  # steps that it divides are kept for good; larger: fewer
    keep_best: Best = None  # and the best by a metric: `max eval_accuracy`, `min loss`
    memory_every_s: Delay = 5.0  # seconds between snapshots in memory, 0: none; larger: more lost
    # if all processes die; the newest two are kept, and a third is written beside them
    memory_folder: Memory = "auto"  # where; auto: below /dev/shm, or in run_dir if that has no room
    on_save_error: OnSaveError = "continue"  # training goes on, or ends with a last try to save


class InitFrom(Section):
    """What a new run begins with in place of fresh parameters; `init_from: PATH` is short for it.

    A leaf's name is its path, `layers/0/kernel`. Only a run without a checkpoint reads it.
    """

    path: File = None  # a run's folder or FOLDER@STEP, an Orbax checkpoint, safetensors
    map: Renames = Field(default_factory=dict)  # applied in order to the source's names, like sed
    allow_missing: Patterns = Field(default_factory=list)  # found in names that may stay fresh
    allow_extra: Patterns = Field(default_factory=list)  # found in names that may go unused
    model_state: Switch = False  # take the model state too; its names begin with model_state/
    cast: Switch = False  # convert floats to the trainer's dtype; values may lose digits


class Profile(Section):
    """A trace of one worker by JAX's profiler, into run_dir/profile."""

    step: Natural = 0  # the first that is traced, 0: none
    steps: Count = 5  # how many; larger: a larger trace, and each step is slower


class Config(Section):
    """Every key of a run, in the order of `config.yaml`."""

    trainer: ClassName  # path.py:Class or package.module:Class
    trainer_args: Arguments = Field(default_factory=dict)  # keyword arguments of that class
    run_dir: Folder  # all that the run writes; relative to the folder the command runs in
    steps: Length = None  # committed steps to reach; larger: a longer run
    epochs: Length = None  # or this: times that each sample is used; the last batch may be smaller
    seed: Seed = 0  # decides initialisation, sample order and the trainer's randomness
    batch_size: Count32  # samples a step over all workers, however many live; larger: slower steps
    batch_shards: Count = 1  # equal parts of a batch (default: see _with_shards); larger: slower
    shards_at_once: Multiple = None  # by one program; null: as many as a worker has while all live,
    # or 1 where that is quicker; fewer: less memory. 1: each by itself, as reproducible needs it
    reduction: Reduction = "fast"  # reproducible: the same bits whoever lives; more traffic, slower
    reduce_dtype: Dtype = "float32"  # of gradient sums; param: their own, less traffic, less exact
    on_nonfinite: Reaction = "stop"  # a nan or infinite loss, gradient or update: stop; skip the
    # step, at most 100 in a row; ignore: commit whatever comes, over good checkpoints too, for a
    # trainer that handles such gradients itself (optax.apply_if_finite, dynamic loss scaling)
    commit: Commit = (
        "ahead"  # lean: no second state beside the gradients' sums, less memory; slower
    )
    steps_per_commit: Count = 1  # that one barrier commits; larger: less waiting for it, a death
    # costs so many steps again, one more state in memory
    init_from: InitFrom = Field(InitFrom(), description="a path, or a section with path")
    data: Data = Data()
    eval: Eval = Eval()
    cluster: Cluster = Cluster()
    restart: Restart = Restart()
    checkpoint: Checkpoint = Checkpoint()
    grace_s: Seconds = 25.0  # SIGTERM to exit; larger than the scheduler's limit: the save is lost
    digest_every_steps: Natural = 100  # steps between state digests, 0: never; larger: seen later
    compile_cache: Cache = "auto"  # auto: run_dir/compile_cache; off: compile at every start
    metrics_port: Port = None  # where Prometheus finds /metrics; null: nowhere. See docs/metrics.md
    metrics_host: Address = "127.0.0.1"  # the address it is served on; 0.0.0.0: seen from outside
    tensorboard: EventFiles = False  # event files: true: in run_dir/tensorboard; or a folder
    sinks: ClassNames = Field(default_factory=list)  # classes that get every record
    profile: Profile = Profile()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        return _with_path(_with_shards(values)) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _hold_rules(self) -> Config:
        for _, message in broken_rules(_leaves(self.model_dump())):
            raise PydanticCustomError("rule", "{message}", {"message": message})
        return self

    def to_yaml(self) -> str:
        """The resolved config as YAML, which `read_resolved` reads back as an equal Config."""
        return dump_yaml(self.model_dump())

    def to_json(self) -> str:
        """The resolved config on one line, for a worker process."""
        return json.dumps(self.model_dump())

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The Config that `to_json` was called on."""
        return cls.model_validate(json.loads(text))


def load_config(
    path: str | os.PathLike[str], sets: Sequence[str] = (), run_dir: str | None = None
) -> Config:
    """Reads and validates a config file.

    Args:
      path: the file, shown in messages as given.
      sets: `key.path=value` each, applied in order; the value is YAML.
      run_dir: takes the place of the config's `run_dir`.

    Raises:
      ConfigError: a line for each problem, in the order of the file's lines, then of `sets`.
    """
    document = read_document(_read_text(path), os.fspath(path))
    for item in sets:
        document.apply_set(item)
    if run_dir is not None:
        document.apply_flag("--run-dir", "run_dir", run_dir)
    _replace_length(document)
    config = _validate(document) if document.complete else None
    if config is None or document.problems:
        problems = sorted(document.problems, key=lambda problem: problem[0])
        raise ConfigError(*(message for _, message in problems))
    return config


def read_resolved(path: str | os.PathLike[str]) -> Config:
    """Reads back the `run_dir/config.yaml` that a run was started with."""
    return load_config(path)


def continue_problems(old: Config, new: Config) -> list[str]:
    """What keeps a run begun with `old` from going on with `new`; empty if nothing does."""
    before, now = _leaves(old.model_dump()), _leaves(new.model_dump())
    keys = ("trainer",), ("seed",), ("batch_size",), ("batch_shards",), ("data", "shuffle")
    return [
        f"{'.'.join(key)}: {show(before[key])} when the run began, {show(now[key])} now; "
        f"set it to {show(before[key])}, or start a new run with --run-dir"
        for key in keys
        if before[key] != now[key]
    ]


def changed_keys(old: Config, new: Config) -> dict[str, list[Any]]:
    """The keys, dotted, whose values differ: `[old, new]` each, None where there is none."""
    before, now = _leaves(old.model_dump()), _leaves(new.model_dump())
    return {
        ".".join(key): [before.get(key), now.get(key)]
        for key in dict.fromkeys([*before, *now])
        # As text: 1, 1.0 and true are equal in Python, and nan differs from itself.
        if repr(before.get(key, key)) != repr(now.get(key, key))
    }


def _replace_length(document: Document) -> None:
    """A `--set` of steps or of epochs takes the place of whichever of them the file has."""
    for given, other in ((("steps",), ("epochs",)), (("epochs",), ("steps",))):
        if document.was_set(given) and document.values.get(given[0]) is not None:
            document.drop_from_file(other)


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        data = pathlib.Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a config file") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"the byte 0x{data[error.start]:02x}"
        raise ConfigError(f"{path}:{line}: {byte} is not UTF-8; save the file as UTF-8") from None


def _validate(document: Document) -> Config | None:
    """The Config, or None and why in `document.problems`."""
    try:
        return Config.model_validate(document.values)
    except ValidationError as error:
        found = [e for e in error.errors(include_url=False) if e["type"] != "rule"]
    bad = document.broken | {_key_of(e) for e in found}
    for e in found:
        if not _within(_key_of(e), document.broken):
            document.refuse(_key_of(e), _describe(e))
    # pydantic holds the rules over several keys only once each key is right by itself.
    defaults = {
        "steps": None,
        "epochs": None,
        "cluster": Cluster().model_dump(),
        "profile": Profile().model_dump(),
        "init_from": {"path": None},
        "reduction": "fast",
        "on_nonfinite": "stop",
    }
    values = _leaves(defaults) | _leaves(_with_path(_with_shards(document.values)))
    usable = {key: value for key, value in values.items() if not _within(key, bad)}
    for keys, message in broken_rules(usable):
        given = [key for key in keys if key in document.places]
        later = max(given, key=lambda key: document.places[key].order, default=())
        document.refuse(later, message)
    return None


def _within(key: Path, keys: set[Path]) -> bool:
    return any(key[:end] in keys for end in range(1, len(key) + 1))


def _key_of(error: ErrorDetails) -> Path:
    """The key that an error is about: pydantic names parts of a list or a union below it."""
    path = error["loc"]
    while path[:-1] in _FIELDS and path not in _FIELDS and not _has_keys(path[:-1]):
        path = path[:-1]
    return path


def _has_keys(path: Path) -> bool:
    kind = _FIELDS[path].annotation
    return hasattr(kind, "model_fields") or get_origin(kind) is dict


def _describe(error: ErrorDetails) -> str:
    path, value = _key_of(error), error["input"]
    if error["type"] == "extra_forbidden":
        elsewhere = [".".join(key) for key in _FIELDS if key[-1] == path[-1]]
        known = [key[-1] for key in _FIELDS if key[:-1] == path[:-1]]
        near = elsewhere or difflib.get_close_matches(str(path[-1]), known, 1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        return f"unknown key; {hint}"
    if error["type"] == "url":
        return f"{show(value)} {error['msg']}"
    known = max((key for key in _FIELDS if path[: len(key)] == key), key=len)
    rule = _FIELDS[known].description or "a section; write its keys below it, or leave it out"
    if error["type"] == "missing":
        return f"is required; write {rule}"
    quoted = "number" in rule or "integer" in rule or "true" in rule
    quoted = quoted and isinstance(value, str) and not is_text(value)
    return f"{show(value)} is not {rule}{'; leave out the quotes' if quoted else ''}"


def _leaves(values: Mapping[str, Any]) -> dict[Path, Any]:
    """The values by key path; a section is one level deep, and an argument is one value."""
    flat: dict[Path, Any] = {}
    for key, value in values.items():
        below = value if isinstance(value, dict) else None
        flat |= {(key,): value} if below is None else {(key, name): below[name] for name in below}
    return flat


def _with_shards(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in `batch_shards`: 12 if that divides batch_size, else its largest divisor <= 16."""
    size = values.get("batch_size")
    if "batch_shards" in values or type(size) is not int or not 1 <= size <= _INT32:
        return values
    # Of batch_size alone, not of the workers: their number may change when a run is continued.
    shards = 12 if size % 12 == 0 else max(d for d in range(1, 17) if size % d == 0)
    return {**values, "batch_shards": shards}


def _with_path(values: dict[str, Any]) -> dict[str, Any]:
    """`init_from: PATH` as the section that it is short for."""
    given = values.get("init_from", {})
    if given is None or isinstance(given, str):
        return {**values, "init_from": {"path": given}}
    return values


_FIELDS: dict[Path, FieldInfo] = {(name,): info for name, info in Config.model_fields.items()}
for _name, _info in Config.model_fields.items():
    _below = getattr(_info.annotation, "model_fields", {})
    _FIELDS |= {(_name, key): info for key, info in _below.items()}
