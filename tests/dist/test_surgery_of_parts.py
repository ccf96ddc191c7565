"""Surgery on slices, stages and experts: the states and steps of one process after the same change."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.zero.leaves import mark_part
from tests import cases, toy
from tests.dist import test_pipeline as pipeline
from tests.dist.test_pipeline import Group
from tests.dist.test_tensor import batch, build, settings
from tests.dist.test_whole_states import LAYOUTS, assert_equal, step
from tests.pool import distributed

pytest.importorskip("transformers")
TARGETS = ("q_proj", "o_proj", "up_proj", "down_proj", "c_attn", "c_proj", "c_fc")
LORA = {ranks: [each for each in layouts if each[0] != "gpt2" or ranks == 2] for ranks, layouts in LAYOUTS.items()}
TOKENS = {"slipstream": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}}
LORA[2] += [("llama", 1, TOKENS), ("gpt2", 2, TOKENS)]
LORA[4].append(("qwen2", 1, {"slipstream": {"mesh": {"pp": 2, "tp": 2}}}))


def _sizes(weight: Any) -> Any:
    """Of a Conv1D layer, as PEFT reads them."""
    return getattr(weight, "ds_shape", weight.shape)


class Adapted(nn.Module):
    """PEFT's layout of a LoRA adapter."""

    def __init__(self, base: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        inputs, outputs = (base.in_features, base.out_features) if hasattr(base, "in_features") else _sizes(base.weight)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, outputs, bias=False)})
        with torch.no_grad():
            for param in (*self.lora_A.parameters(), *self.lora_B.parameters()):
                param.normal_(std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


def make(kind: str, stage: int, blocks: dict[str, Any], *, alone: bool = False) -> Any:
    config = settings(stage, **({} if alone else blocks))
    return slipstream.initialize(model=build(kind), config=config, mpu=Group(1) if alone else None)[0]


def adapt(engine: Any, lr: float = 3e-2) -> None:
    """Freeze the embeddings, and add adapters in a group of their own. Other ranks than the first of a stage draw other numbers."""
    draws = engine.mesh.dense.both.index
    with engine.surgery():
        added = []
        for name, module in list(engine.module.named_modules()):
            if name.endswith(TARGETS):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + draws)
                parent, _, leaf = name.rpartition(".")
                setattr(engine.module.get_submodule(parent), leaf, each := Adapted(module, generator))
                added += [*each.lora_A.parameters(), *each.lora_B.parameters()]
        for name, param in engine.module.named_parameters():
            if "embed" in name:
                param.requires_grad_(False)
        engine.optimizer.add_param_group({"params": added, "lr": lr})


def remove(engine: Any) -> None:
    """The other way."""
    with engine.surgery():
        for name, module in list(engine.module.named_modules()):
            if isinstance(module, Adapted):
                parent, _, leaf = name.rpartition(".")
                setattr(engine.module.get_submodule(parent), leaf, module.base_layer)
        for param in engine.module.parameters():
            param.requires_grad_(True)


def seen(engine: Any) -> dict[str, Any]:
    return {
        "optimizer": engine.optimizer.state_dict(),
        "weights": {name: value.clone() for name, value in engine.named_weights()},
        "features": [module.out_features for module in engine.module.modules() if type(module) is nn.Linear],
    }


