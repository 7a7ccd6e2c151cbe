"""Generates the table of optimizer classes in the page of ``optim``: run ``python -m tests.optimizer_table``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch

from functional_cg import optim
from functional_cg.errors import CaptureError
from functional_cg.optim.adapters.proof import NATIVE, from_torch

MARK = "<!-- made by `python -m tests.optimizer_table` -->\n"

# Transformations in this package that share name and formula with a class; tests compare each with that class.
BESIDE = MappingProxyType(
    {
        "torch.optim": (
            "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "muon", "nadam", "radam", "rmsprop", "sgd",
        ),
        "torch_optimizer": ("adabelief", "lamb", "lars", "lookahead", "novograd", "radam", "yogi"),
    }
)  # fmt: skip


def readme() -> Path:
    """Path of the README with the table."""
    return Path(optim.__file__).with_name("README.md")


def classes(package: str) -> Iterator[type[torch.optim.Optimizer]]:
    """Yield the optimizer classes that a package exports, sorted by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package warns on import
        module = importlib.import_module(package)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
            if value is not torch.optim.Optimizer:
                yield value


def row(package: str, cls: type[torch.optim.Optimizer]) -> str:
    """The table row of a class: native, adapted, or why it is refused."""
    name = cls.__name__
    beside = f"`{name.lower()}`" if name.lower() in BESIDE[package] else ""
    try:
        tx = from_torch(cls)
    except CaptureError as error:
        reason = str(error).splitlines()[1].strip().removeprefix(name).strip().partition("Error: ")
        why = f"refused: {reason[2] or reason[0]}".removesuffix(".")
        return f"| `{name}` | {'native' if name in NATIVE else why} | {beside} |"
    return f"| `{name}` | adapted{', its first step apart' if tx.joined else ''} | {beside} |"


def table() -> str:
    """Render one Markdown table per package."""
    parts = []
    for package in BESIDE:
        rows = [row(package, cls) for cls in classes(package)]
        head = "| class | by `from_torch` | the same formula here |\n|---|---|---|\n"
        parts.append(f"\n### {package}\n\n{head}{''.join(one + chr(10) for one in rows)}")
    return "".join(parts)


def current() -> str:
    """README.md with its table regenerated."""
    return readme().read_text(encoding="utf-8").partition(MARK)[0] + MARK + table()


if __name__ == "__main__":
    readme().write_text(current(), encoding="utf-8")
