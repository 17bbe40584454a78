"""What the doctor has tried out in other processes: the devices, and a sum over two workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from ftrain.doctor.finding import Finding
from ftrain.environment import own_environment, visible_gpus

DEVICES_S = 60.0
SUM_S = 60.0
SUM_CHECK = "sum of two"


def devices(env: Mapping[str, str], platform: str) -> Finding:
    """What JAX finds in the environment of a worker."""
    with _probe(env, "devices", platform) as child:
        answer, why = _answer(child, time.monotonic() + DEVICES_S)
    if answer is None:
        mend = "start python and run `import jax; jax.devices()` in this environment; see its error"
        if platform == "gpu":
            mend = "see `nvidia-smi` and the versions of driver and CUDA plugin, or platform: cpu"
        return Finding("devices", "fail", why, mend)
    names = answer["devices"]
    gpus = visible_gpus(env)
    if answer["platform"] == "cpu" and gpus:
        return Finding(
            "devices",
            "warn",
            f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}, and JAX uses the CPU: it has no plugin for "
            "them, or platform: cpu is set",
            "pip install 'jax[cuda13]' of the same version as jax",
        )
    kinds = ", ".join(f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names))
    return Finding("devices", "ok", f"{answer['platform']}: {kinds}, {os.cpu_count()} cores")


def sum_of_two(env: Mapping[str, str], platform: str) -> Finding:
    """Two workers under a coordinator add two numbers, as a run's step does."""
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        coordinator, address = stack.enter_context(_coordinator(env, platform))
        if address is None:
            return Finding(SUM_CHECK, "fail", f"the coordinator: {coordinator}", _mend(coordinator))
        workers = [
            stack.enter_context(
                _probe(
                    {**env, **own_environment(env, platform, i, 0)},
                    "sum",
                    address,
                    str(i),
                    platform,
                )
            )
            for i in range(2)
        ]
        answers = [_answer(worker, start + SUM_S) for worker in workers]
    bad = next((f"worker {i}: {why}" for i, (got, why) in enumerate(answers) if got is None), None)
    if bad is None and any(got != {"sum": 3.0} for got, _ in answers):
        bad = f"1 + 2 gave {[got for got, _ in answers]}"
    if bad is not None:
        return Finding(SUM_CHECK, "fail", bad, _mend(bad))
    how = "NCCL" if platform == "gpu" else "gloo"
    return Finding(SUM_CHECK, "ok", f"right, by {how}, in {time.monotonic() - start:.1f} s")


def _mend(why: str) -> str:
    if "no answer" in why or re.search("deadline|unavailable|refused|timed out", why, re.I):
        return "see the lines of loopback and proxies, and whether a firewall drops packets on lo"
    return "see the lines above first; else run `ftrain debug` with a config for the whole error"


@contextlib.contextmanager
def _coordinator(env: Mapping[str, str], platform: str) -> Iterator[tuple[str, str | None]]:
    """A coordinator for two workers: what it said, and its address; ended by its pipe's end."""
    read, write = os.pipe()
    argv = [sys.executable, "-m", "ftrain.coordinator", str(read), "2", platform, "10"]
    argv += ["", "127.0.0.1", "0"]
    child = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[read],
        start_new_session=True,
    )
    os.close(read)
    try:
        with child:
            try:
                select.select([child.stdout], [], [], SUM_S / 2)
                os.set_blocking(child.stdout.fileno(), False)
                said = (child.stdout.read() or b"").decode("utf-8", "backslashreplace").split()
                if said[:1] == ["ready"]:
                    yield "", said[1]
                else:
                    child.kill()
                    yield _cause(child.stderr.read()) or "no answer", None
            finally:
                os.close(write)
                write = -1
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                child.kill()
    finally:
        if write >= 0:
            os.close(write)


@contextlib.contextmanager
def _probe(env: Mapping[str, str], *argv: str) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-m", "ftrain.doctor.probe", *argv],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _answer(child: subprocess.Popen, end: float) -> tuple[dict | None, str]:
    """The answer, or None and why there is none."""
    try:
        _, output = child.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        _, output = child.communicate()
        return None, f"no answer in time; {_cause(output)}".removesuffix("; ")
    for line in reversed(output.decode("utf-8", "backslashreplace").splitlines()):
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer ")), ""
    code = child.returncode
    end_of = f"died of signal {-code}" if code < 0 else f"exit {code}"
    return None, f"{end_of}: {_cause(output)}".removesuffix(": ")


def _cause(output: bytes) -> str:
    """The line that says most of what a process has said as it died, cut to what a screen shows.

    JAX's clients end their process with a status in a long line above a stack; Python with an
    error in the last line.
    """
    text = output.decode("utf-8", "backslashreplace")
    status = re.search(r"absl::Status: (.+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    best = [status[1]] if status else errors[-1:] or lines[-1:]
    return best[0][:300] if best else ""
