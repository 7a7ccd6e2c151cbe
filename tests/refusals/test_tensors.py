"""Tensors that a step may not use: foreign ones, inputs written in place, swapped memory, sparse ones."""

import numpy
import pytest
import torch
import torch.nn.functional as F

import functional_cg as fcg
from functional_cg import (
    AliasError,
    CaptureError,
    ForeignTensorError,
    HostSyncError,
    LayoutError,
    ReadOnlyError,
)
from tests.refusals.judge import a_batch, a_state, accepted, assert_refused, metric, same

TABLE = torch.ones(3)
PARAMETER = torch.nn.Parameter(torch.ones(3))
ARRAY = numpy.ones(3, dtype=numpy.float32)
LINEAR = torch.nn.Linear(3, 2)
EMBEDDING = torch.nn.Embedding(4, 3, sparse=True)


# -- foreign tensors --------------------------------------------------------------------------------------------


def read(s, b):
    return s["w"] + TABLE


def read_a_view(s, b):
    return TABLE[1:] * 2


def read_a_parameter(s, b):
    return s["w"] * PARAMETER


def read_by_a_module(s, b):
    return LINEAR(b["x"])


def read_its_data(s, b):
    return TABLE.data * 2


def read_in_a_loss(s, b):
    return fcg.value_and_grad(lambda w: (w * TABLE).sum())(s["w"])


def read_in_a_backward(s, b):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * TABLE

    return fcg.grad(lambda w: Twice.apply(w).sum())(s["w"])


def read_in_a_list(s, b):
    return torch.stack([s["w"], TABLE])


def read_by_keyword(s, b):
    return torch.clamp(s["w"], min=TABLE)


def read_its_list(s, b):
    return s["w"] * TABLE.tolist()[0]


def read_its_array(s, b):
    return s["w"] * float(TABLE.numpy()[0])


@pytest.mark.parametrize(
    "function",
    [
        read,
        read_a_view,
        read_a_parameter,
        read_by_a_module,
        read_its_data,
        read_in_a_loss,
        read_in_a_backward,
        read_in_a_list,
        read_by_keyword,
        read_its_list,
        read_its_array,
    ],
)
def test_foreign_tensor_that_is_read(function):
    match = "reads a tensor that is in neither the state nor the inputs"
    assert_refused(metric(function), ForeignTensorError, match, where=function)


def returned_as_metric(s, b):
    return s, TABLE


def returned_as_state(s, b):
    return {**s, "w": TABLE}, {}


@pytest.mark.parametrize(
    ("function", "path"),
    [(returned_as_metric, r"metrics  f32\[3\]"), (returned_as_state, r"state\['w'\]  f32\[3\]")],
)
def test_foreign_tensor_that_is_returned(function, path):
    assert_refused(function, ForeignTensorError, rf"returns a tensor that is in neither(.|\n)*{path}@cpu")


class Tables:
    mask = torch.ones(3)

    def __init__(self):
        self.rows = {"first": torch.ones(3)}

    def __call__(self, s, b):
        return s, {"out": s["w"] * self.rows["first"]}


def names_of_tensors():
    """Steps that read a tensor, and how they call it; empty where no name leads to it."""
    own, tables, stacked = torch.ones(3), Tables(), [torch.ones(3)]
    return [
        (lambda s, b: own * s["w"], "own"),
        (lambda s, b: fcg.grad(lambda w: (w * TABLE).sum())(s["w"]), "TABLE"),
        (lambda s, b: NET.scale + s["w"], "NET.scale"),
        (lambda s, b: stacked[0] + s["w"], "stacked[0]"),
        (lambda s, b: Tables.mask + s["w"], "Tables.mask"),
        (lambda s, b: own, "own"),
        (lambda s, b: [s["w"] + row for row in stacked], "stacked[0]"),
        (tables, 'self.rows["first"]'),
    ]


