"""Constants: tensors that a step closes over, or finds in a cache, and owns a copy of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor

from .. import tree as pytree
from ..errors import BakedValueError, ForeignTensorError
from ..state.arena import BufferSpec
from ..state.leaf import Leaf

__all__ = ["Constants"]


class Constants:
    """Tensors declared with ``constants=``, or remembered: copied at lowering, and watched for later writes.

    Other memory (``table.data = other``, ``torch.utils.swap_tensors``), or another part of the same memory, is noticed
    as well. Writes that torch does not
    count (into ``table.data``, through ``table.numpy()``, through a view in inference mode) go unnoticed;
    ``debug="verify"`` finds their effects. Memory that torch does not own alone, such as numpy's or a file's, is
    refused for the same reason. The host watch detects names that are rebound to another tensor.

    Args:
      function: Name of the user's function, for messages.
      tree: Tensors or trees of them.
      kind: What they are, for messages.
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
            if not leaf.untyped_storage().resizable():
                raise ForeignTensorError.of(
                    function,
                    "declares a constant whose memory is not torch's alone: that of numpy, of a buffer or of a file.",
                    rows=[f"{name}  {BufferSpec.of(leaf)}"],
                    why="What others write there would not be noticed, and the step goes on with a copy.",
                    fix="declare a copy, and read that in the step: `table = table.clone()`, `constants=(table,)`.",
                )
        # Each tensor with its version, memory and part of it when copied; a tensor of inference counts no writes.
        self._copied: list[tuple[Tensor, int, bool, Any, Any]] = []

    @classmethod
    def remembered(cls, function: str, tables: Iterable[tuple[str, Tensor]]) -> Self:
        """Return what functions remember, by name; from now on, writes are noticed."""
        found = cls(function, dict(tables), "remembered")
        found.named()
        return found

    def __bool__(self) -> bool:
        return bool(self._items)

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Return the originals by name; the first lowering records their versions."""
        if not self._copied:
            self._copied = [
                (leaf, _version(leaf), leaf.is_inference(), leaf.untyped_storage(), _view(leaf))
                for _, leaf in self._items
            ]
        return tuple(self._items)

    def unchanged(self) -> bool:
        """Whether no original has been written since it was copied."""
        # Once per call and constant: torch returns one object for a storage as long as there is one, as here.
        for leaf, version, uncounted, memory, view in self._copied:
            if leaf.untyped_storage() is not memory or not (uncounted or leaf._version == version):
                return False
            if _view(leaf) != view:  # set by `leaf.data = ...`, which counts as no write
                return False
        return True

    def check(self, function: str = "") -> None:
        """Raise if an original has been written since it was copied.

        Raises:
          BakedValueError: Naming these constants.
        """
        if self.unchanged():
            return
        rows = []
        for (name, leaf), (_, version, _, memory, view) in zip(self._items, self._copied, strict=True):
            if leaf.untyped_storage() is not memory:
                rows.append(f"{name}  has other memory since")
            elif _version(leaf) != version:
                rows.append(f"{name}  written {_version(leaf) - version} time(s) since")
            elif _view(leaf) != view:
                rows.append(f"{name}  is another part of its memory since")
        raise BakedValueError.of(
            function or self._function,
            f"a {self._kind} constant was written after the step copied it.",
            rows=rows,
            why="The step replays with the value that it had then.",
            fix="pass it as an input, or keep it in the state.",
        )


def _version(leaf: Tensor) -> int:
    return 0 if leaf.is_inference() else leaf._version


def _view(leaf: Tensor) -> Any:
    """Return which part of its memory a tensor is, and how it reads that."""
    return leaf.dtype, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()
