"""Containers: keys, indices, views, arrays, texts of them, and what is not read of them."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# an item
held = {"lr": 2.0, "deep": {"wd": [1, 3]}}
step: x * held["lr"] * held["deep"]["wd"][1]
change: held["lr"] = 5.0  -> held["lr"]  traced 2.0   now 5.0
change: held["deep"]["wd"][1] = 5  -> held["deep"]["wd"][1]  traced 3   now 5
other: held["step"] = 1
other: held["deep"]["wd"][0] = 5

# a key that is watched itself
key, held = "lr", {"lr": 2.0, "wd": 3.0}
step: x * held[key]
change: key = "wd"  -> key  traced 'lr'   now 'wd'
change: held["lr"] = 5.0  -> held["lr"]  traced
other: held["wd"] = 5.0

# a key that is deleted
held = {"lr": 2.0}
step: x * held["lr"] if "lr" in held else x
change: held.pop("lr")  -> held

# get
held = {"lr": 2.0}
step: x * held.get("lr", 1.0) * held.get("none", 3.0)
change: held["lr"] = 5.0  -> held["lr"]
change: held["none"] = 5.0  -> 'none' in held
other: held["wd"] = 5.0

# a key that is missing
held = {}
step: x * (3.0 if "lr" in held else 2.0)
change: held["lr"] = 1
other: held["wd"] = 1

# a key that is missing at first
held = {}
step:
    try: return x * held["lr"]
    except KeyError: return x
change: held["lr"] = 5.0

# a computed key
held = {"w": 2.0, "lr_w": 3.0, "l0": {"lr": 4.0}}
step: x * sum([held[k] for k in "w"]) * sum([held[f"lr_{n}"] for n in "w"]) * held[f"l{0}"]["lr"] * held["W".lower()]
change: held["w"] = 5.0
change: held["lr_w"] = 5.0
change: held["l0"]["lr"] = 5.0

# a key of a tuple
held = {"a": 2.0, "b": 3.0}
step: x * sum([held[k] for k in ("a", "b")])
change: held["b"] = 5.0

# keys of other kinds
class Colour(enum.Enum): RED = 1
held = {Colour.RED: 2.0, ("a", 1): 3.0, None: 4.0, 0.5: 6.0}
step: x * held[Colour.RED] * held["a", 1] * held[None] * held[0.5]
change: held[Colour.RED] = 5.0
change: held["a", 1] = 5.0
change: held[None] = 5.0
change: held[0.5] = 5.0

# a key by identity
a, b = Cfg(), Cfg()
held = SimpleNamespace(key=a, by_key={a: 2.0, b: 5.0}, all=[a, b])
step: x * held.by_key[held.key]
change: held.key = b
change: held.by_key[a] = 5.0

# identity, equality, hash
a, b = Cfg(), Cfg()
held = SimpleNamespace(key=a, all=[a, b])
step: x * (1.0 if held.key is a else 5.0)
step: x * (1.0 if held.key == a else 5.0)
step: x * {hash(a): 1.0, hash(b): 5.0}[hash(held.key)]
change: held.key = b

# the index of an object
a, b = Cfg(), Cfg()
held = SimpleNamespace(key=a, all=[a, b])
step: x * float(held.all.index(held.key))
change: held.key = b

# is None
held = [Cfg()]
step: x * (2.0 if held[0] is None else 3.0)
change: held[0] = None

# True for 1
held = {"on": 1}
step: x * 2 if held["on"] is True else x
change: held["on"] = True

# the sign of zero
held = [0.0]
step: x / torch.tensor(held)
change: held[0] = -0.0

# the digits of a decimal
held = {"a": decimal.Decimal("1.0"), "b": fractions.Fraction(2)}
step: x * len(str(held["a"])) * float(held["b"])
change: held["a"] = decimal.Decimal("1.00")
change: held["b"] = fractions.Fraction(5)

# a copy
held = {"lr": 2.0}
step: x * held.copy()["lr"]
step: x * dict(held)["lr"]
step: x * {**held}["lr"]
step: x * {"z": held}["z"]["lr"]
change: held["lr"] = 5.0
other: held.update(lr=2.0)

# setdefault
held = {"lr": 2.0}
step: x * held.setdefault("lr", 0.2)
change: held["lr"] = 5.0

# itemgetter
held = {"lr": 2.0}
step: x * operator.itemgetter("lr")(held)
change: held["lr"] = 5.0

# a computed index
held = [Cfg(), Cfg(3.0)]
step: x * held[len(held) - 2].lr
step: x * held[not 1].lr
change: held[0].lr = 5.0
other: held[1].lr = 5.0

# an index that is missing
held = []
step:
    try: return x * held[0]
    except IndexError: return x
change: held.append(2.0)

# a slice
held = [Cfg(), Cfg(3.0)]
step: x * held[:1][0].lr
step: x * (held + held)[2].lr
step: x * list(held)[0].lr
change: held[0].lr = 5.0

# a large list
data = list(range(10_000))
step: x * data[9_000 + len(x)]
change: data[9_002] = 0
other: data[-1] = 0

# all of a long list
held = [1.0] * 400
step: x * sum(held)
change: held[399] = 7.0

# a list in itself
rows = [1.0]
rows += [rows, rows]
for _ in range(64): rows = [rows, rows]
step: x * (rows == rows) * len([*itertools.chain(rows)])

# numbers in nested lists
held = [[[[[[2.0], [0.2]]]]]]
step: x * torch.tensor(held).sum()
change: held[0][0][0][0][1][0] = 5.0

# truth
held = [Cfg()]
step: x * 3.0 if held else x
change: held.clear()
other: held.append(2)
other: held[0].lr = 5.0

# length
held = [1]
step: x * len(held)
change: held.append(1)
other: held[0] = 2

# a length that is compared
held = [1]
step: x * 1.0 if len(held) < 3 else x * 2.0
change: held.extend([1, 1])
any: held.append(1)
other: held[0] = 2

# equality
held = [[2.0]]
step: x * 1.0 if held[0] == [2.0] else x * 2.0
change: held[0][0] = 5.0
other: held[0] = [2.0]

# kind
held = [[1]]
step: x * isinstance(held[0], list)
other: held[0].append(2)

# equal objects anew
held = {"betas": [2.0, 3.0]}
step: x * sum(held["betas"])
change: held["betas"] = [2.0, 5.0]
other: held["betas"] = [2.0, 3.0]

# a list that is handed on
held, printed = [Cfg()], [1]
step: (list(held), print(printed), x * 2.0)[2]
other: held[0].lr = 5.0
other: printed[0] = 2

# a value that cannot be compared, and one that is not equal to itself
class Odd(str):
    def __eq__(self, other): raise ValueError("no")
    __hash__ = str.__hash__
held = SimpleNamespace(text=Odd("a"), nan=float("nan"))
step: x * len(held.text) + (1.0 if held.nan != held.nan else 2.0)
any: held.text = Odd("a")
change: held.text = Odd("ab")  -> held.text
other: held.nan = float("nan")

# a defaultdict, a counter
held, counts = collections.defaultdict(lambda: 1.0, lr=2.0), collections.Counter(lr=3)
step: x * held["lr"] * held.get("wd", 2.0) * counts["lr"]
change: held["lr"] = 5.0
change: held["wd"] = 5.0
change: counts["lr"] = 5

# a user dict, a user list
held, other = collections.UserDict(lr=2.0), collections.UserList([3.0])
step: x * held["lr"] * held.get("lr") * other[0]
change: held["lr"] = 5.0
change: other[0] = 5.0

# all of a user dict, of a user list
held, other = collections.UserDict(lr=2.0), collections.UserList([3.0, 1.0])
step: x * max(map(float, held.values())) * sum(map(float, other)) * len(sorted(held))
change: held["lr"] = 5.0
change: held["another"] = 1.0
change: other[1] = 5.0

# a chain of dicts
held = collections.ChainMap({}, {"lr": 2.0})
step: x * held["lr"] * held.get("k", 1.0) * (3.0 if "z" in held else 2.0)
change: held.maps[0]["lr"] = 5.0
change: held.maps[1]["lr"] = 5.0
change: held.maps[1].update(k=5.0)
change: held.update(z=5.0)

# an ordered dict
held = collections.OrderedDict(a=2.0, b=5.0)
step: x * next(iter(held.values()))
change: held.move_to_end("a")

# a deque
held = collections.deque([2.0, 3.0])
step: x * held[0]
change: held[0] = 5.0
change: held.rotate()

# a set
held, kinds = {2.0}, set()
step: x * sum(held) * (3.0 if "w" in kinds else 1.0)
change: held.add(5.0)
change: kinds.add("w")

# elements in a set
held = set()
step: x * sum([1 + (k in held) for k in range(2)])
change: held.add(1)

# views
held = {"a": 2.0}
items, keys, values = held.items(), held.keys(), held.values()
step: x * sum(value for _, value in items) * len(keys) * max(values)
change: held.update(a=5.0)
change: held.update(b=1.0)

# values
held = {"a": 2.0}
step: x * max(held.values()) * sum([v for v in held.values()])
change: held["a"] = 5.0

# bytes
held = bytearray(b"ab")
view = memoryview(held)
step: x * held[0] * view[1]
change: held[0] = 5
change: held[1] = 5

# an array of Python
held = array.array("d", [2.0])
step: x * held[0]
change: held[0] = 5.0

# an array of C
held, other = (ctypes.c_double * 2)(1.0, 2.0), SimpleNamespace(array=(ctypes.c_int * 3)(1, 2, 3))
step: x * held[1] * sum(other.array[1:]) * len(other.array)
change: held[1] = 5.0
change: other.array[1] = 5
change: other.array = (ctypes.c_int * 4)(1, 2, 3, 0)

# an array
held = np.array([2.0, 3.0])
step: x * held[0]
change: held[0] = 5.0

# an object in an array
held = np.array([None, Cfg()], dtype=object)
step: x * held[1].lr
change: held[1].lr = 5.0
change: held[1] = Cfg(5.0)

# all of an array
held = np.ones(5000)
step: x * float(held.sum())
change: held[4999] = 7.0

# a view of an array
held = np.ones((4, 4))
step: x * float(held.T[0, 3])
change: held[3, 0] = 7.0

# the size of an array
held = SimpleNamespace(array=np.ones(3), on=np.bool_(True), number=np.float32(0.0))
step: x * held.array.size * (2 if held.on else 1) * math.copysign(1.0, held.number)
change: held.array = np.ones(4)
change: held.on = np.bool_(False)
change: held.number = np.float32(-0.0)
other: held.number = np.float32(0.0)

# a text of a container
held = [1, 2]
step: x * len(repr(held))
step: x * len(str(held))
step: x * len(format(held))
step: x * len(f"{held!r:>3}")
step: x * len("{}".format(held))
change: held.append(3)
other: held[:] = [1, 2]

# a text by one way alone
held = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
step: x * len(f"{held['a']}") * len(str(held["b"])) * len(repr(held["c"]))
change: held["a"].append(3)
change: held["b"].append(3)
change: held["c"].append(3)

# a text of what stays
held = {"sizes": [1, 2], "on": torch.device("cpu"), "at": torch.ones(2).shape}
step:
    x = x * len(repr(held) + str(held) + f"{held}" + f"{held!r:>60}")
    return x + len(repr(x.shape) + str(x.dtype) + "{:d}".format(x.shape[0]))

# what a container gives out
class Given: scale = 2.0
class Other(Given): scale = 5.0
def giving(kind):
    class Giving(kind):
        def __getitem__(self, key): return super().__getitem__(key)()
    return Giving
listed, kept = giving(list)([Given]), giving(dict)({0: Given})
others = [giving(collections.OrderedDict)({0: Given}), giving(collections.defaultdict)(None, {0: Given})]
others += [giving(tuple)([Given]), giving(collections.deque)([Given])]
step: x * listed[0].scale * kept[0].scale * sum(each[0].scale for each in others)
change: Given.scale = 3.0  -> scale
change: list.__setitem__(listed, 0, Other)
change: dict.__setitem__(kept, 0, Other)
change: collections.OrderedDict.__setitem__(others[0], 0, Other)
change: dict.__setitem__(others[1], 0, Other)
change: collections.deque.__setitem__(others[3], 0, Other)

# an object that is read through its methods
class Heads:
    def __init__(self): self.cfg, self.table, self.on = Cfg(), {"lr": 2.0}, True
    def __getitem__(self, key): return self.table[key]
    def __iter__(self): yield from [self.cfg.lr]
    def __len__(self): return 1 if self.on else 0
    def __float__(self): return self.cfg.lr
    def __mul__(self, other): return self.cfg.lr * other
    def __enter__(self): return self.cfg
    def __exit__(self, *error): pass
    def held(self): return self.cfg
    @property
    def current(self): return self.cfg
held, other = Heads(), Heads()
step:
    with held as cfg: return x * cfg.lr * other["lr"] * (len(other) + 1)
change: held.cfg.lr = 5.0
change: other.table.update(lr=5.0)
change: other.on = False

# an object that is read through its operators
class Heads:
    def __init__(self): self.cfg = Cfg()
    def __iter__(self): yield from [self.cfg.lr]
    def __float__(self): return self.cfg.lr
    def __mul__(self, other): return self.cfg.lr * other
    @property
    def current(self): return self.cfg
    def held(self): return self.cfg
a, b, c, d, e = Heads(), Heads(), Heads(), Heads(), Heads()
step: x * sum(a) * float(b) * (c * 2) * d.current.lr * e.held().lr
change: a.cfg.lr = 5.0
change: b.cfg.lr = 5.0
change: c.cfg.lr = 5.0
change: d.cfg.lr = 5.0
change: e.cfg.lr = 5.0

# a match of a mapping, of a sequence
held, other = {"l0": {"lr": 2.0}}, [3.0, 1.0]
step:
    match held:
        case {"l0": {"lr": rate}}: x = x * rate
    match other:
        case [rate, *_]: return x * rate
change: held["l0"]["lr"] = 5.0
change: other[0] = 5.0

# a function in a table
held = {"act": torch.relu, "loss": F.mse_loss}
step: held["act"](-x) + held["loss"](x, x + 2.0)
change: held["act"] = torch.abs
change: held["loss"] = F.l1_loss

# a callback in a table
def make(rate): return lambda x: x * rate
held = [make(2.0)]
step: functools.reduce(lambda y, f: f(y), held, x)
change: held[0] = make(5.0)

# a schedule of torch
w = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=2.0)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
step: x * schedule.get_last_lr()[0] * optimizer.param_groups[0]["lr"]
change: optimizer.step(); schedule.step()
change: optimizer.param_groups[0]["lr"] = 5.0

# a rate of an optimizer of torch
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
step: x * optimizer.param_groups[0]["lr"]
change: optimizer.param_groups[0]["lr"] = 5.0
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
