"""Constants: tensors that a step closes over, or finds in a cache, and owns a copy of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import BakedValueError, ForeignTensorError, LayoutError
from ..state.arena import BufferSpec, as_plain
from ..state.leaf import Leaf
from ..tensors.fingerprint import as_now, seen

__all__ = ["Constants"]


class Constants:
    """Tensors declared with ``constants=``, or remembered: copied at lowering, and watched for later writes.

    Other memory (``table.data = other``, ``torch.utils.swap_tensors``), or another part of the same memory, is noticed
    as well. Writes that torch does not count (into ``table.data``, through ``table.numpy()``, through a view in
    inference mode) go unnoticed, as does a move into room that ``table.untyped_storage().resize_`` has added;
    ``debug="verify"`` finds their effects. Memory that torch does not own alone, such as numpy's or a file's, is
    refused for the same reason. The host watch detects names that are rebound to another tensor.

    Args:
      function: Name of the user's function, for messages.
      tree: Tensors or trees of them.
      kind: What they are, for messages.

    Attributes:
      unchanged: Returns whether no original has been written since it was copied.
    """

    def __init__(self, function: str, tree: Any, kind: str = "declared") -> None:
        named, _ = pytree.flatten_with_path(tree)
        self._function, self._kind = function, kind
        self._items = [(pytree.path_string(path, "constants"), leaf) for path, leaf in named]
        for name, leaf in self._items:
            if isinstance(leaf, Leaf):
                raise TypeError(
                    f"`{function}`: {name} is of a state, which changes from call to call.\n"
                    f"To fix: a state is an argument, `{function}(state, ...)`; a fixed copy is `fcg.snapshot(state)`."
                )
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"`{function}`: {name} must be a tensor, got {type(leaf).__name__}.\n"
                    "To fix: leave it out: numbers that the function reads are watched; a table as `torch.tensor(...)`."
                )
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise LayoutError.of(
                    function,
                    "declares a constant that is not dense.",
                    rows=[f"{name}  {leaf.layout} of {leaf.dim()} dimensions"],
                    fix="declare `x.to_dense()`, or, of a nested one, `torch.nested.to_padded_tensor(x, 0.0)`.",
                )
            if better := as_plain(leaf, name):
                raise LayoutError.of(
                    function,
                    "declares a constant of a class of its own.",
                    rows=[f"{name}  expected a plain tensor   got the subclass {type(leaf).__name__}"],
                    why="The step would see a plain one.",
                    fix=f"{better}, and read that in the step.",
                )
            if not leaf.untyped_storage().resizable():
                raise ForeignTensorError.of(
                    function,
                    "declares a constant whose memory is not torch's alone: that of numpy, of a buffer or of a file.",
                    rows=[f"{name}  {BufferSpec.of(leaf)}"],
                    why="What others write there would not be noticed, and the step goes on with a copy.",
                    fix="declare a copy, and read that in the step: `table = table.clone()`, `constants=(table,)`.",
                )
        # Each tensor's count of writes, its memory, and the part of it that it was when copied.
        self._copied: list[tuple[int, Any, Any]] = []
        self.unchanged: Callable[[], bool] = lambda: True

    @classmethod
    def remembered(cls, function: str, tables: Iterable[tuple[str, Tensor]]) -> Self:
        """Return what functions remember, by name; from now on, writes are noticed."""
        found = cls(function, dict(tables), "remembered")
        found.named()
        return found

    def __iter__(self) -> Iterator[Tensor]:
        return iter([leaf for _, leaf in self._items])

    def __bool__(self) -> bool:
        return bool(self._items)

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Return the originals by name; from the first lowering on, changes are noticed."""
        if not self._copied:
            self._copied = list(map(seen, self))
            self.unchanged = as_now(list(self))
        return tuple(self._items)

    def check(self, function: str = "") -> None:
        """Raise if an original has been written since it was copied.

        Raises:
          BakedValueError: Naming these constants.
        """
        if self.unchanged():
            return
        rows = []
        for (name, leaf), (written, memory, view) in zip(self._items, self._copied, strict=True):
            count, place, part = seen(leaf)
            if place is not memory:
                rows.append(f"{name}  has other memory since")
            elif count != written:
                rows.append(f"{name}  written {count - written} time(s) since")
            elif part != view:
                rows.append(f"{name}  is another part of its memory since")
        raise BakedValueError.of(
            function or self._function,
            f"a {self._kind} constant was written after the step copied it.",
            rows=rows,
            why="The step replays with the value that it had then.",
            fix="pass it as an input, or keep it in the state.",
        )
