"""Fine-tunes a Hugging Face model by low-rank updates: ``python -m functional_cg.examples.programs.lora``.

The weights of the model are frozen, so ``from_module`` takes them for buffers: they get no gradient, no moments and no
update. The two factors of each update (Hu et al. 2022) learn at two rates (Hayou et al. 2024). Needs ``transformers``;
modules of ``peft`` work the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import functional_cg as fcg

RANK, SCALE = 8, 2.0


class LowRank(nn.Module):
    """A frozen linear layer plus a learned update of low rank, which begins at zero."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + SCALE * (x @ self.down.T @ self.up.T)


def add_low_rank(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Freeze a model, and wrap its linear layers of these names."""
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names:
            outputs, inputs = layer.weight.shape
            if not isinstance(layer, nn.Linear):  # GPT-2's layers hold the transpose
                inputs, outputs = outputs, inputs
            setattr(model.get_submodule(parent), name, LowRank(layer, inputs, outputs))
    return model


def build(model: nn.Module) -> tuple[Any, Any]:
    """Make the step and the state for a causal language model with low-rank updates."""
    apply, params, buffers = fcg.from_module(model)
    optimizer = fcg.optim.partition(
        {
            "down": fcg.optim.adamw(3e-3, weight_decay=0.0),
            "up": fcg.optim.adamw(2e-2, weight_decay=0.0),
        },
        fcg.optim.by_name({"*.up": "up"}, default="down"),
    )
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(0))

    @fcg.graph_step
    def train_step(state: Any, ids: Tensor) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            out, _ = apply(params, state.buffers, ids, labels=ids, key=key)
            return out.loss

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step, state


def counting(count: int, draw: torch.Generator) -> Tensor:
    """Sequences that count up, i64[count, 32]."""
    return (torch.randint(64, (count, 1), generator=draw) + torch.arange(32)) % 64


def train(steps: int = 300, device: str = "cpu") -> list[float]:
    """Fine-tune a small GPT-2, and return the losses."""
    from transformers import GPT2Config, GPT2LMHeadModel

    # In place of `GPT2LMHeadModel.from_pretrained("gpt2")`, so that nothing is downloaded.
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = add_low_rank(GPT2LMHeadModel(config), ("c_attn", "c_proj", "c_fc"))
    train_step, state = build(model.to(device))
    print(f"{sum(leaf.numel() for leaf in state.params.values()):,} numbers learn")
    draw = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        state, metrics = train_step(state, counting(16, draw))
        losses.append(float(metrics["loss"]))
        if step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
