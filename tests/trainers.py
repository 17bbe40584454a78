"""Trainers that tests run: each small, and each with one thing that goes on or goes wrong."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain
from ftrain.chaos.orders import obey, obey_at_phases
from ftrain.errors import AttemptFailedError
from ftrain.loop import StepLoop
from ftrain.membership import Members
from ftrain.mesh import DataPlane


class Numbers:
    """96 numbers; each four take `pause_s` to read, so that steps have a pace on any machine.

    `before` is called with the indices of each batch that is about to be read.
    """

    def __init__(self, pause_s: float = 0.0, before=lambda indices: None):
        self.pause_s, self.before = pause_s, before

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> dict:
        return {"x": np.float32(i)}

    def batch_at(self, indices: np.ndarray) -> dict:
        self.before(indices)
        time.sleep(self.pause_s * len(indices) / 4)
        return {"x": indices.astype(np.float32) / 96}


class Paced(ftrain.Trainer):
    """The mean of numbers, with momentum, a counter and a random walk in the model state."""

    def __init__(self, *, pause_s: float = 0.0):
        self.pause_s = pause_s

    def dataset(self):
        return Numbers(self.pause_s)

    def eval_dataset(self):
        return {"x": np.arange(100, dtype=np.float32) / 96}

    def init_params(self, key):
        return ftrain.Init(
            {"w": jax.random.normal(key, (8,))},
            {"count": jnp.int32(0), "walk": jnp.zeros(3), "still": jnp.float32(0.1)},
        )

    def loss(self, params, batch, key, model_state):
        noise = 0.01 * jax.random.normal(key, batch["x"].shape)
        value = jnp.mean((params["w"].sum() - batch["x"] + noise) ** 2)
        state = {
            **model_state,
            "count": model_state["count"] + 1,
            "walk": model_state["walk"] + jax.random.normal(key, (3,)),
        }
        return ftrain.Loss(value, {"bias": jnp.mean(batch["x"])}, model_state=state)

    def optimizer(self):
        return optax.sgd(0.01, momentum=0.9)

    def evaluate(self, state, batch):
        return {
            "error": jnp.mean((state.params["w"].sum() - batch["x"]) ** 2),
            "mean": jnp.mean(batch["x"]),
        }


def mine(worker: int) -> bool:
    """Whether this is the first incarnation of that worker."""
    return (os.environ["FTRAIN_WORKER_ID"], os.environ["FTRAIN_INCARNATION"]) == (str(worker), "0")


class FailsInData(Paced):
    """Worker 1's first process fails to read at its tenth batch."""

    def dataset(self):
        calls = iter(range(10**9))

        def fail(indices):
            if mine(1) and next(calls) >= 10:
                raise OSError("the disk of worker 1 is gone")

        return Numbers(self.pause_s, fail)


class FailsEverywhere(Paced):
    """Sample 50 cannot be read by anybody."""

    def dataset(self):
        def fail(indices):
            if 50 in indices:
                raise RuntimeError("record 50 is bad")

        return Numbers(self.pause_s, fail)


class TellsInHook(Paced):
    """Prints after which steps it is called, and with what."""

    def after_commit(self, step, metrics, state):
        print(f"hook after step {step}: {int(state.step)} {int(state.cursor)}")


class FailsInHook(TellsInHook):
    """The hook after step 5 fails in worker 0's first process."""

    def after_commit(self, step, metrics, state):
        super().after_commit(step, metrics, state)
        if step == 5 and mine(0):
            raise RuntimeError("the hook is broken")


class Forks(Paced):
    """Each worker starts a process of its own that outlives anything but a kill."""

    def dataset(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"forked {child.pid}")
        return super().dataset()


class Orphans(Paced):
    """Each worker leaves a process that has lost its parent, and ends soon."""

    def dataset(self):
        subprocess.run(["sh", "-c", "sleep 0.5 & sleep 0.1 &"], check=True)
        return super().dataset()


class Talks(Paced):
    """Prints what logs must take: long lines, bytes that are no text, a last line without end."""

    def after_commit(self, step, metrics, state):
        if step == 5 and mine(0):
            for i in range(200):
                print(f"line {i:03d} " + "x" * 200)
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), b"\xff\xfe not text\nthe last words")
            os.kill(os.getpid(), 9)


class RaisesInDataset(Paced):
    """Its data set cannot be opened."""

    def dataset(self):
        raise ValueError("boom-\u00e9")


class Empty(Paced):
    """A data set without samples."""

    def dataset(self):
        return {"x": np.zeros(0, np.float32)}


class TouchesDevice(Paced):
    """Opens a JAX device too early."""

    def dataset(self):
        return {"x": jnp.arange(96.0)}


class BadLoss(Paced):
    """Its loss cannot be traced."""

    def loss(self, params, batch, key, model_state):
        return params["no such thing"]


