"""Random programs with equal blocks, or almost equal ones, on whole numbers: every lowering computes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg

__all__ = ["Repeated", "repeated"]

WIDTH = 4
Params = dict[str, Tensor]
# What a block may do: (h, what entered the block, its parameters, what is shared, its number) -> h
STEPS: dict[str, Callable[[Tensor, Tensor, Params, Tensor, float], Tensor]] = {
    "product": lambda h, _, p, shared, c: h @ p["w"],
    "turned": lambda h, _, p, shared, c: h.T.reshape(WIDTH, -1).T @ p["w"].T,
    "bias": lambda h, _, p, shared, c: h + p["b"],
    "residual": lambda h, x, p, shared, c: h + x,
    "times": lambda h, _, p, shared, c: h * c,
    "shared": lambda h, _, p, shared, c: h - shared,
    "halves": lambda h, _, p, shared, c: torch.cat([h[:, WIDTH // 2 :], h[:, : WIDTH // 2].relu()], 1),
    "narrow": lambda h, _, p, shared, c: h.float().relu().double() + h.float() * p["b"].float(),
    "sums": lambda h, _, p, shared, c: h + h.sum(1, keepdim=True),
    "heads": lambda h, _, p, shared, c: h.view(-1, 2, 2).transpose(1, 2).reshape(h.shape),
    "product of two": lambda h, _, p, shared, c: h @ (h.T @ h).clamp(-1, 1),
}


def _either_way(h: Tensor, _: Tensor, p: Params, shared: Tensor, c: float) -> Tensor:
    """Make the same calls on other values."""
    one, two = (h + p["b"]).relu(), (h - p["b"]).clamp(-1, 1)
    return one - two if c == 2.0 else two - one


def _overwritten(h: Tensor, _: Tensor, p: Params, shared: Tensor, c: float) -> Tensor:
    copy = h.clone()
    copy[:, :2] *= p["b"][1]
    return copy.tanh().round() + copy


STEPS |= {"either way": _either_way, "overwritten": _overwritten}
UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by itself": lambda w, g, total: w - g,
    "by the norm": lambda w, g, total: w - g * total.clamp(-1, 1),
    "twice": lambda w, g, total: w - g - w.sign(),
    "by views": lambda w, g, total: (w.view(-1) - (g * 2.0).clamp(-1, 1).view(-1)).view(w.shape),
}


@dataclass(frozen=True)
class Repeated:
    """A step over ``layers`` blocks.

    Attributes:
      steps: What each block does.
      numbers: The number of each block: most are equal.
      update: How leaves change.
      keeps: What else the step keeps: old leaves, in the state or as metrics.
      stacked: Whether the parameters of the blocks are stacked, and ``fcg.scan`` loops over them.
    """

    layers: int
    steps: tuple[str, ...]
    numbers: tuple[float, ...]
    update: str
    keeps: frozenset[str]
    stacked: bool = False

    @property
    def state(self) -> Any:
        g = torch.Generator().manual_seed(self.layers)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=g).double()

        blocks = [{"w": whole(WIDTH, WIDTH), "b": whole(WIDTH)} for _ in range(self.layers)]
        old = [whole(WIDTH) for _ in blocks]
        if self.stacked:
            blocks, old = (
                fcg.tree.map(lambda *leaves: torch.stack(leaves), *blocks),
                [whole(self.layers, WIDTH)],
            )
        return {"blocks": blocks, "old": old, "shared": whole(WIDTH), "n": whole()}

    def batch(self, number: int) -> Tensor:
        g = torch.Generator().manual_seed(number)
        return torch.randint(-2, 3, (6, WIDTH), generator=g).double()

    def __call__(self, state: Any, x: Tensor) -> Any:
        middles: list[Tensor] = []

        def block(h: Tensor, params: Params, number: float) -> Tensor:
            entered = h
            for name in self.steps:
                h = STEPS[name](h, entered, params, state["shared"], number)
            return h.clamp(-3, 3)

        def loss_fn(blocks: Any) -> Tensor:
            h = x
            if self.stacked:
                return fcg.scan(lambda h, params: (block(h, params, self.numbers[0]), None), h, blocks)[
                    0
                ].sum()
            for params, number in zip(blocks, self.numbers, strict=True):
                h = block(h, params, number)
                middles.append(h.detach())
            return h.sum()

        loss, grads = fcg.value_and_grad(loss_fn)(state["blocks"])
        total = torch.stack([leaf.sum() for leaf in fcg.tree.leaves(grads)]).sum()
        blocks = fcg.tree.map(
            lambda w, g: UPDATES[self.update](w, g, total).clamp(-2, 2), state["blocks"], grads
        )
        old, metrics = state["old"], {"loss": loss}
        if "old biases" in self.keeps:
            old = [state["blocks"]["b"]] if self.stacked else [block["b"] for block in state["blocks"]]
        if "turned over" in self.keeps:
            blocks = blocks[::-1]
        if "swapped" in self.keeps:
            blocks = [*blocks[:-2], state["blocks"][-1], state["blocks"][-2]]
        if "metrics" in self.keeps:
            metrics |= {"weight": state["blocks"][1]["w"], "middles": middles, "grad": grads[-1]["b"]}
        return {"blocks": blocks, "old": old, "shared": -state["shared"], "n": state["n"] + 1}, metrics


@st.composite
def repeated(draw: Any) -> Repeated:
    """Draw a program."""
    layers = draw(st.integers(3, 6))
    steps = draw(st.lists(st.sampled_from([*STEPS]), min_size=2, max_size=6).filter(_has_product))
    numbers = [draw(st.sampled_from([1.0, 2.0, 0.0]))] * layers
    if draw(st.booleans()):  # one of them is another, at times one that only looks the same
        numbers[draw(st.integers(0, layers - 1))] = draw(st.sampled_from([-1.0, -0.0, 0.0, 1, 2.0]))
    keeps = draw(st.frozensets(st.sampled_from(["old biases", "turned over", "swapped", "metrics"])))
    stacked = draw(st.booleans())
    keeps = keeps & {"old biases"} if stacked else keeps
    return Repeated(layers, tuple(steps), tuple(numbers), draw(st.sampled_from([*UPDATES])), keeps, stacked)


def _has_product(steps: list[str]) -> bool:
    return "product" in steps or "turned" in steps
