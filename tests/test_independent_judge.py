"""An independent reference: an ordinary module, ``torch.optim.AdamW``, ``clip_grad_norm_`` and a LambdaLR.

Judge and package share no code and differ in order of sums: attention spelled out against the fused op,
``norm + 1e-6`` against ``norm`` in the clip, a learning rate in Python against one on the device. Measured after 30
steps of AdamW: 1e-7 of the loss, 7e-7 of a leaf's norm. The bounds, 1e-4 for both, leave room for the order of sums on
other processors: AdamW divides by the root of the second moment, so where a gradient is nearly zero its rounding
becomes a part of the update.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from functional_cg.examples.transformer import GPT
from tests import judge_gpt
from tests.gpt_runs import train_both

MODEL = GPT(layers=2, width=64, heads=4, block_size=32, dropout=0.0)
STEPS = 30


def test_judge_imports_nothing_of_the_package() -> None:
    nodes = list(ast.walk(ast.parse(Path(judge_gpt.__file__).read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} == {"__future__", "collections", "math", "torch"}


def test_training_agrees_with_an_ordinary_module() -> None:
    (losses, weights), (judged_losses, judged_weights) = train_both(
        MODEL, batch_size=8, steps=STEPS, device=torch.device("cpu")
    )
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1
    torch.testing.assert_close(losses, judged_losses, rtol=1e-4, atol=0.0)
    assert weights.keys() == judged_weights.keys()
    for name, judged in judged_weights.items():
        distance = (weights[name] - judged).norm() / judged.norm()
        assert distance < 1e-4, f"{name}: relative distance {distance:.1e}"
