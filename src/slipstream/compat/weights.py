"""Weights out of engines and out of checkpoints, under the names of DeepSpeed's export functions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream import checkpoint
from slipstream.checkpoint import pretrained
from slipstream.checkpoint.directory import replace_file
from slipstream.checkpoint.errors import Ranks
from slipstream.train.engine import Engine
from slipstream.zero import access
from slipstream.zero.leaves import identity
from slipstream.zero.unit import Unit


def consolidated(engine: Engine, *, exclude_frozen: bool = False) -> dict[str, Any] | None:
    """The model's whole state on the first rank's CPU, in the weights' dtype; None on others. Collective.

    One unit at a time: beyond the result, no rank holds more than one.
    """
    copies: dict[Unit, dict[int, Tensor]] = {}
    state: dict[str, Any] = {}
    first = engine.rank == 0

    def collect() -> None:  # runs code of the model's: what fails there fails on all ranks
        with access.shown_as(copies):
            state.update(_state_of(engine.module, copies, exclude_frozen))

    with engine.together("consolidated_state_dict"), torch.no_grad():
        for unit in engine.units:
            flat = access.full_values(unit)
            if first:
                copies[unit] = dict(_copies(unit, flat, exclude_frozen))
            del flat
        Ranks(engine.mesh.data.group).gather("the model's state was not made", collect if first else lambda: None)
    return state if first else None


def _copies(unit: Unit, flat: Tensor, exclude_frozen: bool) -> Iterator[tuple[int, Tensor]]:
    for i, (param, whole, slot) in enumerate(zip(unit.params, unit.wholes, unit.layout.slots, strict=True)):
        beside = whole is not param and not is_traceable_wrapper_subclass(whole)  # scales, which making a state of the layer reads
        if param.requires_grad or beside or not exclude_frozen:
            copy = torch.empty(slot.shape, dtype=flat.dtype)
            yield i, copy.copy_(flat[slot.offset : slot.offset + slot.numel].view(slot.shape))


def _state_of(module: nn.Module, copies: Mapping[Unit, Mapping[int, Tensor]], exclude_frozen: bool) -> Iterator[tuple[str, Any]]:
    """The state of a module whose parameters are shown as `copies`, in tensors of the caller's own."""
    own = {id(unit.params[i]): copy for unit, its in copies.items() for i, copy in its.items()}
    named = module.named_parameters(remove_duplicate=False) if exclude_frozen else ()
    frozen = {name for name, param in named if not param.requires_grad}
    for name, value in module.state_dict(keep_vars=True).items():
        is_frozen = exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad
        if is_frozen or frozen.intersection(accumulate(name.split("."), "{}.{}".format)):  # and what it has beside it
            continue
        if not isinstance(value, Tensor):
            yield name, value
            continue
        if id(value) not in own:
            wraps = isinstance(value, nn.Parameter) and is_traceable_wrapper_subclass(value)  # around copies
            own[id(value)] = value.detach().cpu() if wraps else value.detach().cpu().clone()
        yield name, own[id(value)]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a tree of tensors on `device`, without the storage that they are views of; one copy for all names of a tensor."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = identity(value)
            if key not in copies:
                there = value.detach()
                moved = there.to(device)
                copies[key] = moved.clone() if moved is there else moved
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
    """The weights of a checkpoint in fp32, under all of the model's own names: tied ones are one tensor. In one process.

    `lazy_mode` has no effect: what is returned are tensors already.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "exclude_frozen_parameters=True: a checkpoint does not say what was frozen; save it with "
            "save_checkpoint(exclude_frozen_parameters=True), or drop their names from what this returns"
        )
    tag = checkpoint.latest_tag(checkpoint_dir) if tag is None else str(tag)
    if tag is None:
        raise ValueError(f"there is no {Path(checkpoint_dir) / 'latest'}; give the checkpoint's name as tag=")
    kinds = ("model.", "buffer.")
    found = checkpoint.load_metadata(checkpoint_dir, tag)
    known = {name: info for name, info in found.tensors.items() if name.startswith(kinds)}
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in known.items()}
    checkpoint.load(checkpoint_dir, tag, tensors=tensors, metadata=found)
    state = {name.partition(".")[2]: _fp32(tensor) for name, tensor in tensors.items()}
    for alias, name in found.shared.get("aliases", {}).items():
        if name in state:  # it may have been saved without what is frozen
            state.setdefault(alias, state[name])
    return state


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint into `output_dir`: pytorch_model.bin or model.safetensors, or files of at most
    `max_shard_size` (None: however large) with an index."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    once = _once(state)
    sizes = {name: state[name].nbytes for name in once.values()}
    limit = sum(sizes.values()) + 1 if max_shard_size is None else pretrained.num_bytes(max_shard_size)
    folder = Path(output_dir)
    if safe_serialization:
        outs = {name: pretrained.Out(state[name], state[name].dtype) for name in once.values()}
        pretrained.write(folder, outs, texts={}, shard_nbytes=limit)
        return
    files = [[name for name in state if once[id(state[name])] in part] for part in map(set, pretrained.split(sizes, limit))]
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

    kept = {name: state[name].contiguous() for name in _once(state).values()}
    replace_file(path, lambda half: save_file(kept, str(half), metadata={"format": "pt"}))


def _once(state: Mapping[str, Any]) -> dict[int, str]:
    """Tied weights under their first names, by their ids."""
    names: dict[int, str] = {}
    for name, value in state.items():
        names.setdefault(id(value), name)
    return names


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Put a checkpoint's weights into an ordinary model on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