@pytest.mark.parametrize(("read", "name"), names_of_tensors())
def test_foreign_tensor_is_called_by_the_name_that_the_code_has_for_it(read, name):
    function = read if isinstance(read, Tables) else metric(read)
    with pytest.raises(ForeignTensorError, match="in neither the state nor the inputs") as caught:
        fcg.graph_step(function)(a_state(), a_batch())
    fix = f"`constants=({name or 'tensor'},)`"
    of_a_module = name == "NET.scale"  # a buffer, which training changes
    assert (fix in str(caught.value)) is not of_a_module
    assert not of_a_module or "pass `NET.scale` as an input or in the state" in str(caught.value)
    row = str(caught.value).splitlines()[1].split()
    assert row[0] == name or (not name and row[0] == "f32[3]@cpu") or row[-2:] == ["is", name]


def test_array_that_is_returned():
    assert_refused(
        metric(lambda s, b: ARRAY), ForeignTensorError, r"metrics\['out'\]  expected a tensor   got ndarray"
    )


def from_numpy(s, b):
    return s["w"] + torch.from_numpy(ARRAY)


def as_tensor(s, b):
    return s["w"] + torch.as_tensor(ARRAY)


def tensor_of_array(s, b):
    return s["w"] + torch.tensor(ARRAY)


def index_by_array(s, b):
    return b["x"][numpy.array([0, 2])]


@pytest.mark.parametrize("function", [from_numpy, as_tensor, tensor_of_array, index_by_array])
def test_array_that_is_read(function):
    assert_refused(metric(function), ForeignTensorError, "reads an array of numpy", where=function)
    # What the message advises: a literal is a constant of the step.
    assert same(accepted(metric(lambda s, b: torch.tensor(ARRAY.tolist())))["out"], torch.ones(3))


def array_operand(s, b):
    return s["w"] + ARRAY


def test_array_operand_is_a_host_sync():
    match = r"`ARRAY` is an array of numpy, which computes on the host: pass it as an input"
    assert_refused(metric(array_operand), HostSyncError, match, where=array_operand)


GENERATOR = numpy.random.default_rng(0)


def array_drawn(s, b):
    return s["w"] + numpy.random.rand(3).astype(numpy.float32)


def array_of_generator(s, b):
    return s["w"] + 2 * GENERATOR.normal(size=3)


@pytest.mark.parametrize("function", [array_drawn, array_of_generator])
def test_array_that_is_drawn_wants_a_key(function):
    match = r"is drawn by numpy, once and on the host: draw it from a key(.|\n)*`fcg.random.uniform\(key, shape\)`"
    assert_refused(metric(function), HostSyncError, match, where=function)


def test_leaf_of_another_state():
    old = fcg.place({"v": torch.ones(3)})
    leaf = old["v"]

    def read_leaf(s, b):
        return s["w"] + leaf

    def read_handle(s, b):
        return s["w"] + old["v"]

    for function in (read_leaf, read_handle):
        match = r"f32\[3\]@cpu in aten.add.Tensor(.|\n)*as an input or in the state.\n"
        assert_refused(metric(function), ForeignTensorError, match, where=function)
    assert same(old["v"], torch.ones(3))


def test_leaf_of_the_donated_state():
    state = a_state()
    leaf = state["w"]

    def read_old(s, b):
        return {**s, "w": s["w"] + leaf}, {}

    with pytest.raises(ForeignTensorError, match="reads a tensor"):
        fcg.graph_step(read_old)(state, a_batch())
    assert state.generation == 0


def test_write_to_a_foreign_tensor_does_not_happen():
    log = torch.zeros(3)

    def write(s, b):
        log.add_(s["w"])
        return s, {}

    assert_refused(write, ForeignTensorError, "writes a tensor that is in neither", where=write)
    assert same(log, torch.zeros(3))


def test_accepted_twins_of_foreign_tensors():
    def declared(s, b):
        return s["w"] + TABLE

    assert same(accepted(metric(declared), constants=(TABLE,))["out"], torch.tensor([1.0, 2.0, 3.0]))
    assert same(accepted(metric(lambda s, b: s["w"] * TABLE.shape[0]))["out"], torch.tensor([0.0, 3.0, 6.0]))
    assert same(
        accepted(metric(lambda s, b: s["w"] * numpy.float32(3)))["out"], torch.tensor([0.0, 3.0, 6.0])
    )


# -- inputs written in place ------------------------------------------------------------------------------------


def write_state(s, b):
    s["w"].mul_(2)


def write_view(s, b):
    s["w"][1:].zero_()


def write_data(s, b):
    s["w"].data.mul_(2)


