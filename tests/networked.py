"""Trainers for runs whose network is broken (`tests.network`): each worker in a cgroup of its own.

A socket belongs for ever to the cgroup that its process was in when it was opened. So a worker
enters its cgroup in the trainer's constructor, before its first connection.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipes.digits import DigitsTrainer
from tests import trainers

FOLDER_VARIABLE = "FTRAIN_TEST_CGROUP"  # the folder of the run's cgroups


def enter_own_cgroup() -> None:
    """`worker-<id>/<incarnation>`: a rule may be about a worker or about one process of it."""
    own = f"worker-{os.environ['FTRAIN_WORKER_ID']}/{os.environ['FTRAIN_INCARNATION']}"
    folder = Path(os.environ[FOLDER_VARIABLE], own)
    folder.mkdir()
    (folder / "cgroup.procs").write_text(str(os.getpid()))


class Paced(trainers.Paced):
    """As `trainers.Paced`."""

    def __init__(self, **arguments: Any):
        enter_own_cgroup()
        super().__init__(**arguments)


class Ordered(trainers.Ordered):
    """As `trainers.Ordered`: it takes other faults too."""

    def __init__(self, **arguments: Any):
        enter_own_cgroup()
        super().__init__(**arguments)


class Digits(DigitsTrainer):
    """As the digits recipe, for measurements."""

    def __init__(self, **arguments: Any):
        enter_own_cgroup()
        super().__init__(**arguments)
