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
    MultiSteps accumulate accumulate_gradients gradient_accumulation accumulate_grad_batches grad_accum | `fcg.microbatches(4)(fcg.value_and_grad(loss_fn))` in a step; over several calls, `fcg.TrainState.create(..., accumulate=True)` and `state.grads`
    apply_if_finite skip_not_finite skip_large_updates zero_nans | `finite = fcg.optim.global_norm(grads).isfinite()`, and `fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)`
    state create_train_state | `state = fcg.TrainState.create(params=params, optimizer=optimizer)`; of any pytree, `state = fcg.place(tree)`
    Optimizer | `fcg.optim.GradientTransformation`, or `fcg.optim.from_torch(cls, ...)`
    PRNGKey seed manual_seed Generator | `fcg.random.key(0)`
    rand rand_like random random_sample | `fcg.random.uniform(key, shape)`
    randn randn_like gaussian | `fcg.random.normal(key, shape)`
    randperm shuffle | `fcg.random.permutation(key, n)`
    choice multinomial | `fcg.random.categorical(key, logits)`
    gumbel gumbel_softmax | `-torch.log(fcg.random.exponential(key, shape))`
    jit pjit compile make_graphed_callables train_step call capture CUDAGraph graph cuda_graph cudagraphs replay | `fcg.graph_step(fn)` for a step, `fcg.graph_fn(fn)` for a read-only function
    grad_and_value | `loss, grads = fcg.value_and_grad(loss_fn)(params)`, value first
    backward | `loss, grads = fcg.value_and_grad(loss_fn)(state.params)`
    vmap jvp vjp linearize jacrev jacfwd hessian | `torch.func.NAME`
    checkpoint gradient_checkpointing activation_checkpointing checkpoint_sequential | `fcg.checkpoints(folder)` saves a run; `fcg.remat(layer)` recomputes in the backward pass
    while_loop fori_loop for_loop | `fcg.scan(lambda carry, x: (carry, y), init, xs)`, of fixed length
    stop_gradient no_grad inference_mode set_grad_enabled | `x.detach()`
    functional_call make_functional functionalize init apply | `apply, params, buffers = fcg.from_module(model)`
    DataParallel DistributedDataParallel DDP ddp FSDP fsdp FullyShardedDataParallel fully_shard pmap shard_map NamedSharding PartitionSpec DTensor ZeroRedundancyOptimizer | `TrainState.create(..., sharding=fcg.sharding.zero(mesh, stage=1))`
    all_reduce psum pmean | `fcg.sharding.sum(x)` or `fcg.sharding.mean(x)`, in the step
    GradScaler | `fcg.LossScale`
    autocast amp mixed_precision bfloat16 bf16 float16 fp16 half | `torch.autocast(...)` in the loss, or `fcg.precision.Policy()`
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
    step update zero_grad | `fcg.graph_step(train_step)`, and in the step `state = state.apply_gradients(grads)`, which adds to no `.grad`
    Trainer SFTTrainer TrainingArguments Accelerator LightningModule fit training_step configure_optimizers | a loop of your own, `for batch in loader: state, metrics = train_step(state, batch)`, of `train_step = fcg.graph_step(fn)`
    Callback callback EarlyStopping Logger log wandb tensorboard metrics Metric | return the number in `metrics` and read it in the loop, `metrics["loss"].item()`; from the middle of a model, `fcg.tap("name", x)`
    pure_callback io_callback host_callback callbacks | `fcg.tap("name", x)`, read outside of the step; to print, `fcg.debug_print("x {}", x)`
    eval train | `apply(params, buffers, x, train=False)`, of `apply, params, buffers = fcg.from_module(model)`
    device to cuda cpu device_put | `fcg.place(tree, device="cuda")`; a step copies its inputs to the device of its state
    device_get numpy | `fcg.state_dict(state)`, on the host; `fcg.snapshot(state)`, where it is
    clone copy deepcopy | `fcg.fork(state)`; `fcg.snapshot(state)` for ordinary tensors
    block_until_ready synchronize | `torch.cuda.synchronize()`; reading a metric waits for it, too
    lower make_jaxpr export aot eval_shape | `print(train_step.lower(state, batch).as_text())`
    disable_jit debug breakpoint | `train_step.eager(state, batch)`
    profiler profile summary | `print(train_step.profile(state, batch))`; what was captured, `print(train_step.explain())`
    custom_vjp custom_jvp custom_gradient | `torch.autograd.Function`
    switch | `fcg.cond(pred, true_fn, false_fn)`, one in the other
    lax | `fcg.cond` and `fcg.scan`
    tree_util tree_utils pytree jax_tree | `fcg.tree`
    tree_structure structure treedef | `leaves, treedef = fcg.tree.flatten(tree)`
    tree_map_with_path map_with_path | `fcg.tree.flatten_with_path(tree)`
    tree_reduce reduce count_params num_params | `sum(x.numel() for x in fcg.tree.leaves(tree))`
    zeros_like tree_zeros_like ones_like | `fcg.tree.map(torch.NAME, tree)`
    ravel_pytree ravel parameters_to_vector | `torch.cat([x.flatten() for x in fcg.tree.leaves(tree)])`; for the optimizer, `fcg.optim.flatten(optimizer)`
    soft_update target_update polyak polyak_update | `fcg.tree.map(lambda old, new: old.lerp(new, 0.005), target, params)`
    set_lr set_learning_rate | `state = fcg.optim.set_hyperparams(state, learning_rate=1e-4)`, of `fcg.optim.inject_hyperparams(fcg.optim.sgd)(learning_rate=0.1)`
    cudagraph_mark_step_begin mark_step_begin | leave it out: what a step returns stays as it is
    cross_entropy mse_loss softmax log_softmax huber_loss relu gelu binary_cross_entropy_with_logits | `torch.nn.functional.NAME`
    softmax_cross_entropy softmax_cross_entropy_with_integer_labels | `torch.nn.functional.cross_entropy(logits, targets)`
    functional losses | `torch.nn.functional`
    Dense | `torch.nn.Linear`, and `apply, params, buffers = fcg.from_module(model)`
    Rngs next_key default_rng get_rng_state | `key, own = fcg.random.split(key)`, of `key = fcg.random.key(0)`
    DataLoader dataloader | `for batch in fcg.prefetch(loader, train_step):`, of a `torch.utils.data.DataLoader`
    DeviceMesh init_device_mesh | `fcg.sharding.mesh({"dp": -1})`
    init_process_group barrier get_rank get_world_size rank world_size | `torch.distributed`, as without this library
    examples | `import functional_cg.examples`
    CheckpointManager Checkpointer checkpointer ModelCheckpoint | `saved = fcg.checkpoints(folder, keep=3)`, then `saved.save(state)`
    save_checkpoint save_file save_safetensors save_state | `fcg.save(path, state)`
    save_pretrained | `fcg.save("folder/model.safetensors", state.params, shard_bytes=5_000_000_000)`
    load_params load_file load_safetensors from_pretrained | `params = fcg.load(path, params)`, from a file or a folder; from a run, `params = fcg.load(path, params, part="params")`
    restore restore_checkpoint load_checkpoint load_from_checkpoint load_state resume | `state = fcg.load(path, state)`
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
