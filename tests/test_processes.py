"""Child processes: heard line by line, killed with all they forked, and how they ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from ftrain.processes import Child, Ends, Exit, Pipe, launch
from tests.runs import REPOSITORY

DEADLINE_S = 20.0


class Children:
    """Starts children that run a piece of Python; all are ended with the test."""

    def __init__(self) -> None:
        self.started: list[Child] = []
        self.reaped: set[int] = set()

    def start(self, code: str, *, inherit: tuple[int, ...] = ()) -> Child:
        # No site: a start of 20 ms.
        code = (
            ("import os, signal, sys, time\ncontrol = int(sys.argv[1])\n" + code)
            .replace("{", "{{")
            .replace("}", "}}")
        )
        argv = [sys.executable, "-S", "-E", "-c", code, "{control}"]
        child = Child(lambda ends: launch(argv, os.environ, ends, inherit))
        self.started.append(child)
        return child

    def reap(self, child: Child, *, kill: bool = False) -> Exit:
        self.reaped.add(child.pid)
        return child.reap(kill=kill)

    def close(self) -> None:
        for child in self.started:
            if child.pid not in self.reaped:
                child.reap(kill=True)
            for pipe in child.pipes.values():
                pipe.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


def hear(pipe: Pipe, until: Callable[[list[str]], bool] = lambda lines: False) -> list[str]:
    """The lines of a pipe until it ends, or until there are those that the test waits for."""
    heard: list[str] = []
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        select.select([pipe.fd], [], [], 0.5)
        lines, ended = pipe.lines()
        heard += lines
        if ended or until(heard):
            return heard
    raise AssertionError(f"not heard within {DEADLINE_S} s; only {heard}")


def wait_gone(pid: int) -> bool:
    """Whether a process that is not our child is gone, or a zombie, within the deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.005)
    return False


# Lines.


def test_lines_come_whole_however_they_were_written(children):
    """In pieces, two in one write, empty ones."""
    child = children.start(
        "for part in (b'on', b'e\\ntwo\\nthr', b'ee\\n\\n'):\n"
        "    os.write(1, part)\n    time.sleep(0.02)\n"
    )
    assert hear(child.pipes["stdout"]) == ["one", "two", "three", ""]


def test_half_a_line_is_held_back_until_it_is_whole(children):
    """Who listens never sees a part."""
    child = children.start("os.write(1, b'a\\nha')\nos.read(control, 1)\nos.write(1, b'lf\\n')\n")
    pipe = child.pipes["stdout"]
    assert hear(pipe, lambda lines: lines == ["a"]) == ["a"]
    child.send("go on")
    assert hear(pipe) == ["half"]


def test_a_last_line_without_newline_is_kept_for_the_end(children):
    """The last words of a process that crashed."""
    child = children.start("os.write(1, b'whole\\nFatal Python er')\n")
    pipe = Pipe(os.dup(child.pipes["stdout"].fd))
    assert hear(pipe) == ["whole"]
    assert pipe.close() == "Fatal Python er"


def test_bytes_that_are_no_utf8_are_shown_escaped(children):
    """And lines after them come as they are."""
    child = children.start("os.write(1, b'a \\xff\\xc3 z\\n\\xc3\\xa9\\n')\n")
    assert hear(child.pipes["stdout"]) == ["a \\xff\\xc3 z", "é"]


def test_a_character_cut_in_two_by_the_pipe_is_one_character(children):
    """Lines are decoded whole."""
    child = children.start("os.write(1, b'\\xc3')\ntime.sleep(0.05)\nos.write(1, b'\\xa9\\n')\n")
    assert hear(child.pipes["stdout"]) == ["é"]


def test_only_a_newline_ends_a_line(children):
    """Neither a carriage return of a progress bar nor a Unicode separator does."""
    child = children.start("os.write(1, 'a\\rb\\u2028c\\x0bd\\n'.encode())\n")
    assert hear(child.pipes["stdout"]) == ["a\rb\u2028c\x0bd"]


def test_a_megabyte_in_one_line_is_one_line(children):
    """Many times a pipe's buffer."""
    child = children.start("sys.stdout.write('x' * 2**20 + '\\nend\\n')\n")
    assert [len(line) for line in hear(child.pipes["stdout"])] == [2**20, 3]


def test_the_three_pipes_are_heard_apart(children):
    """stdout, stderr, and records on a descriptor of their own."""
    child = children.start(
        "os.write(1, b'out\\n')\nos.write(2, b'err\\n')\n"
        "os.write(int(os.read(control, 9)), b'rec\\n')\n"
    )
    child.send(str(child.records_fd))
    assert {name: hear(pipe) for name, pipe in child.pipes.items()} == {
        "stdout": ["out"],
        "stderr": ["err"],
        "records": ["rec"],
    }


# What a child has.


def test_it_hears_the_lines_sent_to_it(children):
    """On its control pipe, in order."""
    child = children.start("for line in os.fdopen(control):\n    print(line.strip(), flush=True)\n")
    child.send("one")
    child.send("two")
    assert hear(child.pipes["stdout"], lambda lines: len(lines) == 2) == ["one", "two"]


def test_it_sees_the_end_of_its_control_pipe(children):
    """That is how it learns that nobody needs it any more."""
    child = children.start("os.read(control, 1)\nprint('end')\n")
    child.close_control()
    assert hear(child.pipes["stdout"]) == ["end"]
    assert children.reap(child) == Exit(0, None)


def test_sending_to_one_that_has_died_does_no_harm(children):
    """Its death is learnt elsewhere."""
    child = children.start("")
    child.wait(DEADLINE_S)
    child.send("are you there?")


