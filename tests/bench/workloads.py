"""Defines the workloads: their sizes, initial values and batches.

All systems start a workload from the same values, with the same batches and the same arithmetic: parameters are kept in
fp32 and cast to the compute dtype where they are used; norms, softmax and losses are computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .system import FEEDS, FEW, FEW_LEAVES, LINE, OPPONENTS, OURS, RECORDED, UPDATES, WATCHED

__all__ = [
    "ACTIONS",
    "CLASSES",
    "MANY_LEAVES",
    "OBSERVATION",
    "Batch",
    "Params",
    "Workload",
    "blocks",
    "names",
    "workload",
]

Params = dict[str, Tensor]
Batch = dict[str, Tensor]

_INITIAL_SEED, _BATCH_SEED, _GRADIENT_SEED = 1, 2, 3
_GPT_STD = 0.02
MANY_LEAVES, MANY_FLAT_LEAVES = 200, 2000  # with more leaves than this, the update is not given to a compiler
CLASSES, ACTIONS = 10, 4  # classes of the convolutional net, actions of the actor
_PICTURE, OBSERVATION = 32, 16
_LEAF = 4  # elements of a leaf, where the number of leaves is what matters
_TRAINED = (*OURS, LINE, RECORDED, WATCHED, *(name for name in OPPONENTS if name != "max-autotune"))


@dataclass(frozen=True)
class Workload:
    """A training step to be timed.

    Attributes:
      name: Name on the command line.
      kind: ``mlp`` (mean squared error), ``gpt`` (next-token loss), ``cnn`` (a residual net with batch norm),
        ``dropout`` (nothing but one), ``actor`` (an actor-critic update), ``loop`` (the loop around that update,
        with an environment in numpy), ``leaves`` (many leaves, one of them updated), ``optimizer`` (an update alone),
        ``module`` (:class:`.modules.ModuleWorkload`), ``learner`` (:class:`.rl.workloads.LearnerWorkload`).
      layers: Number of layers or blocks; per stage, for ``cnn``.
      width: Features of a layer, channels of the first stage, or size of a leaf.
      batch: Examples.
      time: Tokens of an example.
      vocab: Number of tokens.
      leaves: Number of leaves of the state, for ``leaves`` and ``optimizer``; 0 for those of the blocks of a GPT.
      rule: The update rule, for ``optimizer``.
      flat: Whether ours updates the leaves as one vector, for ``optimizer``.
      host: Whether batches come from the host at each step.
      bf16: Whether the arithmetic is in bf16 (with fp32 parameters and moments) instead of fp32.
      steps: Timed steps for each system, unless the command line sets them.
      tolerance: Largest relative difference between the first losses of two systems.
    """

    name: str
    kind: Literal["mlp", "gpt", "cnn", "dropout", "actor", "loop", "leaves", "optimizer", "module", "learner"]
    layers: int = 0
    width: int = 0
    batch: int = 0
    time: int = 0
    vocab: int = 0
    leaves: int = 0
    rule: Literal["adamw", "muon", "lamb", "adafactor"] = "adamw"
    flat: bool = False
    host: bool = False
    bf16: bool = False
    steps: int = 100
    tolerance: float = 1e-4
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    @property
    def heads(self) -> int:
        """Number of attention heads, of 64 features if that divides the width."""
        return max(1, self.width // 64)

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that support the workload."""
        few = (FEW,) if self.leaves > FEW_LEAVES and self.width == _LEAF else ()
        if self.kind == "leaves":
            return (*OURS, *few, "hand-graph", "jax")
        if self.kind == "optimizer" and self.rule != "adamw":
            return (*OURS, "eager", "compile", "jax")
        if self.kind == "optimizer":
            variants = UPDATES if self.flat and self.width > _LEAF else few
            return (*OURS, *variants, "eager", "compile", "hand-graph", "jax")
        if self.kind == "loop":
            return (*OURS, "eager", "compile", "reduce-overhead", "jax")
        if self.host:
            return (*OURS, *FEEDS, "eager", "compile", "jax")
        return _TRAINED

    @property
    def anchor(self) -> str:
        """Which of our systems the others are compared with."""
        return OURS[self.slow_to_compile]

    @property
    def slow_to_compile(self) -> bool:
        """Whether compiling the update of so many leaves takes minutes."""
        return self.kind == "optimizer" and self.leaves > (MANY_FLAT_LEAVES if self.flat else MANY_LEAVES)

    def describe(self) -> str:
        """Describe the sizes for people."""
        arithmetic = "bf16 compute, fp32 masters" if self.bf16 else "fp32"
        if self.kind == "leaves":
            return f"{self.leaves:,} leaves of f32[{self.width}], of which the step updates one"
        if self.kind == "optimizer" and not self.leaves:
            return f"{self.rule} alone, the leaves of {self.layers} blocks of a GPT, {self.width} wide, fp32"
        if self.kind == "optimizer":
            how = "; ours as one vector" if self.flat else ""
            return f"AdamW alone, {self.leaves:,} leaves of f32[{self.width:,}]{how}"
        if self.kind == "dropout":
            return f"one dropout (p = 0.1) of f32[{self.batch:,},{self.width:,}], forward, backward, SGD; masks differ"
        if self.kind == "cnn":
            where = "from the host at each step; ours is resident" if self.host else "resident"
            return (
                f"residual net, 3x{self.layers} blocks from {self.width} channels, batch norm, channels_last, "
                f"{self.batch} pictures of 3x{_PICTURE}x{_PICTURE}, {where}, {arithmetic}, AdamW"
            )
        if self.kind in ("actor", "loop"):
            what = "one update" if self.kind == "actor" else "observe, act, act on the host, update"
            return f"actor-critic, {self.layers} layers of {self.width}, {self.batch} environments: {what}, fp32, AdamW"
        if self.kind == "mlp":
            return f"{self.layers} layers of {self.width}, batch {self.batch}, {arithmetic}, AdamW"
        return (
            f"{self.layers} blocks, {self.width} wide, {self.heads} heads, vocab {self.vocab:,}, "
            f"{self.batch}x{self.time} tokens, tied head, no dropout, {arithmetic}, AdamW"
        )

    def params(self) -> Params:
        """Make the initial values on the CPU, the same at each call."""
        generator = torch.Generator().manual_seed(_INITIAL_SEED)

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(shape, generator=generator) * std

        if self.kind == "optimizer" and not self.leaves:
            return _gpt_blocks(self, normal)
        if self.kind in ("leaves", "optimizer"):
            return {f"leaf{i:05d}": torch.full((self.width,), float(i % 7)) for i in range(self.leaves)}
        if self.kind == "dropout":
            return {"x": torch.ones(self.batch, self.width)}
        if self.kind == "cnn":
            return _cnn_params(self, normal)
        width, params = self.width, {}
        if self.kind in ("actor", "loop"):
            for i in range(self.layers):
                inputs = width if i else OBSERVATION
                params[f"w{i}"] = normal(width, inputs, std=(2 / inputs) ** 0.5)
                params[f"b{i}"] = torch.zeros(width)
            return params | {
                "policy": normal(ACTIONS, width, std=width**-0.5), "value": normal(1, width, std=width**-0.5)
            }  # fmt: skip
        if self.kind == "mlp":
            for i in range(self.layers):
                params[f"w{i}"] = normal(width, width, std=(2 / width) ** 0.5)
                params[f"b{i}"] = torch.zeros(width)
            return params
        params["wte"] = normal(self.vocab, width, std=_GPT_STD)
        params["wpe"] = normal(self.time, width, std=_GPT_STD)
        params |= _gpt_blocks(self, normal)
        return params | {"norm": torch.ones(width), "shift": torch.zeros(width)}

    def parameters(self) -> int:
        """Count the elements of the parameters."""
        return sum(value.numel() for value in self.params().values())

    def positions(self) -> int:
        """Count the elements of position embeddings, which are looked up and not multiplied."""
        return self.time * self.width

    def model_flops(self) -> float:
        """Count the FLOPs of a step of a language model, without what is recomputed; 0 for other models.

        Source: Chowdhery et al. 2022, "PaLM", appendix B; nanoGPT counts like this, without position embeddings.
        """
        if not self.time:
            return 0.0
        multiplied = self.parameters() - self.positions()
        return self.batch * self.time * (6.0 * multiplied + 12 * self.layers * self.width * self.time)

    def gradients(self) -> Params:
        """Make the gradients for timing an update alone, the same at each step."""
        generator = torch.Generator().manual_seed(_GRADIENT_SEED)
        return {
            name: 0.01 * (value if self.leaves else torch.randn(value.shape, generator=generator))
            for name, value in self.params().items()
        }

    @property
    def shown(self) -> str:
        """The leaf whose first element replaces the loss when an update alone is timed."""
        return "leaf00001" if self.leaves else "up_0"

    def buffers(self) -> Params:
        """Make the running statistics of batch norm; empty for other kinds."""
        if self.kind != "cnn":
            return {}
        sizes = {"stem": self.width}
        for name, _, channels, _ in blocks(self):
            sizes |= {f"{name}_a": channels, f"{name}_b": channels}
        means = {f"mean_{name}": torch.zeros(channels) for name, channels in sizes.items()}
        return means | {f"var_{name}": torch.ones(channels) for name, channels in sizes.items()}

    def batches(self, count: int) -> list[Batch]:
        """Make batches on the CPU, the same at each call."""
        generator = torch.Generator().manual_seed(_BATCH_SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        if self.kind in ("leaves", "optimizer"):
            return [{"x": normal(self.width if self.kind == "leaves" else 4)} for _ in range(count)]
        if self.kind in ("mlp", "dropout"):
            rows = self.batch if self.kind == "mlp" else 4
            return [{name: normal(rows, self.width) for name in ("x", "y")} for _ in range(count)]
        if self.kind == "cnn":
            shape = (self.batch, 3, _PICTURE, _PICTURE)
            return [
                {
                    "x": normal(*shape).contiguous(memory_format=torch.channels_last),
                    "y": torch.randint(CLASSES, (self.batch,), generator=generator),
                }
                for _ in range(count)
            ]
        if self.kind in ("actor", "loop"):
            actions = torch.randint(ACTIONS, (count, self.batch, 1), generator=generator)
            return [
                {
                    "x": normal(self.batch, OBSERVATION),
                    "y": torch.cat([row.float(), normal(self.batch, 1)], 1),
                }
                for row in actions
            ]
        tokens = torch.randint(self.vocab, (count, self.batch, self.time + 1), generator=generator)
        return [{"x": row[:, :-1].contiguous(), "y": row[:, 1:].contiguous()} for row in tokens]


def blocks(work: Workload) -> Iterator[tuple[str, int, int, int]]:
    """List the blocks of a residual net: name, channels in, channels out, stride."""
    before = work.width
    for stage in range(3):
        channels = work.width * 2**stage
        for i in range(work.layers):
            yield f"s{stage}b{i}", before, channels, 2 if stage and not i else 1
            before = channels


def _gpt_blocks(work: Workload, normal: Any) -> Params:
    params: Params = {}
    width, added = work.width, _GPT_STD / math.sqrt(2 * work.layers)
    for i in range(work.layers):
        params |= {f"norm1_{i}": torch.ones(width), f"shift1_{i}": torch.zeros(width)}
        params[f"qkv_{i}"] = normal(3 * width, width, std=_GPT_STD)
        params[f"out_{i}"] = normal(width, width, std=added)
        params |= {f"norm2_{i}": torch.ones(width), f"shift2_{i}": torch.zeros(width)}
        params[f"up_{i}"] = normal(4 * width, width, std=_GPT_STD)
        params[f"down_{i}"] = normal(width, 4 * width, std=added)
    return params


def _cnn_params(work: Workload, normal: Any) -> Params:
    def conv(outputs: int, inputs: int, size: int) -> Tensor:
        weight: Tensor = normal(outputs, inputs, size, size, std=(2 / (inputs * size * size)) ** 0.5)
        return weight.contiguous(memory_format=torch.channels_last)

    def norm(name: str, channels: int) -> Params:
        return {f"scale_{name}": torch.ones(channels), f"shift_{name}": torch.zeros(channels)}

    params = {"conv_stem": conv(work.width, 3, 3)} | norm("stem", work.width)
    channels = work.width
    for name, inputs, channels, _ in blocks(work):
        params |= {f"conv_{name}_a": conv(channels, inputs, 3), f"conv_{name}_b": conv(channels, channels, 3)}
        params |= norm(f"{name}_a", channels) | norm(f"{name}_b", channels)
        if inputs != channels:
            params[f"conv_{name}_skip"] = conv(channels, inputs, 1)
    return params | {"head": normal(CLASSES, channels, std=channels**-0.5), "bias": torch.zeros(CLASSES)}


def _all() -> tuple[Workload, ...]:
    bf16: dict[str, Any] = {"bf16": True, "tolerance": 1e-2}
    gpt: dict[str, Any] = {"kind": "gpt", **bf16}
    cnn: dict[str, Any] = {"kind": "cnn", **bf16, "layers": 2, "width": 64, "batch": 256, "tolerance": 5e-2}
    adamw: dict[str, Any] = {"kind": "optimizer", "learning_rate": 1e-2}
    # Muon iterates in bfloat16, where a compiler rounds less often, and optax in fp32: a few hundredths of a step.
    rules: dict[str, dict[str, Any]] = {
        "muon": {**adamw, "rule": "muon", "learning_rate": 2e-3, "tolerance": 5e-3},
        "lamb": {**adamw, "rule": "lamb", "weight_decay": 0.0, "tolerance": 1e-4},
        "adafactor": {**adamw, "rule": "adafactor", "tolerance": 1e-4},
    }
    actor: dict[str, Any] = {"layers": 2, "width": 256, "batch": 64, "tolerance": 1e-2}
    counts = (10, 100, 1000, 10_000)
    return (
        Workload("mlp-tiny", "mlp", 4, 256, 256, bf16=True, steps=1000, tolerance=1e-2),
        Workload("gpt-nano", layers=4, width=256, batch=8, time=256, vocab=256, steps=300, **gpt),
        Workload("gpt2-124m", layers=12, width=768, batch=16, time=1024, vocab=50304, steps=100, **gpt),
        Workload("cnn", steps=100, **cnn),
        Workload("cnn-tiny", **cnn | {"layers": 1, "width": 8, "batch": 16}, steps=20),
        *(Workload(f"leaves-{n}-one", "leaves", width=_LEAF, leaves=n, steps=300) for n in counts),
        *(Workload(f"leaves-{n}-flat", width=_LEAF, leaves=n, flat=True, steps=100, **adamw) for n in counts),
        *(Workload(f"leaves-{n}-each", width=_LEAF, leaves=n, steps=100, **adamw) for n in counts),
        Workload("optimizer", width=838_000, leaves=148, flat=True, steps=50, **adamw),
        Workload("optimizer-10000", width=1020, leaves=10_000, flat=True, steps=50, **adamw),
        Workload("optimizer-small", width=12_000, leaves=100, flat=True, steps=100, **adamw),
        *(
            Workload(f"optimizer-{rule}{size}", layers=layers, width=width, steps=steps, **alone)
            for rule, alone in rules.items()
            for size, layers, width, steps in (("", 12, 768, 40), ("-small", 2, 128, 100))
        ),
        Workload("host-batch", host=True, steps=100, **cnn),
        Workload("host-batch-tiny", host=True, **cnn | {"layers": 1, "width": 8, "batch": 16}, steps=20),
        Workload("dropout", "dropout", width=3072, batch=16_384, tolerance=2e-2),
        Workload("dropout-small", "dropout", width=256, batch=4096, tolerance=2e-2),
        Workload("rl-update", "actor", steps=500, **actor),
        Workload("rl-loop", "loop", steps=200, **actor),
        Workload("mlp-4x64", "mlp", 4, 64, 32, steps=1000),
        Workload("mlp-4x256", "mlp", 4, 256, 256, steps=200),
    )


def names() -> tuple[str, ...]:
    """List the workloads for the command line."""
    return tuple(one.name for one in _all())


def workload(name: str) -> Workload:
    """Look up a workload by name."""
    return next(one for one in _all() if one.name == name)
