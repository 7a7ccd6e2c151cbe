"""The layout of a call's inputs, and the check that they can be copied in.

Leaves may be on the state's device, on the CPU (pageable or pinned) or in numpy; Python numbers are live
0-dim inputs. Other objects are part of the layout, compared as constants of the graph
(:mod:`..pytree.sameness`).
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import LayoutError
from ..pytree.nodes import as_node
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec, as_plain, unplaceable
from ..state.leaf import Leaf, as_tensor
from ..tree import KeyPath, Treedef, path_string

__all__ = ["InputLayout", "as_input", "cuts_a_graph", "input_layout"]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout that inputs must have for one capture.

    Attributes:
      roots: Parameter names of the positional inputs.
      treedef: Structure of ``(args, kwargs)`` without the bound states, with the key order that the function sees.
      names: Key path of each leaf, as text, starting at the parameter's name.
      leaves: For each leaf its spec if it is live, else the object itself.
      extras: Names that no parameter has, and that ``**kwargs`` collects, in order.
    """

    roots: tuple[str, ...]
    treedef: Treedef
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    extras: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Treedef]:
        """Structure of each argument, by name."""
        args, kwargs = self.treedef.children
        named = {str(key.key): child for key, child in zip(kwargs.keys, kwargs.children, strict=True)}
        return dict(zip(self.roots, args.children, strict=True)) | named

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, BufferSpec))

    @property
    def live_names(self) -> tuple[str, ...]:
        return tuple(
            n for n, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, BufferSpec)
        )

    def ordered_as(self, other: InputLayout) -> InputLayout:
        """Return this layout with keys in the order of another one, which differs in that at most."""
        return replace(self, treedef=other.treedef, extras=other.extras)

    def fill(self, live: Sequence[Any]) -> Any:
        """Return the tree of inputs with the given live leaves."""
        values = iter(live)
        leaves = [next(values) if isinstance(leaf, BufferSpec) else leaf for leaf in self.leaves]
        return pytree.unflatten(self.treedef, leaves)


def as_input(value: Any) -> Tensor | None:
    """Return a live leaf as a tensor, without a copy if possible; None for an object of the layout."""
    if isinstance(value, Leaf):
        return value._owned()  # another thread may step its state before it is copied in
    tensor = as_tensor(value)
    if not isinstance(tensor, Tensor):
        return None
    return tensor.detach() if tensor.requires_grad else tensor


def cuts_a_graph(value: Any) -> bool:
    """Whether autograd tracks a value, so that a step would silently cut its graph.

    Parameters are exempt: those of a module are passed only to be read, far from any loss.
    """
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and torch.is_grad_enabled()
        and not isinstance(value, torch.nn.Parameter)
    )


def _names(roots: Sequence[str], paths: Sequence[KeyPath]) -> tuple[str, ...]:
    """Return key paths that start with the user's parameter names instead of positions."""
    return tuple(
        path_string(path[2:], roots[path[1].idx] if path[0].idx == 0 else str(path[1].key)) for path in paths
    )


def input_layout(
    roots: Sequence[str],
    inputs: Any,
    device: torch.device | None,
    function: str = "",
    parameters: Set[str] = frozenset(),
) -> tuple[InputLayout, list[Tensor], torch.device]:
    """Return the layout of inputs, their live leaves, and where the step runs: specs place host leaves there, too.

    Args:
      roots: Parameter names of the positional inputs.
      inputs: ``(args, kwargs)`` without the bound states.
      device: The state's device; None if there is no state, for that of the inputs.
      function: Name of the user's function.
      parameters: Names of its parameters: in which order a call names them is not seen by the function.
    Raises:
      LayoutError: If leaves cannot be copied in; it lists the first five.
    """
    args, named = inputs
    extras = tuple(name for name in named if name not in parameters)
    kwargs = {name: named[name] for name in (*sorted(named.keys() & parameters), *extras)}
    flat, treedef = pytree.flatten((args, kwargs))
    roots = [roots[i] if i < len(roots) else f"inputs[{i}]" for i in range(len(inputs[0]))]
    names, tensors = _names(roots, treedef.paths()), [as_input(value) for value in flat]
    live = [tensor for tensor in tensors if tensor is not None]
    home = device or next((one.device for one in live if not one.is_cpu), torch.device("cpu"))
    _refuse_unfit(function, names, flat, tensors, home)
    leaves = tuple(
        value if tensor is None else replace(BufferSpec.of(tensor), device=home)
        for value, tensor in zip(flat, tensors, strict=True)
    )
    return InputLayout(tuple(roots), treedef, names, leaves, extras), live, home


