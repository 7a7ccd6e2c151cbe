"""What a public module answers: its names for completion, and the name here for one of another library.

Python asks a module's ``__dir__`` for its names, which :func:`listed` returns, and its ``__getattr__`` for what is not
there, which :func:`missing` returns. Both belong to this module, so that ``help()`` of the other does not list them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from types import MappingProxyType, ModuleType
from typing import NoReturn

__all__ = ["answer_calls", "listed", "missing"]

_PACKAGE = "functional_cg"
_ROOMS = ("", ".optim", ".random", ".tree", ".sharding", ".nn", ".precision", ".errors")
# What is imported when it is first used, since it needs another library or only tests need it.
_ON_DEMAND = (
    "functional_cg.report",
    "functional_cg.testing",
    "functional_cg.testing.stateful",
    "functional_cg.testing.strategies",
    "functional_cg.trainers",
)


def _table(text: str) -> MappingProxyType[str, str]:
    rows = (line.strip().split(" | ", 1) for line in text.strip().splitlines())
    return MappingProxyType({name: here for names, here in rows for name in names.split()})


# What torch, optax, jax and flax call it -> what to write here.
_HERE = _table("""
    Adam | `fcg.optim.adam(1e-3)`
    AdamW | `fcg.optim.adamw(1e-3, weight_decay=0.01)`
    SGD | `fcg.optim.sgd(0.1)`
    RMSprop | `fcg.optim.rmsprop(1e-3)`
    LBFGS ASGD Rprop SparseAdam | `fcg.optim.from_torch(torch.optim.NAME, ...)`, if it is a pure function at heart
    CosineAnnealingLR cosine_decay cosine_annealing cosine_schedule cosine_decay_schedule | `fcg.optim.cosine(1e-3, decay_steps=1000)`, in place of the learning rate
    CosineAnnealingWarmRestarts sgdr sgdr_schedule | `fcg.optim.cosine_restarts(1e-3, decay_steps=1000, cycles=4)`, in place of the learning rate
    OneCycleLR cosine_onecycle_schedule | `fcg.optim.one_cycle(1e-3, transition_steps=1000)`, in place of the learning rate
    warmup warmup_cosine_decay_schedule get_cosine_schedule_with_warmup | `fcg.optim.warmup_cosine(1e-3, warmup_steps=100, decay_steps=1000)`, in place of the learning rate
    LinearLR linear_schedule | `fcg.optim.linear(1e-3, 0.0, transition_steps=1000)`, in place of the learning rate
    polynomial_schedule PolynomialLR | `fcg.optim.polynomial(1e-3, 0.0, power=2.0, transition_steps=1000)`, in place of the learning rate
    SequentialLR ChainedScheduler warmup_linear get_linear_schedule_with_warmup | `fcg.optim.join_schedules([fcg.optim.linear(0.0, 1e-3, 100), fcg.optim.linear(1e-3, 0.0, 900)], [100])`, in place of the learning rate
    warmup_constant_schedule get_constant_schedule_with_warmup | `fcg.optim.linear(0.0, 1e-3, transition_steps=100)`, in place of the learning rate
    ExponentialLR exponential_decay | `fcg.optim.exponential(1e-3, transition_steps=100, decay_rate=0.9)`, in place of the learning rate
    warmup_exponential_decay_schedule | `fcg.optim.warmup_exponential(1e-3, warmup_steps=100, transition_steps=100, decay_rate=0.9)`, in place of the learning rate
    StepLR MultiStepLR piecewise_constant_schedule | `fcg.optim.piecewise_constant(1e-3, {1000: 0.1})`, in place of the learning rate
    ConstantLR constant_schedule | `fcg.optim.constant(1e-3)`, or the number itself
    LambdaLR lr_scheduler scheduler | a schedule, such as `fcg.optim.linear(1e-3, 0.0, 1000)`, or a function of the count, `fcg.optim.sgd(lambda count: 0.1 / (1 + count))`; to change the rate from the loop, `fcg.optim.set_hyperparams`
    ReduceLROnPlateau reduce_on_plateau | `plateau=fcg.optim.ReduceOnPlateau.create(patience=10)`, a field of the state, and `state.plateau.adjusted(loss)` in the step
    get_last_lr current_lr lr | `fcg.optim.learning_rate(state)`
    ema EMA ExponentialMovingAverage params_ema update_ema incremental_update AveragedModel swa | `fcg.optim.ema(optimizer, 0.999)`, whose average is `state.opt_state.ema`
    clip_grad_norm_ clip_grad_norm | `fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), optimizer)`
    clip_grad_value_ clip | `fcg.optim.chain(fcg.optim.clip_by_value(1.0), optimizer)`
    multi_transform | `fcg.optim.partition({"decay": ..., "rest": ...}, labels)`
    additive_weight_decay | `fcg.optim.add_decayed_weights(0.01)`
    MultiSteps accumulate accumulate_gradients gradient_accumulation | `fcg.microbatches(4)(fcg.value_and_grad(loss_fn))` in a step; over several calls, `fcg.TrainState.create(..., accumulate=True)` and `state.grads`
    apply_if_finite skip_not_finite | `finite = fcg.optim.global_norm(grads).isfinite()`, and `fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)`
    state create_train_state | `state = fcg.TrainState.create(params=params, optimizer=optimizer)`; of any pytree, `state = fcg.place(tree)`
    Optimizer | `fcg.optim.GradientTransformation`, or `fcg.optim.from_torch(cls, ...)`
    PRNGKey seed manual_seed Generator | `fcg.random.key(0)`
    rand rand_like random random_sample | `fcg.random.uniform(key, shape)`
    randn randn_like gaussian | `fcg.random.normal(key, shape)`
    randperm shuffle | `fcg.random.permutation(key, n)`
    choice multinomial | `fcg.random.categorical(key, logits)`
    gumbel gumbel_softmax | `-torch.log(fcg.random.exponential(key, shape))`
    jit pjit compile make_graphed_callables step train_step call capture | `fcg.graph_step(fn)` for a step, `fcg.graph_fn(fn)` for a read-only function
    grad_and_value | `loss, grads = fcg.value_and_grad(loss_fn)(params)`, value first
    backward | `loss, grads = fcg.value_and_grad(loss_fn)(state.params)`
    vmap jacrev jacfwd hessian | `torch.func.NAME`
    checkpoint | `fcg.checkpoints(folder)` saves a run; `fcg.remat(layer)` recomputes in the backward pass
    while_loop fori_loop for_loop | `fcg.scan(lambda carry, x: (carry, y), init, xs)`, of fixed length
    stop_gradient no_grad | `x.detach()`
    functional_call make_functional functionalize init apply | `apply, params, buffers = fcg.from_module(model)`
    DataParallel DistributedDataParallel DDP FSDP FullyShardedDataParallel fully_shard pmap | `TrainState.create(..., sharding=fcg.sharding.zero(mesh, stage=1))`
    all_reduce psum pmean | `fcg.sharding.sum(x)` or `fcg.sharding.mean(x)`, in the step
    GradScaler | `fcg.LossScale`
    autocast | `torch.autocast(...)` in the loss, or `fcg.precision.Policy()`
    tree_map multimap | `fcg.tree.map(function, tree)`
    tree_leaves | `fcg.tree.leaves(tree)`
    tree_flatten | `fcg.tree.flatten(tree)`
    tree_unflatten | `fcg.tree.unflatten(treedef, leaves)`
    tree_at | `fcg.tree.at(lambda s: s.params["w"], state, value)`
    Module Linear Conv1d Conv2d Dropout LayerNorm BatchNorm1d BatchNorm2d Embedding Sequential Parameter | `torch.nn.NAME`, and `apply, params, buffers = fcg.from_module(model)`
    debug_nans detect_anomaly set_detect_anomaly find_nonfinite | `train_step.find_nonfinite(state, batch)`; to look back from a NaN, `fcg.record(train_step)`
    rewind Recorder recorder flight_recorder | `train = fcg.record(train_step)`, then `train(state, batch)` and `state = train.rewind(state, -1)`
    watch watch_modules grad_norm histogram | `fcg.statistics(train_step)`, and `step.statistics` after any call
    alert warn_if | `fcg.alarm("the loss is above 10", loss > 10)`, in the step
    ensemble stack_module_state | `fcg.sweep(train_step)`, a step of many models at once
    print | `fcg.debug_print("loss {}", loss)`
    examples | `import functional_cg.examples`
    Trainer SFTTrainer module_step | `from functional_cg.trainers import module_step`, for a loop with a torch optimizer; `help(functional_cg.trainers)`
    CheckpointManager Checkpointer checkpointer | `saved = fcg.checkpoints(folder, keep=3)`, then `saved.save(state)`
    save_checkpoint save_file save_safetensors | `fcg.save(path, state)`
    save_pretrained | `fcg.save("folder/model.safetensors", state.params, shard_bytes=5_000_000_000)`
    load_params load_file load_safetensors from_pretrained | `params = fcg.load(path, params)`, from a file or a folder; from a run, `params = fcg.load(path, params, part="params")`
    restore restore_checkpoint load_checkpoint | `state = fcg.load(path, state)`
