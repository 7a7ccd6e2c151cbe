"""Inputs: their layout, a generated check of it, and the copy into static buffers.

Leaves may live on the state's device, on the CPU (pageable or pinned) or in numpy; Python numbers are live 0-dim
inputs. Host leaves go through pinned slots that the step owns, so the caller may overwrite its own memory as soon as
the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree as pytree
from .arena import Arena, BufferSpec, Plan, dense_stride, plan
from .errors import LayoutError
from .state import Leaf
from .tree import KeyPath, Treedef, path_string

__all__ = ["InputLayout", "Staging", "as_input", "input_layout", "layout_differences", "layout_matcher"]

_RING_DEPTH = 3
_FEW = 3  # as many single copies cost less than one grouped copy


@dataclass(frozen=True, slots=True)
class InputLayout:
    """What inputs must look like for one capture.

    Attributes:
      treedef: Structure of ``(args, kwargs)`` without the bound states.
      names: Key path of each leaf, as text, starting at the parameter's name.
      leaves: Spec of each live leaf; any other object is itself part of the layout.
    """

    treedef: Treedef
    names: tuple[str, ...]
    leaves: tuple[Any, ...]

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, BufferSpec))

    @property
    def live_names(self) -> tuple[str, ...]:
        return tuple(
            n for n, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, BufferSpec)
        )

    def fill(self, live: Sequence[Any]) -> Any:
        """The inputs' tree with live leaves put in."""
        values = iter(live)
        leaves = [next(values) if isinstance(leaf, BufferSpec) else leaf for leaf in self.leaves]
        return pytree.unflatten(self.treedef, leaves)


def _is_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "__array__") and hasattr(value, "dtype")


def as_input(value: Any) -> Tensor | None:
    """A live leaf as a tensor, without copying where possible; None for an object that belongs to the layout."""
    if isinstance(value, Leaf):
        return value._read()
    if isinstance(value, Tensor):
        if value.is_nested:
            raise LayoutError.of(
                "",
                "an input is a nested tensor; the state is unchanged.",
                why="Its shape changes from call to call; a captured graph has fixed shapes.",
                fix="pad it, `torch.nested.to_padded_tensor(x, 0.0)`, and pass the lengths as an input.",
            )
        return value.detach() if value.requires_grad else value
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    if _is_numpy(value):
        return _from_numpy(value)
    return None


def _from_numpy(value: Any) -> Tensor | None:
    if value.dtype.hasobject or value.dtype.kind in "SUVMm":
        return None
    if value.ndim == 0 or not value.flags.writeable or any(step < 0 for step in value.strides):
        return torch.tensor(value.copy())  # torch can neither share read-only memory nor walk it backwards
    return torch.from_numpy(value)


def _names(roots: Sequence[str], paths: Sequence[KeyPath]) -> tuple[str, ...]:
    """Key paths that start at the user's parameter names instead of at positions."""
    out = []
    for path in paths:
        if path[0].idx == 0:
            position = path[1].idx
            root = roots[position] if position < len(roots) else f"inputs[{position}]"
        else:
            root = str(path[1].key)
        out.append(path_string(path[2:], root))
    return tuple(out)


def input_layout(
    roots: Sequence[str], inputs: Any, device: torch.device | None
) -> tuple[InputLayout, list[Tensor]]:
    """Layout of inputs, and their live leaves.

    Args:
      roots: Parameter names of the positional inputs.
      inputs: ``(args, kwargs)`` without the bound states.
      device: The state's device; host leaves are described as if they were there already.
    """
    flat, treedef = pytree.flatten(inputs)
    leaves: list[Any] = []
    live: list[Tensor] = []
    for value in flat:
        tensor = as_input(value)
        if tensor is None:
            leaves.append(value)
            continue
        live.append(tensor)
        home = device if device is not None and tensor.is_cpu else tensor.device
        leaves.append(BufferSpec(tuple(tensor.shape), _slot_stride(tensor), tensor.dtype, home))
    return InputLayout(treedef, _names(roots, treedef.paths()), tuple(leaves)), live


