"""Attention whose mask is the same at each call: none if it hides nothing, and ``is_causal`` if it hides the future.

A library that may not look at the values of a mask while it is traced makes one for every call. Fused kernels then read
it for each head, and compute the scores that it hides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...tensors.aten import named_arguments
from ..passes.changes import with_arguments
from ..program import Instr, Program, Var
from ..trace.known import value_of

__all__ = ["kind_of", "use_known_masks"]

_MASKS = ("attn_bias", "attn_mask", "mask")  # what ops call theirs
# From which score on a key is hidden: cuDNN takes no infinity, so torch writes a finite number for it.
_HIDDEN: Mapping[str, float] = MappingProxyType({"_scaled_dot_product_cudnn_attention": -65504.0})


def use_known_masks(program: Program) -> None:
    """Rewrite a program in place so that its attention reads no mask that a flag can say.

    Args:
      program: A rewritten program.
    """
    kinds: dict[tuple[Var, int, float], str] = {}
    writes: Counter[int] = Counter()
    out = []
    for place, instr in enumerate(program.instrs):
        writes.update(var.storage for var in instr.writes)
        name, mask = _mask_of(instr)
        if mask is not None:
            hidden = _HIDDEN.get(instr.name.removesuffix("_backward"), -math.inf)
            known = mask, writes[mask.storage], hidden
            if known not in kinds:
                value = value_of(replace(program, instrs=program.instrs[:place]), mask)
                kinds[known] = "" if value is None else kind_of(value, hidden)
            if kind := kinds[known]:
                instr = with_arguments(instr, {name: None, "is_causal": kind == "causal"})
        out.append(instr)
    program.instrs = out


def _mask_of(instr: Instr) -> tuple[str, Var | None]:
    """Return the mask of a call of attention, and what the op calls it; None of other calls."""
    if "scaled_dot_product" in instr.name:
        named = named_arguments(instr.op, instr.args, instr.kwargs)
        for name in _MASKS:
            # A mask with a gradient is read for it, too.
            differentiated = bool(named.get("grad_input_mask", [False])[-1])
            if isinstance(named.get(name), Var) and named["is_causal"] is False and not differentiated:
                return name, named[name]
    return "", None


def kind_of(mask: Tensor, hidden: float) -> str:
    """Return ``"empty"`` if a mask hides no key, ``"causal"`` if it hides the future, or ``""``.

    Args:
      mask: [..., queries, keys]: bool, or floating to be added to the scores.
      hidden: From which number on, downwards, a key is hidden.
    """
    for dim, step in enumerate(mask.stride()):
        if step == 0 and dim < mask.dim() - 2:
            mask = mask.narrow(dim, 0, 1)
    seen = mask if mask.dtype == torch.bool else mask == 0
    if bool(seen.all()):
        return "empty"
    hides = ~seen if mask.dtype == torch.bool else mask <= hidden
    rows, columns = mask.shape[-2:]
    past = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    causal = rows == columns and bool((seen == past).all()) and bool((hides == ~past).all())
    return "causal" if causal else ""
