"""What people type, from other libraries or by guess: the answer names what to write here, and it is there."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

import functional_cg as fcg

TYPED = {
    "optim.ema": "callable", "ema": "fcg.optim.ema(", "EMA": "fcg.optim.ema(", "AveragedModel": "state.opt_state.ema",
    "optim.incremental_update": "fcg.optim.ema(", "optim.swa": "fcg.optim.ema(",
    "checkpoint": "fcg.checkpoints(folder)",
    "CheckpointManager": "fcg.checkpoints(", "save_checkpoint": "fcg.save(", "restore_checkpoint": "fcg.load(",
    "load_params": 'part="params"', "from_pretrained": "fcg.load(", "save_pretrained": "shard_bytes=",
    "load_file": "fcg.load(", "save_file": "fcg.save(", "cosine_decay": "fcg.optim.cosine(",
    "optim.cosine_decay": "fcg.optim.cosine(", "optim.cosine_decay_schedule": "fcg.optim.cosine(",
    "optim.CosineAnnealingLR": "fcg.optim.cosine(", "optim.CosineAnnealingWarmRestarts": "fcg.optim.cosine_restarts(",
    "optim.sgdr_schedule": "fcg.optim.cosine_restarts(", "optim.OneCycleLR": "fcg.optim.one_cycle(",
    "optim.cosine_onecycle_schedule": "fcg.optim.one_cycle(", "optim.warmup": "fcg.optim.warmup_cosine(",
    "optim.PolynomialLR": "fcg.optim.polynomial(", "optim.polynomial_schedule": "fcg.optim.polynomial(",
    "optim.SequentialLR": "fcg.optim.join_schedules(", "join_schedules": "fcg.optim.join_schedules",
    "optim.get_linear_schedule_with_warmup": "fcg.optim.join_schedules(",
    "optim.warmup_exponential_decay_schedule": "fcg.optim.warmup_exponential(",
    "optim.StepLR": "fcg.optim.piecewise_constant(", "optim.lr_scheduler": "fcg.optim.linear(",
    "optim.ReduceLROnPlateau": "fcg.optim.ReduceOnPlateau.create(", "optim.reduce_on_plateau": "adjusted(loss)",
    "optim.get_last_lr": "fcg.optim.learning_rate(state)", "optim.lr": "fcg.optim.learning_rate(state)",
    "learning_rate": "fcg.optim.learning_rate", "optim.MultiSteps": "fcg.microbatches(4)",
    "gradient_accumulation": "accumulate=True", "optim.apply_if_finite": "fcg.cond(finite,",
    "clip_grad_norm_": "fcg.optim.clip_by_global_norm(", "optim.SGD": "fcg.optim.sgd(", "adamw": "fcg.optim.adamw",
    "jit": "fcg.graph_step(", "GradScaler": "fcg.LossScale", "dropout": "fcg.random.dropout",
    "grad_and_value": "value_and_grad",
    "psum": "fcg.sharding.sum(", "while_loop": "fcg.scan(", "optim.schedulefree": "fcg.optim.schedule_free",
}  # fmt: skip


@pytest.mark.parametrize(("name", "answer"), TYPED.items())
def test_what_people_type_is_there_or_answered(name: str, answer: str) -> None:
    module, _, name = name.rpartition(".")
    room: ModuleType = getattr(fcg, module) if module else fcg
    if answer == "callable":
        assert callable(getattr(room, name))
        return
    with pytest.raises(AttributeError) as caught:
        getattr(room, name)
    fix = str(caught.value).partition("To fix: ")[2]
    assert answer in fix
    for path in re.findall(r"fcg((?:\.\w+)+)", fix):  # each name of the answer is there
        found: Any = fcg
        for part in path.split(".")[1:]:
            found = getattr(found, part)


def test_there_are_many_and_a_name_of_nothing_has_no_answer() -> None:
    assert len(TYPED) >= 40
    with pytest.raises(AttributeError) as caught:
        fcg.quux  # type: ignore[attr-defined]  # noqa: B018
    assert "To fix" not in str(caught.value)
