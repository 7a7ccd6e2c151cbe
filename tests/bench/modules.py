"""Workloads made of a module: one GPT in ten spellings, and models of other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import workloads
from .rl import workloads as learners
from .system import BUDGETS, MODULES
from .systems.others import Encoder, UNet
from .systems.spellings import GPT, SPELLINGS, Size
from .workloads import Batch, Workload

__all__ = ["ModuleWorkload", "names", "workload"]

_SEED = 2
_POSITIONS = ("wpe.", "position_embeddings.")  # in names of parameters
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class ModuleWorkload(Workload):
    """A training step of a module, in bf16 by autocast with fp32 parameters, and AdamW.

    Attributes:
      make: Makes the module.
      loss: ``loss(module, batch)``.
      data: ``data(count)`` makes batches on the CPU.
      library: What has to be installed.
      curve: Whether it is trained within budgets of memory, too.
      text: Sizes, for people.
    """

    make: Callable[[], nn.Module] = nn.Module
    loss: Loss = lambda module, batch: module(**batch)
    data: Callable[[int], list[Batch]] = lambda count: []
    library: str = "torch"
    curve: bool = False
    text: str = ""

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that support the workload."""
        return (*MODULES, *(BUDGETS if self.curve else ()))

    @property
    def installed(self) -> bool:
        """Whether its library is there."""
        return importlib.util.find_spec(self.library) is not None

    def describe(self) -> str:
        """Describe the sizes for people."""
        return f"{self.text}, bf16 by autocast, fp32 parameters, AdamW"

    def batches(self, count: int) -> list[Batch]:
        """Make batches on the CPU, the same at each call."""
        return self.data(count)

    def parameters(self) -> int:
        """Count the elements of the parameters."""
        return sum(param.numel() for param in self._without_memory().parameters())

    def positions(self) -> int:
        """Count the elements of position embeddings."""
        named = self._without_memory().named_parameters()
        return sum(param.numel() for name, param in named if any(one in name for one in _POSITIONS))

    def _without_memory(self) -> nn.Module:
        with torch.device("meta"):
            return self.make()


def _drawn(draw: Callable[[torch.Generator], Batch]) -> Callable[[int], list[Batch]]:
    """Return what makes batches one by one, the same at each call."""

    def data(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(_SEED)
        return [draw(generator) for _ in range(count)]

    return data


def _tokens(vocab: int, batch: int, time: int, *, shifted: bool) -> Callable[[int], list[Batch]]:
    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(vocab, (batch, time + 1), generator=generator)
        if shifted:
            return {"x": rows[:, :-1].contiguous(), "y": rows[:, 1:].contiguous()}
        return {"input_ids": (tokens := rows[:, 1:].contiguous()), "labels": tokens}

    return _drawn(draw)


def _images(batch: int, size: int, classes: int, *, channels_last: bool) -> Callable[[int], list[Batch]]:
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def draw(generator: torch.Generator) -> Batch:
        return {
            "x": torch.randn(batch, 3, size, size, generator=generator).contiguous(memory_format=layout),
            "y": torch.randint(classes, (batch,), generator=generator),
        }

    return _drawn(draw)


def _classified(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]).float(), batch["y"])


def _of_hugging_face(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = module(**batch).loss
    return loss


def _spelled(name: str, spelling: str, size: Size) -> ModuleWorkload:
    if spelling == "odd-vocab":
        size = Size(size.layers, size.width, size.vocab - 47, size.batch, size.time)
    return ModuleWorkload(
        name,
        "module",
        size.layers,
        size.width,
        size.batch,
        size.time,
        size.vocab,
        bf16=True,
        steps=40,
        tolerance=2e-2,
        curve=spelling == "plain",
        make=lambda: GPT(size, spelling),
        data=_tokens(size.vocab, size.batch, size.time, shifted=True),
        text=f"GPT, {size.layers} blocks, {size.width} wide, {size.batch}x{size.time} tokens, spelled {spelling!r}",
    )


def _hugging_face(name: str, model: str, config: str, size: Size, **options: Any) -> ModuleWorkload:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return ModuleWorkload(
        name,
        "module",
        size.layers,
        size.width,
        size.batch,
        size.time,
        size.vocab,
        bf16=True,
        steps=40,
        tolerance=2e-2,
        make=make,
        loss=_of_hugging_face,
        data=_tokens(size.vocab, size.batch, size.time, shifted=False),
        library="transformers",
        curve=name == "zoo-gpt2",
        text=f"{model}, {size.layers} blocks, {size.width} wide, {size.batch}x{size.time} tokens",
    )


def _speech(name: str) -> ModuleWorkload:
    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))
    }

    def make() -> nn.Module:
        import transformers

        config = transformers.WhisperConfig(d_model=512, use_cache=False, **sizes)
        model: nn.Module = transformers.WhisperForConditionalGeneration(config)
        return model

    def draw(generator: torch.Generator) -> Batch:
        return {
            "input_features": torch.randn(8, 80, 3000, generator=generator),
            "labels": torch.randint(1, 50_000, (8, 128), generator=generator),
        }

    text = "Whisper base, 8 spectrograms of 80x3000, 128 tokens each"
    return _module(name, make, _of_hugging_face, _drawn(draw), text, "transformers")


