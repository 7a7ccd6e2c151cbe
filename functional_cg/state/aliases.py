"""Refuse trees with leaves on shared memory, and say which copies separate them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import AliasError
from ..tensors.overlap import byte_range, overlapping, overlaps_itself, storage_key
from ..tree import KeyPath, path_string
from .arena import BufferSpec

__all__ = ["refuse_aliases"]


def refuse_aliases(
    paths: Sequence[KeyPath], tensors: Sequence[Tensor], root: str, function: str = ""
) -> None:
    """Raise if two leaves share memory, or one overlaps itself.

    Raises:
      AliasError: With the key paths, specs and byte ranges.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            by_storage.setdefault(storage_key(tensor), []).append(i)

    def row(i: int) -> str:
        first, last = byte_range(tensors[i])
        return f"{path_string(paths[i], root)}  {BufferSpec.of(tensors[i])}   bytes {first} to {last}"

    # The subtrees that need memory of their own, each with a pair of leaves that shows it.
    shared: dict[KeyPath, tuple[int, int]] = {}
    for members in by_storage.values():
        for i in members:
            if overlaps_itself(tensors[i]):
                raise AliasError.of(
                    function,
                    f"a leaf of `{root}` overlaps itself.",
                    rows=[row(i)],
                    why="Each element of a leaf owns its bytes; an expanded one would be written twice per replay.",
                    fix="copy it, `.clone(memory_format=torch.contiguous_format)`.",
                )
        pair = overlapping([tensors[i] for i in members])
        if pair is not None:
            first, second = sorted(members[i] for i in pair)
            if not any(paths[second][: len(found)] == found for found in shared):
                shared[_shared(paths, tensors, (first, second))[1]] = first, second
    if shared:
        copies = ", ".join(f"`{_copy(paths, tensors, pair, root, function)}`" for pair in shared.values())
        raise AliasError.of(
            function,
            f"two leaves of `{root}` share memory.",
            rows=[row(i) for pair in shared.values() for i in pair],
            why="Each leaf has memory of its own; shared memory would be updated twice per replay.",
            fix=f"copy it, {copies} (targets, EMA copies); "
            "or keep one leaf and read it twice in the loss (tied weights).",
        )


def _copy(
    paths: Sequence[KeyPath], tensors: Sequence[Tensor], pair: tuple[int, int], root: str, function: str
) -> str:
    """Return code that gives the second leaf of a pair, with all that it shares, separate memory."""
    first, second = _shared(paths, tensors, pair)
    alike = BufferSpec.of(tensors[pair[0]]) == BufferSpec.of(tensors[pair[1]])
    of_class = str(second[0]).startswith(".")
    # While a state is being created, its fields are arguments: they are named without the root.
    base = "" if of_class and not function else root
    target, source = (
        path_string(path, base).removeprefix(".") for path in (second, first if alike else second)
    )
    is_leaf = second == paths[pair[1]]
    copy = f"{source}.clone()" if is_leaf else f"fcg.tree.map(torch.clone, {source})"
    if not of_class or len(second) > 1:
        return f"{target} = {copy}"
    return f"{root}.replace({second[0].name}={copy})" if function else f"{target}={copy}"


def _shared(
    paths: Sequence[KeyPath], tensors: Sequence[Tensor], pair: tuple[int, int]
) -> tuple[KeyPath, KeyPath]:
    """Return the largest subtrees around two leaves in which each leaf shares its counterpart's storage."""
    first, second = (paths[i] for i in pair)

    def below(path: KeyPath) -> list[tuple[KeyPath, int]]:
        size = len(path)
        return [(p[size:], storage_key(t)) for p, t in zip(paths, tensors, strict=True) if p[:size] == path]

    while len(first) > 1 < len(second) and first[:-1] != second[:-1]:
        if below(first[:-1]) != below(second[:-1]):
            break
        first, second = first[:-1], second[:-1]
    return first, second
