"""What moves from call to call: iterators, queues, counters, generators of random numbers, and what a step changes.

A trace runs the function once or a few times, a replay never: what moves is refused, also where each run gets the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from tests.host_law import Change, Row, X, judge, rows

ROWS = r"""
# a loop
held = [{"lr": 2.0}, {"lr": 3.0}]
step:
    total = 0.0
    for group in held: total += group["lr"]
    return x * total
change: held[1].update(lr=5.0)
change: held.append({"lr": 1.0})
other: held[1].update(wd=5.0)

# a comprehension
held = [Cfg()]
step: x * sum([c.lr for c in held])
step: x * sum({k: v.lr for k, v in enumerate(held)}.values())
change: held[0].lr = 5.0
change: held.append(Cfg())

# a nested comprehension
held = [[Cfg()], [Cfg()]]
step: x * sum(c.lr for row in held for c in row if c.list)
change: held[1][0].lr = 5.0
change: held[1][0].list.clear()

# items
held = {"a": Cfg(), "b": Cfg(3.0)}
step: x * sum([v.lr for k, v in held.items()]) * {k: v.lr for k, v in held.items()}["b"]
change: held["a"].lr = 5.0
change: held["b"].lr = 5.0

# zip, enumerate, map
a, b, c = [Cfg()], [Cfg()], [Cfg()]
step:
    x = x * sum([p.lr for p, _ in zip(a, a, strict=True)]) * sum([p.lr for _, p in enumerate(b)])
    return x * sum(list(map(lambda p: p.lr, c)))
change: a[0].lr = 5.0
change: b[0].lr = 5.0
change: c[0].lr = 5.0

# a comprehension with a test of identity
b = Cfg(3.0)
held = [Cfg(), b]
step: x * [one for one in held if one is not b][0].lr
step: x * next(one for one in held if one is not b).lr
change: held[0].lr = 5.0
other: b.lr = 5.0

# next, min, islice
b = Cfg(3.0)
held = [Cfg(), b]
step: x * next(iter(held)).lr
step: x * min(held, key=lambda one: one is b).lr
step: x * next(itertools.islice(held, 1)).lr
change: held[0].lr = 5.0
other: b.lr = 5.0

# unpacking
held = [2.0, 3.0]
step:
    first, _ = held
    return x * first
step:
    other, *_ = [*held]
    return x * other
step: x * min(*held)
change: held[0] = 1.0

# pairs that are unpacked
pairs = [["x", 2.0], ["y", 3.0]]
step:
    total = 0.0
    for _, value in pairs: total += value
    return x * total
step: x * (lambda a, b: a[1] + b[1])(*pairs)
step: x * sum(list(zip(*pairs, strict=True))[1])
step: x * [*itertools.chain(*pairs)][1]
change: pairs[0][1] = 5.0

# a loop with a counter
held = [2.0, 1.0]
step:
    place = 0
    while place < len(held): x, place = x * held[place], place + 1
    return x
change: held[1] = 5.0
change: held.append(5.0)

# a while with an else
held = [2.0, 3.0]
step:
    place = 0
    while place < len(held) and held[place] < 2.5: x, place = x * held[place], place + 1
    else: x = x + 1
    return x
change: held[1] = 2.0
any: held[1] = 1.0

# a number that raises
held = [0]
step:
    try: return x * (1 / held[0])
    except ZeroDivisionError: return x
change: held[0] = 4

# a generator of the user
held = [[1.0], [2.0]]
def rates():
    for one in held: yield from one
def all_rates(): yield from rates()
step: x * sum(all_rates())
change: held[1].append(5.0)
change: held[0][0] = 5.0

# what a generator delegates to
held = [1.0, 2.0]
def rates(): yield from held
step: x * sum(rates())
change: held.append(5.0)

# sorted
held = [Cfg(2.0), Cfg(3.0)]
step: x * (1 if sorted(held, key=operator.attrgetter("lr"))[0] is held[0] else 2)
change: held[0].lr = 5.0

# a message for a log
logger = logging.getLogger("of the test of what moves")
step: (logger.debug("scaled %s", tuple(x.shape)), x * 2.0)[1]
other: logger.warning("another")

