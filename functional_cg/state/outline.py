"""Print a state, as text and HTML: its tree in a bounded number of lines, its arena as a strip.

Only structures and specs are used. No value is read, so nothing waits for a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..messages.html import (
    Html,
    Segment,
    bar,
    colors,
    element,
    fold,
    grid,
    is_number,
    right_aligned,
    strip,
    table,
)
from ..messages.units import size_of
from ..tree import KeyPath, Treedef, path_string
from .arena import BufferSpec, Plan, dtype_name
from .boundary import mesh_of

__all__ = [
    "TEXT_LINES",
    "Branch",
    "Entry",
    "arena_html",
    "branches_html",
    "columns",
    "count",
    "listed",
    "outline",
    "segments",
    "size_text",
    "spec_text",
    "tree_html",
    "tree_text",
]

TEXT_LINES = 60
_HTML_LINES, _HTML_CHILDREN = 192, 64
_PATH_CHARACTERS = 96
_STRIP_PIECES = 128
_INDENT = 2  # characters of a level of a tree, as of a fold's margin


@dataclass(frozen=True, slots=True)
class Entry:
    """What is shown of a leaf: its spec, what a call does with it, how many bytes a call copies for it."""

    spec: BufferSpec
    role: str = ""
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Branch:
    """A leaf or subtree as it is shown, with as many of its children as fit.

    Attributes:
      path: Key path, or ``…`` for omitted leaves.
      what: Spec of a leaf; number and dtypes of a subtree's leaves.
      role: What a call does with the leaves.
      nbytes: Bytes of all leaves below.
      copied: Bytes copied for them at each call.
      children: The children shown; none for a folded subtree.
    """

    path: str
    what: str
    role: str
    nbytes: int
    copied: int
    children: tuple[Branch, ...] = ()

    @classmethod
    def of(cls, path: str, entry: Entry) -> Branch:
        """Return the branch of a leaf."""
        return cls(_clipped(path), spec_text(entry.spec), entry.role, entry.spec.nbytes, entry.copied)

    def ends(self) -> Iterator[Branch]:
        """Yield the leaves and folded subtrees in order, one per line."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.ends()


def spec_text(spec: BufferSpec) -> str:
    """Return a spec without its device: ``f32[768,768]``, ``f32[768,768] sharded over data=8``."""
    return str(spec).replace(f"@{spec.device}", "", 1)