def loss_of(engine: Any, i: int) -> float:
    micro = batch(i, engine.mesh.batch.index)
    with torch.no_grad():
        engine.eval()
        out = engine.eval_batch(iter([micro])) if engine.mesh.pp.size > 1 else engine(**micro, use_cache=False).loss
        engine.train()
    value = out.detach().double()
    if engine.mesh.pp.size == 1 and engine.mesh.batch.size > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def changed(kind: str, stage: int, blocks: dict[str, Any], folder: Path) -> None:
    alone = make(kind, 0, {}, alone=True)
    step(alone, 0)
    name = f"{kind}{stage}"
    alone.save_checkpoint(folder / f"rank{dist.get_rank()}", tag=name)
    want: list[Any] = []
    for change in (adapt, remove):
        change(alone)
        want.append(seen(alone))
    alone.destroy()
    first = make(kind, 0, {}, alone=True)
    dist.barrier()
    first.load_checkpoint(folder / "rank0", tag=name)
    dist.barrier()
    engine = make(kind, stage, blocks)
    engine.load_checkpoint(folder / "rank0", tag=name)
    # the first rank's states, with the first rank's draws
    wanted = [want]
    dist.broadcast_object_list(wanted)
    for change, expected in zip((adapt, remove), wanted[0], strict=True):
        change(engine)
        change(first)
        got = seen(engine)
        for key in ("optimizer", "weights"):
            assert_equal(got[key], expected[key], f"{name} {change.__name__} {key}")
        if engine.mesh.batch.size == 1:
            assert loss_of(engine, 1) == pytest.approx(loss_of(first, 1), abs=2e-5)
    if engine.mesh.batch.size == 1:
        for change in (adapt,):
            change(engine)
            change(first)
        for i in (2, 3):
            step(engine, i)
            step(first, i)
            assert engine.global_grad_norm == pytest.approx(first.global_grad_norm, rel=1e-3)
        assert loss_of(engine, 4) == pytest.approx(loss_of(first, 4), abs=1e-3)
    else:
        step(engine, 2)
    first.destroy()
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("i", range(len(LORA[2])) if cases.EVERYTHING else (1, 3, 5))
def test_adapters_are_added_and_removed_on_two_ranks(i: int, tmp_path: Path) -> None:
    changed(*LORA[2][i], tmp_path)


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_that_are_there_before_with_shares_of_the_tokens(kind: str) -> None:
    results = []
    for alone in (True, False):
        model: Any = build(kind)
        for name, module in list(model.named_modules()):
            if name.endswith(TARGETS):
                parent, _, leaf = name.rpartition(".")
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                setattr(model.get_submodule(parent), leaf, Adapted(module, generator))
        config = settings(1, **({} if alone else TOKENS))
        engine: Any = slipstream.initialize(model=model, config=config, mpu=Group(1) if alone else None)[0]
        step(engine, 0)
        results.append((loss_of(engine, 1), float(engine.global_grad_norm)))
        engine.destroy()
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@distributed(world_size=4)
@pytest.mark.parametrize("i", range(len(LORA[4])) if cases.EVERYTHING else (1,))
def test_adapters_are_added_and_removed_on_four_ranks(i: int, tmp_path: Path) -> None:
    changed(*LORA[4][i], tmp_path)


@distributed(world_size=2)
def test_peft_injects_adapters_into_slices_and_stages() -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    for mesh in ({"tp": 2}, {"pp": 2}):
        engine = make("llama", 1, {"slipstream": {"mesh": mesh}})
        with engine.surgery():
            peft.inject_adapter_in_model(config, engine.module)
        step(engine, 0)
        shapes = {name: tuple(value.shape) for name, value in engine.named_weights()}
        whole = {name: tuple(value.shape) for name, value in build("llama").named_parameters()}
        assert shapes == whole
        assert len(engine.optimizer.state_dict()["param_groups"][0]["params"]) == len(whole) + 8
        engine.destroy()


@distributed(world_size=2)
def test_a_head_is_replaced_on_the_last_stage() -> None:
    """Only that stage has it, and its chunk runs the new one."""
    engine, alone = make("llama", 1, {"slipstream": {"mesh": {"pp": 2}}}), make("llama", 0, {}, alone=True)

    def replace(module: Any) -> None:
        if isinstance(getattr(module, "lm_head", None), nn.Linear):
            torch.manual_seed(3)
            module.lm_head = nn.Linear(32, 66, bias=False)

    for each in (engine, alone):
        step(each, 0)
        with each.surgery():
            replace(each.module)
    assert loss_of(engine, 1) == pytest.approx(loss_of(alone, 1), abs=2e-5)
    for each in (engine, alone):
        step(each, 1)
    assert engine.global_grad_norm == pytest.approx(alone.global_grad_norm, rel=1e-3)
    engine.destroy()
    alone.destroy()


