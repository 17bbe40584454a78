"""What a survivor holds on to while another dies and comes back, again and again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.runs import REPOSITORY, environment


def held_after(cycles: int, folder) -> list[dict[str, int]]:
    """The rows of scripts/bench/cycles.py: descriptors, threads and memory after each cycle."""
    script = REPOSITORY / "scripts" / "bench" / "cycles.py"
    subprocess.run(
        [sys.executable, str(script), "tests/paced.yaml", "--cycles", str(cycles)]
        + ["--run-dir", str(folder / "run")],
        cwd=REPOSITORY,
        env=environment(),
        check=True,
        timeout=110 if cycles < 20 else 800,
    )
    return json.loads((folder / "run" / "cycles.json").read_text())


def check_flat(rows: list[dict[str, int]]) -> None:
    """Nothing grows once the first cycles have loaded what is loaded late."""
    settled = rows[2]
    for row in rows[3:]:
        assert row["descriptors"] <= settled["descriptors"] + 2
        assert row["threads"] <= settled["threads"] + 2
        assert row["rss_mb"] <= settled["rss_mb"] * 1.15 + 10


@pytest.mark.slow
def test_eight_cycles_leave_nothing_behind(tmp_path):
    """Each leaked view would show as some 6 descriptors and 10 threads."""
    check_flat(held_after(8, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_cycles_leave_nothing_behind(tmp_path):
    """The same for long."""
    check_flat(held_after(50, tmp_path))
