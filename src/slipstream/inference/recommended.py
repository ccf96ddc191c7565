"""Sampling settings that a model recommends: the defaults of `slipstream chat` and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import huggingface
from slipstream.inference.core import SamplingParams

DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}  # for conversations, if the model recommends none

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF = {  # llama.cpp's keys
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# (general.basename, general.organization) -> settings that are only on the model card.
_CARDS: dict[tuple[str, str], Mapping[str, Any]] = {("smollm2", "HuggingFaceTB"): {"temperature": 0.2, "top_p": 0.9}}


def of_generation(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in generation_config.json; {} if it has none or disables sampling."""
    if generation.get("do_sample") is False:
        return {}
    return {name: value for name in _FIELDS if (value := generation.get(name)) is not None}


def of_folder(path: Path) -> dict[str, Any]:
    return of_generation(huggingface.read_generation(path / "generation_config.json"))


def of_gguf(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings in a GGUF file. Raises ValueError for invalid values."""
    stated = {name: metadata[key] for key, name in _GGUF.items() if key in metadata}
    try:
        SamplingParams(**stated)
    except ValueError as error:
        raise ValueError(f"the GGUF file's general.sampling: {error}") from None
    if stated or "tokenizer.chat_template" not in metadata:
        return stated
    return _CARDS.get((metadata.get("general.basename", ""), metadata.get("general.organization", "")), {})


def of_model(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation_config", None)
    return {} if generation is None else of_generation(generation.to_diff_dict())


def describe(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())
