"""A fake compiler that keeps float64 between products, and steps that amplify such rounding differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.tensors.aten import returns_view

__all__ = ["STEPS", "compile_wide"]

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "sum", "mean"})
_WIDER = MappingProxyType({torch.float32: torch.float64, torch.bfloat16: torch.float32})


def _wide(value: Any) -> Any:
    return value.to(_WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDER else value


def _is_written(node: fx.Node) -> bool:
    """Whether a call writes what a node makes, or a view of it: that is to be the same memory."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and (schema.is_mutable or "batch_norm" in schema.name):
            return True
        if schema is not None and returns_view(user.target) and _is_written(user):
            return True
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)


class _Wide(fx.Interpreter):
    """Runs pointwise ops, sums and products in a wider dtype, and what is pointwise is not rounded."""

    def run_node(self, node: fx.Node) -> Any:
        target = node.target
        name = str(getattr(getattr(target, "_schema", None), "name", "")).partition("::")[2]
        pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) and not _is_written(node)
        if node.op != "call_function" or "spec" not in node.meta or not (pointwise or name in _PRODUCTS):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._declared)
            return getattr(self, node.op)(target, args, kwargs)
        widened = self._widened if pointwise else lambda one: _wide(self._declared(one))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), widened)
        wide = target(*args, **{key: value for key, value in kwargs.items() if key != "dtype"})  # type: ignore[operator]
        dtype = node.meta["spec"].dtype
        return wide.to(_WIDER.get(dtype, dtype) if pointwise else dtype)

    def _widened(self, node: fx.Node) -> Any:
        return _wide(self.env[node])

    def _declared(self, node: fx.Node) -> Any:
        value = self.env[node]
        return (
            value.to(node.meta["spec"].dtype) if isinstance(value, Tensor) and "spec" in node.meta else value
        )


def compile_wide(graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A backend of ``torch.compile``."""
    del example_inputs
    return lambda *args: _Wide(graph).run(*args)


def gpt(seed: int) -> tuple[Any, Any, Any]:
    """A block in bfloat16, with tokens that are drawn, chosen and ranked."""
    generator = torch.Generator().manual_seed(seed)
    vocab, width = 64, 32
    shapes = {"e": (vocab, width), "q": (width, 3 * width), "o": (width, width), "h": (width, vocab)}
    params = {name: torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}

    def train_step(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            p = {name: value.bfloat16() for name, value in params.items()}
            h = p["e"][x]
            q, k, v = (F.layer_norm(h, (width,)) @ p["q"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            logits = (F.gelu(h + a @ p["o"]) @ p["h"]).float()
            return F.cross_entropy(logits.flatten(0, 1), x.roll(-1, 1).flatten()), logits

        (loss, logits), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        chosen = logits.argmax(-1)
        metrics = {"loss": loss, "drawn": fcg.random.categorical(key, logits[:, -1]), "chosen": chosen,
                   "best": logits.topk(3).indices, "right": (chosen == x).float().mean()}  # fmt: skip
        return state.apply_gradients(grads), metrics

    return params, train_step, torch.randint(0, vocab, (4, 16), generator=generator)


def routed(seed: int) -> tuple[Any, Any, Any]:
    """A mixture of experts: the two best of eight, and how many rows went where."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (16, 8), "up": (8, 16, 32), "down": (8, 32, 16)}
    params = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            p, rows = {name: value.bfloat16() for name, value in params.items()}, x.bfloat16()
            weight, expert = (rows @ p["gate"]).float().softmax(-1).topk(2)
            out = torch.zeros_like(rows)
            for n in range(2):
                hidden = torch.relu(torch.bmm(rows[:, None], p["up"][expert[:, n]]))
                out = out + torch.bmm(hidden, p["down"][expert[:, n]])[:, 0] * weight[:, n, None].bfloat16()
            return (out.float() - x).square().mean(), expert

        (loss, expert), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        counts = torch.zeros(8).index_add(0, expert.flatten(), torch.ones(expert.numel()))
        return state.apply_gradients(grads), {"loss": loss, "counts": counts}

    return params, train_step, torch.randn(32, 16, generator=generator)


def quantised(seed: int) -> tuple[Any, Any, Any]:
    """Weights and activations on a grid, gradients straight through, a threshold."""
    generator = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(16, 16, generator=generator) / 3}

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            w = params["w"]
            h = x @ (w + ((w * 8).round() / 8 - w).detach())
            a = h + ((h * 4).round().clamp(-8, 7) / 4 - h).detach()
            return (a - x).square().mean() + (h > 0).float().mean(), torch.sign(a)

        (loss, signs), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads), {"loss": loss, "signs": signs}

    return params, train_step, torch.randn(8, 16, generator=generator)


def stochastic(seed: int) -> tuple[Any, Any, Any]:
    """Parameters in bfloat16, to which updates are rounded by chance."""
    generator = torch.Generator().manual_seed(seed)
    params = {"w": (torch.randn(32, 32, generator=generator) / 3).bfloat16()}

    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: (torch.tanh(x @ p["w"].float()) - x).square().mean())(
            state.params
        )
        return state.apply_gradients(grads), {"loss": loss}

    return params, train_step, torch.randn(8, 32, generator=generator)


# Name -> ``make(seed)``: parameters, step, batch.
STEPS: Mapping[str, Callable[[int], tuple[Any, Any, Any]]] = {
    "gpt": gpt,
    "routed": routed,
    "quantised": quantised,
    "stochastic": stochastic,
}