@distributed(world_size=2)
def test_layers_of_a_pipeline_module() -> None:
    """The first stage freezes a layer, the last one replaces its head: losses and norms as on one stage."""
    config = {"gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    results = []
    for size in (1, 2):
        model = pipeline.module(num_stages=2, num_chunks=2) if size > 1 else pipeline.module(num_stages=1, stages=(0,))
        engine = slipstream.initialize(model=model, config=toy.settings(1, **config), mpu=Group(1) if size == 1 else None)[0]
        losses = pipeline.train(engine, 1)
        with engine.surgery():
            for name, layer in list(engine.module.named_children()):
                if name == "1":
                    layer.requires_grad_(False)
                if name == "7":
                    torch.manual_seed(4)
                    engine.module.add_module("7", nn.Linear(pipeline.DIM, 4))
        results.append((losses, pipeline.train(engine, 2), len(engine.optimizer.state_dict()["state"])))
        engine.destroy()
    for one, two in zip(results[0][:2], results[1][:2], strict=True):
        assert two[0] == pytest.approx(one[0], rel=1e-5) and two[1] == pytest.approx(one[1], rel=1e-5)
    assert results[0][2] == results[1][2] == 2 + 5 * 6 + 2


@distributed(world_size=2)
def test_a_marked_part_replaces_a_slice() -> None:
    engine = make("llama", 3, {"slipstream": {"mesh": {"tp": 2}}})
    step(engine, 0)
    layer = engine.module.model.layers[0].mlp.up_proj
    marks = {"size": 2, "dim": 0}
    with engine.surgery():
        weight = nn.Parameter(torch.full((24, 32), 1.0 + engine.mesh.tp.index))
        mark_part(weight, "tp", **marks)
        layer.weight = weight
    value = dict(engine.named_weights())["model.layers.0.mlp.up_proj.weight"]
    assert value.shape == (48, 32) and value[:24].eq(1).all() and value[24:].eq(2).all()
    step(engine, 1)
    engine.destroy()


@distributed(world_size=2)
def test_changes_that_parts_cannot_have() -> None:
    engine = make("llama", 1, {"slipstream": {"mesh": {"tp": 2}}})
    before = engine.module.lm_head
    with (
        pytest.raises(ValueError, match=r"'lm_head.weight' replaces or resizes 'lm_head.weight', which is split over tp"),
        engine.surgery(),
    ):
        engine.module.lm_head = nn.Linear(32, 66, bias=False)
    with engine.surgery():
        engine.module.lm_head = before
    step(engine, 0)
    with pytest.raises(ValueError, match="ranks changed the model differently"), engine.surgery():
        if engine.mesh.tp.index == 1:
            engine.module.lm_head.requires_grad_(False)
    with engine.surgery():
        engine.module.lm_head.requires_grad_(True)
    step(engine, 1)
    engine.destroy()
    engine = make("qwen2", 1, {"slipstream": {"mesh": {"pp": 2}}})
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens.weight' is tied over .* \(66, 32\) on rank 0 and .* frozen on rank 1"
    ):
        with engine.surgery():
            if engine.is_last_stage():
                engine.module.lm_head.requires_grad_(False)
    with engine.surgery():
        engine.module.requires_grad_(True)
    step(engine, 0)
    engine.destroy()
    engine = make("llama", 1, {"slipstream": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}}})
    with pytest.raises(ValueError, match=r"surgery\(\) does not work with schedule 'zero_bubble'"), engine.surgery():
        pass
    engine.destroy()
    engine = make("llama", 1, {"slipstream": {"mesh": {"pp": 2}}})
    module = engine.module
    with (
        pytest.raises(ValueError, match=r"engine\.module is a Sequential now, and a pipeline's stages run the PipelinedDecoder"),
        engine.surgery(),
    ):
        engine.module = nn.Sequential(module)
    engine.module = module
    with engine.surgery():
        pass
    with pytest.raises(ValueError, match="group 1 was given a parameter"), engine.surgery():  # on one stage
        strange = [nn.Parameter(torch.zeros(3))] if engine.is_last_stage() else []
        engine.optimizer.add_param_group({"params": strange})
    with engine.surgery():
        pass
    step(engine, 0)
    engine.destroy()
