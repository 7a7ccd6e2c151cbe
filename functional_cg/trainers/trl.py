"""``CapturedSFTTrainer``: TRL's ``SFTTrainer`` with a captured step."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from functional_cg.trainers.hugging_face import CapturedTrainer
from functional_cg.trainers.module_step import refused

__all__ = ["CapturedSFTTrainer"]


class CapturedSFTTrainer(CapturedTrainer, SFTTrainer):  # type: ignore[misc]
    """An ``SFTTrainer`` whose forward, backward, clip and optimizer are one captured step.

    TRL computes its loss from a forward that it replaces on the model, and reads metrics on the host in the middle of
    it. This class uses the model's own forward and its loss, which is the same sum over tokens; the logs therefore have
    no ``entropy``, ``mean_token_accuracy`` and ``num_tokens``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.__dict__.pop("forward", None)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the model, as ``Trainer.compute_loss`` does."""
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kwargs)

    def _refuse(self) -> None:
        super()._refuse()
        if self.aux_loss_enabled or self.args.loss_type != "nll":
            raise refused(
                f"TRL's `loss_type={self.args.loss_type!r}` or auxiliary loss", '`loss_type="nll"`.'
            )
        if self.args.activation_offloading:
            raise refused("TRL's `activation_offloading`", "leave it out.")
