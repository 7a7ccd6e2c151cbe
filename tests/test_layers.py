"""The shape of the package, read from its source: who imports whom, and what stays behind one door.

Each checker takes source text and returns what is wrong with it, so each is shown a planted bug below.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "functional_cg"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

# The layers and their rooms: each room imports from those of its own layer and of those above it here. A room is a
# folder, or a file of the root or of `stages`. `testing` and what follows use the public names, as a user does.
LAYERS = {
    "values": (
        "manual",
        "errors",
        "concurrency",
        "names",
        "tensors",
        "pytree",
        "tree",
        "shards",
        "ambient",
        "messages",
        "random",
        "state",
        "buckets",
        "precision",
    ),
    "program": (
        "stages.program",
        "stages.sub_programs",
        "stages.keys",
        "stages.kinds",
        "stages.variables",
        "stages.blocks",
        "stages.work",
        "stages.lifetimes",
        "stages.fx_passes",
        "stages.passes",
        "stages.layouts",
        "stages.evaluate",
        "stages.core",
        "stages.schedule",
    ),
    "trace": ("call", "transforms", "pipelines", "nn", "stages.watch", "stages.trace"),
    "lower": ("options", "stages.plan", "stages.branches", "stages.trial", "stages.lower"),
    "run": ("stages.run", "stages", "step"),
    "what users name": (
        "optim",
        "checkpoint",
        "train_state",
        "graph_step",
        "prefetch",
        "module_statistics",
        "recorder",
        "sharding",
        "__init__",
        "testing",
        "report",
        "examples",
    ),
}
ROOMS = {room: number for number, rooms in enumerate(LAYERS.values()) for room in rooms}


# Imports inside a function: (importing module, imported module) -> why it cannot stand at the top.
DEFERRED = {
    (
        "random.words",
        "tensors.philox_triton",
    ): "imports triton at its top, which CPU builds of torch do not bring",
    ("stages.fx_passes.cross_entropy", "tensors.cross_entropy_triton"): "the same",
    ("tensors.recorded.ctc", "tensors.recorded.ctc_triton"): "the same",
    ("random.attention", "random.attention_launch_triton"): "the same",
    ("examples.outcome", "report"): "needs matplotlib, which a picture alone is worth",
}

# Dotted name -> the modules that may use it.
DOORS = {
    "torch.utils._pytree": ("pytree.nodes", "pytree.trees"),
    "torch.cuda.CUDAGraph": ("stages.run.capture",),
    "torch.cuda.graph": ("stages.run.capture",),
    "torch.cuda.graphs": ("stages.run.capture",),
    "torch.cuda._compile_kernel": ("tensors.ulps",),
    "cuda.bindings": ("concurrency.driver",),
    "torch.cuda.make_graphed_callables": ("stages.run.capture",),
    "torch._scaled_mm": ("nn._scaled_mm",),
    "torch._subclasses.FakeTensorMode": ("tensors.fake_mode",),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("tensors.fake_mode",),
}

# Calls whose result may be kept by a module: it cannot be changed, or it is a registration with the runtime.
FROZEN_CALLS = frozenset(
    {
        "ContextVar",  # what it holds is scoped by a `with`
        "Library",
        "NewType",
        "ParamSpec",
        "Struct",
        "TypeAliasType",
        "TypeVar",
        "TypeVarTuple",
        "abspath",
        "attrgetter",
        "compile",  # re.compile
        "device",
        "dirname",
        "float",
        "frozenset",
        "getLogger",
        "int",
        "itemgetter",
        "join",  # of a path or a string
        "MappingProxyType",
        "lock_through_forks",  # for what torch has once per process; any other lock may stay locked in a child
        "_Turns",  # a fork strikes all of a process
        "len",
        "max",
        "min",
        "_listed",  # a module's `__dir__`
        "_missing",  # a module's `__getattr__`, which raises
        "namedtuple",
        "object",
        "tuple",
        "type",
    }
)
FROZEN_RESULTS = frozenset({"MappingProxyType", "bool", "bytes", "float", "frozenset", "int", "str", "tuple"})
FROZEN_BASES = frozenset({"Enum", "Flag", "IntEnum", "IntFlag", "NamedTuple", "StrEnum"})
MUTABLE_CALLS = frozenset(
    {
        "Counter",
        "OrderedDict",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "bytearray",
        "defaultdict",
        "deque",
        "dict",
        "list",
        "set",
    }
)
MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
PROTOCOL_NAMES = frozenset({"__all__", "__slots__", "__match_args__"})


@dataclass(frozen=True)
class Import:
    """One import of a module of the package."""

    target: str
    line: int
    deferred: bool


def module_name(path: Path) -> str:
    """Return the name below the package: ``stages.trace``; a folder is its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def package_sources() -> dict[str, str]:
    """Return source text by module name."""
    return {module_name(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


SOURCES = package_sources()
FOLDERS = frozenset(module_name(path) for path in ROOT.rglob("__init__.py"))


# --- checkers ----------------------------------------------------------------------------------------------


def room(module: str) -> str:
    """Return the room that a module belongs to: its own name, or that of a folder it is in."""
    parts = module.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in names if name in ROOMS and (name != "stages" or module == name)), module)


