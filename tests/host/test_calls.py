"""Calls: partials, caches, weak references, locks and queues; and every place of a value times every way to read it."""

from __future__ import annotations

from itertools import product

import pytest

from tests.host_law import Change, Row, judge, parse, rows
from tests.shares import share

ROWS = r"""
# a partial
held = SimpleNamespace(f=functools.partial(torch.mul, other=2.0))
step: held.f(x)
change: held.f = functools.partial(torch.mul, other=5.0)

# a partial that is bound anew
def scaled(x, by): return x * by
held = functools.partial(scaled, by=2.0)
step: held(x)
change: held = functools.partial(scaled, by=5.0)
change: held.keywords.update(by=5.0)

# a step that is a partial
cfg = Cfg()
step = functools.partial(lambda config, x, lr: x * lr * config.lr, cfg, lr=2.0)
change: cfg.lr = 5.0  -> self.args[0].lr  traced 2.0   now 5.0
change: step.keywords.update(lr=5.0)  -> self

# what is called just now
cfg = Cfg()
step: x * (lambda one: one)(cfg).lr
step: x * typing.cast(Cfg, cfg).lr
step: x * functools.partial(lambda one: one, cfg)().lr
change: cfg.lr = 5.0

# a context
cfg = Cfg()
step: x * contextlib.nullcontext(cfg).__enter__().lr
step: x * (lambda lr, **rest: lr)(**vars(cfg))
change: cfg.lr = 5.0

# the default of get
cfg = Cfg()
held = {}
step: x * held.get("zz", cfg).lr
change: cfg.lr = 5.0
change: held["zz"] = Cfg(5.0)

# a bound method of a container
held = {"lr": 2.0, "wd": 3.0}
get = held.get
step: x * get("lr")
change: held["lr"] = 5.0
other: held["wd"] = 5.0

# a cache that holds a dict
@functools.cache
def settings(): return {"lr": 2.0}
settings()
step: x * settings()["lr"]
change: settings().update(lr=5.0)

# a cold cache
@functools.lru_cache
def settings(name): return SimpleNamespace(lr=2.0)
step: x * settings("a").lr
change: settings("a").lr = 5.0
other: settings("b")

# a cache that is emptied
rate = [2.0]
@functools.cache
def settings(one): return rate[0] * one
settings(1.0)
step: x * settings(1.0)
change: rate[0] = 5.0; settings.cache_clear()

# a cached method
class Config:
    @functools.cache
    def table(self): return [2.0]
config = Config()
config.table()
step: x * config.table()[0]
change: config.table()[0] = 5.0

# a cache of shapes
@functools.lru_cache
def half(n): return n / 2
step: x * half(x.shape[0])
other: half(64)

# a pattern
pattern = re.compile("([0-9]+)")
step: x * float(pattern.match("25")[1])
other: pattern.match("7")

# a weak reference
cfg = Cfg()
held, proxy = weakref.ref(cfg), weakref.proxy(cfg)
step: x * held().lr
step: x * proxy.lr
change: cfg.lr = 5.0

# a weak reference to what goes
held = [Cfg()]
found = weakref.ref(held[0])
step: x * (9.0 if found() is None else found().lr)
change: held.clear(); gc.collect()

# weak dicts
key, one, other = Cfg(), Cfg(), Cfg(5.0)
key.kept = [one, other]
keys, values = weakref.WeakKeyDictionary({key: 2.0}), weakref.WeakValueDictionary({"k": one, "l": key})
step: x * keys[key] * values["k"].lr * values["l"].lr
change: keys[key] = 5.0
change: values["k"] = other
change: key.lr = 5.0

# a variable of the context
held, other = contextvars.ContextVar("held", default=2.0), contextvars.ContextVar("other")
other.set(Cfg())
step: x * held.get() * other.get().lr
change: held.set(5.0)
change: other.get().lr = 5.0

# an event, a level, a lock, a queue
event, lock, waiting = threading.Event(), threading.Lock(), queue.SimpleQueue()
logger = logging.getLogger("of the test of levels")
logger.setLevel(logging.WARNING)
step:
    if event.is_set(): x = x * 3.0
    if logger.isEnabledFor(logging.INFO): x = x * 5.0
    return x * (7.0 if lock.locked() else 2.0) * waiting.empty()
change: event.set()
change: logger.setLevel(logging.DEBUG)
change: lock.acquire()
change: waiting.put(1)

# a lock that is held meanwhile
lock = threading.Lock()
step:
    with lock: return x * 2.0
other: pass

# what a copy reads
held = SimpleNamespace(copied=2.0)
class Factor:
    def __init__(self, factor=1.0): self.factor = factor
class ByHand(Factor):
    def __deepcopy__(self, memo): return ByHand(held.copied)
class WithHelp(Factor):
    def __deepcopy__(self, memo): return WithHelp(copy.copy(held).copied)
class KeptAtFirst:
    __slots__ = ("factor",)
    def __deepcopy__(self, memo): return KeptAtFirst()
    def __getattr__(self, name):
        if name != "factor": raise AttributeError(name)
        self.factor = held.copied
        return self.factor
class Scaling(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.parts = scale, [nn.Identity() for _ in "123"]
    def forward(self, x): return x * self.scale.factor
by_hand, with_help, at_first = (fcg.from_module(Scaling(kind()))[0] for kind in (ByHand, WithHelp, KeptAtFirst))
step: by_hand({}, {}, x)[0] + with_help({}, {}, x)[0] + at_first({}, {}, x)[0]
change: held.copied = 5.0  -> copied

# a copy of what only a library hands on
cfg = Cfg()
@contextlib.contextmanager
def held(): yield cfg
step:
    with held() as each: return x * copy.copy(each).lr
step:
    with held() as each: return x * copy.deepcopy(each).lr
change: cfg.lr = 5.0

# what a copy with help reads
held = SimpleNamespace(copied=2.0)
class WithHelp:
    def __init__(self, factor=1.0): self.factor = factor
    def __deepcopy__(self, memo): return WithHelp(copy.copy(held).copied)
class Scaling(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.parts = scale, [nn.Identity() for _ in "123"]
    def forward(self, x): return x * self.scale.factor
apply = fcg.from_module(Scaling(WithHelp()))[0]
step: apply({}, {}, x)[0]
change: held.copied = 5.0  -> copied

# a function that a library alone holds
scale = 2.0
class Scaled:
    def __init__(self, value): self.value = value
def flat(scaled): return [scaled.value * scale], None
torch.utils._pytree.register_pytree_node(Scaled, flat, lambda children, _: Scaled(*children))
step: torch.utils._pytree.tree_flatten(Scaled(x))[0][0]
change: scale = 5.0  -> scale  traced 2.0   now 5.0

# a function that a library alone holds, set aside by the collector
scale = 2.0
class Scaled:
    def __init__(self, value): self.value = value
def flat(scaled): return [scaled.value * scale], None
torch.utils._pytree.register_pytree_node(Scaled, flat, lambda children, _: Scaled(*children))
del flat
gc.freeze()
step: torch.utils._pytree.tree_flatten(Scaled(x))[0][0]
change: scale = 5.0  -> scale  traced 2.0   now 5.0
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)


# Where `cfg` lives, which `read` gives a number of.
PLACES = parse(r"""
# a global
global CELL
CELL = cfg
step: x * read(CELL)

