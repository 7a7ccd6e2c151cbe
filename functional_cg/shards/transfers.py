"""Send a tensor to another rank of a pipeline and receive one, as pure functions in an order that is data.

Each transfer takes a token, which its predecessor in the order made, so that no pass of a compiler can move one across
another or drop it. A launch returns at once: ``wait`` for what is received, and ``end`` what was sent. Each pair of
ranks (from, to) has its own process group: a communicator is one queue, and transfers of one pair cannot block those of
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from .collectives import WAIT

__all__ = [
    "RECEIVE",
    "SEND",
    "TRANSFERS",
    "WAITS",
    "end",
    "is_between_ranks",
    "receive",
    "send",
    "start",
    "wait",
]

_c10d = torch._C._distributed_c10d  # its private functions; tests/pipelines/test_bitwise.py notices a change
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("send(Tensor value, Tensor after, int to, str group) -> Tensor")
_library.define(
    "receive(Tensor after, int[] shape, ScalarType dtype, int source, str group) -> (Tensor, Tensor)"
)
_library.define("end(Tensor launched, Tensor value, Tensor after) -> Tensor")


def _group(name: str) -> Any:
    return _c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _lent(value: Tensor) -> Tensor:
    """Return the bytes of a tensor as one whose memory the allocator does not know as its own.

    Of what it gets, c10d tells the allocator that another stream uses it, and during a capture the allocator then keeps
    that memory until the end: a pipeline would hold all that it has sent and received. Nobody has to be told:
    what reuses the memory comes after ``end`` and ``wait``.
    """
    return from_dlpack(to_dlpack(value.view(-1).view(torch.uint8)))


def _send(value: Tensor, after: Tensor, to: int, group: str) -> Tensor:
    token = torch.empty_like(after)
    work = _group(group).send([_lent(value.contiguous())], to, 0)
    _c10d._register_work(token, work)
    return token


def _receive(
    after: Tensor, shape: Sequence[int], dtype: torch.dtype, source: int, group: str
) -> tuple[Tensor, Tensor]:
    value = torch.empty(shape, dtype=dtype, device=after.device)
    work = _group(group).recv([_lent(value)], source, 0)
    _c10d._register_work(value, work)
    return value, torch.empty_like(after)


def _end(launched: Tensor, value: Tensor, after: Tensor) -> Tensor:
    del value  # as an argument, it has kept its memory until here
    WAIT(launched)
    return torch.empty_like(after)


def _receive_fake(
    after: Tensor, shape: Sequence[int], dtype: torch.dtype, source: int, group: str
) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype, device=after.device), torch.empty_like(after)


for _name, _function in (("send", _send), ("receive", _receive), ("end", _end)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
_library._register_fake("send", lambda value, after, to, group: torch.empty_like(after))
_library._register_fake("receive", _receive_fake)
_library._register_fake("end", lambda launched, value, after: torch.empty_like(after))
SEND = torch.ops.fcg.send.default
RECEIVE = torch.ops.fcg.receive.default
END = torch.ops.fcg.end.default
TRANSFERS = (SEND, RECEIVE, END)
WAITS = (WAIT, END)  # what waits for its first argument


def is_between_ranks(op: Any) -> bool:
    """Whether the result of an op depends on other ranks."""
    return op in TRANSFERS or op.namespace == "_c10d_functional"


def start(device: torch.device) -> Tensor:
    """Return the token that the first transfer takes."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def send(value: Tensor, after: Tensor, to: int, group: str) -> Tensor:
    """Send a tensor, and return the token of the launch, which has to be ended.

    Args:
      value: What to send.
      after: Token of the transfer before.
      to: The receiver's position in the group: 0 or 1.
      group: Name of the group of sender and receiver.
    """
    return cast("Tensor", SEND(value, after, to, group))


def receive(
    after: Tensor, shape: Sequence[int], dtype: torch.dtype, source: int, group: str
) -> tuple[Tensor, Tensor]:
    """Receive a contiguous tensor of a shape, and return it with a token; ``wait`` for it before it is read."""
    return cast("tuple[Tensor, Tensor]", RECEIVE(after, list(shape), dtype, source, group))


def end(launched: Tensor, value: Tensor, after: Tensor) -> Tensor:
    """Wait until a value is sent, and return a token; until then its memory is in use.

    Args:
      launched: Token that ``send`` returned.
      value: What is sent.
      after: Token of the transfer before.
    """
    return cast("Tensor", END(launched, value, after))


def wait(received: Tensor) -> Tensor:
    """Wait until a value has arrived, and return it."""
    return cast("Tensor", WAIT(received))
