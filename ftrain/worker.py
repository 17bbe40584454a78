"""One worker process: from its assignment to its last barrier. `python -m ftrain.worker`.

Its end says how it went: 0 after the run's own end, else a code of `errors` with a report on the
pipe of records, or a signal. It never disconnects itself (rule R9); the supervisor fences it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ftrain.beat import Beat
from ftrain.config import HOST_OWN_KEYS, Config
from ftrain.errors import (
    WORKER_LOCAL_ERROR,
    WORKER_REFUSED,
    CheckpointUnreadableError,
    DatasetError,
    FtrainError,
    InitFromError,
    ReplicasDifferError,
    StateMismatchError,
    TrainerError,
    WorkerDiffersError,
)
from ftrain.user_code import load_trainer, user_traceback
from ftrain.worker_signals import leave_stop_to_supervisor


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the supervisor tells a worker, as one line of JSON on its control pipe."""

    config: str  # the resolved config as JSON, validated
    worker: int
    address: str  # of the coordinator
    host: str  # this host's own address, for the connections between workers
    platform: str
    base: str  # the folder the trainer is relative to
    memory: list[str]  # folders of snapshots: where they are to lie, and where else if need be
    records_fd: int
    beat_fd: int
    parent: int  # the supervisor's pid


class Reporter:
    """Writes records for the supervisor, one JSON object a line, each in one write."""

    def __init__(self, fd: int):
        self._fd, self._lock = fd, threading.Lock()

    def __call__(self, record: str, **fields: Any) -> None:
        """Reports a fact. Safe from any thread; blocks while the supervisor is behind."""
        line = json.dumps({"record": record, "t": time.time(), **fields}) + "\n"
        data = line.encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class Told(NamedTuple):
    """What the supervisor has said of a save: durable, or failed with a message."""

    step: int
    digest: str
    at: float  # time.monotonic()
    message: str = ""


class Control:
    """What the supervisor says on the control pipe. Signals never interrupt a block."""

    def __init__(self, pipe: Any):
        self._go, self._stop = threading.Event(), threading.Event()
        self._durable: Told | None = None
        self._save_failed: Told | None = None
        threading.Thread(target=self._listen, args=(pipe,), daemon=True).start()

    def _listen(self, pipe: Any) -> None:
        for line in pipe:
            match line.split():
                case ["go", name, *workers]:
                    self._together = name, [int(w) for w in workers]
                    self._go.set()
                case ["stop"]:
                    self._stop.set()
                case ["durable", step, digest, ago_s]:
                    self._durable = Told(int(step), digest, time.monotonic() - float(ago_s))
                case ["save_failed", step, digest, *message]:
                    self._save_failed = Told(int(step), digest, time.monotonic(), " ".join(message))

    def wait_for_go(self) -> tuple[str, list[int]]:
        """At the start of a run the workers begin together; later each when it is ready.

        Returns:
          A name for this beginning, and who begins.
        """
        self._go.wait()
        return self._together

    def stop_requested(self) -> bool:
        """Whether the supervisor wants the run to stop; read between steps."""
        return self._stop.is_set()

    def durable(self) -> Told | None:
        """The newest save that has reached the disk."""
        return self._durable

    def save_failed(self) -> Told | None:
        """The newest save that has not."""
        return self._save_failed


def keep_stdout_for_user_code() -> None:
    """What user code prints goes to the screen; what C++ libraries print only to the log.

    gloo writes to descriptor 1 whenever it connects (jaxlib 0.10.2 to 0.12.0.1).
    """
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)


