"""Sums up rows of the bench: ``python -m tests.bench.many.means rows.jsonl --workload zoo-``.

For each system: the geometric mean, over the workloads, of its time over ours and of our peak memory over its own, with
the worst workload of each by name. Workloads that one of the two did not finish are named, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functional_cg.state.outline import columns

__all__ = ["Mean", "main", "means"]

Row = Mapping[str, Any]
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Mean:
    """How ours compares with a system over several workloads.

    Attributes:
      system: Name of the system.
      times: Its time over ours, by workload; above 1, ours is faster.
      memory: Our peak of memory over its own, by workload; below 1, ours takes less.
      missing: Workloads that one of the two did not finish.
    """

    system: str
    times: Mapping[str, float]
    memory: Mapping[str, float]
    missing: Sequence[str]

    def __str__(self) -> str:
        said = f"{self.system}, {len(self.times)} workloads: "
        parts = []
        if self.times:
            worst = min(self.times, key=self.times.__getitem__)
            mean = statistics.geometric_mean(self.times.values())
            parts.append(f"{mean:.2f}x of our time, the least for {worst}: {self.times[worst]:.2f}x")
        if self.memory:
            worst = max(self.memory, key=self.memory.__getitem__)
            mean = statistics.geometric_mean(self.memory.values())
            parts.append(f"we take {mean:.2f} of its memory, the most for {worst}: {self.memory[worst]:.2f}")
        if self.missing:
            parts.append(f"not compared: {', '.join(self.missing)}")
        return said + "; ".join(parts or ["nothing to compare"])


def means(rows: Sequence[Row]) -> list[Mean]:
    """Compare ours with each system over all workloads; ours is the first row of each workload."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["workload"], []).append(row)
    systems = dict.fromkeys(row["system"] for group in groups.values() for row in group[1:])
    return [_mean(system, groups) for system in systems]


def _mean(system: str, groups: Mapping[str, Sequence[Row]]) -> Mean:
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    missing = []
    for workload, (ours, *others) in groups.items():
        row = next((one for one in others if one["system"] == system), None)
        if row is not None and row["reason"].startswith("is not made for"):
            continue
        if row is None or row["ratio"] is None:
            missing.append(workload)
            continue
        times[workload] = row["ratio"]
        if ours["peak_bytes"] and row["peak_bytes"]:
            memory[workload] = ours["peak_bytes"] / row["peak_bytes"]
    return Mean(system, times, memory, missing)


def _table(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each system of each workload, with the range of its times."""
    yield ("workload", "system", "ms", "range", "x ours", "GiB", "tokens/s", "MFU", "kernels", "said")
    for row in rows:
        ms = row["ms"] or {}
        yield (
            row["workload"],
            row["system"],
            _shown(ms.get("median"), ".2f"),
            f"{ms['least']:.2f}-{ms['most']:.2f}" if ms else "",
            _shown(row["ratio"], ".3f"),
            _shown(row["peak_bytes"] and row["peak_bytes"] / _GIB, ".2f"),
            _shown(row["tokens_per_s"], ",.0f"),
            _shown(row["utilization"], ".1%"),
            _shown(row["nodes"], ",d"),
            "" if row["losses_agree"] is True else row["reason"] or "other losses",
        )


def _shown(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows of files, and what they add up to."""
    parser = argparse.ArgumentParser("python -m tests.bench.many.means", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="what `--out` of the bench wrote")
    parser.add_argument("--workload", default="", help="only workloads whose names begin like this")
    options = parser.parse_args(argv)
    rows = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    rows = [row for row in rows if row["workload"].startswith(options.workload)]
    print("\n".join([*columns(list(_table(rows))), "", *map(str, means(rows))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
