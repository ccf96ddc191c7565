"""Weights out of engines and out of checkpoints, under the names of DeepSpeed's export functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream import checkpoint
from slipstream.checkpoint import pretrained
from slipstream.checkpoint.directory import replace_file
from slipstream.train.engine import Engine
from slipstream.zero import access


def consolidated(engine: Engine, *, exclude_frozen: bool = False) -> dict[str, Any] | None:
    """The model's whole state on the first rank's CPU, in the weights' dtype; None on others. Collective.

    One unit at a time: beyond the result, no rank holds more than one.
    """
    values: dict[int, Tensor] = {}
    first = engine.rank == 0
    with engine.together("consolidated_state_dict"), torch.no_grad():
        for unit in engine.units:
            flat = access.full_values(unit)
            for param, slot in zip(unit.params, unit.layout.slots, strict=True):
                if first and not (exclude_frozen and not param.requires_grad):
                    copy = torch.empty(slot.shape, dtype=flat.dtype)
                    values[id(param)] = copy.copy_(flat[slot.offset : slot.offset + slot.numel].view(slot.shape))
    if not first:
        return None
    state: dict[str, Any] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if id(value) in values:
            state[name] = values[id(value)]
        elif not isinstance(value, nn.Parameter):
            state[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return state


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a tree of tensors on `device`, without the storage that they are views of; one copy for all names of a tensor."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (id(value),)
            if key not in copies:
                copies[key] = value.detach().to(device, copy=True)
            return copies[key]
        if isinstance(value, Mapping):
            return type(value)({name: copy(each) for name, each in value.items()})  # type: ignore[call-arg]
        if isinstance(value, (list, tuple)):
            return type(value)(copy(each) for each in value)
        return value

    return copy(item)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The weights of a checkpoint of Slipstream's in fp32, under the model's own names, tied ones once. In one process.

    `lazy_mode` has no effect: what is returned are tensors already.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "exclude_frozen_parameters=True: a checkpoint does not say what was frozen; save it with "
            "save_checkpoint(exclude_frozen_parameters=True), or drop their names from what this returns"
        )
    tag = tag or checkpoint.latest_tag(checkpoint_dir)
    if tag is None:
        raise ValueError(f"there is no {Path(checkpoint_dir) / 'latest'}; give the checkpoint's name as tag=")
    kinds = ("model.", "buffer.")
    known = checkpoint.load_metadata(checkpoint_dir, tag).tensors
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in known.items() if name.startswith(kinds)}
    checkpoint.load(checkpoint_dir, tag, tensors=tensors)
    return {name.partition(".")[2]: _fp32(tensor) for name, tensor in tensors.items()}


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint into `output_dir`: pytorch_model.bin or model.safetensors, or files of at most
    `max_shard_size` (None: however large) with an index."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    sizes = {name: value.nbytes for name, value in state.items()}
    limit = sum(sizes.values()) + 1 if max_shard_size is None else pretrained.num_bytes(max_shard_size)
    folder = Path(output_dir)
    if safe_serialization:
        outs = {name: pretrained.Out(value, value.dtype) for name, value in state.items()}
        pretrained.write(folder, outs, texts={}, shard_nbytes=limit)
        return
    files = pretrained.split(sizes, limit)
    named = {pretrained.numbered("pytorch_model", "bin", i, len(files)): names for i, names in enumerate(files)}
    for file, names in named.items():
        write_weights({name: state[name] for name in names}, folder / file)
    if len(named) > 1:
        index = pretrained.index_of({name: file for file, names in named.items() for name in names}, sum(sizes.values()))
        replace_file(folder / "pytorch_model.bin.index.json", lambda path: path.write_text(index, "utf-8"))


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """One file for `torch.load`, or of safetensors where the name says so; whole and on disk, or as it was before."""
    if path.suffix != ".safetensors":
        replace_file(path, lambda half: torch.save(state, half))
        return
    from safetensors.torch import save_file

    once = {id(value): name for name, value in reversed(list(state.items()))}  # tied weights under their first name
    kept = {name: state[name].contiguous() for name in once.values()}
    replace_file(path, lambda half: save_file(kept, str(half), metadata={"format": "pt"}))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Put a checkpoint's weights into an ordinary model on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