def absolute(node: ast.ImportFrom, module: str, *, is_folder: bool) -> str:
    """Return the absolute dotted name that ``from ... import`` starts from."""
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE] if module == "__init__" else [PACKAGE, *module.split(".")]
    if not is_folder:
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def inside(dotted: str) -> str | None:
    """Return the name below the package, ``__init__`` for the package itself, None for other packages."""
    if dotted == PACKAGE:
        return "__init__"
    return dotted.removeprefix(PACKAGE + ".") if dotted.startswith(PACKAGE + ".") else None


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source; rules share it."""
    return ast.parse(source)


@functools.cache
def imports(source: str, module: str, known: frozenset[str], *, is_folder: bool = False) -> list[Import]:
    """List the imports of the package's own modules, those of ``if TYPE_CHECKING`` included."""
    found: list[Import] = []

    def add(dotted: str, line: int, *, deferred: bool) -> None:
        target = inside(dotted)
        if target is not None:
            found.append(Import(target, line, deferred))

    def visit(node: ast.AST, *, deferred: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, node.lineno, deferred=deferred)
        elif isinstance(node, ast.ImportFrom):
            start = absolute(node, module, is_folder=is_folder)
            for alias in node.names:
                submodule = f"{start}.{alias.name}"
                add(submodule if inside(submodule) in known else start, node.lineno, deferred=deferred)
        elif (
            isinstance(node, ast.Call)
            and last_part(node.func) in {"import_module", "__import__"}
            and node.args
        ):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                add(name.value, node.lineno, deferred=deferred)
        deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deferred=deferred)

    visit(parsed(source), deferred=False)
    return found


def order_violations(
    source: str, module: str, known: frozenset[str], *, is_folder: bool = False
) -> list[str]:
    """Say which imports reach into a later layer, or reach a module that is in none."""
    if room(module) not in ROOMS:
        return [f"{module} is in no layer"]
    wrong = []
    for item in imports(source, module, known, is_folder=is_folder):
        if room(item.target) not in ROOMS:
            wrong.append(f"{module}:{item.line} imports {item.target}, which is in no layer")
        elif ROOMS[room(item.target)] > ROOMS[room(module)]:
            wrong.append(f"{module}:{item.line} imports {item.target}, of a later layer")
    return wrong


def deferred_violations(
    source: str, module: str, known: frozenset[str], *, is_folder: bool = False
) -> list[str]:
    """Say which imports of the package's own modules stand inside a function."""
    return [
        f"{module}:{item.line} imports {item.target} inside a function"
        for item in imports(source, module, known, is_folder=is_folder)
        if item.deferred and (module, item.target) not in DEFERRED
    ]