""")  # noqa: E501


def missing(module: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a public module; it imports what the module has on demand."""

    def get(name: str) -> object:
        if f"{module}.{name}" not in _ON_DEMAND:
            raise _no_such_name(module, name)
        try:
            return importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            raise AttributeError(str(error)) from error

    return get


def listed(module: str) -> Callable[[], list[str]]:
    """Return the ``__dir__`` of a public module: what it exports, and what Python has put there."""

    def names() -> list[str]:
        own = [name for name in vars(sys.modules[module]) if name.startswith("__")]
        parts = [one.rpartition(".") for one in _ON_DEMAND]
        return sorted({*own, *_public(module), *(name for parent, _, name in parts if parent == module)})

    return names


class _Room(ModuleType):
    """A private module whose name people call, as ``fcg.step(fn)``: it answers with what to write."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        name = self.__name__.rpartition(".")[2]
        raise TypeError(f"{self.__name__!r} is a module, not a function{_fix(_PACKAGE, name)}")


def answer_calls() -> None:
    """Let the package's private modules answer a call."""
    for name, room in vars(sys.modules[_PACKAGE]).items():
        if (
            isinstance(room, ModuleType)
            and room.__name__ == f"{_PACKAGE}.{name}"
            and f".{name}" not in _ROOMS
        ):
            room.__class__ = _Room


