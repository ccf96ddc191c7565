"""Saves a compressed model as a folder that transformers and `init_inference` load.

transformers builds a model from its configuration, so what was removed must be a number there: the width of MLPs, or the number of
heads if the configuration has `head_dim` (Llama and relatives). Other shapes raise an error that names them.

Weights on a `served` grid are saved rounded. int8 weights give the same codes again, even in bf16: the largest of a row is kept,
and a product is rounded by less than a quarter of a step. int4 weights do not (with bf16 weights, most groups get another scale),
so their codes are saved beside them, in `slipstream_codes.safetensors`, which `init_inference(dtype="int4")` reads.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compression.compress import clean
from slipstream.compression.layers import Compressed
from slipstream.config.huggingface import CODES

logger = logging.getLogger(__name__)
_WIDTHS = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "ffn_hidden_size")


def export(model: nn.Module, deepspeed_config: str | Path | Mapping[str, Any], path: str | Path, **options: Any) -> nn.Module:
    """Clean the model (`redundancy_clean`), fit its configuration to the result, and save both, with codes. Returns the model.

    model: a PreTrainedModel, compressed by this config. deepspeed_config: as in `redundancy_clean`. options: of `save_pretrained`.
    Raises ValueError if transformers' configuration cannot express the remaining shapes; then the model is cleaned, but not saved.
    """
    target: Any = getattr(model, "module", model)
    if not hasattr(target, "save_pretrained") or not hasattr(target, "config"):
        raise ValueError(
            f"export() saves models of transformers; for a {type(target).__name__} save redundancy_clean()'s state_dict()"
        )
    from safetensors.torch import save_file

    codes: dict[str, Tensor] = {}
    clean(model, deepspeed_config, codes)
    target.config = fitted_config(target)
    compressed = [name for name, module in target.named_modules() if isinstance(module, Compressed)]
    if compressed:
        logger.warning("export: what loads the folder does not round the inputs of %d layers (%s)", len(compressed), compressed[0])
    names = {name for name, _ in target.named_parameters(remove_duplicate=False)} | {*_blank(target, target.config)}
    state = {name: value for name, value in target.state_dict().items() if name in names}
    target.save_pretrained(path, state_dict=state, **options)
    (Path(path) / CODES).unlink(missing_ok=True)
    if codes:
        save_file(codes, Path(path) / CODES)
    return model


def fitted_config(model: Any) -> Any:
    """The model's configuration, changed so that transformers builds its shapes. Raises ValueError if that is impossible."""
    misfits = _misfits(model, model.config)
    pairs = sorted({pair for shapes in misfits.values() for pair in zip(*shapes, strict=True) if pair[0] != pair[1]})
    for changes in itertools.product(*(_changes(model.config, *pair) for pair in pairs)):
        config = copy.deepcopy(model.config)
        for name, value in (item for change in changes for item in change.items()):
            setattr(config, name, value)
        if not _misfits(model, config):
            return config
    name, (theirs, own) = next(iter(misfits.items()))
    raise ValueError(
        f"{type(model.config).__name__} cannot say what is left of the model: {name} has shape {own}, and transformers builds "
        f"{theirs}. Without related_modules rows and heads become zeros and keep their places; or save the cleaned state_dict()"
    )


def _changes(config: Any, old: int, new: int) -> Iterator[dict[str, int]]:
    """Changes of fields that may turn a dimension of `old` into one of `new`."""
    for name in _WIDTHS:
        if getattr(config, name, None) == old:
            yield {name: new}
    size, hidden = getattr(config, "head_dim", None), getattr(config, "hidden_size", 0)
    if size and old == size * config.num_attention_heads and new % size == 0 and hidden % (heads := new // size) == 0:
        changes = {"num_attention_heads": heads}
        yield changes | ({"num_key_value_heads": heads} if hasattr(config, "num_key_value_heads") else {})


def _misfits(model: Any, config: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Weights whose shape differs from that in the model that transformers builds: name -> (theirs, own)."""
    built = _blank(model, config)
    own = {name: tuple(value.shape) for name, value in model.named_parameters()}
    return {name: (built.get(name, (0,) * len(shape)), shape) for name, shape in own.items() if built.get(name) != shape}


def _blank(model: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the state of the model that transformers builds; transposed layers have no shape."""
    with torch.device("meta"):
        built = type(model)(config)
    modules = dict(built.named_modules())
    swapped = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(modules.get(n, m), nn.Linear)]
    return {name: tuple(value.shape) for name, value in built.state_dict().items() if name.rpartition(".")[0] not in swapped}