def cycles(sources: dict[str, str], folders: frozenset[str] = frozenset()) -> list[str]:
    """Return the import cycles, deferred imports included, as ``a -> b -> a``."""
    known = frozenset(sources)
    edges = {
        module: sorted({item.target for item in imports(source, module, known, is_folder=module in folders)})
        for module, source in sources.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in edges.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())
    return found


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of what is imported and of every attribute chain on an import."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in names:
                yield node.lineno, ".".join([names[base.id], *reversed(parts)])


def door_violations(source: str, module: str) -> list[str]:
    """Say where a name is used that belongs to one file only."""
    wrong = {
        f"{module}:{line} uses {door}, which belongs to {' and '.join(owners)}"
        for line, name in dotted_names(parsed(source))
        for door, owners in DOORS.items()
        if module not in owners and (name == door or name.startswith(door + "."))
    }
    return sorted(wrong)


def address_violations(source: str, module: str) -> list[str]:
    """Say where ``data_ptr`` is asked for. To define it, so that it raises, is fine."""
    wrong = []
    for node in ast.walk(parsed(source)):
        attribute = isinstance(node, ast.Attribute) and node.attr == "data_ptr"
        by_name = (
            isinstance(node, ast.Call)
            and last_part(node.func) in {"getattr", "attrgetter", "methodcaller"}
            and any(isinstance(arg, ast.Constant) and arg.value == "data_ptr" for arg in node.args)
        )
        if attribute or by_name:
            wrong.append(f"{module}:{node.lineno} asks for a data_ptr")  # type: ignore[attr-defined]
    return wrong


