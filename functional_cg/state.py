"""State handles, read-only leaves, generations and donation.

A handle stands in place of the user's pytree: a lease on an arena plus a generation. A call that updates the arena
raises the generation, and every older handle, and every leaf taken from one, raises from then on.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .arena import Arena, BufferSpec, Plan, plan, refuse_aliases, refuse_unplaceable, storage_key
from .errors import DonatedStateError, FunctionalCGError, LayoutError, ReadOnlyError
from .ops import tensors_in, written_arguments
from .tree import KeyPath, Treedef, TreeView, path_string

__all__ = [
    "Handle",
    "Leaf",
    "Lease",
    "check_alive",
    "fill",
    "fork",
    "owned",
    "place",
    "placeable",
    "refuse_misfits",
    "snapshot",
    "uninterrupted",
]

T = TypeVar("T")


def uninterrupted(calls: Sequence[Callable[[], Any]]) -> None:
    """Run calls one after the other in C, without a bytecode in between where Ctrl-C could strike.

    Each call has to be implemented in C itself (a ``partial`` over a builtin); then either all or none have run
    when a KeyboardInterrupt is raised.
    """
    deque(map(operator.call, calls), maxlen=0)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lease:
    """The use of an arena for one state; it ends when the last handle and leaf are gone.

    Attributes:
      arena: The memory.
      treedef: Structure of the state.
      paths: Key path of each leaf.
      cell: One-element list with the living generation; a list, so that C code can raise it.
    """

    arena: Arena
    treedef: Treedef
    paths: list[KeyPath]
    cell: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        watchers = self.arena.watchers
        self.arena.lease = weakref.ref(self, lambda _: [watch() for watch in watchers])

    def raised(self) -> Callable[[], None]:
        """A C-level call that raises the generation by one."""
        return partial(operator.setitem, self.cell, 0, self.cell[0] + 1)

    def write(self, positions: Sequence[int], values: Sequence[Tensor]) -> None:
        """Write values into slots and raise the generation, all or nothing."""
        self.arena.join()
        calls: list[Callable[[], Any]] = [self.raised()]
        if positions:
            slots = [self.arena.slots[i] for i in positions]
            calls.append(partial(torch._foreach_copy_, slots, [value.detach() for value in values]))
        with torch.inference_mode(False), torch.no_grad():
            uninterrupted(calls)


def _no_leaf(path: str, root: Handle) -> DonatedStateError:
    now = root._lease.cell[0]
    by = f" to `{root._donor}`" if root._donor else ""
    return DonatedStateError.of(
        root._donor,
        f"`{path}` was used after `state` was donated{by} (generation {root._generation}).",
        why=f"Its buffers now hold generation {now}.",
        fix="use the returned state, `state, metrics = step(state, batch)`, or `state.latest()`; "
        "to keep the old one, call `old = fcg.snapshot(state)` first.",
    )


class Leaf(Tensor):
    """A read-only view of one slot: an ordinary tensor to read, which raises once its state was donated.

    Operations return ordinary tensors that own their memory; a view of a leaf is again a leaf. Writing raises
    :class:`ReadOnlyError`. ``numpy()``, DLPack, pickling and ``deepcopy`` copy.
    """

    _real: Tensor
    _root: Handle
    _path: str

    __slots__ = ("_path", "_real", "_root")
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor, root: Handle, path: str) -> Leaf:
        leaf = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, real.shape, strides=real.stride(), dtype=real.dtype, device=real.device, layout=real.layout
        )
        # Without this mark `to_dlpack` reads a null pointer and crashes the process.
        torch._C._set_throw_on_mutable_data_ptr(leaf)
        leaf._real, leaf._root, leaf._path = real, root, path
        return leaf  # type: ignore[no-any-return]

    def __init__(self, real: Tensor, root: Handle, path: str) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_arguments(func, args, kwargs):
            if isinstance(tensor, Leaf):
                raise tensor._read_only()
        source = next(t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, Leaf))
        out = func(*[_unwrap(arg) for arg in args], **{name: _unwrap(arg) for name, arg in kwargs.items()})
        return _rewrap(out, source)

    def _read(self) -> Tensor:
        """The slot's own memory, for reading; raises once the state was donated."""
        root = self._root
        if root._lease.cell[0] != root._generation:
            raise _no_leaf(self._path, root)
        root._lease.arena.join()
        return self._real

    def _owned(self) -> Tensor:
        return self._read().clone()

    def _read_only(self) -> ReadOnlyError:
        return ReadOnlyError.of(
            "",
            f"`{self._path}` was written to; leaves of a state are read-only.",
            why="The state changes only by what a step returns.",
            fix="`state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`; "
            "for a copy of your own, `fcg.snapshot(state)`.",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec = BufferSpec.of(self._real)
        return f"{self._path}  {spec}  generation {self._root._generation}\n{self._owned()!r}"

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._read_only()

    def requires_grad_(self, requires_grad: bool = True) -> Leaf:  # noqa: FBT001, FBT002
        if requires_grad:
            raise self._read_only()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {"requires_grad", "data"}:
            raise self._read_only()
        super().__setattr__(name, value)

    def tolist(self) -> Any:
        return self._owned().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._owned().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:  # type: ignore[override]
        return self._owned().__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._owned()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._owned().__reduce_ex__(protocol)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value._read()
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(item) for item in value)
    return value


