"""The environment that worker processes get, decided before anything starts. No jax."""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Mapping, Sequence

from ftrain.config import Config
from ftrain.errors import ConfigError

GPU_FLAGS = {
    # A failed NCCL collective must raise or be cancelled, not end the process (jax
    # 0.10.2-0.12.0.1).
    "--xla_gpu_nccl_terminate_on_error": "false",
    "--xla_gpu_nccl_async_execution": "true",
    "--xla_gpu_nccl_blocking_communicators": "false",
    # One worker compiles alone and the others load what it made: it must not wait for their share.
    "--xla_gpu_shard_autotuning": "false",
}

# For `reduction: reproducible`: each process would choose among kernels by timing them, and sums by
# atomic additions come in any order (two runs of one program differed, jax 0.10.2).
REPRODUCIBLE_GPU_FLAGS = {
    "--xla_gpu_deterministic_ops": "true",
    "--xla_gpu_autotune_level": "0",
}


def resolve_platform(
    config: Config, environ: Mapping[str, str], workers_here: int | None = None
) -> str:
    """`cpu` or `gpu`; `auto` is the GPU where there is one and JAX has its plugin.

    Args:
      config: the run's.
      environ: this process's environment.
      workers_here: how many of the workers this host has, if not all.

    Raises:
      ConfigError: more workers here than GPUs.
    """
    workers = config.cluster.workers if workers_here is None else workers_here
    gpus = len(visible_gpus(environ))
    wanted = config.cluster.platform
    if wanted == "auto":
        plugin = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
        wanted = "gpu" if gpus and plugin else "cpu"
    if wanted == "gpu" and workers > gpus:
        here = "" if workers_here is None else f", {workers} of them on this host"
        raise ConfigError(
            f"cluster.workers={config.cluster.workers}{here}, and {gpus} GPUs are there for it "
            "(CUDA_VISIBLE_DEVICES, or the machine's); each worker takes one: lower workers, or "
            "set platform: cpu"
        )
    return wanted


def worker_environment(config: Config, platform: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of all workers; `own_environment` is what differs.

    Raises:
      ConfigError: XLA_FLAGS holds another value of a flag that ftrain needs.
    """
    env = dict(environ)
    if platform == "gpu":
        needed = GPU_FLAGS
        if config.reduction == "reproducible":
            needed = GPU_FLAGS | REPRODUCIBLE_GPU_FLAGS
        env.update(
            JAX_PLATFORMS="cuda",
            XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE="1",
            # A client of that name is no more: it means that programs are launched by a thread of
            # the device. In the map of incarnations that a collective looks its members up in,
            # its caller then writes for the next program, without a lock ("Incarnation for device
            # 0 not found", 13 times in 4,000 steps; jax 0.11.2, and so in 0.10.2 and 0.12.0.1).
            XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT="0",
        )
        # Memory grows with use instead of 75 % of the GPU being taken at once: a replacement starts
        # beside what its predecessor may not have given back yet, and `ftrain debug` beside a run.
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        # Beyond the watchdog's patience: it names the culprit, a collective's own timeout cannot.
        patience_s = max(600, 2 * int(config.cluster.hang_timeout_s))
        needed = {
            "--xla_cpu_collective_timeout_seconds": str(patience_s),
            "--xla_force_host_platform_device_count": "1",
        }
        env["JAX_PLATFORMS"] = "cpu"
    env["XLA_FLAGS"] = merge_flags(environ.get("XLA_FLAGS", ""), needed)
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    env["PYTHONUNBUFFERED"] = "1"
    # Who goes through a set of names as it traces shall make the same program in every worker.
    env.setdefault("PYTHONHASHSEED", "0")
    env["FTRAIN_RUN_DIR"] = config.run_dir
    env.update(direct_grpc(environ))
    return env


def direct_grpc(environ: Mapping[str, str], hosts: Sequence[str] = ()) -> dict[str, str]:
    """What keeps gRPC from asking a web proxy for the way to this host and to `hosts`.

    With `http_proxy` set, as on many clusters, it asks it even for 127.0.0.1, and the coordinator
    found none of its own tasks (jaxlib 0.10.2 and 0.12.0.1). The variable is gRPC's alone: what
    user code gets by its proxies is not touched.
    """
    given = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    direct = [name for name in given.split(",") if name]
    own = [host for host in ("127.0.0.1", *hosts) if host not in direct]
    return {"no_grpc_proxy": ",".join([*direct, *own])}


def own_environment(
    env: Mapping[str, str], platform: str, worker: int, incarnation: int, place: int | None = None
) -> dict[str, str]:
    """What differs from `worker_environment` in the environment of one worker process.

    Args:
      env: what `worker_environment` made.
      platform: `cpu` or `gpu`.
      worker: its id.
      incarnation: counted from 0.
      place: of the worker among those of its host, from 0; its id if there is one host.
    """
    own = {"FTRAIN_WORKER_ID": str(worker), "FTRAIN_INCARNATION": str(incarnation)}
    if platform == "gpu":
        gpus = visible_gpus(env)
        gpu = own["CUDA_VISIBLE_DEVICES"] = gpus[worker if place is None else place]
        if gpus.count(gpu) > 1:
            # Workers may share a GPU (CUDA_VISIBLE_DEVICES=0,0), to try things out. NCCL refuses
            # two ranks on one GPU of one host (2.28): as if on other hosts they go by the network.
            own["NCCL_HOSTID"] = f"ftrain-{worker}"
    return own


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this run may use: those the user or the scheduler made visible, or all."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip()]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def merge_flags(given: str, needed: Mapping[str, str]) -> str:
    """XLA_FLAGS with what ftrain needs added; a conflict is refused."""
    flags = given.split()
    values = dict(flag.partition("=")[::2] for flag in flags)
    for name, value in needed.items():
        if values.get(name, value) != value:
            raise ConfigError(
                f"XLA_FLAGS: {name}={values[name]}, ftrain needs {value}; take the "
                "flag out of XLA_FLAGS"
            )
        if name not in values:
            flags.append(f"{name}={value}")
    return " ".join(flags)
