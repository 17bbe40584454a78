"""What a worker can ask of its surroundings, and how that can go wrong.

A worker is a generator that yields one of these calls and is resumed with its answer.
"""

from typing import Any, NamedTuple

View = dict[int, int]  # {id: incarnation}, as the liveness barrier returns it
Name = tuple[tuple[int, int], ...]  # a view's name: its sorted items


def name_of(view: View) -> Name:
    return tuple(sorted(view.items()))


class Rank(NamedTuple):
    """What a member publishes about itself before the settle. Blank is below every step."""

    has_state: bool = False
    step: int = -1
    stopping: bool = False
    incarnation: int = 0


class Connect(NamedTuple):
    """The first client of a process registers, with the process's first incarnation."""


class Reregister(NamedTuple):
    """A fresh client with the same id connects: everybody's next answer shows a new incarnation."""


class Meet(NamedTuple):
    """`get_live_nodes`: the liveness barrier. Answer: a View. It has no deadline."""


class Settle(NamedTuple):
    """`wait_at_barrier` under a name that lists its participants, with a deadline."""

    name: Name


class Collective(NamedTuple):
    """One operation of the view's communicator; all members have to post the same kind."""

    name: Name
    use: int  # of the name: a view comes back when a joiner came and went
    view: View
    kind: str
    payload: Any


class Put(NamedTuple):
    """Writes a key of the key-value store; overwrites."""

    folder: Any
    key: Any
    value: Any


class Get(NamedTuple):
    """Answer: the value of a key, or None."""

    folder: Any
    key: Any


class ListFolder(NamedTuple):
    """Answer: {key: value} of all keys in a folder."""

    folder: Any


class Pause(NamedTuple):
    """Something that needs nobody else: imports, compilation, waiting a little."""


class Leave(Exception):
    """The run is finished: this worker's program ends."""


class SettleFailed(Exception):
    """The named barrier ended with an error: deadline, stale call, or a stored old result."""


class CollectiveFailed(Exception):
    """An error that can come from a failed peer (or a digest that differs)."""


class LocalFailure(Exception):
    """Out of memory, a bad record, a user's exception: this process alone knows of it."""


class SelfCheckFailed(Exception):
    """An answer lacks this process or shows an incarnation that it did not register."""


class Violation(Exception):
    """A safety property does not hold: what this package looks for."""
