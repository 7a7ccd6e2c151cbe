"""Find calls that write elements which they read for others, such as ``y[:, 1:] += y[:, :-1]``.

A kernel may read such an element before or after it writes it. Torch raises where it can tell, which is not everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...tensors.aten import full_name, tensors_in
from ...tensors.op_table import row_of
from ...tensors.overlap import crosses, share_bytes, storage_key

__all__ = ["reads_what_it_writes"]


def reads_what_it_writes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Tensor]
) -> bool:
    """Whether a call writes an element that it reads for another one.

    Args:
      func: The op.
      args: Its arguments.
      kwargs: Those by keyword.
      written: The tensors that it writes.
    """
    row = row_of(func)
    if row.puts and func._schema.arguments[-1].name == "value":
        return False  # it reads the number that it fills with before it writes
    if full_name(func).startswith("aten::_foreach_"):
        return _one_by_one(args)
    if row.product:  # each element is read for a whole row
        read = list(tensors_in([*args, *(one for key, one in kwargs.items() if key != "out")]))
        of_itself = "out" not in kwargs  # it adds to its first argument
        return any(share_bytes(*pair) for pair in _in_one_storage(written, read[of_itself:]))
    pairs = _in_one_storage(written, list(tensors_in([*args, *kwargs.values()])))
    return any(one is not other and crosses(one, other) for one, other in pairs)


def _one_by_one(args: Sequence[Any]) -> bool:
    """Whether a position of lists reads or writes what another one writes: torch may run them in any order."""
    lists = [one if isinstance(one, (list, tuple)) else [one] * len(args[0]) for one in args]
    by_storage: dict[int, list[tuple[int, int, Tensor]]] = {}
    for number, tensors in enumerate(lists):
        for place, one in enumerate(tensors):
            if isinstance(one, Tensor):
                by_storage.setdefault(storage_key(one), []).append((number, place, one))
    return any(
        (number, place) != (0, at) and (share_bytes(one, other) if at != place else crosses(one, other))
        for group in by_storage.values()
        if len(group) > 1
        for of_list, at, one in group
        if of_list == 0
        for number, place, other in group
    )


def _in_one_storage(written: Sequence[Tensor], read: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((one, other) for one in written for other in read if storage_key(one) == storage_key(other))
