"""Faults to order in workers of a live run: at a phase of the protocol, in one worker or in any.

An order is placed in the run's folder. Under `ftrain chaos`, or with a trainer that calls
`obey_at_phases`, each worker process looks for one at every change of phase (`beat.PHASES`).
Whoever takes it commits the fault at that place, as itself: no signal from outside hits such a
place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ftrain.beat import Beat
from ftrain.errors import AttemptFailedError

ANYBODY = "any"
TOGETHER_TIMEOUT_S = 10
_loops: list[Any] = []  # this process's step loop, once it runs


def order(
    run_dir: str | Path, fault: str, at: str, worker: int | str = ANYBODY, **options: Any
) -> Path:
    """Places an order; returns the file that is there until a worker takes it.

    Args:
      run_dir: the run's folder; need not exist yet.
      fault: a name of `FAULTS`.
      at: a phase, or another place where the trainer calls `obey`.
      worker: which one, or whoever comes first.
      options: for the fault; `incarnation` restricts who takes it, `after_step` from when on;
        `together` of them are taken before any is carried out.
    """
    folder = Path(run_dir) / "orders"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker}-{at}"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"fault": fault, **options}))
    draft.rename(path)
    return path


def taken_at(path: Path) -> float | None:
    """When an order was taken (unix seconds), or None: then it is still there."""
    for file in path.parent.glob(f"{path.name}.taken-*"):
        return float(file.read_text())
    return None


def withdraw(path: Path) -> None:
    """Takes an order back, and what is left of one that was taken."""
    for file in (path, *path.parent.glob(f"{path.name}.taken-*")):
        file.unlink(missing_ok=True)


def obey_at_phases() -> None:
    """Makes this process take orders at every phase that it enters from now on."""
    from ftrain.loop import StepLoop

    enter, run = Beat.phase, StepLoop.run

    def phase(self: Beat, name: str) -> None:
        enter(self, name)
        obey(name, self.step)

    def remember(self: StepLoop, *arguments: Any) -> None:
        _loops[:] = [self]
        run(self, *arguments)

    Beat.phase, StepLoop.run = phase, remember
    obey("start")  # where it is already


def obey(place: str, step: int = -1) -> None:
    """Takes an order for this place and this worker, if there is one, and commits the fault.

    Args:
      place: where this thread is.
      step: the newest that this worker has committed.
    """
    folder = Path(os.environ["FTRAIN_RUN_DIR"]) / "orders"
    for worker in (os.environ["FTRAIN_WORKER_ID"], ANYBODY):
        path = folder / f"{worker}-{place}"
        if not path.exists():
            continue
        with contextlib.suppress(FileNotFoundError):  # another was faster
            told = json.loads(path.read_text())
            me = int(os.environ["FTRAIN_INCARNATION"])
            if told.get("incarnation", me) != me or told.get("after_step", -1) > step:
                continue
            mine = os.environ["FTRAIN_WORKER_ID"]
            claimed = path.rename(folder / f"{path.name}.claimed-{mine}")
            # Another file, and only then without this one: others may be about to read it still.
            draft = folder / f"{path.name}.draft-{mine}"
            draft.write_text(str(time.time()))
            draft.rename(folder / f"{path.name}.taken-{mine}")
            claimed.unlink()
            if "together" in told:
                _wait_for_others(folder, place, told["together"])
            FAULTS[told["fault"]](told)


def _wait_for_others(folder: Path, place: str, together: int) -> None:
    """Whoever dies first makes the others' attempt fail, perhaps before they have come here."""
    deadline = time.monotonic() + TOGETHER_TIMEOUT_S
    while len(list(folder.glob(f"*-{place}.taken-*"))) < together:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{together} orders at {place}: not taken together in {folder}")
        time.sleep(0.001)


def flip_bit(array: Any) -> Any:
    """A copy of a floating array with one bit flipped in one value that is not zero.

    The highest of the mantissa's bits: seen in any sum, and never a nan.
    """
    import jax.numpy as jnp
    import numpy as np

    flipped = np.array(array)
    bits = flipped.reshape(-1).view(f"u{flipped.dtype.itemsize}")
    bits[np.argmax(np.abs(flipped.astype(np.float64)))] ^= 1 << (jnp.finfo(flipped.dtype).nmant - 1)
    return flipped


def _flip(told: dict[str, Any]) -> None:
    """One bit of this worker's committed state, in a leaf of the parameters."""
    import jax
    import jax.numpy as jnp

    loop = _loops[0]
    leaves = list(loop.mine.state.leaves)
    i = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating) and x.any())
    leaves[i] = jax.device_put(flip_bit(leaves[i]), leaves[i].sharding)
    loop.mine.state = loop.mine.state._replace(leaves=leaves)


def _signal(number: int) -> Callable[[dict[str, Any]], None]:
    return lambda told: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Callable[[dict[str, Any]], NoReturn]:
    def fault(told: dict[str, Any]) -> NoReturn:
        raise error

    return fault


def _device_memory(told: dict[str, Any]) -> NoReturn:
    import jax

    raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes"
    )


def _segfault(told: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _spin(told: dict[str, Any]) -> None:
    ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock; pause() waits for ever


def _device(told: dict[str, Any]) -> None:
    """A device program that does not end."""
    import jax

    def wait(x: Any) -> Any:
        time.sleep(3600)
        return x

    shape = jax.ShapeDtypeStruct((), "float32")
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(wait, shape, x))(1.0))


def _kill_coordinator(told: dict[str, Any]) -> None:
    os.kill(told["pid"], signal.SIGKILL)
    time.sleep(3600)  # its own end comes with that


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segfault": _segfault,
    "abort": lambda told: os.abort(),
    "bus": _signal(signal.SIGBUS),
    "leave": lambda told: os._exit(told.get("code", 0)),
    "exit": _raise(SystemExit(0)),
    "interrupt": _raise(KeyboardInterrupt()),
    "memory": _raise(MemoryError("cannot allocate 8 GiB")),
    "device_memory": _device_memory,
    "bug": _raise(RuntimeError("a bug of the user's")),
    "attempt": _raise(AttemptFailedError("ordered")),
    "sleep": lambda told: time.sleep(told["seconds"]),
    "spin": _spin,
    "device": _device,
    "coordinator": _kill_coordinator,
    "flip": _flip,
}
