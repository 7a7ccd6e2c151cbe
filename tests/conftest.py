"""Fixtures and settings of all tests: a hypothesis profile, which need a GPU, clean global state, and keys.

``FCG_HYPOTHESIS_PROFILE`` picks the profile: ``ci`` (the default: the same few examples at each run), ``dev``
(random ones) or ``thorough`` (many).
"""

from __future__ import annotations

import os

# Before torch is imported: under xdist the workers already fill the cores, and OpenMP and inductor's compile
# pool would put a thread per core into each of them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Two steps are compared that were compiled one after the other: by default inductor times variants of a reduction
# and keeps the fastest, which is another one on a busy machine, with other last bits.
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
# Otherwise each process that compiles a step for a CPU first builds and loads a program for each instruction set
# that the processor says it has: a second, and eight where nothing is built yet.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Torch's cache of compiled graphs ignores `ATEN_CPU_CAPABILITY`. Our steps add it to the key; tests that call torch's
# compiler themselves do not.
os.environ.setdefault("TORCH_COMPILE_CACHE_KEY_TAG", os.environ.get("ATEN_CPU_CAPABILITY", ""))
# Where jax is installed (the bench compares with it), one worker would take three quarters of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import gc
import signal
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs
from _pytest.runner import runtestprotocol

from functional_cg import random
from tests.interpreted import interpreted
from tests.room import with_room

# Read by mypy, not run; --doctest-modules would import it.
collect_ignore = ["typing_surface.py"]

# No deadline in any profile: the first example of a step traces and captures it, the others replay.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=8, database=None)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=1000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
_PROFILE = os.environ.get("FCG_HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(_PROFILE)  # before `tests.shares` is imported, which reads it


class _TorchGenerator:
    """torch's CPU generator in the form in which hypothesis reseeds generators before each example."""

    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis keeps a weak reference only.
_TORCH_GENERATOR = _TorchGenerator()
hypothesis.register_random(_TORCH_GENERATOR)


def _global_modes() -> dict[str, Any]:
    """Return the process-wide settings of torch that a test could leave changed."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "multithreaded autograd": torch.autograd.is_multithreading_enabled(),
        "autocast (cpu)": torch.is_autocast_enabled("cpu"),
        "autocast (cuda)": torch.is_autocast_enabled("cuda"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "blocks of autocast": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1],
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.enabled,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
    }


class GlobalStateGuard:
    """Each test and doctest starts from a seed of its own, and leaves torch's global state as it was.

    A plugin and not an autouse fixture: it also covers the doctests, which live outside this folder.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the test with room for its frames, as pytest does without."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        compiles = _PROFILE == "thorough" or item.get_closest_marker("kernels") or _gpus_needed(item)
        with contextlib.nullcontext() if compiles else interpreted():
            with_room(runtestprotocol, item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Seed torch's generator, run the test, restore the generator, compare the modes."""
        generator = torch.get_rng_state()
        modes = _global_modes()
        torch.default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))
        try:
            result = yield
        finally:
            torch.set_rng_state(generator)
            left = {name: value for name, value in _global_modes().items() if value != modes[name]}
            # The tests that follow are not to fail for this one.
            torch.set_default_dtype(modes["default dtype"])
            torch.set_grad_enabled(modes["grad mode"])
        if left:
            lines = [f"  {name}  expected {modes[name]}   got {value}" for name, value in left.items()]
            pytest.fail("\n".join(["the test leaves torch's global state changed:", *lines]), pytrace=False)
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard; share the cores among the workers."""
    config.pluginmanager.register(GlobalStateGuard(), "fcg-global-state-guard")
    # A job in the background of a script starts with Ctrl-C ignored, and Python then leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine has no device for; ``--collect-only`` lists it all the same."""
    if config.option.collectonly:
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    left_out = [item for item in items if _gpus_needed(item) > gpus]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _gpus_needed(item) <= gpus]


def _gpus_needed(item: pytest.Item) -> int:
    several = item.get_closest_marker("multi_gpu")
    if several:
        return several.args[0] if several.args else 2
    return 1 if item.get_closest_marker("cuda") else 0


def pytest_collection_finish() -> None:
    """Collections while tests run leave alone what was imported: a trace that meets cycles collects them."""
    _freeze()


_FROZEN = {"modules": 0}


def pytest_runtest_logfinish() -> None:
    """Nor do they look again at what an earlier test has imported, such as all of a compiler."""
    if len(sys.modules) > _FROZEN["modules"]:
        _freeze()


def _freeze() -> None:
    _FROZEN["modules"] = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture
def getkey() -> Callable[[], torch.Tensor]:
    """Return a function that gives a new key at each call, the same ones at each run of the test."""
    count = 0

    def next_key() -> torch.Tensor:
        nonlocal count
        count += 1
        return random.fold_in(random.key(0), count)

    return next_key


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged during a test that asks for it, as pytest's own fixture gives it."""
    with catching_logs(LogCaptureHandler()) as handler:
        request.node.stash[caplog_handler_key] = handler
        caught = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield caught
        caught._finalize()


@pytest.fixture(scope="module")
def scalar_loops() -> Iterator[None]:
    """What a host compiles has no vectors, which a third of a compilation is for: where they are not the subject."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def compiled_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of a test marked by ``tests.compiled_graphs.compiled``, whose steps are compiled as they are there.

    What torch's compiler does to large values, and on a GPU alone, it may do to small ones, too: pad their rows.
    """
    from torch._inductor import config

    from tests.compiled_graphs import PADDED, lower_as_on_a_gpu

    place: str = request.param
    if place == "cpu as a GPU":
        monkeypatch.setattr("functional_cg.step.captures.lower", lower_as_on_a_gpu)
    with config.patch(PADDED):
        yield place.partition(" ")[0]
