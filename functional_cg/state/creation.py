"""Create a training state: plan it on the meta device, then write it leaf by leaf into its arena.

Peak memory is that of the state and its largest parameter: moments are never tensors beside their slots, and
of a sharded model no rank holds more than its shards and one whole leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree as pytree
from ..errors import LayoutError
from ..pytree.trees import no_tensors
from ..random import fold_in
from ..shards.mesh import Mesh
from ..shards.peers import among, together
from ..shards.tensor import Sharded
from ..tensors.aten import copies
from ..tensors.parts import as_real
from ..tree import KeyPath, path_string
from .arena import Arena, BufferSpec, plan
from .boundary import entered, held
from .handle import Handle, placeable, roles
from .leaf import Lease, as_tensor, owned

__all__ = ["Init", "Sharding", "create", "parts_of"]

Init = Callable[[str, Tensor, Tensor], Tensor]

aten = torch.ops.aten


class Sharding(Protocol):
    """What the creation of a state needs of a sharding."""

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        ...

    def planned(self, params: Any, /) -> Any:
        """Return the parameters as this rank holds them, on the meta device."""
        ...

    def agreed(self, leaf: Any, /) -> Any:
        """Return rank 0's value of a leaf, on this rank's device."""
        ...

    def moved(self, placed: Any, /) -> Any:
        """Return the parameters as the optimizer's ``init`` sees them."""
        ...

    def accumulators(self, placed: Any, /) -> Any:
        """Return zeros to accumulate gradients of the parameters."""
        ...


class _Whole:
    """No sharding: this rank holds everything."""

    def planned(self, params: Any) -> Any:
        return pytree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)

    def agreed(self, leaf: Any) -> Any:
        return leaf

    def moved(self, placed: Any) -> Any:
        return placed

    def accumulators(self, placed: Any) -> Any:
        return pytree.map(torch.zeros_like, placed)


class _Parts:
    """A tree of shardings, each for the parameters at or below its key path.

    Args:
      tree: A prefix of the parameters' tree.
    """

    def __init__(self, tree: Any) -> None:
        self._parts: list[tuple[KeyPath, Sharding]] = pytree.flatten_with_path(tree)[0]
        self.mesh = self._parts[0][1].mesh
        rows = [
            f"{path_string(path, 'sharding')}  on {part.mesh}"
            for path, part in self._parts
            if part.mesh != self.mesh
        ]
        if rows:
            raise LayoutError.of(
                "",
                "TrainState.create: parts of `sharding` lie on different meshes.",
                rows=[f"{path_string(self._parts[0][0], 'sharding')}  on {self.mesh}", *rows],
                why="The collectives of a step run over the ranks of one mesh.",
                fix="make all of them with one `mesh`.",
            )

    def __str__(self) -> str:
        return ", ".join(f"{path_string(path, 'params')}: {part}" for path, part in self._parts)

    def planned(self, params: Any) -> Any:
        paths = [path for path, _ in pytree.flatten_with_path(params)[0]]
        rows = [
            f"{path_string(path, 'params')}  expected a sharding   got none"
            for path in paths
            if self._part_of(path) is None
        ]
        rows += [
            f"{path_string(part, 'params')}  expected a parameter   got none"
            for part, _ in self._parts
            if not any(path[: len(part)] == part for path in paths)
        ]
        if rows:
            raise LayoutError.of(
                "",
                "TrainState.create: `sharding` is no prefix of `params`.",
                rows=rows,
                why="Each parameter has one sharding: that at its place in the tree, or above it.",
                fix="give each part of `params` its sharding, or one to all, `sharding=fcg.sharding.zero(mesh)`.",
            )
        return self._each("planned", params)

    def agreed(self, leaf: Any) -> Any:
        return self._parts[0][1].agreed(leaf)

    def moved(self, placed: Any) -> Any:
        return self._each("moved", placed)

    def accumulators(self, placed: Any) -> Any:
        return self._each("accumulators", placed)

    def _each(self, method: str, tree: Any) -> Any:
        leaves, treedef = pytree.flatten_with_path(tree)
        return pytree.unflatten(
            treedef, [getattr(self._part_of(path), method)(leaf) for path, leaf in leaves]
        )

    def _part_of(self, path: KeyPath) -> Sharding | None:
        return next((part for place, part in self._parts if path[: len(place)] == place), None)