def swallow_violations(source: str, module: str) -> list[str]:
    """Say where exceptions vanish: a bare ``except``, or all of them caught and nothing done."""
    wrong = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = [
                last_part(part)
                for part in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])
            ]
            idle = all(
                isinstance(line, ast.Pass | ast.Continue)
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            if node.type is None:
                wrong.append(f"{module}:{node.lineno} has a bare except")
            elif idle and {"Exception", "BaseException"} & set(caught):
                wrong.append(f"{module}:{node.lineno} swallows every exception")
        elif isinstance(node, ast.Call) and last_part(node.func) == "suppress":
            if {"Exception", "BaseException"} & {last_part(arg) for arg in node.args}:
                wrong.append(f"{module}:{node.lineno} swallows every exception")
    return wrong


def last_part(node: ast.AST | None) -> str:
    """Return ``c`` of ``a.b.c``, of ``c`` and of ``c[...]``; the empty string for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return last_part(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def is_frozen_class(node: ast.ClassDef) -> bool:
    """Whether instances cannot be changed: an enum, a named tuple, a frozen dataclass, or ``__slots__ = ()``."""
    by_base = any(last_part(base) in FROZEN_BASES for base in node.bases)
    by_decorator = any(
        key.arg == "frozen" and isinstance(key.value, ast.Constant) and key.value.value is True
        for call in node.decorator_list
        if isinstance(call, ast.Call)
        for key in call.keywords
    )
    by_slots = any(
        name == "__slots__" and ast.unparse(value) == "()" for name, value, _ in assignments(node.body)
    )
    return by_base or by_decorator or by_slots


def frozen_calls(tree: ast.Module) -> frozenset[str]:
    """Return what a module may call for a value to keep: frozen classes, and functions that return such."""
    own = {
        node.name
        for node in tree.body
        if (isinstance(node, ast.ClassDef) and is_frozen_class(node))
        or (isinstance(node, ast.FunctionDef) and last_part(node.returns) in FROZEN_RESULTS)
    }
    return FROZEN_CALLS | own


def mutable_parts(node: ast.AST, frozen: frozenset[str]) -> Iterator[ast.expr]:
    """Yield the parts of a value that someone could change later."""
    if isinstance(node, MUTABLE_LITERALS):
        yield node
    elif isinstance(node, ast.Call):
        name = last_part(node.func)
        if name not in frozen:
            yield node
        elif name in {"MappingProxyType", "frozenset", "tuple"}:
            # The outer literal is sealed or copied; what lies in it is not.
            for arg in node.args:
                for child in ast.iter_child_nodes(arg):
                    yield from mutable_parts(child, frozen)
    elif isinstance(node, ast.Starred):
        # Unpacked: the container itself is not kept.
        if not isinstance(node.value, ast.Call):
            for child in ast.iter_child_nodes(node.value):
                yield from mutable_parts(child, frozen)
    elif isinstance(node, ast.comprehension):
        return  # what a comprehension runs over is not kept
    elif isinstance(node, ast.Subscript):
        yield from mutable_parts(node.value, frozen)  # the slice of `Callable[[int], str]` is no list
    elif not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from mutable_parts(child, frozen)


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a body is executed, those under if, try, with and for included."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from top_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield (names, value, line) of the assignments of a body."""
    for node in top_level(body):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield ", ".join(ast.unparse(target) for target in targets), node.value, node.lineno


def mutable_violations(source: str, module: str) -> list[str]:
    """Say where a module or a class keeps something that changes, or a function rebinds a global."""
    tree = parsed(source)
    frozen = frozen_calls(tree)
    wrong = [
        f"{module}:{line} `{name}` is mutable and lives as long as the module"
        for name, value, line in assignments(tree.body)
        if name not in PROTOCOL_NAMES and any(mutable_parts(value, frozen))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            wrong.append(f"{module}:{node.lineno} rebinds global {', '.join(node.names)}")
        elif isinstance(node, ast.ClassDef):
            wrong += [
                f"{module}:{line} `{node.name}.{name}` is mutable and shared by all instances"
                for name, value, line in assignments(node.body)
                if name not in PROTOCOL_NAMES
                and (
                    isinstance(value, MUTABLE_LITERALS)
                    or (isinstance(value, ast.Call) and last_part(value.func) in MUTABLE_CALLS)
                )
            ]
    return wrong


# --- the package -------------------------------------------------------------------------------------------


# One test a rule, not one a module: there are thousands of pairs, and each names its module itself.


def test_modules_import_only_from_above() -> None:
    known = frozenset(SOURCES)
    assert not [
        violation
        for module, source in SOURCES.items()
        for violation in order_violations(source, module, known, is_folder=module in FOLDERS)
    ]


def test_modules_have_no_deferred_imports_of_the_package() -> None:
    known = frozenset(SOURCES)
    assert not [
        violation
        for module, source in SOURCES.items()
        for violation in deferred_violations(source, module, known, is_folder=module in FOLDERS)
    ]


def test_package_has_no_import_cycles() -> None:
    assert cycles(SOURCES, FOLDERS) == []


@pytest.mark.parametrize(
    "check",
    [door_violations, address_violations, swallow_violations, mutable_violations],
    ids=lambda check: check.__name__.removesuffix("_violations"),
)
def test_modules_keep_the_rule(check: Callable[[str, str], list[str]]) -> None:
    assert not [violation for module, source in SOURCES.items() for violation in check(source, module)]


@pytest.mark.parametrize(("importer", "imported"), DEFERRED)
def test_deferred_allowance_is_still_needed(importer: str, imported: str) -> None:
    found = imports(SOURCES[importer], importer, frozenset(SOURCES), is_folder=importer in FOLDERS)
    assert any(item.target == imported and item.deferred for item in found)


# --- planted bugs ------------------------------------------------------------------------------------------

KNOWN = frozenset(
    {"__init__", "errors", "tree", "state", "state.arena", "optim", "optim.base", "stages", "stages.trace"}
)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tree", "from functional_cg.optim.base import plan"),
        ("tree", "from functional_cg import optim"),
        ("tree", "from . import optim"),
        ("tree", "from .optim import base"),
        ("tree", "from .optim.base import plan"),
        ("tree", "import functional_cg.optim.base as a"),
        ("tree", "import functional_cg"),
        ("tree", "from functional_cg import place"),
        ("tree", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .optim.base import Link"),
        ("tree", "def f():\n    from .optim.base import Link"),
        ("state.arena", "from ..stages import trace"),
        ("state.arena", "from ..stages.trace import f"),
        ("stages.trace", "from . import f"),
        ("stages.trace", "from functional_cg.stages.plan import recipe"),
        ("tree", "from .unheard_of import f"),
        ("unheard_of", ""),
        ("stages.unheard_of", ""),
        ("errors", "import importlib\nimportlib.import_module('functional_cg.optim')"),
    ],
)
def test_order_checker_finds(module: str, source: str) -> None:
    assert len(order_violations(source, module, KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("state.arena", "from ..errors import LayoutError\nfrom .. import tree\nimport functional_cg.tree"),
        ("optim.base", "from ..state import Handle\nfrom . import schedules\nfrom .schedules import f"),
        ("tree", "from .state.arena import plan"),
        ("stages.trace", "from .watch import f\nfrom ..nn import call"),
        ("stages.trace.recorder", "from . import recipe\nfrom ..program import Var"),
        ("testing.laws", "import functional_cg as fcg\nfrom functional_cg import GraphStep, tree"),
        ("tree", "import torch.arena\nfrom torch import arena"),
    ],
)
def test_order_checker_allows(module: str, source: str) -> None:
    assert order_violations(source, module, KNOWN) == []


def test_order_checker_reads_relative_imports_of_a_folder() -> None:
    source = "from .base import f\nfrom ..stages.trace import g"
    found = imports(source, "optim", KNOWN, is_folder=True)
    assert [item.target for item in found] == ["optim.base", "stages.trace"]
    found = imports("from .optim.base import f\nfrom . import tree", "__init__", KNOWN, is_folder=True)
    assert [item.target for item in found] == ["optim.base", "tree"]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from .errors import LayoutError",
        "def f():\n    import functional_cg.errors",
        "class A:\n    def f(self):\n        if self:\n            from . import errors",
        "def __getattr__(name):\n    return importlib.import_module('functional_cg.' 'errors')",
    ],
)
def test_deferred_checker_finds(source: str) -> None:
    assert len(deferred_violations(source, "tree", KNOWN)) == 1


