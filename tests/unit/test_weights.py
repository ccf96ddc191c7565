"""Weights in safetensors files: which tensor is the model's which, ranges, and refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.checkpoint.weights import check_same, open_weights


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
        self.register_buffer("mask", torch.ones(2, dtype=torch.int64))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def state(**changes: Tensor | None) -> dict[str, Tensor]:
    changed = Model().state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (state(mask=None), r"do not fit this Model: they lack 'mask'. Give rename= .*strict=False"),
        (state(derived=torch.ones(2)), "they have 'derived', which the model does not"),
        ({f"x.y.{name}": value for name, value in state().items()}, r'rename=lambda name: name.removeprefix\("x.y."\)'),
        ({name.removeprefix("body."): value for name, value in state(mask=None).items()}, r'rename=lambda name: "body." \+ name'),
        (state(body__a__weight=torch.ones(2, 4)), r"'body.a.weight' has shape \(2, 4\) in the files and \(2, 3\) in the model"),
        (state(mask=torch.ones(2)), r"'mask' is torch.float32 in the files and torch.int64 in the model, and no cast"),
        (
            state(body__b__bias=torch.ones(2).to(torch.float8_e4m3fn)),
            r"'body.b.bias' is torch.float8_e4m3fn in the files.*save it as bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path, Model())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors.index.json nor model.safetensors in"),
        ({"model.safetensors": b"\x80\x02}q\x00.........."}, r"no whole safetensors file \(pickled weights are never read\)"),
        ({"model.safetensors.index.json": b"[]"}, "index.json holds a list, not an object"),
        ({"model.safetensors.index.json": b"{}"}, "index.json has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": null}'}, "weight_map is null; it must be an object, each value a text"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": 3}}'}, 'weight_map is {"w": 3}; it must be an object'),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "../a"}}'}, "weight_map names '../a'; it must name files in this"),
        ({"model.safetensors.index.json": json.dumps({"weight_map": {"a": "gone"}}).encode()}, "there is no .*gone"),
    ],
)
def test_what_is_no_file_is_said(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path, Model())


@pytest.mark.parametrize("name", ["other", "mask"])
def test_numbers_of_less_than_a_byte_are_refused_only_where_they_are_used(tmp_path: Path, name: str) -> None:
    save_file(state() | {name: torch.zeros(2, dtype=torch.uint8)}, path := tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"F4"'))
    if name == "other":
        assert open_weights(tmp_path, Model(), strict=False).left_out.startswith("they have 'other'")
    else:
        with pytest.raises(ValueError, match=r"'mask' is torch.bits8 in the files, which needs more than a cast"):
            open_weights(tmp_path, Model(), strict=False)


def test_files_are_one(tmp_path: Path) -> None:
    """Several files, none twice; ranks see the same; a strict refusal is a note where it is not strict."""
    state_dict, partial = state(), dict(list(state().items())[:2])
    save_file(state_dict, tmp_path / "whole.safetensors")
    save_file(partial, tmp_path / "some.safetensors")
    with pytest.raises(ValueError, match=r"('body.a.\w+') of .* and \1 of .* are both to be \1"):
        open_weights([tmp_path / "whole.safetensors", tmp_path / "some.safetensors"], Model())
    one = open_weights(tmp_path / "whole.safetensors", Model())
    other = open_weights(str(tmp_path / "some.safetensors"), Model(), strict=False)
    assert not one.left_out and other.left_out.startswith("they lack 'body.")
    with pytest.raises(ValueError, match="different weights"):
        check_same([one.fingerprint, other.fingerprint])


def test_a_folder_with_shards_of_an_older_save_is_read_as_transformers_does(tmp_path: Path) -> None:
    save_file(state(mask=torch.tensor([5, 6])), tmp_path / "model.safetensors")
    save_file(state(), tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(state(), "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = open_weights(tmp_path, Model())
    assert files.read("mask", 0, 2).tolist() == [5, 6]
    files.close()


@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=4))
def test_any_range_of_any_shape(data: Any, shape: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape))])
    numel = model[0].numel()
    start = data.draw(st.integers(0, max(numel - 1, 0)))
    stop = data.draw(st.integers(min(start + 1, numel), numel))
    path = tmp_path_factory.mktemp("ranges", numbered=True) / "x.safetensors"
    save_file({"0": model[0].detach().bfloat16()}, path)
    files = open_weights(path, model)
    assert files.dtype("0") is torch.bfloat16
    if numel:
        assert files.read("0", start, stop).equal(model[0].detach().bfloat16().view(-1)[start:stop])
    files.close()


class Stacks(nn.Module):
    """The names of transformers' experts: three of [2 + 2, 3] and [3, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"router": nn.Linear(3, 3, bias=False), "experts": nn.Module()})
        self.mlp["experts"].gate_up_proj = nn.Parameter(torch.randn(3, 4, 3))
        self.mlp["experts"].down_proj = nn.Parameter(torch.randn(3, 3, 2))


MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def apart(model: nn.Module, is_older: bool) -> dict[str, Tensor]:
    """A tensor per expert and matrix, as Mixtral's files (older) or Qwen's have them."""
    state_dict = {f"model.{name}": value for name, value in model.state_dict().items()}
    result = {"model.mlp.router.weight": state_dict["model.mlp.router.weight"]}
    for i in range(3):
        gate, up = state_dict["model.mlp.experts.gate_up_proj"][i].chunk(2)
        matrices = {"gate_proj": gate, "up_proj": up, "down_proj": state_dict["model.mlp.experts.down_proj"][i]}
        for name, value in matrices.items():
            result[f"model.mlp.experts.{i}.{MATRICES[name] if is_older else name}.weight"] = value.clone()
    if is_older:
        result = {name.replace(".mlp.", ".block_sparse_moe.").replace("router", "gate"): value for name, value in result.items()}
    return result


@pytest.mark.parametrize("is_older", [False, True])
def test_stacks_of_experts_are_made_of_a_tensor_per_expert(is_older: bool, tmp_path: Path) -> None:
    """Any range of a stack, which begins and ends in any expert's matrix; from several files."""
    model = nn.ModuleDict({"model": Stacks()})
    tensors = list(apart(model["model"], is_older).items())
    save_file(dict(tensors[::2]), tmp_path / "a.safetensors")
    save_file(dict(tensors[1::2]), tmp_path / "b.safetensors")
    weights = open_weights([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], model)
    for name, value in model.state_dict().items():
        for start in range(value.numel()):
            stop = max(start, value.numel() - start // 3)
            assert weights.read(name, start, stop).equal(value.flatten()[start:stop]), (name, start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.w3": None}, r"experts.gate_up_proj' has 3 experts, and the files lack 'model.block_sparse_moe.experts.1.w3.weight'"),
        (
            {"2.w2": torch.ones(2, 3)},
            r"experts.2.w2.weight' is torch.float32 of shape \(2, 3\) in the files, and not torch.float32 of shape \(3, 2\)",
        ),
        (
            {"2.w1": torch.ones(2, 3).bfloat16()},
            r"2.w1.weight' is torch.bfloat16 of shape \(2, 3\) in the files, and not torch.float32",
        ),
        ({"3.w1": torch.ones(2, 3)}, "they have 'model.block_sparse_moe.experts.3.w1.weight', which the model does not"),
        ({"0.w2": None}, "they lack 'model.mlp.experts.down_proj'; they have 'model.block_sparse_moe.experts.1.w2.weight'"),
    ],
)
def test_experts_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    changes = {f"model.block_sparse_moe.experts.{name}.weight": value for name, value in change.items()}
    tensors = apart(Stacks(), True) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path, nn.ModuleDict({"model": Stacks()}))
