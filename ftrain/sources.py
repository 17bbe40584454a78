"""Sources of parameters, read: what leaves one has, by name, and then the values of some of them.

Names have `/` between their parts: `layers/0/kernel`; those of model state begin with
`model_state/`. A run gives its parameters and model state. So does another source that has
`params/...`, unless the trainer's own tree begins so; else all that it has are parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ftrain.checkpoint import checkpointer, read_checkpoint
from ftrain.errors import CheckpointUnreadableError, FtrainError, InitFromError
from ftrain.load import read_for_user
from ftrain.match import Leaf
from ftrain.pretrained import Source, safetensors_files

MODEL_STATE = "model_state/"
# The names of safetensors' types in numpy and ml_dtypes.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
# What Orbax, tensorstore and json raise for a file that is torn, truncated, emptied or foreign.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class Opened(Protocol):
    """A source whose leaves are known."""

    text: str  # which it is, for the user
    leaves: dict[str, Leaf]

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The values of some leaves; of typed PRNG keys their words."""
        ...


def open_source(source: Source, *, unwrap: bool) -> Opened:
    """Finds out what a source has.

    Args:
      source: where.
      unwrap: whether the parameters of a source that has `params/...` are what is below it.

    Raises:
      InitFromError: it cannot be read.
    """
    try:
        if source.kind == "run":
            return RunSource(*read_for_user(source.path, source.step), source.path)
        if source.kind == "orbax":
            return _orbax(source.path, unwrap)
        return SafetensorsSource(source.path, unwrap)
    except InitFromError:
        raise
    except FtrainError as error:
        raise InitFromError(str(error)) from error


class RunSource:
    """A checkpoint of ftrain's, whole and verified by its digest."""

    def __init__(self, meta: dict[str, Any], arrays: list[np.ndarray], path: str):
        self.text = f"{path}, step {meta['step']}"
        params, optimizer, _ = meta["counts"]
        self.leaves, self._arrays = {}, {}
        for i, (parts, line) in enumerate(zip(meta["paths"], meta["leaves"], strict=True)):
            if params <= i < params + optimizer:
                continue
            name = ("" if i < params else MODEL_STATE) + "/".join(map(str, parts))
            self.leaves[name] = Leaf.parse(line.rpartition(": ")[2])
            self._arrays[name] = arrays[i]

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """See `Opened`."""
        return {name: self._arrays[name] for name in names}


def _orbax(path: str, unwrap: bool) -> Opened:
    source = OrbaxSource(path, unwrap)
    others = {name for name in source.stored if not name.isdecimal()}
    if {"meta"} <= others <= {"meta", "small"}:  # ftrain's own, by itself
        return RunSource(*read_checkpoint(Path(path).absolute()), path)
    return source


class OrbaxSource:
    """A tree that another program saved with Orbax."""

    def __init__(self, path: str, unwrap: bool):
        self.text, self._path = path, Path(path).absolute()
        self._checkpointer = checkpointer()
        try:
            metadata = self._checkpointer.metadata(self._path).item_metadata
            if metadata is None:
                raise ValueError("it has no metadata")
            self._tree = metadata.tree
            found = jax.tree_util.tree_leaves_with_path(self._tree)
            self.stored = {_name(p): Leaf(_dtype(x), tuple(_shape(x))) for p, x in found}
        except UNREADABLE as error:
            raise _unreadable(path, error) from error
        self._names = _names_in(self.stored, unwrap)
        self.leaves = {name: self.stored[old] for name, old in self._names.items()}

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """See `Opened`."""
        import orbax.checkpoint as ocp

        wanted = {self._names[name]: name for name in names}
        item = jax.tree_util.tree_map_with_path(
            lambda p, x: x if _name(p) in wanted else ocp.PLACEHOLDER, self._tree
        )
        # As numpy, whatever devices it was saved from: they need not exist here.
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self._tree)
        try:
            tree = self._checkpointer.restore(
                self._path, args=ocp.args.PyTreeRestore(item=item, restore_args=as_numpy)
            )
        except UNREADABLE as error:
            raise _unreadable(self.text, error) from error
        found = {_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: np.asarray(found[old]) for old, name in wanted.items()}


class SafetensorsSource:
    """One file of named tensors, or a folder of such files."""

    def __init__(self, path: str, unwrap: bool):
        self.text, self._files = path, {}
        stored, dotted = {}, {}
        for file in safetensors_files(path):
            with _opened(file) as tensors:
                for key in tensors.keys():
                    part, name = tensors.get_slice(key), key.replace(".", "/")
                    if name in stored:
                        raise InitFromError(f"{key} of {file} is also in {self._files[name]}")
                    kind = part.get_dtype()
                    stored[name] = Leaf(DTYPES.get(kind, kind), tuple(part.get_shape()))
                    self._files[name], dotted[name] = file, key
        self._names = _names_in(stored, unwrap)
        self._keys = {name: dotted[old] for name, old in self._names.items()}
        self.leaves = {name: stored[old] for name, old in self._names.items()}

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """See `Opened`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[self._names[name]], []).append(name)
        arrays = {}
        for file, here in by_file.items():
            with _opened(file) as tensors:
                arrays |= {name: tensors.get_tensor(self._keys[name]) for name in here}
        return arrays


def _names_in(stored: Iterable[str], unwrap: bool) -> dict[str, str]:
    """{name as the trainer would have it: stored name}.

    Beside `params` a state has its optimizer, step and more, none of which is taken.
    """
    stored = list(stored)
    inside = [name for name in stored if unwrap and name.startswith("params/")]
    if not inside:
        return {name: name for name in stored}
    model_state = {name: name for name in stored if name.startswith(MODEL_STATE)}
    return {name.removeprefix("params/"): name for name in inside} | model_state


def _opened(file: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _dtype(metadata: Any) -> str:
    return np.dtype(metadata.dtype).name if getattr(metadata, "dtype", None) else "no array"


def _shape(metadata: Any) -> tuple[int, ...]:
    return getattr(metadata, "shape", None) or ()


def _unreadable(path: str, error: BaseException) -> InitFromError:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InitFromError(str(CheckpointUnreadableError(path, why)))