def test_deferred_checker_allows_other_packages_and_what_is_listed() -> None:
    known = KNOWN | {"random", "random.words", "tensors", "tensors.philox_triton"}
    assert deferred_violations("def f():\n    import matplotlib", "tree", known) == []
    assert (
        deferred_violations("def f():\n    from ..tensors import philox_triton", "random.words", known) == []
    )
    assert deferred_violations("def f():\n    from .tensors import philox_triton", "tree", known) != []


def test_cycle_checker_finds() -> None:
    sources = {
        "a": "from .b import x",
        "b": "def f():\n    from . import c",
        "c": "from .a import y",
        "d": "",
    }
    assert cycles(sources) == ["a -> b -> c -> a"]
    assert cycles({**sources, "c": "from .d import y"}) == []
    # A folder that re-exports a module, which imports the folder.
    sources = {"optim": "from .base import f", "optim.base": "from . import g"}
    assert cycles(sources, frozenset({"optim"})) == ["optim -> optim.base -> optim"]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "import torch.utils._pytree as pytree",
        "import torch\ntorch.utils._pytree.tree_map(f, x)",
        "import torch\ng = torch.cuda.CUDAGraph()",
        "import torch\ndef f(g: torch.cuda.CUDAGraph): ...",
        "import torch as t\nwith t.cuda.graph(g): pass",
        "from torch import cuda\nwith cuda.graph(g): pass",
        "from torch.cuda import CUDAGraph",
        "from torch.cuda.graphs import graph",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch._subclasses import fake_tensor\nfake_tensor.FakeTensorMode()",
    ],
)
def test_door_checker_finds(source: str) -> None:
    assert len(door_violations(source, "state")) == 1


