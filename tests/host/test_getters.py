"""What torch, Python and libraries say of themselves: flags, counts, methods that a program replaces."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# how many threads
now = torch.get_num_threads()
step: x * torch.get_num_threads()
change: torch.set_num_threads(now + 1)
undo: torch.set_num_threads(now)

# anomaly mode
def detect(on):
    import warnings
    with warnings.catch_warnings(action="ignore"): torch.autograd.set_detect_anomaly(on, check_nan=False)
step: x * (2 if torch.is_anomaly_enabled() else 3)
change: detect(True)
undo: detect(False)

# whether warnings are repeated
step: x * (2 if torch.is_warn_always_enabled() else 3)
change: torch.set_warn_always(True)
undo: torch.set_warn_always(False)

# the seed
now = torch.initial_seed()
step: x * (torch.initial_seed() % 7)
change: torch.manual_seed(now + 1)
undo: torch.manual_seed(now)

# the limit of recursion
now = sys.getrecursionlimit()
step: x * sys.getrecursionlimit()
change: sys.setrecursionlimit(now + 1)
undo: sys.setrecursionlimit(now)

# how often threads take turns
now = sys.getswitchinterval()
step: x * sys.getswitchinterval()
change: sys.setswitchinterval(2 * now)
undo: sys.setswitchinterval(now)

# the precision of products, by name
step: x * len(torch.get_float32_matmul_precision())
change: torch.set_float32_matmul_precision("medium")
undo: torch.set_float32_matmul_precision("highest")

# whether kernels of mkldnn run
step: x * (2 if torch._C._get_mkldnn_enabled() else 3)
change: torch._C._set_mkldnn_enabled(False)
undo: torch._C._set_mkldnn_enabled(True)

# the strategy of einsum
now = torch.backends.opt_einsum.strategy
step: x * len(torch.backends.opt_einsum.strategy or "")
change: torch.backends.opt_einsum.strategy = "greedy"
undo: torch.backends.opt_einsum.strategy = now

# whether new memory is filled
step: x * (2 if torch.utils.deterministic.fill_uninitialized_memory else 3)
change: torch.utils.deterministic.fill_uninitialized_memory = False
undo: torch.utils.deterministic.fill_uninitialized_memory = True

# the configuration of dynamo
import torch._dynamo.config
now = torch._dynamo.config.recompile_limit
step: x * torch._dynamo.config.recompile_limit
change: torch._dynamo.config.recompile_limit = now + 1
undo: torch._dynamo.config.recompile_limit = now

# the configuration of functorch
import torch._functorch.config
now = torch._functorch.config.activation_memory_budget
step: x * torch._functorch.config.activation_memory_budget
change: torch._functorch.config.activation_memory_budget = 0.5
undo: torch._functorch.config.activation_memory_budget = now

# what all tensors have
step: x * (2 if hasattr(torch.Tensor, "foo") else 3)
step: x * (2 if hasattr(x, "foo") else 3)
change: torch.Tensor.foo = 1

# what torch has
step: x * (2 if hasattr(torch, "foo") else 3)
change: torch.foo = 1
undo: del torch.foo

# a method of tensors
step: x.sigmoid()
step: x * float(torch.tensor(2.0).sigmoid())
change: torch.Tensor.sigmoid = lambda x: x * 3

# an operator of tensors
step: x + 3
change: torch.Tensor.__add__ = lambda x, other: x * other

# a function of torch that is replaced
now = torch.sigmoid
step: torch.sigmoid(x)
change: torch.sigmoid = lambda x: x * 3
undo: torch.sigmoid = now

# a function of a module that is replaced
step: F.relu(x - 1.5)
change: F.relu = lambda x, inplace=False: x * 3

# a mode that the step sets itself
step:
    with torch.no_grad(): return x * (2 if torch.is_grad_enabled() else 3)
other: torch.set_grad_enabled(False)
undo: torch.set_grad_enabled(True)

# a collector that the trace switches off
step: x * (2 if gc.isenabled() else 3)
refused: BakedValueError: gc\.isenabled

# when the collector runs
step: x * gc.get_threshold()[0]

# whether autograd has threads
step: x * (2 if torch._C._is_multithreading_enabled() else 3)
refused: SideEffectError: multithreading
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
