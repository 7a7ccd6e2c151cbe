"""A training loop that others own: ``python -m functional_cg.examples.programs.trainer``.

``transformers.Trainer`` and Lightning Fabric keep the loop, the data and the logs, and ask for one thing: a step. Here
``Captured`` is that step: it makes one captured call of a module, an optimizer and a loss, and writes the weights back
into the module on request. A small trainer shows the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg

LossFn = Callable[[Callable[..., Any], Any], Tensor]


class Captured:
    """Forward, backward and update of a module as one captured call.

    ``transformers``::

        class GraphTrainer(transformers.Trainer):
            captured = None

            def training_step(self, model, inputs, num_items_in_batch=None):
                self.captured = self.captured or Captured(model, adamw, lambda model, batch: model(**batch).loss)
                return self.captured(dict(inputs))

        idle = torch.optim.SGD(model.parameters(), lr=0.0)  # finds no gradients
        GraphTrainer(model, ..., optimizers=(idle, None))

    and ``captured.store()`` before an evaluation or a save. With Lightning Fabric, ``loss = captured(batch)`` takes the
    place of ``fabric.backward(loss)`` and ``optimizer.step()``.
    """

    def __init__(
        self, model: nn.Module, optimizer: fcg.optim.GradientTransformation, loss_fn: LossFn
    ) -> None:
        self.model = model
        apply, params, buffers = fcg.from_module(model)
        self.state = fcg.TrainState.create(
            params=params,
            buffers=buffers,
            optimizer=optimizer,
            key=fcg.random.key(0),
        )

        @fcg.graph_step
        def train_step(state: Any, batch: Any) -> Any:
            key = fcg.random.fold_in(state.key, state.step)

            def loss_of(params: Any) -> Any:
                left: Any = state.buffers

                def forward(*args: Any, **kwargs: Any) -> Any:
                    nonlocal left
                    out, left = apply(params, left, *args, key=key, **kwargs)
                    return out

                return loss_fn(forward, batch), left

            (loss, buffers), grads = fcg.value_and_grad(loss_of, has_aux=True)(state.params)
            return state.apply_gradients(grads, buffers=buffers), loss

        self._apply, self._step = apply, train_step

    def __call__(self, batch: Any) -> Tensor:
        """Take a step, and return its loss."""
        loss: Tensor
        self.state, loss = self._step(self.state, batch)
        return loss

    def store(self) -> nn.Module:
        """Write the weights into the module, for an evaluation or a save."""
        self.model.load_state_dict(self._apply.state_dict(self.state.params, self.state.buffers))
        return self.model


class Trainer:
    """A loop with logs and an evaluation, which knows nothing of captures."""

    def __init__(self, training_step: Callable[[Any], Tensor], evaluate: Callable[[], float]) -> None:
        self.training_step, self.evaluate = training_step, evaluate

    def fit(self, loader: Iterable[Any], epochs: int) -> list[float]:
        scores = []
        for epoch in range(epochs):
            losses = [self.training_step(batch) for batch in loader]
            scores.append(self.evaluate())
            print(f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.4f}, evaluation {scores[-1]:.4f}")
        return scores


def train(epochs: int = 5, device: str = "cpu") -> list[float]:
    """Fit a function of two numbers, and return the error after each epoch."""
    layers = [nn.Linear(2, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Dropout(0.05), nn.Linear(64, 1)]
    model = nn.Sequential(*layers).to(device)
    x = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    y = x.prod(dim=1, keepdim=True)
    captured = Captured(
        model, fcg.optim.adam(3e-3), lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
    )

    def evaluate() -> float:
        with torch.no_grad():
            error = captured.store().eval()(x[:256].to(device)).cpu() - y[:256]
        return float(error.square().mean())

    return Trainer(captured, evaluate).fit([*zip(x.split(128), y.split(128), strict=True)], epochs)


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
