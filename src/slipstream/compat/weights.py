"""DeepSpeed's functions that export weights from engines and checkpoints."""

from __future__ import annotations

import io
import os
import re
from collections import OrderedDict
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
from slipstream.zero.trees import map_tensors
from slipstream.zero.unit import Unit

# Beside `latest` in a folder of checkpoints
SCRIPTS = {
    f"{name}.py": f'''#!/usr/bin/env python3
"""Write the weights of the checkpoint beside this file: python {name}.py . OUTPUT_FOLDER"""

import sys

from slipstream.compat.launcher import {name}

sys.exit({name}())
'''
    for name in ("zero_to_fp32", "zero_to_torch")
}
OUTPUT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OUTPUT_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in OUTPUT_DTYPES.values()}


def consolidated(engine: Engine, *, exclude_frozen: bool = False) -> OrderedDict[str, Any] | None:
    """Gather the model's full state on rank 0's CPU, in the weights' dtype; returns None on other ranks. Collective.

    Gathers one unit at a time: besides the result, no rank stores more than one full unit.
    """
    copies: dict[Unit, dict[int, Tensor]] = {}
    state: OrderedDict[str, Any] = OrderedDict()  # may be weakly referenced
    first = engine.mesh.is_first

    def collect() -> None:  # runs the model's code; an error is raised on all ranks
        with access.shown_as(copies):
            state.update(_state_of(engine.module, copies, exclude_frozen))

    with engine.together("consolidated_state_dict"), torch.no_grad():
        for unit in engine.units:
            for i, whole in _wholes(unit, exclude_frozen):
                if first:
                    copies.setdefault(unit, {})[i] = torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)
        Ranks(engine.mesh.world.group).gather("the model's state_dict() failed", collect if first else lambda: None)
    return state if first else None


