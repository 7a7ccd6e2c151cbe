"""Fine-tunes a Hugging Face model with LoRA: ``python -m functional_cg.examples.programs.lora``.

Adapters and the new head train at rates of their own. All other weights are frozen: they have no gradients and no
moments. Needs ``pip install transformers``. The model is small and random; for a real one, replace ``pretrained``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

Batch = dict[str, Tensor]
State = fcg.TrainState[dict[str, Tensor]]


class LoRA(nn.Module):
    """A frozen linear layer, plus a trained product of two thin matrices that begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def pretrained() -> nn.Module:
    """Return the model: for a real one, ``AutoModelForSequenceClassification.from_pretrained(name)``."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=2, **sizes))  # type: ignore[no-any-return]


def adapt(model: nn.Module) -> nn.Module:
    """Freeze a model but for its head, and put adapters on the queries and values of its attention."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier."))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith((".query", ".value")):
            model.set_submodule(name, LoRA(layer))
    return model


def build(model: nn.Module, device: str = "cpu") -> tuple[Any, Any, State]:
    """Build the training step, the evaluation and the initial state."""
    apply, params, buffers = fcg.from_module(adapt(model).to(device))
    rates = {"adapters": fcg.optim.adam(1e-2), "head": fcg.optim.adam(2e-3)}
    optimizer = fcg.optim.partition(rates, fcg.optim.by_name({"classifier.*": "head"}, default="adapters"))
    state = State.create(params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(1))

    def logits_of(params: Any, buffers: Any, batch: Batch, **options: Any) -> Any:
        return apply(params, buffers, batch["input_ids"], batch["attention_mask"], **options)[0].logits

    @fcg.graph_step
    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        def loss_fn(params: Any) -> Tensor:
            key = fcg.random.fold_in(state.key, state.step)
            return F.cross_entropy(logits_of(params, state.buffers, batch, key=key), batch["labels"])

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    @fcg.graph_fn
    def accuracy(state: State, batch: Batch) -> Any:
        logits = logits_of(state.params, state.buffers, batch, train=False)
        return (logits.argmax(-1) == batch["labels"]).float().mean()

    return train_step, accuracy, state


def sentences(count: int, seed: int) -> Batch:
    """Draw token sequences, i64[count, 12]; the label says whether the second token is above nine."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 20, (count, 12), generator=generator)
    labels = (tokens[:, 1] > 9).long()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def train(model: nn.Module, steps: int, device: str = "cpu") -> tuple[float, float]:
    """Fine-tune, and return the held-out accuracy before and after."""
    train_step, accuracy, state = build(model, device)
    trained = sum(leaf.numel() for leaf in fcg.tree.leaves(state.params))
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    held_out = sentences(500, seed=2**20)
    before = float(accuracy(state, held_out))
    for step in range(steps):
        state, _ = train_step(state, sentences(64, seed=step))
    return before, float(accuracy(state, held_out))


def main() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this program needs `pip install transformers`")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("accuracy {:.0%} at first, {:.0%} in the end".format(*train(pretrained(), 300, device)))


if __name__ == "__main__":
    main()
