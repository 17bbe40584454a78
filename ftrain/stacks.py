"""Python's stacks of a worker that crashed or hangs, as `faulthandler` left them behind the beat.

It writes from C, in the signal's handler: also when the interpreter's lock is held for ever or the
memory is broken. Read on the supervisor's side; a process that is stopped cannot write any.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

# A worker that gets this writes its stacks and goes on. Of the real-time signals, which neither
# schedulers nor libraries use by themselves.
STACK_SIGNAL = signal.SIGRTMIN + 5

FRAMES_SHOWN = 12
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+[^\n]*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class Frame(NamedTuple):
    """A function that was being executed."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.function}'


class Stack(NamedTuple):
    """One thread's frames, the innermost last, as in a traceback."""

    current: bool  # the one that the signal came to
    frames: list[Frame]

    def __str__(self) -> str:
        return "\n".join(map(str, self.frames[-FRAMES_SHOWN:]))


def read_stacks(dump: str) -> list[Stack]:
    """The stacks in what `faulthandler` wrote last (CPython 3.11, 3.12), the main thread last."""
    marks = list(_THREAD.finditer(dump))
    stacks = []
    ends = [*(mark.start() for mark in marks[1:]), len(dump)]
    for mark, end in zip(marks, ends, strict=False):
        text = dump[mark.end() : end]
        found = (_FRAME.match(line) for line in text.splitlines())
        frames = [Frame(*frame.groups()) for frame in found if frame]
        stacks.append(Stack(mark[1] == "Current thread", frames[::-1]))
    return stacks


def culprit(stacks: list[Stack], phase: str) -> Stack | None:
    """The thread whose doing it is: one that reads samples if the worker waits for them.

    Else the main thread, which runs the step loop. None if there is none with frames.
    """
    named = [s for s in stacks if s.frames]
    reading = [s for s in named if any(f.file.endswith("ftrain/data.py") for f in s.frames)]
    others = [s for s in reading if s is not named[-1]]
    if phase == "data" and others:
        return others[-1]
    return named[-1] if named else None


def crashed(stacks: list[Stack]) -> Stack | None:
    """The thread in which a fatal signal was raised, if it was executing Python."""
    return next((s for s in stacks if s.current and s.frames), None)
