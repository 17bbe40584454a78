"""The rules of a config that are over several of its keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ftrain.yaml_lines import Path


def broken_rules(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    """The rules over several keys: (keys, message). A key that is absent breaks none."""
    keys = [("batch_size",), ("batch_shards",), ("cluster", "workers"), ("cluster", "min_workers")]
    size, shards, workers, least = map(values.get, keys)
    yield from _length(values)
    yield from _at_once(values)
    yield from _commit(values)
    yield from _init_from(values)
    yield from _profile(values)
    if workers and least and least > workers:
        why = f"min_workers={least} is more than workers={workers}"
        yield keys[2:], f"{why}; lower min_workers or raise workers"
    if not size or not shards or (size % shards == 0 and shards >= (workers or 1)):
        return
    small = [d for d in range(1, int(size**0.5) + 1) if size % d == 0]
    choices = [d for d in {*small, *(size // d for d in small)} if d >= (workers or 1)]
    near = sorted(sorted(choices, key=lambda d: abs(d - shards))[:8])
    advice = (
        f"use one of {', '.join(map(str, near))}" if near else f"batch_size allows up to {size}"
    )
    if size % shards:
        yield keys[:2], f"batch_shards={shards} does not divide batch_size={size}; {advice}"
    else:
        why = f"batch_shards={shards} is less than cluster.workers={workers}"
        yield keys[:3], f"{why}; {advice}, or fewer workers"


def _at_once(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    keys: list[Path] = [("shards_at_once",), ("reduction",), ("on_nonfinite",)]
    count, reduction, reaction = map(values.get, keys)
    if (count or 1) == 1:
        return
    if reduction == "reproducible":
        why = "reduction=reproducible computes each shard by itself"
        yield keys[:2], f"{why}, not {count} at once; leave shards_at_once out"
    if reaction == "ignore":
        why = "on_nonfinite=ignore does not judge sums, which several shards at once need"
        yield [keys[0], keys[2]], f"{why}; leave shards_at_once out"


def _commit(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    keys: list[Path] = [("commit",), ("steps_per_commit",)]
    commit, count = map(values.get, keys)
    if commit == "lean" and (count or 1) > 1:
        why = f"commit=lean has no state before the barrier to take {count} steps from"
        yield keys, f"{why}; leave one of them out"


def _profile(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    keys: list[Path] = [("profile", "step"), ("profile", "steps"), ("steps",)]
    first, count, steps = map(values.get, keys)
    if first and count and steps and first + count - 1 > steps:
        why = f"step={first} and the {count} from there are not all within the run's steps={steps}"
        yield keys, f"{why}; profile earlier steps"


def _length(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    keys: list[Path] = [("steps",), ("epochs",)]
    if not values.keys() >= set(keys):
        return  # one was refused already
    steps, epochs = map(values.get, keys)
    if steps and epochs:
        yield keys, f"steps={steps} and epochs={epochs} each say how long to train; keep one"
    elif not steps and not epochs:
        yield keys, "steps or epochs is required; write one of them"


def _init_from(values: Mapping[Path, Any]) -> Iterator[tuple[list[Path], str]]:
    path: Path = ("init_from", "path")
    others = {key: values[key] for key in values if key[0] == "init_from" and key != path}
    if not values.get(path, True) and any(others.values()):
        yield [next(k for k, v in others.items() if v)], "needs init_from.path; write it"
    for key, given in others.items():
        if key[1:] not in (("map",), ("allow_missing",), ("allow_extra",)):
            continue
        for pattern in given:
            replacement = given[pattern] if key[1] == "map" else ""
            if not isinstance(pattern, str) or not isinstance(replacement, str):
                continue  # refused already
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                yield [key], f"{pattern!r} is no regular expression that works: {error}"
