"""State handles, which a step returns in place of the user's pytree, and functions that make them.

A handle is a lease on an arena plus a generation. An update makes a new generation; older handles and leaves raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, TypeVar

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.modes import ordinary
from ..concurrency.turns import at_one_time
from ..errors import LayoutError, ReadOnlyError
from ..messages.html import card
from ..messages.tracebacks import entry
from ..pytree.trees import TreeView, node_unflatten
from ..tensors.aten import copies
from ..tree import KeyPath, Treedef, path_string
from .aliases import refuse_aliases
from .arena import Arena, BufferSpec, Plan, plan, refuse_unplaceable
from .boundary import as_number, at_rest, held, localized, misfits, refuse_meshes, sharding_fix
from .leaf import Leaf, Lease, Part, as_tensor, donated, key_name, owned, turns_of
from .outline import Entry, arena_html, size_text, tree_html, tree_text
from .passing import read

__all__ = [
    "Handle",
    "Leaf",
    "Lease",
    "check_alive",
    "fill",
    "owned",
    "place",
    "placeable",
    "roles",
    "snapshot",
]

T = TypeVar("T")


class Handle(TreeView):
    """A state or a part of one: stands for the user's pytree and forwards its fields, items and methods.

    Leaves are built on access. The public names below, ``latest`` and ``replace`` hide fields of that name;
    ``state.tree`` reaches these: ``state.tree.replace``. Keys of a dict are items, never attributes.

    Attributes:
      generation: Number of updates of the arena when this handle was made.
      tree: The pytree, built of read-only leaves.
    """

    # Each call of a step makes a handle, so slots are few; `_donor` is set only when the handle is donated.
    __slots__ = ("__weakref__", "_donor", "_generation", "_lease", "_owner", "_part")

    _lease: Lease
    _generation: int
    _part: Part
    _owner: Handle | None
    _donor: str

    def __init__(
        self, lease: Lease, generation: int, part: Part | None = None, owner: Handle | None = None
    ) -> None:
        _set_lease(self, lease)
        _set_generation(self, generation)
        _set_part(self, part or lease.whole)
        _set_owner(self, owner)

    @property
    def _node(self) -> Treedef:
        return self._part.node

    @property
    def _start(self) -> int:
        return self._part.start

    @property
    def _root(self) -> Handle:
        return self if self._owner is None else self._owner

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def tree(self) -> Any:
        self._check()
        return self._built(self._part)

    def latest(self) -> Any:
        """Return the arena's current handle, even if this one was donated (after Ctrl-C, for example)."""
        root = Handle(self._lease, self._lease.cell[0])
        return root if self._owner is None else root._child(self._part)

    def replace(self, **fields: Any) -> Any:
        """Write new values for whole fields (or keys) into the same slots, and donate this handle.

        All values are read before any is written: ``state.replace(a=state.b, b=state.a)`` swaps.

        Args:
          fields: New subtrees, of the same structure, shapes and dtypes as the old ones. Host tensors, numpy arrays
            and Python numbers are copied to the state's device; autograd does not track the copies.
        Returns:
          The new handle.
        Raises:
          LayoutError: If values do not fit; it lists the first five differences. Nothing is written.
          TypeError: If the state has no such field.
          DonatedStateError: If this handle was donated.

        Example:
          >>> import torch, functional_cg as fcg
          >>> state = fcg.place({"w": torch.ones(2), "n": 0})
          >>> state.replace(n=3)["n"].item()
          3
        """
        self._check()
        updates: dict[int, Any] = {}
        rows: list[str] = []
        for name, value in fields.items():
            part = self._field(name)
            flat, treedef = pytree.flatten(value)
            if treedef == part.node:
                updates.update(enumerate(flat, part.start))
            else:
                rows += pytree.structure_diff(part.node, treedef, part.path)
        return self._write(updates, "replace", rows)

    def __tree__(self) -> Any:
        return self.tree

    def __tree_set__(self, updates: dict[int, Any]) -> Any:
        return self._write(updates, "fcg.tree.at", [])

    def _write(self, updates: dict[int, Any], donor: str, rows: list[str]) -> Handle:
        """Write leaves by flat position, all or nothing; ``rows`` lists differences found before."""
        if self._owner is not None:
            raise TypeError(
                f"`{self._part.path}` is a part of a state; write through the whole: "
                "`state = fcg.tree.at(lambda s: ..., state, value)`"
            )
        self._check()
        lease, positions = self._lease, sorted(updates)
        slots = [lease.arena.plan.slots[i].spec for i in positions]
        values = [owned(as_number(updates[i], slot.dtype)) for i, slot in zip(positions, slots, strict=True)]
        rows = rows + misfits(slots, values, [lease.paths[i] for i in positions])
        if rows:
            raise LayoutError.of(
                "",
                f"{donor}: values do not fit `state`, which is unchanged.",
                rows=rows,
                why="The leaves of a state have fixed shapes and dtypes.",
                fix=sharding_fix(slots, values)
                or "convert the values first; nothing is broadcast and nothing is cast. "
                "For another structure, `fcg.place` a new state.",
            )
        values = [owned(localized(slot, value)) for slot, value in zip(slots, values, strict=True)]
        return lease.arena.turn.alone(partial(self._written, positions, values, donor))  # type: ignore[no-any-return]

    def _written(self, positions: Sequence[int], values: Sequence[Tensor], donor: str) -> Handle:
        """Write values and return the new handle; runs in the state's turn, when nothing else uses it."""
        self._check()
        object.__setattr__(self, "_donor", donor)
        self._lease.write(positions, values)
        return Handle(self._lease, self._lease.cell[0])

    def _copied(self) -> list[Tensor]:  # in the strides of the slots
        def copies() -> list[Tensor]:
            self._check()
            self._lease.arena.join()
            return _copies(self._lease.arena.slots[self._part.start : self._part.stop])

        return self._lease.arena.turn.read(copies)  # type: ignore[no-any-return]

    def _field(self, name: str) -> Part:
        part = self._part.children.get(name)
        if part is None:
            has = ", ".join(f"`{n}`" for n in self._part.children) or "none"
            raise TypeError(
                f"replace: `{self._part.path}` has no field `{name}` that holds leaves; it has {has}. "
                "What is no tensor is fixed for a state. To fix: create a new one of its leaves, "
                "`fcg.TrainState.create(params=state.params, optimizer=..., key=state.key, step=state.step)`."
            )
        return part

    def _check(self, path: str = "") -> None:
        if self._lease.cell[0] != self._generation:
            raise donated(path or self._part.path, self._root)

    def _child(self, part: Part) -> Any:
        """Return a part as the user gets it: a leaf, None or a handle."""
        if part.node.is_leaf:
            leaf = Leaf(self._lease.arena.slots[part.start], self._root, part.path)
            return at_rest(self._lease.arena.plan.slots[part.start].spec, leaf)
        if part.node.kind is type(None):
            return None
        return Handle(self._lease, self._generation, part, self._root)

    def _built(self, part: Part) -> Any:
        if part.node.is_leaf:
            return self._child(part)
        return node_unflatten(part.node, [self._built(child) for child in part.children.values()])

    def _level(self) -> Any:
        """Return one level of the pytree: the user's node, with handles and leaves as children."""
        self._check()
        if self._node.is_leaf:
            return self._child(self._part)
        return node_unflatten(self._node, [self._child(part) for part in self._part.children.values()])

    def __getattr__(self, name: str) -> Any:
        if name == "_donor" or name.startswith(("__", "_ipython_", "_repr_")):
            raise AttributeError(name)  # not donated yet, or a protocol it lacks (also of notebooks)
        part = None if self._part.is_mapping else self._part.children.get(name)
        if part is None:  # a method, a property or a static field of the user's node
            return read(self._level(), name, lambda: self._read_only(f".{name}", "was called and changes it"))
        self._check(part.path)
        return self._child(part)

    def __getitem__(self, key: Any) -> Any:
        children = self._part.children
        if self._part.is_mapping:
            part = children[key]
        elif self._node.kind in (list, tuple) and isinstance(key, int):
            part = children[range(len(children))[key]]
        else:
            return self._level()[key]
        self._check(part.path)
        return self._child(part)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._level())

    def __len__(self) -> int:
        return len(self._part.children) if self._part.is_mapping else len(self._level())

    def __contains__(self, key: Any) -> bool:
        return key in (self._part.children if self._part.is_mapping else self._level())

    def __bool__(self) -> bool:
        return self._node.kind not in (dict, list, tuple) or bool(self._node.children)

    def __dir__(self) -> list[str]:
        names = () if self._part.is_mapping else self._part.children
        fixed = getattr(self._node.kind, "__dataclass_fields__", ())
        return sorted(
            {*super().__dir__(), *type.__dir__(self._node.kind or Tensor), *fixed, *map(str, names)}
        )

    def _ipython_key_completions_(self) -> list[Any]:
        return list(self._part.children) if self._part.is_mapping else []

    def __setattr__(self, name: str, value: Any) -> Never:
        raise self._read_only(f".{name}")

    def __setitem__(self, key: Any, value: Any) -> Never:
        raise self._read_only(f"[{key!r}]")

    def _read_only(self, where: str, what: str = "was assigned to") -> ReadOnlyError:
        return ReadOnlyError.of(
            "",
            f"`{self._part.path}{where}` {what}; a state is immutable.",
            fix="`state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`.",
        )

    def __reduce__(self) -> Any:
        # A pickle or copy owns its values: it comes back as a plain tree, which a step places again.
        return snapshot, (snapshot(self),)

    def __repr__(self) -> str:
        return "\n".join([self._title(), *tree_text(self._node, self._entries(), self._part.path)])

    def _repr_html_(self) -> str:
        arena = arena_html(self._lease.arena.plan, self._lease.paths)
        tree = tree_html(self._node, self._entries(), self._part.path)
        return card(self._title(), tree, *([arena] if self._owner is None else []))

    def _entries(self) -> list[Entry]:
        return [Entry(slot.spec) for slot in self._lease.arena.plan.slots[self._part.start : self._part.stop]]

    def _title(self) -> str:
        part, now = self._part, self._lease.cell[0]
        kind = "Tensor" if part.node.kind is None else part.node.kind.__name__
        title = f"{part.path}: {kind}, generation {self._generation}"
        if now != self._generation:
            donor = getattr(self._root, "_donor", "")
            title += f", donated{f' to `{donor}`' if donor else ''} (its buffers now hold generation {now})"
        away = ", asleep" if self._lease.arena.asleep else ""
        return f"{title}, on {self._lease.arena.device}{away}, {size_text(self._entries())}"