def write_detached(s, b):
    s["w"].detach().mul_(2)


def write_transposed(s, b):
    s["w"][None].t()[0].fill_(1.0)


def write_item(s, b):
    s["w"][0] = 1.0


def write_augmented(s, b):
    s["w"] += 1


def write_out(s, b):
    torch.add(s["w"], 1, out=s["w"])


def write_foreach(s, b):
    torch._foreach_mul_([s["w"]], 2.0)


def write_statistics(s, b):
    F.batch_norm(b["x"], s["w"], s["w"].clone(), training=True)


def write_as_torch_optimizers_do(s, b):
    weight = torch.nn.Parameter(s["w"])
    (weight * weight).sum().backward()
    with torch.no_grad():
        weight -= weight.grad


def write_storage(s, b):
    s["w"].set_(torch.zeros(3))


def write_size(s, b):
    s["w"].resize_(2)


def write_dropout(s, b):
    F.relu(s["w"], inplace=True)


@pytest.mark.parametrize(
    ("function", "owner"),
    [
        (write_state, "s['w']"),
        (write_view, "s['w']"),
        (write_data, "s['w']"),
        (write_detached, "s['w']"),
        (write_transposed, "s['w']"),
        (write_item, "s['w']"),
        (write_out, "s['w']"),
        (write_dropout, "s['w']"),
        (write_augmented, "s['w']"),
        (write_foreach, "s['w']"),
        (write_statistics, "s['w']"),
        (write_as_torch_optimizers_do, "s['w']"),
        (write_storage, "s['w']"),
        (write_size, "s['w']"),
    ],
)
def test_state_written_in_place(function, owner):
    def step(s, b):
        function(s, b)
        return s, {}

    message = assert_refused(step, ReadOnlyError, "writes in place into", where=function)
    assert f"writes in place into `{owner}`." in message


def test_declared_constant_written_in_place():
    def step(s, b):
        TABLE.add_(1)
        return s, {}

    assert_refused(
        step, ReadOnlyError, r"writes in place into `constants\[0\]`", where=step, constants=(TABLE,)
    )
    assert same(TABLE, torch.ones(3))


def fresh_tensors(s, b):
    x = b["x"] + 1
    x.mul_(2)
    x[0] = 5.0
    x.t_()
    x.unsqueeze_(0)
    torch.add(x, 1, out=x)
    mean, variance = s["w"].clone(), s["w"].clone()
    y = F.batch_norm(b["x"], mean, variance, training=True)
    y.resize_(2, 3)
    z = b["x"] * 3
    z.set_(x)
    return x, mean, variance, y, z, z + 1


def test_fresh_tensors_may_be_written():
    x = accepted(metric(fresh_tensors))["out"][0]
    assert x.shape == (1, 3, 4)


# -- memory exchanged behind the dispatcher ---------------------------------------------------------------------


def assign_data(s, b):
    s["w"].data = torch.zeros(3)
    return s["w"]


def assign_data_of_a_temporary(s, b):
    y = b["x"] + 1
    y.data = b["x"] * 2
    return y


def swapped(s, b):
    y, z = b["x"] + 1, b["x"] * 2
    torch.utils.swap_tensors(y, z)
    return y * 1


def swapped_and_returned(s, b):
    y, z = b["x"] + 1, b["x"] * 2
    torch.utils.swap_tensors(y, z)
    return y


@pytest.mark.parametrize("function", [assign_data, assign_data_of_a_temporary])
def test_exchanged_memory(function):
    assert_refused(metric(function), ReadOnlyError, "exchanges the memory of a tensor", where=function)


class Teacher(torch.nn.Module):
    """Follows another module in its forward: by the fix of the refusal, or by what is refused."""

    def __init__(self, *, writes):
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).requires_grad_(False)
        self.writes = writes

    def forward(self, x):
        for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.writes:
                mean.data.copy_(0.9 * mean.data + 0.1 * new.data)
            else:
                mean.data = 0.9 * mean.data + 0.1 * new.data
        return (self.student(x) - self.teacher(x)).square().mean()


