"""A snapshot: one file that holds the committed state, written and read at the speed of memory.

    magic, size of the header | header: JSON, a checkpoint's meta data | each leaf, aligned

The digest in the header was made on the device that the state came from, so whoever reads a file
checks the copy with it too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ftrain.errors import CheckpointUnreadableError
from ftrain.memory_tier import PART, SAVE

MAGIC = b"ftrain snapshot\n"
ALIGNED = 64  # bytes; what jax takes without a copy
_HEAD = struct.Struct("<16sQ")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, struct.error)


def write_snapshot(folder: Path, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> Path:
    """Writes `folder/<step>`, whole or not at all.

    Args:
      folder: exists.
      meta: as `checkpoint.meta_of` gives it, with the digest.
      arrays: the leaves, as `state.to_host` gives them.

    Raises:
      OSError: no room, or no way to write there. Nothing is left.
    """
    path = folder / str(meta["step"])
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    header = json.dumps(meta).encode()
    places, size = _places(len(header), [a.nbytes for a in arrays])
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # no room is told now, not half way
        _write(fd, _HEAD.pack(MAGIC, len(header)) + header, 0)
        for array, place in zip(arrays, places, strict=True):
            if array.nbytes:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                _write(fd, memoryview(flat), place)
        os.rename(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        os.close(fd)
    return path


def hand_over(path: Path) -> Path:
    """The same snapshot under a name that is the saver's to remove, whoever removes the first."""
    save = path.with_name(path.name + SAVE)
    with contextlib.suppress(FileNotFoundError):
        save.unlink()
    try:
        os.link(path, save)
    except OSError:  # no links there
        path.rename(save)
    return save


def keep_newest(folder: Path, written: Sequence[int]) -> None:
    """Removes every snapshot but those that were written last; not what waits for the disk.

    By the order of writing, not by number: what an earlier, longer history left is of no use. What
    a worker was writing when it died goes too.
    """
    for name in os.listdir(folder):
        if (name.isdigit() and int(name) not in written) or _is_abandoned(name):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()


def _is_abandoned(name: str) -> bool:
    writer = name.removesuffix(PART).rpartition(".")[2]
    return name.endswith(PART) and not os.path.exists(f"/proc/{writer}")


def read_snapshot(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The meta data and leaves of a snapshot. Whoever uses them compares the digest.

    Raises:
      CheckpointUnreadableError: it is torn or not ftrain's.
    """
    try:
        with open(path, "rb") as file:
            meta, places, size = _read_header(file)
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise ValueError(f"it has {found} bytes, {size} were written")
            return meta, list(_read_arrays(file, meta, places))
    except UNREADABLE as error:
        raise CheckpointUnreadableError.by(path, error) from error


def read_meta(path: Path) -> dict[str, Any]:
    """A snapshot's meta data alone.

    Raises:
      CheckpointUnreadableError: it is torn or not ftrain's.
    """
    try:
        with open(path, "rb") as file:
            return _read_header(file)[0]
    except UNREADABLE as error:
        raise CheckpointUnreadableError.by(path, error) from error


def _read_header(file: Any) -> tuple[dict[str, Any], list[int], int]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not any(head):
        raise ValueError("it is empty" if not any(head) else "it is cut short")
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ValueError("it is no snapshot of ftrain's")
    meta = json.loads(file.read(length))
    places, size = _places(length, [math.prod(s) * _dtype(d).itemsize for s, d in meta["shapes"]])
    return meta, places, size


def _read_arrays(file: Any, meta: dict[str, Any], places: list[int]) -> Iterator[np.ndarray]:
    for (shape, name), place in zip(meta["shapes"], places, strict=True):
        # Each into memory of its own: a leaf that never changes must not keep all others alive.
        array = np.empty(shape, _dtype(name))
        file.seek(place)
        if array.nbytes and file.readinto(memoryview(array.reshape(-1).view(np.uint8))) != (
            array.nbytes
        ):
            raise ValueError("it is cut short")
        yield array


def _dtype(name: str) -> np.dtype:
    return jnp.dtype(name)


def _places(header: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each leaf begins, and the size of the file."""
    places, place = [], _aligned(_HEAD.size + header)
    for size in sizes:
        places.append(place)
        place = _aligned(place + size)
    return places, place


def _aligned(place: int) -> int:
    return -(-place // ALIGNED) * ALIGNED


def _write(fd: int, data: Any, place: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, place)
        view, place = view[done:], place + done
