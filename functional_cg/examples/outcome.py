"""Records the results of a GPT run: its history, a summary and output files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .measure import EagerTwin, Meter
from .ranks import Ranks

__all__ = [
    "History",
    "draw_losses",
    "finite",
    "losses_and_entropy",
    "speed_and_agreement",
    "summary",
    "write_history",
]

# A compiler fuses and reorders sums: after the checked calls a leaf may differ from eager by this much of its norm.
_COMPILED_TOLERANCE = 1e-3


@dataclass
class History:
    """Measurements collected during a run.

    Attributes:
      twin: Repeats the first calls eagerly.
      meter: Times the training calls.
      losses: Loss of each step of this run, f32[] on the device.
      validation: Pairs of step and validation loss.
      state_bytes: Bytes of the state on one rank.
      interrupted: Whether Ctrl-C ended the run.
      ordinary: Losses and steps per second of an ordinary loop.
    """

    twin: EagerTwin
    meter: Meter = field(default_factory=Meter)
    losses: list[Tensor] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    state_bytes: int = 0
    interrupted: bool = False
    ordinary: tuple[list[float], float] | None = None


def losses_and_entropy(history: History, entropy: float) -> dict[str, Any]:
    """Summarize the losses, in nats and in bits, against the unigram entropy."""
    val_loss = history.validation[-1][1]
    return {
        "loss_first": float(history.losses[0]) if history.losses else None,
        "loss_last": float(history.losses[-1]) if history.losses else None,
        "val_loss": val_loss,
        "val_bits_per_byte": val_loss / math.log(2),
        "unigram_entropy": entropy,
        "unigram_bits_per_byte": entropy / math.log(2),
        "interrupted": history.interrupted,
    }


def speed_and_agreement(history: History, ranks: Ranks, tokens: int, *, bitwise: bool) -> dict[str, Any]:
    """Summarize tokens per second, and whether replays match eager: bitwise, or closely if compiled."""
    twin = history.twin
    equal, distances = zip(*ranks.exchange((twin.equal, twin.distance)), strict=True)
    return {
        "tokens_per_s": history.meter.calls_per_s * tokens,
        "eager_tokens_per_s": twin.calls_per_s * tokens,
        "speed_ratio": history.meter.calls_per_s / twin.calls_per_s if twin.calls_per_s else None,
        "checked_calls": twin.calls,
        "replay_equals_eager": all(equal) if bitwise else max(distances) <= _COMPILED_TOLERANCE,
        "replay_eager_distance": max(distances),
    }


def summary(result: dict[str, Any]) -> str:
    """Format the result for people."""
    how = "interrupted after" if result["interrupted"] else "finished"
    equal = "equals" if result["replay_equals_eager"] else "DIFFERS FROM"
    ordinary = result["ordinary_tokens_per_s"]
    beside = f", {ordinary:,.0f} by an ordinary loop with torch.optim" if ordinary else ""
    text = "".join(f"sample {when}: {result[f'sample_{when}']!r}\n" for when in ("before", "after"))
    return (
        f"{text}{how} {result['steps']} steps\n"
        f"validation loss {result['val_loss']:.4f} nats, {result['val_bits_per_byte']:.3f} bits/byte\n"
        f"unigram entropy {result['unigram_entropy']:.4f} nats, {result['unigram_bits_per_byte']:.3f} bits/byte, "
        "of the held-out bytes\n"
        f"tokens/s {result['tokens_per_s']:,.0f} replayed, {result['eager_tokens_per_s']:,.0f} eager{beside}\n"
        f"replay {equal} eager over {result['checked_calls']} calls, "
        f"relative distance {result['replay_eager_distance']:.1e}"
    )


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_history(directory: Path, result: dict[str, Any], history: History) -> None:
    """Write ``history.json``: the result, the loss of each step, and the validation losses."""
    losses = [float(loss) for loss in history.losses]
    content = {"result": result, "losses": losses, "validation": history.validation}
    (directory / "history.json").write_text(json.dumps(finite(content), indent=1) + "\n")


def draw_losses(file: Path, history: History) -> None:
    """Write a plot of the loss curves.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    from functional_cg import report  # imports matplotlib, which only this function needs

    curves: dict[str, Sequence[Any]] = {"captured": history.losses}
    if history.ordinary:
        curves["ordinary loop"] = history.ordinary[0]
    axes = report.loss_curves(curves)
    axes.set(xlabel="step", ylabel="training loss in nats per byte", title="")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(file, dpi=120, bbox_inches="tight")