# what a step makes for itself
held = [2.0, 3.0]
step:
    each, numbers, own = iter(held), (rate for rate in held), collections.deque(held)
    drawn = random.Random(0).random() * float(np.random.default_rng(0).random())
    return x * next(each) * next(each) * next(numbers) * own.popleft() * drawn
change: held[0] = 5.0

# a list that only grows
held = {"losses": [], "lr": 2.0, "last": 1.0}
step:
    held["losses"].append(1.0)
    return x * held["lr"]
change: held["lr"] = 5.0
other: held["losses"].append(2.0); held.update(last=3.0)

# what is set up once
class Model:
    width = None
    def __call__(self, w):
        if self.width is None: self.width = w.shape[0]
        return w * self.width
model = Model()
step: model(x)
change: model.width = 5

# what a collection reports to
counts = [0]
def report(phase, info): counts[0] += 1
gc.callbacks.append(report)
step:
    gc.collect()
    return x * 2.0

# what the step makes, though the collector runs in between
def flags(): yield from (number == 2 for number in range(10))
step:
    rest, table, total = flags(), {"n": 0.0}, 0.0
    for number in range(3):
        if number == 1: gc.collect()
        table["n"] += 2.0 if next(rest) else 3.0
    return x * table["n"] + len(table)

# what is remembered while the step runs
def fibonacci(n, x, known={}):
    if n < 2: return x
    return fibonacci(n - 1, x) + fibonacci(n - 2, x)
class Ring:
    def __init__(self):
        self.held = {}
        self.size, self.itself = len(self.held), self
        self.held["a"] = 2
step:
    known, seen, ring = {}, set(), Ring()
    def term(n):
        if n not in known: known[n] = x if n == 0 else torch.sin(term(n - 1)) + term(n - 1)
        return known[n]
    def walk(n):
        if n in seen or n > 5: return 0
        seen.add(n)
        return x * n + walk(n + 1) + walk(n + 2)
    return term(4) + walk(1) + fibonacci(8, x) + x * ring.itself.held["a"] * len(ring.held.keys())

# a variable of the context that the step sets itself
held = contextvars.ContextVar("held", default=3.0)
step:
    token = held.set({"seen": [], "scale": 2.0})
    try:
        held.get()["seen"].append(x)
        y = held.get()["seen"][0] * held.get()["scale"]
    finally: held.reset(token)
    return y
other: held.set(5.0)

# a variable of the context, once the step has reset it
held = contextvars.ContextVar("held", default=3.0)
step:
    token = held.set(2.0)
    y = x * held.get()
    held.reset(token)
    return y * held.get()
change: held.set(5.0)  -> held

# a registry that is copied at each call
class Registry:
    def __init__(self): self.seen, self.known = set(), {"scale": 2.0}
    def get(self, key):
        seen, known = set(), {}
        seen.update(self.seen)
        known.update(self.known)
        seen.add(str(key))
        known.setdefault(key, 3.0)
        self.seen, self.known = seen, known
        return known[key]
registry = Registry()
step: x * registry.get("a")
change: registry.known["a"] = 5.0

# what is written before it is read
held = SimpleNamespace(last=1.0, table={})
step:
    held.last, held.table["last"] = 3.0, 2.0
    return x * held.last * held.table["last"]
other: held.last = 7.0
other: held.table["last"] = 7.0

# what is put back
held = SimpleNamespace(collector=None, slot=None)
step:
    held.collector = [2.0]
    total = sum(held.collector)
    held.collector = None
    return x * total
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)