def test_an_average_is_written_in_place_of_exchanged():
    def step_of(module):
        apply, params, buffers = fcg.from_module(module)

        def train_step(state, x):
            loss_fn = lambda params: apply(params, state.buffers, x)  # noqa: E731
            (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads, buffers=new), loss

        return train_step, fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))

    train_step, state = step_of(Teacher(writes=False))
    with pytest.raises(ReadOnlyError, match=r"write the values, `x.data.copy_\(new\)`"):
        fcg.graph_step(train_step)(state, torch.ones(4, 3))
    ported, module = Teacher(writes=True), Teacher(writes=False)
    module.load_state_dict(ported.state_dict())
    train_step, state = step_of(ported)
    step = fcg.graph_step(train_step, lowering="aten")
    for call in range(4):
        x = torch.full((4, 3), float(call))
        module.zero_grad()
        module(x).backward()
        state, _ = step(state, x)
        with torch.no_grad():
            for param in module.student.parameters():
                param -= 0.1 * param.grad
        for name, param in module.teacher.named_parameters():
            torch.testing.assert_close(fcg.snapshot(state.buffers)[f"teacher.{name}"], param.detach())


@pytest.mark.parametrize("function", [swapped, swapped_and_returned])
def test_swapped_tensors(function):
    """torch refuses it itself where its cache of fake tensors holds a weak reference: at the first such op."""
    with pytest.raises(
        (ReadOnlyError, CaptureError), match=r"exchanges the memory of a tensor|Cannot swap t"
    ):
        fcg.graph_step(metric(function))(a_state(), a_batch())
    assert accepted(metric(lambda s, b: {"y": b["x"] + 1, "z": b["x"] * 2}))
    assert_refused(metric(function), ReadOnlyError, "exchanges the memory of a tensor")


# -- sparse tensors ---------------------------------------------------------------------------------------------


def sparse_gradient(s, b):
    return fcg.grad(lambda table: F.embedding(b["idx"], table, sparse=True).sum())(b["x"])


def sparse_tensor(s, b):
    return b["x"].to_sparse()


def sparse_module(s, b):
    return fcg.grad(lambda w: torch.func.functional_call(EMBEDDING, {"weight": w}, (b["idx"],)).sum())(b["x"])


@pytest.mark.parametrize("function", [sparse_gradient, sparse_module, sparse_tensor])
def test_sparse_tensor(function):
    assert_refused(
        metric(function), LayoutError, "makes a sparse tensor(.|\n)*`sparse=False`", where=function
    )
    dense = accepted(metric(lambda s, b: fcg.grad(lambda t: F.embedding(b["idx"], t).sum())(b["x"])))["out"]
    assert same(dense.sum(1), torch.tensor([3.0, 0.0, 3.0, 0.0]))


ADJACENCY = torch.eye(4).to_sparse()
RAGGED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)


def sparse_constant(s, b):
    return torch.sparse.mm(ADJACENCY, b["x"])


def nested_constant(s, b):
    return RAGGED.sin().values()


def nested_of_parts(s, b):
    return torch.nested.nested_tensor([b["x"], b["x"][:2]]).to_padded_tensor(0.0)


def jagged_of_parts(s, b):
    return torch.nested.nested_tensor([b["x"], b["x"][:2]], layout=torch.jagged).values()


def jagged_of_lengths(s, b):
    return torch.nested.nested_tensor_from_jagged(b["x"], torch.tensor([0, 2, 4])).values()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (sparse_constant, r"reads a sparse tensor(.|\n)*`\.to_dense\(\)`"),
        (nested_constant, r"reads a nested tensor(.|\n)*pad_sequence"),
        (nested_of_parts, r"makes a nested tensor(.|\n)*pad_sequence"),
        (jagged_of_parts, r"makes a nested tensor(.|\n)*pad_sequence"),
        (jagged_of_lengths, r"makes a nested tensor(.|\n)*pad_sequence"),
    ],
)
def test_tensors_that_are_not_strided(function, text):
    assert_refused(metric(function), LayoutError, text, where=function)