# Setters of the slots bypass `__setattr__` in half the time of `object.__setattr__`.
_set_lease = Handle.__dict__["_lease"].__set__
_set_generation = Handle.__dict__["_generation"].__set__
_set_part = Handle.__dict__["_part"].__set__
_set_owner = Handle.__dict__["_owner"].__set__


def roles(treedef: Treedef, paths: Sequence[KeyPath]) -> list[str]:
    """Return the role of each leaf: its field in a state class; leaves of any other pytree share one role."""
    if treedef.kind is not None and hasattr(treedef.kind, "__dataclass_fields__"):
        return [str(key_name(path[0])) for path in paths]
    return ["state"] * len(paths)


@entry()
def place(tree: T, device: torch.device | str | None = None, *, can_sleep: bool = False) -> T:
    """Copy a pytree into a new arena and return its handle. The caller keeps the tree.

    Args:
      tree: Any pytree of tensors; Python numbers and numpy arrays become tensors (bool, i64, f32 scalars).
      device: Device of the arena; by default that of the tensors.
      can_sleep: Whether :func:`functional_cg.sleep` can send its memory away. On a GPU this memory is not torch's, and
        torch's statistics do not count it.
    Returns:
      A handle of generation 0.
    Raises:
      AliasError: If two leaves share memory.
      LayoutError: If a leaf is not a dense tensor, or leaves are on several devices without ``device``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> state["w"] + 1
      tensor([2., 2.])
    """
    leaves, treedef, layout = placeable(tree, "state", device=device)
    home = layout.slabs[0].device if layout.slabs else torch.empty(0, device=device or "cpu").device
    arena = Arena.allocate(layout, home, can_sleep=can_sleep)
    return fill(Lease(arena, treedef, treedef.paths()), leaves)  # type: ignore[return-value]


