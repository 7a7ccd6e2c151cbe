"""A judged case: its outcome, and how a result is compared with the one that is expected."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.judges.documented import known_as

__all__ = ["OUTCOMES", "Row", "Verdict", "compare", "first_line", "judged", "strides_of"]

# From best to worst; the outcome of a row is that of its worst verdict.
OUTCOMES = ("equal", "rounded", "not run", "documented", "refused", "DIFFERS")


@dataclass(frozen=True)
class Verdict:
    """How one comparison ended.

    Attributes:
      outcome: One of ``OUTCOMES``.
      where: What was compared, such as a dtype and the number of a sample.
      why: The first line of a message, the reason of a documented difference, or what differs.
    """

    outcome: str
    where: str = ""
    why: str = ""


@dataclass
class Row:
    """A case of a judge, with the verdicts of all that it compares.

    Attributes:
      judge: Its name.
      case: The name of the case.
      lowering: Of the steps.
      device: Where they ran.
      torch: Its version.
      counts: Number of verdicts by outcome.
      notes: What was not equal: outcome, where, why; one for each reason.
      seconds: The time of the case.
    """

    judge: str
    case: str
    lowering: str
    device: str
    torch: str = torch.__version__
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """That of the worst verdict."""
        return max(self.counts, key=OUTCOMES.index, default="not run")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a resumed run skips."""
        return self.judge, self.case, self.lowering, self.device

    def add(self, verdicts: Iterable[Verdict]) -> Row:
        """Count verdicts, and note each reason once."""
        counts = Counter(self.counts)
        seen = {(outcome, why) for outcome, _, why in self.notes}
        for verdict in verdicts:
            if verdict.outcome == "DIFFERS" and (
                known := known_as(self.judge, self.case, self.device, verdict.where, verdict.why)
            ):
                verdict = Verdict(known.outcome, verdict.where, known.reason)
            counts[verdict.outcome] += 1
            if verdict.outcome not in ("equal", "rounded") and (verdict.outcome, verdict.why) not in seen:
                seen.add((verdict.outcome, verdict.why))
                self.notes.append([verdict.outcome, verdict.where, verdict.why])
        self.counts = dict(counts)
        return self

    def as_dict(self) -> dict[str, Any]:
        """A line of the file of rows."""
        return dataclasses.asdict(self)


def judged(
    judge: str, case: str, verdict: Callable[[], Iterable[Verdict]], lowering: str, device: str
) -> Row:
    """The row of a case whose exceptions are a defect."""
    row = Row(judge, case, lowering, device)
    try:
        return row.add(verdict())
    except Exception as error:  # any error is a finding of the judge
        return row.add([Verdict("DIFFERS", "", f"{type(error).__name__}: {first_line(error)}")])


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty, at most 160 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides that say where elements are: none of an empty tensor, nor of dimensions of size 1."""
    if x.layout is not torch.strided or x.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory: no gaps, no overlap."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def compare(
    got: Tensor,
    expected: Tensor,
    where: str = "",
    exact: Callable[[], Tensor | None] = lambda: None,
    near: Callable[[], Tensor | None] = lambda: None,
    *,
    values: bool = True,
) -> Verdict:
    """Compare a result with that of an eager run.

    A result is equal if it has the same dtype, shape, strides and bits, where any NaN is like any other. It is equal
    up to rounding if each element is as near to the eager one as 16 roundings of its largest element, and 4 times the
    largest error of the eager run itself, measured against a run in float64, or 4 times the change by another run whose
    inputs have been rounded once more: where terms cancel, what is left is as large as their roundings.

    Args:
      got: From a step.
      expected: From an eager run.
      where: For the verdict.
      exact: Gives the result of the same run in float64, or None.
      near: Gives the result of the same run with inputs that are one rounding away, or None.
      values: False if memory is not initialised, so that only dtype, shape and strides count.
    """
    if got.layout is not expected.layout or got.dtype is not expected.dtype or got.shape != expected.shape:
        return Verdict("DIFFERS", where, f"is {_summary(got)}, expected {_summary(expected)}")
    if got.layout is not torch.strided:
        got, expected = got.to_dense(), expected.to_dense()
    wanted = expected
    if expected.numel() and not is_dense(expected):
        # A result has memory of its own: what is expanded, or a view with gaps, becomes dense, as by `clone`.
        wanted = torch.empty_like(expected, memory_format=torch.preserve_format)
    if not values or _same_bits(got, expected):
        verdict = Verdict("equal", where)
    elif not (got.is_floating_point() or got.is_complex()):
        verdict = Verdict("DIFFERS", where, "other values of an exact dtype")
    else:
        verdict = _rounded(got, expected, exact(), where)
        verdict = verdict if verdict.outcome != "DIFFERS" else _rounded(got, expected, near(), where)
    if verdict.outcome != "DIFFERS" and strides_of(got) not in (strides_of(wanted), strides_of(expected)):
        return Verdict("DIFFERS", where, f"strides {strides_of(got)}, expected {strides_of(wanted)}")
    return verdict


def _rounded(got: Tensor, expected: Tensor, other: Tensor | None, where: str) -> Verdict:
    info = torch.finfo(got.dtype)
    wide = torch.complex128 if got.is_complex() else torch.float64
    one, two = (torch.view_as_real(x) if x.is_complex() else x for x in (got.to(wide), expected.to(wide)))
    if not torch.equal(one.isnan(), two.isnan()) or not torch.equal(
        one.where(one.isinf(), one.new_zeros(())), two.where(two.isinf(), two.new_zeros(()))
    ):
        return Verdict("DIFFERS", where, "inf or NaN in other places")
    finite = two.isfinite()
    one, two = one[finite], two[finite]
    if not one.numel():
        return Verdict("equal", where)
    error = 0.0
    if other is not None and other.shape == expected.shape:
        three = other.to(wide)
        three = (torch.view_as_real(three) if three.is_complex() else three)[finite]
        three = three[three.isfinite()] if not bool(three.isfinite().all()) else three
        if three.shape == two.shape:
            error = float((two - three).abs().max())
    bound = 4 * error + 16 * info.eps * float(two.abs().max()) + info.tiny
    distance = float((one - two).abs().max())
    if distance <= bound:
        return Verdict("rounded", where)
    return Verdict("DIFFERS", where, f"values differ by {distance:.1e}, rounding explains {bound:.1e}")


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.is_complex():
        return _same_bits(torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj()))
    if not x.is_floating_point():
        return torch.equal(x, y)
    if x.element_size() == 1:  # fp8 has few ops
        x, y = x.float(), y.float()
    same = (x == y) & (x.signbit() == y.signbit()) | (x.isnan() & y.isnan())
    return bool(same.all())


def _summary(x: Tensor) -> str:
    layout = "" if x.layout is torch.strided else f" {x.layout}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{layout}"
