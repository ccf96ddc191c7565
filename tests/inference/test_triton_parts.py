"""The CUDA forward over two processes, in Triton's interpreter: as transformers', and the same bits in every batch."""

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.inference.test_triton import APART, DEVICE  # isort: skip; it skips without triton
from slipstream.inference import native
from slipstream.inference.config import ModelPart
from slipstream.inference.cuda import CudaDecoder, why_not
from slipstream.inference.decoder import head_shapes
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.load import load
from slipstream.parallel.exchange import connect_activations
from slipstream.world.mesh import Axis
from slipstream.world.watch import Watch
from tests.inference import test_families
from tests.inference.test_native import Requests
from tests.inference.twins import SIZES, tiny
from tests.pool import distributed

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU, whose processes are in tests/gpu")
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}
PROMPTS = [[i * i % 127 + 1 for i in range(length)] for length in (3, 9)]


def check(model: Any, transport: str, **sizes: int) -> None:
    """Prompts together, and each alone. All processes compute all; nothing is posted."""
    world = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "why_not", lambda config: "as asked")
        loaded = load(model, part=ModelPart(index=dist.get_rank(), **(sizes or {"tp_size": world})))
    assert why_not(loaded.config, loaded.weights, torch.device("cpu")) is None
    axis = Axis("tp", dist.group.WORLD, tuple(range(world)), dist.get_rank(), world)
    exchange = connect_activations(axis, torch.device("cpu"), transport, Watch(60.0), in_rank_order=True)
    cache = KVCache(head_shapes(loaded.config), num_blocks=16, block_size=16, dtype=torch.float32)
    runner = CudaDecoder(loaded.config, loaded.weights, cache, torch.float32, exchange, max_batch=0)
    together, alone = Requests(runner, 0), Requests(runner, 1)
    found = together.run([(together.request(prompt), 0, len(prompt)) for prompt in PROMPTS])
    others = [alone.run([(alone.request(prompt), 0, len(prompt))]) for prompt in PROMPTS]
    exchange.close()
    if loaded.config.part.has_head:
        for prompt, logits, (other,) in zip(PROMPTS, found, others, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1], rtol=2e-4, atol=2e-4)
            assert other.equal(logits)


@distributed(world_size=2)
def test_two_processes() -> None:
    sys.path.append(APART)
    os.environ["TRITON_INTERPRET"] = "1"
    check(tiny("Llama", **SIZES), "gloo")


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_two_processes_of_other_families() -> None:
    sys.path.append(APART)
    check(tiny("Llama", **{**SIZES, "tie_word_embeddings": True}), "shared")
    for case in ("bloom", "gpt-neox", "phi-norms", "opt-350m", "cohere-norms", "falcon"):
        check(test_families.model_of(case), "shared")
    check(test_families.model_of("deepseek-v3"), "shared", tp_size=2, ep_size=2)
    for sizes in ({"tp_size": 2}, {"ep_size": 2}, {"moe_tp_size": 2}):
        check(tiny("Qwen2Moe", **SIZES, **_MOE), "shared", **sizes)


@pytest.mark.slow
@distributed(world_size=4)
def test_more_processes_than_keys_and_values() -> None:
    sys.path.append(APART)
    check(tiny("Llama", **SIZES), "gloo")
