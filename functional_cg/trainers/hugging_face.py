"""``CapturedTrainer``: Hugging Face's ``Trainer``, and what inherits from it, with a captured step."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import Trainer, TrainerCallback

from functional_cg.trainers.module_step import ModuleStep, module_step, refused

__all__ = ["CapturedTrainer"]

# Events at which a callback could read or change gradients.
_OF_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step")


class CapturedTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` whose forward, backward, clip and optimizer are one captured step.

    Everything else is the library's: data, schedule, logs, evaluation, checkpoints and how it resumes. An update runs
    where the first of its micro-batches would.

    Attributes:
      step_options: Options of :func:`functional_cg.graph_step`, such as ``{"max_captures": 2}``; set them before
        ``train()``.
      captured: The :class:`ModuleStep`, after the first update; None before.
    Raises:
      CaptureError: From ``train()``, for a feature that cannot be captured, by name; nothing was trained.
    """

    step_options: dict[str, Any]
    captured: ModuleStep | None = None
    _losses: list[Tensor]
    _batches: list[Any]
    _norm: Tensor | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train`` does, after refusing what cannot be captured."""
        self._refuse()
        self.captured = None  # the library makes a new optimizer
        return super().train(*args, **kwargs)

    def captured_loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of a micro-batch, scaled for accumulation; it is traced, so override it for what is not."""
        inputs, count = batch
        loss = self.compute_loss(model, dict(inputs), num_items_in_batch=count)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (
                self.model_accepts_loss_kwargs and count is not None
            ) or self.compute_loss_func is not None
        return cast("Tensor", loss if scaled else loss / self.current_gradient_accumulation_steps)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Remember the micro-batches of the next update."""
        self._batches, count = super().get_batch_samples(*args, **kwargs)
        self._losses = []
        return self._batches, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a micro-batch; the first one of an update makes it."""
        if not self._losses:
            if self.captured is None:
                model.train()
                self.captured = module_step(
                    model,
                    self.optimizer,
                    self.captured_loss,
                    max_norm=self.args.max_grad_norm or None,
                    reduce="sum",
                    seed=self.args.seed,
                    **getattr(self, "step_options", {}),
                )
            model.train()
            batches = [(self._prepare_inputs(one), num_items_in_batch) for one in self._batches]
            metrics = self.captured(*batches)
            self._losses, self._norm = [*metrics["losses"]], metrics["norm"]
        return self._losses.pop(0)

    def _clip_grad_norm(self, model: Any) -> Tensor | None:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._norm

    def _refuse(self) -> None:
        args = self.args
        grouped = getattr(args, "train_sampling_strategy", "") == "group_by_length" or getattr(
            args, "group_by_length", False
        )
        features = (
            ("fp16", args.fp16, "`bf16=True`."),
            ("DeepSpeed", self.is_deepspeed_enabled, "shard the state, `fcg.sharding.zero`, in a step of your own."),
            ("FSDP", self.is_fsdp_enabled, "shard the state, `fcg.sharding.zero`, in a step of your own."),
            ("training on several devices", args.n_gpu > 1 or args.world_size > 1, "train on one device."),
            ("`torch_compile`", args.torch_compile, "leave it out: the step is compiled as a whole."),
            ("`group_by_length`, with ever new shapes", grouped, "pad to one length, and sample at random."),
            ("this version of transformers", not hasattr(Trainer, "_clip_grad_norm"), "install transformers 5."),
        )  # fmt: skip
        for what, is_used, fix in features:
            if is_used:
                raise refused(what, fix)
        for callback in self.callback_handler.callbacks:
            for event in _OF_GRADIENTS:
                if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                    raise refused(
                        f"`{type(callback).__name__}.{event}`, which sees gradients,",
                        "remove the callback; the norm of the gradients is in the logs, as `grad_norm`.",
                    )
