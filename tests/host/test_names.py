"""Names: globals, cells, defaults, builtins, imports, modules, libraries, the environment."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# a global
global LR
LR = 2.0
step: x * LR
change: LR = 5.0  -> LR  traced 2.0   now 5.0
undo: LR = 2.0
any: LR = 2
other: LR = float("2.0")
other: global CLIP; CLIP = 1.0

# a global that becomes another kind of value
global CLIP
CLIP = None
step: x if CLIP is None else x.clamp(max=CLIP)
change: CLIP = 1.0  -> CLIP  traced None   now 1.0

# a global that is deleted
global max
max = min
step: x * max(2.0, 5.0)
change: del max  -> max

# a builtin that is shadowed
step: x * max(2.0, 1.0)
change: global max; max = min

# a builtin made anew
builtins.added_by_hand = lambda: 2.0
step: x * added_by_hand()
change: builtins.added_by_hand = lambda: 5.0  -> added_by_hand

# a number among builtins
builtins.scale_by_hand = 2.0
step: x * scale_by_hand
change: builtins.scale_by_hand = 5.0  -> scale_by_hand

# a name that nothing is bound to
step:
    try: return x * not_there
    except NameError: return x
change: global not_there; not_there = 5.0

# a cell
scale = 2.0
step: x * scale
change: scale = 3.0  -> scale  traced 2.0   now 3.0
undo: scale = 2.0

# a cell that a helper reads
rate = 2.0
def helper(x): return x * rate
step: helper(x)
change: rate = 5.0  -> rate  traced 2.0   now 5.0

# an object in a cell
cfg = Cfg()
step: x * cfg.lr
change: cfg = Cfg(5.0)  -> cfg.lr  traced 2.0   now 5.0
change: cfg.lr = 5.0  -> cfg.lr  traced 2.0   now 5.0
undo: cfg.lr = 2.0
any: cfg = Cfg()
other: cfg.another = 5.0

# one object under two names
first = Cfg()
second = first
step: x * first.lr * second.lr
change: second = Cfg(5.0)

# a local name
cfg = SimpleNamespace(opt=Cfg())
step:
    config = cfg
    options = config.opt
    return x * options.lr
change: cfg.opt.lr = 5.0  -> cfg.opt.lr  traced

# a local name that is assigned twice
cfg = SimpleNamespace(opt=Cfg(), lr=3.0)
step:
    options = cfg.opt
    options = cfg
    return x * options.lr
change: cfg.lr = 5.0  -> cfg.lr  traced
other: cfg.opt.lr = 5.0

# a walrus
cfg = Cfg()
step: x * (lr := cfg.lr) * lr
change: cfg.lr = 5.0  -> cfg.lr  traced

# either of two
held = {"a": Cfg(), "b": Cfg(3.0), "flag": True}
step:
    cfg = held["a"] if held["flag"] else held["b"]
    return x * cfg.lr
change: held["a"].lr = 0.5
change: held["flag"] = False
other: held["b"].lr = 0.5

# the first that there is
held = [None, Cfg()]
step: x * (held[0] or held[1]).lr
change: held[1].lr = 0.5

# a default
def step(x, lr=2.0): return x * lr
change: step.__defaults__ = (5.0,)  -> lr  traced

# an object that is a default
cfg, other = Cfg(), Cfg()
def step(x, config=cfg, *, more=other): return x * config.lr * more.lr
change: cfg.lr = 5.0  -> config.lr  traced
change: other.lr = 5.0  -> more.lr  traced

# a keyword default
def step(x, *, lr=2.0): return x * lr
change: step.__kwdefaults__.update(lr=5.0)  -> lr  traced

# a keyword default of a helper
def scale(x, *, k=2.0): return x * k
defaults = scale.__kwdefaults__
step: scale(x)
change: defaults["k"] = 5.0

# a default that is not used
def helper(x, lr=2.0): return x * lr
step: helper(x, 3.0)
any: helper.__defaults__ = (5.0,)

# functions in a function
global LR
LR, cfg = 2.0, SimpleNamespace(opt=Cfg(), lr=3.0)
step:
    options = cfg.opt
    def loss(params): return params * options.lr
    return loss(x) + sum(row * cfg.lr for row in x) + (lambda y: y * LR)(x)
change: cfg.opt.lr = 5.0  -> cfg.opt.lr  traced
change: cfg.lr = 5.0  -> cfg.lr  traced
change: LR = 5.0  -> LR  traced

# an object handed to a function
cfg = SimpleNamespace(opt=Cfg(), lr=3.0)
def helper(x, config=None, *, options=None): return x * config.lr * options.lr
step:
    y = helper(x * 2 + 1 if x is not None else x, cfg, options=(x is None and cfg.lr) or cfg.opt)
    return y + helper(x, cfg, options=cfg.opt)
change: cfg.opt.lr = 5.0  -> cfg.opt.lr  traced
change: cfg.lr = 5.0  -> cfg.lr  traced

# two objects handed to one function
def read(cfg): return cfg.lr
held = {"a": Cfg()}
held["b"] = held["a"]
step: x * read(held["a"]) * read(held["b"])
change: held["b"] = Cfg(5.0)

# unpacked arguments
global LR
LR, args, named = 2.0, [3.0], {"alpha": 2.0}
def helper(x, by=1.0, alpha=1.0): return x * by * alpha * LR
step: helper(*(x, *args), **named)
change: LR = 5.0  -> LR  traced
change: args[0] = 5.0
change: named["alpha"] = 5.0

# a recursion over a cycle of objects
node = SimpleNamespace(lr=2.0)
node.next = SimpleNamespace(lr=3.0, next=node)
def visit(x, at, n): return visit(x * at.lr, at.next, n - 1) if n else x
step: visit(x, node, 3)
change: node.lr = 5.0  -> node.lr  traced
change: node.next.lr = 5.0  -> node.next.lr  traced

# the end of a long chain
last = first = SimpleNamespace(k=2.0, after=None)
for _ in range(1200): first = SimpleNamespace(k=2.0, after=first)
step:
    link = first
    while link.after is not None: link = link.after
    return x * link.k
change: last.k = 5.0

# a helper that is replaced
def helper(w): return w * 2
step: helper(x)
change: helper = lambda w: w * 3  -> helper  traced as defined then   now defined anew

# a global helper that is defined anew, as by a cell of a notebook
cell = "def helper(w, rate=RATE): return w ACT rate"
def run(rate, act): exec(cell.replace("RATE", rate).replace("ACT", act), globals())
run("2.0", "*")
step: helper(x)
change: run("3.0", "*")  -> rate  traced 2.0   now 3.0
change: run("2.0", "+")  -> helper  traced as defined then   now defined anew
change: run("2.0", "+")  -> make the step anew, `graph_step(fn)`: its graph has the old `helper` in it
other: run("2.0", "*")

# a helper with another default
def made(rate):
    def helper(w, rate=rate): return w * rate
    return helper
helper = made(2.0)
step: helper(x)
change: helper = made(3.0)  -> rate  traced 2.0   now 3.0

# a helper with another closure
def made(rate): return lambda w: w * rate
helper = made(2.0)
step: helper(x)
change: helper = made(3.0)  -> rate  traced 2.0   now 3.0

# a helper that gets other code, as by autoreload
def helper(w): return w * 2
step: helper(x)
change: helper.__code__ = (lambda w: w * 3).__code__  -> helper  traced as defined then   now defined anew

# a step that gets other code
def step(x): return x * 2.0
change: step.__code__ = (lambda x: x * 5.0).__code__

# an attribute of a function
def helper(w): return w * helper.rate
helper.rate = 2.0
step: helper(x)
change: helper.rate = 5.0

# a builtin function as a step
step = torch.exp

# a decorated function
cfg = Cfg()
def twice(fn):
    @functools.wraps(fn)
    def wrapper(x): return fn(fn(x))
    return wrapper
@twice
def step(x): return x * cfg.lr
change: cfg.lr = 5.0  -> cfg.lr  traced

# a function under something of torch
cfg = Cfg()
def scale(x): return x * cfg.lr
wrapped = torch.func.vmap(scale)
step: wrapped(x) + torch.no_grad()(scale)(x) + torch.func.grad(lambda y: scale(y * y).sum())(x)
change: cfg.lr = 5.0  -> cfg.lr  traced

# a function under a transform
cfg = Cfg()
def loss(x): return (x * cfg.lr).sum()
step: fcg.value_and_grad(loss)(x)[0] + fcg.remat(loss)(x) + fcg.graph_fn(loss)(x)
change: cfg.lr = 5.0  -> cfg.lr  traced

# a schedule of the user in an optimizer
cfg = Cfg()
adamw = fcg.optim.adamw(lambda count: count * cfg.lr, weight_decay=0.1)
optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), adamw)
step:
    state = optimizer.init({"w": x})
    for _ in range(2): updates, state = optimizer.update({"w": x}, state, {"w": x * 2})
    return updates["w"]
change: cfg.lr = 5.0  -> cfg.lr  traced

# a callable schedule in a dataclass
@dataclasses.dataclass(frozen=True)
class Optimizer: links: tuple
class Schedule:
    peak = 2.0
    def __call__(self, count): return count * self.peak
schedule = Schedule()
optimizer = Optimizer((functools.partial(lambda rate, count: rate(count), schedule),))
step: x * optimizer.links[0](1)
change: schedule.peak = 5.0  -> peak  traced

# a function of autograd
cfg = Cfg()
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * cfg.lr
    @staticmethod
    def backward(ctx, grad): return grad * cfg.list[0]
step: fcg.value_and_grad(lambda y: Double.apply(y).sum())(x)
change: cfg.lr = 5.0  -> cfg.lr  traced
change: cfg.list[0] = 5.0  -> cfg.list[0]  traced

# the environment
os.environ["RATE"] = "2.0"
os.environ.pop("OTHER_RATE", None)
step: x * float(os.environ["RATE"]) * float(os.environ.get("RATE")) * float(os.getenv("OTHER_RATE", "3.0"))
change: os.environ["RATE"] = "5.0"
undo: os.environ["RATE"] = "2.0"
change: os.environ["OTHER_RATE"] = "5.0"

# an attribute of a module
settings = module("settings", rate=2.0)
step: x * settings.rate
change: settings.rate = 5.0  -> settings.rate  traced
other: settings.another = 5.0

# the namespace of a module
settings = module("settings", rate=2.0)
step: x * vars(settings)["rate"]
change: settings.rate = 5.0

# a module imported in the step
settings = module("settings", rate=2.0)
step:
    import made_settings
    return x * made_settings.rate
change: settings.rate = 5.0
change: module("settings", rate=5.0)

# a name imported in the step
outer, inner = module("outer", rate=3.0), module("outer.inner", rate=2.0)
outer.inner, outer.__path__ = inner, []
step:
    import made_outer as settings
    from made_outer.inner import rate as found
    return x * found * settings.rate
change: inner.rate = 5.0
change: outer.rate = 5.0

# a module found by importlib
settings = module("settings", rate=2.0)
step: x * importlib.import_module("made_settings").rate
change: settings.rate = 5.0

# what a module makes
settings = module("settings", __getattr__=lambda name: 2.0)
step: x * settings.rate
change: settings.rate = 5.0

# what a module has not
settings = module("settings")
step:
    try: return x * settings.rate
    except AttributeError: return x * (3.0 if hasattr(settings, "rate") else 2.0)
change: settings.rate = 5.0

# a function of torch
step: F.softplus(x)
change: F.softplus = lambda x: x * 7.0
other: F.another = 5.0; torch.Tensor.another = 5.0

# what is put into a library
F.own_scale, F.own_settings = lambda x: x * 2.0, SimpleNamespace(rate=2.0)
step: F.own_scale(x) * F.own_settings.rate
change: F.own_scale = lambda x: x * 5.0
change: F.own_settings = SimpleNamespace(rate=5.0)
change: F.own_settings.rate = 5.0

# a number of a library
step: x * math.tau
change: math.tau = 5.0

# another library under the name
global G
G = F
step: G.relu(x)
change: G = SimpleNamespace(relu=lambda x: x * 5.0)

# a function of an installed package
package = packaged("def scaled(x): return x * SETTINGS['rate'] * RATE", SETTINGS={"rate": 2.0}, RATE=3.0)
step: package.scaled(x)
change: package.names["SETTINGS"]["rate"] = 5.0
change: package.names["RATE"] = 5.0

# a registry of an installed package, which may grow
package = packaged("def find(k): return REGISTRY.get(str(k), 2.0) * RATE", REGISTRY={"a": 1.0}, RATE=3.0)
step: x * package.find(x.shape)
other: package.names["REGISTRY"]["b"] = 5.0
change: package.names["RATE"] = 5.0

# all of a container of an installed package
package = packaged("def get(k): return SETTINGS[k]", SETTINGS={"rate": 2.0, "other": 3.0})
step: x * package.get("other") * sum(package.SETTINGS.values())
change: package.names["SETTINGS"]["rate"] = 5.0

# another place to print to
show = functools.partial(print, end="")
stdout = sys.stdout
step: (show(file=sys.stdout), x * 2.0)[1]
other: sys.stdout = sys.__stderr__
undo: sys.stdout = stdout
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
