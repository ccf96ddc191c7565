"""Modules that neither generate nor embed (ViT, T5, Whisper, a custom network): `init_inference` computes their outputs, with the
linear layers of `slipstream.quantize`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from slipstream.inference import generic, precision
from slipstream.inference.models import is_encoder
from slipstream.quantized import quantize

_KINDS = {"int8": "int8", "int4": "int4", "bfloat16": "bf16"}  # dtypes with kernels for linear layers


def gives_outputs_only(model: nn.Module) -> bool:
    """Whether the model is no encoder and, as far as transformers can tell, no decoder."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "can_generate") or not hasattr(config, "model_type"):
        return True
    if is_encoder(config.model_type) or config.is_encoder_decoder:
        return not is_encoder(config.model_type)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def opened(model: nn.Module, kind: str, place: torch.device, group_size: int) -> nn.Module:
    """A copy in `kind` (of `precision.DTYPES`) that shares the unconverted tensors."""
    own: nn.Module = generic.shared_copy(model)
    if kind in precision.FLOATS:
        generic.cast(own, precision.FLOATS[kind])
    own = own.to(place).eval()
    return quantize(own, _KINDS[kind], block=group_size if kind == "int4" else None) if kind in _KINDS else own


class OutputsEngine:
    """What `InferenceEngine` needs of an engine. Methods that would generate raise."""

    tokenizer = None
    runner = None
    end_ids: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def start(self) -> None:
        """Nothing to start: calls compute in their own threads."""

    def close(self) -> None:
        """Nothing to free."""

    def _refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise ValueError(
            f"{self.model_name} is not a decoder that is served: engine(...) computes its outputs of tensors, and engine.module "
            f"has its other methods"
        )

    encode = submit = load_adapter = unload_adapter = _refuse
