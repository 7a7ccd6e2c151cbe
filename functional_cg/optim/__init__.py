"""Optimizers as pure functions: the algebra of optax on PyTorch tensors.

Transformations turn gradients into updates (``init``, ``update``), compose with :class:`chain`, and are frozen
values. ``sgd``, ``adam``, ``adamw`` and ``adagrad`` also have a ``step`` that runs one fused op. Schedules read the
count on the device.
"""

from functional_cg.optim.adapted import AdaptedState, from_torch
from functional_cg.optim.aliases import AdagradState, SgdState, adagrad, adam, adamw, sgd
from functional_cg.optim.base import EmptyState, GradientTransformation, apply_updates
from functional_cg.optim.clipping import clip_by_global_norm, global_norm
from functional_cg.optim.combine import MaskedState, PartitionState, chain, masked, partition
from functional_cg.optim.flat import flatten
from functional_cg.optim.formulas import lamb, yogi
from functional_cg.optim.hyperparams import InjectHyperparamsState, inject_hyperparams, set_hyperparams
from functional_cg.optim.schedules import (
    Schedule,
    constant,
    cosine,
    exponential,
    linear,
    piecewise_constant,
    warmup_cosine,
)
from functional_cg.optim.transforms import (
    ScaleByAdamState,
    ScaleByRssState,
    ScaleByScheduleState,
    TraceState,
    add_decayed_weights,
    identity,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_rss,
    scale_by_schedule,
    scale_by_trust_ratio,
    scale_by_yogi,
    set_to_zero,
    trace,
)

__all__ = [
    "AdagradState",
    "AdaptedState",
    "EmptyState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "MaskedState",
    "PartitionState",
    "ScaleByAdamState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "Schedule",
    "SgdState",
    "TraceState",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "exponential",
    "flatten",
    "from_torch",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "lamb",
    "linear",
    "masked",
    "partition",
    "piecewise_constant",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "scale_by_yogi",
    "set_hyperparams",
    "set_to_zero",
    "sgd",
    "trace",
    "warmup_cosine",
    "yogi",
]
