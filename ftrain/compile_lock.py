"""One worker compiles first and the others find its entries in the compilation cache.

A file lock, so that a compiler that dies lets the next one in, at whatever moment it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def first_compiles(folder: str | None) -> Iterator[None]:
    """Around compilation: alone for whoever comes first, together for all who come later.

    With an empty cache the first compiles everything, once, with all cores; the others wait and
    load its entries side by side. With a warm cache the wait is that of loading it. Without a cache
    folder nobody waits, since there is nothing to share.
    """
    if folder is None:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
