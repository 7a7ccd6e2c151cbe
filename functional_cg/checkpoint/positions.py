"""Positions of loaders as JSON: what their ``state_dict()`` returns, which is plain data in any nesting."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor

__all__ = ["decode", "encode"]

_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def encode(position: Any) -> bytes:
    """Return a position as text.

    Raises:
      TypeError: Naming a value that is no plain data.
    """
    return json.dumps(_plain(position, "state_dict()")).encode()


def decode(text: bytes) -> Any:
    """Return the position; nothing in the text is executed.

    Raises:
      ValueError: If it is none.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # too deep; a shape that does not fit
        raise ValueError(f"no position of a loader: {error}") from error


def _plain(value: Any, path: str) -> Any:
    """Return JSON; objects of it have one key, which says what they stand for."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is tuple or kind is set:
        return {kind.__name__: [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [(_plain(key, path), _plain(item, f"{path}[{key!r}]")) for key, item in value.items()]
        return {"dict": pairs}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is Tensor and value.dtype in _DTYPES:
        numbers = value.detach().cpu().contiguous()
        raw = bytes(numbers.reshape(-1).view(torch.uint8).tolist())
        return {"tensor": [str(value.dtype), list(value.shape), base64.b64encode(raw).decode()]}
    if kind.__module__ == "numpy" and value.dtype.kind in "biuf":
        text = base64.b64encode(value.tobytes()).decode()
        return {"numpy": [value.dtype.str, list(value.shape), text, kind.__name__ == "ndarray"]}
    raise TypeError(
        f"checkpoints: `{path}` of the loader is of type {kind.__name__}; a position is stored as plain data, without "
        "pickle: numbers, texts, bytes, tensors, arrays, and dicts, lists, tuples and sets of those. "
        "To fix: let the `state_dict` of the dataset or sampler return such."
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "dict":
        return {_value(key): _value(item) for key, item in content}
    if kind in ("tuple", "set"):
        return (tuple if kind == "tuple" else set)(map(_value, content))
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tensor":
        dtype, shape, text = content
        raw = bytearray(base64.b64decode(text))
        (found,) = [one for one in _DTYPES if str(one) == dtype]
        flat = torch.frombuffer(raw, dtype=found) if raw else torch.empty(0, dtype=found)
        return flat.reshape(shape)
    if kind == "numpy":
        import numpy as np

        dtype, shape, text, is_array = content
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(dtype)
        array = np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)
        return array.copy() if is_array else array[()]
    raise ValueError(kind)
