"""Record on a GPU what the sixth notebook shows of a compiled step.

    FCG_PROFILE_KERNELS=1 python notebooks/record_profile.py

Profiles GPT-2 124M as transformers has it, 8x1024 tokens in bfloat16, and writes ``06_on_a_gpu.json`` beside the
notebook, which draws it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from helpers.profiles import packed
from record import rounded
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import functional_cg as fcg

COMMAND = "FCG_PROFILE_KERNELS=1 python notebooks/record_profile.py"
RECORD = Path(__file__).resolve().with_name("06_on_a_gpu.json")


def profiled() -> Any:
    """Return the profile of a training step on this machine's GPU."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    apply, params, buffers = fcg.from_module(model.to("cuda"))
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(3e-4, weight_decay=0.1))

    @fcg.graph_step
    def train_step(state: Any, ids: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                out, _ = apply(params, buffers, input_ids=ids, labels=ids)
            loss: Tensor = out.loss
            return loss

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    ids = torch.randint(50_257, (8, 1024), device="cuda")
    state, _ = train_step(state, ids)
    return train_step.profile(state, ids)


if __name__ == "__main__":
    if os.environ.get("FCG_PROFILE_KERNELS") != "1":
        sys.exit(f"To fix: {COMMAND}")
    profile = profiled()
    print(profile, file=sys.stderr)
    record = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        "date": datetime.now(UTC).date().isoformat(),
        "command": COMMAND,
        **packed(profile),
    }
    RECORD.write_text(json.dumps(rounded(record), separators=(",", ":")) + "\n")
