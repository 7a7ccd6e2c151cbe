"""What a step returns as it is: the caller sees all of it, though no instruction reads it."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# an object that another one takes the place of
@dataclasses.dataclass(frozen=True)
class Rate: value: object
held = SimpleNamespace(rate=Rate(1))
step: {"y": x, "rate": held.rate}
step: (x, [held.rate])
change: held.rate = Rate(2)
change: held.rate = Rate(True)
change: held.rate = Rate(1.0)
other: held.rate = Rate(1)

# a dict
held = SimpleNamespace(table={"lr": 1.0, "deep": {"wd": [1, 2]}})
step: {"y": x, "table": held.table}
change: held.table["lr"] = 2.0
change: held.table["deep"]["wd"][1] = 3
change: held.table = {"lr": 2.0, "deep": {"wd": [1, 2]}}
other: held.table = {"lr": 1.0, "deep": {"wd": [1, 2]}}

# an element of a list of a cell
table = [[1, 2], [3]]
step: (x, table[0])
change: table[0].append(5)
change: table[0] = [1, 4]
other: table[1].append(5)

# a node that the step makes of an object
@dataclasses.dataclass(frozen=True)
class Rate: value: object
Node = fcg.tree.register_dataclass(dataclasses.make_dataclass("Node", ["x", "rate"]))
held = SimpleNamespace(rate=Rate(1))
step: Node(x, held.rate)
change: held.rate = Rate(2)

# a node as it is
Node = fcg.tree.register_dataclass(dataclasses.make_dataclass("Node", ["x", "rate"]))
held = SimpleNamespace(node=Node(1.0, 2.0))
step: (x, held.node)
change: held.node = Node(1.0, 3.0)
change: held.node.rate = 3.0
other: held.node = Node(1.0, 2.0)

"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
