"""A captured step inside of a trainer: ``python -m functional_cg.examples.programs.trainer``.

A trainer calls ``training_step`` for each batch; a subclass lets a captured step do the forward, the backward and the
update there. Shown for a trainer of a few lines and, where installed, for Hugging Face's ``Trainer`` and a loop
of Lightning Fabric. The trainer's own optimizer is left without gradients, so it does nothing.
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import functional_cg as fcg

EPOCHS = 4
Batch = dict[str, Tensor]


class Model(nn.Sequential):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.mse_loss(super().forward(x).squeeze(-1), labels)}


class Captured:  # trains a module that returns its loss
    def __init__(self, module: nn.Module) -> None:
        self.module, (self.apply, params, buffers) = module, fcg.from_module(module)
        adam, key = fcg.optim.adam(1e-2), fcg.random.key(0)
        self.state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=adam, key=key)
        apply = self.apply

        def step(state: Any, batch: Any) -> tuple[Any, dict[str, Tensor]]:
            def loss_fn(params: Any) -> tuple[Tensor, Any]:
                out, buffers = apply(params, state.buffers, key=key, **batch)
                return out["loss"], buffers

            key = fcg.random.fold_in(state.key, state.step)
            (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

        self.step = fcg.graph_step(step, max_captures=2)  # the second is for the short last batch

    def __call__(self, batch: Batch) -> Tensor:
        self.state, metrics = self.step(self.state, batch)
        return metrics["loss"]

    def write_back(self) -> None:
        self.module.load_state_dict(self.apply.state_dict(self.state.params, self.state.buffers))


class Trainer:
    def training_step(self, model: nn.Module, inputs: Batch) -> Tensor:
        loss: Tensor = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()

    def train(self, model: nn.Module, loader: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for inputs in (inputs for _ in range(EPOCHS) for inputs in loader):
            self.training_step(model, inputs)
            optimizer.step()
            optimizer.zero_grad()


def own(model: nn.Module, rows: Any) -> None:
    captured = Captured(model)

    class CapturedTrainer(Trainer):
        def training_step(self, model: nn.Module, inputs: Batch) -> Tensor:
            return captured(inputs)

    CapturedTrainer().train(model, DataLoader(rows, 32))
    captured.write_back()


def hugging_face(model: nn.Module, rows: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class CapturedTrainer(Trainer):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
            if self.state.global_step == 0:  # the trainer has moved and marked the model by now
                self.captured = Captured(model)
            return self.captured(inputs)

    options = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 32, "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = CapturedTrainer(model, TrainingArguments(folder, **options), train_dataset=rows)
        trainer.train()
    trainer.captured.write_back()


def fabric(model: nn.Module, rows: Any) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(devices=1)
    captured, loader = Captured(model.to(fabric.device)), fabric.setup_dataloaders(DataLoader(rows, 32))
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        captured(batch)  # in place of the forward, fabric.backward(loss) and optimizer.step()
    captured.write_back()


def main() -> None:
    x = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0))
    for train, package in ((own, "torch"), (hugging_face, "accelerate"), (fabric, "lightning_fabric")):
        if importlib.util.find_spec(package):
            model = Model(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
            train(model, [{"x": row, "labels": row.prod()} for row in x])
            print(f"{train.__name__}: loss {model.cpu().eval()(x, x.prod(dim=1))['loss']:.4f} in the end")
        else:
            print(f"{train.__name__}: needs `pip install {package}`")


if __name__ == "__main__":
    main()