class _OneNumber(TorchDispatchMode):
    """Makes ``zeros_like`` and ``full_like`` expand a single element, so their results take no memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if Sharded in types:
            return NotImplemented  # its shard comes here again
        kwargs = kwargs or {}
        if func not in (aten.zeros_like.default, aten.full_like.default):
            return func(*args, **kwargs)
        like, number = args[0], args[1] if len(args) > 1 else 0
        dtype, device = kwargs.get("dtype") or like.dtype, kwargs.get("device") or like.device
        return torch.full((), number, dtype=dtype, device=device).expand(like.shape)


def create(
    build: Callable[..., Any],
    *,
    params: Any,
    optimizer: Any,
    key: Tensor | None,
    accumulate: bool,
    sharding: Any,
    init: Init | None,
    step: Tensor,
    others: Mapping[str, Any],
    can_sleep: bool,
) -> Handle:
    """Place a fresh state.

    Args:
      build: Makes the state from its fields.
      params: Parameters; on the meta device if ``init`` makes them.
      optimizer: Makes ``opt_state`` from the parameters.
      key: i64[2], or None.
      accumulate: Whether the state accumulates gradients.
      sharding: A sharding, or a prefix tree of shardings; None if each rank holds everything.
      init: ``(path, leaf, key) -> tensor``, or None.
      step: i64[], number of updates so far.
      others: The remaining fields, taken as given.
      can_sleep: Whether the memory can leave the device and come back.
    """
    sharding = _of_all(sharding)
    with among(None if sharding is None else sharding.mesh, "TrainState.create"):
        kind = sharding or _Whole()
        home = _home(params, key, sharding, init)
        given = build(
            step=step.to(home), params=None, opt_state=None, optimizer=optimizer,
            key=None if key is None else key.to(home), **others,
        )  # fmt: skip
        _refuse(given, None if init else params, home, gathers=sharding is not None)
        planned = kind.planned(params)  # refuses a tree that is not a prefix, before ranks communicate
        if sharding is not None:
            together(sharding.mesh, "TrainState.create", _announced(given, params, sharding))
        given = pytree.map(lambda leaf: kind.agreed(as_tensor(leaf)), given)
        opt_state = optimizer.init(_moved(kind, planned))
        _refuse_numbers(opt_state)
        handle = _reserved(
            replace(
                given,
                params=planned,
                opt_state=opt_state,
                grads=kind.accumulators(planned) if accumulate else None,
            ),
            home,
            can_sleep=can_sleep,
        )
        arena = handle._lease.arena
        state = pytree.unflatten(handle._node, entered([slot.spec for slot in arena.plan.slots], arena.slots))
        _write_params(state.params, params, kind, None if init is None else (init, given.key))
        with _OneNumber():
            moments = optimizer.init(_moved(kind, state.params))
        _write(state.opt_state, moments)
        _write(replace(state, params=None, opt_state=None, grads=None), given)
        return handle


def _of_all(sharding: Any) -> Sharding | None:
    """Return one sharding for all parameters, from a sharding or a tree of shardings."""
    if sharding is None:
        return None
    parts = pytree.leaves(sharding)
    strange = [
        part for part in parts if not all(hasattr(part, name) for name in ("mesh", "planned", "agreed"))
    ]
    if strange or not parts:
        got = type(strange[0] if strange else sharding).__name__
        raise TypeError(
            f"TrainState.create: sharding must be made with `fcg.sharding.zero(mesh, stage=3)`, got {got}.\n"
            'To fix: `sharding=fcg.sharding.zero(mesh, stage=3)`, of `mesh = fcg.sharding.mesh({"data": -1})`.'
        )
    return sharding if parts == [sharding] else _Parts(sharding)


def _moved(kind: Any, params: Any) -> Any:
    """Return the parameters as the optimizer sees them."""
    return pytree.map(parts_of, kind.moved(params))


def parts_of(leaf: Any) -> Any:
    """Return a leaf as optimizers see it: complex ones as parts, but for those of which this rank holds a shard."""
    return leaf if isinstance(leaf, Sharded) else as_real(leaf)


def _refuse_numbers(opt_state: Any) -> None:
    rows = no_tensors(opt_state, "opt_state")
    if rows:
        raise LayoutError.of(
            "",
            "TrainState.create: the optimizer's `init` returns leaves that are no tensors.",
            rows=rows,
            why="They are leaves of the state, which each update replaces by new values.",
            fix="make them tensors, `torch.tensor(0)`; keep numbers that never change as fields of the optimizer.",
        )


def _announced(given: Any, params: Any, sharding: Sharding) -> str:
    """Describe what this rank is about to create, in text that is equal on ranks that create the same."""
    lines = ["create a state", str(sharding)]
    for root, tree in (("params", params), ("state", given)):
        leaves, _ = pytree.flatten_with_path(tree)
        lines += [
            f"{path_string(path, root)}  {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in leaves
            if isinstance(leaf, Tensor)
        ]
    return "\n".join(lines)


def _home(params: Any, key: Any, sharding: Sharding | None, init: Init | None) -> torch.device:
    """Return the device of the state."""
    if sharding is not None:
        return sharding.mesh.device
    if init is not None:
        return key.device  # type: ignore[no-any-return]
    first = next((leaf for leaf in pytree.leaves(params) if isinstance(leaf, Tensor)), None)
    return torch.device("cpu") if first is None else first.device


def _refuse(given: Any, params: Any, home: torch.device, *, gathers: bool) -> None:
    """Raise if leaves cannot be placed; skip DTensors that will be gathered: they have no memory to share."""
    plain = pytree.map(lambda leaf: None if gathers and hasattr(leaf, "full_tensor") else leaf, params)
    whole = replace(given, params=plain)
    rows = [
        f"{path_string(path, 'state')}  expected a whole tensor   got {BufferSpec.of(leaf)}"
        for path, leaf in pytree.flatten_with_path(whole)[0]
        if isinstance(leaf, Sharded) and leaf.placement.partial and (gathers or not leaf.placement.stacked)
    ]
    if rows:
        raise LayoutError.of(
            "",
            "TrainState.create: gets sharded leaves.",
            rows=rows,
            why="A state takes its values from rank 0, which holds a shard of these.",
            fix="`sharding.gather(tree)` on all ranks, and create the state of what it gives.",
        )
    placeable(whole, "state", device=home)


def _reserved(planned: Any, home: torch.device, *, can_sleep: bool) -> Handle:
    """Return a handle on an arena of zeros for a state planned on any device."""
    leaves, treedef = pytree.flatten(planned)
    paths = treedef.paths()
    specs = [replace(BufferSpec.of(leaf), device=home) for leaf in leaves]
    arena = Arena.allocate(plan(specs, roles(treedef, paths)), home, can_sleep=can_sleep)
    return Handle(Lease(arena, treedef, paths), 0)


def _write_params(slots: Any, params: Any, kind: Any, made: tuple[Init, Tensor] | None) -> None:
    """Write leaf by leaf, so only one whole leaf at a time exists beside the arena."""
    for number, ((path, leaf), slot) in enumerate(
        zip(pytree.flatten_with_path(params)[0], pytree.leaves(slots), strict=True)
    ):
        value = owned(leaf) if made is None else _made(*made, number, path, leaf)
        whole = kind.agreed(value)
        is_shard = isinstance(slot, Sharded) and slot.placement.partial
        held(slot).copy_(slot.placement.own(whole) if is_shard else held(whole))


def _write(slots: Any, values: Any) -> None:
    into = [held(slot) for slot in pytree.leaves(slots)]
    for call in copies(into, [owned(held(value)).detach() for value in pytree.leaves(values)]):
        call()


def _made(init: Init, key: Tensor, number: int, path: KeyPath, like: Tensor) -> Tensor:
    name = path_string(path, "params")
    made = init(name, like, fold_in(key, number))
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (like.shape, like.dtype):
        got = BufferSpec.of(made) if isinstance(made, Tensor) else type(made).__name__
        raise LayoutError.of(
            "",
            "TrainState.create: `init` makes another tensor than it was asked for.",
            rows=[f"{name}  expected {BufferSpec.of(like)}   got {got}"],
            fix="return a tensor of `leaf.shape` and `leaf.dtype`, `fcg.random.normal(key, leaf.shape, std=0.02)`.",
        )
    return made.to(key.device)
