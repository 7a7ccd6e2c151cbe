"""Attributes: of objects, slots, properties and descriptors, numbers, enum members, tensors."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# an object that only a library hands on
cfg = Cfg()
@contextlib.contextmanager
def held(): yield cfg
step:
    with held() as each: return x * each.table.get("lr")
step:
    with held() as each: return x * vars(each)["table"]["lr"]
step:
    with held() as each: return x * sum(each.table.values())
change: cfg.table["lr"] = 5.0
change: cfg.table = {"lr": 5.0}
other: cfg.another = 5.0

# an attribute
cfg = Cfg()
step: x * cfg.lr
change: cfg.lr = 5.0  -> cfg.lr  traced 2.0   now 5.0
undo: cfg.lr = 2.0
other: cfg.another = 5.0

# an attribute of an attribute
cfg = SimpleNamespace(opt=Cfg(), rest=1)
step: x * cfg.opt.lr
change: cfg.opt = Cfg(5.0)  -> cfg.opt.lr  traced 2.0   now 5.0
change: cfg.opt.lr = 5.0  -> cfg.opt.lr  traced 2.0   now 5.0
other: cfg.rest = 2
other: cfg.opt.table["lr"] = 5.0

# a string, a flag, a dtype
cfg = SimpleNamespace(name="adam", clip=True, dtype=torch.float32)
step: (x.clamp(max=1.0) if cfg.clip else x).to(cfg.dtype) * (2 if cfg.name == "adam" else 3)
change: cfg.name = "sgd"  -> cfg.name  traced 'adam'   now 'sgd'
change: cfg.clip = False  -> cfg.clip  traced True   now False
change: cfg.dtype = torch.int64  -> cfg.dtype  traced torch.float32   now torch.int64

# a tuple
cfg = SimpleNamespace(betas=(2.0, 0.99))
step: x * cfg.betas[0]
change: cfg.betas = (0.8, 0.99)  -> cfg.betas
other: cfg.betas = tuple([2.0, 0.99])

# an object that is a text
cfg = Cfg()
step: (repr(cfg), x * 2)[1]
other: cfg.lr = 5.0

# getattr
cfg = Cfg()
step: x * getattr(cfg, "lr")
change: cfg.lr = 5.0

# getattr of a missing name
cfg = Cfg()
step: x * getattr(cfg, "wd", 2.0)
change: cfg.wd = 5.0

# getattr of a computed name
cfg = SimpleNamespace(cfg0=Cfg())
step: x * getattr(cfg, f"cfg{0}").lr
step: x * getattr(cfg.cfg0, "".join(["l", "r"]))
change: cfg.cfg0.lr = 5.0

# hasattr
cfg = Cfg()
step: x * (3.0 if hasattr(cfg, "wd") else 2.0)
change: cfg.wd = 1

# vars
cfg = SimpleNamespace(cfg0=Cfg())
step: x * vars(cfg)[f"cfg{0}"].lr
step: x * vars(cfg.cfg0)["lr"]
change: cfg.cfg0.lr = 5.0

# the dict of an object
cfg = Cfg()
step: x * cfg.__dict__["lr"]
change: cfg.lr = 5.0

# attrgetter
cfg = Cfg()
step: x * operator.attrgetter("lr")(cfg)
change: cfg.lr = 5.0

# asdict
@dataclasses.dataclass
class Inner: wd: float = 2.0
cfg = Inner()
step: x * dataclasses.asdict(cfg)["wd"]
change: cfg.wd = 5.0

# a copy of a dataclass
@dataclasses.dataclass
class Sizes:
    sizes: list = dataclasses.field(default_factory=list)
    lr: float = 2.0
held = SimpleNamespace(made=Sizes([1, 2]))
step:
    made = dataclasses.replace(held.made, lr=3.0)
    return x * made.lr + made.sizes[1]
change: held.made.sizes = [1, 3]  -> held.made.sizes
other: held.made = copy.deepcopy(held.made)

# a mark for no argument
MARK, OTHER = [0], [0]
held = SimpleNamespace(spare=OTHER)
step: x * (1 if held.spare is MARK else 2)
change: held.spare = MARK  -> held.spare
change: MARK = OTHER  -> MARK
other: held.spare = [1]

# as object stores it
cfg = Cfg()
step: x * object.__getattribute__(cfg, "lr")
change: cfg.lr = 5.0

# a lookup of its own
class Doubled:
    k = 2.0
    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return 2 * value if isinstance(value, float) else value
held = Doubled()
step: x * held.k
change: held.k = 5.0

# an attribute that a dict looks up
class Attributes(dict):
    def __getattr__(self, name):
        try: return self[name]
        except KeyError: raise AttributeError(name) from None
class Lookup(dict): __getattr__ = dict.__getitem__
held, other = Attributes(lr=2.0), Lookup(lr=3.0)
step: x * held.lr * other.lr
change: held["lr"] = 5.0  -> ["lr"]
change: other["lr"] = 5.0

# an attribute that a proxy looks up
class Proxy:
    def __init__(self, of): self._of = of
    def __getattr__(self, name): return self._of[name]
values = {"lr": 2.0}
cfg = Proxy(values)
step: x * cfg.lr
change: values["lr"] = 5.0  -> ["lr"]

# an attribute and a key of one name
class Both(dict): lr = 2.0
one, other = Both(lr=2.0), Both(lr=2.0)
step: x * one["lr"] * one.lr * other.lr * other["lr"]
change: one["lr"] = 5.0
change: one.lr = 5.0
change: other["lr"] = 5.0
change: other.lr = 5.0

# a directory
cfg = Cfg()
step: x * len([name for name in dir(cfg) if name[0] != "_"])
change: cfg.another = 1

# in a format
held = SimpleNamespace(k=2, d={"a": 3})
step: x * float("{0.k}".format(held)) * float("{c.d[a]}".format(c=held))
change: held.k = 5
change: held.d.update(a=5)

# matched
cfg = Cfg()
step:
    match cfg:
        case Cfg(lr=lr): return x * lr
change: cfg.lr = 5.0

# the order of a pattern
class Pair:
    __match_args__ = ("first", "second")
    def __init__(self): self.first, self.second = 2.0, 5.0
pair = Pair()
step:
    match pair:
        case Pair(rate, _): return x * rate
change: Pair.__match_args__ = ("second", "first")

# slots
class Settings: __slots__ = ("lr", "unset")
settings = Settings()
settings.lr = 2.0
step:
    try: return x * settings.unset
    except AttributeError: return x * settings.lr * getattr(settings, "unset", 2.0)
change: settings.lr = 5.0  -> settings.lr
change: settings.unset = 5.0  -> unset

# a field of a struct of C
class Struct(ctypes.Structure): _fields_ = (("rate", ctypes.c_double), ("other", ctypes.c_double))
struct = Struct(2.0, 3.0)
step: x * struct.rate
change: struct.rate = 5.0
other: struct.other = 5.0

# a named tuple
Rates = collections.namedtuple("Rates", "lr wd")
held = SimpleNamespace(rates=Rates(2.0, 1.0), listed=[Rates(2.0, 1.0)])
step: x * held.rates.lr * held.listed[0].lr
change: held.rates = Rates(5.0, 1.0)
change: held.listed[0] = Rates(5.0, 1.0)

# an object of a thread
held = threading.local()
held.lr = 2.0
step: x * held.lr
change: held.lr = 5.0

# a comparison of namespaces
one, other = SimpleNamespace(k=[1]), SimpleNamespace(k=[1])
step: x * (2.0 if one == other else 3.0)
change: one.k.append(2)

# a property
class Held:
    @property
    def lr(self): return self.kept
held = Held()
held.kept = 2.0
step: x * held.lr
change: Held.lr = property(lambda self: 5.0)
change: held.kept = 5.0

# a property without Python
class Held: rate = property(operator.attrgetter("kept.rate"))
held = Held()
held.kept = SimpleNamespace(rate=2.0)
step: x * held.rate
change: held.kept.rate = 5.0

# a cached property
class Held:
    @functools.cached_property
    def rate(self): return self.kept
held = Held()
held.kept = 2.0
step: x * held.rate
change: held.rate = 5.0

# a descriptor
class Rate:
    value = 2.0
    def __get__(self, instance, owner): return self.value
class Held: lr = Rate()
held, rate, other = Held(), vars(Held)["lr"], Rate()
other.value = 5.0
step: x * held.lr
change: rate.value = 5.0
change: Held.lr = other
change: vars(held)["lr"] = 5.0

# what a class gives out, and an instance has later
def plain(self): return 2.0
class Held:
    static, of_class, method = staticmethod(lambda: 2.0), classmethod(lambda cls: 3.0), plain
held = Held()
step: x * held.static() * held.of_class() * held.method()
change: held.static = lambda: 5.0
change: vars(held).update(of_class=lambda: 5.0)
change: held.method = lambda: 5.0

# of a member
class Level(enum.Enum):
    LOW = 1
    def __init__(self, number): self.rate = 2.0
class Weekday(enum.IntEnum): MONDAY = 1
Weekday.MONDAY.rate = 2.0
step: x * Level.LOW.rate * Weekday.MONDAY.rate
change: Level.LOW.rate = 5.0
change: Weekday.MONDAY.rate = 5.0

# of all members
class Level(enum.Enum):
    LOW = 1
    def __init__(self, number): self.rate = 2.0
step: x * sum(one.rate for one in Level)
change: Level.LOW.rate = 5.0

# a method of members
class Level(enum.Enum):
    LOW = 1
    def __init__(self, number): self.rate = 2.0
    def scaled(self): return self.rate
step: x * Level.LOW.scaled()
change: Level.LOW.rate = 5.0
change: Level.scaled = lambda self: 5.0

# of a number
class Count(int):
    def __mul__(self, x): return x * self.rate
count = Count(1)
count.rate = 2.0
step: x * count.rate
change: count.rate = 5.0

# of an equal number
class Count(int): pass
count, other = Count(1), Count(1)
count.rate, other.rate = 2.0, 5.0
held = {"count": count}
step: x * held["count"].rate
change: held.update(count=other)

# an operator of a number
class Count(int):
    def __mul__(self, x): return x * self.rate
count = Count(1)
count.rate = 2.0
step: count * x
change: count.rate = 5.0

# of the class of a string
class Label(str): rate = 2.0
label = Label("a")
step: x * label.rate
change: Label.rate = 5.0

# a shape
held = SimpleNamespace(tensor=torch.zeros(2), other=torch.zeros(5))
step: x * float(held.tensor.shape[0]) * float(held.tensor.size(0)) * (1.0 if held.tensor is held.other else 2.0)
change: held.tensor = held.other  -> held.tensor
other: held.tensor.add_(1)

# which of two tensors
held = SimpleNamespace(tensor=torch.zeros(2), other=torch.zeros(2))
step: x * (1.0 if held.tensor is held.other else 2.0)
change: held.tensor = held.other

# whether parameters are trained
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
def many(which): return float(sum(which))
step: x * many(p.requires_grad for p in model.parameters())
change: model[0].weight.requires_grad_(False)
other: model[0].weight.data.add_(1)

# whether all of them are
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
step: x * float(all(p.requires_grad for p in model.parameters()))
change: model[0].weight.requires_grad_(False)

# whether named ones are
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
step: x * float(sum(p.requires_grad for _, p in model.named_parameters()))
change: model[0].weight.requires_grad_(False)

# whether the first is
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
step: x * float(next(model.parameters()).requires_grad)
change: model[0].weight.requires_grad_(False)

# the sizes of those that are
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
step: x * float(sum(p.numel() for p in model.parameters() if p.requires_grad))
change: model[0].weight.requires_grad_(False)

# an attribute of a parameter
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
step: x * float(sum(getattr(p, "note", 1) for p in model.parameters()))
change: model[0].weight.note = 3

# whether tensors of a list are trained
tensors = [torch.ones(2), torch.ones(3)]
step: x * float(sum(t.requires_grad for t in tensors))
change: tensors[0].requires_grad_(True)
other: tensors[1].add_(1)

# whether they are, by map
tensors = [torch.ones(2), torch.ones(3)]
step: x * float(sum(map(lambda t: t.requires_grad, tensors)))
change: tensors[0].requires_grad_(True)

# whether they are, as a key
tensors = [torch.ones(2), torch.ones(3)]
step: x * float(len(sorted(tensors, key=lambda t: t.requires_grad)[-1]))
change: tensors[0].requires_grad_(True)
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