def _wholes(unit: Unit, exclude_frozen: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield the unit's parameters, by their number, with slices and experts joined. Collective."""
    flat = access.full_values(unit)
    for i, (param, full, slot) in enumerate(zip(unit.params, unit.model_params, unit.layout.slots, strict=True)):
        is_scale = full is not param and not is_traceable_wrapper_subclass(full)  # the layer's state_dict() reads its scales
        if param.requires_grad or is_scale or not exclude_frozen:
            yield i, access.whole_of(flat[slot.offset : slot.offset + slot.numel].view(slot.shape), unit, i)


def _state_of(module: nn.Module, copies: Mapping[Unit, Mapping[int, Tensor]], exclude_frozen: bool) -> Iterator[tuple[str, Any]]:
    """Yield the state of a module whose parameters are shown as `copies`, in tensors that the caller may keep."""
    own = {id(unit.params[i]): copy for unit, of_unit in copies.items() for i, copy in of_unit.items()}
    named = module.named_parameters(remove_duplicate=False) if exclude_frozen else ()
    frozen = {name for name, param in named if not param.requires_grad}
    for name, value in module.state_dict(keep_vars=True).items():
        is_frozen = exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad
        if is_frozen or frozen.intersection(accumulate(name.split("."), "{}.{}".format)):  # also the frozen parameter's scales
            continue
        if not isinstance(value, Tensor):
            yield name, value
            continue
        if id(value) not in own:
            wraps = isinstance(value, nn.Parameter) and is_traceable_wrapper_subclass(value)  # its inner tensors are copies
            own[id(value)] = value.detach().cpu() if wraps else value.detach().cpu().clone()
        yield name, own[id(value)]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy a tree of tensors to `device`, without the unused rest of their storages. A repeated tensor is copied once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = identity(tensor)
        if key not in copies:
            source = tensor.detach()
            moved = source.to(device)
            copies[key] = moved.clone() if moved is source else moved
        return copies[key]

    return map_tensors(item, copy)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Load a checkpoint's weights in fp32, in one process, under all names in the model; tied weights share a tensor.

    `lazy_mode` has no effect: the values are always tensors.
    """
    tag = checkpoint.latest_tag(checkpoint_dir) if tag is None else str(tag)
    if tag is None:
        raise ValueError(f"there is no {Path(checkpoint_dir) / 'latest'}; pass the checkpoint's name as tag=")
    kinds = ("model.", "buffer.")
    metadata = checkpoint.load_metadata(checkpoint_dir, tag)
    frozen = _frozen(metadata) if exclude_frozen_parameters else frozenset()
    infos = {name: info for name, info in metadata.tensors.items() if name.startswith(kinds) and name not in frozen}
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    checkpoint.load(checkpoint_dir, tag, tensors=tensors, metadata=metadata)
    state = {name.partition(".")[2]: _fp32(tensor) for name, tensor in tensors.items()}
    for alias, name in metadata.shared.get("aliases", {}).items():
        if name in state:  # the checkpoint may lack frozen parameters
            state.setdefault(alias, state[name])
    return state


def _frozen(metadata: checkpoint.Metadata) -> frozenset[str]:
    """The parameters without optimizer state, by their names in the checkpoint."""
    optimizer = metadata.shared.get("optimizer")
    if optimizer is None:
        raise ValueError(
            f"exclude_frozen_parameters=True: {metadata.path} has no optimizer state, which tells what was trained; "
            'save with contents="all" or save_checkpoint(exclude_frozen_parameters=True), or drop the names from the result'
        )
    trained = {f"model.{name}" for name in optimizer["params"]}
    trained |= {f"model.{name.split('.', 2)[2]}" for name in metadata.tensors if name.startswith("optim.")}
    return frozenset(name for name in metadata.tensors if name.startswith("model.") and name not in trained)


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's weights into `output_dir`: pytorch_model.bin or model.safetensors, or files of at most `max_shard_size`
    (None: unlimited) with an index. dtype: of the floating-point tensors; a torch dtype or its name, such as "bf16"."""
    target = OUTPUT_DTYPES.get(str(dtype).removeprefix("torch."))
    if target is None:
        raise ValueError(f"convert_zero_checkpoint_to_state_dict(dtype={dtype!r}): use one of {', '.join(OUTPUT_DTYPES)}")
    full = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    cast = {id(tensor): tensor.to(target) if tensor.is_floating_point() else tensor for tensor in full.values()}  # ties stay
    state = {name: cast[id(tensor)] for name, tensor in full.items()}
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


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32, with the same arguments except `dtype`."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *args, **kwargs)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[Any]:
    """The files of one checkpoint's optimizer states, to be read by `torch.load`. One of Slipstream, which has no stage and no such
    files, gives a file in memory with stage 0 alone: Lightning's converter asks for the stage, to find `get_model_state_file`."""
    files = sorted(Path(checkpoint_dir).glob("*_optim_states.pt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    return list(map(str, files)) or [_in_memory({"optimizer_state_dict": {"zero_stage": 0}})]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> Any:
    """The first file of one checkpoint's model states, to be read by `torch.load`. One of Slipstream gives a file in memory with
    its client_state alone."""
    folder = Path(checkpoint_dir)
    file = folder / f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt"
    if file.exists():
        return str(file)
    return _in_memory(checkpoint.load(folder.parent, folder.name, tensors={}).shared.get("client", {}))


def _in_memory(content: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write one file atomically, for `torch.load`, or as safetensors if the name ends in .safetensors."""
    if path.suffix != ".safetensors":
        replace_file(path, lambda temporary: torch.save(state, temporary))
        return
    from safetensors.torch import save_file

    tensors = {name: state[name].contiguous() for name in _once(state).values()}
    replace_file(path, lambda temporary: save_file(tensors, str(temporary), metadata={"format": "pt"}))


def _once(state: Mapping[str, Any]) -> dict[int, str]:
    """Each tensor's id -> its first name; tied weights occur once."""
    names: dict[int, str] = {}
    for name, value in state.items():
        names.setdefault(id(value), name)
    return names


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU, load a checkpoint's weights into it and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
