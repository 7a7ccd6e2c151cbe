"""Whether gradients fit the parameters, and in which dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_cg import tree
from functional_cg.errors import LayoutError


def refuse_unlike(params: Any, grads: Any) -> None:
    """Refuse gradients that do not fit the parameters: fused kernels walk raw memory and do not check.

    Raises:
      LayoutError: If ``grads`` differs in structure, shapes or dtypes, but for one floating dtype in place of
        another; all differences are listed.
    """

    def unlike(p: Tensor, g: Any) -> bool:
        if not isinstance(g, Tensor):
            return True
        converts = p.is_floating_point() and g.is_floating_point()
        return p.shape != g.shape or (p.dtype != g.dtype and not converts)

    flat, treedef = tree.flatten_with_path(params)
    values, other = tree.flatten(grads)
    rows = tree.structure_diff(treedef, other, "grads") if other != treedef else []
    if not rows:
        rows = [
            f"{tree.path_string(path, 'grads')}  expected {p.dtype} {list(p.shape)}   got "
            + (f"{g.dtype} {list(g.shape)}" if isinstance(g, Tensor) else repr(g))
            for (path, p), g in zip(flat, values, strict=True)
            if unlike(p, g)
        ]
    if rows:
        raise LayoutError.of(
            "",
            "optim: the gradients are unlike the parameters.",
            rows=rows,
            fix="`loss, grads = fcg.value_and_grad(loss_fn)(state.params)`, value first, "
            "then `state.apply_gradients(grads)`.",
        )


def in_dtypes_of(params: Any, grads: Any) -> Any:
    """Gradients in the dtypes of the parameters: moments of narrower ones would lose what is small."""
    return tree.map(lambda p, g: g.to(p.dtype), params, grads)