def _refuse_unfit(
    function: str,
    names: Sequence[str],
    values: Sequence[Any],
    tensors: Sequence[Tensor | None],
    home: torch.device,
) -> None:
    unfit = [
        (name, *found)
        for name, value, tensor in zip(names, values, tensors, strict=True)
        if (found := _no_numbers(name, value) if tensor is None else _unfit(name, value, tensor, home))
    ]
    if unfit:
        places = "cpu" if home.type == "cpu" else f"cpu or {home}"
        raise LayoutError.of(
            function,
            "has inputs that cannot be copied in; the state is unchanged.",
            rows=[
                f"{name}  expected a dense tensor on {places}   got {problem}" for name, problem, _ in unfit
            ],
            why="Inputs are numbers, arrays and dense tensors, copied into buffers of fixed shape at each call.",
            fix=unfit[0][2],
        )


def _unfit(name: str, value: Any, tensor: Tensor, home: torch.device) -> tuple[str, str] | None:
    """Return what is wrong with a tensor that cannot be copied in, and the fix; None for one that can."""
    if cuts_a_graph(value):
        return f"{BufferSpec.of(tensor)} that requires grad", (
            f"take the gradient in the step, `fcg.value_and_grad(loss_fn)(params)`; or pass `{name}.detach()`, "
            "for nothing flows back through a replay."
        )
    elsewhere = not tensor.is_cpu and tensor.device != home
    problem = unplaceable(tensor) or (str(BufferSpec.of(tensor)) if elsewhere else "")
    return (problem, _tensor_fix(name, value, home)) if problem else None


def _tensor_fix(name: str, value: Any, home: torch.device) -> str:
    if isinstance(value, Sharded):
        return f"read the leaf from the state that the step gets; or pass `sharding.gather({name})`, made on all ranks."
    if value.is_nested:
        return f"pad it, `torch.nested.to_padded_tensor({name}, 0.0)`, and pass the lengths as an input."
    if value.is_quantized:
        return f"pass `{name}.dequantize()`."
    if value.layout is not torch.strided:
        return f"make it dense, `{name}.to_dense()`."
    if not value.is_cpu and not value.is_meta and value.device != home:
        return f'move it, `{name}.to("{home}")`.'
    plain = as_plain(value, name) or f"pass plain tensors that hold the values of `{name}`"
    return f"{plain}."


def _no_numbers(name: str, value: Any) -> tuple[str, str] | None:
    """Return what is wrong with an object that holds numbers which no tensor can hold, and the fix; None for others.

    Numbers and arrays are live, so they must not become part of the layout.
    """
    kind, as_floats = type(value).__name__, f'pass `numpy.asarray({name}, dtype="float64")`.'
    if isinstance(value, numbers.Real):
        below = "keep it below 2**63; or name its argument in `static_argnames`, with a graph for each value."
        return f"{kind} {value}", below if isinstance(value, int) else as_floats
    # A loader, or an iterator, which a call would not advance.
    if isinstance(value, Iterator | torch.utils.data.DataLoader | torch.utils.data.Dataset):
        one = f"pass one batch at a time, `for batch in {name}:`; or the next one, `next(iter({name}))`."
        return f"{kind}, which yields batches", one
    if container := as_node(value, name):
        return f"{kind}, which is no pytree", f"{container}."
    if not hasattr(type(value), "__array__") or type(value).__hash__ is not None:
        return None
    return f"{kind} of {getattr(value, 'dtype', 'objects')}", _array_fix(name, value) or as_floats


def _array_fix(name: str, value: Any) -> str:
    """Return the fix for an array that torch cannot hold; empty if floats will do."""
    dtype = getattr(value, "dtype", None)
    if hasattr(type(value), "filled"):
        return f"pass `{name}.filled(0)`, and `{name}.mask` as an input of its own."
    if getattr(dtype, "names", None):
        return f"pass its fields, `{{field: {name}[field] for field in {name}.dtype.names}}`."
    kind = getattr(dtype, "kind", "")
    if kind == "O" and all(isinstance(one, numbers.Real) for one in value.flat):
        return f'pass `{name}.astype("float32")`.'
    if kind in ("U", "S", "O"):
        return f"pass numbers that stand for them, `numpy.unique({name}, return_inverse=True)[1]`."
    if kind in ("m", "M"):
        return f'pass `{name}.astype("int64")`.'
    if kind in ("f", "c", "i", "u") and not getattr(dtype, "isnative", True):
        return f'pass it in the byte order of this machine, `{name}.astype({name}.dtype.newbyteorder("="))`.'
    return ""
