"""What people type, from other libraries or by guess: the answer names what to write here, and it is there."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest

import functional_cg as fcg

TYPED = {
    "optim.ema": "callable", "ema": "fcg.optim.ema(", "EMA": "fcg.optim.ema(", "AveragedModel": "state.opt_state.ema",
    "optim.incremental_update": "fcg.optim.ema(", "optim.swa": "fcg.optim.ema(",
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
    "Trainer": "fcg.graph_step(fn)", "LightningModule": "fcg.graph_step(fn)",
    "EarlyStopping": "metrics", "ModelCheckpoint": "fcg.checkpoints(",
    "load_from_checkpoint": "fcg.load(", "zero_grad": "state.apply_gradients(", "optim.step": "state.apply_gradients(",
    "optim.update": "state.apply_gradients(", "eval": "train=False", "train": "train=False", "cuda": "fcg.place(",
    "device_put": "fcg.place(", "device_get": "fcg.state_dict(", "block_until_ready": "torch.cuda.synchronize()",
    "make_jaxpr": ".lower(state, batch)", "lower": ".lower(state, batch)", "disable_jit": ".eager(state, batch)",
    "profiler": ".profile(state, batch)", "custom_vjp": "torch.autograd.Function", "vjp": "torch.func.vjp",
    "switch": "fcg.cond(", "lax": "fcg.scan", "tree_util": "fcg.tree", "tree.tree_structure": "fcg.tree.flatten(",
    "tree.map_with_path": "fcg.tree.flatten_with_path(", "num_params": "fcg.tree.leaves(",
    "tree.zeros_like": "fcg.tree.map(torch.zeros_like", "ravel_pytree": "fcg.optim.flatten(",
    "soft_update": "fcg.tree.map(", "optim.set_lr": "fcg.optim.set_hyperparams(", "CUDAGraph": "fcg.graph_step(",
    "cudagraph_mark_step_begin": "leave it out", "cross_entropy": "torch.nn.functional.cross_entropy",
    "optim.softmax_cross_entropy": "torch.nn.functional.cross_entropy(", "nn.Dense": "torch.nn.Linear",
    "random.default_rng": "fcg.random.split(", "DataLoader": "fcg.prefetch(", "bfloat16": "fcg.precision.Policy(",
    "fsdp": "fcg.sharding.zero(", "sharding.NamedSharding": "fcg.sharding.zero(", "deepcopy": "fcg.fork(state)",
    "sharding.init_device_mesh": "fcg.sharding.mesh(", "sharding.barrier": "torch.distributed",
    "pure_callback": "fcg.tap(", "gradient_checkpointing": "fcg.remat(", "create_train_state": "fcg.TrainState.create(",
    "accumulate_grad_batches": "fcg.microbatches(4)",
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


CALLED = {
    "checkpoint": "fcg.checkpoints(folder)", "step": "fcg.graph_step(", "call": "fcg.graph_step(",
    "state": "fcg.TrainState.create(",
}  # fmt: skip


@pytest.mark.parametrize(("name", "answer"), CALLED.items())
def test_a_private_module_answers_a_call_and_stays_a_module(name: str, answer: str) -> None:
    with pytest.raises(TypeError, match="is a module, not a function") as caught:
        getattr(fcg, name)("run")
    assert answer in str(caught.value).partition("To fix: ")[2]
    assert importlib.import_module(f"functional_cg.{name}") is getattr(fcg, name)


def test_there_are_many_and_a_name_of_nothing_has_no_answer() -> None:
    assert len(TYPED) >= 90
    with pytest.raises(AttributeError) as caught:
        fcg.quux  # type: ignore[attr-defined]  # noqa: B018
    assert "To fix" not in str(caught.value)
