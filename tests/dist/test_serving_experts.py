"""Experts served by several processes: the bits of one process, its memory divided."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import slipstream
from slipstream.inference import load, ranks
from slipstream.inference.engine import ClosedError
from slipstream.inference.native import NativeDecoder
from slipstream.ops import build
from slipstream.world.peers import meet
from tests.inference.twins import PROMPTS, SIZES, tiny
from tests.pool import distributed

pytestmark = pytest.mark.skipif(build.load().kernels is None, reason="no native kernels")

_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "intermediate_size": 96},
    "Qwen2Moe": {**_MOE, "shared_expert_intermediate_size": 96},
    "Qwen3Moe": {**_MOE, "head_dim": 16, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
}
_OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_context": 64, "token_budget": 64, "max_running": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with one file per layer, as Hugging Face stores it."""
    return write_mixtral(tmp_path_factory.mktemp("mixtral"))


def write_mixtral(folder: Path, num_experts: int = 6) -> Path:
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,), "lm_head.weight": (128, 64)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in sizes.items()}
        shapes[f"{layer}block_sparse_moe.gate.weight"] = (num_experts, 64)
        for e in range(num_experts):
            for name, shape in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
                shapes[f"{layer}block_sparse_moe.experts.{e}.{name}.weight"] = shape
    tensors = {name: torch.randn(shape, generator=generator).mul_(0.3).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **SIZES,
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(engine: Any) -> Any:
    """Greedy tokens and the log-probabilities of the likeliest, of three prompts in one batch."""
    done = engine.generate([prompt[:20] for prompt in PROMPTS], max_new_tokens=6, ignore_eos=True, logprobs=3)
    return [(one.token_ids, one.logprobs) for one in done]


def expert_nbytes(runner: NativeDecoder) -> int:
    """Bytes of packed experts."""
    total = 0
    for index, layer in enumerate(runner.config.layers):
        if layer.experts is not None:
            record = runner._layers[index].experts.contents
            for matrices in (record.gate_up, record.down):
                for e in range(record.num):
                    panels = (matrices[e].num_columns + 31) // 32 * 2
                    total += panels * 16 * matrices[e].num_features
    return total


def check_family(family: str, dtype: str, *splits: tuple[int, int], **options: Any) -> None:
    """`splits`: each an ep_size and a tp_size."""
    model = tiny(family, **{**SIZES, **_FAMILIES[family]})
    options = {**_OPTIONS, **options}
    with slipstream.init_inference(model, dtype=dtype, **options) as whole:
        expected, nbytes = answers(whole), expert_nbytes(whole.engine.runner)
    for ep, tp in splits:
        with slipstream.init_inference(model, dtype=dtype, moe={"ep_size": ep, "tp_size": tp}, **options) as engine:
            assert engine.leads == (dist.get_rank() == 0)
            assert expert_nbytes(engine.engine.runner.own) == nbytes // (ep * tp)
            if engine.leads:
                assert answers(engine) == expected
                assert answers(engine) == expected
            else:
                with pytest.raises(ClosedError, match=r"rank \d computes for rank 0"):
                    engine.generate([1, 2])


@distributed(world_size=2)
def test_two_processes_have_the_bits_of_one() -> None:
    for family in _FAMILIES:
        for dtype in ("bf16", "int8", "int4"):
            check_family(family, dtype, (2, 1), (1, 2))
    check_family("Mixtral", "fp32", (2, 1))
    threads = torch.get_num_threads()
    check_family("Qwen2Moe", "bf16", (2, 1), threads=2)
    torch.set_num_threads(threads)


@pytest.mark.slow
@distributed(world_size=4)
def test_whole_experts_and_columns_together() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_LOOK_S", 0.0)  # also while the other thread is in the middle of a message
        check_family("Mixtral", "int4", (2, 2))
        check_family("Qwen2Moe", "int8", (2, 2))


@distributed(world_size=2)
def test_between_hosts(folder: Path) -> None:
    """Without shared memory: the other ranks' rows arrive by gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "meet", lambda axis: [peer._replace(host=str(peer.rank)) for peer in meet(axis)])
        check_family("Qwen2Moe", "int8", (2, 1))
        check_family("Mixtral", "bf16", (1, 2))


@distributed(world_size=2)
def test_experts_on_disk(folder: Path) -> None:
    check_family("Mixtral", "int8", (2, 1), expert_cache_bytes=6 * 22_000)


@distributed(world_size=2)
def test_only_own_experts_are_read(folder: Path) -> None:
    read: list[str] = []
    tensor = load._tensor

    def reading(file: Path, name: str) -> torch.Tensor:
        read.append(name)
        return tensor(file, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_tensor", reading)
        with slipstream.init_inference(folder, dtype="int8", ep_size=2, **_OPTIONS) as engine:
            lead = engine.leads
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert experts == ({0, 1, 2} if lead else {3, 4, 5})
    assert read.count("lm_head.weight") == (2 if lead else 1)  # once for the dtype


@distributed(world_size=2)
def test_refusals(folder: Path) -> None:
    def refused(text: str, source: Any = folder, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            slipstream.init_inference(source, **{**_OPTIONS, **options})

    refused("ep_size \\(3\\) x moe_tp_size \\(1\\) need 3 processes, and 2 run this: .*slipstream run --nproc 3", ep_size=3)
    refused("the ranks differ; open one model .*bfloat16, tor.*int8, tor", ep_size=2, dtype="int8" if dist.get_rank() else "bf16")
    refused("token_budget 64.*token_budget 65", ep_size=2, token_budget=64 + dist.get_rank())
    refused("do not split .*intermediate_size=16", moe={"ep_size": 1, "tp_size": 2}, source=narrow())
    refused("do not split a model without experts", source=tiny("Llama", **SIZES), ep_size=2)
    refused(
        "do not cut transformers' code",
        source=tiny("GPTBigCode", vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32),
        ep_size=2,
    )
    missing = folder if dist.get_rank() == 0 else folder / "nowhere"
    refused("there is no .*nowhere", source=missing, ep_size=2)


def narrow() -> Any:
    return tiny("Mixtral", **{**SIZES, **_FAMILIES["Mixtral"], "intermediate_size": 16})


def test_keys_of_deepspeed(folder: Path) -> None:
    """Without processes: what asks for nothing is accepted, the rest is refused by name."""
    for moe in (
        {"enabled": True},
        {"enabled": False, "ep_size": 8},
        {"ep_size": 1, "moe_experts": [6], "type": "standard"},
        True,
        False,
    ):
        slipstream.init_inference(folder, moe=moe, **_OPTIONS).close()
    slipstream.init_inference(folder, ep_size=1, moe_experts=[6, 6], **_OPTIONS).close()
    for moe, text in (
        ({"type": "other"}, "the kinds are standard and residual"),
        ({"ep_group": object()}, "ep_group=.* is not served: all ranks of the job share"),
        ({"ep_size": 2}, "need 2 processes, and 1 run this: start them by slipstream run --nproc 2"),
    ):
        with pytest.raises(ValueError, match=text):
            slipstream.init_inference(folder, moe=moe, **_OPTIONS)
    with pytest.raises(TypeError, match="no option 'ep_sizes'; did you mean ep_size"):
        slipstream.init_inference(folder, moe={"ep_sizes": 2})
    with pytest.raises(TypeError, match="no option 'moe'"):
        slipstream.init_inference(folder, moe=8)
    with pytest.raises(ValueError, match="ep_size is given twice"):
        slipstream.init_inference(folder, moe={"ep_size": 2}, ep_size=4)