# a closure
step: x * read(cfg)

# a default
def scale(x, held=cfg): return x * read(held)
step: scale(x)

# an attribute
class Trainer:
    def __init__(self): self.cfg = cfg
    def step(self, x): return x * read(self.cfg)
step = Trainer().step

# a class
class Trainer:
    held = cfg
    def step(self, x): return x * read(type(self).held)
step = Trainer().step

# slots
class Held: __slots__ = ("cfg",)
held = Held()
held.cfg = cfg
step: x * read(held.cfg)

# a tuple
held = (1, cfg)
step: x * read(held[-1])

# a list that is walked
held = [cfg, cfg]
step:
    for each in held: x = x * read(each)
    return x

# a dict of lists
held = {"a": [cfg]}
step: x * sum([read(each) for each in held["a"]])

# a linked list
held = SimpleNamespace(next=SimpleNamespace(next=None, cfg=cfg), cfg=None)
step:
    node = held
    while node is not None:
        if node.cfg is not None: x = x * read(node.cfg)
        node = node.next
    return x

# a partial that is the step
step = functools.partial(lambda held, x: x * read(held), cfg)

# a partial of the step
step: functools.partial(lambda held, y: y * read(held), cfg)(x)

# an object of the step
class Loss:
    def __init__(self, held): self.held = held
    def __call__(self, x): return x * read(self.held)
step: Loss(cfg)(x)

# grad
def loss(x, y, held): return (x * y * read(held)).sum()
step: fcg.grad(loss)(x, x.detach(), cfg)

