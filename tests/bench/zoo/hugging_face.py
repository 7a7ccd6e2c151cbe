"""Models of ``transformers``, each with its default configuration, made small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Size

__all__ = ["cases"]

# Mapping from a kind of model to the class, in `transformers.models.auto.modeling_auto`, and the kind of batch.
_TASKS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "images"),
)
_IMAGE = 32  # pixels


def cases(size: Size) -> Iterator[Case]:
    """Yield a case for each class of the library's tables of tasks."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for table, kind in _TASKS:
        for model_type, names in getattr(modeling_auto, table).items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield Case(
                    name,
                    "transformers",
                    partial(_made, model_type, name, size),
                    partial(_BATCHES[kind], size),
                    _loss,
                )


def _made(model_type: str, name: str, size: Size) -> nn.Module:
    import transformers

    made = transformers.CONFIG_MAPPING[model_type]
    config = made(**_smaller(made(), size))
    for one in [
        config,
        *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig)),
    ]:
        _shrink(one, size)
    module: nn.Module = getattr(transformers, name)._from_config(config)
    return module


def _smaller(config: Any, size: Size) -> dict[str, int]:
    """Return the sizes of a small model, by the names that a configuration has for them."""
    by_name = {name: value for text, value in _sizes(size) for name in text.split()}
    return {name: value for name, value in by_name.items() if type(getattr(config, name, None)) is int}


def _sizes(size: Size) -> Iterator[tuple[str, int]]:
    inner = size.width * 3 // 2
    yield "vocab_size", size.vocabulary
    yield "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size", size.width
    yield "intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim", inner
    yield (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers",
        size.layers,
    )
    yield (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads",
        size.heads,
    )
    yield "num_key_value_heads", size.heads // 2
    yield "head_dim d_kv v_head_dim", size.width // size.heads
    yield (
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
        4 * size.length,
    )
    yield "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank", 16
    yield "patch_size num_experts num_local_experts n_routed_experts moe_num_experts state_size", 4
    yield "qk_rope_head_dim qk_nope_head_dim", 4
    yield "num_experts_per_tok eos_token_id", 2
    yield "n_group topk_group first_k_dense_replace bos_token_id", 1
    yield "image_size", _IMAGE
    yield "pad_token_id", 0


def _shrink(config: Any, size: Size) -> None:
    for name, value in _smaller(config, size).items():
        setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = vars(config).get(name)
        if isinstance(kinds, list):  # one entry per layer: each kind once
            setattr(config, name, (list(dict.fromkeys(kinds)) * size.layers)[: size.layers])


def _tokens(size: Size, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, size.vocabulary, (size.batch, size.length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _images(size: Size, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(size.batch, 3, _IMAGE, _IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (size.batch,), generator=generator)}


_BATCHES = MappingProxyType({"tokens": _tokens, "images": _images})


def _loss(forward: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = forward(**batch).loss
    return loss
