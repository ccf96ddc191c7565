"""PEFT's adapters on bases quantized by Slipstream, bitsandbytes and torchao."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

import slipstream
from slipstream.compat.weights import clone_tensors_for_torch_save, consolidated
from tests import probe, toy
from tests.clients.transformers_script import FOLDER, SIZES

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
PAGE = Path(__file__).resolve().parents[2] / "docs" / "QUANTIZED.md"


def source() -> str:
    folder = FOLDER / "smollm2"
    slipstream.init_distributed()
    if torch.distributed.get_rank() == 0:
        torch.manual_seed(3)
        sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).bfloat16().save_pretrained(folder)
    torch.distributed.barrier()
    return str(folder)


def int4(folder: str) -> Any:
    return slipstream.quantize(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def bitsandbytes(bits: int) -> Callable[[str], Any]:
    options: dict[str, Any] = (
        {"load_in_8bit": True}
        if bits == 8
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
    )
    config = transformers.BitsAndBytesConfig(**options)
    return lambda folder: transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )


def torchao(folder: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    return model


def batches(rank: int) -> Iterator[Tensor]:
    for i in range(3):
        yield torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(10 * i + rank))


def losses(make: Callable[[str], Any], folder: str, stage: int, **zero: Any) -> Tensor:
    torch.manual_seed(5)
    model = get_peft_model(make(folder), LORA)
    engine = toy.make(model, stage, "gloo", dtype="bf16", zero_optimization={"stage": stage, **zero})
    values = []
    for ids in batches(engine.rank):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        values.append(loss.detach())
    codes = [unit for unit in probe.units(engine) if unit.dtypes.weights in (torch.int8, torch.uint8)]
    assert codes and all(unit.grads is None for unit in codes)
    if stage == 3:
        assert all(2 * unit.weights.nbytes == unit.layout.numel for unit in codes)
    expected = engine.state_dict()
    gathered, adapters = consolidated(engine), consolidated(engine, exclude_frozen=True)
    assert (gathered is None) == (engine.rank > 0)
    if gathered is not None and adapters is not None:
        assert list(gathered) == list(expected)
        assert all(torch.equal(flat(gathered[name]), flat(value)) for name, value in expected.items())
        assert adapters and all("lora_" in name or name.endswith("weight_format") for name in adapters), list(adapters)
        cloned = clone_tensors_for_torch_save(gathered)
        assert all(torch.equal(flat(cloned[name]), flat(value)) for name, value in expected.items())
    engine.save_checkpoint(str(FOLDER / "whole"))
    engine.load_checkpoint(str(FOLDER / "whole"))
    again = engine.state_dict()
    assert all(torch.equal(flat(again[name]), flat(value)) for name, value in expected.items() if isinstance(value, Tensor))
    engine.destroy()
    return torch.stack(values)


def flat(value: Tensor) -> Tensor:
    return value.qdata if hasattr(value, "qdata") else value


def train(kind: str) -> None:
    folder = source()
    make = {"slipstream": int4, "bitsandbytes4": bitsandbytes(4), "bitsandbytes8": bitsandbytes(8), "torchao": torchao}[kind]
    expected = losses(make, folder, 0)
    assert len(expected.unique()) == 3 and expected.isfinite().all()
    for stage, zero in ((2, {}), (3, {}), (3, {"offload_param": {"device": "nvme", "nvme_path": str(FOLDER)}})):
        actual = losses(make, folder, stage, **zero)
        assert torch.equal(actual, expected), (kind, stage, zero, actual, expected)
    torch.distributed.destroy_process_group()


def by_surgery(kind: str) -> None:
    """Adapters that PEFT adds after initialize train as those that were there before it; the base's codes go on where they are."""
    import pytest

    folder, curves = source(), []
    make = {"slipstream": int4, "bitsandbytes4": bitsandbytes(4), "bitsandbytes8": bitsandbytes(8), "torchao": torchao}[kind]
    for stage in (0, 3):
        for late in (True, False):
            model = make(folder)
            torch.manual_seed(5)
            if not late:
                model = get_peft_model(model, LORA)
            engine = toy.make(model, stage, "gloo", dtype="bf16")
            if late:
                codes = [unit for unit in probe.units(engine) if unit.dtypes.weights in (torch.int8, torch.uint8)]
                with engine.surgery():
                    engine.module = get_peft_model(engine.module, LORA)
                assert codes and all(unit in probe.units(engine) for unit in codes)
            losses = []
            for ids in batches(engine.rank):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            curves.append(torch.stack(losses))
            trained = {name for unit in probe.units(engine) if unit.grads is not None for name in unit.names}
            assert trained and all("lora" in name for name in trained)
            if kind != "slipstream":
                with pytest.raises(ValueError, match=r"would write the codes of .*only_trainable=True writes the adapters"):
                    engine.save_pretrained(str(FOLDER / "no"))
            engine.destroy()
    assert all(curve.equal(curves[0]) for curve in curves), curves
    torch.distributed.destroy_process_group()


def the_page() -> None:
    """docs/QUANTIZED.md's snippet, from beginning to end."""
    os.chdir(FOLDER)
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    saved = list((FOLDER / "adapters").rglob("*"))
    assert (FOLDER / "adapters" / "latest").is_file() and saved
    scope["engine"].destroy()
    torch.distributed.destroy_process_group()