# grad, by name
def loss(x, *, held): return (x * x * read(held)).sum()
step: fcg.value_and_grad(loss)(x, held=cfg)[1]

# torch.func
step: torch.func.grad(lambda y, held: (y * y * read(held)).sum())(x, cfg)

# vmap
step: torch.func.vmap(lambda y: y * read(cfg))(x)

# a module
class Net(nn.Module):
    def forward(self, x, held): return x * read(held)
apply, params, buffers = fcg.from_module(Net())
step: apply(params, buffers, x, cfg)[0]

# a backward
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * read(cfg)
step: fcg.grad(lambda y: Double.apply(y).sum())(x)

# a generator
def inner(): yield read(cfg)
def outer(): yield from inner()
step: x * sum(outer())

# stars
held, named = [cfg], {"each": cfg}
def first(each): return read(each)
step: x * first(*held) * first(**named)

# reduce
held = [cfg, cfg]
step: x * functools.reduce(lambda total, each: total + read(each), held, 0.0)

# filter and chain
held = [cfg]
step: x * sum(read(c) for c in filter(lambda c: read(c) > 0, itertools.chain(held, [])))

# sorted
held = [cfg]
step: x * read(sorted(held, key=read)[0])

# a property
class Trainer:
    @property
    def held(self): return cfg
trainer = Trainer()
step: x * read(trainer.held)

# a descriptor
class Held:
    def __get__(self, instance, owner): return cfg
class Trainer: held = Held()
trainer = Trainer()
step: x * read(trainer.held)

# a lookup of a class
class Proxy:
    def __getattr__(self, name): return cfg
proxy = Proxy()
step: x * read(proxy.anything)

# a context
@contextlib.contextmanager
def held(): yield cfg
step:
    with held() as each: return x * read(each)

# a cache
@functools.lru_cache
def held(): return cfg
step: x * read(held())

# cond
step: fcg.cond(x.sum() > 0, lambda y: y * read(cfg), lambda y: y, x)

# a bound method
class Held:
    def __init__(self): self.cfg = cfg
    def read(self): return read(self.cfg)
reader = Held().read
step: x * reader()

# a deep copy
step: x * read(copy.deepcopy(cfg)) * read(copy.copy(cfg))

# unpacking
held = [cfg, 1, 2]
step:
    first, *_ = [*held]
    return x * read(first)

# max
held = {"a": cfg}
step: x * read(max(held.values(), key=lambda each: read(each)))
""")

# How a number is read of `c`, and how it changes.
READS = {
    "c.lr": "c.lr = 5.0",
    "getattr(c, 'lr')": "c.lr = 5.0",
    "getattr(c, ''.join(['l', 'r']))": "c.lr = 5.0",
    "vars(c)['lr']": "c.lr = 5.0",
    "{**vars(c)}['lr']": "c.lr = 5.0",
    "operator.attrgetter('lr')(c)": "c.lr = 5.0",
    "c.table['lr']": "c.table['lr'] = 5.0",
    "c.table.get('lr', 0.0)": "c.table['lr'] = 5.0",
    "sum(c.table.values())": "c.table['lr'] = 5.0",
    "sum(v for _, v in c.table.items())": "c.table['lr'] = 5.0",
    "dict(c.table)['lr']": "c.table['lr'] = 5.0",
    "c.list[0]": "c.list[0] = 5.0",
    "c.list[len(c.list) - 2]": "c.list[0] = 5.0",
    "c.list[:1][0]": "c.list[0] = 5.0",
    "sum(c.list)": "c.list[0] = 5.0",
    "max(*c.list)": "c.list[0] = 5.0",
    "sum(list(map(float, c.list)))": "c.list[0] = 5.0",
    "next(a for a, _ in zip(c.list, c.list, strict=True))": "c.list[0] = 5.0",
    "counted(c)": "c.list[0] = 5.0",
    "unpacked(c)": "c.list[0] = 5.0",
    "matched(c)": "c.lr = 5.0",
    "matched(c.table)": "c.table['lr'] = 5.0",
    "matched(c.list)": "c.list[0] = 5.0",
    "c.lr if c.list else 0.0": "c.lr = 5.0",
    "3.0 if c.list else 1.0": "c.list.clear()",
    "float(len(c.list))": "c.list.append(1.0)",
    "3.0 if 'wd' in c.table else 1.0": "c.table.update(wd=1)",
    "3.0 if hasattr(c, 'wd') else 1.0": "c.wd = 1",
    "copy.copy(c).lr": "c.lr = 5.0",
    "copy.deepcopy(c).table['lr']": "c.table['lr'] = 5.0",
    "c.lr + c.list[0] + c.table['lr']": "vars(c).update(lr=5.0, table={'lr': 5.0}, list=[5.0, 1.0])",
}
HELPERS = """
cfg = Cfg()
def counted(cfg):
    total, place = 0.0, 0
    while place < len(cfg.list): total, place = total + cfg.list[place], place + 1
    return total
