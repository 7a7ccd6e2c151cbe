"""The calls of the CUDA driver that torch lacks: the one door to ``cuda.bindings``, which torch needs itself."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

__all__ = ["apart_from_captures", "done", "driver", "importable"]


def importable(name: str) -> bool:
    """Whether a module of a package can be imported."""
    package = name.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None


def driver() -> Any:
    """Return the module of the driver's calls; imported where it is needed."""
    from cuda.bindings import driver as calls

    return calls


def done(cu: Any, result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver returned besides its error code.

    Raises:
      torch.OutOfMemoryError: If the call ran out of memory.
      RuntimeError: If it failed otherwise.
    """
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        kind = torch.OutOfMemoryError if error == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA driver: {cu.cuGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def apart_from_captures() -> None:
    """Let this thread ask for events while another one captures a graph: by default, the question ends the capture.

    Captures of this package look at their own thread only; ``torch.cuda.graph`` looks at all of them.
    """
    if torch.cuda.is_initialized() and importable("cuda.bindings"):
        cu = driver()
        done(cu, cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
