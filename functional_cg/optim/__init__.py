"""Optimizers as pure functions: optax's gradient transformations for PyTorch tensors.

A transformation turns gradients into updates (``init``, ``update``), composes with :class:`chain`, and is an
immutable value. ``sgd``, ``adam``, ``adamw`` and ``adagrad`` also have a ``step`` that runs one fused op. Schedules
read the step count on the device. :func:`from_torch` adapts optimizer classes from other packages.
"""

import typing as _typing

from functional_cg.names import no_such_name as _no_such_name
from functional_cg.optim.adapters.adapted import AdaptedState
from functional_cg.optim.adapters.proof import from_torch
from functional_cg.optim.adapters.torch_state import load_torch_state, torch_state
from functional_cg.optim.algebra.base import EmptyState, GradientTransformation, apply_updates
from functional_cg.optim.algebra.combine import MaskedState, PartitionState, chain, masked, partition
from functional_cg.optim.algebra.flat import flatten
from functional_cg.optim.algebra.hyperparams import (
    InjectHyperparamsState,
    inject_hyperparams,
    set_hyperparams,
)
from functional_cg.optim.algebra.links import (
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
from functional_cg.optim.algebra.names import by_name, norms
from functional_cg.optim.algebra.noise import AddNoiseState, add_noise
from functional_cg.optim.algebra.schedules import (
    Schedule,
    constant,
    cosine,
    exponential,
    linear,
    piecewise_constant,
    warmup_cosine,
)
from functional_cg.optim.rules.adam_family import adabelief, adamax, amsgrad, nadam, radam
from functional_cg.optim.rules.adaptive import (
    ScaleByAmsgradState,
    ScaleByNadamState,
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_belief,
    scale_by_nadam,
    scale_by_radam,
)
from functional_cg.optim.rules.aliases import AdagradState, SgdState, adagrad, adam, adamw, sgd
from functional_cg.optim.rules.clipping import clip_by_global_norm, global_norm
from functional_cg.optim.rules.elementwise import (
    ScaleByAdadeltaState,
    ScaleByLionState,
    ScaleByRmsState,
    adadelta,
    lion,
    rmsprop,
    scale_by_adadelta,
    scale_by_lion,
    scale_by_rms,
)
from functional_cg.optim.rules.factored import (
    ScaleByFactoredRmsState,
    adafactor,
    clip_by_rms,
    scale_by_factored_rms,
    scale_by_param_rms,
)
from functional_cg.optim.rules.gradients import adaptive_clip, centralize, clip_by_norm, clip_by_value, freeze
from functional_cg.optim.rules.lamb_and_yogi import lamb, yogi
from functional_cg.optim.rules.layerwise import (
    ScaleByNovogradState,
    lars,
    novograd,
    scale_by_lars,
    scale_by_novograd,
)
from functional_cg.optim.rules.matrix import muon, scale_by_muon
from functional_cg.optim.rules.rounding import StochasticRoundingState, stochastic_rounding
from functional_cg.optim.rules.wrappers import (
    LookaheadState,
    ScheduleFreeState,
    lookahead,
    sam,
    schedule_free,
)

__all__ = [
    "AdagradState",
    "AdaptedState",
    "AddNoiseState",
    "EmptyState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LookaheadState",
    "MaskedState",
    "PartitionState",
    "ScaleByAdadeltaState",
    "ScaleByAdamState",
    "ScaleByAmsgradState",
    "ScaleByFactoredRmsState",
    "ScaleByLionState",
    "ScaleByNadamState",
    "ScaleByNovogradState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "Schedule",
    "ScheduleFreeState",
    "SgdState",
    "StochasticRoundingState",
    "TraceState",
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adaptive_clip",
    "add_decayed_weights",
    "add_noise",
    "amsgrad",
    "apply_updates",
    "by_name",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_value",
    "constant",
    "cosine",
    "exponential",
    "flatten",
    "freeze",
    "from_torch",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "lamb",
    "lars",
    "linear",
    "lion",
    "load_torch_state",
    "lookahead",
    "masked",
    "muon",
    "nadam",
    "norms",
    "novograd",
    "partition",
    "piecewise_constant",
    "radam",
    "rmsprop",
    "sam",
    "scale",
    "scale_by_adadelta",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_amsgrad",
    "scale_by_belief",
    "scale_by_factored_rms",
    "scale_by_lars",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_nadam",
    "scale_by_novograd",
    "scale_by_param_rms",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "scale_by_yogi",
    "schedule_free",
    "set_hyperparams",
    "set_to_zero",
    "sgd",
    "stochastic_rounding",
    "torch_state",
    "trace",
    "warmup_cosine",
    "yogi",
]


if not _typing.TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name, __all__)