def end_with_parent(parent: int) -> None:
    """This process is killed when the supervisor dies (Linux), however that happens."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def main() -> None:
    """Takes the assignment from the control pipe (descriptor given in argv) and works."""
    pipe = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    job = Assignment(**json.loads(pipe.readline()))
    start(job, Control(pipe))


def start(job: Assignment, control: Control) -> NoReturn:
    """Makes this process that worker, whether it was launched or forked."""
    end_with_parent(job.parent)
    keep_stdout_for_user_code()
    leave_stop_to_supervisor(control.stop_requested)
    beat = Beat(job.beat_fd)
    beat.keep_stacks()
    if "FTRAIN_CHAOS" in os.environ:  # only `ftrain chaos` sets it, and nothing is loaded without
        from ftrain.chaos import hook

        hook.enter_worker()
    work(job, Reporter(job.records_fd), beat, control)


def work(job: Assignment, report: Callable[..., None], beat: Beat, control: Control) -> NoReturn:
    """Prepares, takes part until the run is over, and ends the process."""
    config = Config.from_json(job.config)
    try:
        loop = prepare(job, config, report, beat, control)
    except FtrainError as error:
        refuse(report, str(error), "")
    except BaseException as error:  # noqa: BLE001  the user's code: told once, with its traceback
        refuse(report, f"{type(error).__name__}: {error}", user_traceback(error))
    beat.phase("ready")
    spent = beat.take_spent()
    report("ready", cpu_s=time.process_time(), compile_s=spent.get("compile", 0.0))
    name, together = control.wait_for_go()
    try:
        loop.run(together, name)
    except BaseException as error:  # noqa: BLE001  outside a block: ends the process all the same
        local_error(report, beat, error)
    report("left", reason=loop.members.finished(), step=loop.state.step if loop.state else None)
    os._exit(0)


def refuse(
    report: Callable[..., None], message: str, traceback: str, *, others_go_on: bool = False
) -> NoReturn:
    """The trainer or data cannot be used: reported, so that the supervisor tells it once."""
    report("refused", message=message, traceback=traceback, others_go_on=others_go_on)
    _exit(WORKER_REFUSED)


def local_error(report: Callable[..., None], beat: Beat, error: BaseException) -> NoReturn:
    """This worker's own error: reported, and the process ends before any barrier (R3)."""
    if isinstance(error, StateMismatchError | CheckpointUnreadableError | InitFromError):
        refuse(report, str(error), "")  # another try would find the same
    if isinstance(error, WorkerDiffersError):
        refuse(report, str(error), "", others_go_on=error.others_go_on)
    if isinstance(error, ReplicasDifferError):
        report("gave_up", reason=str(error))
    reading = beat.read()
    traceback = "" if isinstance(error, FtrainError) else user_traceback(error)
    report(
        "local_error",
        step=reading.step + 1,
        phase=reading.phase,
        traceback=traceback,
        error=f"{type(error).__name__}: {error}",
    )
    sys.stderr.write((traceback or str(error)) + "\n")
    _exit(WORKER_LOCAL_ERROR)


def _exit(code: int) -> NoReturn:
    # Not sys.exit: nothing of the runtime's clean-up may speak to the service (R9).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(
    job: Assignment,
    config: Config,
    report: Callable[..., None],
    beat: Beat,
    control: Control,
) -> Any:
    """Everything up to the first barrier: user code, data, backend, compiled programs."""
    trainer = load_trainer(config.trainer, job.base, config.trainer_args, config)
    source, eval_source = open_data(trainer)

    from ftrain import runtime

    cache = compile_cache_folder(config)
    runtime.use_compile_cache(cache)
    started = runtime.Runtime(
        address=job.address,
        worker=job.worker,
        workers=config.cluster.workers,
        platform=job.platform,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        host=job.host,
    )
    beat.phase("connect")
    started.start_backend()
    beat.phase("compile")
    return make_loop(
        job, config, trainer, source, eval_source, started, cache, report, beat, control
    )


def open_data(trainer: Any) -> tuple[Any, Any]:
    """The training data and the held-out data, None without; before the first device is touched."""
    from ftrain.data import Source

    source = Source(trainer.dataset(), "dataset()")
    held_out = trainer.eval_dataset()
    eval_source = None if held_out is None else Source(held_out, "eval_dataset()")
    check_no_device_touched()
    return source, eval_source


def make_loop(
    job: Assignment,
    config: Config,
    trainer: Any,
    source: Any,
    eval_source: Any,
    started: Any,
    cache: str | None,
    report: Callable[..., None],
    beat: Beat,
    control: Control,
) -> Any:
    """Traces and compiles, and puts the parts of the loop together."""
    from ftrain import runtime
    from ftrain.admission import Admission
    from ftrain.compile_lock import first_compiles
    from ftrain.data import ShardReader
    from ftrain.digests import Digests
    from ftrain.identity import identity_of
    from ftrain.loop import StepLoop
    from ftrain.membership import Members
    from ftrain.restore import restore_newest
    from ftrain.saving import Saving
    from ftrain.table import Table
    from ftrain.target import target_of
    from ftrain.transfer import Transfer

    target = target_of(config, source.length)
    report("target_known", steps=target.steps, samples=target.samples, dataset_length=source.length)
    spec, programs, evaluation = trace(trainer, config, source, eval_source, runtime.compile_shared)
    digests, transfer = Digests(spec), Transfer(spec)
    table = Table(programs.buffer_shapes, programs.table_size)
    to_compile = programs, digests, transfer, table
    for traced in to_compile:
        traced.lower()
    sets = {"dataset()": (source.length, source.samples)}
    if eval_source is not None:
        sets["eval_dataset()"] = eval_source.length, eval_source.samples
    shared = {k: v for k, v in json.loads(job.config).items() if k not in HOST_OWN_KEYS}
    identity = identity_of(shared, sets, spec, programs.lowered)
    with first_compiles(cache):
        for traced in to_compile:
            traced.compile(runtime.compile_shared)
    members = Members(started, report, lambda error: local_error(report, beat, error))
    memory, fallback = Path(job.memory[0]), Path(job.memory[-1])
    saving = Saving(
        spec,
        digests,
        config.checkpoint,
        folder=memory,
        fallback=fallback,
        run_dir=config.run_dir,
        dataset_length=source.length,
        patience_s=config.grace_s / 2,
        report=report,
        news=control,
    )

    def first_state() -> Any:
        from ftrain.init_from import new_state

        restored = restore_newest(
            config.run_dir,
            spec,
            dataset_length=source.length,
            report=report,
            memory=list(dict.fromkeys([memory, fallback])),
            digest=digests,
        )
        if restored is None:
            with runtime.shares_compile_cache():
                return new_state(trainer, spec, config, report), 0
        state = restored.state
        saving.restored(state.step, restored.tier, restored.digest)
        programs.check_shorter(target.shorter_shard(state.cursor, config.batch_shards))
        return state, restored.evaluated

    reader = ShardReader(
        source,
        seed=config.seed,
        shuffle=config.data.shuffle,
        batch_size=config.batch_size,
        batch_shards=config.batch_shards,
        prefetch_steps=config.data.prefetch_steps,
        threads=config.data.threads,
        end=target.samples,
    )
    runtime.freeze_heap()
    return StepLoop(
        trainer,
        config,
        target,
        members,
        Admission(members, identity, config.cluster.min_workers),
        spec,
        programs,
        digests,
        transfer,
        table,
        reader,
        evaluation,
        saving,
        beat,
        report,
        lambda: control.stop_requested() or saving.wants_stop(),
        first_state,
        started.forget_view,
        runtime.compile_shared,
        make_profiler(config, beat),
    )


