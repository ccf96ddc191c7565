"""Reads a Slipstream checkpoint for serving: weights by name, and the configuration of the transformers model.

`engine.save_checkpoint` writes both (saving/entries.py). The weights are the optimizer's masters: fp32, unless those were bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import checkpoint
from slipstream.config.huggingface import check_config
from slipstream.inference.families import UnsupportedModel


class Trained(NamedTuple):
    """A checkpoint whose tensors are not read yet."""

    directory: Path
    tag: str
    tensors: Mapping[str, checkpoint.Entry]
    config: dict[str, Any]  # like config.json

    def state(self) -> dict[str, Tensor]:
        """Read parameters and buffers, by their names in the model, and verify checksums."""
        tensors = {
            name: torch.empty(info.shape, dtype=info.dtype)
            for name, info in self.tensors.items()
            if name.startswith(("model.", "buffer."))
        }
        checkpoint.load(self.directory, self.tag, tensors=tensors)
        return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def find(path: Path) -> Trained | None:
    """The checkpoint in this folder, or the one that its `latest` names; None without one, or for a file or Hugging Face folder."""
    path = path.resolve()
    if path.is_file() or (path / "config.json").is_file():
        return None
    directory, tag = (path.parent, path.name) if (path / "metadata.json").is_file() else (path, checkpoint.latest_tag(path))
    if tag is None:
        return None
    metadata = checkpoint.load_metadata(directory, tag)
    config = metadata.shared.get("model_config")
    if not isinstance(config, dict):
        raise ValueError(
            f"{metadata.path} has no model configuration, which is saved only for transformers models. "
            "Load it into its model (engine.load_checkpoint) and give that, or model.save_pretrained's folder"
        )
    check_config(config, metadata.path)
    return Trained(directory, tag, metadata.tensors, config)


def open_model(trained: Trained, dtype: torch.dtype | None) -> Any:
    """Create the live transformers model. dtype None: as saved. Raises UnsupportedModel."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    path, state = trained.directory / trained.tag, trained.state()
    try:
        config = CONFIG_MAPPING[trained.config["model_type"]].from_dict(trained.config)
        live = AutoModelForCausalLM.from_config(config, dtype=dtype or next(iter(state.values())).dtype)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot make a causal language model of {path}: {error}") from error
    lacking = [name for name, _ in live.named_parameters() if name not in state]
    surplus = live.load_state_dict(state, strict=False).unexpected_keys
    if lacking or surplus:
        verb, names = ("lacks", lacking) if lacking else ("has also", surplus)
        raise ValueError(f"{path} {verb} {', '.join(names[:5])}: it is not the checkpoint of a full {type(live).__name__}")
    return live
