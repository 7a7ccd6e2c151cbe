"""The workloads' losses in torch, shared by the eager, compiled and captured systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_cg.random import dropout

from ..workloads import Params, Workload, blocks

__all__ = ["Model", "actor_outputs", "torch_loss"]

RATE = 0.1
_MOMENTUM = 0.1


def torch_loss(work: Workload) -> Callable[..., Tensor]:
    """Make ``f(params, x, y, key=None) -> f32[]``; dropout draws from a key, batch norm updates its buffers."""
    dtype = torch.bfloat16 if work.bf16 else torch.float32
    layers, heads, width = work.layers, work.heads, work.width

    def mlp(p: Params, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        h = x.to(dtype)
        for i in range(layers):
            h = F.linear(h if i == 0 else F.relu(h), p[f"w{i}"].to(dtype), p[f"b{i}"].to(dtype))
        return F.mse_loss(h.float(), y)

    def dropped(p: Params, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        h = F.dropout(p["x"], RATE) if key is None else dropout(key, p["x"], RATE)
        return (h.mean(1) ** 2).mean()  # nonlinear, so that the gradient needs the forward

    def actor(p: Params, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        logits, value = actor_outputs(work, p, x)
        action, target = y[:, :1].long(), y[:, 1]
        log_p = F.log_softmax(logits, -1)
        advantage = (target - value).detach()
        entropy = -(log_p.exp() * log_p).sum(-1)
        return (F.mse_loss(value, target) - log_p.gather(1, action)[:, 0] * advantage - 0.01 * entropy).mean()

    def norm(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(h, (width,), scale.to(dtype), shift.to(dtype))

    def gpt(p: Params, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        rows, time = x.shape
        wte = p["wte"].to(dtype)
        h = F.embedding(x, wte) + p["wpe"].to(dtype)
        for i in range(layers):
            n = norm(h, p[f"norm1_{i}"], p[f"shift1_{i}"])
            qkv = F.linear(n, p[f"qkv_{i}"].to(dtype)).view(rows, time, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(mixed.transpose(1, 2).reshape(rows, time, width), p[f"out_{i}"].to(dtype))
            n = norm(h, p[f"norm2_{i}"], p[f"shift2_{i}"])
            n = F.gelu(F.linear(n, p[f"up_{i}"].to(dtype)), approximate="tanh")
            h = h + F.linear(n, p[f"down_{i}"].to(dtype))
        logits = F.linear(norm(h, p["norm"], p["shift"]), wte)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def cnn(p: Params, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        def conv(h: Tensor, name: str, stride: int = 1) -> Tensor:
            weight = p[f"conv_{name}"].to(dtype)
            return F.conv2d(h, weight, stride=stride, padding=weight.shape[-1] // 2)

        def normed(h: Tensor, name: str) -> Tensor:
            statistics = p[f"mean_{name}"], p[f"var_{name}"]
            return F.batch_norm(h, *statistics, p[f"scale_{name}"], p[f"shift_{name}"], True, _MOMENTUM)

        h = F.relu(normed(conv(x.to(dtype), "stem"), "stem"))
        for name, inputs, channels, stride in blocks(work):
            skip = h if inputs == channels else conv(h, f"{name}_skip", stride)
            h = F.relu(normed(conv(h, f"{name}_a", stride), f"{name}_a"))
            h = F.relu(skip + normed(conv(h, f"{name}_b"), f"{name}_b"))
        return F.cross_entropy(F.linear(h.mean((2, 3)).float(), p["head"], p["bias"]), y)

    return {
        "mlp": mlp, "dropout": dropped, "actor": actor, "loop": actor, "gpt": gpt, "cnn": cnn,
    }[work.kind]  # fmt: skip


def actor_outputs(work: Workload, p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logits f32[n, actions] and values f32[n] of observations."""
    h = x
    for i in range(work.layers):
        h = F.relu(F.linear(h, p[f"w{i}"], p[f"b{i}"]))
    return F.linear(h, p["policy"]), F.linear(h, p["value"])[:, 0]


class Model(nn.Module):
    """A workload as an ordinary module: ``model(x, y) -> f32[]``."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self._loss = torch_loss(work)
        self._work = work
        params, buffers = work.params(), work.buffers()
        self._names = (*params, *buffers)
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def tensors(self) -> dict[str, Any]:
        """Return parameters and buffers by name."""
        return {name: getattr(self, name) for name in self._names}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.tensors(), x, y)

    def act(self, x: Tensor) -> Tensor:
        """Choose the best action for each observation, i64[n]."""
        return actor_outputs(self._work, self.tensors(), x)[0].argmax(-1)
