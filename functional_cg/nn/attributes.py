"""What a forward leaves on its module: attributes before and after it.

Submodules, plain values and what stands in lists, dicts and sets is compared; objects of other kinds are compared by
identity alone. Of buffers, whose values may change, it is compared which of them there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ReadOnlyError, SideEffectError
from .storage import storage_of

__all__ = ["attributes", "buffers_set", "refuse_changed", "refuse_changed_buffers", "refuse_exchanged"]


def attributes(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What each attribute of a module and its parts holds now, containers by what is in them."""
    found: dict[str, tuple[Any, ...]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            where = f"{path}.{name}" if path else name
            if name == "_buffers":
                continue
            if isinstance(value, dict):
                found[where] = (*value, *value.values())
            else:
                found[where] = tuple(value) if isinstance(value, (list, tuple, set)) else (value,)
    return found


def buffers_set(module: nn.Module) -> dict[str, bool]:
    """Whether each buffer of a module and its parts is a tensor, and not None."""
    return {
        f"{path}.{name}" if path else name: buffer is not None
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()  # `named_buffers` leaves out those that are None
    }


def refuse_changed_buffers(name: str, before: Mapping[str, bool], after: Mapping[str, bool]) -> None:
    """Raise if there are other buffers than before, or if one became None or a tensor.

    Raises:
      SideEffectError: With the name of each.
    """
    changed = [where for where in {**before, **after} if before.get(where) != after.get(where)]
    if not changed:
        return
    shown = {None: "not registered", False: "None", True: "a tensor"}
    attribute = changed[0].rpartition(".")[2]
    fix = f"register it with its first value, `self.register_buffer({attribute!r}, value)`, in `__init__`."
    if before.get(changed[0]):
        fix = f"keep it a tensor, `self.{attribute} = torch.zeros_like(self.{attribute})`."
    raise SideEffectError.of(
        name,
        "its forward changes which buffers the module has.",
        rows=[
            f"`{where}`  before {shown[before.get(where)]}   after {shown[after.get(where)]}"
            for where in changed
        ],
        why="`new_buffers` has the names of `buffers`: another one would be gone after the call.",
        fix=fix,
    )


def refuse_changed(
    name: str, before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise if attributes differ.

    Raises:
      SideEffectError: With the name of each.
    """
    changed = [where for where in after if not _same(before.get(where), after[where])]
    changed += [where for where in before if where not in after]
    if changed:
        raise SideEffectError.of(
            name,
            f"its forward changes {len(changed)} attribute{'s' * (len(changed) > 1)} of the module.",
            rows=[f"`{where}`" for where in changed],
            why="`apply` is a pure function: what the forward leaves on the module is gone after the call.",
            fix="return it; or make it a tensor and register it, `self.register_buffer(...)`: then it is returned in "
            "`new_buffers`.",
        )


def refuse_exchanged(name: str, root: str, given: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Raise if tensors that the module held as aliases of those given lie elsewhere now.

    Raises:
      ReadOnlyError: With the name of each.
    """
    exchanged = [
        key
        for key in given
        if storage_of(held[key]) is not None and _memory(held[key]) != _memory(given[key])
    ]
    if not exchanged:
        return
    attribute = exchanged[0].rpartition(".")[2]
    fix = f"write its values, `self.{attribute}.copy_(...)`: they are returned in `new_buffers`."
    if root == "params":
        fix = f"give the new value a name of its own, `{attribute} = ...`, and compute with that."
    raise ReadOnlyError.of(
        name,
        f"its forward exchanges the memory of {len(exchanged)} tensor{'s' * (len(exchanged) > 1)} "
        "(`.data = ...`, `swap_tensors`).",
        rows=[f"{root}[{key!r}]" for key in exchanged],
        why="`apply` is a pure function: what becomes of the tensors that it holds is gone after the call.",
        fix=fix,
    )


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _same(old: tuple[Any, ...] | None, new: tuple[Any, ...]) -> bool:
    if old is None or len(old) != len(new):
        return False
    return all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes)) and a == b)
        for a, b in zip(old, new, strict=True)
    )