class IntegerParams(Paced):
    """Breaks a rule of the API."""

    def init_params(self, key):
        return {"w": jnp.zeros((), jnp.int32)}


class NotATrainer:
    """Of the wrong kind."""


def ftrain_place(where: str) -> tuple:
    """The owner and the name of `module:Class.method` of ftrain's, or of `module:function`."""
    module, _, path = where.partition(":")
    owner_name, _, name = path.rpartition(".")
    owner = importlib.import_module(module)
    return (getattr(owner, owner_name) if owner_name else owner), name


class FailsAttempt(Paced):
    """The attempt fails in worker `worker` alone, at places inside ftrain, and nobody dies.

    Every n-th call of a place in `where`, `{place: n}`, raises before it does anything, until it
    has done so `times` times; places are as for `DiesAt`.
    """

    def __init__(self, *, where: dict, worker: int, times: int = 10, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        if os.environ["FTRAIN_WORKER_ID"] == str(worker):
            left = iter(range(times))
            for place, every in where.items():
                self.fail(place, every, left)

    @staticmethod
    def fail(place: str, every: int, left) -> None:
        owner, name = ftrain_place(place)
        real, calls = getattr(owner, name), itertools.count(1)

        def failing(*args, **options):
            if next(calls) % every == 0 and next(left, None) is not None:
                raise AttemptFailedError(f"injected at {place}")
            return real(*args, **options)

        setattr(owner, name, failing)


class KeptByCollective(Paced):
    """A failed collective of worker `worker`'s first process does not end, as gloo's may.

    `holds_device`: as one of NCCL's that connects, which keeps the device.
    """

    def __init__(self, *, worker: int, holds_device: bool = False, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        if not mine(worker):
            return
        run, listen = DataPlane._run, Members._listen_for_failure

        def kept(program, joined):
            try:
                return run(program, joined)
            except (ValueError, jax.errors.JaxRuntimeError):
                print("kept", flush=True)
                threading.Event().wait()

        DataPlane._run = staticmethod(kept)
        if holds_device:
            Members._listen_for_failure = lambda self, ports, own: listen(
                self, ports, own, self._end_stuck
            )


class SpinsOnDevice(Paced):
    """Worker `worker`'s first process meets a sample at which its device computes for ever."""

    def __init__(self, *, worker: int, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        self.worker = worker

    def dataset(self):
        numbers = Numbers(self.pause_s)
        read, calls = numbers.batch_at, itertools.count(1)

        def batch_at(indices):
            batch = read(indices)
            if mine(self.worker) and next(calls) == 30:
                batch["x"] = np.full_like(batch["x"], 1e6)
            return batch

        numbers.batch_at = batch_at
        return numbers

    def loss(self, params, batch, key, model_state):
        spun = jax.lax.while_loop(
            lambda x: x > 1e5, lambda x: x + jnp.sin(x), jax.lax.stop_gradient(batch["x"][0])
        )
        out = super().loss(params, batch, key, model_state)
        return out._replace(value=out.value + 0 * spun)


class DiesAt(Paced):
    """A process of worker `worker` kills itself as it calls `where` for the `call`-th time.

    `where` is `module:Class.method` of ftrain's: a fault at a place that no signal from outside
    hits.
    """

    def __init__(
        self,
        *,
        where: str,
        worker: int,
        incarnation: int = 0,
        call: int = 1,
        pause_s: float = 0.0,
    ):
        super().__init__(pause_s=pause_s)
        me = (os.environ["FTRAIN_WORKER_ID"], os.environ["FTRAIN_INCARNATION"])
        if me != (str(worker), str(incarnation)):
            return
        owner, name = ftrain_place(where)
        real, calls = getattr(owner, name), itertools.count(1)

        def deadly(*args, **options):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(owner, name, deadly)


class Breaks(Paced):
    """Stops in the debugger after step 2."""

    def after_commit(self, step, metrics, state):
        if step == 2:
            breakpoint()


class Ordered(Paced):
    """Commits the faults that a test orders, see `ftrain.chaos.orders`. Its hook is never empty."""

    def __init__(self, *, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        obey_at_phases()

    def dataset(self):
        return Numbers(self.pause_s, lambda indices: obey("dataset"))


class Poisoned(Paced):
    """The samples `first` to `last` of many, which come in order, are infinite."""

    def __init__(self, *, first: int, last: int, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        self.first, self.last = first, last

    def dataset(self):
        return PoisonedNumbers(self.first, self.last, self.pause_s)


class PoisonedNumbers(Numbers):
    """For `Poisoned`: 100000 numbers in 0 .. 1."""

    def __init__(self, first: int, last: int, pause_s: float):
        super().__init__(pause_s)
        self.first, self.last = first, last

    def __len__(self) -> int:
        return 100_000

    def batch_at(self, indices: np.ndarray) -> dict:
        x = super().batch_at(indices % 96)["x"]
        return {"x": np.where((self.first <= indices) & (indices <= self.last), np.inf, x)}


class Mixed(Paced):
    """A network of three dtypes and odd sizes, dropout, and statistics in the model state."""

    def init_params(self, key):
        keys = jax.random.split(key, 3)
        return ftrain.Init(
            {
                "first": jax.random.normal(keys[0], (7, 13)),
                "second": jax.random.normal(keys[1], (13, 11)).astype(jnp.bfloat16),
                "third": jax.random.normal(keys[2], (11,)).astype(jnp.float16),
            },
            {"count": jnp.int32(0), "mean": jnp.zeros(13)},
        )

    def loss(self, params, batch, key, model_state):
        x = jnp.cos(batch["x"][:, None] * jnp.arange(1.0, 8.0))
        hidden = jnp.tanh(x @ params["first"])
        kept = jax.random.bernoulli(key, 0.8, hidden.shape)
        mean = 0.9 * model_state["mean"] + 0.1 * hidden.mean(0)
        hidden = jnp.where(kept, hidden - mean, 0)
        out = jnp.tanh(hidden @ params["second"].astype(jnp.float32))
        value = jnp.mean((out @ params["third"].astype(jnp.float32) - batch["x"]) ** 2)
        state = {"count": model_state["count"] + 1, "mean": mean}
        return ftrain.Loss(value, {"bias": jnp.mean(hidden)}, model_state=state)

    def evaluate(self, state, batch):
        x = jnp.cos(batch["x"][:, None] * jnp.arange(1.0, 8.0))
        return {"error": jnp.mean(jnp.tanh(x @ state.params["first"]) ** 2)}


class Late(Paced):
    """Worker 1's first process takes `late_s` to read its tenth batch."""

    def __init__(self, *, late_s: float):
        super().__init__()
        self.late_s = late_s

    def dataset(self):
        calls = itertools.count(1)

        def sleep(indices):
            if mine(1) and next(calls) == 10:
                time.sleep(self.late_s)

        return Numbers(before=sleep)


class Connected(Ordered):
    """Each worker keeps one connection of its own, and needs it for every batch that it reads."""

    def __init__(self, *, port: int, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        self.port = port

    def dataset(self):
        lines = socket.create_connection(("127.0.0.1", self.port)).makefile("rw")

        def ask(indices):
            lines.write(f"{indices[0]}\n")
            lines.flush()
            if lines.readline() != f"{indices[0]}\n":
                raise ConnectionError("the user's connection was cut")

        return Numbers(self.pause_s, ask)


class BitFlips(Paced):
    """In the first process of worker `worker`, a bit of a parameter flips after step `step`."""

    def __init__(self, *, worker: int, step: int, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        if not mine(worker):
            return
        commit = StepLoop._commit

        def flip_after(loop, view, new, seconds):
            commit(loop, view, new, seconds)
            if loop.mine.state.step == step and new.metrics is not None:
                w = np.array(loop.mine.state.leaves[0])
                w.view(np.uint32)[3] ^= 1 << 20
                leaves = [jax.device_put(w), *loop.mine.state.leaves[1:]]
                loop.mine.state = loop.mine.state._replace(leaves=leaves)

        StepLoop._commit = flip_after


class Differs(Paced):
    """Worker `worker` is not like the others, in `what`, until the file `mended` is there."""

    def __init__(self, *, worker: int, what: str, mended: str = "", pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        odd = os.environ["FTRAIN_WORKER_ID"] == str(worker) and not os.path.exists(mended)
        if odd and what == "x64":
            jax.config.update("jax_enable_x64", True)
        if odd and what == "version":
            optax.__version__ = "0.0.1"
        self.factor = 1.5 if odd and what == "loss" else 1.0
        self.has_extra_layer = odd and what == "layer" and not mine(worker)
        self.is_longer = odd and what == "data"

    def dataset(self):
        return {"x": np.zeros(97, np.float32)} if self.is_longer else super().dataset()

    def init_params(self, key):
        params, state = super().init_params(key)
        more = {"extra": jnp.zeros(3)} if self.has_extra_layer else {}
        return ftrain.Init({**params, **more}, state)

    def loss(self, params, batch, key, model_state):
        jax.debug.callback(lambda x: None, batch["x"][0])  # such a program numbers its device
        out = super().loss(params, batch, key, model_state)
        return out._replace(value=out.value * self.factor)


class TextInState(Paced):
    """Its model state holds what is no array."""

    def init_params(self, key):
        return ftrain.Init({"w": jnp.zeros(8)}, {"layers": [{"name": "first"}]})


class Large(Paced):
    """50 MB of model state, which every update changes."""

    def init_params(self, key):
        init = super().init_params(key)
        return init._replace(model_state={**init.model_state, "large": jnp.zeros(12_500_000)})

    def update(self, state, grads):
        new = super().update(state, grads)
        large = new.model_state["large"] + 1
        return new.replace(model_state={**new.model_state, "large": large})