def unpacked(cfg):
    lr, _ = cfg.list
    return lr
def matched(cfg):
    match cfg:
        case Cfg(lr=lr) | {"lr": lr} | [lr, *_]: return lr
"""
# Each place with some reads, each read in some places; all of them take a minute.
PAIRED = share(product(PLACES, READS), 10)


@pytest.mark.parametrize(("place", "read"), PAIRED, ids=lambda value: getattr(value, "name", value))
def test_each_place_by_each_read(place: Row, read: str) -> None:
    row = Row(place.name, f"{HELPERS}def read(c): return {read}\n{place.setup}", place.step)
    judge(row, Change("change", READS[read].replace("c.", "cfg.").replace("(c)", "(cfg)")))


# -- what is not written in Python: it is called, handed on, partly bound ---------------------------------------------

# What holds a number, by what it is found there, and how it changes.
HOLDERS = {
    "dict": ("{'k': 2.0}", "'k'", "held.update(k=5.0)"),
    "ordered dict": ("collections.OrderedDict(k=2.0)", "'k'", "held.update(k=5.0)"),
    "proxy": ("types.MappingProxyType({'k': [2.0]})", "'k'", "held['k'][0] = 5.0"),
    "list": ("[0.0, 2.0]", "1", "held[1] = 5.0"),
    "deque": ("collections.deque([0.0, 2.0])", "1", "held[1] = 5.0"),
    "array": ("np.array([0.0, 2.0])", "1", "held[1] = 5.0"),
    "array of lists": ("np.array([[0.0], [2.0], None], dtype=object)", "1", "held[1][0] = 5.0"),
    "record": ("np.array([(2.0,)], dtype=[('k', float)]).view(np.recarray)", "0", "held.k[0] = 5.0"),
    "object": ("Held()", "'k'", "held.k = 5.0"),
    "slots": ("Slotted()", "'k'", "held.k = 5.0"),
    "namespace": ("SimpleNamespace(k=2.0)", "'k'", "held.k = 5.0"),
}
# What gives the number, all of it compiled: of a container, and of an object.
GETTERS = {
    "bound": ("held.__getitem__", "held.__getattribute__"),
    "partial": ("functools.partial(operator.getitem, held)", "functools.partial(getattr, held)"),
    "partial of a partial": (
        "functools.partial(functools.partial(operator.getitem), held)",
        "functools.partial(functools.partial(getattr), held)",
    ),
    "getter": (
        "functools.partial(operator.itemgetter(key), held)",
        "functools.partial(operator.attrgetter(key), held)",
    ),
}
CALLERS = {
    "the step": "get(key)",
    "map": "next(iter(list(map(get, [key]))))",
    "a map that is walked": "next(number for number in map(get, (key,)))",
    "starmap": "next(iter(list(itertools.starmap(get, [(key,)]))))",
    "a partial": "functools.partial(get, key)()",
    "an unpacked map": "max(*map(get, [key, key]), key=number)",
}
NUMBER = """
class Held:
    def __init__(self): self.k = 2.0
class Slotted:
    __slots__ = ("k",)
    def __init__(self): self.k = 2.0
def number(found): return float(np.asarray(getattr(found, "k", found), dtype=float).ravel()[0])
"""
COMPILED = [
    (holder, getter, caller)
    for (n, holder), (m, getter), (o, caller) in product(*map(enumerate, (HOLDERS, GETTERS, CALLERS)))
    if (n + m + o) % 2 == 0 and (getter != "getter" or caller == "the step")
]


@pytest.mark.parametrize(("holder", "getter", "caller"), COMPILED)
def test_what_compiled_callables_read(holder: str, getter: str, caller: str) -> None:
    held, key, change = HOLDERS[holder]
    get = GETTERS[getter][holder in ("object", "slots", "namespace")]
    call = "get()" if getter == "getter" else CALLERS[caller]
    row = Row("compiled", f"{NUMBER}held, key = {held}, {key}\nget = {get}", f"return x * number({call})")
    judge(row, Change("change", change))