def _rewrap(value: Any, source: Leaf) -> Any:
    if isinstance(value, Tensor):
        arena = source._root._lease.arena
        return Leaf(value, source._root, source._path) if storage_key(value) in arena.storages else value
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrap(item, source) for item in value)
    return value


def owned(value: Any) -> Any:
    """The value itself, or a copy of it if it is a leaf of a state."""
    return value._owned() if isinstance(value, Leaf) else value


class Handle(TreeView):
    """A state: stands for the user's pytree and forwards its fields, items and methods.

    Leaves are built only for what is touched. The names below belong to the handle and hide fields of the same
    name, which ``state.tree`` reaches.

    Attributes:
      generation: Number of updates of the arena when this handle was made.
      tree: The pytree, built of read-only leaves.
    """

    __slots__ = ("__weakref__", "_donor", "_generation", "_lease", "_node", "_owner", "_path", "_shell", "_start")

    _lease: Lease
    _generation: int
    _node: Treedef
    _start: int
    _path: str
    _owner: Handle | None
    _donor: str
    _shell: Any

    def __init__(self, lease: Lease, generation: int) -> None:
        set_ = object.__setattr__
        set_(self, "_lease", lease)
        set_(self, "_generation", generation)
        set_(self, "_node", lease.treedef)
        set_(self, "_start", 0)
        set_(self, "_path", "state")
        set_(self, "_owner", None)
        set_(self, "_donor", "")
        set_(self, "_shell", None)

    # -- identity ---------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def tree(self) -> Any:
        self._check()
        root = self._root
        slots = self._lease.arena.slots[self._start : self._start + self._node.num_leaves]
        names = [path_string(path, self._path) for path in self._node.paths()]
        return pytree.unflatten(
            self._node, [Leaf(slot, root, name) for slot, name in zip(slots, names, strict=True)]
        )

    def latest(self) -> Any:
        """The living handle of this state's arena, also when this one was donated (after Ctrl-C, for example)."""
        return Handle(self._lease, self._lease.cell[0])

    def replace(self, **fields: Any) -> Any:
        """Write new values for whole fields (or keys) into the same slots; donates this handle.

        Args:
          fields: New subtrees, of the same structure, shapes and dtypes as the old ones. Host tensors are copied
            to the state's device.
        Returns:
          The new handle.
        Raises:
          LayoutError: If a value does not fit; nothing was written.
          DonatedStateError: If this handle was donated.
        """
        self._check()
        updates: dict[int, Any] = {}
        for name, value in fields.items():
            node, start, _ = self._child(name)
            flat, treedef = pytree.flatten(value)
            if treedef != node:
                raise LayoutError.of(
                    "",
                    f"replace: `{name}` has another structure than the state's.",
                    rows=pytree.structure_diff(node, treedef, name),
                    fix="pass a value of the same structure; for another model, `fcg.place` a new state.",
                )
            updates.update(enumerate(flat, start))
        return self.__tree_set__(updates)

    # -- the pytree -------------------------------------------------------------------------------------------

    def __tree__(self) -> Any:
        return self.tree

    def __tree_set__(self, updates: dict[int, Any]) -> Any:
        self._check()
        if self._owner is not None:
            raise TypeError("write through the whole state: `fcg.tree.at(lambda s: ..., state, value)`")
        positions = sorted(updates)
        values = [owned(_as_tensor(updates[i])) for i in positions]
        lease = self._lease
        refuse_misfits(
            [lease.arena.plan.slots[i].spec for i in positions], values, [lease.paths[i] for i in positions], "state"
        )
        object.__setattr__(self, "_donor", "replace")
        lease.write(positions, values)
        return Handle(lease, lease.cell[0])

    @property
    def _root(self) -> Handle:
        return self if self._owner is None else self._owner

    def _check(self) -> None:
        root = self._root
        if root._lease.cell[0] != root._generation:
            raise _no_leaf(self._path, root)

    def _child(self, name: Any) -> tuple[Treedef, int, str]:
        start = self._start
        for key, child in zip(self._node.keys, self._node.children, strict=True):
            if _key_name(key) == name:
                return child, start, f"{self._path}{key}"
            start += child.num_leaves
        raise KeyError(name)

    def _build(self, node: Treedef, start: int, path: str) -> Any:
        if node.is_leaf:
            return Leaf(self._lease.arena.slots[start], self._root, path)
        if node.kind is type(None):
            return None
        branch = Handle(self._lease, self._generation)
        for name, value in (("_node", node), ("_start", start), ("_path", path), ("_owner", self._root)):
            object.__setattr__(branch, name, value)
        return branch

    def _level(self) -> Any:
        """One level of the pytree: the user's own node with branches and leaves as children, built once."""
        self._check()
        if self._shell is None:
            start, children = self._start, []
            for key, child in zip(self._node.keys, self._node.children, strict=True):
                children.append(self._build(child, start, f"{self._path}{key}"))
                start += child.num_leaves
            object.__setattr__(self, "_shell", pytree.node_unflatten(self._node, children))
        return self._shell

    # -- forwarding -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        try:
            node, start, path = self._child(name)
        except KeyError:
            return getattr(self._level(), name)
        if self._is_mapping:  # keys of a mapping are items, not attributes
            return getattr(self._level(), name)
        self._check()
        return self._build(node, start, path)

    @property
    def _is_mapping(self) -> bool:
        return self._node.kind is not None and issubclass(self._node.kind, Mapping)

    def __getitem__(self, key: Any) -> Any:
        if self._is_mapping:
            self._check()
            return self._build(*self._child(key))
        return self._level()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._level())

    def __len__(self) -> int:
        return len(self._level())

    def __contains__(self, key: Any) -> bool:
        return key in self._level()

    def __bool__(self) -> bool:
        return self._node.kind not in (dict, list, tuple) or bool(self._node.children)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._read_only(f"{self._path}.{name}")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._read_only(f"{self._path}[{key!r}]")

    def _read_only(self, path: str) -> FunctionalCGError:
        return ReadOnlyError.of(
            "",
            f"`{path}` was assigned to; a state is immutable.",
            fix="`state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`.",
        )

    def __reduce__(self) -> Any:
        # A pickle or deep copy owns its values: it comes back as a plain tree, which a step places again.
        return _identity, (snapshot(self),)

    def __repr__(self) -> str:
        donated = "" if self._lease.cell[0] == self._root._generation else ", donated"
        slots = self._lease.arena.plan.slots[self._start : self._start + self._node.num_leaves]
        specs = pytree.unflatten(self._node, [_Text(str(slot.spec)) for slot in slots[:64]]) if len(slots) <= 64 else None
        body = repr(specs) if specs is not None else f"{len(slots)} leaves, {sum(s.spec.nbytes for s in slots)} bytes"
        return f"<{self._path}, generation {self._root._generation}{donated}: {body}>"


