"""What a worker computes with, as a record: the same in every process, and told apart in words."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain.identity import difference, fingerprint, identity_of, of_most, text_hash
from ftrain.state import spec_of
from tests.runs import REPOSITORY, environment

SPEC = spec_of({"w": jnp.zeros(3)}, (), None)
DATA = {"dataset()": (96, [np.zeros(4, np.float32)])}
CONFIG = {"seed": 1, "data": {"shuffle": True}, "trainer_args": {"x": 1}}


def lowered(factor: Any = 2.0) -> Any:
    return jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


def record(**changes: Any) -> dict[str, str]:
    given = {"config": CONFIG, "data": DATA, "spec": SPEC, "programs": {"loss": lowered()}}
    return identity_of(**{**given, **changes})


OTHERS = {
    "config": ({"config": {**CONFIG, "data": {"shuffle": False}}}, "config data.shuffle: "),
    "trainer_args": ({"config": {**CONFIG, "trainer_args": {"x": 2}}}, "config trainer_args: "),
    "length": ({"data": {"dataset()": (97, DATA["dataset()"][1])}}, "dataset(): "),
    "sample": ({"data": {"dataset()": (96, [np.zeros(5, np.float32)])}}, "dataset(): "),
    "leaf": ({"spec": spec_of({"w": jnp.zeros(4)}, (), None)}, "params['w']: "),
    "more": ({"spec": spec_of({"v": jnp.zeros(1), "w": jnp.zeros(3)}, (), None)}, "params['v']: "),
    "program": ({"programs": {"loss": lowered(3.0)}}, "loss of worker 2 compiles to another"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_difference_is_named_with_both_sides(what):
    """And makes another fingerprint; a changed program is told last, since it is a consequence."""
    changes, says = OTHERS[what]
    changes = {"programs": {"loss": lowered(3.0)}, **changes}
    other = record(**changes)
    assert fingerprint(other) != fingerprint(record())
    told = difference("worker 2", other, "worker 0", record())
    assert told.startswith(says) and "worker 2" in told and "worker 0" in told


def test_settings_and_versions_are_told_as_the_user_knows_them(monkeypatch):
    """By the variable's name, and by the version that is loaded rather than installed."""
    plain = record()
    with jax.enable_x64(True):
        told = difference("worker 2", record(), "worker 0", plain)
    assert told.startswith("worker 2 has JAX_ENABLE_X64=1, worker 0 has 0")
    monkeypatch.setattr(optax, "__version__", "0.0.1")
    told = difference("worker 2", record(), "worker 0", plain)
    assert told == f"worker 2 has optax 0.0.1, worker 0 has {plain['version of optax']}"
    monkeypatch.undo()
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--other")
    assert "has XLA_FLAGS=--other, worker 0 has " in difference("a", record(), "worker 0", plain)


def test_captured_constants_are_part_of_a_program():
    """A table that the loss reads from a file, large or small."""
    tables = [np.zeros(1000, np.float32) for _ in range(3)]
    tables[2][997] = 1e-30
    hashes = [text_hash(jax.jit(lambda x, t=t: x[0] + t).lower(jnp.zeros(3))) for t in tables]
    assert hashes[0] == hashes[1] != hashes[2]


PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np
from ftrain.identity import text_hash
jax.config.update("jax_default_device", jax.devices()[int(sys.argv[1])])
def f(w):
    jax.debug.print("{}", w[0])
    w = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), jnp.float32), w)
    return {name: jax.random.normal(jax.random.key(1), (3,)) + w for name in ("a", "b", "c")}
print(text_hash(jax.jit(f).lower(jax.ShapeDtypeStruct((3,), jnp.float32))))
"""


def test_a_program_is_the_same_in_every_process_and_on_every_device():
    """Other hash seeds, another default device; with callbacks, which number the device."""
    found = set()
    for number in "01":
        env = {**environment(), "PYTHONHASHSEED": number, "JAX_PLATFORMS": "cpu"}
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        argv = [sys.executable, "-c", PROGRAM, number]
        done = subprocess.run(
            argv, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    "prints, least, right",
    [
        ("aaba", 1, "a"),
        ("baaa", 1, "a"),
        ("aab", 2, "a"),
        ("aab", 3, None),
        ("ab", 1, None),
        ("aabb", 1, None),
        ("aabc", 1, None),
        ("a", 1, "a"),
    ],
)
def test_those_of_most_go_on(prints, least, right):
    """More than half, and no fewer than `min_workers`: else nobody does."""
    assert of_most(dict(enumerate(prints)), least) == right