REFUSED = r"""
# a clock
step: x * time.perf_counter()
refused: BakedValueError: two traces of it differ.*first t

# a clock in a literal
step: x * torch.tensor(time.perf_counter(), dtype=torch.float64)
refused: BakedValueError: a tensor literal differs between two traces.*f64\[\]@cpu

# a clock among the outputs
step: {"w": x, "time": time.perf_counter()}
refused: BakedValueError: returns Python values that differ between two traces.*\['time'\]  first

# names of outputs that move
count = itertools.count()
step: {f"call{next(count)}": x}
refused: BakedValueError: returns Python values that differ between two traces

# a count that is seen
count = itertools.count()
step: x * next(count)
refused: BakedValueError: two traces of it differ.*first t

# a branch that moves
count = itertools.count()
step: x + 1 if next(count) % 2 else x - 1
refused: BakedValueError: two traces of it differ.*first t

# a shape that moves
count = itertools.count(1)
step: x.repeat(next(count))
refused: BakedValueError: two traces of it differ.*first t

# more calls at the second run
lengths = iter((1, 2))
step:
    for _ in range(next(lengths)): x = x + 1
    return x
refused: BakedValueError: two traces of it differ.*first nothing   then t\d = aten\.add

# fewer calls at the second run
lengths = iter((3, 1))
step:
    for _ in range(next(lengths)): x = x + 1
    return x
refused: BakedValueError: two traces of it differ.*first t\d = aten\.add[^\n]*   then nothing

# calls at the second run alone
lengths = iter((0, 1))
step:
    for _ in range(next(lengths)): x = x + 1
    return x
refused: BakedValueError: two traces of it differ.*first nothing   then t\d = aten\.add

# a count in a global
global CALLS
CALLS = 0
step:
    global CALLS
    CALLS += 1
    return x * 2
refused: SideEffectError: changes a value of the host while it runs.*CALLS  before 1   after 2

# a count in an attribute
class Meter: count = 0
meter = Meter()
step:
    meter.count += 1
    return x * 2
refused: SideEffectError: changes a value of the host while it runs.*meter\.count  before 1   after 2

# a count in a class
class Trainer:
    n = 0
    def step(self, x):
        type(self).n += 1
        return x * (1 if type(self).n else 2)
step = Trainer().step
refused: SideEffectError: changes a value of the host while it runs.*n  before 1   after 2

# a count in a cell
count = 0
step:
    nonlocal count
    count += 1
    return x * 2
refused: SideEffectError: changes a value of the host while it runs.*count  before 1   after 2

# a count in a dict
held, found = {"calls": 0}, collections.defaultdict(int)
step:
    held["calls"] += 1
    found["calls"] += 1
    return x * 2
refused: SideEffectError: changes \d values of the host.*held\["calls"\]  before 1   after 2

# a count of keys, of which each run adds another one
held = {}
step:
    held[time.perf_counter()] = 1
    return x * (5.0 if len(held) > 2 else 2.0)
refused: SideEffectError: changes a value of the host while it runs.*len\(held\)  before 2   after 3

# a mode of torch
step: (torch.set_default_dtype(torch.float64), x * 2)[1]
refused: SideEffectError: torch.get_default_dtype\(\)  before torch.float32   after torch.float64
undo: torch.set_default_dtype(torch.float32)

# a thread
step:
    made = []
    thread = threading.Thread(target=lambda: made.append(x))
    thread.start()
    thread.join()
    return x * len(made)
refused: SideEffectError: starts a thread.*a thread\.py

# a timer
step:
    timer = threading.Timer(0, print)
    timer.start()
    timer.join()
    return x
refused: SideEffectError: starts a thread.*a timer\.py
"""


@rows(REFUSED)
def test_what_moves_is_refused(row: Row, change: Change) -> None:
    judge(row, change)


