"""Classes: attributes, methods, bases, operators, and how one is defined."""

from __future__ import annotations

import textwrap

import pytest

import functional_cg as fcg
from tests.host_law import Change, Row, X, judge, rows

ROWS = r"""
# an attribute of a class
class Settings: lr = 2.0
step: x * Settings.lr
change: Settings.lr = 5.0  -> Settings.lr  traced 2.0   now 5.0
other: Settings.another = 5.0

# an attribute of a class, by an instance
class Settings: lr = 2.0
settings = Settings()
step: x * settings.lr
change: Settings.lr = 5.0  -> lr  traced 2.0   now 5.0
change: settings.lr = 5.0  -> settings.lr  traced
other: Settings.another = 5.0

# an attribute of the class of an object
class Trainer:
    k = 2.0
    def step(self, x): return x * type(self).k
step = Trainer().step
change: Trainer.k = 5.0

# an attribute of a metaclass
class Kind(type): rate = 2.0
class Trainer(metaclass=Kind): pass
step: x * Trainer.rate
change: Kind.rate = 5.0

# an attribute that a class gets later
class Empty: pass
step: x * getattr(Empty, "scale", 2.0)
change: Empty.scale = 5.0  -> scale

# an attribute of a base
class Base: pass
class Last(Base): pass
Base.lr = 2.0
held = Last()
step: x * held.lr
change: Base.lr = 5.0
change: Last.lr = 5.0

# a shadow above
class Base:
    k = 2.0
    def rate(self): return 3.0
class Middle(Base): pass
class Last(Middle):
    def all(self): return super().k * super().rate()
held = Last()
step: x * held.all()
change: Middle.k = 5.0
change: Middle.rate = lambda self: 5.0

# a method of a trainer
global LR, KEY
LR, KEY = 2.0, "lr"
class Trainer:
    rate = 3.0
    def __init__(self): self.cfg, self._wd, self.__hidden = {"lr": 2.0}, 0.5, 1
    def step(self, x):
        def loss(y): return y * self.cfg["lr"]
        return loss(x) * self.decay(x) * self.wd * self.rate * self.__hidden
    def decay(self, x): return x * self.double(LR)
    @staticmethod
    def double(x): return 2 * x * len(KEY)
    @property
    def wd(self): return self._wd
    @functools.cached_property
    def slow(self): raise AssertionError("it is not run")
    def __call__(self, x): return self.step(x) * (self.slow if x is None else 1)
class Finer(Trainer):
    def step(self, x): return super().step(x) * super().rate
trainer, finer = Trainer(), Finer()
step = trainer.step
change: trainer.cfg["lr"] = 5.0  -> self.cfg["lr"]  traced 2.0   now 5.0
change: trainer._wd = 5.0  -> self._wd  traced
change: trainer._Trainer__hidden = 5  -> self._Trainer__hidden  traced
change: LR = 5.0  -> LR  traced
change: KEY = "key"  -> KEY  traced
change: trainer.rate = 5.0  -> self.rate  traced
other: finer.cfg["lr"] = 5.0

# a method of another object
class Trainer:
    def __init__(self): self.cfg = {"lr": 2.0}
    def step(self, x): return x * self.cfg["lr"]
class Finer(Trainer):
    rate = 3.0
    def step(self, x): return super().step(x) * self.rate
trainer = Finer()
step: trainer.step(x)
change: trainer.cfg["lr"] = 5.0  -> trainer.cfg["lr"]  traced
change: Finer.rate = 5.0

# an object that is called
class Trainer:
    def __init__(self): self.cfg = {"lr": 2.0}
    def __call__(self, x): return x * self.cfg["lr"]
trainer = Trainer()
step: trainer(x)
change: trainer.cfg["lr"] = 5.0  -> trainer.cfg["lr"]  traced

# an object that is a step
class Trainer:
    def __init__(self): self.cfg = {"lr": 2.0}
    def __call__(self, x): return x * self.cfg["lr"]
step = Trainer()
change: step.cfg["lr"] = 5.0  -> self.cfg["lr"]  traced

# a constructor
rate = 2.0
class Scale:
    def __init__(self, x): self.x = x * rate
step: Scale(x).x
change: rate = 5.0  -> rate  traced

# a method
class Held:
    def lr(self): return 2.0
class Derived(Held): pass
held, derived = Held(), Derived()
step: x * held.lr() * derived.lr()
change: Held.lr = lambda self: 5.0  -> lr  traced as defined then   now defined anew
change: Derived.lr = lambda self: 5.0
change: held.lr = lambda: 5.0

# a method of a class
class Held:
    @classmethod
    def lr(cls): return 2.0
step: x * Held.lr()
change: Held.lr = classmethod(lambda cls: 5.0)

# the code of a method
class Rule:
    def scaled(self, x): return x * 2
rule = Rule()
step: rule.scaled(x)
change: Rule.scaled.__code__ = (lambda self, x: x * 5).__code__

# a method that is bound beforehand
def doubled(function):
    @functools.wraps(function)
    def double(*args): return 2 * function(*args)
    return double
def once(self, x): return x * 1
class Held: pass
Held.once, Held.other, Held.third = once, doubled(once), lambda self, x: x * 3
calls = [Held().once, Held().other, Held().third]
step: sum(map(lambda call: call(x), calls))
any: Held.once = lambda self, x: 5 * x
any: Held.other = lambda self, x: 5 * x
any: Held.third = lambda self, x: 5 * x
change: calls.pop()
other: Held.rate = 5.0

# a method that compiled code looks up
def doubled(function):
    @functools.wraps(function)
    def double(*args): return 2 * function(*args)
    return double
def once(self, x): return x * 1
class Held: pass
Held.once, Held.other, Held.third = once, doubled(once), lambda self, x: x * 3
held = Held()
step: sum(operator.methodcaller(name, x)(held) for name in ("once", "other", "third"))
change: Held.once = lambda self, x: 5 * x
change: Held.other = lambda self, x: 5 * x
change: Held.third = lambda self, x: 5 * x

# a partial method
class Held:
    def of(self, x, rate): return x * rate
    scaled = functools.partialmethod(of, rate=2.0)
held = Held()
step: held.scaled(x)
change: vars(Held)["scaled"].keywords.update(rate=5.0)

# a method for another type
class Held:
    @functools.singledispatchmethod
    def rate(self, value): return 2.0
held, register = Held(), vars(Held)["rate"].register
step: x * held.rate(3)
change: register(int, lambda self, value: 5.0)

# a function for another type
@functools.singledispatch
def scale(value): return 2.0
cfg = Cfg()
step: x * scale(cfg)
change: scale.register(Cfg, lambda value: 5.0)

# a function that only looks like one for types
def scale(value): return 2.0
scale.registry, scale.dispatch = {}, lambda kind: 1 / 0
step: scale(x) * x

# a method of all tensors
torch.Tensor.doubled, torch.Tensor.own_rate = lambda self: self * 2.0, 3.0
step: x.doubled() * x.own_rate
change: torch.Tensor.doubled = lambda self: self * 5.0
change: torch.Tensor.own_rate = 5.0

# an operator
class Held:
    def __rmul__(self, x): return x + 1
held = Held()
step: 3.0 * held + x
change: Held.__rmul__ = lambda self, x: x + 2

# a length from now on
class Empty: pass
held = Empty()
step: x * (2.0 if held else 5.0)
change: Empty.__len__ = lambda self: 0

# an equality from now on
class One: pass
one, other = One(), One()
step: x * (5.0 if one == other else 2.0)
change: One.__eq__ = lambda self, other: True

# a call from now on
class Held: ...
held = Held()
step: x * (5.0 if callable(held) else 2.0)
change: Held.__call__ = lambda self: None

# another base
class One: pass
class Two: pass
class Last(One): pass
held = Last()
step: x * (2.0 if isinstance(held, One) else 5.0)
step: x * (2.0 if issubclass(Last, One) else 5.0)
change: Last.__bases__ = (Two,)

# the class of an object
class Settings: pass
held = [Cfg()]
step: x * (2.0 if isinstance(held[0], Settings) else 5.0)
change: held[0] = Settings()

# a class in a list
held = [int]
step: x * held[0]("2") * (2.0 if held[0] is int else 3.0)
change: held[0] = float

# an object of another class
class One:
    def rate(self): return 2.0
class Other:
    def rate(self): return 5.0
held = [One()]
step: x * held[0].rate()
change: held[0] = Other()

# subclasses
class Base: pass
kinds = [type("First", (Base,), {})]
step: x * len(Base.__subclasses__())
change: kinds.append(type("Second", (Base,), {}))

# what a class says of itself
class Config: rates, rate = [1.0, 2.0], 2.0
step: x * vars(Config)["rate"]
step: x * Config.__dict__.get("rate")
step: x * sum(v for k, v in vars(Config).items() if k == "rate")
change: Config.rate = 5.0

# a part of what a class has
class Config: rates = [1.0, 2.0]
step: x * vars(Config)["rates"][0]
change: Config.rates[0] = 5.0

# the names of a class
class Config: pass
step: x * len(Config.__name__) * len(Config.__qualname__)
change: Config.__name__ = "C"
change: Config.__qualname__ = "C"

# what a class says only at times
class Plain: pass
step: x * len(getattr(Plain, "__abstractmethods__", ()))
change: Plain.__abstractmethods__ = frozenset({"forward"})

# a class that keeps what must not be asked
class Failing:
    def __getattr__(self, name): raise KeyError(name)
class Kept:
    settings, rate = Failing(), 2.0
    def go(self): return self.rate
kept = Kept()
step: x * kept.go()
change: Kept.rate = 5.0

# the user's code that nobody runs
class Loud:
    def __getattr__(self, name): raise AssertionError(name) if name != "lr" else AttributeError(name)
    def __getitem__(self, key): raise AssertionError(key)
    def __eq__(self, other): raise AssertionError
    __hash__ = None
    @property
    def rate(self): raise AssertionError
    def __call__(self, x): return 2 * x
call, held, counts = Loud(), [Loud()], collections.defaultdict(int)
partly = functools.partial(call)
step: (call(x) + sum(map(partly, [x])) + held[0](x) + functools.reduce(lambda a, f: f(a), held, x)) * (len(counts) + 1)

"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)


def test_what_a_librarys_class_stores_counts_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textwrap.TextWrapper, "_scale", 2.0, raising=False)
    held = textwrap.TextWrapper()
    step = fcg.graph_fn(lambda x: x * held._scale)  # type: ignore[attr-defined]
    assert step(X).equal(2 * X)
    monkeypatch.setattr(textwrap.TextWrapper, "_scale", 5.0)
    with pytest.raises(fcg.BakedValueError, match="_scale"):
        step(X)
