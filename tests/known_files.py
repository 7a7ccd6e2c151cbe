"""Ask once, in the server of :mod:`tests.forked`, which module each file belongs to: `inspect` remembers it.

Whoever registers an op asks for it, and so does each fork that imports the package: 40 ms for the files of torch.
"""

from __future__ import annotations

import inspect
import sys

inspect.getmodule(sys._getframe())
