"""What must never happen, checked at every commit, restore, block and end."""

from .calls import Name, Violation
from .collectives import Garbage, Reduced
from .process import Process, State

INITIAL = State(0, 0)


class Checks:
    """An onlooker's knowledge of every state there ever was."""

    def __init__(self):
        self.parent: dict[State, State] = {}
        self.by_inputs: dict[tuple[State, Reduced | Garbage], State] = {}
        self.committed: dict[int, State] = {}  # the last state committed for each step
        self.newest_step = 0
        self.finished: State | None = None  # what was saved when the run was declared finished
        self.actions: dict[tuple[Name, int, int], str] = {}

    @property
    def any_commit(self) -> bool:
        return bool(self.committed)

    def next_state(self, state: State, reduced: Reduced | Garbage) -> State:
        """The state after one more step: the same from the same state and the same sum."""
        source = (state, reduced)
        if source not in self.by_inputs:
            child = State(state.step + 1, len(self.by_inputs) + 1)
            self.by_inputs[source] = child
            self.parent[child] = state
        return self.by_inputs[source]

    def act(self, process: Process, name: Name, use: int, block: int, action: str) -> None:
        """All members of a view do the same in the same block of it."""
        first = self.actions.setdefault((name, use, block), action)
        if first != action:
            raise Violation(f"SPLIT: {process} does {action!r} where a member does {first!r}")

    def commit(self, process: Process, state: State, word: Reduced | Garbage) -> None:
        """`process` is about to make `state` its own; `word` is what its step reduced."""
        if isinstance(word, Garbage):
            raise Violation(f"GARBAGE: {process} commits a step whose sum is {word.reason!r}")
        if process.state is not None and state.step < process.state.step:
            raise Violation(f"BACKWARDS: {process} from {process.state} to {state}")
        if state.step <= self.newest_step:
            if self.committed.get(state.step) != state:
                raise Violation(f"RECOMMIT: {process} commits step {state.step} with another value")
        elif self.finished is not None:
            raise Violation(f"TRAINS AFTER THE END: {process} commits {state}")
        self.newest_step = max(self.newest_step, state.step)
        self.committed[state.step] = state

    def one_lineage(self, process: Process, processes: list[Process]) -> None:
        """No two living processes hold states of which neither continues the other."""
        for other in processes:
            if other is process or not other.alive or other.state is None:
                continue
            old, new = sorted((process.state, other.state))
            while new.step > old.step:
                new = self.parent[new]
            if new != old:
                raise Violation(f"FORK: {process} {process.state}, {other} {other.state}")

    def restore(self, process: Process, state: State, holders: list[Process]) -> None:
        if self.finished is not None:
            raise Violation(f"RESTORED AFTER THE END: {process} {state}")
        if not self.any_commit:
            return
        if holders:
            raise Violation(f"LOST: {process} restores {state} while {holders} hold state")
        if state.step < self.newest_step:
            raise Violation(f"REWIND: {process} restores {state}, {self.newest_step} was committed")

    def synced(self, process: Process, state: State) -> None:
        """A digest of what the donor sent, against what the receiver holds."""
        if process.state is None or process.state == state:
            return
        if process.state.step == state.step:
            raise Violation(f"REPLICA: {process} holds {process.state}, the donor {state}")
        if process.state.step > state.step:
            raise Violation(f"DONOR BEHIND: {process} holds {process.state}, the donor {state}")

    def finish(self, process: Process, state: State) -> None:
        if state.step < self.newest_step:
            raise Violation(f"FINISHED EARLY: {process} saved {state} of {self.newest_step}")
        self.finished = self.finished or state

    def end(self, disk: State | None) -> None:
        """Everybody has left: the newest commit is durable."""
        if disk is None or disk != self.committed.get(self.newest_step, INITIAL):
            raise Violation(f"LOST AT THE END: {disk} is durable, of step {self.newest_step}")
