"""Modules of torch that a step calls, and modules that `from_module` took over."""

from __future__ import annotations

from tests.host_law import Change, Row, judge, rows

ROWS = r"""
# the mode of a module
class Model(nn.Module):
    def forward(self, x): return x * 2 if self.training else x
model = Model()
step: model(x)
change: model.eval()  -> model.training  traced True   now False
undo: model.train()

# modes and settings below
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rest, self.scale = nn.Sequential(nn.ReLU(), nn.Dropout(0.0), nn.LeakyReLU(0.1)), 2.0
    def forward(self, x): return self.rest(x) * self.scale + (1.0 if self.rest[1].training else 2.0)
net = Net()
step: net(x) + net.rest[2](-x)
change: net.rest[1].eval()  -> net.rest["1"].training
change: net.scale = 5.0  -> net.scale
change: net.rest[2].negative_slope = 0.5  -> net.rest["2"].negative_slope
change: net.rest.append(nn.Tanh())
change: net.eval()  -> make one step for training and one for evaluation
undo: net.train()
any: net.rest[0].inplace = 1

# a module in a closure
act = nn.ReLU()
step: act(-x)
change: act = nn.Tanh()  -> act  traced as defined then   now defined anew

# a module in a module
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
    def forward(self, x): return self.act(x)
net = Net()
step: net(-x)
change: net.act = nn.Tanh()  -> net.act  traced as defined then   now defined anew

# a module in a list
layers, held = nn.ModuleList([nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)]), [nn.ReLU()]
place = SimpleNamespace(at=0)
step: layers[place.at](-x) + held[0](-x)
change: layers[0].negative_slope = 0.5
change: layers[0] = nn.Tanh()
change: place.at = 1
change: held[0] = nn.Tanh()

# a module in a sequence
layers = nn.Sequential(nn.LeakyReLU(0.1))
step: layers(-x)
change: layers[0].negative_slope = 0.5
change: layers[0] = nn.Tanh()
change: layers.append(nn.Tanh())

# the forward of one module
act = nn.ReLU()
step: act(x)
change: act.forward = lambda x: x * 5

# the forward of a class of torch
act = nn.ReLU()
step: act(x)
change: nn.ReLU.forward = lambda self, x: x * 5.0

# a hook
act = nn.ReLU()
step: act(x)
change: act.register_forward_hook(lambda module, args, out: out * 5)

# a hook on all modules
act = nn.ReLU()
step: act(x)
change: nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 5)

# a private copy of a module
rate = 2.0
class Scaled(nn.Module):
    def forward(self, x): return x * rate
net = nn.Sequential(Scaled())
apply = fcg.from_module(net)[0]
step: apply({}, {}, x)[0]
change: rate = 5.0  -> rate  traced 2.0   now 5.0
other: net.eval()

# apply, taken from another module
apply = fcg.from_module(nn.ReLU())[0]
step: apply({}, {}, -x)[0]
change: apply = fcg.from_module(nn.Tanh())[0]  -> apply  traced as defined then   now defined anew

# a forward by another name
class Layer(nn.Linear): forward = lambda self, x: F.linear(x, self.weight)
apply, params, buffers = fcg.from_module(Layer(2, 2))
weight = {name: torch.ones_like(value) for name, value in params.items()}
step: apply(fcg.tree.map(lambda w: x.sum() * torch.ones(w.shape), weight), buffers, x)[0]
change: Layer.forward = lambda self, x: x * 1  -> forward

# a forward behind a decorator
def doubled(function):
    @functools.wraps(function)
    def double(*args): return 2 * function(*args)
    return double
class Layer(nn.Linear): forward = doubled(nn.Linear.forward)
apply, params, buffers = fcg.from_module(Layer(2, 2))
weight = {name: torch.ones_like(value) for name, value in params.items()}
step: apply(fcg.tree.map(lambda w: x.sum() * torch.ones(w.shape), weight), buffers, x)[0]
change: Layer.forward = lambda self, x: x * 1  -> forward
"""


@rows(ROWS)
def test_row(row: Row, change: Change) -> None:
    judge(row, change)
