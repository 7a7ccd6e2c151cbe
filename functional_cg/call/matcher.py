"""Generate the check that a call's inputs have the layout of a capture."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.setting import diverted
from ..pytree.sameness import same
from ..pytree.treedef import order_diff
from ..state.arena import BufferSpec, unplaceable
from ..state.handle import Handle
from ..tree import Treedef
from .inputs import InputLayout, as_input, cuts_a_graph

__all__ = ["layout_matcher"]


def layout_matcher(
    layout: InputLayout, device: torch.device, states: Collection[int] = ()
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Generate ``match(args, kwargs) -> list of live leaves, or None`` for a layout: no loops, no recursion.

    A state among the inputs matches the tree that it stands for. Nothing matches under a transform of
    ``torch.func``, in another step or under a fake mode: the slow path decides what becomes part of that step
    and what is refused.
    """
    lines = ["if transforms() is not None or (modes() and diverted()): return None"]
    names: dict[str, Any] = {
        "Tensor": Tensor,
        "strided": torch.strided,
        "convert": _convert,
        "same": same,
        "flatten": pytree.flatten,
        "order_diff": order_diff,
        "Handle": Handle,
        "opened": _opened,
        "transforms": torch._C._functorch.peek_interpreter_stack,  # private; test_inputs notices a change
        "modes": torch._C._len_torch_dispatch_stack,
        "diverted": diverted,
    }
    where = (
        "{t}.is_cpu"
        if device.type == "cpu"
        else f"({{t}}.get_device() == {device.index or 0} or {{t}}.is_cpu)"
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

    def node(expr: str, treedef: Treedef, order: tuple[Any, ...] | None = None) -> None:
        if treedef.is_leaf:
            leaf(expr, next(leaves))
            return
        kind, variable = treedef.kind, f"n{len(names)}"
        if kind is type(None):
            lines.append(f"if {expr} is not None: return None")
            return
        names[variable] = None
        lines.append(f"{variable} = {expr}")
        lines.append(f"if type({variable}) is Handle: {variable} = opened({variable})")
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
            keys = treedef.context.sorted
            order = treedef.context.put_in if order is None else order
            if len(order) > 1:
                kept = "" if len(order) == count else f" if key in {name(frozenset(order))}"
                found = f"(*{variable},)" if not kept else f"tuple([key for key in {variable}{kept}])"
                lines.append(f"if {found} != {name(order)}: return None")
            if any(
                type(key) is not str for key in keys
            ):  # True is 1 to Python, and finds its place in a dict
                kinds = name({key: type(key) for key in keys})
                lines.append(f"if {{key: type(key) for key in {variable}}} != {kinds}: return None")
            children = [f"{variable}[{name(key)}]" for key in keys]
        else:
            lines.append(f"{variable}, got = flatten({variable})")
            lines.append(f"if got != {name(treedef)} or order_diff({name(treedef)}, got): return None")
            for i in range(treedef.num_leaves):
                leaf(f"{variable}[{i}]", next(leaves))
            return
        for child_expr, child in zip(children, treedef.children, strict=True):
            node(child_expr, child)

    positional, named = layout.treedef.children
    count = len(positional.children) + len(states)
    lines.append(f"if len(args) != {count}: return None")
    for position, child in zip(
        (i for i in range(count) if i not in states), positional.children, strict=True
    ):
        node(f"args[{position}]", child)
    node("kwargs", named, order=layout.extras)
    body = "".join(f"        {line}\n" for line in lines)
    source = (
        f"def match(args, kwargs):\n    try:\n{body}"
        f"        return [{', '.join(live)}]\n"
        "    except (KeyError, IndexError, AttributeError, RuntimeError):\n        return None\n"
    )
    exec(compile(source, "<input check>", "exec"), names)
    return names["match"]  # type: ignore[no-any-return]


def _convert(value: Any, want: BufferSpec) -> Tensor | None:
    """Convert a number, array, parameter or leaf of a state to a tensor; None if it does not fit the spec."""
    tensor = as_input(value.tree if type(value) is Handle else value)
    if tensor is None or tensor.shape != want.shape or tensor.dtype is not want.dtype:
        return None
    fits = not cuts_a_graph(value) and not unplaceable(tensor)
    return tensor if fits and (tensor.is_cpu or tensor.device == want.device) else None


def _opened(state: Handle) -> Any:
    """Return a state's tree with copied leaves: another thread may step it before they are copied in."""
    return pytree.unflatten(state._part.node, state._copied())