class _Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _identity(value: T) -> T:
    return value


def _key_name(key: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _as_tensor(value: Any) -> Any:
    """Python numbers and numpy arrays as tensors: bool, i64 and f32 scalars, as among the inputs of a step."""
    if isinstance(value, (bool, int, float)):
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
        return torch.tensor(value, dtype=dtype)
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return torch.tensor(value)
    return value


def refuse_misfits(
    specs: Sequence[BufferSpec], values: Sequence[Any], paths: Sequence[KeyPath], root: str, function: str = ""
) -> None:
    """Raise if a value has not the shape and dtype of its slot; the device may differ.

    Raises:
      LayoutError: All differences are listed.
    """
    rows = []
    for spec, value, path in zip(specs, values, paths, strict=True):
        if not isinstance(value, Tensor):
            rows.append(f"{path_string(path, root)}  expected {spec}   got {type(value).__name__}")
        elif tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            rows.append(f"{path_string(path, root)}  expected {spec}   got {BufferSpec.of(value)}")
    if rows:
        raise LayoutError.of(
            function,
            f"values do not fit the slots of `{root}`, which is unchanged.",
            rows=rows,
            why="Slots have fixed shapes and dtypes.",
            fix="convert the values first; nothing is broadcast and nothing is cast.",
        )


def _roles(treedef: Treedef, paths: Sequence[KeyPath]) -> list[str]:
    """Fields of a state class are roles; any other pytree is one role."""
    if treedef.kind is not None and hasattr(treedef.kind, "__dataclass_fields__"):
        return [str(_key_name(path[0])) for path in paths]
    return ["state"] * len(paths)


def place(tree: T, device: torch.device | str | None = None) -> T:
    """Copy a pytree into a new arena and return its handle. The tree stays the caller's.

    Args:
      tree: Any pytree of tensors; Python numbers become 0-dim tensors (bool, i64, f32).
      device: Where the arena lives; by default where the leaves are.
    Returns:
      A handle, generation 0.
    Raises:
      AliasError: If two leaves share memory.
      LayoutError: If a leaf is no tensor, or leaves are on several devices and ``device`` is not given.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> state["w"] + 1
      tensor([2., 2.])
    """
    leaves, treedef, layout = placeable(tree, "state", device=device)
    home = leaves[0].device if leaves else torch.device(device or "cpu")
    lease = Lease(Arena.allocate(layout, home), treedef, treedef.paths())
    fill(lease, leaves)
    return Handle(lease, 0)  # type: ignore[return-value]


def placeable(
    tree: Any, root: str, function: str = "", *, device: torch.device | str | None = None
) -> tuple[list[Tensor], Treedef, Plan]:
    """Check that a pytree can be placed: its leaves as tensors, its structure, and the plan of its arena.

    Raises:
      AliasError: If two leaves share memory.
      LayoutError: If a leaf cannot live in an arena.
    """
    flat, treedef = pytree.flatten(tree)
    originals = [owned(_as_tensor(leaf)) for leaf in flat]
    leaves, paths = originals, treedef.paths()
    if device is not None:
        target = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        leaves = [leaf.to(target) if isinstance(leaf, Tensor) else leaf for leaf in originals]
    refuse_unplaceable(paths, leaves, root, function)
    refuse_aliases(paths, originals, root, function)
    return leaves, treedef, plan([BufferSpec.of(leaf) for leaf in leaves], _roles(treedef, paths))


def check_alive(handle: Handle, name: str) -> None:
    """Raise if a handle was donated, under the name that the caller knows it by.

    Raises:
      DonatedStateError: If an update of the arena has happened since the handle was made.
    """
    root = handle._root
    if root._lease.cell[0] != root._generation:
        raise _no_leaf(name if handle is root else handle._path, root)


def fill(lease: Lease, leaves: Sequence[Tensor]) -> None:
    """Copy leaves into all slots of a lease, in order."""
    with torch.inference_mode(False), torch.no_grad():
        lease.arena.join()
        lease.arena.write(range(len(leaves)), [leaf.detach() for leaf in leaves])


def snapshot(state: T) -> T:
    """Copy a state (or a part of one) out to ordinary tensors that the caller owns.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.snapshot(fcg.place({"w": torch.ones(2)}))
      {'w': tensor([1., 1.])}
    """
    return pytree.map(lambda leaf: leaf._owned() if isinstance(leaf, Leaf) else leaf.clone(), state)  # type: ignore[no-any-return]


def fork(state: T) -> T:
    """Copy a state into a second arena: two states that go on independently.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> twin = fcg.fork(state)
      >>> state = state.replace(w=torch.zeros(2))
      >>> twin["w"].tolist()
      [1.0, 1.0]
    """
    return place(snapshot(state))