def placeable(
    tree: Any, root: str, function: str = "", *, device: torch.device | str | None = None
) -> tuple[list[Tensor], Treedef, Plan]:
    """Check that a pytree can be placed; return its leaves as tensors, its treedef and its arena's plan.

    Raises:
      AliasError: If two leaves share memory.
      LayoutError: If a leaf cannot live in an arena.
    """
    flat, treedef = pytree.flatten(tree)
    placed, paths = [as_tensor(leaf) for leaf in flat], treedef.paths()
    leaves = [owned(held(leaf)) for leaf in placed]
    # Numbers and numpy arrays have no device: they go where the tensors are.
    devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in flat]
    if device is None:
        home = next((d for d in devices if d is not None), torch.device("cpu"))
    else:
        home, devices = torch.empty(0, device=device).device, [None] * len(flat)  # "cuda" becomes "cuda:0"
    refuse_unplaceable(paths, leaves, devices, root, function)
    refuse_aliases(paths, leaves, root, function)
    specs = [replace(BufferSpec.of(leaf), device=home) for leaf in placed]
    names = (path_string(path, root) for path in paths)
    refuse_meshes(zip(names, specs, strict=True), function)
    return leaves, treedef, plan(specs, roles(treedef, paths))


def check_alive(handle: Handle, name: str, function: str) -> None:
    """Raise if a handle passed to `function` must not be used; the error uses the caller's name for it.

    Raises:
      AsleepError: If its memory is away.
      BusyError: If it was lost to a fork.
      DonatedStateError: If the arena was updated since the handle was made.
    """
    if handle._lease.cell[0] != handle._generation:
        raise donated(name + handle._part.path.removeprefix("state"), handle._root, name, function)
    if handle._lease.arena.turn.over is not None:
        raise handle._lease.arena.turn.refusal(function)


def fill(lease: Lease, leaves: Sequence[Tensor]) -> Handle:
    """Copy leaves into all slots of a new lease, in order; return its first handle."""
    lease.arena.join()
    if leaves:
        with ordinary():
            for call in copies(lease.arena.slots, [leaf.detach() for leaf in leaves]):
                call()
    return Handle(lease, 0)


def snapshot(state: T) -> T:
    """Copy a state (or a part of one, or a plain pytree) to ordinary tensors that the caller owns.

    ``fcg.place`` makes it a state again. To store it, use ``fcg.save``: ``torch.load`` refuses classes by default.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.snapshot(fcg.place({"w": torch.ones(2)}))
      {'w': tensor([1., 1.])}
    """
    leaves, treedef = pytree.flatten(state)
    new = at_one_time(turns_of(map(held, leaves)), partial(_copies, leaves))
    return pytree.unflatten(treedef, new)  # type: ignore[no-any-return]


def _copies(leaves: Sequence[Any]) -> list[Any]:
    with ordinary():
        return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
