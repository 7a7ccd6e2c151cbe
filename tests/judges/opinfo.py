"""The table of ops that torch tests itself with: each op, its in-place form and its gradients inside a step.

A step has many samples of one op. Where a step is refused, its samples are divided until those that are refused stand
alone, so that no sample hides another.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import functional_cg as fcg
from tests.judges.documented import EXACT, UNINITIALISED
from tests.judges.rows import Row, Verdict, compare, first_line

__all__ = [
    "JUDGE", "Item", "cases", "eagerly", "in_a_step", "items_of", "of_item", "ops", "refusal", "run", "verdict_of",
]  # fmt: skip

JUDGE = "OpInfo"

# By lowering: how many samples of a dtype, spread over those that torch has.
SAMPLES = {
    "aten": dict.fromkeys(
        (
            torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8,
            torch.bool,
        ),
        6,
    ),
    "inductor": {
        torch.float32: 4,
        torch.bfloat16: 1,
        torch.complex64: 1,
        torch.int64: 1,
    },
}  # fmt: skip

WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


@dataclass
class Item:
    """A sample of an op: what is called, and with what.

    Attributes:
      where: The dtype, the sample's number, and the form of the op.
      call: Maps the sample's tensors to the tensors of the result.
      tensors: Of the sample.
      wanted: Which of them have gradients.
      rounds: False if results of the op are among its inputs' own values, or their neighbours.
      plain: The loss is a plain sum, whose gradient is one expanded number; otherwise elements have weights.
    """

    where: str
    call: Callable[[list[Tensor]], list[Tensor]]
    tensors: list[Tensor]
    wanted: list[int]
    plain: bool = False
    rounds: bool = True
    expected: list[Tensor] = field(default_factory=list)

    def without_gradients(self) -> Item:
        """The op of the sample alone."""
        alone = Item(self.where, self.call, self.tensors, [], rounds=self.rounds)
        alone.expected = eagerly(alone)
        return alone

    def exact(self, n: int) -> Tensor | None:
        """A result or gradient in float64, if the op has it."""
        try:
            return eagerly(self, wide=True)[n]
        except Exception:  # the sample is not one of float64
            return None

    def near(self, n: int) -> Tensor | None:
        """The same for tensors that are one rounding away."""
        moved = [
            t * (1 + torch.finfo(t.dtype).eps) if t.is_floating_point() or t.is_complex() else t
            for t in self.tensors
        ]
        try:
            return eagerly(replace(self, tensors=moved))[n]
        except Exception:  # it is out of the range of the op
            return None


@cache
def ops() -> dict[str, Any]:
    # 10 seconds, which the other judges do not need.
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Any] = {}
    for op in op_db:
        name = op.full_name
        while name in found:
            name += "'"
        found[name] = op
    return found


def cases(device: str) -> list[str]:
    """The names of all ops of the table."""
    del device
    return list(ops())


def run(case: str, lowering: str, device: str) -> Iterator[Row]:
    """Judge one op with all of its dtypes."""
    op = ops()[case]
    row = Row(JUDGE, case, lowering, device)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        items: list[Item] = []
        for dtype, count in SAMPLES[lowering].items():
            found, verdicts = items_of(op, dtype, count, device)
            row.add(verdicts)
            items += found
        if not items and not row.counts:
            row.add([Verdict("not run", "", "the op has none of the judged dtypes on this device")])
        values = op.name not in UNINITIALISED
        for verdict in _judge(items, lowering, values=values):
            row.add([verdict])
    row.seconds = round(time.monotonic() - start, 1)
    yield row


# -- samples ------------------------------------------------------------------------------------------------------


def items_of(op: Any, dtype: torch.dtype, count: int, device: str) -> tuple[list[Item], list[Verdict]]:
    if dtype not in op.supported_dtypes(device):
        return [], []
    name = str(dtype).removeprefix("torch.")
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs(device, dtype, requires_grad=differentiable))
    except Exception as error:  # the table itself lacks a library or a dtype here
        return [], [Verdict("not run", name, f"torch has no samples here: {first_line(error)}")]
    items, verdicts = [], []
    chosen = (
        sorted({round(i * (len(samples) - 1) / max(1, count - 1)) for i in range(count)}) if samples else []
    )
    forms = [("", op.get_op())]
    if op.inplace_variant is not None:
        forms.append((" in place", op.inplace_variant))
    for n, index in enumerate(chosen[:count]):
        for form, function in forms:
            where = f"{name}[{index}]{form}"
            item = _item(samples[index], function, where, differentiable, bool(form), plain=n % 2 == 1)
            # The sign of a complex number divides.
            item.rounds = op.name not in EXACT or dtype.is_complex
            try:
                item.expected = eagerly(item)
            except Exception as error:  # eager torch refuses the sample in this form
                if not form:
                    verdicts.append(Verdict("not run", where, f"eager torch raises: {first_line(error)}"))
                continue
            if not item.expected:
                verdicts.append(Verdict("not run", where, "the result has no tensor"))
                continue
            items.append(item)
    return items, verdicts


def _item(sample: Any, function: Any, where: str, differentiable: bool, in_place: bool, plain: bool) -> Item:
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    tensors = [flat[i].detach() for i in places]
    wanted = [n for n, i in enumerate(places) if differentiable and flat[i].requires_grad]
    process = sample.output_process_fn_grad

    def call(now: list[Tensor]) -> list[Tensor]:
        leaves = list(flat)
        for place, tensor in zip(places, now, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, spec)
        if in_place:
            first = first.clone() if isinstance(first, Tensor) else [x.clone() for x in first]
        result = process(function(first, *args, **kwargs))
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    return Item(where, call, tensors, wanted, plain=plain)


# -- runs ---------------------------------------------------------------------------------------------------------


def _loss(item: Item, leaves: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """The result of an op, and a number that depends on all of it."""
    now = list(tensors)
    for n, leaf in zip(item.wanted, leaves, strict=True):
        if tensors[n].is_complex():
            leaf = torch.view_as_complex(leaf if leaf.stride(-1) == 1 else leaf.contiguous())
        now[n] = leaf
    outs = item.call(now)
    loss = None
    for out in outs:
        if out.requires_grad and out.layout is torch.strided:
            real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
            if not item.plain or out.is_complex():  # torch itself has no complex view of one expanded number
                weights = torch.arange(real.numel(), device=real.device).remainder(7).add(4).div(8)
                real = real * weights.to(real.dtype).reshape(real.shape)
            loss = real.sum() if loss is None else loss + real.sum()
    return loss, outs


def _leaves(item: Item, tensors: list[Tensor]) -> list[Tensor]:
    return [
        torch.view_as_real(tensors[n].resolve_conj()) if tensors[n].is_complex() else tensors[n]
        for n in item.wanted
    ]


def eagerly(item: Item, wide: bool = False) -> list[Tensor]:
    """The results and gradients by plain torch."""
    tensors = item.tensors
    if wide:
        tensors = [
            t.to(WIDE.get(t.dtype, torch.complex128) if t.is_complex() else torch.float64)
            if t.is_complex() or t.is_floating_point()
            else t
            for t in tensors
        ]
    leaves = [leaf.detach().requires_grad_() for leaf in _leaves(item, tensors)]
    with torch.enable_grad():
        loss, outs = _loss(item, leaves, tensors)
    if not item.wanted:
        return [out.detach() for out in outs]
    if loss is None:
        item.wanted = []
        return [out.detach() for out in outs]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach() for x in (*outs, *filled)]


def of_item(item: Item, tensors: list[Tensor]) -> list[Tensor]:
    """The same for a step to call."""
    if not item.wanted:
        return item.call(tensors)

    def loss_fn(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        loss, outs = _loss(item, leaves, tensors)
        assert loss is not None
        return loss, outs

    (_, outs), grads = fcg.value_and_grad(loss_fn, has_aux=True)(_leaves(item, tensors))
    return [*outs, *grads]


def in_a_step(items: Sequence[Item], lowering: str) -> list[list[Tensor]]:
    """The results and gradients of items inside of one step."""

    def op(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [of_item(item, tensors) for item, tensors in zip(items, inputs, strict=True)]

    # Samples do not need each other: lanes would be measured, by compiling twice.
    with fcg.graph_fn(op, lowering=lowering, branches=1) as step:
        return step([item.tensors for item in items])


def _judge(items: Sequence[Item], lowering: str, *, values: bool, traced: bool = False) -> list[Verdict]:
    """The verdicts of items; those that are refused, or fail, alone."""
    if not items:
        return []
    try:
        results = in_a_step(items, lowering)
    except Exception as error:  # refusals and errors of torch alike
        if len(items) == 1:
            return _alone(items[0], error, lowering, values=values)
        if lowering != "aten" and not traced:
            # What is refused in a trace is found without a compiler.
            fine, verdicts = [], []
            for item, verdict in _traced(items):
                if verdict is None:
                    fine.append(item)
                else:
                    verdicts.append(verdict)
            return verdicts + _judge(fine, lowering, values=values, traced=True)
        half = len(items) // 2
        return [
            verdict
            for part in (items[:half], items[half:])
            for verdict in _judge(part, lowering, values=values, traced=traced)
        ]
    return [verdict_of(item, result, values) for item, result in zip(items, results, strict=True)]


def _traced(items: Sequence[Item]) -> list[tuple[Item, Verdict | None]]:
    """Each item, or the op of it alone, with None; or with the verdict of its refusal."""
    try:
        in_a_step(items, "aten")
    except Exception as error:  # of whatever kind: the compiled step has the last word
        if len(items) > 1:
            half = len(items) // 2
            return _traced(items[:half]) + _traced(items[half:])
        [item] = items
        verdict = refusal(item, error)
        if verdict.outcome != "refused":
            return [(item, None)]
        return [(item, verdict), *(_traced([item.without_gradients()]) if item.wanted else [])]
    return [(item, None) for item in items]


def _alone(item: Item, error: Exception, lowering: str, *, values: bool) -> list[Verdict]:
    """The verdicts of an item whose step raises: with its gradients, and the op alone."""
    verdict = refusal(item, error)
    if not item.wanted:
        return [verdict]
    rest = _judge([item.without_gradients()], lowering, values=values)
    return rest if rest[-1].outcome == verdict.outcome else [verdict, *rest]


def refusal(item: Item, error: Exception) -> Verdict:
    refused = isinstance(error, fcg.FunctionalCGError) and not isinstance(error, fcg.MiscompileError)
    why = f"{'gradient: ' if item.wanted else ''}{type(error).__name__}: {first_line(error)}"
    return Verdict("refused" if refused else "DIFFERS", item.where, why)


def verdict_of(item: Item, result: list[Tensor], values: bool) -> Verdict:
    if len(result) != len(item.expected):
        return Verdict("DIFFERS", item.where, f"{len(result)} results, expected {len(item.expected)}")
    first = len(result) - len(item.wanted)
    worst = Verdict("equal", item.where)
    for n, (got, expected) in enumerate(zip(result, item.expected, strict=True)):
        where = f"{item.where} gradient {n - first}" if n >= first else f"{item.where} result {n}"
        verdict = compare(
            got, expected, where, lambda n=n: item.exact(n), lambda n=n: item.near(n), values=values
        )
        if verdict.outcome == "DIFFERS":
            return verdict
        if verdict.outcome == "rounded":
            if n < first and not item.rounds:
                return Verdict("DIFFERS", where, "other bits, though the op does not round")
            worst = verdict
    return worst
