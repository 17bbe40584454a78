"""The environment of workers: what ftrain needs is added, what the user set is kept or refused."""

from __future__ import annotations

import glob
import importlib.util
from types import SimpleNamespace

import pytest

from ftrain.config import Config
from ftrain.environment import (
    GPU_FLAGS,
    direct_grpc,
    merge_flags,
    own_environment,
    resolve_platform,
    worker_environment,
)
from ftrain.errors import ConfigError


def config(platform: str = "auto", workers: int = 2, hang_timeout_s: float = 60.0) -> Config:
    return Config.model_validate(
        {
            "trainer": "t.py:T",
            "run_dir": "runs/x",
            "steps": 1,
            "batch_size": 48,
            "cluster": {"platform": platform, "workers": workers, "hang_timeout_s": hang_timeout_s},
        }
    )


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with so many GPUs, and JAX with or without its plugin for them."""

    def make(gpus: int, plugin: str | None) -> None:
        monkeypatch.setattr(glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(gpus)])
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: SimpleNamespace() if name == plugin else None
        )

    return make


# The platform.


@pytest.mark.parametrize(
    ("gpus", "plugin", "wanted"),
    [
        (2, "jax_cuda12_plugin", "gpu"),
        (2, "jax_cuda13_plugin", "gpu"),
        (2, None, "cpu"),
        (0, "jax_cuda12_plugin", "cpu"),
        (0, None, "cpu"),
    ],
)
def test_auto_is_the_gpu_where_there_is_one_that_jax_can_use(machine, gpus, plugin, wanted):
    """Both are needed: the device and the plugin."""
    machine(gpus, plugin)
    assert resolve_platform(config("auto"), {}) == wanted


def test_a_given_platform_is_taken(machine):
    """cpu on a machine with GPUs."""
    machine(8, "jax_cuda12_plugin")
    assert resolve_platform(config("cpu", workers=9), {}) == "cpu"


@pytest.mark.parametrize("platform", ["auto", "gpu"])
def test_more_workers_than_gpus_are_refused(machine, platform):
    """With both numbers and the two ways out."""
    machine(2, "jax_cuda12_plugin")
    with pytest.raises(ConfigError) as caught:
        resolve_platform(config(platform, workers=3), {})
    message = str(caught.value)
    assert message.startswith("cluster.workers=3, and ") and " 2 GPUs" in message
    assert message.endswith("each worker takes one: lower workers, or set platform: cpu")


def test_only_gpus_that_are_visible_count(machine):
    """Two of the machine's eight are this job's."""
    machine(8, "jax_cuda12_plugin")
    with pytest.raises(ConfigError, match=" 2 GPUs"):
        resolve_platform(config("gpu", workers=3), {"CUDA_VISIBLE_DEVICES": "4,6"})


def test_where_all_gpus_are_hidden_auto_is_the_cpu(machine):
    """CUDA_VISIBLE_DEVICES is set, and empty."""
    machine(8, "jax_cuda12_plugin")
    assert resolve_platform(config("auto"), {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"


def test_gpu_without_any_is_refused(machine):
    """Asked for by name."""
    machine(0, None)
    with pytest.raises(ConfigError, match="0 GPUs are there"):
        resolve_platform(config("gpu", workers=1), {})


# What all workers get.


def test_the_user_s_environment_is_kept():
    """And not changed in place."""
    given = {"PATH": "/bin", "MY_DATA": "/data"}
    env = worker_environment(config(), "cpu", given)
    assert env.items() >= given.items() and given == {"PATH": "/bin", "MY_DATA": "/data"}


def test_user_code_finds_its_run_folder():
    """FTRAIN_RUN_DIR, for all; worker and incarnation for each."""
    env = worker_environment(config(), "cpu", {}) | own_environment({}, "cpu", 3, 7)
    names = ("FTRAIN_RUN_DIR", "FTRAIN_WORKER_ID", "FTRAIN_INCARNATION")
    assert [env[name] for name in names] == ["runs/x", "3", "7"]


@pytest.mark.parametrize(("platform", "jax_name"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_jax_is_told_the_platform(platform, jax_name):
    """Whatever JAX_PLATFORMS said: the config decides."""
    env = worker_environment(config(), platform, {"JAX_PLATFORMS": "tpu"})
    assert env["JAX_PLATFORMS"] == jax_name


def test_what_workers_print_is_not_held_back():
    """A killed worker's last line is in its log."""
    assert worker_environment(config(), "cpu", {})["PYTHONUNBUFFERED"] == "1"


def test_a_cpu_worker_has_one_device_and_collectives_outwait_the_watchdog():
    """The watchdog names the culprit; a collective that gave up first could not."""
    flags = worker_environment(config(hang_timeout_s=1000.0), "cpu", {})["XLA_FLAGS"].split()
    assert flags == [
        "--xla_cpu_collective_timeout_seconds=2000",
        "--xla_force_host_platform_device_count=1",
    ]


def test_a_short_watchdog_leaves_collectives_ten_minutes():
    """A slow first compilation of a neighbour must not fail them."""
    flags = worker_environment(config(hang_timeout_s=5.0), "cpu", {})["XLA_FLAGS"]
    assert "--xla_cpu_collective_timeout_seconds=600" in flags


