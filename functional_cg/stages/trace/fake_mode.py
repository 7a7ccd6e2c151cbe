"""Fake: torch's fake mode, made to answer alike in each run of a step, and to raise without a log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses import fake_tensor

__all__ = ["FakeMode", "without_log"]

# They return one tensor as two results; from the cache of the fake mode come two tensors.
_ONE_TENSOR_TWICE = frozenset({torch.ops.aten.mkldnn_rnn_layer_backward.default})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class FakeMode(fake_tensor.FakeTensorMode):
    """The mode in which a step is traced: ops give shapes, dtypes and devices, and no kernel runs."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Any:
        if func not in _ONE_TENSOR_TWICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with fake_tensor.disable_fake_tensor_cache(self):
            return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def without_log() -> Iterator[None]:
    """Keep torch from logging, on this thread, the traceback of an op that it raises all the same."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(
            "failed while attempting to run meta"
        )

    fake_tensor.log.addFilter(passes)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(passes)
