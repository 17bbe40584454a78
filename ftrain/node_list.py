"""SLURM's short form of host names, `node[01-03,7],gpu5`, written out. No jax."""

from __future__ import annotations

import itertools
import re

_PART = re.compile(r"\[[^\[\]]*\]|[^\[\],]+")


def expand(text: str) -> list[str]:
    """The host names of a node list, in its order: `n[08-10,7]` gives n08 n09 n10 n7.

    Raises:
      ValueError: it is no such list.
    """
    names = [name for item in _split(text) for name in _expand_item(item)]
    if not names:
        raise ValueError("it names no host")
    return names


def _split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if not 0 <= depth <= 1:
            raise ValueError(f"a bracket too many at {text[at:]!r}")
        if letter == "," and not depth:
            items.append(text[start:at])
            start = at + 1
    if depth:
        raise ValueError("a bracket is not closed")
    return [item for item in [*items, text[start:]] if item]


def _expand_item(item: str) -> list[str]:
    parts = [_numbers(p[1:-1]) if p[0] == "[" else [p] for p in _PART.findall(item)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _numbers(ranges: str) -> list[str]:
    """`08-10,7` as 08 09 10 7: a number is as wide as its range's first."""
    found = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{one!r} is no range of numbers")
        first, last = match[1], match[2] or match[1]
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return found
