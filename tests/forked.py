"""Processes that need not import torch: half of a short run is that import."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkContext, ForkServerContext

__all__ = ["context", "start"]

# Nothing of the package, and nothing that starts a thread.
PRELOADED = [
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "pytest",
    "torch",
    "torch._subclasses.fake_tensor",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "tests.known_files",
]


def context() -> ForkContext | ForkServerContext:
    """Forks of one server of this process', which has imported; those that it forked fork themselves."""
    if multiprocessing.parent_process() is not None:
        return multiprocessing.get_context("fork")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def start() -> None:
    """Start the server before somebody else does who has less to import: a process has one of them."""
    context()
    forkserver.ensure_running()
