"""The config's `weight_quantization`: layers are quantized by rules, sharded as bytes, and compute with the numbers of these."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import slipstream
from slipstream.compat import held, zero
from slipstream.ops.rows import RowForm, dequantize_rows, quantize_rows
from slipstream.quantized import QuantizedEmbedding, QuantizedLinear
from slipstream.quantized.rules import quantize_by_rules
from tests import toy
from tests.pool import distributed


class Small(nn.Module):
    """Two names of one layer, a head that is tied to the embedding, and a norm."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.again = self.up
        self.head = nn.Linear(24, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x).relu() + self.again(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def group(bits: int, size: int) -> dict[str, Any]:
    return {"num_bits": bits, "group_size": size, "group_dim": 1, "symmetric": False}  # as DeepSpeed's examples write it


ALL = {"quantized_initialization": group(4, 16)}
SOME = {"post_init_quant": {"up": group(8, 16), "again": group(8, 16), "down": group(4, 32)}, "quantized_initialization": {}}
IDS = torch.arange(20).view(2, 10)


def expected(model: nn.Module, rules: dict[str, tuple[int, int]]) -> Tensor:
    """The logits of a plain model that has the numbers of the codes. rules: name of a layer -> bits, columns of a scale."""
    model = copy.deepcopy(model)
    for name, (bits, block) in rules.items():
        weight = model.get_submodule(name).weight
        form = RowForm(bits=bits, columns=weight.shape[1], block=block)
        weight.data = dequantize_rows(quantize_rows(weight.data, form), form, torch.float32)
    with torch.no_grad():
        logits: Tensor = model(IDS)
    return logits


def quantized_names(model: nn.Module) -> set[str]:
    kinds = (QuantizedLinear, QuantizedEmbedding)
    return {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kinds)}


def of_engine(model: nn.Module, stage: int, block: Any, dtype: str, transport: str = "shared", **more: Any) -> tuple[Any, Tensor]:
    with held.held_values(model):
        engine = toy.make(model, stage, transport, dtype=dtype, optimizer=None, weight_quantization=block, **more)
    with torch.no_grad():
        return engine, engine(IDS)


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_are_quantized_by_rules(stage: int, transport: str) -> None:
    model = toy.seeded(Small)
    for block, rules in (
        (ALL, dict.fromkeys(("embed", "up", "down", "head"), (4, 16))),
        (SOME, {"up": (8, 16), "down": (4, 32)}),
        ({"enabled": False, **ALL}, {}),
        ({"num_bits": 4}, {}),
    ):
        rules.pop("head", None)  # it has the embedding's weight
        engine, logits = of_engine(copy.deepcopy(model), stage, block, "fp32", transport)
        torch.testing.assert_close(logits, expected(model, rules), rtol=1e-5, atol=1e-5)
        assert quantized_names(engine.module) == {*rules, *(["again"] if rules else []), *(["head"] if "embed" in rules else [])}
        if rules:
            assert engine.module.up is engine.module.again and not engine.module.up.weight.requires_grad
        if "embed" in rules:
            assert engine.module.head.weight is engine.module.embed.weight
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("where", ["held", "function", "files"])
def test_no_rank_has_the_floats(where: str, tmp_path: Path) -> None:
    """Layers that `Init` has sharded, before or at `initialize`, and those of files: the same bytes as in memory."""
    source = toy.seeded(Small).bfloat16()
    engine, wanted = of_engine(copy.deepcopy(source), 3, ALL, "bf16")
    states = engine.state_dict()
    engine.destroy()
    if where == "files":
        if dist.get_rank() == 0:
            save_file(
                {name: value.clone() for name, value in source.state_dict().items() if name != "head.weight"},
                tmp_path / "a.safetensors",
            )
        dist.barrier()
        with slipstream.zero.Init():
            model = Small()
        slipstream.zero.load(model, tmp_path / "a.safetensors")
    else:
        torch.manual_seed(0)
        with held.Init(dtype=torch.bfloat16):
            model = Small()
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for name, param in model.named_parameters():
                param.data.copy_(source.get_parameter(name))
        if where == "function":
            model = zero._init_group_wise_weight_quantization(
                model, {"weight_quantization": {"post_init_quant": {"": group(4, 16)}}}
            )
            weight = model.get_submodule("up").weight
            assert weight.dtype is torch.uint8 and held.is_held(weight) and weight.ds_tensor.numel() == weight.numel() // 2
    engine, logits = of_engine(model, 3, ALL, "bf16", data_types={"keep_in_fp32_modules": ["embed"]})
    assert torch.equal(logits, wanted) and logits.dtype is torch.bfloat16
    off = {"weight_quantization": {"enabled": False, **ALL}}
    assert not quantized_names(zero._init_group_wise_weight_quantization(toy.seeded(Small), off))
    mine = engine.state_dict()
    assert mine.keys() == states.keys() and all(torch.equal(mine[name], states[name]) for name in states)
    engine.destroy()


@distributed(world_size=1)
def test_the_rest_is_trained() -> None:
    engine = toy.make(toy.seeded(Small), 3, weight_quantization={"post_init_quant": {"up": group(8, 16), "again": group(8, 16)}})
    before = engine.state_dict()
    loss = engine(IDS).square().mean()
    engine.backward(loss)
    engine.step()
    changed = {name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])}
    assert "down.weight" in changed and "up.bias" in changed and "up.weight" not in changed
    engine.destroy()


def test_rules_that_do_not_fit_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = toy.seeded(Small)
    for rules, says in (
        ({"up": group(4, 16), "u": group(8, 16)}, r"the name of layer 'up' has \['up', 'u'\]; leave one in it"),
        ({"attention": group(4, 16)}, r"no nn.Linear and no nn.Embedding of Small has one of \['attention'\] in its name"),
    ):
        with pytest.raises(ValueError, match=says):
            quantize_by_rules(model, rules, torch.float32)
        assert not quantized_names(model)
    with pytest.raises(ValueError, match=r"layers \['embed', 'head'\] share a weight; leave one of \['embed', 'head'\]"):
        quantize_by_rules(model, {"embed": group(4, 16), "head": group(8, 16)}, torch.float32)
    model.up.weight.data[3, 5] = torch.inf
    with pytest.raises(ValueError, match="layer 'up' has non-finite weights"):
        quantize_by_rules(model, {"": group(4, 16)}, torch.float32)
    assert not quantized_names(model)
    quantize_by_rules(model, {"down": group(4, 16), "head": group(4, 16), "mlp": group(4, 16)}, torch.float32)
    assert quantized_names(model) == {"down"}
    assert "leaves out layers whose weight is also used in another way: embed, head" in caplog.text
    assert "post_init_quant: no layer's name has 'mlp'" in caplog.text
    model = toy.seeded(Small)
    quantize_by_rules(model, {"head": group(8, 16), "": group(4, 32)}, torch.float32)
    assert (model.head.form, model.up.form.bits) == (model.embed.form, 4) and model.head.form.bits == 8, "the rule that names one"
    fast = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    torch_s = nn.Sequential(fast, nn.Embedding(9, 16, max_norm=1.0), nn.Linear(16, 16))
    x = torch.randn(2, 3, 16)
    quantize_by_rules(torch_s.eval(), {"": group(8, 16)}, torch.float32)
    assert quantized_names(torch_s) == {"2"}
    with torch.no_grad():
        assert torch_s[2](torch_s[0](x)).isfinite().all()
