"""Reads the pages of this folder: each row is a mistake, the program without it, and what the error says.

A row is a diff. The program with its ``-`` lines is the mistake; the program with its ``+`` lines does what the message
says. Both run after `PRELUDE`, which is what such a program usually begins with.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PRELUDE = """
import logging
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import functional_cg as fcg

model = nn.Linear(3, 1)
apply, params, buffers = fcg.from_module(model)
x, y = torch.ones(4, 3), torch.ones(4, 1)
batch = {"x": x, "y": y}
optimizer = fcg.optim.adamw(1e-3, weight_decay=0.01)
state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(0))

def loss_fn(params, batch):
    out, new_buffers = apply(params, buffers, batch["x"])
    return F.mse_loss(out, batch["y"])

@fcg.graph_step
def train_step(state, batch):
    loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}
"""
_WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.-]*")
_ROW = re.compile(r"### ([^\n]+)\n+```diff\n(.*?)```\n((?:\n?>[^\n]*\n)*)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One mistake.

    Attributes:
      page: The page's name, without ``.md``.
      name: What the mistake is.
      lines: Lines of the diff; the first character of each tells whose line it is.
      says: What the message says, line by line, beginning with the error's class; ``...`` stands for anything.
    """

    page: str
    name: str
    lines: tuple[str, ...]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def program(self, sign: str) -> str:
        """Return the program with the lines of this sign, ``-`` or ``+``, and empty lines for the others."""
        return PRELUDE + "\n".join(line[1:] if line[:1] in (sign, " ") else "" for line in self.lines)

    def run(self, sign: str) -> None:
        """Run a program, as a file whose source messages can read."""
        name = f"/home/user/{self.page}.py"
        source = self.program(sign)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), {"__name__": "__main__"})

    def advice_taken(self, text: str) -> bool:
        """Whether what the fixed program adds is what the advice names, or the advice is to leave something out."""
        advice = text.partition("To fix: ")[2].partition("\nDocs:")[0] or text
        added, removed = (
            {word for line in self.lines if line[:1] == sign for word in _WORD.findall(line)} for sign in "+-"
        )
        return not added - removed or bool((added - removed) & set(_WORD.findall(advice)))


def message_of(row: Row, sign: str) -> str:
    """Run a program of a row and return its error, or else its warnings, each with its class; "" without any."""
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            row.run(sign)
        return "\n".join(f"{one.category.__name__}: {one.message}" for one in caught)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def rows() -> list[Row]:
    """Return the rows of all pages."""
    return [
        Row(page.stem, name, tuple(diff.splitlines()), tuple(line[2:] for line in quote.split("\n") if line))
        for page in sorted(FOLDER.glob("*.md"))
        for name, diff, quote in _ROW.findall(page.read_text(encoding="utf-8"))
    ]
