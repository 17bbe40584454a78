"""A worker before its first barrier: user code, data, backend, programs, and the loop of them all.

All that user code may do wrong in shape is found here, by tracing, before any step is tried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ftrain.config import HOST_OWN_KEYS, Config
from ftrain.errors import TrainerError
from ftrain.user_code import load_trainer

if TYPE_CHECKING:
    from ftrain.beat import Beat
    from ftrain.worker_pipes import Assignment, Control


def prepare(
    job: Assignment,
    config: Config,
    report: Callable[..., None],
    beat: Beat,
    control: Control,
    local_error: Callable[[BaseException], NoReturn],
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
    beat.phase("open")
    started.start_backend(lambda: beat.phase("connect"))
    beat.phase("compile")
    return make_loop(
        job,
        config,
        trainer,
        source,
        eval_source,
        started,
        cache,
        report,
        beat,
        control,
        local_error,
    )


def open_data(trainer: Any) -> tuple[Any, Any]:
    """The training data and the held-out data, None without; before the first device is touched."""
    from ftrain import runtime
    from ftrain.data import Source

    source = Source(trainer.dataset(), "dataset()")
    held_out = trainer.eval_dataset()
    eval_source = None if held_out is None else Source(held_out, "eval_dataset()")
    runtime.check_no_device_touched()
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
    local_error: Callable[[BaseException], NoReturn],
) -> Any:
    """Traces and compiles, and puts the parts of the loop together."""
    from ftrain import runtime
    from ftrain.admission import Admission
    from ftrain.compile_lock import first_compiles
    from ftrain.digests import Digests
    from ftrain.entrance import Entrance
    from ftrain.identity import identity_of
    from ftrain.loop import StepLoop
    from ftrain.membership import Members
    from ftrain.restore import newest_step, restore_newest
    from ftrain.run_keys import RunKeys
    from ftrain.span import make_span
    from ftrain.stepping import Stepping
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
    check_at_once(config, programs)
    sets = {"dataset()": (source.length, source.samples)}
    if eval_source is not None:
        sets["eval_dataset()"] = eval_source.length, eval_source.samples
    shared = {k: v for k, v in json.loads(job.config).items() if k not in HOST_OWN_KEYS}
    identity = identity_of(shared, sets, spec, programs.lowered)
    with first_compiles(cache):
        for traced in to_compile:
            traced.compile(runtime.compile_shared)
    if job.platform == "gpu":
        programs.warm_up()
    members = Members(started, report, local_error)
    keys = RunKeys(started.store, started.worker)
    saving = make_saving(job, config, spec, digests, source.length, report, control)
    begun = job.past[1] if job.past else None

    def first_state() -> Any:
        from ftrain.init_from import new_state

        restored = restore_newest(
            config.run_dir,
            spec,
            dataset_length=source.length,
            report=report,
            memory=places_of(job),
            begun=begun,
            digest=digests,
        )
        if restored is None:
            with runtime.shares_compile_cache():
                return new_state(trainer, spec, config, report), 0
        state = restored.state
        saving.restored(state.step, restored.tier, restored.digest)
        programs.check_shorter(target.shorter_shard(state.cursor, config.batch_shards))
        return state, restored.evaluated

    def stop_requested() -> bool:
        return control.stop_requested() or saving.wants_stop()

    compile, reader = runtime.compile_shared, make_reader(config, source, target.samples)
    stepping = Stepping(config, target, programs, digests, reader, beat, stop_requested, compile)
    runtime.freeze_heap()
    entrance = Entrance(
        members,
        keys,
        Admission(keys, identity, config.cluster.min_workers),
        spec,
        digests,
        transfer,
        table,
        beat=beat,
        report=report,
        first_state=first_state,
        forget_view=started.forget_view,
        compile=compile,
        restorable=0 if begun is None else newest_step(config.run_dir, places_of(job), begun),
    )
    return StepLoop(
        trainer,
        config,
        target,
        members,
        keys,
        entrance,
        spec,
        digests,
        stepping,
        make_span(config, target, evaluates=evaluation is not None),
        evaluation,
        saving,
        beat,
        report,
        stop_requested,
        make_profiler(config, beat),
    )


def places_of(job: Assignment) -> list[Path]:
    """Where this worker's snapshots lie: in memory, and where else if need be."""
    return list(dict.fromkeys([Path(job.memory[0]), Path(job.memory[-1])]))