def test_door_checker_allows_the_door_and_what_only_looks_like_it() -> None:
    assert door_violations("from torch.utils import _pytree", "pytree.trees") == []
    assert door_violations("import torch\ntorch.cuda.graph(g)", "stages.run.capture") == []
    source = "import torch\ntorch.cuda.graph_pool_handle()\nself.cuda.graph\nfrom .stages import graph"
    assert door_violations(source, "state") == []


@pytest.mark.parametrize(
    "source", ["x.data_ptr()", "f = torch.Tensor.data_ptr", "getattr(x.untyped_storage(), 'data_ptr')()"]
)
def test_address_checker_finds(source: str) -> None:
    assert len(address_violations(source, "state")) == 1


def test_address_checker_allows_the_override() -> None:
    source = "class Leaf:\n    def data_ptr(self):\n        raise ReadOnlyError('a leaf has no data_ptr')"
    assert address_violations(source, "state") == []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    ...",
        "for x in y:\n    try:\n        f()\n    except Exception:\n        continue",
        "with contextlib.suppress(Exception):\n    f()",
    ],
)
def test_swallow_checker_finds(source: str) -> None:
    assert len(swallow_violations(source, "state")) == 1


def test_swallow_checker_allows_what_is_named_or_handled() -> None:
    source = "try:\n    f()\nexcept KeyError:\n    pass\nexcept Exception as error:\n    raise A from error"
    assert swallow_violations(source, "state") == []
    assert swallow_violations("with suppress(KeyError):\n    f()", "state") == []


@pytest.mark.parametrize(
    "source",
    [
        "CACHE = {}",
        "CACHE: dict[str, int] = {}",
        "if True:\n    CACHE = []",
        "try:\n    import x\nexcept ImportError:\n    CACHE = set()",
        "CACHE = dict()",
        "CACHE = weakref.WeakKeyDictionary()",
        "COUNT = itertools.count()",
        "LOCK = threading.RLock()",
        "STEP = torch.zeros(3)",
        "TABLE = (1, [2])",
        "TABLE = (1, *([2],))",
        "def table() -> dict[str, int]:\n    return {}\nTABLE = table()",
        "TABLE = MappingProxyType({'a': []})",
        "TABLE = {1: 2} | {3: 4}",
        "NAMES = [x for x in y]",
        "def f():\n    global _STATE\n    _STATE = 1",
        "class A:\n    cache = {}",
        "class A:\n    cache: dict[str, int] = defaultdict(int)",
        "class A: ...\nDEFAULT = A()",
        "@dataclass\nclass A: ...\nDEFAULT = A()",
        "__all__ = []\nREGISTRY = __all__ + []",
    ],
)
def test_mutable_checker_finds(source: str) -> None:
    assert len(mutable_violations(source, "state")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "__all__ = ['a']",
        "T = TypeVar('T')\nP = ParamSpec('P')",
        "_LOG = logging.getLogger(__name__)",
        "_LIB = torch.library.Library('fcg', 'DEF')\n_LIB.define('f(Tensor x) -> Tensor')",
        "_RE = re.compile('x')",
        "SIZES = MappingProxyType({'a': (1, 2)})\nKINDS = frozenset({1, 2})\nPAIR = (1, 'a', None)",
        "Loss = Callable[[int, str], dict[str, int]]\nTree = int | list[int]",
        "f: Callable[[], list[int]] = lambda: []",
        "@dataclass(frozen=True)\nclass A: ...\nDEFAULT = A()",
        "class Miss:\n    __slots__ = ()\nMISS = Miss()",
        "HERE = os.path.dirname(__file__)\nDIRS = tuple(os.path.join(HERE, x) for x in 'ab')\nALL = (HERE, *f(1))",
        "def table(x) -> MappingProxyType[str, int]:\n    return MappingProxyType(dict(x))\nTABLE = table(())",
        "class Phase(Enum):\n    A = 1\nFIRST = Phase('A')",
        "class A:\n    __slots__ = ['x']\n    y: list[int] = field(default_factory=list)",
        "def f():\n    cache = {}\n    return cache",
    ],
)
def test_mutable_checker_allows(source: str) -> None:
    assert mutable_violations(source, "state") == []
