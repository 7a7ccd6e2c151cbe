"""Optimizers as pure functions: optax's gradient transformations for PyTorch tensors.

A transformation turns gradients into updates (``init``, ``update``), composes with :class:`chain`, and is an
immutable value. ``sgd``, ``adam``, ``adamw`` and ``adagrad`` also have a ``step`` that runs one fused op. Schedules
read the step count on the device.

Optimizers:

  sgd                     gradient descent, with momentum if you like
  adam, adamw             Adam; with decoupled weight decay
  adagrad, adadelta       steps scaled by all past gradients; by the running RMS of gradients and steps
  rmsprop                 steps scaled by the running RMS of gradients
  amsgrad, adamax, nadam  Adam with the largest second moment; with a decayed maximum; with Nesterov momentum
  radam, adabelief        Adam, rectified; scaled by how far gradients stray from their mean
  yogi, lamb, lars        Adam with a bounded second moment; AdamW and momentum scaled leaf by leaf
  novograd, lion          gradients divided by a norm per leaf; the sign of a running mean
  adafactor, muon         second moments in rows and columns; orthogonal updates of matrices
  from_torch              a class of ``torch.optim``, ``torch_optimizer`` or your own as a transformation

Around an optimizer:

  chain                   apply transformations one after another
  partition, masked       one transformation per label of a leaf; one where a mask is True
  by_name                 labels or flags from patterns of names
  flatten                 run on all leaves as one vector
  ema                     keep an average of the parameters
  lookahead               pull back toward slow weights every few steps
  schedule_free           average the iterates instead of decaying the rate
  sam                     gradients taken where the loss near the parameters is highest
  stochastic_rounding     bfloat16 parameters without masters
  inject_hyperparams      keep numeric hyperparameters in the state
  set_hyperparams         change them
  torch_state             the optimizer's state as a dict for torch; :func:`load_torch_state` is the way back
  load_torch_state        go on where an optimizer of torch stopped

Gradients and updates:

  clip_by_global_norm     scale all leaves to a norm of at most ``max_norm``
  clip_by_norm            scale each leaf; :func:`clip_by_rms`, by its root mean square
  clip_by_value           clip every element
  adaptive_clip           clip each unit to a fraction of its parameter's norm
  centralize              subtract the mean of each row
  add_noise               Gaussian noise that decays
  add_decayed_weights     weight decay
  freeze, set_to_zero     no updates where a mask is True; no updates at all
  global_norm, norms      norm over all leaves; norm of each leaf, as metrics
  apply_updates           parameters plus updates

Links to build optimizers from:

  scale, identity, trace  multiply by a constant; change nothing; momentum
  scale_by_learning_rate  a direction becomes an update
  scale_by_schedule       multiply by a schedule
  scale_by_trust_ratio    scale each leaf by the norm of its parameter
  scale_by_param_rms      scale each leaf by the root mean square of its parameter
  clip_by_rms             clip each leaf to a root mean square
  scale_by_adam, scale_by_adamax, scale_by_amsgrad, scale_by_belief, scale_by_nadam, scale_by_radam, scale_by_yogi,
  scale_by_adadelta, scale_by_rms, scale_by_rss, scale_by_lion, scale_by_lars, scale_by_novograd, scale_by_muon,
  scale_by_factored_rms   what the optimizer of that name does before the learning rate

Schedules, passed as a learning rate:

  constant, linear, polynomial   one value; a straight line; a power of one
  cosine, warmup_cosine   half a period of a cosine; with a linear warmup before it
  exponential, warmup_exponential   decay by a rate every so many steps; with a warmup before it
  one_cycle, cosine_restarts   up and down by a cosine; warmup_cosine again and again (SGDR)
  piecewise_constant      a factor at each boundary
  join_schedules          one schedule after another
  ReduceOnPlateau         a factor in the state that falls when a loss does not
  learning_rate           the rate of the next update, as a metric

Types:

  GradientTransformation  ``init(params)`` and ``update(grads, state, params)``
  Schedule                a function of the update count; override `value` for your own
  EmaState, EmptyState, AdaptedState, AddNoiseState, InjectHyperparamsState, LookaheadState, MaskedState,
  PartitionState, ScaleByAdadeltaState, ScaleByAdamState, ScaleByAmsgradState, ScaleByFactoredRmsState,
  ScaleByLionState, ScaleByNadamState, ScaleByNovogradState, ScaleByRmsState, ScaleByRssState, ScaleByScheduleState,
  ScheduleFreeState, StochasticRoundingState, TraceState   what each keeps between updates
"""

