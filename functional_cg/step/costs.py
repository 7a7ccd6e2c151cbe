"""Compute the cost of a lowered step without running it: FLOPs, bytes, calls by kind, memory, and the floor.

All numbers follow from the program's calls and their shapes. If a compiler fuses calls, then bytes moved,
calls and peak memory are those before fusion; FLOPs, least bytes and the floor do not change.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, cast

import torch

from ..messages.units import size_of
from ..shards.transfers import is_between_ranks
from ..stages.plan import Plan
from ..stages.program import Instr, Program, Var
from ..stages.sub_programs import calls_of
from ..stages.work import bytes_of, flops_of
from ..tensors.op_table import row_of
from .leaf_costs import leaf_costs
from .report import Part, Report, grouped

__all__ = ["COPIES", "WHAT_COPIES_ARE", "CostAnalysis", "KindOfCall", "cost_analysis", "peak_flops"]

COPIES = "(copies)"
WHAT_COPIES_ARE = f"{COPIES} of inputs in, of new values into the state, of metrics out"


@dataclass(frozen=True, slots=True)
class _Rates:
    """Peak rates of a device as specified by its vendor: bytes per second, and FLOPs per second by dtype."""

    name: str
    bandwidth: float
    half: float
    tf32: float
    single: float
    double: float

    def peak(self, dtype: torch.dtype) -> float:
        if dtype == torch.float64 or dtype.is_complex:
            return self.double
        if dtype == torch.float32:
            return self.single if torch.get_float32_matmul_precision() == "highest" else self.tf32
        return self.half if dtype.itemsize == 2 else 2 * self.half


_DEVICES = (
    _Rates("NVIDIA H100 80GB HBM3", 3.35e12, 989e12, 495e12, 67e12, 67e12),
    _Rates("NVIDIA H200", 4.8e12, 989e12, 495e12, 67e12, 67e12),
)


@dataclass(frozen=True, slots=True)
class KindOfCall:
    """All calls of one kind.

    Attributes:
      calls: Number of calls.
      flops: Floating-point operations of matrix products, attention and convolutions; 0 for other kinds.
      bytes: Bytes read and written, each call counted separately.
    """

    calls: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True, repr=False, slots=True)
class CostAnalysis(Report):
    """The cost of a step; prints as a table, converts to a dict with :meth:`as_dict`.

    Attributes:
      function: Name of the user's function.
      device: Name of the device.
      compiled: Whether a compiler fuses the calls.
      flops: Floating-point operations of all products. A multiplication and an addition count as two; attention with
        ``is_causal`` counts only the scores it keeps.
      bytes_moved: Bytes read and written by all calls, each counted separately, and by the copies that
        ``(copies)`` counts.
      bytes_least: Bytes that any implementation must move: state read, state written, inputs, constants,
        metrics.
      kinds: Calls by kind, most bytes first; views are not counted. ``(copies)`` are those of a call of the step:
        inputs in, new values into the state, metrics out.
      floor_s: Lower bound on the seconds of a call: products at peak rate, or least bytes at full bandwidth,
        whichever takes longer. None if the device's rates are unknown.
      bound: Which of the two it is, ``"compute"`` or ``"memory"``; None without a floor.
      seconds: Measured seconds of a call, if given.
      distance: ``seconds`` over ``floor_s``; None if either is missing.
    """

    function: str
    device: str
    compiled: bool
    flops: int
    bytes_moved: int
    bytes_least: int
    kinds: Mapping[str, KindOfCall]
    floor_s: float | None
    bound: str | None
    seconds: float | None

    @property
    def distance(self) -> float | None:
        return None if self.seconds is None or not self.floor_s else self.seconds / self.floor_s

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as numbers, strings and dicts."""
        names = [name for name in self.__slots__ if name != "kinds"]
        return {
            **{name: getattr(self, name) for name in names},
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
            "distance": self.distance,
        }

    def report(self) -> list[Part]:
        """Return FLOPs, bytes and floor, and the calls by kind."""
        fused = ", before fusion" if self.compiled else ""
        moved = f"{size_of(self.bytes_moved)} read and written{fused}, {size_of(self.bytes_least)} at least"
        floor = (
            "unknown; pass bandwidth= (bytes/s) and peak_flops= (FLOP/s) of this device"
            if self.floor_s is None
            else f"{self.floor_s * 1e3:,.4f} ms, bound by {self.bound}"
        )
        far = "" if self.distance is None else f", {self.distance:.2f} times the floor"
        measured = [] if self.seconds is None else [f"  measured: {self.seconds * 1e3:,.4f} ms{far}"]
        rows = [
            (name, f"{kind.calls:,}", f"{kind.flops / 1e9:,.3f}" if kind.flops else "", size_of(kind.bytes))
            for name, kind in self.kinds.items()
        ]
        legend = [f"  {WHAT_COPIES_ARE}"] if COPIES in self.kinds else []
        return [
            f"{self.function} on {self.device}: {self.flops / 1e9:,.3f} GFLOP in products, {moved}",
            f"  floor: {floor}",
            *measured,
            [("kind of call", "calls", "GFLOP", "read and written"), *rows],
            *legend,
        ]