def make_saving(
    job: Assignment,
    config: Config,
    spec: Any,
    digests: Any,
    dataset_length: int,
    report: Callable[..., None],
    control: Control,
) -> Any:
    """This worker's part in saving."""
    from ftrain.saving import Saving

    return Saving(
        spec,
        digests,
        config.checkpoint,
        folder=places_of(job)[0],
        fallback=places_of(job)[-1],
        run_dir=config.run_dir,
        dataset_length=dataset_length,
        patience_s=config.grace_s / 2,
        copies=config.commit == "lean",
        report=report,
        news=control,
        handover=Path(job.handover),
        neighbours=job.neighbours,
        history=job.past[0] if job.past else "",
    )


def make_reader(config: Config, source: Any, end: int | None) -> Any:
    """Reads the training data up to the cursor `end`; None: there is always a next batch."""
    from ftrain.data import ShardReader

    return ShardReader(
        source,
        seed=config.seed,
        shuffle=config.data.shuffle,
        batch_size=config.batch_size,
        batch_shards=config.batch_shards,
        prefetch_steps=config.data.prefetch_steps,
        threads=config.data.threads,
        end=end,
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
        at_once=shards_at_once(config, spec),
        if_it_pays=config.shards_at_once is None,
        lean=config.commit == "lean",
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


def shards_at_once(config: Config, spec: Any) -> int:
    """How many shards one program computes: as the config says, or as many as a worker has."""
    params, _, _ = spec.split(spec.leaves)
    # Over shards that are computed at once a gradient is summed in its parameter's own dtype.
    is_exact = config.reduce_dtype == "param" or all(p.dtype.itemsize >= 4 for p in params)
    asked = config.shards_at_once
    if asked is None:
        alone = config.reduction == "reproducible" or config.on_nonfinite == "ignore"
        return 1 if alone or not is_exact else config.batch_shards // config.cluster.workers
    if asked > 1 and not is_exact:
        raise TrainerError(
            f"shards_at_once={asked}: would sum gradients of 16-bit parameters over the shards in "
            "16 bits; set reduce_dtype: param if that will do, or leave shards_at_once out"
        )
    return asked


def check_at_once(config: Config, programs: Any) -> None:
    """Whether the loss allows several shards in one program is known once it has been traced."""
    if programs.why_one_by_one and config.shards_at_once is not None:
        raise TrainerError(
            f"loss: several shards at once need jax.vmap of it, which fails: "
            f"{programs.why_one_by_one}; leave out shards_at_once={config.shards_at_once}"
        )


def check_best(config: Config, programs: Any, evaluation: Any) -> None:
    """The metric by which the best checkpoint is told must be one there is."""
    if config.checkpoint.keep_best is None:
        return
    metric = config.checkpoint.keep_best.split()[1]
    there = ["loss", *programs.metric_names]
    there += [f"eval_{name}" for name in evaluation.names] if evaluation else []
    if metric not in there:
        raise TrainerError(
            f"checkpoint.keep_best: {metric} is no metric of this trainer; it has "
            + ", ".join(there)
        )


def compile_cache_folder(config: Config) -> str | None:
    """Where compiled programs are kept, or None."""
    if config.compile_cache == "off":
        return None
    folder = config.compile_cache
    return os.path.abspath(
        os.path.join(config.run_dir, "compile_cache") if folder == "auto" else folder
    )
