"""Explain what a step has traced, captured and refused, as text or HTML, without reading from a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..messages.html import Html, card, fold, line, table
from ..messages.units import first
from ..stages.run.results import Stats
from ..state.outline import count
from .lowered import Captured, Lowered

__all__ = ["explain", "explain_html", "warnings_of"]

Plans = Sequence[tuple[Lowered, Sequence[Captured]]]

_SHOWN = 8
_NAMED = 3


def explain(name: str, stats: Stats, plans: Plans, refusal: str) -> str:
    """Return the text of ``step.explain()``.

    Args:
      name: Name of the user's function.
      stats: Its counters.
      plans: The lowered plans, each with its captures.
      refusal: Text of the last error; empty if there was none.
    """
    counts = [
        count(number, kind.replace("_", " ").removesuffix("s")) for kind, number in asdict(stats).items()
    ]
    lines = [f"{name}: {', '.join(counts)}"]
    if len(plans) > 1:
        lines += [f"  traced for {_layout(lowered)}" for lowered, _ in plans]
    for lowered, captures in plans:
        lines += [str(lowered), *_captures(captures)]
        lines += [f"warning: {text}" for text in warnings_of(lowered)]
    if refusal:
        lines += ["last refusal:", *(f"  {text}" for text in refusal.splitlines())]
    return "\n".join(lines)


def explain_html(name: str, stats: Stats, plans: Plans, refusal: str) -> Html:
    """Return the same as HTML, for a notebook; arguments as for :func:`explain`."""
    parts = [table([(kind.replace("_", " "), str(number)) for kind, number in asdict(stats).items()])]
    for number, (lowered, captures) in enumerate(plans):
        parts.append(
            fold(
                f"for {_layout(lowered)}",
                lowered.body_html(),
                *map(line, _captures(captures)),
                opened=not number,
            )
        )
        parts += [line(f"warning: {text}") for text in warnings_of(lowered)]
    if refusal:
        parts.append(fold("last refusal", line(refusal)))
    return card(name, *parts)


def warnings_of(lowered: Lowered) -> Iterator[str]:
    """Yield warnings of what is legal but probably a mistake: dropped values, numbers drawn repeatedly."""
    inspection = lowered.inspection
    yield from inspection.warnings
    if sites := list(dict.fromkeys(inspection.repeated)):
        said = "draw" if len(sites) > 1 else "draws"
        yield (
            f"{', '.join(first(sites, _SHOWN))} {said} the same numbers at each call, by a key that does not change: "
            "fold the step in, `fcg.random.fold_in(state.key, state.step)`."
        )
    correlated = [
        f"{f'{one} and {then} draw from' if one != then else f'{one} draws more than once from'} one and the same key, "
        "so the numbers are correlated: give each draw a key of its own, `fcg.random.split(key)` or "
        "`fcg.random.fold_in(key, n)`."
        for one, then in inspection.shared_keys
    ]
    yield from first(correlated, _SHOWN)
    if inspection.copied:
        names = ", ".join(f"`{name}`" for name in inspection.copied)
        yield (
            f"{names}: the step writes in place into its own copy; in the loop, what was passed stays as it was. "
            "What the loop needs of it, return in `metrics`."
        )
    if inspection.by_mode:
        yield (
            f"applies {', '.join(inspection.by_mode)} in training mode, by the statistics of the batch or with "
            "dropout, and trains nothing: to evaluate, `apply(params, buffers, x, train=False)`."
        )
    elif inspection.forgotten:
        yield (
            f"{'; '.join(first(inspection.forgotten, _SHOWN))}: new values, such as BatchNorm's statistics, were "
            "computed and dropped; return them, `loss, new_buffers` from the loss, `has_aux=True`, and "
            "`state.apply_gradients(grads, buffers=new_buffers)`; if the module is called again, pass them on: torch "
            "counts each call, as of a discriminator for its generator's loss. If another call on the same input "
            "returns them, or this one is not to count, nothing is lost. `train=False` writes none, but it also "
            "normalizes by the old ones: other numbers."
        )
    leaves = [text.rpartition(" (") for text in inspection.dropped]
    if len(leaves) > 1 and len({site for _, _, site in leaves}) == 1:  # an update
        names = ", ".join(first([name for name, *_ in leaves], _NAMED))
        yield (
            f"{names} ({leaves[0][2]}: new values were computed and dropped; keep them, "
            "`state = state.apply_gradients(grads)`, and return the new state; or do not compute them."
        )
        return
    kept = "a new value was computed and dropped; return it in the new state, or do not compute it."
    yield from first([f"{text}: {kept}" for text in inspection.dropped], _SHOWN)


def _layout(lowered: Lowered) -> str:
    leaves = zip(lowered.layout.live_names, lowered.layout.specs, strict=True)
    return ", ".join(first([f"{name} {spec}" for name, spec in leaves], _SHOWN)) or "no inputs"


def _captures(captures: Sequence[Captured]) -> list[str]:
    lines = first([f"captured on {captured}" for captured in captures], _SHOWN, "more captures")
    return [f"  {line}" for line in lines or ["not captured yet"]]