def test_as_these_messages_advise():
    dense = ADJACENCY.to_dense()
    step = fcg.graph_step(lambda s, b: (s, {"out": dense @ b["x"]}), constants=(dense,))
    assert torch.equal(step({"w": torch.ones(1)}, a_batch())[1]["out"], dense @ a_batch()["x"])
    pad = torch.nn.utils.rnn.pad_sequence
    padded = accepted(metric(lambda s, b: pad([b["x"], b["x"][:2]], batch_first=True)))["out"]
    lengths = torch.tensor([4, 2])
    assert padded[torch.arange(4) < lengths[:, None]].shape == (6, 3)
    with pytest.raises(LayoutError, match=r"not dense(.|\n)*constants\[0\]  torch.sparse_coo(.|\n)*to_dense"):
        fcg.graph_step(lambda s, b: (s, {}), constants=(ADJACENCY,))({"w": torch.ones(1)}, a_batch())


# -- elements that one call reads and writes --------------------------------------------------------------------


def shift_columns(s, b):
    y = b["x"].clone()
    y[:, 1:] += y[:, :-1]
    return y


def copy_columns(s, b):
    y = b["x"].clone()
    y[:, 1:] = y[:, :-1]
    return y


def divide_by_a_column(s, b):
    y = b["x"].clone()
    return y.div_(y[:, -1:])


def add_windows(s, b):
    y = b["x"].clone()
    return y.add_(y.reshape(-1)[:6].unfold(0, 3, 1))


def add_to_a_factor(s, b):
    y = b["x"][:3].clone()
    return y.addmm_(y, y.clone())


def multiply_into_a_factor(s, b):
    y = b["x"][:3].clone()
    return torch.mm(y, y.clone(), out=y)


def add_to_each_other(s, b):
    y, z = b["x"].clone(), b["x"] + 1
    torch._foreach_add_([y, z], [z, y])
    return y


def add_twice(s, b):
    y = b["x"].clone()
    torch._foreach_add_([y, y], [b["x"], b["x"]])
    return y


def write_into_an_argument(s, b):
    y = b["x"].clone()
    return torch.add(y[:, :-1], 1, out=y[:, 1:])


@pytest.mark.parametrize(
    "function",
    [
        shift_columns,
        copy_columns,
        divide_by_a_column,
        add_windows,
        add_to_a_factor,
        multiply_into_a_factor,
        add_to_each_other,
        add_twice,
        write_into_an_argument,
    ],
)
def test_a_call_that_reads_elements_that_it_writes_for_others(function):
    """Torch runs each of them, in the order of its kernel: the second smears its first column on a host."""
    function(a_state(), a_batch())
    match = (
        r"writes elements that the same call reads for others(.|\n)*`y\[:, 1:\] \+= y\[:, :-1\]\.clone\(\)`"
    )
    assert_refused(metric(function), CaptureError, match, where=function)


def test_each_element_may_be_read_for_itself_and_a_copy_for_others():
    def step(s, b):
        y, z = b["x"].clone(), b["x"].clone()
        y[:, 1:] += y[:, :-1].clone()
        y[[0, 1]] = y[[1, 0]]
        z.add_(z).mul_(z.view(4, 3))
        z[:, :1].add_(z[:, 1:2])  # columns next to each other
        z[:2] -= z[2:]
        y[1:], y[:, 0] = y[0, 0], y[2, 2]  # numbers are read first
        z.masked_fill_(z > 0, z[0, 0])
        z[:, 0].unsqueeze(0).mul_(z[:, 0])
        z[:3].addmm_(z[:3].clone(), y[:3])
        rows = [*z.unbind(0)]
        torch._foreach_add_(rows, rows)
        c = torch.complex(y, z)
        c *= c.real
        c.imag.add_(c.real)
        return y, z, c

    accepted(metric(step))


# -- leaves that share memory -----------------------------------------------------------------------------------

SHARED = {"w": torch.ones(3)}
MATRIX = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"params": SHARED, "target": SHARED}, ("s['params']['w']", "s['target']['w']")),
        ({"a": MATRIX, "b": MATRIX[1:2]}, ("s['a']", "s['b']")),
        ({"a": MATRIX[:, :2], "b": MATRIX[:, 1:]}, ("s['a']", "s['b']")),
        ({"a": MATRIX, "b": MATRIX.t()}, ("s['a']", "s['b']")),
        ({"a": MATRIX, "b": MATRIX.view(torch.int32)}, ("s['a']", "s['b']")),
        ({"a": MATRIX, "b": PARAMETER, "c": MATRIX.detach()}, ("s['a']", "s['c']")),
    ],
)
def test_leaves_that_share_memory(tree, paths):
    step = fcg.graph_step(lambda s, b: (s, {}))
    values = fcg.tree.map(torch.clone, tree)
    with pytest.raises(AliasError, match=r"two leaves of `s` share memory(.|\n)*To fix: copy it") as caught:
        step(tree, a_batch())
    assert all(path in str(caught.value) for path in paths)
    assert step.stats.traces == step.stats.captures == 0
    assert same(tree, values)
    state, _ = step(values, a_batch())  # the advice: `.clone()`
    assert same(fcg.snapshot(state), values)