def _no_such_name(module: str, name: str) -> AttributeError:
    error = AttributeError(f"module {module!r} has no attribute {name!r}")
    if not name.startswith("_"):
        error.args = (f"{error}{_fix(module, name)}",)
    return error


def _fix(module: str, name: str) -> str:
    meant = _HERE.get(name, "").replace("NAME", name) or _found(name) or _close(module, name)
    return f".\nTo fix: {meant}." if meant else ""


def _found(name: str) -> str:
    """Return where another public module has the name, or its lower-case spelling."""
    for room in _ROOMS:
        for spelling in (name, name.lower()):
            if spelling in _public(_PACKAGE + room):
                return f"`{_here(_PACKAGE + room)}.{spelling}`"
    return ""


def _public(module: str) -> list[str]:
    """Return the names that a public module exports."""
    held = vars(sys.modules[module]) if module in sys.modules else {}
    names = [name for name in held if not name.startswith("_") and name != "annotations"]
    return [name for name in names if not isinstance(held[name], ModuleType) or f".{name}" in _ROOMS]


def _close(module: str, name: str) -> str:
    lowered = {one.lower(): one for one in _public(module)}
    close = difflib.get_close_matches(name.lower(), lowered, 1, 0.75)
    return f"`{_here(module)}.{lowered[close[0]]}`" if close else ""


def _here(module: str) -> str:
    return module.replace(_PACKAGE, "fcg", 1)
