"""Random integer programs, compiled: every value equals that of the eager run at each of sixteen calls or eight.

``python -m tests.exact_programs --programs 5000`` runs as many as one likes, several of them compiled together, and
prints those that differ. ``--device cuda`` runs them on a GPU; ``--as-on-a-gpu`` on a CPU, by the lowering that
writes the state in the compiled function.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.lower.compiled import lower
from functional_cg.testing import assert_no_alias, assert_trees_all_close
from functional_cg.testing.strategies import StepProgram
from tests.compiled_graphs import lower_as_on_a_gpu
from tests.exact_steps import exact_step_fns
from tests.gated import gated
from tests.overwritten import overwritten
from tests.shares import CALLS

STRATEGIES: dict[str, Callable[[], SearchStrategy[Any]]] = {
    "exact": exact_step_fns,  # anything
    "overwritten": overwritten,  # chains of writes to parts of a value
    "gated": gated,  # losses that are switched on late, over values whose elements share memory
}
_GAVE_UP = "torch's compiler gave up on it"  # an error, before anything runs
EXACT = 1e-30  # a relative tolerance that lets zeros have any sign, and nothing else


def drawn(count: int, number: int, of: SearchStrategy[StepProgram]) -> list[StepProgram]:
    """So many programs, the same ones for the same number."""
    programs: list[StepProgram] = []

    @seed(number)
    @settings(
        deadline=None,
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(of)
    def collect(program: StepProgram) -> None:
        programs.append(program)

    collect()
    return programs


def together(programs: Sequence[StepProgram]) -> Any:
    """A step that takes a step of each program."""

    def train_step(states: Any, inputs: Any) -> Any:
        pairs = [program(state, x) for program, state, x in zip(programs, states, inputs, strict=True)]
        return tuple(new for new, _ in pairs), tuple(metrics for _, metrics in pairs)

    return train_step


def differs(programs: Sequence[StepProgram], device: str, calls: int = CALLS, number: int = 0) -> str:
    """How a step that takes a step of each program differs from its eager run; empty if it does not.

    Each call has new inputs; all metrics are kept until the end.
    """

    def inputs() -> tuple[Tensor, ...]:
        shapes = [program.x.shape for program in programs]
        return tuple(torch.randint(-8, 9, shape, generator=generator).float().to(device) for shape in shapes)

    generator = torch.Generator().manual_seed(number)
    start = tuple(program.state for program in programs)
    state = fcg.place(fcg.tree.map(lambda leaf: leaf.to(device), start))
    twin, step = fcg.fork(state), fcg.graph_step(together(programs), lowering="inductor")
    kept, expected = [], []
    try:
        for call in range(calls):
            x = inputs()
            twin, wanted = step.eager(twin, x)
            state, metrics = step(state, x)
            kept.append(metrics)
            expected.append(wanted)
            assert_trees_all_close(state, twin, rtol=0, atol=0, name=f"call {call}: state")
        assert_trees_all_close(kept, expected, rtol=0, atol=0, name="metrics")
        assert_no_alias(kept, state)
        assert step.stats.replays == calls, f"it did not replay: {step!r}"
    except (
        Exception
    ) as error:  # whatever a compiler or a driver raises is a finding, and the next program is tried
        return f"{type(error).__name__}: {error}"
    finally:
        step.close()
    return ""


def found(programs: Sequence[StepProgram], device: str, size: int, number: int) -> Iterator[str]:
    """What differs among many programs, each named by its place."""
    for first in range(0, len(programs), size):
        group = programs[first : first + size]
        if differs(group, device, number=number + first):
            alone = [(first + n, program, differs([program], device)) for n, program in enumerate(group)]
            said = [(place, program, text) for place, program, text in alone if text]
            yield from (f"program {place}:\n{program!r}\n{text}" for place, program, text in said)
            if not said:
                yield f"programs {first} to {first + len(group) - 1} together, and none alone"
        yield ""


def main(arguments: Sequence[str]) -> int:
    """Run programs; returns how many differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.exact_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="how many")
    parser.add_argument("--together", type=int, default=8, help="how many are compiled as one step")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--of", choices=list(STRATEGIES), default="exact", help="what they do")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--as-on-a-gpu", action="store_true", help="on a CPU: write the state while it is computed"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    start, wrong, given_up = time.perf_counter(), 0, 0
    programs = drawn(options.programs, options.seed, STRATEGIES[options.of]())
    how = lower_as_on_a_gpu if options.as_on_a_gpu else lower
    with mock.patch("functional_cg.step.captures.lower", how):
        for done, text in enumerate(found(programs, options.device, options.together, options.seed)):
            if text:
                given_up += _GAVE_UP in text  # torch 2.11's C++ backend, on loops of turned shapes
                wrong += _GAVE_UP not in text
                sys.stdout.write(f"{text}\n")
            elif done % 10 == 0:
                sys.stdout.write(f"{time.perf_counter() - start:.0f} s, {wrong} wrong so far\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - start
    sys.stdout.write(
        f"{len(programs)} programs, {CALLS} calls each, seed {options.seed}, {options.device}"
        f"{', as on a GPU' * options.as_on_a_gpu}, torch {torch.__version__}: {wrong} wrong, "
        f"{given_up} that the compiler gave up on, {seconds:.0f} s\n"
    )
    return wrong + given_up


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