def test_leaf_that_overlaps_itself():
    step = fcg.graph_step(lambda s, b: (s, {}))
    with pytest.raises(AliasError, match=r"a leaf of `s` overlaps itself(.|\n)*s\['a'\]  f32\[3\]"):
        step({"a": torch.ones(1).expand(3)}, a_batch())


def test_disjoint_views_of_one_tensor_are_accepted():
    state, _ = fcg.graph_step(lambda s, b: (s, {}))({"a": MATRIX[:, :1], "b": MATRIX[:, 1:]}, a_batch())
    assert same(fcg.snapshot(state), {"a": torch.ones(4, 1), "b": torch.ones(4, 2)})


# -- modules ----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3, affine=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.norm(x)

    def train_step(self, s, b):
        return s, TABLE + self.scale


NET = Net()


def module_in_a_closure(s, b):
    return s, NET(b["x"])


def buffer_in_a_closure(s, b):
    return s, NET.norm.running_mean * 2


def statistics_in_place(s, b):
    return s, torch.func.functional_call(NET, {"norm.running_mean": s["w"]}, (b["x"],))


@pytest.mark.parametrize(
    ("function", "error", "fix"),
    [
        (module_in_a_closure, ForeignTensorError, "make the Net a pure function, .*fcg.from_module"),
        (statistics_in_place, ForeignTensorError, "make the Net a pure function, .*fcg.from_module"),
        (metric(read_by_a_module), ForeignTensorError, "make the Linear a pure function, .*fcg.from_module"),
        (buffer_in_a_closure, ForeignTensorError, "pass `NET.norm.running_mean` as an input or in the state"),
        (NET.train_step, ForeignTensorError, "pass `TABLE` as an input or in the state"),
    ],
)
def test_tensors_of_a_running_module_belong_into_the_state(function, error, fix):
    assert_refused(function, error, rf"\nTo fix: {fix}")


def test_running_statistics_in_the_state_are_returned_not_written():
    def step(s, b):
        return s, torch.func.functional_call(
            NET, {f"norm.{name}": leaf for name, leaf in s.items()}, (b["x"],)
        )

    state = fcg.place({name: leaf.clone() for name, leaf in NET.norm.named_buffers()})
    with pytest.raises(
        ReadOnlyError,
        match=r"writes in place into `s\[(.|\n)*\nTo fix: make the Net a pure(.|\n)*from_module",
    ):
        fcg.graph_step(step)(state, a_batch())


DOUBLED = torch.cuda.jiterator._create_jit_fn("template <typename T> T doubled(T x) { return x + x; }")
# Memory for the result first, then the launch: as torch's C code does it, which no op tells of.
LAUNCH = "def launch(*given):\n    out = torch.empty(given[4][0].shape)\n    launched.append(given[1])\n    return out"


def doubled(s, b):
    return DOUBLED(b["x"])


def test_a_kernel_that_is_no_op_is_refused_before_it_is_launched(monkeypatch):
    launched: list[str] = []
    of_torch = {"__name__": "torch._C", "torch": torch, "launched": launched}
    exec(compile(LAUNCH, torch.__file__, "exec"), of_torch)
    monkeypatch.setattr(DOUBLED, "is_cuda_available", True)
    monkeypatch.setattr(
        torch._C, "_cuda_jiterator_compile_and_launch_kernel", of_torch["launch"], raising=False
    )
    assert_refused(
        metric(doubled),
        CaptureError,
        r"launches a kernel of `torch.cuda.jiterator`, at test_tensors.py",
        where=doubled,
    )
    assert not launched
    assert DOUBLED(torch.ones(3)).shape == (3,)
    assert launched == ["doubled"]
