"""`zero.Init` reproduces the values that constructors write: bit-identical to the model built in memory with the same seed."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.compat import held
from slipstream.compat.engine import initialize as deepspeed_initialize
from tests import toy
from tests.pool import distributed


class Written(nn.Module):
    """All ways in which real constructors initialize values."""

    def __init__(self) -> None:
        super().__init__()
        self.default = nn.Linear(8, 8)
        self.zeroed = nn.Linear(8, 8)
        nn.init.zeros_(self.zeroed.weight)
        self.by_data = nn.Linear(8, 8)
        self.by_data.weight.data.normal_(1.02, 0.02)
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.from_another = nn.Linear(8, 8)
        self.from_another.weight.data.copy_(self.by_data.weight.data * 2 + torch.eye(8))
        self.from_numpy = nn.Linear(3, 1)
        self.from_numpy.weight.data.copy_(torch.from_numpy(np.arange(3, dtype=np.float32)))
        self.padded = nn.Embedding(9, 8, padding_idx=2)
        self.truncated = nn.Linear(8, 8)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.orthogonal = nn.Linear(8, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.sparse = nn.Linear(8, 8)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.kernel = nn.Conv2d(2, 4, 3)
        nn.init.dirac_(self.kernel.weight[:2])
        with torch.no_grad():
            self.default.bias[2:4] = 7
            self.default.bias.mul_(3)
            nn.init.uniform_(self.zeroed.bias, generator=torch.Generator().manual_seed(5))
        self.scaled = nn.Linear(8, 8)
        self.scaled.weight.data.div_(self.scaled.weight.abs().max().item())  # the constructor reads values
        if self.scaled.bias.mean() > 0 or not torch.equal(self.scaled.weight, self.scaled.weight.detach().clone()):
            self.scaled.bias.data.neg_()
        torch.manual_seed(11)  # in the middle
        self.after = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 9, bias=False)
        self.tied.weight = self.padded.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("frequencies", 1 / (100 ** (torch.arange(0, 8, 2) / 8)))
        self.register_buffer("drawn", torch.randn(5))
        self.apply(lambda module: nn.init.constant_(module.weight, 1.5) if isinstance(module, nn.BatchNorm1d) else None)


class NanoGpt(nn.Module):
    """Initialized like nanoGPT: a function over all modules, then scaled residual projections by name."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(16, 64), "c_proj": nn.Linear(64, 16)}) for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.wte.weight = self.head.weight
        self.apply(self._own)
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(2 * 3))

    def _own(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)


def huggingface(name: str) -> Callable[[], nn.Module]:
    import transformers

    small = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config: Any = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, **special),
        "llama": lambda: transformers.LlamaConfig(**small, **special, num_key_value_heads=2, intermediate_size=24),
        "bert": lambda: transformers.BertConfig(**small, intermediate_size=24),
        "t5": lambda: transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    }[name]()
    kind: Any = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}.get(
        name, transformers.AutoModelForCausalLM
    )
    return lambda: kind.from_config(config)


def model_of(name: str) -> Callable[[], nn.Module]:
    return {"written": Written, "nanogpt": NanoGpt}.get(name) or huggingface(name)


def values_in_memory(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = build()
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def compare(engine: Any, expected: dict[str, Tensor]) -> None:
    results = engine.state_dict() | dict(engine.module.named_buffers())
    wrong = [name for name, value in expected.items() if not results[name].equal(value)]
    assert not wrong, wrong
    engine.destroy()


@pytest.mark.parametrize("name", ["written", "nanogpt", "gpt2", "llama", "bert", "t5"])
@distributed(world_size=2)
def test_as_built_in_memory(name: str) -> None:
    build = model_of(name)
    expected = values_in_memory(build)
    for stage in (0, 3):
        torch.manual_seed(3 + 10 * dist.get_rank())  # rank 0's values are used
        with slipstream.zero.Init():
            model = build()
        assert all(param.is_meta for param in model.parameters())
        torch.manual_seed(99)
        own = {"drawn"} if dist.get_rank() else set()  # buffers are local to each rank
        compare(toy.make(model, stage, "gloo"), {name: value for name, value in expected.items() if name not in own})


@pytest.mark.parametrize("name", ["written", "nanogpt", "gpt2", "llama", "bert", "t5"])
@distributed(world_size=2)
def test_under_deepspeeds_name(name: str) -> None:
    build = model_of(name)
    expected = values_in_memory(build)
    torch.manual_seed(3)
    with held.Init():
        model = build()
    compare(deepspeed_initialize(model=model, config=toy.settings(3))[0], expected)


class Derived(nn.Module):
    """The constructor computes values from its children's initialized parameters and writes them through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.copies = nn.ModuleList(copy.deepcopy(self.first) for _ in range(2))
        self.second.weight.data.copy_(self.first.weight.data.T * 2)
        self.third.weight.data[1:3].fill_(5.0)
        with torch.no_grad():
            self.third.weight[0].zero_()
            self.third.bias[2:][1] = 7.0
            self.first.bias.data = F.pad(self.first.bias.data, (0, 0))
        if self.first.weight.abs().sum() > 0:  # NaN is not
            nn.init.ones_(self.second.bias)


@distributed(world_size=2)
def test_constructors_read_sharded_parameters() -> None:
    """With DeepSpeed's zero.Init a child's parameters are already sharded while its parent's constructor runs."""
    expected = values_in_memory(Derived)
    torch.manual_seed(3)
    with held.Init():
        model = Derived()
    compare(deepspeed_initialize(model=model, config=toy.settings(3))[0], expected)


@distributed(world_size=1)
def test_the_tape_goes_with_the_last_parameter() -> None:
    with slipstream.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    weight: Any = model[0].weight
    tape = weakref.ref(weight._slipstream_tape[0])
    engine = toy.make(model, 3)
    gc.collect()
    assert tape() is None
    engine.destroy()


@distributed(world_size=1)
def test_lost_values_are_named() -> None:
    with slipstream.zero.Init():
        model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
    with pytest.raises(ValueError, match=r"weight was written on meta after `with zero.Init\(\)` had closed, so the write is lost"):
        toy.make(model, 3)
    with pytest.raises(NotImplementedError) as caught, slipstream.zero.Init():
        torch.ones(2).numpy(force=True)
    assert any("slipstream.zero.load(model, folder)" in note for note in caught.value.__notes__)
