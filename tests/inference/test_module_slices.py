"""init_inference(checkpoint=...): Megatron's slices of each version, joined or cut anew, are the whole; no file's code is run."""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from slipstream.checkpoint.errors import CheckpointError
from slipstream.compat.inference import init_inference
from slipstream.compat.slices import cut
from slipstream.compat.utils import OnDevice

HEADS, HIDDEN, VOCAB = 4, 16, 30
SIZES = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **SIZES)).eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


NAMES = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_attn": "attention.query_key_value"}
NAMES |= {"attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h"}


def megatron(model: Any, version: float) -> dict[str, Tensor]:
    """Megatron's whole state of a GPT-2, its vocabulary padded to 32."""
    body, state = model.transformer, {}
    state["word_embeddings.weight"] = torch.cat([body.wte.weight.data, torch.zeros(2, HIDDEN)])
    state["position_embeddings.weight"] = body.wpe.weight.data
    for end in ("weight", "bias"):
        state[f"transformer.final_layernorm.{end}"] = getattr(body.ln_f, end).data
        for i, block in enumerate(body.h):
            for own, theirs in NAMES.items():
                value = getattr(block.get_submodule(own), end).data.t()
                if own == "attn.c_attn":
                    apart = value.reshape(3, HEADS, HIDDEN // HEADS, *value.shape[1:])
                    order = {0: (0, 1, 2), 1.0: (1, 2, 0), 2.0: (1, 0, 2)}[version]
                    value = apart.permute(*order, *range(3, apart.dim())).reshape(value.shape)
                state[f"transformer.layers.{i}.{theirs}.{end}"] = value.contiguous()
    return state


def slices(state: dict[str, Tensor], size: int, version: float) -> list[dict[str, Tensor]]:
    """As Megatron cuts them, written down apart from the code under test."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for name, value in state.items():
        for i in range(size):
            if "query_key_value" in name and version == 0:
                heads = value.view(3, HEADS, HIDDEN // HEADS, *value.shape[1:])
                piece = heads.chunk(size, 1)[i].reshape(-1, *value.shape[1:])
            elif "query_key_value" in name or "dense_h_to_4h" in name or "word_embeddings" in name:
                piece = value.chunk(size)[i]
            elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
                piece = value.chunk(size, 1)[i]
            else:
                piece = value
            parts[i][name] = piece.clone()
    return parts


def save(folder: Path, parts: list[dict[str, Tensor]], version: float | None, key: str = "module") -> str:
    names = [f"mp_rank_{i:02}.pt" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        torch.save({key: part, "iteration": 7}, folder / name)
    (folder / "all.json").write_text(json.dumps({"type": "Megatron", "version": version, "checkpoints": names}))
    return str(folder / "all.json")


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_slices_are_the_whole(version: float, size: int, tmp_path: Path) -> None:
    """For transformers' GPT-2, and for a module with Megatron's names that is slice 1 of 2; all bits."""
    model = gpt2()
    state = megatron(model, version)
    described = save(tmp_path, slices(state, size, version), version, "model" if size == 2 else "module")
    ids = torch.arange(10)[None]
    expected = model(ids).logits
    assert init_inference(gpt2(seed=4), checkpoint=described)(ids).logits.equal(expected)
    parsed = json.loads(Path(described).read_text())
    assert init_inference(gpt2(seed=4), {"checkpoint": parsed, "base_dir": str(tmp_path)})(ids).logits.equal(expected)
    if version == 0 and size > 1:
        files = [str(tmp_path / name) for name in parsed["checkpoints"]]
        assert init_inference(gpt2(seed=4), checkpoint=files)(ids).logits.equal(expected)
    with OnDevice(dtype=torch.float32, device="meta"):
        empty = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **SIZES))
    assert init_inference(empty, checkpoint=described, set_empty_params=True)(ids).logits.equal(expected)
    wanted = slices(state, 2, version)[1]
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2, get_model_parallel_rank=lambda: 1)
    engine = init_inference(_named(wanted), mp_size=2, mpu=mpu, checkpoint=described)
    assert all(engine.module.state_dict()[name].equal(value) for name, value in wanted.items())


def _named(state: dict[str, Tensor]) -> nn.Module:
    """A module with these names and shapes."""
    root = nn.Module()
    for name, value in state.items():
        at = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, nn.Parameter(torch.zeros_like(value)))
    return root


def test_refusals(tmp_path: Path) -> None:
    model, other = gpt2(), gpt2(seed=9)
    parts = slices(megatron(model, 0), 2, 0)
    mixed = [parts[0], slices(megatron(other, 0), 2, 0)[1]]
    short = [parts[0], {name: value for name, value in parts[1].items() if "layers.1" not in name}]
    for given, version, words in (
        (mixed, 0, "different models: .* has different values"),
        (short, 0, "different models: only one has transformer.layers.1"),
        (parts, 3, "has version 3"),
        ([short[1], short[1]], 0, "lacks transformer.h.1"),
        ([{**part, "transformer.extra.weight": torch.zeros(2)} for part in parts], 0, "the module lacks, transformer.extra.weight"),
    ):
        with pytest.raises(ValueError, match=words):
            init_inference(copy.deepcopy(model), checkpoint=save(tmp_path, given, version))
    for one, words in (
        ({}, "needs"),
        (str(tmp_path / "none.json"), "cannot be read"),
        ({"type": "ds_model", "tp_size": 2, "checkpoints": ["a"]}, "tp_size 1"),
    ):
        with pytest.raises(ValueError, match=words):
            init_inference(model, checkpoint=one)
    with pytest.raises(ValueError, match=r"cannot be cut into 3 slices"):
        cut("transformer.layers.0.attention.dense.weight", torch.zeros(4, 4), 0, 3, 0)
    with pytest.raises(ValueError, match="on the meta device"):
        init_inference(nn.Linear(2, 2, device="meta"), set_empty_params=True)


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_hostile_pickle_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {"word_embeddings.weight": torch.zeros(2), "x": _Hostile()}}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt: it asks for posix\.mkdir, .* not executed"):
        init_inference(gpt2(), checkpoint=[str(tmp_path / "bad.pt"), str(tmp_path / "bad.pt")])
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    """What `save_mp_checkpoint_path` writes, and files that are parts of one state by name."""
    model, ids = gpt2(), torch.arange(10)[None]
    expected = model(ids).logits
    init_inference(model, save_mp_checkpoint_path=str(tmp_path / "saved"))
    described = tmp_path / "saved" / "ds_inference_config.json"
    assert init_inference(gpt2(seed=4), checkpoint=str(described))(ids).logits.equal(expected)
    state = list(model.transformer.state_dict().items())
    for i in range(2):
        torch.save(dict(state[i::2]), tmp_path / f"part{i}.bin")
    named = {"type": "BLOOM", "version": 1.0, "checkpoints": ["part0.bin", "part1.bin"]}
    assert init_inference(gpt2(seed=4), checkpoint=named, base_dir=str(tmp_path))(ids).logits.equal(expected)
    named["checkpoints"] = ["part0.bin", "part0.bin"]
    with pytest.raises(ValueError, match="which another file"):
        init_inference(gpt2(seed=4), checkpoint=named, base_dir=str(tmp_path))