def test_it_inherits_only_what_it_is_given(children):
    """No other worker's pipe: a pipe ends when its one writer does."""
    given, kept = os.memfd_create("given"), os.memfd_create("kept")
    os.set_inheritable(kept, True)
    child = children.start("print(sorted(os.listdir('/proc/self/fd')))\n", inherit=(given,))
    [line] = hear(child.pipes["stdout"])
    os.close(kept)
    os.close(given)
    assert f"'{given}'" in line and f"'{kept}'" not in line


def test_it_has_no_standard_input(children):
    """A trainer that asks a question must not hang."""
    assert hear(children.start("print(repr(sys.stdin.read()))\n").pipes["stdout"]) == ["''"]


def test_it_is_in_a_session_of_its_own(children):
    """Ctrl-C on the terminal reaches ftrain alone."""
    child = children.start("print(os.getsid(0) == os.getpid() == os.getpgrp())\n")
    assert hear(child.pipes["stdout"]) == ["True"]


# How it ends.


@pytest.mark.parametrize("code", [0, 1, 75, 255])
def test_an_exit_code_is_told_as_such(children, code):
    """Not as a signal."""
    ended = children.reap(children.start(f"os._exit({code})\n"))
    assert ended == Exit(code, None) and ended.fields() == {"exit_code": code}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_told_by_its_name(children, name):
    """As the records have it."""
    code = f"signal.signal(signal.{name}, signal.SIG_DFL)\nos.kill(os.getpid(), signal.{name})\n"
    ended = children.reap(children.start(code))
    assert ended == Exit(None, name) and ended.fields() == {"signal": name}


def test_reap_kills_when_it_is_told_to(children):
    """One that would sleep for ever."""
    assert children.reap(children.start("time.sleep(600)\n"), kill=True) == Exit(None, "SIGKILL")


def test_a_stopped_process_is_killed_too(children):
    """SIGKILL works on it, SIGTERM would not."""
    child = children.start("time.sleep(600)\n")
    os.kill(child.pid, signal.SIGSTOP)
    assert children.reap(child, kill=True) == Exit(None, "SIGKILL")


FORKS = (
    "if os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n"
    "else:\n    print(open('/proc/self/task/%d/children' % os.getpid()).read(), flush=True)\n"
)


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(3)"])
def test_what_it_forked_dies_with_it(children, then):
    """A data loader of user code: killed with its parent, or left behind by one that exited."""
    child = children.start(FORKS + f"    {then}\n")
    pipe = child.pipes["stdout"]
    [line] = hear(pipe, lambda lines: len(lines) == 1)
    children.reap(child, kill="sleep" in then)
    assert wait_gone(int(line))


def test_the_pidfd_tells_its_end(children):
    """Readable at once when it has died, for a selector."""
    child = children.start("os.read(control, 1)\n")
    assert select.select([child.pidfd], [], [], 0)[0] == []
    child.kill()
    child.wait(DEADLINE_S)
    assert select.select([child.pidfd], [], [], 0)[0] == [child.pidfd]


def test_waiting_for_one_that_lives_ends_in_time(children):
    """No longer than it was told to."""
    child = children.start("time.sleep(600)\n")
    started = time.monotonic()
    child.wait(0.05)
    assert time.monotonic() - started < 5


def test_killing_one_that_is_gone_does_no_harm(children):
    """The supervisor and the watchdog may both have decided it."""
    child = children.start("")
    child.wait(DEADLINE_S)
    child.kill()
    assert children.reap(child) == Exit(0, None)


def test_lives_leave_no_descriptors_behind():
    """A run of many restarts: after reaping and closing there is nothing left."""

    def live() -> None:
        child = Child(lambda ends: launch([sys.executable, "-S", "-c", ""], {}, ends))
        child.reap()
        for pipe in child.pipes.values():
            pipe.close()

    live()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        live()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_start_that_fails_leaves_the_child_s_ends_closed():
    """The program is not there: its pipes end, so nobody waits for lines from it."""
    ends_given = []

    def start(ends: Ends) -> int:
        ends_given.extend(ends)
        raise FileNotFoundError("no such program")

    with pytest.raises(FileNotFoundError):
        Child(start)
    for fd in ends_given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# What children leave behind, seen from a process of its own that adopts orphans.


ORPHANS = """
import os, subprocess, sys, time
from ftrain.processes import adopt_orphans, kill_strays, reap_strays

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

def exists(pid):
    return os.path.exists(f"/proc/{pid}")

def leave(seconds):
    '''A process in a session of its own, whose parent has ended.'''
    shell = f"setsid sleep {seconds} > /dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", shell], capture_output=True, check=True).stdout)

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

adopt_orphans()
"""


def seen_by_an_adopter(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS + code],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def test_strays_that_left_their_group_are_killed_and_reaped():
    """A daemon that user code started with setsid; who is known is spared."""
    assert (
        seen_by_an_adopter("""
known, stray = leave(60), leave(60)
kill_strays({known})
print(alive(known), exists(stray))
kill_strays(set())
print(exists(known))
""")
        == "True False\nFalse\n"
    )


def test_ended_strays_are_reaped():
    """They must not pile up as zombies."""
    assert (
        seen_by_an_adopter("""
strays = [leave(0), leave(0)]
until(lambda: not any(map(alive, strays)))
reap_strays(set())
print(any(map(exists, strays)))
""")
        == "False\n"
    )


def test_an_ended_child_that_is_known_is_left_to_who_knows_it():
    """Its exit code is not lost."""
    assert (
        seen_by_an_adopter("""
pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {})
until(lambda: not alive(pid))
reap_strays({pid})
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
        == "7\n"
    )


def test_reaping_strays_without_any_child_does_no_harm():
    """Nor with children that live."""
    assert seen_by_an_adopter("reap_strays(set())\nkill_strays(set())\n") == ""
