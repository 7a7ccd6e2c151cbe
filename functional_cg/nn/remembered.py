"""Tell what a forward works out once and remembers, such as the kind of a loss or a table, from what it counts.

A forward may set an attribute that was None, and go by its value from then on. If it computes the same before and
after, makes what it remembers of constants, and of buffers that it never writes, and changes nothing more, then it is a
pure function all the same. Both runs are on fake tensors, which takes no arithmetic and draws no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree
from ..ambient.compiling import compiling
from ..tensors.aten import can_draw, tensors_in, written_arguments
from ..tensors.fake_mode import aside_on_fakes
from ..tensors.numbering import Numbers
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from .attributes import Held, Same, changed, held, newly_known
from .call import function_of

__all__ = ["only_remembers"]

_SLICE = torch.ops.aten.slice.Tensor
_DRAWN = -1  # stands for a storage


def only_remembers(
    copied: Callable[[Mapping[str, Tensor]], nn.Module],
    method: str,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Held,
    after: Held,
) -> bool:
    """Whether a forward that has changed its module will compute the same from now on, and change nothing more.

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
        start = held(module)
        given = {storage_key(one) for one in tree.leaves((args, kwargs)) if isinstance(one, Tensor)}
        given |= {storage_key(fakes[name]) for name, _ in module.named_parameters()}
        runs = _Runs(given | set(map(storage_key, fakes.values())))
        try:
            computed, found = runs.result(function_of(module, method), args, kwargs), held(module)
            again, at_last = runs.result(function_of(module, method), args, kwargs), held(module)
        except Exception:  # whatever a forward raises on tensors without values
            return False
        made, still = (
            [one.value for path, one in contents.items() if path in known and isinstance(one, Same)]
            for contents in (found, at_last)
        )
        return (
            newly_known(start, found) == known
            and not changed(found, at_last)
            and list(map(id, made)) == list(map(id, still))
            and computed == again
            and runs.sources(made).isdisjoint({*given, *runs.written, _DRAWN})
        )


class _Runs(TorchDispatchMode):
    """Numbers the values that runs of one function compute, and tells what they are made of.

    Args:
      storages: Those of the tensors that each run is given.

    Attributes:
      written: Those of them that a run has written.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._storages, self._draws = storages, 0
        self._numbers = Numbers(Tensor, storage_key)
        self._sources: dict[int, set[int]] = {}  # by storage of a result

    def result(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function; return numbers for what it returns, and for what it writes into what it is given."""
        self._draws = 0
        with self:
            out = compiling(function, *args, **kwargs)
        leaves, treedef = tree.flatten(out)
        found = [self._numbers.of(one) if isinstance(one, Tensor) else one for one in leaves]
        writes = {storage: self._numbers.last_write(storage) for storage in self.written}
        for storage in self.written:
            self._numbers.forget_write(storage)
        return found, treedef, writes

    def sources(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the storages of what tensors are made of."""
        keys = map(storage_key, tensors)
        return set[int]().union(*(self._sources.get(key, {key}) for key in keys))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor, not a computation
        given: Sequence[Any] = args
        if row_of(func).lifts and type(args[0]) is Tensor:
            with torch._C._DisableTorchDispatch():
                given = [args[0].dtype, args[0].tolist()]
        out = func(*args, **kwargs)
        if func is _SLICE and out.shape == args[0].shape:  # all of it, as of a table that is long enough
            self._numbers.name(out, self._numbers.of(args[0]))
            return out
        read, results = list(tensors_in([*given, *kwargs.values()])), list(tensors_in([out]))
        writes = written_arguments(func, args, kwargs)
        sources = self.sources(read)
        if can_draw(func, args, kwargs):
            given, self._draws = [*given, self._draws], self._draws + 1
            sources = sources | {_DRAWN}
        self._numbers.call(func, given, kwargs, results, writes)
        for key in map(storage_key, [*results, *writes]):
            self._sources[key] = self._sources.get(key, {key} & self._storages) | sources
        self.written.update({storage_key(one) for one in writes} & self._storages)
        return out