import typing as _typing

from functional_cg.names import listed as _listed
from functional_cg.names import missing as _missing
from functional_cg.optim.adapters.adapted import AdaptedState as AdaptedState
from functional_cg.optim.adapters.proof import from_torch as from_torch
from functional_cg.optim.adapters.torch_state import load_torch_state as load_torch_state
from functional_cg.optim.adapters.torch_state import torch_state as torch_state
from functional_cg.optim.algebra.base import EmptyState as EmptyState
from functional_cg.optim.algebra.base import GradientTransformation as GradientTransformation
from functional_cg.optim.algebra.base import apply_updates as apply_updates
from functional_cg.optim.algebra.combine import MaskedState as MaskedState
from functional_cg.optim.algebra.combine import PartitionState as PartitionState
from functional_cg.optim.algebra.combine import chain as chain
from functional_cg.optim.algebra.combine import flatten as flatten
from functional_cg.optim.algebra.combine import masked as masked
from functional_cg.optim.algebra.combine import partition as partition
from functional_cg.optim.algebra.hyperparams import InjectHyperparamsState as InjectHyperparamsState
from functional_cg.optim.algebra.hyperparams import inject_hyperparams as inject_hyperparams
from functional_cg.optim.algebra.hyperparams import learning_rate as learning_rate
from functional_cg.optim.algebra.hyperparams import set_hyperparams as set_hyperparams
from functional_cg.optim.algebra.links import ScaleByScheduleState as ScaleByScheduleState
from functional_cg.optim.algebra.links import TraceState as TraceState
from functional_cg.optim.algebra.links import add_decayed_weights as add_decayed_weights
from functional_cg.optim.algebra.links import identity as identity
from functional_cg.optim.algebra.links import scale as scale
from functional_cg.optim.algebra.links import scale_by_learning_rate as scale_by_learning_rate
from functional_cg.optim.algebra.links import scale_by_schedule as scale_by_schedule
from functional_cg.optim.algebra.links import scale_by_trust_ratio as scale_by_trust_ratio
from functional_cg.optim.algebra.links import set_to_zero as set_to_zero
from functional_cg.optim.algebra.links import trace as trace
from functional_cg.optim.algebra.names import by_name as by_name
from functional_cg.optim.algebra.names import norms as norms
from functional_cg.optim.algebra.plateau import ReduceOnPlateau as ReduceOnPlateau
from functional_cg.optim.algebra.schedules import Schedule as Schedule
from functional_cg.optim.algebra.schedules import constant as constant
from functional_cg.optim.algebra.schedules import cosine as cosine
from functional_cg.optim.algebra.schedules import cosine_restarts as cosine_restarts
from functional_cg.optim.algebra.schedules import exponential as exponential
from functional_cg.optim.algebra.schedules import join_schedules as join_schedules
from functional_cg.optim.algebra.schedules import linear as linear
from functional_cg.optim.algebra.schedules import one_cycle as one_cycle
from functional_cg.optim.algebra.schedules import piecewise_constant as piecewise_constant
from functional_cg.optim.algebra.schedules import polynomial as polynomial
from functional_cg.optim.algebra.schedules import warmup_cosine as warmup_cosine
from functional_cg.optim.algebra.schedules import warmup_exponential as warmup_exponential
from functional_cg.optim.rules.adam import ScaleByAdamState as ScaleByAdamState
from functional_cg.optim.rules.adam import ScaleByAmsgradState as ScaleByAmsgradState
from functional_cg.optim.rules.adam import ScaleByNadamState as ScaleByNadamState
from functional_cg.optim.rules.adam import adabelief as adabelief
from functional_cg.optim.rules.adam import adam as adam
from functional_cg.optim.rules.adam import adamax as adamax
from functional_cg.optim.rules.adam import adamw as adamw
from functional_cg.optim.rules.adam import amsgrad as amsgrad
from functional_cg.optim.rules.adam import lamb as lamb
from functional_cg.optim.rules.adam import nadam as nadam
from functional_cg.optim.rules.adam import radam as radam
from functional_cg.optim.rules.adam import scale_by_adam as scale_by_adam
from functional_cg.optim.rules.adam import scale_by_adamax as scale_by_adamax
from functional_cg.optim.rules.adam import scale_by_amsgrad as scale_by_amsgrad
from functional_cg.optim.rules.adam import scale_by_belief as scale_by_belief
from functional_cg.optim.rules.adam import scale_by_nadam as scale_by_nadam
from functional_cg.optim.rules.adam import scale_by_radam as scale_by_radam
from functional_cg.optim.rules.adam import scale_by_yogi as scale_by_yogi
from functional_cg.optim.rules.adam import yogi as yogi
from functional_cg.optim.rules.drawn import AddNoiseState as AddNoiseState
from functional_cg.optim.rules.drawn import StochasticRoundingState as StochasticRoundingState
from functional_cg.optim.rules.drawn import add_noise as add_noise
from functional_cg.optim.rules.drawn import stochastic_rounding as stochastic_rounding
from functional_cg.optim.rules.elementwise import ScaleByAdadeltaState as ScaleByAdadeltaState
from functional_cg.optim.rules.elementwise import ScaleByLionState as ScaleByLionState
from functional_cg.optim.rules.elementwise import ScaleByRmsState as ScaleByRmsState
from functional_cg.optim.rules.elementwise import ScaleByRssState as ScaleByRssState
from functional_cg.optim.rules.elementwise import adadelta as adadelta
from functional_cg.optim.rules.elementwise import adagrad as adagrad
from functional_cg.optim.rules.elementwise import lion as lion
from functional_cg.optim.rules.elementwise import rmsprop as rmsprop
from functional_cg.optim.rules.elementwise import scale_by_adadelta as scale_by_adadelta
from functional_cg.optim.rules.elementwise import scale_by_lion as scale_by_lion
from functional_cg.optim.rules.elementwise import scale_by_rms as scale_by_rms
from functional_cg.optim.rules.elementwise import scale_by_rss as scale_by_rss
from functional_cg.optim.rules.elementwise import sgd as sgd
from functional_cg.optim.rules.factored import ScaleByFactoredRmsState as ScaleByFactoredRmsState
from functional_cg.optim.rules.factored import adafactor as adafactor
from functional_cg.optim.rules.factored import clip_by_rms as clip_by_rms
from functional_cg.optim.rules.factored import scale_by_factored_rms as scale_by_factored_rms
from functional_cg.optim.rules.factored import scale_by_param_rms as scale_by_param_rms
from functional_cg.optim.rules.gradients import adaptive_clip as adaptive_clip
from functional_cg.optim.rules.gradients import centralize as centralize
from functional_cg.optim.rules.gradients import clip_by_global_norm as clip_by_global_norm
from functional_cg.optim.rules.gradients import clip_by_norm as clip_by_norm
from functional_cg.optim.rules.gradients import clip_by_value as clip_by_value
from functional_cg.optim.rules.gradients import freeze as freeze
from functional_cg.optim.rules.gradients import global_norm as global_norm
from functional_cg.optim.rules.layerwise import ScaleByNovogradState as ScaleByNovogradState
from functional_cg.optim.rules.layerwise import lars as lars
from functional_cg.optim.rules.layerwise import novograd as novograd
from functional_cg.optim.rules.layerwise import scale_by_lars as scale_by_lars
from functional_cg.optim.rules.layerwise import scale_by_novograd as scale_by_novograd
from functional_cg.optim.rules.matrix import muon as muon
from functional_cg.optim.rules.matrix import scale_by_muon as scale_by_muon
from functional_cg.optim.rules.wrappers import EmaState as EmaState
from functional_cg.optim.rules.wrappers import LookaheadState as LookaheadState
from functional_cg.optim.rules.wrappers import ScheduleFreeState as ScheduleFreeState
from functional_cg.optim.rules.wrappers import ema as ema
from functional_cg.optim.rules.wrappers import lookahead as lookahead
from functional_cg.optim.rules.wrappers import sam as sam
from functional_cg.optim.rules.wrappers import schedule_free as schedule_free

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
