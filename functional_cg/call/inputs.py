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
) -> tuple[InputLayout, list[Tensor]]:
    """Return the layout of inputs, and their live leaves.

    Args:
      roots: Parameter names of the positional inputs.
      inputs: ``(args, kwargs)`` without the bound states.
      device: The state's device; specs place host leaves there, too.
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
    names = _names(roots, treedef.paths())
    tensors = [as_input(value) for value in flat]
    _refuse_unfit(function, names, flat, tensors, device)
    leaves: list[Any] = []
    for value, tensor in zip(flat, tensors, strict=True):
        if tensor is None:
            leaves.append(value)
        else:
            home = device if device is not None and tensor.is_cpu else tensor.device
            leaves.append(replace(BufferSpec.of(tensor), device=home))
    live = [tensor for tensor in tensors if tensor is not None]
    return InputLayout(tuple(roots), treedef, names, tuple(leaves), extras), live


def _refuse_unfit(
    function: str,
    names: Sequence[str],
    values: Sequence[Any],
    tensors: Sequence[Tensor | None],
    device: torch.device | None,
) -> None:
    here = [tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu]
    home = device or (here[0] if here else torch.device("cpu"))
    places = "cpu" if home.type == "cpu" else f"cpu or {home}"
    unfit = [
        (name, problem, _fix(name, value, home))
        for name, value, tensor in zip(names, values, tensors, strict=True)
        if (problem := _unfit(value, tensor, home))
    ]
    if unfit:
        raise LayoutError.of(
            function,
            "has inputs that cannot be copied in; the state is unchanged.",
            rows=[
                f"{name}  expected a dense tensor on {places}   got {problem}" for name, problem, _ in unfit
            ],
            why="Inputs are numbers, arrays and dense tensors, copied into buffers of fixed shape at each call.",
            fix=unfit[0][2],
        )


def _unfit(value: Any, tensor: Tensor | None, home: torch.device) -> str:
    """Describe a leaf that cannot be copied in; return an empty string for one that can."""
    if tensor is None:
        # Numbers and arrays are live, so one that no tensor can hold must not become part of the layout.
        if isinstance(value, numbers.Real):
            return f"{type(value).__name__} {value}"
        if _yields_batches(value):
            return f"{type(value).__name__}, which yields batches"
        if as_node(value, ""):
            return f"{type(value).__name__}, which is no pytree"
        is_array = hasattr(type(value), "__array__") and type(value).__hash__ is None
        return f"{type(value).__name__} of {getattr(value, 'dtype', 'objects')}" if is_array else ""
    if cuts_a_graph(value):
        return f"{BufferSpec.of(tensor)} that requires grad"
    return unplaceable(tensor) or (
        "" if tensor.is_cpu or tensor.device == home else str(BufferSpec.of(tensor))
    )


def _yields_batches(value: Any) -> bool:
    """Whether a leaf is what batches are taken from: a loader, or an iterator, which a call would not advance."""
    return isinstance(value, Iterator | torch.utils.data.DataLoader | torch.utils.data.Dataset)


def _fix(name: str, value: Any, home: torch.device) -> str:
    if not isinstance(value, Tensor):
        return _array_fix(name, value)
    if cuts_a_graph(value):
        return (
            f"take the gradient in the step, `fcg.value_and_grad(loss_fn)(params)`; or pass `{name}.detach()`, "
            "for nothing flows back through a replay."
        )
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
    if plain := as_plain(value, name):
        return f"{plain}."
    return f"pass plain tensors that hold the values of `{name}`."


def _array_fix(name: str, value: Any) -> str:
    """Return the fix for a number, numpy array or container that torch cannot hold."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, int):
        return "keep it below 2**63; or name its argument in `static_argnames`, with a graph for each value."
    if _yields_batches(value):
        return f"pass one batch at a time, `for batch in {name}:`; or the next one, `next(iter({name}))`."
    if container := as_node(value, name):
        return f"{container}."
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
    return f'pass `numpy.asarray({name}, dtype="float64")`.'
