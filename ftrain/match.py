"""Which leaf of a source of parameters goes where, by name; and all that keeps one from going.

A name is a leaf's path with `/` between its parts: `layers/0/kernel`. Renames are regular
expressions and what takes the place of what they match, applied one after the other as sed would.
Pure functions: neither jax nor files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Leaf(NamedTuple):
    """What is known of a leaf without its values."""

    dtype: str  # `float32`
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> Leaf:
        """The leaf whose text, `float32[3,4]`, that is."""
        dtype, _, sizes = text.removesuffix("]").rpartition("[")
        return cls(dtype, tuple(int(n) for n in sizes.split(",") if n))

    @property
    def is_float(self) -> bool:
        """Whether it may be converted to another leaf that is."""
        return self.dtype.startswith(("float", "bfloat"))


class Match(NamedTuple):
    """Where each leaf comes from."""

    taken: dict[str, str]  # a target's name: the name that the source has for it
    missing: list[str]  # targets that the source has not, in the target's order
    extra: list[str]  # the source's names that no target takes, in the source's order
    problems: list[str]  # a line each; where there are any, nothing may be taken


def rename(names: Iterable[str], renames: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Applies every rename, in order, to every name.

    Returns:
      {new name: old name}, and a line for each rename that matches nothing and for each two names
      that became one.
    """
    now = {name: name for name in names}
    problems = []
    for pattern, replacement in renames.items():
        if not any(re.search(pattern, new) for new in now.values()):
            problems.append(f"map: {pattern!r} matches no path of the source")
        now = {old: re.sub(pattern, replacement, new) for old, new in now.items()}
    found: dict[str, str] = {}
    for old, new in now.items():
        first = found.setdefault(new, old)
        if first != old:
            problems.append(f"{new}: both {first} and {old} of the source would be this leaf")
    return found, problems


def match(
    source: Mapping[str, Leaf],
    target: Mapping[str, Leaf],
    *,
    renames: Mapping[str, str],
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    cast: bool = False,
) -> Match:
    """Pairs the leaves of two trees by name.

    Args:
      source: by name, in the source's order.
      target: by name.
      renames: regular expression: replacement, of the source's names.
      allow_missing: regular expressions, searched for in the targets that the source may lack.
      allow_extra: likewise, in the renamed names of the source that may go unused.
      cast: whether a float may come from a float of another dtype.
    """
    names, problems = rename(source, renames)
    taken, missing, extra = {}, [], []
    for name, wanted in target.items():
        if name not in names:
            missing.append(name)
            if not _is_among(name, allow_missing):
                problems.append(_both(name, str(wanted), "no such leaf"))
            continue
        taken[name] = old = names[name]
        found = source[old]
        may_differ = cast and found.is_float and wanted.is_float
        if found.shape != wanted.shape or (found.dtype != wanted.dtype and not may_differ):
            problems.append(_both(name, str(wanted), str(found), old))
    for name, old in names.items():
        if name not in target:
            extra.append(old)
            if not _is_among(name, allow_extra):
                problems.append(_both(name, "no such leaf", str(source[old]), old))
    return Match(taken, missing, extra, problems)


def _is_among(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _both(name: str, wanted: str, found: str, old: str | None = None) -> str:
    called = "" if old in (None, name) else f", as {old}"
    return f"{name or 'the only leaf'}: the trainer has {wanted}, the source has {found}{called}"
