"""Models of ``timm`` and ``torchvision`` that classify images: the smallest of each family, in channels_last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Size

__all__ = ["of_timm", "of_torchvision"]

_CLASSES = 10
_SMALL = tuple(
    "atto femto pico nano zepto xxs xxsmall xxtiny xs xtiny xsmall 0 s0 t0 n0 b0 m0 a0 18 10 12 26 14 050 "
    "tiny ti t mini lite small s little 9m 28 32 34 50 base b".split()
)


def of_timm(size: Size) -> Iterator[Case]:
    """Yield the smallest model of each module of timm."""
    import timm

    for family in timm.list_modules():
        names = timm.list_models(module=family)
        if names:
            name = min(names, key=_rank)
            image = _image(name, size)
            yield _case(name, "timm", partial(_of_timm, name, image), size, image)


def of_torchvision(size: Size) -> Iterator[Case]:
    """Yield the smallest model of each family of torchvision."""
    from torchvision import models

    names = models.list_models(module=models)
    families: dict[str, str] = {}
    for name in sorted(names, key=lambda name: _torchvision_parameters(models, name)):
        families.setdefault(name.rstrip("0123456789").split("_")[0], name)
    for name in families.values():
        image = (
            299
            if name == "inception_v3"
            else 224
            if name.startswith(("vit", "maxvit"))
            else size.image or 224
        )
        yield _case(name, "torchvision", partial(_of_torchvision, name), size, image)


def _case(name: str, library: str, make: Any, size: Size, image: int) -> Case:
    return Case(name, library, make, partial(_batch, size.batch, image), _loss, channels_last=True)


def _rank(name: str) -> tuple[int, int, str]:
    """Order names by the size that they tell: counting the parameters of every model takes minutes."""
    parts = re.split(r"[_.]", name)
    return (
        min((place for place, word in enumerate(_SMALL) if word in parts), default=len(_SMALL)),
        len(name),
        name,
    )


def _torchvision_parameters(models: Any, name: str) -> int:
    (weights, *_) = models.get_model_weights(name)
    return int(weights.meta["num_params"])


def _image(name: str, size: Size) -> int:
    import timm

    config = timm.get_pretrained_cfg(name)
    own = config.input_size[-1] if config else 224
    return size.image or min(own, 224)


def _of_timm(name: str, image: int) -> nn.Module:
    import timm

    try:
        module = timm.create_model(name, num_classes=_CLASSES, img_size=image)
    except TypeError:  # it takes images of any size
        module = timm.create_model(name, num_classes=_CLASSES)
    return module  # type: ignore[no-any-return]


def _of_torchvision(name: str) -> nn.Module:
    from torchvision import models

    more = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    module: nn.Module = models.get_model(name, weights=None, num_classes=_CLASSES, **more)
    return module


def _batch(count: int, image: int, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(count, 3, image, image, generator=generator)
    return {"x": pixels, "y": torch.randint(0, _CLASSES, (count,), generator=generator)}


def _loss(forward: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(forward(batch["x"]), batch["y"])