# What moves, and how a step takes a number from it.
TAKEN = {
    "numbers()": ["next(it)"],
    "(2.0 for _ in itertools.count())": ["next(it)", "walked(it)"],
    "iter([2.0] * 100)": ["next(it)", "walked(it)"],
    "itertools.cycle([2.0])": ["next(it)"],
    "itertools.count()": ["(1 if next(it) >= 0 else 2)"],
    "SimpleNamespace(pairs=zip([2.0] * 9, [1.0] * 9, strict=True))": ["next(it.pairs)[0]"],
    "Numbers()": ["next(it)"],
    "[2.0] * 100": ["it.pop(0)", "functools.partial(it.pop, 0)()", "next(map(it.pop, [0]))"],
    "collections.deque([2.0] * 100)": ["it.popleft()", "functools.partial(it.popleft)()"],
    "dict.fromkeys(range(100), 2.0)": ["it.popitem()[1]"],
    "filled(queue.Queue())": ["it.get()"],
    "filled(queue.SimpleQueue())": [
        "it.get()",
        "functools.partial(it.get, timeout=1)()",
        "(it.put(1.0), 2.0)[1]",
    ],
    "collections.deque([2.0, 2.0, 3.0, 3.0, 3.0, 3.0])": ["(it.rotate(1), 2.0 if it[0] else 1.0)[1]"],
    "np.random.default_rng(0)": ["(2.0 if it.random() < 2 else 1.0)"],
    "SimpleNamespace(rng=np.random.RandomState(0))": ["(2.0 if it.rng.rand() < 2 else 1.0)"],
    "random.Random(0)": ["it.choice([2.0, 2.0])", "(it.shuffle(held), held[0])[1]"],
    "random.Random(0).random": ["(2.0 if it() < 2 else 1.0)"],
    "itertools.repeat(2.0)": [
        "functools.partial(next, it)()",
        "next(map(next, [it]))",
        "it.__next__()",
        "sum(itertools.starmap(it.__next__, [()]))",
        "functools.partial(functools.partial(next), it)()",
        "sum(itertools.islice(it, 1))",
    ],
    "collections.Counter()": ["(it.update(['calls']), 2 if it['calls'] else 1)[1]"],
    "np.zeros(1)": ["(it.__setitem__(0, it[0] + 1), 2)[1]"],
}
MOVING = """
def filled(held):
    for _ in range(40): held.put(2.0)
    return held
def numbers():
    while True: yield 2.0
def walked(it):
    for rate in it: return rate
class Numbers:
    at = 0
    def __iter__(self): return self
    def __next__(self):
        self.at += 1
        return 2.0
held = [2.0, 2.0]
"""


@pytest.mark.parametrize(("held", "taken"), [(held, taken) for held, ways in TAKEN.items() for taken in ways])
def test_what_is_taken_is_refused(held: str, taken: str) -> None:
    row = Row("taken", f"{MOVING}it = {held}", f"return x * {taken}")
    judge(row, Change("refused", "SideEffectError", "takes from what|adds to it|changes"))


@pytest.mark.parametrize(
    "way", ["del it[0]", "del it[:1]", "it[:1] = type(it)()", "it.append(it[0])\ndel it[0]"]
)
@pytest.mark.parametrize("kind", ["list", "bytearray"])
def test_what_is_deleted_from_the_front_is_seen(kind: str, way: str) -> None:
    row = Row("deleted", f"it = {kind}([1] * 9 + [2] * 9)", f"first = float(it[0])\n{way}\nreturn x * first")
    judge(row, Change("refused", "SideEffectError", "changes"))


# What a step does to `h`, and what it reads then.
ADVANCES = {
    "h.list.append(1)": "len(h.list)",
    "h.list.extend([1])": "sum(h.list)",
    "h.list.insert(0, 1)": "len(list(h.list))",
    "h.set.add(object())": "len(h.set)",
    "h.dict[object()] = 1": "len(h.dict)",
    "h.deque.appendleft(1)": "len(h.deque)",
    "h.dict.setdefault('k', []).append(1)": "len(h.dict['k'])",
    "h.default['k'].append(1)": "len(h.default['k'])",
    "h.bytes.append(1)": "len(h.bytes)",
    "list(map(h.list.append, [1]))": "len(h.list)",
    "setattr(h, 'n', h.n + 1)": "h.n",
    "h.list.append(1) or setattr(h, 'n', len(h.list))": "h.n",
    "{'a': h.list.append}['a'](1)": "len(h.list)",
    "h.long.pop()": "len(h.long)",
}
HOLDER = """
h = SimpleNamespace(list=[], set=set(), dict={}, deque=collections.deque(), default=collections.defaultdict(list))
h.bytes, h.n, h.long = bytearray(), 0, [1] * 99
"""


@pytest.mark.parametrize("act", ADVANCES)
def test_what_goes_on_from_call_to_call_is_refused(act: str) -> None:
    row = Row("advances", HOLDER, f"{act}\nreturn x * (1.0 if {ADVANCES[act]} < 50 else 5.0)")
    judge(row, Change("refused", "SideEffectError", "changes|takes"))


