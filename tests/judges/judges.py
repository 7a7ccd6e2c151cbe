"""The judges by name."""

from __future__ import annotations

from types import MappingProxyType

from tests.judges import members, opinfo, optaxes, optimizers
from tests.judges.donation import DONATION
from tests.judges.engines import ENGINES
from tests.judges.graphs import GRAPHS
from tests.judges.tensordicts import TENSORDICTS

__all__ = ["JUDGES"]

# Each has `JUDGE`, its name on the page; `cases(device)`, the names of its cases; and `run(case, lowering, device)`,
# which yields rows.
JUDGES = MappingProxyType(
    {
        "opinfo": opinfo,
        "members": members,
        "torch.optim": optimizers,
        "optax": optaxes,
        "donation": DONATION,
        "engines": ENGINES,
        "graphs": GRAPHS,
        "tensordict": TENSORDICTS,
    }
)