def test_a_gpu_worker_survives_failed_collectives():
    """The flags with which NCCL raises instead of ending the process."""
    env = worker_environment(config(), "gpu", {})
    assert env["XLA_FLAGS"].split() == [f"{k}={v}" for k, v in GPU_FLAGS.items()]
    assert env["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] == "1"


def test_a_gpu_worker_launches_its_programs_itself():
    """Whatever the user has set: a launching thread of the device's races with who calls it."""
    given = {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}
    env = worker_environment(config(), "gpu", given)
    assert env["XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"] == "0"


def test_a_reproducible_gpu_worker_does_not_choose_kernels_by_timing_them():
    """Two processes could choose differently; the user's own choice against it is refused."""
    given = config().model_copy(update={"reduction": "reproducible"})
    flags = worker_environment(given, "gpu", {})["XLA_FLAGS"].split()
    assert {"--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0"} <= set(flags)
    with pytest.raises(ConfigError, match="--xla_gpu_autotune_level=4, ftrain needs 0"):
        worker_environment(given, "gpu", {"XLA_FLAGS": "--xla_gpu_autotune_level=4"})
    free = worker_environment(config(), "gpu", {"XLA_FLAGS": "--xla_gpu_autotune_level=4"})
    assert "--xla_gpu_autotune_level=4" in free["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("given", "used"), [({}, "false"), ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "true")]
)
def test_gpu_memory_is_taken_as_it_is_needed(given, used):
    """Unless the user wants it at once."""
    assert worker_environment(config(), "gpu", given)["XLA_PYTHON_CLIENT_PREALLOCATE"] == used


def test_workers_that_share_a_gpu_are_as_on_hosts_of_their_own():
    """NCCL refuses two of one host on one GPU; those with their own stay on one host."""
    own = [own_environment({"CUDA_VISIBLE_DEVICES": "3,3,5"}, "gpu", w, 0) for w in range(3)]
    assert [o["CUDA_VISIBLE_DEVICES"] for o in own] == ["3", "3", "5"]
    assert [o.get("NCCL_HOSTID") for o in own] == ["ftrain-0", "ftrain-1", None]


def gpus_of_workers(given: dict[str, str]) -> list[str]:
    """What each of two workers sees."""
    env = worker_environment(config(), "gpu", given)
    return [(env | own_environment(env, "gpu", w, 0))["CUDA_VISIBLE_DEVICES"] for w in (0, 1)]


def test_each_gpu_worker_sees_one_gpu(machine):
    """Its own."""
    machine(2, "jax_cuda12_plugin")
    assert gpus_of_workers({}) == ["0", "1"]


def test_gpus_are_those_that_the_user_made_visible():
    """SLURM gives a job GPUs 4 and 6: worker 1 takes 6, not somebody else's 1."""
    assert gpus_of_workers({"CUDA_VISIBLE_DEVICES": "4,6"}) == ["4", "6"]


def test_a_cpu_worker_s_gpus_are_left_alone():
    """User code may use them."""
    assert "CUDA_VISIBLE_DEVICES" not in own_environment({}, "cpu", 1, 0)


@pytest.mark.parametrize("given", ["0", "3"])
def test_a_log_level_of_the_user_s_is_kept(given):
    """Ours is only a default."""
    env = worker_environment(config(), "cpu", {"TF_CPP_MIN_LOG_LEVEL": given})
    assert env["TF_CPP_MIN_LOG_LEVEL"] == given


# XLA_FLAGS.


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ("", "--a=1 --b=2"),
        ("--c=3", "--c=3 --a=1 --b=2"),
        ("--a=1", "--a=1 --b=2"),
        ("  --b=2   --c ", "--b=2 --c --a=1"),
        ("--a_long=7", "--a_long=7 --a=1 --b=2"),
    ],
)
def test_flags_are_added_to_the_user_s(given, merged):
    """Each once; a flag whose name begins alike is another."""
    assert merge_flags(given, {"--a": "1", "--b": "2"}) == merged


@pytest.mark.parametrize(
    ("given", "value"), [("--c=3 --a=2", "2"), ("--a=1 --a=2", "2"), ("--a", "")]
)
def test_another_value_of_a_flag_that_ftrain_needs_is_refused(given, value):
    """With both values; of a flag given twice the last counts, as XLA has it."""
    with pytest.raises(ConfigError) as caught:
        merge_flags(given, {"--a": "1"})
    assert str(caught.value) == (
        f"XLA_FLAGS: --a={value}, ftrain needs 1; take the flag out of XLA_FLAGS"
    )


def test_a_conflict_is_found_before_anything_starts():
    """In the environment that the command was given."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with pytest.raises(ConfigError, match="device_count=8, ftrain needs 1"):
        worker_environment(config(), "cpu", given)


# Proxies.


@pytest.mark.parametrize(
    ("given", "hosts", "direct"),
    [
        ({}, [], "127.0.0.1"),
        ({"no_proxy": "a,.lan"}, [], "a,.lan,127.0.0.1"),
        ({"no_proxy": "a", "no_grpc_proxy": "b"}, ["10.0.0.1"], "b,127.0.0.1,10.0.0.1"),
        ({"no_grpc_proxy": "127.0.0.1,"}, [], "127.0.0.1"),
    ],
)
def test_grpc_asks_no_proxy_for_the_hosts_of_a_run(given, hosts, direct):
    """And asks it for what it asked before: gRPC reads the second only without the first."""
    assert direct_grpc(given, hosts) == {"no_grpc_proxy": direct}


def test_workers_and_coordinator_reach_one_another_past_a_proxy():
    """With the user's own proxies as they were."""
    env = worker_environment(config(), "cpu", {"http_proxy": "http://proxy:3128"})
    assert env["no_grpc_proxy"] == "127.0.0.1" and env["http_proxy"] == "http://proxy:3128"