def _slot_stride(tensor: Tensor) -> tuple[int, ...]:
    if tensor.layout != torch.strided:
        return ()
    return dense_stride(tensor)


def layout_differences(expected: InputLayout, got: InputLayout) -> list[str]:
    """All differences of two layouts, one line each."""
    if expected.treedef != got.treedef:
        return _structure_rows(expected, got)
    rows = []
    for name, want, have in zip(expected.names, expected.leaves, got.leaves, strict=True):
        if isinstance(want, BufferSpec) and isinstance(have, BufferSpec):
            if not want.same_layout(have):
                rows.append(f"{name}  expected {want}   got {have}")
        elif isinstance(want, BufferSpec) or isinstance(have, BufferSpec) or not _same_object(want, have):
            rows.append(f"{name}  expected {_shown(want)}   got {_shown(have)}")
    return rows


def _structure_rows(expected: InputLayout, got: InputLayout) -> list[str]:
    rows = [
        f"{n}  expected {_shown(v)}   got nothing"
        for n, v in zip(expected.names, expected.leaves, strict=True)
        if n not in got.names
    ]
    rows += [
        f"{n}  expected nothing   got {_shown(v)}"
        for n, v in zip(got.names, got.leaves, strict=True)
        if n not in expected.names
    ]
    return rows or pytree.structure_diff(expected.treedef, got.treedef, "inputs")


def _shown(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, BufferSpec) else f"{type(leaf).__name__} {leaf!r}"


