"""The public surface: its names, and what importing it does not do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import functional_cg as fcg
from functional_cg import errors
from tests.exports import exports

REPOSITORY = Path(__file__).resolve().parent.parent

FUNCTIONS = (
    "checkpoints",
    "bucket",
    "fork",
    "grad",
    "graph_fn",
    "graph_step",
    "load",
    "load_state_dict",
    "microbatches",
    "pack",
    "place",
    "prefetch",
    "record",
    "save",
    "snapshot",
    "state_dict",
    "statistics",
    "value_and_grad",
)
CLASSES = ("GraphStep", "TrainState")
MODULES = ("nn", "optim", "precision", "random", "sharding", "tree")

# Importing the package brings none of these: they belong to extras, to notebooks or to one device.
NOT_IMPORTED = ("IPython", "hypothesis", "matplotlib", "safetensors", "torch_optimizer", "triton")

IMPORT_SCRIPT = f"""
import sys
import einops, torch, tqdm
before = set(sys.modules)
rng, dtype, threads = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
import functional_cg
assert torch.equal(rng, torch.get_rng_state()), "draws from torch's generator"
assert dtype == torch.get_default_dtype() and torch.is_grad_enabled(), "changes a mode of torch"
assert threads == torch.get_num_threads(), "changes the number of threads"
assert not torch.cuda.is_initialized(), "initializes CUDA"
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} & set({NOT_IMPORTED!r})))
"""


def is_leftover(value: object) -> bool:
    """Whether a name is there only because of how imports work: a submodule, or a ``from __future__``."""
    submodule = isinstance(value, ModuleType) and value.__name__.startswith("functional_cg.")
    return submodule or type(value).__module__ == "__future__"


def test_all_equals_the_public_names() -> None:
    public = {
        name for name, value in vars(fcg).items() if not name.startswith("_") and not is_leftover(value)
    }
    modules = {name for name in exports(fcg) if isinstance(getattr(fcg, name, None), ModuleType)}
    assert set(exports(fcg)) == public | modules
    assert sorted(set(exports(fcg))) == sorted(exports(fcg))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_public(name: str) -> None:
    # `graph_step` is also the name of a module: the function has to win.
    assert name in exports(fcg)
    assert callable(getattr(fcg, name))
    assert not isinstance(getattr(fcg, name), type)


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_public(name: str) -> None:
    assert name in exports(fcg)
    assert isinstance(getattr(fcg, name), type)


@pytest.mark.parametrize("name", MODULES)
def test_module_is_public_and_says_what_it_exports(name: str) -> None:
    module = getattr(fcg, name)
    assert name in exports(fcg)
    assert isinstance(module, ModuleType)
    assert module.__name__ == f"functional_cg.{name}"
    assert [export for export in exports(module) if not hasattr(module, export)] == []


def test_types_of_sharding_are_public() -> None:
    """What users annotate: a mesh and a sharding."""
    mesh: fcg.sharding.Mesh = fcg.sharding.mesh({"data": -1}, device="cpu")
    zero: fcg.sharding.Zero = fcg.sharding.zero(mesh)
    assert type(mesh) is fcg.sharding.Mesh
    assert type(zero) is fcg.sharding.Zero
    for name in exports(fcg.sharding):
        assert getattr(fcg.sharding, name).__doc__
    fields = [field.name for field in dataclasses.fields(zero)]
    assert all(f" {field}: " in (fcg.sharding.Zero.__doc__ or "") for field in fields)


@pytest.mark.parametrize("name", exports(errors))
def test_error_is_public_and_also_a_builtin(name: str) -> None:
    error = getattr(fcg, name)
    assert name in exports(fcg)
    assert error is getattr(errors, name)
    assert issubclass(error, fcg.FunctionalCGError)
    if error is not fcg.FunctionalCGError:
        assert issubclass(error, TypeError | ValueError | RuntimeError)
    assert error.__doc__


def test_every_error_class_is_exported() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes == set(exports(errors))


def test_public_names_have_docstrings() -> None:
    named = {name: getattr(fcg, name, None) for name in exports(fcg)}
    assert [name for name, value in named.items() if callable(value) and not value.__doc__] == []


def test_import_is_light_and_changes_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_SCRIPT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_import_check_finds_what_is_imported() -> None:
    planted = IMPORT_SCRIPT.replace("import functional_cg\n", "import hypothesis\n")
    run = subprocess.run([sys.executable, "-c", planted], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["hypothesis"]