def _diffusion(name: str) -> ModuleWorkload:
    def draw(generator: torch.Generator) -> Batch:
        return {
            "x": torch.randn(32, 3, 32, 32, generator=generator),
            "time": torch.randint(1000, (32,), generator=generator),
            "noise": torch.randn(32, 3, 32, 32, generator=generator),
        }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(module(batch["x"], batch["time"]).float(), batch["noise"])

    text = "U-Net of a diffusion model, 128 to 512 channels, 32 pictures of 3x32x32"
    return _module(name, lambda: UNet(128, (1, 2, 2, 4), attends_at=2), loss, _drawn(draw), text, "torch")


def _encoder(name: str) -> ModuleWorkload:
    return _module(
        name,
        lambda: Encoder(32_000, 512, 512, 6),
        lambda module, batch: module(batch["x"], batch["y"]),
        _tokens(32_000, 32, 512, shifted=True),
        "nn.TransformerEncoder, 6 layers, 512 wide, dropout 0.1, 32x512 tokens",
        "torch",
    )


def _module(
    name: str,
    make: Callable[[], nn.Module],
    loss: Loss,
    data: Callable[[int], list[Batch]],
    text: str,
    library: str,
) -> ModuleWorkload:
    return ModuleWorkload(
        name, "module", bf16=True, steps=40, tolerance=5e-2, make=make, loss=loss, data=data, library=library, text=text
    )  # fmt: skip


def _vision(
    name: str, library: str, make: Callable[[], nn.Module], text: str, *, last: bool
) -> ModuleWorkload:
    data = _images(64, 224, 1000, channels_last=last)
    text = f"{text}, 64 pictures of 3x224x224{', channels_last' if last else ''}"
    return _module(name, make, _classified, data, text, library)


def _timm(name: str, *, last: bool = False) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    return _in_channels_last(model) if last else model


def _resnet50() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet50()
    return _in_channels_last(model)


def _in_channels_last(model: nn.Module) -> nn.Module:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _all() -> tuple[ModuleWorkload, ...]:
    small = Size(layers=12, width=768, vocab=50304, batch=16, time=1024)
    tiny = Size(layers=1, width=64, vocab=512, batch=2, time=32)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    llama = {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "use_cache": False,
    }  # fmt: skip
    return (
        *(_spelled(f"spelling-{name}", name, small) for name in SPELLINGS),
        *(_spelled(f"spelling-{name}-tiny", name, tiny) for name in SPELLINGS),
        _hugging_face(
            "zoo-gpt2", "GPT2LMHeadModel", "GPT2Config", Size(12, 768, 50257, 8, 1024), **no_dropout
        ),
        _hugging_face(
            "zoo-gpt2-dropout",
            "GPT2LMHeadModel",
            "GPT2Config",
            Size(12, 768, 50257, 8, 1024),
            use_cache=False,
        ),
        _hugging_face("zoo-bert", "BertForMaskedLM", "BertConfig", Size(12, 768, 30522, 32, 256), **bert),
        _hugging_face("zoo-bert-dropout", "BertForMaskedLM", "BertConfig", Size(12, 768, 30522, 32, 256)),
        _hugging_face(
            "zoo-llama", "LlamaForCausalLM", "LlamaConfig", Size(12, 768, 32_000, 8, 1024), **llama
        ),
        _vision("zoo-resnet50", "torchvision", _resnet50, "torchvision ResNet-50", last=True),
        _vision("zoo-vit", "timm", lambda: _timm("vit_base_patch16_224"), "timm ViT-B/16", last=False),
        _vision("zoo-convnext", "timm", lambda: _timm("convnext_tiny"), "timm ConvNeXt-T", last=False),
        *_more(llama),
    )


def _more(llama: Mapping[str, Any]) -> Iterator[ModuleWorkload]:
    size = Size(12, 768, 32_000, 8, 1024)
    for name, options in (
        ("Mistral", {"sliding_window": None}),
        ("Gemma2", {"sliding_window": 512, "head_dim": 64}),
    ):
        yield _hugging_face(
            f"zoo-{name.lower()}",
            f"{name}ForCausalLM",
            f"{name}Config",
            size,
            **{**llama, "num_key_value_heads": 4, **options},
        )
    opt = {"dropout": 0.0, "attention_dropout": 0.0, "use_cache": False}
    yield _hugging_face("zoo-opt", "OPTForCausalLM", "OPTConfig", Size(12, 768, 50272, 8, 1024), **opt)
    yield _hugging_face(
        "zoo-distilbert", "DistilBertForMaskedLM", "DistilBertConfig", Size(6, 768, 30522, 32, 256)
    )
    yield _speech("zoo-whisper")
    yield _encoder("zoo-encoder")
    yield _diffusion("zoo-unet")
    for name, model, text, last in (
        ("zoo-swin", "swin_tiny_patch4_window7_224", "timm Swin-T", False),
        ("zoo-mixer", "mixer_b16_224", "timm Mixer-B/16", False),
        ("zoo-deit", "deit_small_patch16_224", "timm DeiT-S/16", False),
        ("zoo-efficientnet", "efficientnet_b0", "timm EfficientNet-B0", True),
        ("zoo-regnet", "regnety_016", "timm RegNetY-1.6GF", True),
    ):
        yield _vision(name, "timm", partial(_timm, model, last=last), text, last=last)


def names() -> tuple[str, ...]:
    """List all workloads for the command line."""
    return (*workloads.names(), *learners.names(), *(one.name for one in _all()))


def workload(name: str) -> Workload:
    """Look up a workload by name."""
    known = next((one for one in (*_all(), *learners.workloads()) if one.name == name), None)
    return known or workloads.workload(name)
