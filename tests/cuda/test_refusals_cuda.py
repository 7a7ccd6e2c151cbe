"""Refusals on the GPU: the same as on the CPU, and those that exist only there."""

import re

import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.run.capture import CUDABackend
from tests.refusals.judge import a_batch, a_state, metric, same
from tests.refusals.test_host_syncs import DECISIONS, NUMBERS
from tests.refusals.test_host_syncs_indices import INDICES
from tests.refusals.test_random_ops import DRAWS
from tests.refusals.test_side_effects import keep_in_an_attribute

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
# They make their weights on the CPU, which is refused for another reason.
ON_THE_CPU = ("lstm", "gru", "poisson", "module made in the step", "generator", "generator of bernoulli")


def assert_refused_on_cuda(function, error, match):
    """Refused before anything is launched; the state is what it was, and the stream is not capturing."""
    state = fcg.place(fcg.snapshot(a_state()), DEVICE)
    batch = fcg.tree.map(lambda leaf: leaf.to(DEVICE), a_batch())
    before = fcg.snapshot(state)
    step = fcg.graph_step(function, lowering="aten")
    with pytest.raises(error, match=match) as caught:
        step(state, batch)
    assert type(caught.value) is error
    assert step.stats.captures == step.stats.replays == 0
    assert not torch.cuda.is_current_stream_capturing()
    assert state.generation == 0
    assert same(fcg.snapshot(state), before)
    torch.cuda.synchronize()


# torch itself wants the sections of a split on the host.
SPELLINGS = [s for s in (*NUMBERS, *DECISIONS, *INDICES) if str(s) != "split"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_host_sync(spelling):
    assert_refused_on_cuda(metric(spelling.refused), fcg.HostSyncError, re.escape(spelling.fix))


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in ON_THE_CPU])
def test_random_op(name):
    assert_refused_on_cuda(metric(DRAWS[name]), fcg.ImplicitRandomnessError, "not in the state")


TRANSFERS = {
    "to the host": (lambda s, b: b["x"].to("cpu"), "copies a tensor to the host"),
    "to the host, pinned": (lambda s, b: torch.empty(4, 3).copy_(b["x"]), "copies a tensor to the host"),
    "decomposition": (lambda s, b: torch.linalg.cholesky(b["x"].t() @ b["x"]), "checks on the host whether"),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_transfer(name):
    function, match = TRANSFERS[name]
    assert_refused_on_cuda(metric(function), fcg.HostSyncError, match)


def test_what_is_known_on_the_host_may_move():
    step = fcg.graph_fn(lambda x: x * torch.arange(3.0).add_(1).to(DEVICE), lowering="aten")
    for call in range(16):
        assert same(
            step(torch.full((3,), call, device=DEVICE)), torch.tensor([1.0, 2.0, 3.0], device=DEVICE) * call
        )
    assert step.stats.replays == 16


def test_tensor_of_the_host_that_is_closed_over():
    table = torch.ones(3)
    match = r"f32\[3\]@cpu in aten"
    assert_refused_on_cuda(metric(lambda s, b: s["w"] * table.cuda()), fcg.ForeignTensorError, match)
    match = r"f32\[3\]@cpu in tolist"
    assert_refused_on_cuda(metric(lambda s, b: s["w"] * table.tolist()[0]), fcg.ForeignTensorError, match)


def test_tensor_that_is_kept():
    assert_refused_on_cuda(
        keep_in_an_attribute(), fcg.SideEffectError, "keeps a tensor of the step beyond its end"
    )


def test_literals_are_moved_once():
    step = fcg.graph_step(
        lambda s, b: (s, s["w"] * torch.tensor([1.0, 2.0, 3.0], device=DEVICE)), lowering="aten"
    )
    state = fcg.place(fcg.snapshot(a_state()), DEVICE)
    for _ in range(3):
        state, out = step(state, None)
        assert out.tolist() == [0.0, 2.0, 6.0]


def test_a_kernel_that_is_no_op_is_refused_before_it_is_launched():
    double = torch.cuda.jiterator._create_jit_fn("template <typename T> T doubled(T x) { return x + x; }")
    assert_refused_on_cuda(
        metric(lambda s, b: double(b["x"])),
        fcg.CaptureError,
        r"launches a kernel of `torch\.cuda\.jiterator`",
    )

    @torch.library.custom_op("fcg_tests::jiterated", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return double(x)

    op.register_fake(torch.empty_like)
    state = fcg.place({"w": torch.arange(3.0)}, DEVICE)
    step = fcg.graph_step(lambda s, b: (s, op(s["w"])), lowering="aten")
    for _ in range(3):
        state, doubled = step(state, None)
        assert doubled.tolist() == [0.0, 2.0, 4.0]


def test_failed_capture_leaves_everything_usable():
    state = fcg.place(fcg.snapshot(a_state()), DEVICE)
    before = fcg.snapshot(state)
    calls = []

    def compiler(graph, inputs):
        def run(*args):
            calls.append(None)
            if len(calls) <= 3:  # warm-ups pass, the capture does not
                torch.cuda.synchronize()
            return graph(*args)

        return run

    step = fcg.graph_step(
        lambda s, b: ({**s, "w": s["w"] + 1}, s["w"].sum()), lowering=compiler, certify=False
    )
    with pytest.raises(fcg.CaptureError, match="capture failed"):
        step(state, None)
    assert not torch.cuda.is_current_stream_capturing()
    assert state.generation == 0
    assert same(fcg.snapshot(state), before)
    torch.rand(3, device=DEVICE)
    state, total = step(state, None)
    assert total == 3.0
    assert state["w"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "solve", [torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.eigvals]
)
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3)], ids=str)
def test_after_a_solver_that_cannot_be_captured_the_next_one_works(solve, shape):
    x = torch.eye(3, device=DEVICE).expand(shape).clone()
    expected = solve(x)  # cuSOLVER has a handle from here on
    state = fcg.place({"w": torch.ones(3)}, DEVICE)
    for _ in range(2):
        with pytest.raises(fcg.CaptureError, match="capture failed"):
            fcg.graph_step(lambda s, x: (s, solve(x)), lowering="aten")(state, x)
        for one, other in zip(fcg.tree.leaves(solve(x)), fcg.tree.leaves(expected), strict=True):
            assert torch.equal(one, other)
    assert state["w"].tolist() == [1.0, 1.0, 1.0]


def test_backend_is_the_one_of_the_device():
    step = fcg.graph_step(lambda s, b: (s, {}), lowering="aten")
    step(fcg.place({"w": torch.ones(3)}, DEVICE), None)
    assert isinstance(step._backend, CUDABackend)
