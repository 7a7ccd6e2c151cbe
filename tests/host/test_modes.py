"""Modes of torch around a call, and for a part of a step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import functional_cg as fcg
from tests.host_law import Change, Row, X, judge, rows

SETTINGS = {
    "torch.backends.cudnn.benchmark": "True",
    "torch.backends.cudnn.deterministic": "True",
    "torch.backends.cudnn.enabled": "False",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "False",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "False",
    "torch.backends.cuda.matmul.allow_fp16_accumulation": "True",
    "torch.backends.cuda.matmul.fp32_precision": "'tf32'",
    "torch.backends.cudnn.conv.fp32_precision": "'ieee'",
}
SWITCHES = {
    **{f"torch.backends.cuda.{kernel}_sdp_enabled()": f"torch.backends.cuda.enable_{kernel}_sdp" for kernel in
       ("flash", "mem_efficient", "math", "cudnn")},
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()":
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    "torch.are_deterministic_algorithms_enabled()": "torch.use_deterministic_algorithms",
}  # fmt: skip
HALF = "step:\n    half = x.bfloat16().expand(2, 2)\n    return x + (half @ half).sum().float()\n"

SETTING = "".join(
    f"# {name}\nbefore = {name}\n{HALF}loud: {name} = {value}  -> {name}  traced \nundo: {name} = before\n\n"
    for name, value in SETTINGS.items()
) + "".join(
    f"# {name}\nbefore = {name}\n{HALF}loud: {switch}(not before)  -> {name}  traced \n"
    f"undo: {switch}(before)\n\n"
    for name, switch in SWITCHES.items()
)


@rows(SETTING)
def test_setting(row: Row, change: Change) -> None:
    judge(row, change)


MODES = r"""
# the default dtype
step: x * 2
loud: torch.set_default_dtype(torch.float64)  -> torch.get_default_dtype()  traced torch.float32   now torch.float64
undo: torch.set_default_dtype(torch.float32)
loud: torch.set_default_dtype(torch.float64)  -> set the mode before the first call
undo: torch.set_default_dtype(torch.float32)

# the precision of products
step: x.expand(2, 2) @ x
loud: torch.set_float32_matmul_precision("high")  -> cuda.matmul.fp32_precision  traced 'ieee'   now 'tf32'
undo: torch.set_float32_matmul_precision("highest")

# a precision that was set, and set back
step: x.expand(2, 2) @ x
other: torch.set_float32_matmul_precision("medium"); torch.set_float32_matmul_precision("highest")

# the default, spelt out
before = torch.backends.cuda.matmul.fp32_precision
step: x * 2
other: torch.backends.cuda.matmul.fp32_precision = "ieee"
undo: torch.backends.cuda.matmul.fp32_precision = before

# how halves are summed, where there are none
step: x.expand(2, 2) @ x
other: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
undo: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True

# which kernel computes attention
kernel = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
step: F.scaled_dot_product_attention(*[x.expand(1, 1, 2, 2)] * 3)
loud: kernel.__enter__()  -> flash_sdp_enabled()  traced True   now False
undo: kernel.__exit__(None, None, None)

# the default device
step: x + torch.ones(2)
loud: torch.set_default_device("meta")  -> get_default_device()  traced
undo: torch.set_default_device(None)

# the default of autocast, where the step says autocast
step:
    with torch.autocast("cpu", enabled=False): return x.expand(2, 2) @ x
loud: torch.set_autocast_dtype("cpu", torch.float16)  -> torch.get_autocast_dtype('cpu')
undo: torch.set_autocast_dtype("cpu", torch.bfloat16)

# the default of autocast of another device
step:
    with torch.autocast("cuda", enabled=False): return x.expand(2, 2) @ x
loud: torch.set_autocast_dtype("cuda", torch.bfloat16)  -> torch.get_autocast_dtype('cuda')
undo: torch.set_autocast_dtype("cuda", torch.float16)

# the default of autocast, where it does not
step: x * 2
other: torch.set_autocast_dtype("cpu", torch.float16); torch.set_autocast_dtype("cuda", torch.bfloat16)
undo: torch.set_autocast_dtype("cpu", torch.bfloat16); torch.set_autocast_dtype("cuda", torch.float16)

# autocast
cast = torch.autocast("cpu", dtype=torch.bfloat16)
step: x.expand(2, 2) @ x
loud: cast.__enter__()  -> torch.autocast('cpu')  expected off   got torch.bfloat16
undo: cast.__exit__(None, None, None)

# gradient modes
step: fcg.grad(lambda w: (w ** 2).sum())(x)
other: torch.set_grad_enabled(False)
undo: torch.set_grad_enabled(True)

# inference mode
mode = torch.inference_mode()
step: fcg.grad(lambda w: (w ** 2).sum())(x)
other: mode.__enter__()
undo: mode.__exit__(None, None, None)
"""


@rows(MODES)
def test_mode(row: Row, change: Change) -> None:
    judge(row, change)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.add else out


AROUND = {
    "Doubles()": Doubles,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2 * x),
    "hooks on saved tensors, of torch": torch.autograd.graph.save_on_cpu,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize(("name", "mode"), AROUND.items(), ids=AROUND)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_mode_around_a_call_is_refused(name: str, mode: Any, calls: int) -> None:
    """Around the first call it would be a part of the graph forever, around a later one nothing."""
    step = fcg.graph_step(lambda p, x: (p, fcg.grad(lambda p: (p["w"].exp() + x).sum())(p)))
    state: Any = fcg.place({"w": X})
    for _ in range(calls):
        state, _ = step(state, X)
    name = name.partition(",")[0]
    with (
        mode(),
        pytest.raises(fcg.BakedValueError, match=rf"is called under {re.escape(name)}(.|\n)*inside of"),
    ):
        step(state, X)
    state, grads = step(state, X)
    assert torch.equal(grads["w"], X.exp())
    assert state.generation == calls + 1


@pytest.mark.parametrize("mode", [Doubles, AROUND["autocast"]])
def test_a_mode_in_the_step_is_a_part_of_it(mode: Any) -> None:
    def f(x: Any) -> Any:
        with mode():
            return x.add(1).expand(2, 2) @ x

    assert torch.equal(fcg.graph_fn(f)(X), f(X))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes_around_the_first_call_change_nothing(mode: Any) -> None:
    step = fcg.graph_fn(fcg.grad(lambda w: (w**2).sum()))
    with mode():
        assert step(X).tolist() == [2.0, 4.0]
    assert step(X).tolist() == [2.0, 4.0]
