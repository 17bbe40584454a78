"""ftrain: fault-tolerant data-parallel training on JAX.

Importing the package imports neither jax nor flax: the names below load on first use, so that the
supervisor stays light and a restarted worker pays only for what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrain.config import Config as Config
    from ftrain.data import Dataset as Dataset
    from ftrain.load import load_params as load_params
    from ftrain.load import load_state as load_state
    from ftrain.state import Init as Init
    from ftrain.state import Loss as Loss
    from ftrain.state import TrainState as TrainState
    from ftrain.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME = {
    "Config": "ftrain.config",
    "Dataset": "ftrain.data",
    "Init": "ftrain.state",
    "Loss": "ftrain.state",
    "TrainState": "ftrain.state",
    "Trainer": "ftrain.trainer",
    "load_params": "ftrain.load",
    "load_state": "ftrain.load",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ftrain' has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