def make_profiler(config: Config, beat: Beat) -> Any:
    """What traces some steps, or None where none are to be traced."""
    if config.profile.step == 0:
        return None
    from ftrain.profiling import Profiler

    return Profiler(config, beat)


def trace(
    trainer: Any, config: Config, source: Any, eval_source: Any, compile: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """The state's spec and the programs, from shapes alone. Checks every rule of the API.

    From here on the trainer's config has the number of steps, also where epochs were asked for.
    """
    from ftrain.evaluation import Evaluation
    from ftrain.initial import state_spec
    from ftrain.step import StepPrograms
    from ftrain.sync import HEADER
    from ftrain.target import target_of

    target = target_of(config, source.length)
    trainer.config = config.model_copy(update={"steps": target.steps})
    trainer.tx = trainer.optimizer()
    spec = state_spec(trainer, config.seed)
    programs = StepPrograms(
        trainer,
        spec,
        source.shapes(config.batch_size // config.batch_shards),
        source.treedef,
        seed=config.seed,
        reduce_dtype=config.reduce_dtype,
        judged_shards=0 if config.on_nonfinite == "ignore" else config.batch_shards,
        # Room for as many workers as there may be, not as there are: nothing about the programs,
        # and so no bit of what they compute, may depend on the number of workers.
        table_size=config.batch_shards * HEADER.size,
        tree_shards=config.batch_shards if config.reduction == "reproducible" else None,
    )
    programs.check_shorter(target.shorter_shard(0, config.batch_shards))
    evaluation = (
        None
        if eval_source is None
        else Evaluation(
            trainer,
            spec,
            eval_source,
            batch_size=config.batch_size,
            batch_shards=config.batch_shards,
            reduction=config.reduction,
            compile=compile,
        )
    )
    check_best(config, programs, evaluation)
    if evaluation is None and config.eval.every_steps:
        raise TrainerError(
            f"eval.every_steps={config.eval.every_steps} needs eval_dataset(); "
            "define it, or leave the key out"
        )
    return spec, programs, evaluation


def check_best(config: Config, programs: Any, evaluation: Any) -> None:
    """The metric by which the best checkpoint is told must be one there is."""
    if config.checkpoint.keep_best is None:
        return
    metric = config.checkpoint.keep_best.split()[1]
    there = ["loss", *programs.metric_names, *programs.extra_names]
    there += [f"eval_{name}" for name in evaluation.names] if evaluation else []
    if metric not in there:
        raise TrainerError(
            f"checkpoint.keep_best: {metric} is no metric of this trainer; it has "
            + ", ".join(there)
        )


def check_no_device_touched() -> None:
    """The data set must leave JAX's devices alone: they are not open yet."""
    if device_is_open():
        raise DatasetError(
            "__init__, dataset() or eval_dataset() used a JAX device (jnp arrays, "
            "jax.random, jax.devices()); make numpy arrays there"
        )


def device_is_open() -> bool:
    """Whether any JAX backend has been started."""
    from jax._src import xla_bridge  # checked on jax 0.10.2, 0.12.0.1

    return xla_bridge.backends_are_initialized()


def compile_cache_folder(config: Config) -> str | None:
    """Where compiled programs are kept, or None."""
    if config.compile_cache == "off":
        return None
    folder = config.compile_cache
    return os.path.abspath(
        os.path.join(config.run_dir, "compile_cache") if folder == "auto" else folder
    )


if __name__ == "__main__":
    main()
