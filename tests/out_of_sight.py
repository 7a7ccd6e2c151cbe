"""A value that the host watch cannot see, because it is in a file."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from typing import Any

__all__ = ["OutOfSight"]


class OutOfSight:
    """Holds one value, in a file."""

    def __init__(self, value: Any) -> None:
        self._file, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self.write(value)

    def write(self, value: Any) -> None:
        os.pwrite(self._file, pickle.dumps(value), 0)

    def read(self) -> Any:
        return pickle.loads(os.pread(self._file, 4096, 0))