def size_text(entries: Sequence[Entry]) -> str:
    """Count leaves and bytes: ``2 leaves, 1,024 B``; for leaves on a mesh, the bytes that this rank holds."""
    mesh = mesh_of([entry.spec for entry in entries])
    where = "" if mesh is None else f" on rank {mesh.number} of {mesh.everyone}"
    return f"{count(len(entries), 'leaf')}, {size_of(sum(entry.spec.nbytes for entry in entries))}{where}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 leaf``, ``2 leaves``.

    Example:
      >>> from functional_cg.state.outline import count
      >>> count(1, "capture"), count(1200, "leaf")
      ('1 capture', '1,200 leaves')
    """
    plural = noun.removesuffix("f") + "ves" if noun.endswith("f") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def outline(
    treedef: Treedef,
    entries: Sequence[Entry],
    path: str,
    *,
    lines: int = TEXT_LINES,
    widest: int = TEXT_LINES,
    cut: bool = False,
) -> Branch:
    """Lay out a tree in about ``lines`` lines.

    Small subtrees get their lines first; what does not fit is folded. The root is truncated instead, so some
    of its children are always shown.

    Args:
      treedef: Structure of the tree.
      entries: One per leaf.
      path: Key path of the root.
      lines: About how many leaves and folded subtrees to show.
      widest: How many children of one node to show at most.
      cut: Whether to truncate nodes below the root, too, instead of folding them.
    """
    parts = _parts(treedef)
    shown = min(len(parts), lines, widest)
    shares = _shares([child.num_leaves for _, child, _ in parts[:shown]], lines)
    children = []
    for (key, child, start), share in zip(parts, shares, strict=False):
        below, where = entries[start : start + child.num_leaves], f"{path}{key}"
        if cut or len(_parts(child)) <= share:
            children.append(outline(child, below, where, lines=share, widest=widest, cut=cut))
        else:
            children.append(_branch(child, below, where))
    if shown < len(parts):
        children.append(_summed(f"… and {len(parts) - shown:,} more", entries[parts[shown][2] :]))
    return _branch(treedef, entries, path, tuple(children))


def _parts(node: Treedef) -> list[tuple[object, Treedef, int]]:
    """Return key, structure and position of the first leaf of each child that has leaves."""
    places = accumulate((child.num_leaves for child in node.children), initial=0)
    return [
        (key, child, start)
        for key, child, start in zip(node.keys, node.children, places, strict=False)
        if child.num_leaves
    ]


def _branch(node: Treedef, entries: Sequence[Entry], path: str, children: tuple[Branch, ...] = ()) -> Branch:
    return Branch.of(path, entries[0]) if node.is_leaf else _summed(path, entries, children)


def _clipped(path: str) -> str:
    return path if len(path) <= _PATH_CHARACTERS else f"{path[:64]}…{path[-31:]}"


def listed(leaves: Sequence[tuple[str, Entry]], most: int = 24) -> list[Branch]:
    """Return branches for leaves without a tree, such as inputs: the first ones, and the rest as one."""
    shown = [Branch.of(path, entry) for path, entry in leaves[:most]]
    rest = [entry for _, entry in leaves[most:]]
    return [*shown, _summed(f"… and {len(rest):,} more", rest)] if rest else shown


def _summed(path: str, entries: Sequence[Entry], children: tuple[Branch, ...] = ()) -> Branch:
    dtypes = ", ".join(sorted({dtype_name(entry.spec.dtype) for entry in entries}))
    roles = Counter(entry.role for entry in entries)
    role = next(iter(roles), "") if len(roles) < 2 else ", ".join(f"{n} {name}" for name, n in roles.items())
    nbytes, copied = sum(entry.spec.nbytes for entry in entries), sum(entry.copied for entry in entries)
    return Branch(_clipped(path), f"{count(len(entries), 'leaf')} {dtypes}", role, nbytes, copied, children)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide lines among children, smallest first; none gets more lines than it has leaves."""
    shares = [0] * len(sizes)
    for done, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[i] = min(sizes[i], max(1, total // (len(sizes) - done)))
        total -= shares[i]
    return shares


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return rows as aligned lines; columns of numbers are right-aligned, their titles, too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_the_right = right_aligned(rows)
    return [
        (indent + "  ".join(
            cell.rjust(width) if right or is_number(cell) else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_the_right, strict=True)
        )).rstrip()
        for row in rows
    ]  # fmt: skip


def tree_text(treedef: Treedef, entries: Sequence[Entry], path: str) -> list[str]:
    """Return a tree as lines: key path, spec and bytes of each leaf or folded subtree."""
    ends = outline(treedef, entries, path).ends() if entries else ()
    return columns([(end.path, end.what, size_of(end.nbytes)) for end in ends])


def tree_html(treedef: Treedef, entries: Sequence[Entry], path: str) -> Html:
    """Return a foldable tree: key path, spec, bytes, and a bar for the share of the total."""
    root = outline(treedef, entries, path, lines=_HTML_LINES, widest=_HTML_CHILDREN, cut=True)
    return branches_html(root.children or ((root,) if entries else ()), max(root.nbytes, 1))


def branches_html(branches: Sequence[Branch], total: int) -> Html:
    """Return branches as HTML: one with children is a fold, adjacent ones without share a table.

    All lines have the same columns, however deep they are nested.
    """
    lines = list(_nested(branches, 0))
    cells = [_cells(branch, total) for branch, _ in lines]
    paths = max((len(branch.path) + _INDENT * depth for branch, depth in lines), default=0)
    what, nbytes, copied = (max((len(row[i]) for row in cells), default=0) for i in (1, 2, 4))
    return _level(branches, total, paths, [f"{what}ch", f"{nbytes}ch", "8ch", f"{copied}ch", "max-content"])


def _level(branches: Sequence[Branch], total: int, paths: int, others: Sequence[str]) -> Html:
    widths = [f"{paths}ch", *others]
    parts: list[str] = []
    rows: list[Sequence[str]] = []
    for branch in branches:
        if not branch.children:
            rows.append(_cells(branch, total))
            continue
        if rows:
            parts.append(table(rows, widths))
            rows = []
        below = _level(branch.children, total, paths - _INDENT, others)
        title = grid([_cells(branch, total)], widths)
        parts.append(fold(title, below, opened=len(branch.children) <= 8))
    if rows:
        parts.append(table(rows, widths))
    return element("div", *parts)


def _cells(branch: Branch, total: int) -> tuple[str, ...]:
    copied = f"{size_of(branch.copied)} copied" if branch.copied else ""
    return (branch.path, branch.what, size_of(branch.nbytes), bar(branch.nbytes / total), copied, branch.role)


def _nested(branches: Sequence[Branch], depth: int) -> Iterator[tuple[Branch, int]]:
    for branch in branches:
        yield branch, depth
        yield from _nested(branch.children, depth + 1)


def segments(plan: Plan, paths: Sequence[KeyPath]) -> list[Segment]:
    """Return an arena's slots and padding, slab by slab; adjacent segments too narrow to see are merged.

    Args:
      plan: Layout of the arena.
      paths: Key path of each leaf.
    """
    pieces: list[list[Segment]] = [[] for _ in plan.slabs]
    starts = list(accumulate((slab.nbytes for slab in plan.slabs), initial=0))
    for slot, path in zip(plan.slots, paths, strict=True):
        start = starts[slot.slab] + slot.offset * slot.spec.dtype.itemsize
        label = f"{path_string(path, 'state')}  {spec_text(slot.spec)}  {size_of(slot.spec.nbytes)}"
        pieces[slot.slab].append(Segment(label, plan.slabs[slot.slab].role, start, slot.spec.nbytes))
    found = []
    for slab, first, end in zip(pieces, starts, starts[1:], strict=False):
        found += _merged(_with_padding(slab, first, end), plan.nbytes // _STRIP_PIECES)
    return found


def _with_padding(slab: Sequence[Segment], first: int, end: int) -> Iterator[Segment]:
    for segment in sorted(slab, key=lambda segment: segment.start):
        if segment.start > first:
            yield Segment(f"padding  {size_of(segment.start - first)}", "", first, segment.start - first)
        if segment.size:
            yield segment
        first = segment.start + segment.size
    if end > first:
        yield Segment(f"padding  {size_of(end - first)}", "", first, end - first)


def _merged(pieces: Iterator[Segment], least: int) -> list[Segment]:
    """Merge adjacent segments of fewer than ``least`` bytes."""
    out: list[Segment] = []
    joined = 0
    for piece in pieces:
        if out and out[-1].size < least and piece.size < least:
            joined += 1
            last, size = out[-1], out[-1].size + piece.size
            out[-1] = Segment(
                f"{joined + 1} neighbours  {size_of(size)}", last.role or piece.role, last.start, size
            )
        else:
            joined = 0
            out.append(piece)
    return out


def arena_html(plan: Plan, paths: Sequence[KeyPath]) -> Html:
    """Return an arena as a fold: a strip, with a legend of one line for each dtype of a field."""
    shades = colors(slab.role for slab in plan.slabs)
    used = Counter[int]()
    for slot in plan.slots:
        used[slot.slab] += slot.spec.nbytes
    rows = [["", "field", "dtype", "bytes", "of it padding"]]
    rows += [
        [
            element("span", "■", style=f"color:{shades[slab.role]}"), slab.role,
            f"{dtype_name(slab.dtype)} on {slab.device}", size_of(slab.nbytes), size_of(slab.nbytes - used[i]),
        ]
        for i, slab in enumerate(plan.slabs[:_HTML_CHILDREN])
    ]  # fmt: skip
    drawn = [strip(segments(plan, paths), plan.nbytes, shades), table(rows)] if plan.nbytes else ["no bytes"]
    return fold("where it lies in memory", *drawn)
