"""The workloads of reinforcement learning, by name."""

from __future__ import annotations

from dataclasses import dataclass

from ..system import LANES, LINE, OURS
from ..workloads import Batch, Params, Workload
from .dqn import Dqn
from .dreamer import Dreamer
from .nets import Algorithm
from .ppo import Ppo
from .sac import Sac

__all__ = ["LearnerWorkload", "names", "workloads"]

_OTHERS = (
    "eager", "compile", "reduce-overhead", "hand-graph", "hand-graph-compiled", "cudagraph-module", "jax",
)  # fmt: skip


@dataclass(frozen=True)
class LearnerWorkload(Workload):
    """The update of a learner.

    Attributes:
      algorithm: What it computes, and its sizes.
    """

    algorithm: Algorithm | None = None

    @property
    def learned(self) -> Algorithm:
        """The algorithm."""
        assert self.algorithm is not None
        return self.algorithm

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that support the workload."""
        lanes = (LANES, LINE) if self.learned.branches else ()
        return (*OURS, *lanes, *_OTHERS)

    def describe(self) -> str:
        """Describe the sizes for people."""
        return self.learned.text

    def params(self) -> Params:
        """Make the initial values on the CPU, the same at each call."""
        nets = self.learned.params()
        return {f"{net}.{name}": value for net, params in nets.items() for name, value in params.items()}

    def batches(self, count: int) -> list[Batch]:
        """Make batches on the CPU, the same at each call."""
        return self.learned.batches(count)


def workloads() -> tuple[LearnerWorkload, ...]:
    """Return all of them, and each at a tiny size."""
    sized: tuple[tuple[str, Algorithm, Algorithm, int, float], ...] = (
        ("rl-sac", Sac(256, 256), Sac(16, 8), 500, 1e-3),
        ("rl-dqn", Dqn(256, 100_000, 256, 16), Dqn(16, 4000, 64, 4), 500, 2e-2),
        ("rl-ppo", Ppo(64, 64, 128), Ppo(8, 8, 16, 2, 2), 100, 1e-3),
        ("rl-dreamer", Dreamer(512, 32, 64, 16), Dreamer(16, 4, 4, 2), 30, 1e-3),
    )
    return tuple(
        LearnerWorkload(f"{name}{size}", "learner", steps=steps, tolerance=tolerance, algorithm=algorithm)
        for name, full, tiny, steps, tolerance in sized
        for size, algorithm in (("", full), ("-tiny", tiny))
    )


def names() -> tuple[str, ...]:
    """List the workloads for the command line."""
    return tuple(one.name for one in workloads())
