"""A run that begins with parameters from elsewhere: `init_from`. Read once, by the first donor.

Everything is compared by name, shape and dtype before any value is taken, and all that does not fit
is told at once. The optimizer begins afresh, from the parameters that were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ftrain.errors import InitFromError
from ftrain.initial import initial_state, state_with
from ftrain.match import Leaf, Match, match
from ftrain.pretrained import find_source
from ftrain.sources import MODEL_STATE, Opened, open_source
from ftrain.state import Committed, StateSpec, to_host

if TYPE_CHECKING:
    from ftrain.config import InitFrom

ADVICE = (
    "rename with init_from.map, let leaves be absent with allow_missing or unused with "
    "allow_extra, convert floats with cast: true"
)


class Plan:
    """Which leaves of a spec get their values from where.

    Raises:
      InitFromError: the source cannot be read, or does not fit; a line for each leaf.
    """

    def __init__(self, settings: InitFrom, spec: StateSpec):
        self._spec = spec
        self._places = _names_of(spec, model_state=settings.model_state)
        unwrap = not any(name.startswith("params/") for name in self._places)
        self._source: Opened = open_source(find_source(settings.path), unwrap=unwrap)
        offered = {
            name: leaf
            for name, leaf in self._source.leaves.items()
            if settings.model_state or not name.startswith(MODEL_STATE)
        }
        self._match: Match = match(
            offered,
            {name: Leaf(*_dtype_and_shape(spec.leaves[i])) for name, i in self._places.items()},
            renames=settings.map,
            allow_missing=settings.allow_missing,
            allow_extra=settings.allow_extra,
            cast=settings.cast,
        )
        if self._match.problems:
            raise InitFromError(f"{self._source.text} does not fit", *self._match.problems, ADVICE)
        if not self._match.taken:
            raise InitFromError(f"{self._source.text} gives not one leaf; {ADVICE}")

    @property
    def facts(self) -> dict[str, Any]:
        """What is taken, as the event `parameters_loaded` has it."""
        return {
            "source": self._source.text,
            "leaves": len(self._match.taken),
            "fresh": self._match.missing,
            "unused": self._match.extra,
        }

    def replace(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The leaves of a fresh state, as `to_host` gives them, with those of the source put in.

        Raises:
          InitFromError: the source cannot be read, or a value is too large for its new dtype.
        """
        arrays, problems = list(arrays), []
        found = self._source.read(self._match.taken.values())
        for name, old in self._match.taken.items():
            i = self._places[name]
            arrays[i] = _converted(found[old], arrays[i].dtype)
            lost = np.count_nonzero(_is_infinite(arrays[i])) - np.count_nonzero(
                _is_infinite(found[old])
            )
            if lost:
                problems.append(
                    f"{name}: {lost} values are too large for {arrays[i].dtype.name}, "
                    f"the source has {found[old].dtype.name}"
                )
        if problems:
            raise InitFromError(*problems)
        return arrays


def new_state(trainer: Any, spec: StateSpec, config: Any, report: Callable[..., None]) -> Committed:
    """Step 0: from the seed, and what `init_from` names.

    Raises:
      InitFromError: see `Plan`.
    """
    plan = Plan(config.init_from, spec) if config.init_from.path else None
    fresh = initial_state(trainer, spec, config.seed)
    if plan is None:
        return fresh
    state = state_with(trainer, spec, plan.replace(to_host(fresh.leaves)))
    report("parameters_loaded", **plan.facts)
    return state


def _names_of(spec: StateSpec, *, model_state: bool) -> dict[str, int]:
    """{name: place in the flat list} of the leaves that may be taken."""
    trees = spec.trees(range(len(spec.leaves)))
    places: dict[str, int] = {}
    for tree, prefix in ((trees[0], ""), *([(trees[2], MODEL_STATE)] if model_state else [])):
        for path, place in jax.tree_util.tree_leaves_with_path(tree):
            name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
            if name in places:
                raise InitFromError(
                    f"two leaves of the trainer are called {name}; rename a key of its tree"
                )
            places[name] = place
    return places


def _dtype_and_shape(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return str(leaf.dtype), tuple(leaf.shape)


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # told below
        return np.asarray(array).astype(dtype, copy=False)


def _is_infinite(array: np.ndarray) -> np.ndarray:
    return np.isinf(array) if Leaf(array.dtype.name, ()).is_float else np.zeros(0, bool)
