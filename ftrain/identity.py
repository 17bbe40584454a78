"""What a worker computes with: versions, settings, config, data, state tree and programs.

Workers that differ in any of these would give one another wrong numbers, or wait for one another in
collectives that do not match. So each makes this record once, when its programs are lowered; a new
view compares the fingerprints before anything is computed, and a worker that comes later compares
its own with those who train before it joins them. Values of the state are the digests' business.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ftrain.state import StateSpec

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ftrain")
# Those that change what is computed without a trace in the programs' text, or say best why that
# differs. A name that this jax has not is passed over.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_softmax_custom_jvp",
    "jax_allow_f16_reductions",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_optimization_level",
    "jax_debug_nans",
)
ENVIRONMENT = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
SHOWN = 200  # characters of a value

Identity = dict[str, str]  # what: value; what explains other differences comes first


def identity_of(
    config: Mapping[str, Any],
    data: Mapping[str, tuple[int, Sequence[Any]]],
    spec: StateSpec,
    programs: Mapping[str, Any],
) -> Identity:
    """The record of this process. Call it when the programs are lowered.

    Args:
      config: the resolved one, as nested dicts.
      data: of each data set the length, and one sample's leaves or their shapes.
      spec: the state's.
      programs: lowered programs, by the method of the trainer that they come from.
    """
    packages = {f"version of {name}": found for name in PACKAGES if (found := _version(name))}
    settings = {
        f"setting {name.upper()}": _plain(getattr(jax.config, name))
        for name in SETTINGS
        if hasattr(jax.config, name)
    }
    variables = {f"setting {name}": os.environ.get(name, "") for name in ENVIRONMENT}
    sets = {
        name: f"{length} samples of {[f'{x.dtype}{list(x.shape)}' for x in leaves]}"
        for name, (length, leaves) in data.items()
    }
    leaves = dict(line.rsplit(": ", 1) for line in spec.lines())
    texts = {f"program of {name}": text_hash(lowered) for name, lowered in programs.items()}
    return {
        "version of Python": platform.python_version(),
        **packages,
        **settings,
        **variables,
        "device": jax.local_devices()[0].device_kind,
        **{f"config {key}": json.dumps(value) for key, value in _flat(config)},
        **sets,
        **leaves,
        **texts,
    }


def fingerprint(identity: Identity) -> str:
    """Equal exactly if the records are."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def text_hash(lowered: Any) -> str:
    """Of a lowered program, captured constants included; the same in every process."""
    # The text is without locations (no file, no line), and devices are numbered within a program.
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def of_most(prints: Mapping[int, str], least: int) -> str | None:
    """The fingerprint of more than half and of at least `least` workers; None if there is none."""
    most, votes = collections.Counter(prints.values()).most_common(1)[0]
    return most if 2 * votes > len(prints) and votes >= least else None


def difference(me: str, mine: Identity, other: str, theirs: Identity) -> str:
    """In what two records differ, in words: the first difference with both sides, then names.

    Args:
      me: how the holder of `mine` is called, as `worker 2`.
      mine: a record.
      other: how the holder of `theirs` is called.
      theirs: another one.
    """
    differ = [n for n in {**theirs, **mine} if mine.get(n) != theirs.get(n)]
    names = sorted(differ, key=lambda n: n.startswith("program"))
    kind, _, what = names[0].partition(" ")
    has, have = (_shown(record.get(names[0])) for record in (mine, theirs))
    if kind == "program":
        told = (
            f"{what[3:]} of {me} compiles to another program than that of {other}: was the "
            "trainer's file edited, or does it read what differs between workers?"
        )
    elif kind == "version":
        told = f"{me} has {what[3:]} {has}, {other} has {have}"
    elif kind == "setting":
        told = f"{me} has {what}={has}, {other} has {have}"
    else:
        told = f"{names[0]}: {me} has {has}, {other} has {have}"
    more = [n for n in names[1:] if not n.startswith("program")]
    return told + (f" (and other: {', '.join(more[:3])})" if more else "")


def _version(package: str) -> str | None:
    """Of what is loaded, which may no longer be what is installed."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _shown(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= SHOWN else value[:SHOWN] + "..."


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in config.items():
        nested = isinstance(value, Mapping) and above + key != "trainer_args"
        rows += _flat(value, f"{above}{key}.") if nested else [(above + key, value)]
    return rows