@given(
    acts=st.lists(st.sampled_from(["append", "pop", "clear", "put"]), max_size=4),
    read=st.sampled_from(["len", "sum", "first", "nothing"]),
)
def test_exactly_what_goes_on_is_refused(acts: list[str], read: str) -> None:
    """The oracle calls the function forty times: a step that is not refused returns what the function does."""

    def function(held: list[float]) -> float:
        for act in acts:
            if act == "append":
                held.append(2.0)
            elif act == "pop" and held:
                held.pop()
            elif act == "clear":
                held.clear()
            else:
                held[:0] = [3.0] if not held else []
        if read == "nothing":
            return 1.0
        many = {"len": len(held), "sum": sum(held), "first": held[0] if held else 0}[read]
        return 1.0 if many < 20 else 5.0

    twin, held = [1.0], [1.0]
    values = [function(twin) for _ in range(40)]
    step = fcg.graph_fn(lambda x: x * function(held))
    try:
        got = [float(step(torch.ones(()))) for _ in range(40)]
    except (fcg.SideEffectError, fcg.BakedValueError):
        return
    assert got == values, "it goes on from call to call, and nobody said so"


def replaces(places: list[str], *, put_back: bool) -> Callable[[], float]:
    held, depth = SimpleNamespace(n=0, dict={"n": 0}, list=[0]), 0

    def function() -> float:
        nonlocal depth
        old = held.n, held.dict["n"], held.list[0], depth
        for place in places:
            if place == "attribute":
                held.n = held.n + 1
            elif place == "item":
                held.dict["n"] = held.dict["n"] + 1
            elif place == "element":
                held.list[0] = held.list[0] + 1
            else:
                depth = depth + 1
        many = held.n + held.dict["n"] + held.list[0] + depth
        if put_back:
            held.n, held.dict["n"], held.list[0], depth = old
        return 1.0 if many < 20 else 5.0

    return function


@given(
    places=st.lists(st.sampled_from(["attribute", "item", "element", "cell"]), min_size=1, max_size=4),
    put_back=st.booleans(),
)
def test_a_step_may_put_back_what_it_replaces(places: list[str], put_back: bool) -> None:
    """The oracle calls the function forty times."""
    twin, function = (replaces(places, put_back=put_back) for _ in range(2))
    step = fcg.graph_fn(lambda x: x * function())
    if put_back:
        assert [float(step(torch.ones(()))) for _ in range(40)] == [twin() for _ in range(40)]
    else:
        with pytest.raises(fcg.SideEffectError, match=r"changes(.|\n)*To fix"):
            step(torch.ones(()))


@dataclass(frozen=True)
class Rates:
    low: float = 2.0
    high: float = 3.0


ASKED = {
    "dict": lambda: (
        sum({"a": 2.0}.values()) + sum(TABLE.values()) + len([*TABLE.items()]) + len(TABLE.copy())
    ),
    "list": lambda: LEVELS.index(3.0) + LEVELS.count(2.0) + len(LEVELS.copy()),
    "set": lambda: len(NAMES.union({"b"})) + NAMES.isdisjoint({"c"}),
    "dataclass": lambda: replace(RATES, low=1.0).high,
}
TABLE, LEVELS, NAMES, RATES = {"a": 2.0}, [2.0, 3.0], {"a"}, Rates()


@pytest.mark.parametrize("name", ASKED)
def test_what_is_only_asked_takes_no_third_run(name: str, capsys: Any) -> None:
    def step(x: Any) -> Any:
        print("run")  # noqa: T201
        return x * ASKED[name]()

    fcg.graph_fn(step)(X)
    assert capsys.readouterr().out.count("run") == 2


def test_of_a_train_state_only_the_leaves_count() -> None:
    params = {"w": torch.ones(3)}
    step = fcg.graph_step(lambda state: (state.apply_gradients(state.params), {}))
    step(fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1)))
    assert "__dataclass_fields__" not in str(step.explain())


def test_what_a_step_gives_to_other_threads_is_refused() -> None:
    held = [2.0]
    with ThreadPoolExecutor(1) as pool, pytest.raises(fcg.SideEffectError, match="adds to it"):
        fcg.graph_fn(lambda x: x * pool.submit(held.copy).result()[0])(X)


@pytest.mark.parametrize(
    "act", ["x.clone().apply_(lambda v: v + 1)", "x.clone().map_(x, lambda a, b: a + b)"]
)
def test_python_on_each_element_is_refused(act: str) -> None:
    judge(
        Row("each", "", f"return {act}"), Change("refused", "HostSyncError", "calls Python for each element")
    )
