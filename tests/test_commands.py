"""`ftrain check` and `ftrain debug`, and what a terminal shows."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

from tests.runs import REPOSITORY, environment


def ftrain(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftrain.cli", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_check_tells_what_a_start_would_make_of_it(tmp_path):
    """The resolved config, shapes, metrics and sizes; nothing is written or started."""
    done = ftrain("check", "configs/digits.yaml", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    for line in ("batch_shards: 12", "training samples: 1,500", "metrics:          loss, accuracy"):
        assert line in done.stdout
    assert "shards a worker:  3" in done.stdout
    assert "steps:            400" in done.stdout and "last step:        a whole" in done.stdout
    assert not (tmp_path / "run").exists()


def test_check_tells_the_last_smaller_batch():
    """The line's 960 points twice, in batches of 50: its shape is traced too."""
    sets = ["--set", "epochs=2", "--set", "batch_size=50"]
    done = ftrain("check", "configs/linear.yaml", *sets)
    assert done.returncode == 0, done.stderr
    assert "steps:            39" in done.stdout and "last step:        20 samples" in done.stdout


def test_check_refuses_with_the_users_own_traceback(tmp_path):
    """Exit 2; the frames are the user's."""
    done = ftrain("check", "tests/paced.yaml", "--set", "trainer=tests/trainers.py:BadLoss")
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("KeyError: 'no such thing'")
    assert "tests/trainers.py" in done.stderr and "ftrain/step.py" not in done.stderr


def test_debug_stops_at_a_breakpoint_in_the_foreground(tmp_path):
    """One worker on this terminal: the debugger reads what is typed, and training goes on."""
    sets = ["--set", "trainer=tests/trainers.py:Breaks", "--set", "steps=5"]
    done = ftrain(
        "debug", "tests/paced.yaml", "--run-dir", str(tmp_path / "run"), *sets,
        stdin="p step + 1000\ncontinue\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1002" in done.stdout
    assert "ended at step 5: target" in done.stdout


def test_unknown_command_and_missing_config_are_exit_2():
    """One line, and nothing starts."""
    assert ftrain("train", "configs/linear.yaml").returncode == 2
    missing = ftrain("run", "configs/nothing.yaml")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1 and "configs/nothing.yaml" in missing.stderr


def test_a_terminal_has_a_panel_that_moves(tmp_path):
    """Under a pseudo-terminal it is redrawn in place; lines that stay stand above it."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "ftrain.cli", "run", "tests/paced.yaml", "--set", "steps=150"]
    argv += ["--run-dir", str(tmp_path / "run")]
    env = {**environment(), "TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(
        argv, cwd=REPOSITORY, env=env, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL
    )
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed: it has ended
            break
    assert process.wait(10) == 0
    os.close(ours)
    text = shown.decode()
    assert text.count(" / 150") >= 3 and "\x1b[2K" in text and "last fault" in text
    assert "done: step 150 is reached and saved" in text
