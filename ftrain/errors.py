"""The exceptions and exit codes that all of ftrain shares.

An exception's message is complete: the value, the rule it breaks and what to do next, so that the
command line prints it as it is. The exit codes are the contract with SLURM and Kubernetes: only
`EXIT_TRY_AGAIN` means that running the same command again continues the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXIT_OK = 0
"""The target step is reached and its checkpoint is durable."""
EXIT_DEFECT = 1
"""A defect of ftrain itself; a traceback is printed."""
EXIT_REFUSED = 2
"""The command line, config, trainer or dataset cannot be used; no step was tried."""
EXIT_GAVE_UP = 3
"""The run failed and a rerun would not help by itself."""
EXIT_TRY_AGAIN = 75
"""Stopped with its state saved (EX_TEMPFAIL); the same command continues the run."""


class FtrainError(Exception):
    """Base of every error that ftrain raises on purpose; catch it to catch them all."""


class ConfigError(FtrainError):
    """Raised when the command line, the config or the trainer cannot be used (exit 2).

    Attributes:
      problems: one complete line for each problem, in the order they are told.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class RunInUseError(FtrainError):
    """Raised when another supervisor, alive, holds the lock of the run directory."""

    def __init__(self, run_dir: str, pid: int | None):
        self.run_dir = run_dir
        self.pid = pid
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{run_dir} is in use by {holder}, and a run directory has one supervisor; "
            "stop that one first, or give another folder with --run-dir"
        )


class StateMismatchError(FtrainError):
    """Raised when a leaf of the state differs in presence, shape or dtype between two holders.

    A side is what that holder has there, such as `float32[512,10]`; None is "no such leaf". The
    donor is a live worker or a checkpoint.
    """

    def __init__(
        self,
        path: str,
        worker_side: str | None,
        donor_side: str | None,
        *,
        worker: str = "this worker",
        donor: str = "the donor",
    ):
        self.path = path
        self.worker_side = worker_side
        self.donor_side = donor_side
        self.difference = (
            f"{path}: {worker} has {worker_side or 'no such leaf'}, "
            f"{donor} has {donor_side or 'no such leaf'}"
        )
        super().__init__(
            f"{self.difference}, and all of a run must have the same; "
            "undo the change to the trainer, or start a new run with --run-dir"
        )

    @classmethod
    def between(
        cls, mine: Sequence[str], theirs: Sequence[str], *, worker: str, donor: str
    ) -> StateMismatchError:
        """The first difference of two lists of `path: dtype[shape]` lines."""
        ours = dict(line.rsplit(": ", 1) for line in mine)
        other = dict(line.rsplit(": ", 1) for line in theirs)
        path = next((p for p in [*ours, *other] if ours.get(p) != other.get(p)), None)
        if path is None:
            path = "the order of leaves"
            return cls(path, ", ".join(ours), ", ".join(other), worker=worker, donor=donor)
        return cls(path, ours.get(path), other.get(path), worker=worker, donor=donor)


class CheckpointNotFoundError(FtrainError):
    """Raised when the checkpoint asked for, or any at all, is not in the run directory."""

    def __init__(self, run_dir: str, step: int | None = None, available: Sequence[int] = ()):
        self.run_dir = run_dir
        self.step = step
        self.available = tuple(available)
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        steps = ", ".join(map(str, self.available))
        action = f"use one of the steps {steps}" if steps else "check the folder, or train first"
        super().__init__(f"{run_dir} has {what}; {action}")


class CheckpointUnreadableError(FtrainError):
    """Raised when a checkpoint is there but torn or corrupt, and no other may take its place."""

    def __init__(self, path: str, why: str):
        self.path = path
        self.why = why
        super().__init__(
            f"{path} cannot be read: {why}; use another step, or bring this folder back from a copy"
        )

    @classmethod
    def by(cls, path: object, error: BaseException) -> CheckpointUnreadableError:
        """Of what reading it raised."""
        return cls(str(path), str(error).splitlines()[0] if str(error) else type(error).__name__)