def _positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0 < value <= sys.float_info.max:
        return float(value)
    raise ValueError(
        f"cost_analysis: {name} must be a positive number, got {value!r}.\n"
        "To fix: `seconds=1e-3`, as measured; `bandwidth=3.35e12` in bytes/s, `peak_flops=989e12` in FLOP/s."
    )


def cost_analysis(
    program: Program,
    plan: Plan,
    *,
    seconds: float | None = None,
    bandwidth: float | None = None,
    peak_flops: float | None = None,
) -> CostAnalysis:
    """Analyse a lowered program.

    Args:
      program: The lowered program.
      plan: Its plan.
      seconds: Measured seconds of a call.
      bandwidth: Bytes per second of the device's memory.
      peak_flops: FLOPs per second of the device.
    Raises:
      ValueError: If one of the three is not positive.
    """
    names, given = ("seconds", "bandwidth", "peak_flops"), (seconds, bandwidth, peak_flops)
    seconds, bandwidth, peak_flops = map(_positive, names, given)
    schedule = plan.schedule
    instrs = calls_of([*schedule.head, *schedule.fused])
    used = {*program.results, *(new for _, new in program.updates)}.union(*(one.inputs() for one in instrs))
    calls = [instr for instr in instrs if not instr.only_views]
    kinds = {
        kind: KindOfCall(len(some), sum(map(flops_of, some)), sum(bytes_of(one, used) for one in some))
        for kind, some in grouped(calls, kind_of).items()
    }
    leaves = leaf_costs(program, plan, [""] * len(program.inputs)).values()
    if copied := [entry.copied for entries in leaves for _, entry in entries if entry.copied]:
        kinds[COPIES] = KindOfCall(len(copied), 0, 2 * sum(copied))
    kinds = dict(sorted(kinds.items(), key=lambda item: item[1].bytes, reverse=True))
    products: Counter[torch.dtype] = Counter()
    for instr in filter(flops_of, calls):
        products[instr.inputs()[0].spec.dtype] += flops_of(instr)
    places = [var.spec.device for var in (*program.slots, *program.inputs, *program.results)]
    device = next((place for place in places if place.type != "cpu"), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    moved, least = sum(kind.bytes for kind in kinds.values()), _least_bytes(program, used)
    floor, bound = _floor(name, products, least, bandwidth, peak_flops)
    return CostAnalysis(
        program.function, name, plan.compiled, products.total(), moved, least, MappingProxyType(kinds), floor, bound,
        seconds,
    )  # fmt: skip


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOPs per second that the vendor of a device states for products in a dtype; None if unknown."""
    known = _rates_of(name)
    return None if known is None else known.peak(dtype)


def _rates_of(name: str) -> _Rates | None:
    return next((rates for rates in _DEVICES if rates.name == name), None)


def _floor(
    name: str, flops: Mapping[torch.dtype, int], least: int, bandwidth: float | None, peak: float | None
) -> tuple[float | None, str | None]:
    """Return the seconds that a device takes at least, and what bounds them; (None, None) if a rate is unknown."""
    known = _rates_of(name)
    bandwidth = bandwidth or (known.bandwidth if known is not None else None)
    if bandwidth is None or (known is None and peak is None and flops):
        return None, None
    rates = {dtype: peak or cast("_Rates", known).peak(dtype) for dtype in flops}
    compute = sum(number / rates[dtype] for dtype, number in flops.items())
    return max((compute, "compute"), (least / bandwidth, "memory"))


def kind_of(instr: Instr) -> str:
    """Return the kind of a call, from the op table and torch's tags."""
    if is_between_ranks(instr.op):
        return "collective"
    row = row_of(instr.op)
    if row.kind is not None:
        return row.kind
    if torch.Tag.pointwise in instr.op.tags or row.lists or instr.name.endswith("_backward"):
        return "elementwise"
    if torch.Tag.reduction in instr.op.tags:
        return "reduction"
    return "other"


def _least_bytes(program: Program, used: set[Var]) -> int:
    storages = {var.storage for var in used}
    ranges = {leaf: known.var for known in program.ranges for leaf in known.leaves}
    read = [
        var
        for var in (*program.slots, *program.inputs, *(constant.var for constant in program.constants))
        if var.storage in storages or (var in ranges and ranges[var].storage in storages)
    ]
    written = [old for old, _ in program.updates]
    return sum(var.spec.nbytes for var in (*read, *written, *program.results))