def _same_object(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


# -- the generated check ------------------------------------------------------------------------------------------


def layout_matcher(
    layout: InputLayout, device: torch.device
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Generate ``match(args, kwargs) -> list of live leaves, or None`` for one layout: no loop, no recursion."""
    lines: list[str] = []
    names: dict[str, Any] = {
        "Tensor": Tensor,
        "strided": torch.strided,
        "convert": _convert,
        "same": _same_object,
        "flatten": pytree.flatten,
    }
    where = (
        "{t}.is_cpu"
        if device.type == "cpu"
        else f"({{t}}.is_cpu or {{t}}.get_device() == {device.index or 0})"
    )
    live: list[str] = []
    leaves = iter(layout.leaves)

    def name(value: Any) -> str:
        text = f"k{len(names)}"
        names[text] = value
        return text

    def leaf(expr: str, want: Any) -> None:
        if not isinstance(want, BufferSpec):
            lines.append(f"if not same({expr}, {name(want)}): return None")
            return
        t = f"t{len(live)}"
        live.append(t)
        lines.append(f"{t} = {expr}")
        lines.append(
            f"if type({t}) is not Tensor or {t}.shape != {name(want.shape)} or {t}.dtype is not {name(want.dtype)} "
            f"or {t}.layout is not strided or {t}.requires_grad or not {where.format(t=t)}:"
        )
        lines.append(f"    {t} = convert({t}, {name(want)})")
        lines.append(f"    if {t} is None: return None")

    def node(expr: str, treedef: Treedef) -> None:
        if treedef.is_leaf:
            leaf(expr, next(leaves))
            return
        kind, variable = treedef.kind, f"n{len(names)}"
        if kind is type(None):
            lines.append(f"if {expr} is not None: return None")
            return
        names[variable] = None
        lines.append(f"{variable} = {expr}")
        count = len(treedef.children)
        if kind in (list, tuple) or (
            kind is not None and issubclass(kind, tuple) and hasattr(kind, "_fields")
        ):
            lines.append(
                f"if type({variable}) is not {name(kind)} or len({variable}) != {count}: return None"
            )
            children = [f"{variable}[{i}]" for i in range(count)]
        elif kind is dict:
            lines.append(f"if type({variable}) is not dict or len({variable}) != {count}: return None")
            children = [f"{variable}[{name(key)}]" for key in treedef.context[1]]
        else:
            lines.append(f"{variable}, got = flatten({variable})")
            lines.append(f"if got != {name(treedef)}: return None")
            for i in range(treedef.num_leaves):
                leaf(f"{variable}[{i}]", next(leaves))
            return
        for child_expr, child in zip(children, treedef.children, strict=True):
            node(child_expr, child)

    node("args", layout.treedef.children[0])
    node("kwargs", layout.treedef.children[1])
    body = "".join(f"        {line}\n" for line in lines)
    source = (
        f"def match(args, kwargs):\n    try:\n{body or '        pass'}\n"
        f"        return [{', '.join(live)}]\n"
        "    except (KeyError, IndexError, AttributeError, RuntimeError):\n        return None\n"
    )
    exec(compile(source, "<input check>", "exec"), names)
    return names["match"]  # type: ignore[no-any-return]


def _convert(value: Any, want: BufferSpec) -> Tensor | None:
    """A leaf that is not a plain tensor of the wanted spec: numbers, numpy, parameters, leaves of a state."""
    tensor = as_input(value)
    if tensor is None or tensor.shape != want.shape or tensor.dtype is not want.dtype:
        return None
    fits = tensor.layout is torch.strided and (tensor.is_cpu or tensor.device == want.device)
    return tensor if fits else None


# -- staging ------------------------------------------------------------------------------------------------------


class Staging:
    """Static input buffers of one capture, and the way into them.

    Attributes:
      arena: Their memory.
      slots: One buffer per live input leaf, on the state's device.
    """

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device) -> None:
        here = [BufferSpec(spec.shape, spec.stride, spec.dtype, device) for spec in specs]
        self.arena = Arena.allocate(plan(here, ["inputs"] * len(here)), device)
        self.slots = self.arena.slots
        self._ring: list[_PinnedSlot] = []
        self._turn = 0

    def copy_in(self, leaves: Sequence[Tensor]) -> None:
        """Copy leaves into the static buffers; the caller's memory is free again when this returns."""
        if not leaves:
            return
        if not self.arena.on_cuda:
            torch._foreach_copy_(self.slots, list(leaves))
            return
        host = [i for i, leaf in enumerate(leaves) if leaf.is_cpu]
        if len(leaves) - len(host) <= _FEW:
            for slot, leaf in zip(self.slots, leaves, strict=True):
                if not leaf.is_cpu:
                    slot.copy_(leaf)
        else:
            there = [i for i, leaf in enumerate(leaves) if not leaf.is_cpu]
            torch._foreach_copy_([self.slots[i] for i in there], [leaves[i] for i in there])
        if host:
            self._pinned_slot().send(host, leaves, self.arena)

    def _pinned_slot(self) -> _PinnedSlot:
        if len(self._ring) < _RING_DEPTH:
            self._ring.append(_PinnedSlot(self.arena.plan))
            return self._ring[-1]
        self._turn = (self._turn + 1) % _RING_DEPTH
        return self._ring[self._turn]


class _PinnedSlot:
    """Pinned host memory for one call's inputs, reused once its copy to the device is done."""

    def __init__(self, device_plan: Plan) -> None:
        cpu = torch.device("cpu")
        specs = [BufferSpec(s.spec.shape, s.spec.stride, s.spec.dtype, cpu) for s in device_plan.slots]
        self._host = Arena.allocate(plan(specs, ["inputs"] * len(specs)), cpu, pin_memory=True)
        self._sent = torch.cuda.Event()

    def send(self, host: Sequence[int], leaves: Sequence[Tensor], target: Arena) -> None:
        self._sent.synchronize()
        torch._foreach_copy_([self._host.slots[i] for i in host], [leaves[i] for i in host])
        pairs = [(target.slots[i], self._host.slots[i]) for i in host]
        if len(host) == len(leaves):  # everything comes from the host: one transfer per dtype
            pairs = list(zip(target.slabs, self._host.slabs, strict=True))
        for there, here in pairs:
            there.copy_(here, non_blocking=True)
        self._sent.record()
