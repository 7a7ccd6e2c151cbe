"""Tell what a forward works out once and remembers, such as the kind of a loss or a table, from what it counts.

A forward may set an attribute that was None, and go by its value from then on. If it makes the same calls before and
after, but for those that computed what it remembers from constants, and from buffers that it never writes, and changes
nothing more, then it is a pure function all the same. Both runs are on fake tensors, which takes no arithmetic and
draws no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree
from ..ambient.compiling import compiling
from ..state.arena import BufferSpec
from ..tensors.aten import can_draw
from ..tensors.fake_mode import aside_on_fakes
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from .attributes import Held, Same, changed, held, newly_known
from .buffers import buffer_at, unset_buffers
from .call import function_of

__all__ = ["only_remembers"]

_SLICE = torch.ops.aten.slice.Tensor


def only_remembers(
    copied: Callable[[Mapping[str, Tensor]], nn.Module],
    method: str,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Held,
    after: Held,
) -> bool:
    """Whether a forward that has changed its module will make the same calls from now on, and change nothing more.

    Args:
      copied: Makes a private module that holds the given tensors.
      method: What is called of it, for :func:`functional_cg.nn.call.run`.
      tensors: Parameters and buffers.
      args: Arguments of the forward.
      kwargs: Likewise.
      before: Contents of the module before it ran.
      after: Contents after it.
    """
    known = newly_known(before, after)
    if known is None:
        return False
    with aside_on_fakes() as fake:
        fakes = {name: fake(tensor) for name, tensor in tensors.items()}
        module = copied(fakes)
        args, kwargs = tree.map(
            lambda one: fake(one) if isinstance(one, Tensor) else one, (tuple(args), dict(kwargs))
        )
        resized = [path for path in known if path in tensors and buffer_at(module, path) is not None]
        unset = [*unset_buffers(module), *resized]
        start = held(module, unset) | dict.fromkeys(resized)
        try:
            calls, found = _calls(function_of(module, method), args, kwargs), held(module, unset)
            again, at_last = _calls(function_of(module, method), args, kwargs), held(module, unset)
        except Exception:  # whatever a forward raises on tensors without values
            return False
        if newly_known(start, found) != known or changed(found, at_last):
            return False
        made = [one.value for path, one in found.items() if path in known and isinstance(one, Same)]
        trained = {name for name, _ in module.named_parameters()}
        steady = {storage_key(fakes[name]) for name in tensors.keys() - trained} - _written(calls)
        needed = _without(calls, made, steady)
        return needed is not None and _agree(needed, again)


@dataclass(frozen=True, slots=True)
class _Call:
    """An op that ran.

    Attributes:
      op: The op.
      given: Its arguments, flat: tensors, and all else with its type.
      made: Its results, flat.
      draws: Whether it draws random numbers.
    """

    op: Any
    given: list[Any]
    made: list[Any]
    draws: bool

    def tensors(self) -> set[int]:
        """Return the ids of the tensors it reads."""
        return set(map(id, _tensors(self.given)))

    def results(self) -> set[int]:
        """Return the ids of the tensors it makes, or writes."""
        return set(map(id, _tensors(self.made)))


def _written(calls: Sequence[_Call]) -> set[int]:
    """Return the storages that calls may write: each of a call that writes any."""
    writing = [call for call in calls if call.op._schema.is_mutable or row_of(call.op).statistics]
    return {storage_key(one) for call in writing for one in _tensors([*call.given, *call.made])}


def _without(calls: Sequence[_Call], remembered: Sequence[Tensor], steady: Set[int]) -> list[_Call] | None:
    """Return the calls but those that compute the remembered tensors.

    Args:
      calls: The calls.
      remembered: The tensors.
      steady: Storages of what is neither trained nor written, such as the slopes that a table is made of.
    Returns:
      The others; None if the tensors are made of more than that, and constants.
    """
    # By storage, since a table may be filled through views; a view of something else makes no storage.
    wanted, made, computing = {storage_key(one) for one in remembered}, set[int](), set[int]()
    for number in reversed(range(len(calls))):
        read, written = (
            set(map(storage_key, _tensors(part))) for part in (calls[number].given, calls[number].made)
        )
        if written & wanted:
            computing.add(number)
            wanted |= read
            made |= written - read
    if not wanted <= made | steady or any(calls[number].draws for number in computing):
        return None
    kept = set(map(id, remembered))
    # What other calls use as well is computed each time.
    for number in sorted(computing, reverse=True):
        readers = (
            at for at in range(number + 1, len(calls)) if calls[at].tensors() & calls[number].results()
        )
        if not calls[number].results() <= kept and not computing.issuperset(readers):
            computing.remove(number)
    return [call for number, call in enumerate(calls) if number not in computing]


def _agree(calls: Sequence[_Call], others: Sequence[_Call]) -> bool:
    """Whether two runs made the same calls on the same values."""
    twins: dict[int, int] = {}  # from the tensors that the second run made to those of the first
    for call, other in zip_longest(calls, others):
        if call is None or other is None or call.op is not other.op:
            return False
        if not _alike(call.given, other.given, twins) or not _alike(call.made, other.made, None):
            return False
        made = zip(call.made, other.made, strict=True)
        twins |= {id(b): id(a) for a, b in made if isinstance(a, Tensor)}
    return True


def _alike(values: Sequence[Any], others: Sequence[Any], twins: Mapping[int, int] | None) -> bool:
    """Whether two lists hold equal numbers, and the same tensors; without ``twins``, tensors of the same kind."""

    def same(one: Any, other: Any) -> bool:
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return bool(one == other)
        if twins is not None:
            return twins.get(id(other), id(other)) == id(one)
        return BufferSpec.of(one) == BufferSpec.of(other)

    return len(values) == len(others) and all(map(same, values, others))


def _calls(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Call]:
    calls = _Calls()
    with calls:
        compiling(function, *args, **kwargs)
    return calls.seen


class _Calls(TorchDispatchMode):
    """Lists the ops that run.

    Attributes:
      seen: The ops so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Call] = []
        self._whole: dict[
            int, tuple[Tensor | None, Tensor]
        ] = {}  # by the id of a slice, it and what it is all of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor, not a computation
        given = list(_flat((args, tuple(kwargs.items()))))
        if row_of(func).lifts and type(args[0]) is Tensor:
            with torch._C._DisableTorchDispatch():
                given = [args[0].dtype, repr(args[0].tolist())]
        result = func(*args, **kwargs)
        if func is _SLICE and result.shape == args[0].shape:  # all of it, as of a table that is long enough
            self._whole[id(result)] = result, self._whole.get(id(args[0]), (None, args[0]))[1]
            return result
        given = [self._whole[id(one)][1] if id(one) in self._whole else one for one in given]
        self.seen.append(_Call(func, given, list(_flat(result)), can_draw(func, args, kwargs)))
        return result


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (one for one in values if isinstance(one, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    """Yield tensors, and other values with their types: ``1``, ``1.0`` and ``True`` are equal to Python."""
    if isinstance(value, (list, tuple)):
        yield type(value), len(value)
        for item in value:
            yield from _flat(item)
    else:
        yield value if isinstance(value, Tensor) else (type(value), value)
