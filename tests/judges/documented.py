"""Differences that are choices: one table for all judges, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DOCUMENTED", "EXACT", "UNINITIALISED", "Difference", "known_as"]


@dataclass(frozen=True)
class Difference:
    """A difference that is meant; patterns match the whole text.

    Attributes:
      judge: Its name.
      case: A pattern of names of cases.
      why: A pattern of what differs.
      reason: Why that is right, or cannot be otherwise.
      device: A pattern of devices.
      where: A pattern of what was compared.
      outcome: ``"refused"`` if the step has raised before it changed its state.
    """

    judge: str
    case: str
    why: str
    reason: str
    device: str = ".*"
    where: str = ".*"
    outcome: str = "documented"


# Ops whose results are memory that nobody has written: dtype, shape and strides are compared, values are not.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)

MISCOMPILED = "(gradient: )?MiscompileError: .*"
OFF = "off by .*"

DOCUMENTED = (
    Difference(
        "optax",
        "(scale_by_)?amsgrad",
        OFF,
        "optax takes the maximum of bias-corrected moments, torch of raw ones",
    ),
    Difference("optax", "nadam", OFF, "optax has a constant momentum, torch the schedule of the paper"),
    Difference("optax", "radam eps", OFF, "eps is added before the bias correction, as in torch"),
    Difference(
        "optax", "adabelief eps_root", OFF, "there is one eps, in both places, as in the paper's code"
    ),
    Difference(
        "optax",
        "lars",
        OFF,
        "the norm of the decay has a term of its own in the denominator, as in the paper",
    ),
    Difference("optax", "adagrad eps", OFF, "eps is outside of the root, as in torch"),
    Difference("optax", "scale_by_rss", OFF, "eps is outside of the root, as in torch"),
    Difference("optax", "rmsprop eps_in_sqrt", OFF, "eps is outside of the root, as in torch"),
    Difference(
        "optax", "adafactor|scale_by_factored_rms", OFF, "torch's variant: other factors, eps and clipping"
    ),
    Difference("optax", "contrib.muon", OFF, "torch's axes and scale: max(1, rows / columns)"),
    Difference(
        "optax", "adaptive_grad_clip", OFF, "a unit is a row, as in torch's layers; in optax a column"
    ),
    Difference(
        "optax", "centralize", OFF, "the mean is that of a row, as in torch's layers; in optax of a column"
    ),
    Difference(
        "optax",
        "contrib.schedule_free warm-up",
        OFF,
        "optax weighs a step by the rate of the next: off by one",
    ),
    Difference(
        "torch.optim",
        "NAdam",
        r"p\d: values differ by \d\.\de-(09|1\d), .*",
        "torch keeps the product of momenta in float32, also for float64 parameters; here it is float64",
        where=".*(float64|groups|missing gradients|no elements)",
    ),
    Difference(
        "torch.optim",
        "Adam|AdamW|Adamax|NAdam|RAdam",
        r"p\d: values differ by \d\.\de-(0[789]|1\d), .*",
        "with `capturable`, torch corrects biases in float32, also for float64 parameters; here it is float64",
        device="cuda",
        where=".*capturable.*, ours, float64",
    ),
    Difference(
        "torch.optim",
        "ASGD",
        r"p\d: values differ by \d\.\de-(09|1\d), .*",
        "on a GPU torch takes its `foreach` form, which computes rates in float32; here it is the plain form",
        device="cuda",
        where=".*from_torch, (float64|groups|missing gradients|no elements)",
    ),
    Difference(
        "OpInfo",
        "as_strided.partial_views",
        "RuntimeError: setStorage: .*|values differ .*|other values .*",
        "a step gets the values of a view, not what lies around them in the caller's storage",
    ),
    Difference(
        "OpInfo",
        "ormqr|linalg.householder_product",
        "strides .*",
        "under a dispatch mode, as in any trace, torch computes this gradient by a formula with other strides",
        where=".* gradient 0",
    ),
    Difference(
        "OpInfo",
        r"nn\.functional\.max_unpool2d(\.grad)?",
        "strides .*",
        "results have the strides that torch's trace says: in a trace this kernel keeps no channels_last",
        device="cpu",
    ),
    Difference(
        "OpInfo",
        "|".join(sorted(UNINITIALISED)),
        MISCOMPILED,
        "the values are what memory held: two runs differ",
        outcome="refused",
    ),
    Difference(
        "OpInfo",
        r"nn\.functional\.(upsample_nearest|interpolate\.nearest)",
        MISCOMPILED,
        "torch's compiler takes no notice of the scale in this gradient (torch 2.11 and 2.13)",
        where=".*float32.*|.*bfloat16.*",
        outcome="refused",
    ),
    Difference(
        "OpInfo",
        r"nn\.functional\.avg_pool1d",
        MISCOMPILED,
        "torch's compiler divides the last window's gradient by too much with `ceil_mode` (torch 2.11 and 2.13)",
        where="float32.*",
        outcome="refused",
    ),
    Difference(
        "OpInfo",
        r"nn\.functional\.normalize",
        r"values differ by \d\.\de-07, .*",
        "the gradient of a number divided by itself is zero, from two terms that cancel up to rounding",
        where="float32.* gradient 0",
    ),
    Difference(
        "OpInfo",
        r"_batch_norm_with_update|nn\.functional\.instance_norm",
        r"values differ by \d\.\de-07, .*",
        "the gradient of a norm with few elements is zero, from terms that cancel up to rounding",
        device="cuda",
        where="float32.* gradient \\d",
    ),
    Difference(
        "OpInfo",
        r"_batch_norm_with_update|nn\.functional\.layer_norm",
        r"values differ by \d\.\de-08, .*",
        "the gradient of a norm with few elements is zero, from terms that cancel up to rounding",
        device="cpu",
        where=r"float32\[5\] gradient 0",
    ),
    Difference(
        "OpInfo",
        r"signal\.windows\.(blackman|nuttall)",
        r"values differ by \d\.\de-08, .*",
        "the ends of a window are zero, from cosines that cancel up to rounding, and it has no inputs to round",
        device="cpu",
        where=r"float32\[4\] result 0",
    ),
    Difference(
        "OpInfo",
        r"signal\.windows\.hann",
        MISCOMPILED,
        "a cosine of exactly 1 counts as exact, and a compiler's may differ from it by a bit",
        device="cpu",
        where=r"float32\[4\].*",
        outcome="refused",
    ),
    Difference(
        "OpInfo",
        r"torch\.ops\.aten\._(flash|efficient)_attention_forward",
        "other values of an exact dtype|RuntimeError: Expected all tensors to be on the same device.*",
        "without dropout nobody writes the seed that it returns, and that of one kernel lies on the host",
        device="cuda",
    ),
    Difference(
        "JAX donation",
        "an error donates nothing",
        "an error of the user: CaptureError.*",
        "an error in a trace arrives as a CaptureError that names its class, line and message",
    ),
)

# Ops that do not round: whatever compiles them, their results have the bits of the eager run.
EXACT = frozenset(
    {
        "abs", "ceil", "clamp", "clamp_max", "clamp_min", "copysign", "floor", "fmax", "fmin", "frexp", "heaviside",
        "max", "maximum", "min", "minimum", "neg", "nextafter", "nn.functional.relu", "sgn", "sign", "trunc", "where",
    }
)  # fmt: skip


def known_as(judge: str, case: str, device: str, where: str, why: str) -> Difference | None:
    """The entry of a difference in the table, or None."""
    for one in DOCUMENTED:
        pairs = ((one.case, case), (one.device, device), (one.where, where), (one.why, why))
        if one.judge == judge and all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in pairs):
            return one
    return None