def told_of(error: BaseException, path: object) -> str:
    """An error of a save in one line: the system's as its path and text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    text = " ".join(str(error).split())
    return f"{path}: {type(error).__name__}: {text[:500]}"


class RestartLimitError(FtrainError):
    """Raised when a worker has failed more often in a row than `restart.max_failures` allows."""

    def __init__(self, worker: int, failures: int, max_failures: int, cause: str):
        self.worker = worker
        self.failures = failures
        self.max_failures = max_failures
        self.cause = cause
        super().__init__(
            f"worker {worker} failed {failures} times in a row, "
            f"restart.max_failures={max_failures}, last by {cause}; "
            f"see logs/worker-{worker}.log, mend the cause and run the same command again"
        )


class AddressError(ConfigError):
    """Raised when an address is malformed, has no host behind it, or is not this host's (exit 2).

    The message names the address and what to give instead.
    """


class UnresolvedError(AddressError):
    """Raised when a name has no address, or none yet."""


class TrainerError(ConfigError):
    """Raised when the trainer's code breaks a rule of the API; nothing has started (exit 2)."""


class InitFromError(ConfigError):
    """Raised when a run cannot begin with the parameters that `init_from` names (exit 2)."""

    def __init__(self, *problems: str):
        super().__init__(*(f"init_from: {problem}" for problem in problems))


class DatasetError(FtrainError):
    """Raised when a data set or one of its samples cannot be used; names what and which."""


class LeanUpdateError(FtrainError):
    """Raised where `commit: lean` and an update made nan or infinite values of finite gradients."""


class AttemptFailedError(FtrainError):
    """Raised inside a block when it failed for a reason that may be another worker's.

    A cancelled collective, a settle that ran out, a digest that does not match: all members abort
    and try again (rule R3). Whatever else is raised there is this worker's own error.
    """


class WorkerDiffersError(FtrainError):
    """Raised on a worker whose code, settings, versions or data are not those of the others.

    Attributes:
      others_go_on: the others train without this worker; False: all workers have raised this, since
        nobody can say who is right, or too few would be left.
    """

    def __init__(self, difference: str, *, others_go_on: bool):
        self.others_go_on = others_go_on
        end = (
            "the others go on without it, and it may try again"
            if others_go_on
            else "no run begins with that"
        )
        super().__init__(
            f"{difference}; all workers of a run must be the same: {end}. Undo the difference, or "
            "start a new run with --run-dir"
        )


class ReplicaDivergedError(FtrainError):
    """Raised on the worker whose committed state differs from that of most others."""

    def __init__(self, worker: int, step: int, own: bytes, most: bytes):
        super().__init__(
            f"the state of worker {worker} at step {step} has digest {own.hex()[:16]}, most "
            f"workers have {most.hex()[:16]}: it is replaced and gets theirs; if it comes again, "
            "look at that machine's memory and device"
        )


class ReplicasDifferError(FtrainError):
    """Raised on every worker when states differ and no state is that of most."""

    def __init__(self, step: int, digests: Mapping[int, bytes]):
        sides = ", ".join(f"worker {w} has digest {d.hex()[:16]}" for w, d in digests.items())
        super().__init__(
            f"replicas differ at step {step}, and none is that of most: {sides}; look for what "
            "differs between the workers (loss or update not pure, memory errors), then run the "
            "same command again: it continues from the newest checkpoint"
        )


# Exit codes of a worker process, for its supervisor; what it reported says more.
WORKER_REFUSED = 12
"""The trainer or data set cannot be used; it never took part."""
WORKER_LOCAL_ERROR = 13
"""An error of its own, reported with its traceback."""
WORKER_LOST_MEMBERSHIP = 14
"""The barrier's answer was not about this process (rule R9)."""
WORKER_STUCK = 15
"""Its collective was cancelled and did not end (rule R7)."""
