"""Reading a record file while it is written: whole lines, each once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

CHUNK_BYTES = 1 << 22


class LineReader:
    """Gives the rows of a file of JSON lines that were added since it last looked.

    Attributes:
      offset: bytes read so far; always the beginning of a line.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0):
        self._path, self.offset = os.fspath(path), offset

    def new(self) -> Iterator[dict[str, Any]]:
        """The rows that have come; none while the file is not there. Reads as it is asked."""
        while data := self._read():
            whole = data[: data.rfind(b"\n") + 1]
            if not whole:
                return
            self.offset += len(whole)
            yield from map(json.loads, whole.splitlines())

    def _read(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(self.offset)
                return file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
