"""Laws of pytrees: flatten and unflatten, key paths, differences, selection, registration."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg import tree
from functional_cg.errors import LayoutError

Pair = namedtuple("Pair", ["left", "right"])


@tree.register_dataclass(static=("name",))
class Node:
    value: Any
    name: str
    rest: Any = None


@tree.register_dataclass
@dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any


KEYS = st.one_of(
    st.text("abc", max_size=2),
    st.integers(-2, 2),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(0, 2), st.text("ab", max_size=1)),
)


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Random nests of every kind of node."""

    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        mappings = st.dictionaries(KEYS, children, max_size=3)
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            mappings,
            mappings.map(OrderedDict),
            mappings.map(lambda d: defaultdict(list, d)),
            st.builds(Pair, children, children),
            st.builds(Node, children, st.sampled_from(["p", "q"]), children),
            st.builds(Slotted, children, children),
        )

    return st.recursive(st.one_of(leaves, st.none()), extend, max_leaves=8)


TREES = nests(st.integers())


def same(a: Any, b: Any) -> bool:
    """Equality by type too; the order in which a mapping was written does not count."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return factory and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def reordered(node: Any) -> Any:
    """The same tree with every mapping written in the opposite order."""
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, {k: reordered(node[k]) for k in reversed(node)})
    if isinstance(node, dict):
        return type(node)({k: reordered(node[k]) for k in reversed(node)})
    if isinstance(node, Pair):
        return Pair(*map(reordered, node))
    if isinstance(node, (list, tuple)):
        return type(node)(map(reordered, node))
    if dataclasses.is_dataclass(node):
        fields = {f.name: reordered(getattr(node, f.name)) for f in dataclasses.fields(node)}
        return type(node)(**fields)  # type: ignore[operator]
    return node


# --- flatten and unflatten ---------------------------------------------------------------------------------


@given(TREES)
def test_unflatten_undoes_flatten(nest: Any) -> None:
    leaves, treedef = tree.flatten(nest)
    assert same(tree.unflatten(treedef, leaves), nest)
    assert len(leaves) == treedef.num_leaves == len(treedef.paths())
    assert tree.leaves(nest) == leaves
    assert [leaf for _, leaf in tree.flatten_with_path(nest)[0]] == leaves


@given(TREES)
def test_flatten_undoes_unflatten(nest: Any) -> None:
    treedef = tree.flatten(nest)[1]
    fresh = [f"leaf {i}" for i in range(treedef.num_leaves)]
    assert tree.flatten(tree.unflatten(treedef, fresh)) == (fresh, treedef)


@given(TREES)
def test_writing_order_of_dicts_does_not_matter(nest: Any) -> None:
    assert tree.flatten(reordered(nest)) == tree.flatten(nest)


@given(TREES)
def test_equal_treedefs_have_equal_hashes(nest: Any) -> None:
    treedef, other = tree.flatten(nest)[1], tree.flatten(copy.deepcopy(nest))[1]
    assert treedef == other
    assert hash(treedef) == hash(other)


@given(TREES)
def test_paths_are_distinct_and_reach_their_leaf(nest: Any) -> None:
    pairs, _ = tree.flatten_with_path(nest)
    texts = [tree.path_string(path, "nest") for path, _ in pairs]
    assert len(set(texts)) == len(texts)
    for text, (_, leaf) in zip(texts, pairs, strict=True):
        assert eval(text, {"nest": nest}) == leaf


def test_paths_print_as_python_reads_them() -> None:
    nest = {"a": [0, Pair(1, {2: 3})], "n": Node(4, "static", None)}
    paths = [tree.path_string(path, "state") for path, _ in tree.flatten_with_path(nest)[0]]
    assert paths == ["state['a'][0]", "state['a'][1].left", "state['a'][1].right[2]", "state['n'].value"]


@pytest.mark.parametrize("leaves", [[], [1], [1, 2, 3]])
def test_unflatten_refuses_a_wrong_number_of_leaves(leaves: list[int]) -> None:
    treedef = tree.flatten({"a": 1, "b": 2})[1]
    with pytest.raises(ValueError, match=rf"the treedef has 2 leaves, got {len(leaves)}"):
        tree.unflatten(treedef, leaves)


def test_subclasses_of_containers_are_leaves_unless_registered() -> None:
    class MyDict(dict[str, int]):
        pass

    class MyList(list[int]):
        pass

    nest = [MyDict(a=1), MyList([1, 2])]
    assert tree.leaves(nest) == nest


def test_types_registered_with_torch_are_nodes() -> None:
    out = torch.return_types.max((torch.tensor(1), torch.tensor(2)))  # type: ignore[attr-defined]
    leaves, treedef = tree.flatten(out)
    assert len(leaves) == 2
    assert type(tree.unflatten(treedef, leaves)) is type(out)


# --- map ---------------------------------------------------------------------------------------------------


@given(TREES)
def test_map_keeps_structure_and_composes(nest: Any) -> None:
    once = tree.map(lambda n: (n * 2) + 1, nest)
    assert same(once, tree.map(lambda n: n + 1, tree.map(lambda n: n * 2, nest)))
    assert tree.flatten(once)[1] == tree.flatten(nest)[1]
    assert same(tree.map(lambda a, b: b, nest, once), once)


def test_map_lists_all_differences_of_structure() -> None:
    with pytest.raises(LayoutError, match=r"tree.map: the trees differ in structure") as error:
        tree.map(lambda a, b: a, {"a": 1, "b": 2, "d": [1]}, {"a": 1, "c": 2, "d": (1,)})
    text = str(error.value)
    assert "tree['b']  expected a leaf   got nothing" in text
    assert "tree['c']  expected nothing   got a leaf" in text
    assert "tree['d']  expected list with 1 children   got tuple with 1 children" in text


def test_map_over_a_state_reads_its_leaves() -> None:
    state = fcg.place({"a": torch.ones(2), "b": [torch.zeros(1)]})
    out = tree.map(lambda leaf: leaf + 1, state)
    assert out["a"].tolist() == [2.0, 2.0]
    assert out["b"][0].tolist() == [1.0]


# --- structure_diff ----------------------------------------------------------------------------------------


@given(TREES, TREES)
def test_diff_is_empty_exactly_for_equal_structures(a: Any, b: Any) -> None:
    a_def, b_def = tree.flatten(a)[1], tree.flatten(b)[1]
    assert (tree.structure_diff(a_def, b_def) == []) == (a_def == b_def)
    assert tree.structure_diff(a_def, a_def) == []


def test_diff_lists_every_place() -> None:
    a = {"x": 1, "y": None, "z": {"k": Node(1, "p")}, "only a": 0}
    b = {"x": [1], "y": 2, "z": {"k": Node(1, "q", 3)}, "only b": 0}
    rows = tree.structure_diff(tree.flatten(a)[1], tree.flatten(b)[1], "s")
    assert rows == [
        "s['only a']  expected a leaf   got nothing",
        "s['only b']  expected nothing   got a leaf",
        "s['x']  expected a leaf   got list with 1 children",
        "s['y']  expected None   got a leaf",
        "s['z']['k']  expected static fields ('p',)   got ('q',)",
        "s['z']['k'].rest  expected None   got a leaf",
    ]


# --- at ----------------------------------------------------------------------------------------------------


@given(TREES, st.data())
def test_at_replaces_one_leaf_and_nothing_else(nest: Any, data: st.DataObject) -> None:
    leaves, treedef = tree.flatten(nest)
    if not leaves:
        return
    i = data.draw(st.integers(0, len(leaves) - 1))
    text = tree.path_string(treedef.paths()[i], "t")
    new = tree.at(lambda t: eval(text, {"t": t}), nest, "new")
    assert tree.flatten(new) == ([*leaves[:i], "new", *leaves[i + 1 :]], treedef)
    assert tree.leaves(nest) == leaves


def test_at_selects_subtrees_and_tuples() -> None:
    nest = {"a": {"x": 1, "y": 2}, "b": [3, 4]}
    assert tree.at(lambda t: t["a"], nest, {"x": 10, "y": 20}) == {"a": {"x": 10, "y": 20}, "b": [3, 4]}
    assert tree.at(lambda t: (t["a"]["x"], t["b"]), nest, (0, [5, 6])) == {"a": {"x": 0, "y": 2}, "b": [5, 6]}
    assert tree.at(lambda t: t, nest, nest) == nest
    assert tree.at(lambda t: (), nest, ()) == nest
    assert tree.at(lambda t: t["b"][1:], nest, [7]) == {"a": {"x": 1, "y": 2}, "b": [3, 7]}


def test_at_swaps() -> None:
    nest = {"a": 1, "b": 2}
    assert tree.at(lambda t: (t["a"], t["b"]), nest, (nest["b"], nest["a"])) == {"a": 2, "b": 1}


def test_at_refuses_a_value_of_another_structure() -> None:
    with pytest.raises(LayoutError, match=r"value\['y'\]  expected a leaf   got nothing"):
        tree.at(lambda t: t["a"], {"a": {"x": 1, "y": 2}}, {"x": 1})


@pytest.mark.parametrize("where", [lambda t: 3, lambda t: (t["a"], "b"), lambda t: [t, object()]])
def test_at_refuses_what_is_no_part_of_the_tree(where: Any) -> None:
    with pytest.raises(ValueError, match=r"`where` must select leaves or subtrees of the tree, unchanged"):
        tree.at(where, {"a": 1, "b": 2}, 0)


def test_at_refuses_to_replace_a_leaf_twice() -> None:
    with pytest.raises(ValueError, match=r"`where` selects a leaf twice"):
        tree.at(lambda t: (t["a"], t["a"]), {"a": 1}, (2, 3))


def test_at_on_a_part_of_a_tree_needs_its_error_from_where() -> None:
    with pytest.raises(KeyError, match="nope"):
        tree.at(lambda t: t["nope"], {"a": 1}, 0)


# --- register_dataclass ------------------------------------------------------------------------------------


def test_static_fields_belong_to_the_structure() -> None:
    a, b = Node(1, "p"), Node(1, "q")
    assert tree.leaves(a) == [1]
    assert tree.flatten(a)[1] != tree.flatten(b)[1]
    assert tree.map(lambda v: v + 1, a) == Node(2, "p")


def test_class_that_is_no_dataclass_yet_becomes_a_frozen_one() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'value'"):
        Node(1, "p").value = 2  # type: ignore[misc]


def test_nodes_are_rebuilt_without_init_and_post_init() -> None:
    calls = []

    @tree.register_dataclass
    @dataclass
    class Counted:
        x: int
        double: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            calls.append(self.x)
            self.double = 2 * self.x

    node = Counted(1)
    new = tree.map(lambda v: v + 1, node)
    assert (new.x, new.double) == (2, 3)
    assert calls == [1]


def test_subclass_of_a_registered_class_is_registered_by_itself() -> None:
    @tree.register_dataclass(static=("name",))
    @dataclass(frozen=True)
    class Named(Node):
        extra: Any = 0

    assert tree.leaves(Named(1, "p", 2, 3)) == [1, 2, 3]


def test_unknown_static_field_is_refused() -> None:
    with pytest.raises(ValueError, match="register_dataclass: Bad has no field named nope, zip"):

        @tree.register_dataclass(static=("x", "zip", "nope"))
        class Bad:
            x: int


def test_registered_nodes_pickle() -> None:
    node = Node({"a": 1}, "p")
    assert pickle.loads(pickle.dumps(node)) == node


# --- trees without an end ----------------------------------------------------------------------------------


def test_a_tree_that_contains_itself_is_refused_with_its_path() -> None:
    loop: dict[str, Any] = {"x": torch.ones(1)}
    loop["again"] = [loop]
    for call in (tree.leaves, fcg.place, fcg.snapshot, fcg.graph_fn(lambda batch: batch)):
        with pytest.raises(LayoutError, match=r"contains itself\.\n  tree.*\['again'\]\[0\]\['again'\]"):
            call(loop)


def test_a_deep_tree_goes_all_the_way() -> None:
    deep: Any = torch.ones(1)
    for _ in range(98):  # and two more for the arguments of a call
        deep = [deep]
    assert tree.leaves(fcg.graph_fn(lambda batch: batch)(deep))[0].tolist() == [1.0]
    assert tree.leaves(fcg.snapshot(fcg.place(deep)))[0].tolist() == [1.0]
    with pytest.raises(LayoutError, match="more than 100 levels deep"):
        tree.flatten([[[deep]]])


# --- static fields -----------------------------------------------------------------------------------------


def test_fields_declared_static_belong_to_the_structure() -> None:
    @tree.register_dataclass
    class Layer:
        w: Any
        name: str = tree.static(default="dense")

    assert tree.flatten(Layer(1))[1] != tree.flatten(Layer(1, "conv"))[1]
    assert tree.map(lambda v: v + 1, Layer(1, "conv")) == Layer(2, "conv")


@dataclass(frozen=True)
class Rate:
    value: Any


VALUES = (1, 1.0, True, 0.0, -0.0, 0, False, float("nan"), 1j, complex(0, -0.0), complex(0, 0.0), "1", None)


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: (v, 2), lambda v: [v], lambda v: {"v": v}, Rate])
def test_static_values_are_equal_to_their_copies_alone(wrap: Any) -> None:
    @tree.register_dataclass(static=("tag",))
    class Tagged:
        x: Any
        tag: Any

    for i, one in enumerate(VALUES):
        for j, other in enumerate(VALUES):
            copied = pickle.loads(pickle.dumps(other))  # NaN is another object then
            a, b = (tree.flatten(Tagged(1, wrap(v)))[1] for v in (one, copied))
            assert (a == b) == (i == j), (one, other)
            assert bool(tree.structure_diff(a, b)) == (i != j)


def test_states_that_differ_in_a_static_number_have_graphs_of_their_own() -> None:
    class Run(fcg.TrainState):
        rate: Any = tree.static(default=1)

    def made(rate: Any) -> Any:
        return Run.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), rate=rate)

    step = fcg.graph_step(lambda s, x: (s, x / s.rate if s.rate else x * s.rate), max_captures=3)
    assert step(made(0.0), torch.tensor(2.0))[1].signbit() == torch.tensor(False)
    assert step(made(-0.0), torch.tensor(2.0))[1].signbit() == torch.tensor(True)
    for _ in range(2):
        step(made(float("nan")), torch.tensor(2.0))
    assert step.stats.traces == 3


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1.0), np.ones(2)])
def test_arrays_are_refused_as_static_fields(value: Any) -> None:
    @tree.register_dataclass(static=("mask",))
    class Masked:
        x: Any
        mask: Any

    with pytest.raises(TypeError, match=r"`Masked`: the static field `mask` holds an array"):
        fcg.place(Masked(torch.ones(2), value))


def test_static_values_that_cannot_be_compared_are_refused() -> None:
    @tree.register_dataclass(static=("masks",))
    class Masked:
        x: Any
        masks: Any

    one, two = (tree.flatten(Masked(1, (np.ones(2),)))[1] for _ in range(2))
    with pytest.raises(TypeError, match="static values of type ndarray cannot be compared"):
        assert one == two


def test_dicts_of_another_class_differ_by_their_keys() -> None:
    """As `module.state_dict()` in place of parameters: an OrderedDict, and with the buffers."""
    want, got = tree.flatten({"p": {"w": 1, "b": 2}})[1], tree.flatten({"p": OrderedDict(w=1, n=3)})[1]
    assert tree.structure_diff(want, got, "state") == [
        "state['p']  expected dict   got OrderedDict, which `dict(...)` converts",
        "state['p']['b']  expected a leaf   got nothing",
        "state['p']['n']  expected nothing   got a leaf",
    ]
    assert tree.structure_diff(got, want, "state")[0] == "state['p']  expected OrderedDict   got dict"
    same_keys = tree.flatten({"p": OrderedDict(w=1, b=2)})[1]
    assert len(tree.structure_diff(want, same_keys)) == len(tree.structure_diff(same_keys, want)) == 1
