"""Layers of experts in engines: expert parallelism at every ZeRO stage is one process, whatever ranks route where."""

import copy
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import slipstream
from slipstream import checkpoint, optim
from slipstream.checkpoint import CheckpointError
from slipstream.compat import groups
from slipstream.compat import moe as deepspeed_moe
from slipstream.compat.engine import initialize
from slipstream.compat.utils import set_z3_leaf_module
from slipstream.moe import Experts, GatedMLP, MoE, dispatch, expert_loads
from slipstream.parallel.exchange import Crossing, Exchange, swap
from slipstream.world.watch import PeerError
from slipstream.zero.comm import Pending
from slipstream.zero.leaves import mark_stack, whole_shape
from tests import cases, toy
from tests.pool import distributed, run

STEPS, CLIP, EXPERTS = cases.STEPS, 0.05, 4
KINDS: dict[str, dict[str, Any]] = {
    "top-2, gated": {"k": 2, "expert_size": 24},
    "top-1, sigmoid, shared, residual": {"k": 1, "score": "sigmoid", "expert_size": 24},
    "top-1, gated branches": {"k": 1, "expert_size": 24},
    "top-2, dropping": {"k": 2, "expert_size": 24, "capacity_factor": 0.75, "min_capacity": 1},
    "one by one": {"k": 2},
    "with biases": {"k": 2},
    "DeepSpeed's": {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False, "enable_expert_tensor_parallelism": True},
}


def layer(kind: str, ep: int | None, dim: int = 16) -> MoE | deepspeed_moe.MoE:
    expert = None
    if kind == "one by one":
        expert = lambda: nn.Sequential(nn.Linear(dim, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, dim))  # noqa: E731
    if kind in ("with biases", "DeepSpeed's"):
        expert = lambda: nn.Sequential(nn.Linear(dim, 13), nn.ReLU(), nn.Linear(13, dim))  # noqa: E731
    if kind == "DeepSpeed's":
        return deepspeed_moe.MoE(dim, expert(), EXPERTS, ep or 1, **KINDS[kind])
    shared: nn.Module | None = nn.Linear(dim, dim) if "shared" in kind else None
    residual: nn.Module | None = nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) if "residual" in kind else None
    if "branches" in kind:
        shared, residual = GatedMLP(dim, 10), GatedMLP(dim, 6)
    return MoE(dim, expert, EXPERTS, ep_size=ep, shared=shared, residual=residual, **KINDS[kind])


class Block(nn.Module):
    def __init__(self, kind: str, ep: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.moe = layer(kind, ep)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, loss, _ = self.moe(self.norm(x))
        return x + out, loss


class Model(nn.Module):
    def __init__(self, kind: str = "top-2, gated", ep: int | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(kind, ep) for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, losses = self.inp(x), x.new_zeros(())
        for block in self.blocks:
            h, loss = block(h)
            losses = losses + loss
        return self.out(h).square().mean() + 0.01 * losses


def build(kind: str, ep: int | None = None) -> Model:
    torch.manual_seed(0)
    return Model(kind, ep)


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    """Tokens that prefer other experts on each rank."""
    return toy.floats(rank, step, micro) + rank


def twin(kind: str, ranks: int, steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((model(batch(rank, step)) for rank in range(ranks)), torch.zeros(())) / ranks
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


def make(model: nn.Module, stage: int, transport: str = "auto", **blocks: Any) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return toy.make(model, stage, transport, **({"gradient_clipping": CLIP, "optimizer": optimizer} | blocks))


def train(engine: Any, first: int = 0, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        index = engine.mesh.batch.index * engine.mesh.sp.size + engine.mesh.sp.index
        loss = engine(batch(index, step))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / engine.world_size)
        norms.append(engine.global_grad_norm)
    return losses, norms


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", KINDS if cases.EVERYTHING else ["top-2, gated", "top-1, sigmoid, shared, residual"])
def test_experts_on_several_ranks_train_as_one_process(transport: str, kind: str) -> None:
    losses, norms, weights = twin(kind, 4)
    assert all(norm > CLIP for norm in norms)
    for ep in (1, 2, 4) if cases.EVERYTHING else (4,) if kind == "top-2, gated" else (2,):
        bits = []
        for stage in cases.stages(transport):
            engine = make(build(kind, ep), stage, transport)
            result = train(engine)
            assert result == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4)), (ep, stage)
            bits.append(result)
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            engine.destroy()
        assert all(each == bits[0] for each in bits), ep


class Odd(Model):
    """Only ranks with an odd number have tokens in the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.blocks[0](self.inp(x))
        h, loss = self.blocks[1](h[: len(h) if dist.get_rank() % 2 else 0])
        return self.out(h).square().sum() / 4 + 0.01 * loss


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_rank_without_tokens_trains_on(transport: str) -> None:
    results = []
    for ep in (1, 2):
        torch.manual_seed(0)
        engine = make(Odd(ep=ep), 3, transport)
        results.append(train(engine))
        engine.destroy()
    assert results[0] == (pytest.approx(results[1][0], abs=1e-6), pytest.approx(results[1][1], rel=1e-5))


def save(path: Path, stage: int, ep: int, blocks: dict[str, Any] | None = None) -> tuple[Any, Any]:
    engine = make(build("top-2, gated", ep), stage, **blocks or {})
    train(engine)
    engine.save_checkpoint(str(path), tag="x")
    results = train(engine, STEPS, 2)
    engine.destroy()
    return results


def resume(path: Path, stage: int, ep: int, blocks: dict[str, Any] | None = None) -> tuple[Any, Any]:
    torch.manual_seed(1)
    engine = make(Model("top-2, gated", ep), stage, **blocks or {})
    engine.load_checkpoint(str(path), tag="x")
    results = train(engine, STEPS, 2)
    engine.destroy()
    return results


def test_checkpoints_load_at_any_expert_parallel_size(tmp_path: Path) -> None:
    expected = run(4, save, tmp_path, 2, 2)[0]
    shapes = {name: info.shape for name, info in checkpoint.load_metadata(str(tmp_path), "x").tensors.items()}
    assert shapes["model.blocks.0.moe.experts.stack.expert.gate_up.weight"] == (EXPERTS, 48, 16)
    assert run(4, resume, tmp_path, 2, 2)[0] == expected
    for stage, ep in ((3, 4), (0, 1)):
        losses, norms = run(4, resume, tmp_path, stage, ep)[0]
        assert (losses, norms) == (pytest.approx(expected[0], abs=1e-5), pytest.approx(expected[1], rel=1e-4))


# -- auxiliary losses that layers add themselves --

SPEC = {"patterns": [".*inp.weight$"], "partition_type": "column", "gather_output": True}
SLICED = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": [SPEC]}}}


class Own(nn.Module):
    """weight: of the layer's own loss; else the model adds it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.moe = MoE(8, None, EXPERTS, k=2, expert_size=8, z_loss=0.1, aux_loss_weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.moe(x)
        return out.float().square().mean() + (0 if self.moe.aux_loss_weight else 2.0) * loss


@distributed(world_size=2)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("half", [{}, {"fp16": {"enabled": True, "loss_scale": 64}}], ids=["fp32", "fp16"])
def test_a_layers_own_loss_is_one_of_the_micro_batch(half: dict[str, Any], divided: bool) -> None:
    norms = []
    for weight in (0.0, 2.0):
        torch.manual_seed(0)
        engine = make(Own(weight), 2, gradient_accumulation_steps=2, expert_parallel={"enabled": True, "autoep_size": 2}, **half)
        for micro in range(2):
            loss = engine(batch(dist.get_rank(), 0, micro).to(next(engine.module.parameters()).dtype))
            engine.backward(loss / 2 if divided else loss, scale_wrt_gas=not divided)
            engine.step()
        norms.append(engine.global_grad_norm)
        engine.destroy()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5 if not half else 1e-2) and norms[0] > 0.5


class Adding(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.moe = MoE(16, None, EXPERTS, k=2, expert_size=8, aux_loss_weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


def test_stages_add_their_layers_losses() -> None:
    run(2, train_stages)


def train_stages() -> None:
    def layers(weight: float) -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), Adding(weight), Adding(weight), nn.Linear(16, 4)]

    twin = nn.Sequential(*layers(0.0))
    collected: list[Tensor] = []
    for block in (twin[1], twin[2]):
        block.moe.register_forward_hook(lambda module, args, result: collected.append(result[1]))
    for micro in range(2):
        (twin(batch(0, 0, micro)).square().mean() / 2).backward(retain_graph=True)
    (2.0 * torch.stack(collected).sum() / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(twin.parameters(), 1e9))
    module = slipstream.PipelineModule(layers(2.0), num_stages=2, loss_fn=lambda out, _: out.square().mean())
    engine = make(module, 1, gradient_accumulation_steps=2)
    engine.train_batch(iter([(batch(0, 0, micro), batch(0, 0, micro)) for micro in range(2)]))
    assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5)
    engine.destroy()


class Region(nn.Module):
    """Sliced layers, between which tp ranks share the tokens, and a layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.moe = MoE(8, None, EXPERTS, k=2, expert_size=8, shared=GatedMLP(8, 4), residual=GatedMLP(8, 6))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        out, loss, _ = self.moe(x)
        self.losses.append(loss)
        return x + out


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Region() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            block.losses.clear()
            h = block(h)
        return h.square().mean() + 2.0 * sum((block.losses[0] for block in self.blocks), torch.zeros(()))


@distributed(world_size=2)
@pytest.mark.parametrize("entry", [None, {"patterns": [r".*experts\..*"], "partition_type": "skip"}], ids=["sliced", "skip"])
@pytest.mark.parametrize("shares_tokens", [True, False])
def test_shares_of_tokens_have_the_mean_of_their_losses(shares_tokens: bool, entry: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    model = Regions()
    x = torch.randn(2, 8, 8)
    twin = Regions()
    twin.load_state_dict(model.state_dict())
    halves = torch.stack([twin(x[:, :4]), twin(x[:, 4:])] if shares_tokens else [twin(x)])
    loss = halves.mean()
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(twin.parameters(), 1e9))
    specs = [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r"blocks\.\d+\.down\.weight$"], "partition_type": "row"},
    ]
    specs += [] if entry is None else [entry]
    sliced = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    engine = make(model, 1, slipstream={"tensor": {"sequence_parallel": shares_tokens}}, tensor_parallel=sliced)
    assert model.blocks[0].moe.experts.stack.expert.down.weight.shape[2] == (4 if entry is None else 8)
    result = engine(x)
    engine.backward(result)
    engine.step()
    assert (result.item(), engine.global_grad_norm) == (pytest.approx(loss.item(), rel=1e-5), pytest.approx(norm, rel=1e-5))
    for block in engine.module.blocks:
        block.losses.clear()
    engine.destroy()


class Noisy(nn.Module):
    """The layer's experts and branch draw, too: for other rows on each rank, and for the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        expert = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 16))
        residual = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.moe = MoE(16, expert, EXPERTS, k=2, ep_size=2, jitter=0.5, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        return self.moe(self.moe(h)[0])[0].square().mean()


@distributed(world_size=2)
def test_ranks_of_a_replica_draw_alike() -> None:
    torch.manual_seed(0)
    engine = make(Noisy(), 1, **SLICED)
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(2):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
    dist.all_gather(states, torch.get_rng_state())
    assert torch.equal(*states) and losses[0] != losses[1]
    weight = engine.module.moe.router.weight.detach().clone()
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight)
    assert torch.equal(*both)
    engine.destroy()
    engine = make(Noisy(), 1, **SLICED)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="state of its random generator differ"):
        engine(x)
    engine.destroy()


# -- unmodified models of transformers --

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
FOREIGN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": MLA | GROUPS | {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy"},
    "DeepseekV3": MLA | GROUPS | {"num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "attn_implementation": "eager"},
    "Mixtral, auxiliary loss": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 3.0},
    "Qwen3Moe, auxiliary loss": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    | {"output_router_logits": True, "router_aux_loss_coef": 3.0},
}


def foreign(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    name = kind.partition(",")[0]
    config = getattr(transformers, f"{name}Config")(**SIZES | FOREIGN[kind])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # some leave parameters as they were allocated
        for param in model.parameters():
            param.normal_(0, 0.05)
    return model


def foreign_batch(kind: str, rank: int, step: int) -> dict[str, Tensor]:
    ids = toy.tokens(rank, step)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if "auxiliary" in kind else {})


def foreign_losses(engine: Any, ranks: int, kind: str = "") -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**foreign_batch(kind, engine.mesh.batch.index, step)).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        norms.append(engine.global_grad_norm)
    return losses, norms


def foreign_twin(kind: str, ranks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = foreign(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum((model(**foreign_batch(kind, rank, step)).loss for rank in range(ranks)), torch.zeros(())) / ranks
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "tokens": True}, {"pp": 2}]
BESIDE = list(zip(LAYOUTS, (3, 2, 1), strict=True))
BESIDE_ALL = [each for each in itertools.product(LAYOUTS, range(4)) if each not in BESIDE]


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_ranks_of_a_replica_share_the_tokens_of_experts(transport: str, ep: int) -> None:
    """tp 2: neighbors have the same batches, and other experts."""
    losses, norms, weights = twin("top-2, gated", 2)
    engine = make(build("top-2, gated", ep), 3, transport, **SLICED)
    assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4))
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


SLICED_EXPERTS: dict[str, Any] = copy.deepcopy(SLICED)  # those of GatedMLP need no entry
SLICED_EXPERTS["tensor_parallel"]["partition_config"]["layer_specs"] += [
    {"patterns": [r".*stack\.expert\.0\.weight$"], "partition_type": "column"},
    {"patterns": [r".*stack\.expert\.2\.weight$"], "partition_type": "row"},
]


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
@pytest.mark.parametrize(
    "kind",
    ["top-2, gated", "top-1, gated branches", "DeepSpeed's"]
    + [
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("top-2, dropping", "top-1, sigmoid, shared, residual", "with biases")
    ],
)
def test_slices_of_our_experts_train_as_one_process(world_size: int, transport: str, kind: str) -> None:
    """tp 2, also beside ep 2; stages have the same bits."""
    losses, norms, weights = twin(kind, world_size // 2)
    ep = world_size // 2
    bits = []
    for stage in cases.stages(transport):
        engine = make(build(kind, ep), stage, transport, **SLICED_EXPERTS)
        first = next(param for name, param in engine.module.blocks[0].named_parameters() if ".stack." in name)
        assert first.shape[0] == EXPERTS // ep and first.shape[1] in ((24,) if "gated" in kind or "top" in kind else (6, 7))
        moe = engine.module.blocks[0].moe
        assert "branches" not in kind or (moe.shared.gate_up.weight.shape, moe.residual.down.weight.shape) == ((10, 16), (16, 3))
        assert kind != "DeepSpeed's" or "peak" in engine.explain(batch(0, 0))
        result = train(engine)
        assert result == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4)), stage
        bits.append(result)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
        engine.destroy()
    assert all(each == bits[0] for each in bits)


def test_slices_of_our_experts_load_without_slices(tmp_path: Path) -> None:
    """Saved as tp 2 x ep 2 x dp 2, loaded on two ranks and on one of tp, and back."""
    expected = run(4, save, tmp_path, 2, 2, SLICED)[0]
    shapes = {name: info.shape for name, info in checkpoint.load_metadata(str(tmp_path), "x").tensors.items()}
    assert shapes["model.blocks.0.moe.experts.stack.expert.gate_up.weight"] == (EXPERTS, 48, 16)
    for ranks, stage, ep, blocks in ((4, 2, 2, SLICED), (2, 3, 2, {}), (4, 0, 1, SLICED)):
        losses, norms = run(ranks, resume, tmp_path, stage, ep, blocks)[0]
        assert (losses, norms) == (pytest.approx(expected[0], abs=1e-5), pytest.approx(expected[1], rel=1e-4)), (ranks, stage)


def train_beside_all(transport: str) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), Adding(0.0), Adding(0.0), nn.Linear(16, 4)]

    twin, losses, norms = nn.Sequential(*layers()), [], []
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([twin(batch(replica, step)).square().mean() for replica in range(2)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    module = slipstream.PipelineModule(layers(), num_stages=2, loss_fn=lambda out, _: out.square().mean())
    axes = {"transport": transport, "mesh": {"pp": 2, "tp": 2}}
    engine = make(module, 1, expert_parallel={"enabled": True, "autoep_size": 2}, slipstream=axes)
    stacks = [module.stack.expert.down.weight for module in engine.module.modules() if isinstance(module, Experts)]
    assert [stack.shape for stack in stacks] == [(2, 16, 4)]
    for step in range(STEPS):
        x = batch(engine.mesh.batch.index, step)
        assert engine.train_batch(iter([(x, x)])).item() == pytest.approx(losses[step], abs=1e-5)
        assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-4)
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_slices_of_our_experts_beside_all_axes(transport: str) -> None:
    """Two stages of two slices of two replicas, which have different experts."""
    run(8, train_beside_all, transport)


@distributed(world_size=2)
def test_experts_that_cannot_be_sliced_are_refused_or_stay_whole() -> None:
    """Layers that run one by one; experts that are split over the ranks that would have slices."""
    with pytest.raises(ValueError, match=r"stack.expert.0' is a layer of experts that run one by one, which cannot be sliced"):
        make(build("one by one", 1), 1, **SLICED_EXPERTS)
    engine = make(build("top-2, gated", 2), 1, **SLICED)
    assert engine.module.blocks[0].moe.experts.stack.expert.down.weight.shape == (2, 16, 24)
    engine.destroy()


@distributed(world_size=4)
def test_experts_of_parts_of_a_sequence() -> None:
    """sp 2: each rank has tokens of its own."""
    losses, norms, _ = twin("top-2, gated", 4)
    engine = make(build("top-2, gated", 2), 1, slipstream={"mesh": {"sp": 2}})
    assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4))
    engine.destroy()


@distributed(world_size=4)
@pytest.mark.parametrize(("layout", "stage"), [*BESIDE, *(pytest.param(*each, marks=pytest.mark.slow) for each in BESIDE_ALL)])
def test_experts_beside_other_axes(layout: dict[str, Any], stage: int) -> None:
    train_beside("Mixtral", layout, stage)


def mixtral_on(layout: dict[str, int], ep: int, stage: int, seed: int = 0) -> Any:
    model = foreign("Mixtral")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": ep}, "slipstream": {"transport": "auto", "mesh": layout}}
    return make(model, stage, **blocks)


def mixtral_steps(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        inputs = {name: value[:2] for name, value in foreign_batch("", 0, step).items()}  # the same on each replica
        if engine.mesh.pp.size > 1:
            losses.append(engine.train_batch(iter([inputs])).item())
        else:
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def save_mixtral(path: Path, layout: dict[str, int]) -> list[float]:
    engine = mixtral_on(layout, 2, 2)
    mixtral_steps(engine, 0, 2)
    engine.save_checkpoint(str(path), tag="x")
    losses = mixtral_steps(engine, 2, 2)
    engine.destroy()
    return losses


def resume_mixtral(path: Path, layout: dict[str, int], ep: int, stage: int) -> list[float]:
    engine = mixtral_on(layout, ep, stage, seed=1)
    engine.load_checkpoint(str(path), tag="x")
    losses = mixtral_steps(engine, 2, 2)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("ranks", "layout"), [(4, {"tp": 2}), pytest.param(8, {"pp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_mixture_moves_between_layouts(ranks: int, layout: dict[str, int], tmp_path: Path) -> None:
    expected = run(ranks, save_mixtral, tmp_path, layout)[0]
    for ranks, layout, ep, stage in ((4, {"pp": 2}, 2, 1), (1, {}, 1, 0)):
        found = run(ranks, resume_mixtral, tmp_path, layout, ep, stage)[0]
        assert found == pytest.approx(expected, abs=2e-5), (layout, ep)


def read_slices(kind: str, path: Path) -> None:
    expected = foreign(kind).state_dict()
    with torch.device("meta"):
        model = type(foreign(kind))(foreign(kind).config)
    slipstream.zero.load(model, str(path))
    layout = {"slipstream": {"transport": "auto", "mesh": {"tp": 2}}}
    engine = make(model, 3, expert_parallel={"enabled": True, "autoep_size": 2}, **layout)
    down = engine.module.model.layers[1].mlp.experts.down_proj
    assert down.shape == (2, 32, whole_shape(down)[2] // 2)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "is_stacked"), [("Mixtral", True), ("Mixtral", False), pytest.param("Qwen3Moe", False, marks=pytest.mark.slow)]
)
def test_slices_of_experts_are_read_from_files(kind: str, is_stacked: bool, tmp_path: Path) -> None:
    """Cut in two dimensions, of which one is not the outermost; also from a tensor per expert, as transformers writes them."""
    model = foreign(kind)
    if is_stacked:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert any(".experts.0." in name for name in file.keys())  # noqa: SIM118 (no mapping)
    run(4, read_slices, kind, tmp_path)


def load_converted(path: Path, layout: dict[str, int]) -> None:
    model, engine = foreign("Mixtral"), mixtral_on(layout, 2, 3, seed=1)
    assert engine.load_checkpoint(str(path))[0]
    for name, value in engine.state_dict().items():
        assert torch.equal(value, model.get_parameter(name)), name
    engine.destroy()


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_converted_folder_with_a_tensor_per_expert_loads(layout: dict[str, int], tmp_path: Path) -> None:
    foreign("Mixtral").save_pretrained(tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in file.keys()  # noqa: SIM118 (no dictionary)
    checkpoint.convert(tmp_path / "hf", tmp_path / "converted", "slipstream")
    run(4, load_converted, tmp_path / "converted", layout)


class ListOrStack(nn.Module):
    """Experts as transformers 4 and 5 have them."""

    def __init__(self, is_stack: bool, num: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.experts: Any = nn.ModuleList() if not is_stack else nn.Module()
        for _ in range(num if not is_stack else 0):
            names = {"w1": nn.Linear(16, 6, bias=False), "w3": nn.Linear(16, 6, bias=False), "w2": nn.Linear(6, 16, bias=False)}
            self.experts.append(nn.ModuleDict(names))
        if is_stack:
            self.experts.gate_up_proj = nn.Parameter(torch.randn(num, 12, 16))
            self.experts.down_proj = nn.Parameter(torch.randn(num, 16, 6))

    def forward(self, x: Tensor) -> Tensor:
        h, experts = self.inp(x), self.experts
        if isinstance(experts, nn.ModuleList):
            return sum((each["w2"](each["w1"](h) * each["w3"](h).tanh()) for each in experts), h).square().mean()
        gates, values = torch.einsum("td,efd->etf", h, experts.gate_up_proj).chunk(2, -1)
        return (h + torch.einsum("etf,edf->td", gates * values.tanh(), experts.down_proj)).square().mean()


@distributed(world_size=2)
def test_a_run_of_a_list_of_experts_goes_on_with_a_stack(tmp_path: Path) -> None:
    """Weights and optimizer states, which other ranks have cut elsewhere."""

    def steps(engine: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            losses.append(toy.step(engine, toy.floats(engine.rank, step)).item())
        return losses

    engine = make(toy.seeded(lambda: ListOrStack(is_stack=False)), 3)
    steps(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path), tag="list")
    expected = steps(engine, 2, 4)
    engine.destroy()
    for stage in (0, 3):
        engine = make(ListOrStack(is_stack=True), stage)
        engine.load_checkpoint(str(tmp_path), tag="list")
        assert steps(engine, 2, 4) == pytest.approx(expected, rel=1e-5)
        engine.destroy()
    engine = make(ListOrStack(is_stack=True, num=4), 1)
    with pytest.raises(CheckpointError, match=r"gate_up_proj' has 4 experts, and the files lack 'model\.experts\.3\.w1\.weight'"):
        engine.load_checkpoint(str(tmp_path), tag="list")
    engine.destroy()


class Named(nn.Module):
    """Equal linear layers with these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x) for layer in self.layer.values()), x).square().mean()


@distributed(world_size=1)
@pytest.mark.parametrize(("older", "newer"), [("gate", "router"), ("block_sparse_moe", "mlp")])
def test_a_layer_is_not_read_as_the_older_name_of_another(older: str, newer: str, tmp_path: Path) -> None:
    engine = make(Named(older), 0)
    toy.step(engine, toy.floats(0, 0))
    engine.save_checkpoint(str(tmp_path), tag="t")
    value = engine.state_dict()[f"layer.{older}.weight"].clone()
    engine.destroy()
    save_file({f"layer.{older}.weight": value}, tmp_path / "model.safetensors")
    model = Named(older, newer)
    slipstream.zero.load(model, tmp_path)
    with pytest.raises(ValueError, match=rf"they lack .*layer\.{newer}\.weight"):
        make(model, 0)
    model = Named(older, newer)
    other = model.layer[newer].weight.detach().clone()
    engine = make(model, 0)
    with pytest.raises(CheckpointError, match=rf"does not hold \['model\.layer\.{newer}\.weight'\]"):
        engine.load_checkpoint(str(tmp_path), tag="t")
    engine.load_checkpoint(str(tmp_path), tag="t", load_module_strict=False)
    after = engine.state_dict()
    assert after[f"layer.{older}.weight"].equal(value) and after[f"layer.{newer}.weight"].equal(other)
    engine.destroy()
    engine = make(Named(newer), 0)  # where nothing else has the name, it is an older one
    engine.load_checkpoint(str(tmp_path), tag="t")
    assert engine.state_dict()[f"layer.{newer}.weight"].equal(value)
    engine.destroy()


MIXTRAL, QWEN = (kind for kind in FOREIGN if "auxiliary" in kind)
SHARES: list[dict[str, Any]] = [{"tp": 2, "tokens": True}, {"pp": 2}, {"pp": 2, "tp": 2, "tokens": True}]
TURNS = list(zip((MIXTRAL, QWEN, MIXTRAL), SHARES, strict=True))
OTHERS = [pytest.param(*each, marks=pytest.mark.slow) for each in itertools.product((MIXTRAL, QWEN), SHARES) if each not in TURNS]


@distributed(world_size=4)
@pytest.mark.parametrize(("kind", "layout"), [*TURNS, *OTHERS], ids=str)
def test_an_auxiliary_loss_is_that_of_all_layers_and_tokens(kind: str, layout: dict[str, Any]) -> None:
    """Stages have some of the layers, and tp ranks some of the tokens; a mask leaves some of these out."""
    train_beside(kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "tokens": True}], ids=str)
@pytest.mark.parametrize(("kind", "stage"), [("Mixtral", 3), ("Mixtral, auxiliary loss", 1)])
def test_experts_beside_all_axes(kind: str, stage: int, layout: dict[str, Any], transport: str) -> None:
    """Two stages of two slices of two replicas, which have different experts."""
    run(8, train_beside, kind, layout, stage, transport)


@distributed(world_size=2)
def test_shares_of_tokens_need_sliced_attention() -> None:
    """DeepSeek's plan leaves attention whole."""
    with pytest.raises(ValueError, match=r"the attention of 'model.layers.0' \(DeepseekV3DecoderLayer\) is not sliced"):
        make(foreign("DeepseekV3"), 1, slipstream={"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}})


def train_beside(kind: str, layout: dict[str, Any], stage: int = 1, transport: str = "auto") -> None:
    mesh = {axis: size for axis, size in layout.items() if axis != "tokens"}
    replicas = dist.get_world_size() // math.prod(mesh.values())
    losses, norms, weights = foreign_twin(kind, replicas)
    extra = {"mesh": mesh, "tensor": {"sequence_parallel": "tokens" in layout}}
    size = 1 if len(mesh) > replicas else 2  # on 4 ranks, a stage has one rank of each slice
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": size}, "slipstream": {"transport": transport} | extra}
    engine = make(foreign(kind), stage, **blocks)
    if "pp" in layout:
        results: Any = [], []
        for step in range(STEPS):
            results[0].append(engine.train_batch(iter([foreign_batch(kind, engine.mesh.batch.index, step)])).item())
            results[1].append(engine.global_grad_norm)
    else:
        results = foreign_losses(engine, 4, kind)
    assert results == (pytest.approx(losses, abs=2e-5), pytest.approx(norms, rel=2e-4))
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


def train_foreign(kind: str, path: Path) -> dict[str, Tensor]:
    losses, norms, weights = foreign_twin(kind, 2)
    others = ((1, 3), (2, 1))  # by turns
    for ep, stage in (*(others if cases.EVERYTHING else (others[list(FOREIGN).index(kind) % 2],)), (2, 3)):
        engine = make(foreign(kind), stage, expert_parallel={"enabled": True, "autoep_size": ep})
        assert foreign_losses(engine, 2) == (pytest.approx(losses, abs=2e-5), pytest.approx(norms, rel=2e-4)), (ep, stage)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
        if (ep, stage) == (2, 3):
            engine.save_pretrained(str(path))
        engine.destroy()
    return state


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if "auxiliary" not in kind])
def test_an_unmodified_model_of_experts(kind: str, tmp_path: Path) -> None:
    import transformers

    state = run(2, train_foreign, kind, tmp_path)[0]
    loaded = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(str(tmp_path))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name


class Few(nn.Module):
    """A layer of experts of transformers, which has no token on odd ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.mlp = nn.Linear(8, 32), foreign(kind).model.layers[1].mlp

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)[None, : len(x) if dist.get_rank() % 2 == 0 else 0]
        return (h + self.mlp(h)).square().sum()


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "DeepseekV3"])
def test_a_rank_without_tokens_in_an_unmodified_layer(transport: str, kind: str) -> None:
    """Gradients are those of the other rank's tokens, halved."""
    for stage in cases.stages(transport):
        engine = make(Few(kind), stage, transport, expert_parallel={"enabled": True, "autoep_size": 2})
        results = train(engine)
        engine.destroy()
        twin, norms, losses = Few(kind), [], []
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            h = twin.inp(batch(0, step))[None]
            loss = (h + twin.mlp(h)).square().sum() / 2
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP)))
            optimizer.step()
            losses.append(loss.item())
        assert results == (pytest.approx(losses, rel=1e-5), pytest.approx(norms, rel=1e-4)), stage


class Pyramid(nn.Module):
    """PR-MoE: residual layers, the later ones with more experts (arXiv:2201.05596)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.layers = nn.ModuleList(self.layer(kind, num) for num in (2, 4, 8))

    @staticmethod
    def layer(kind: str, num: int) -> nn.Module:
        torch.manual_seed(num)
        mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
        if kind == "ours":
            return MoE(16, lambda: copy.deepcopy(mlp), num, k=1, ep_size=2, residual=mlp)
        return deepspeed_moe.MoE(16, mlp, num, ep_size=min(num, dist.get_world_size()), use_residual=True, use_rts=False)

    def forward(self, x: Tensor) -> Tensor:
        h, losses = self.inp(x), x.new_zeros(())
        for layer in self.layers:
            out, loss, _ = layer(h)
            h, losses = h + out, losses + loss
        return h.square().mean() + 0.01 * losses


@distributed(world_size=4)
@pytest.mark.parametrize("kind", [pytest.param("ours", marks=pytest.mark.slow), "DeepSpeed's"])
def test_a_pyramid_of_residual_experts_trains_as_one_process(kind: str) -> None:
    """Layers of 2, 4 and 8 experts, of which DeepSpeed's are over 2, 4 and 4 ranks."""
    torch.manual_seed(0)
    model = Pyramid(kind)
    twin, norms, losses = copy.deepcopy(model), [], []
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([twin(batch(rank, step)) for rank in range(4)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    for stage in cases.STAGES:
        engine = make(copy.deepcopy(model), stage)
        assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4)), stage
        engine.destroy()


# -- dense branches compute while rows travel --


def noting(events: list[str]) -> Any:
    """`Exchange.start_all_to_all` that notes when rows leave, and when they are awaited."""
    start = Exchange.start_all_to_all

    def noted(self: Exchange, rows: Tensor, *sizes: Any) -> Any:
        if rows.dtype == torch.int64:  # counts
            return start(self, rows, *sizes)
        events.append("start")
        pending = start(self, rows, *sizes)
        return Pending(lambda: (events.append("wait"), pending.wait())[1])

    return noted


def crossed(branches: bool, transport: str) -> tuple[list[str], list[Tensor]]:
    """The events of a forward and a backward of a layer split over two ranks, and the output and all gradients."""
    torch.manual_seed(0)
    shared, residual = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    moe = MoE(16, None, EXPERTS, expert_size=8, shared=shared if branches else None, residual=residual if branches else None)
    engine = make(nn.Sequential(nn.Linear(8, 16), moe), 0, transport, expert_parallel={"enabled": True, "autoep_size": 2})
    events: list[str] = []
    for name, module in (("shared", shared), ("residual", residual)):
        module.register_forward_hook(lambda *args, name=name: events.append(name))
        module.register_full_backward_hook(lambda *args, name=name: events.append(f"{name}'s gradient"))
    x = (torch.randn(12, 8) + dist.get_rank()).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "start_all_to_all", noting(events))
        out = engine.module[1](engine.module[0](x))[0]
        grads = torch.autograd.grad(out.square().sum(), [x, *engine.module.parameters()], allow_unused=True)
    engine.destroy()
    return events, [out.detach(), *(grad for grad in grads if grad is not None)]


@distributed(world_size=2, transports=("shared", "gloo"))
def test_dense_branches_compute_while_rows_travel(transport: str) -> None:
    """In both directions, with the bits of branches that compute before and after."""
    events, results = crossed(True, transport)
    assert events == [
        *("start", "shared", "wait", "start", "residual", "wait"),
        *("start", "residual's gradient", "wait", "start", "shared's gradient", "wait"),
    ]
    with pytest.MonkeyPatch.context() as patch:

        def in_turn(rows: Tensor, exchange: Exchange, send: Any, receive: Any, meanwhile: Any) -> Tensor:
            rows = swap(rows, exchange, send, receive)
            for call in meanwhile:
                call()
            return rows

        patch.setattr(dispatch, "_cross", in_turn)
        events, expected = crossed(True, transport)
    assert events[:6] == ["start", "wait", "shared", "start", "wait", "residual"]
    assert len(results) == len(expected) and all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert crossed(False, transport)[0] == ["start", "wait"] * 4


@distributed(world_size=2)
def test_the_shared_expert_of_an_unmodified_model_computes_while_rows_travel() -> None:
    """DeepSeek's is called after the experts, and runs ahead from the second forward on; Qwen's is called before them."""
    for kind, orders in {
        "DeepseekV3": (["start", "wait", "start", "wait", "shared"], ["start", "shared", "wait", "start", "wait"]),
        "Qwen2Moe": (["shared", "start", "wait", "start", "wait"],) * 2,
    }.items():
        engine = make(foreign(kind), 1, expert_parallel={"enabled": True, "autoep_size": 2})
        block = next(module for module in engine.module.modules() if hasattr(module, "experts"))
        shared = block.shared_experts if kind == "DeepseekV3" else block.shared_expert
        results = []
        for order in orders:
            events: list[str] = []
            hook = shared.down_proj.register_forward_hook(lambda *args, events=events: events.append("shared"))
            x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Exchange, "start_all_to_all", noting(events))
                out = block(x)
            assert events == order, kind
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, *shared.parameters()])])
            hook.remove()
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_all_to_all_that_is_not_awaited_does_no_harm(transport: str) -> None:
    engine = make(toy.Net(), 0, transport)
    exchange = engine.states.exchange(engine.mesh.dense.both)
    rank = dist.get_rank()
    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    crossing = Crossing(exchange, [1, 2], [1 + rank, 1 + rank])
    first = crossing.depart(rows)
    Crossing(exchange, [3, 0], [3, 3] if rank == 0 else [0, 0]).depart(rows)  # never arrives
    assert exchange.sum(torch.ones(3)).tolist() == [2, 2, 2]
    received = [[0, 1], [10, 11]] if rank == 0 else [[2, 3], [4, 5], [12, 13], [14, 15]]
    assert crossing.arrive(first).tolist() == received
    engine.destroy()


@distributed(world_size=2)
def test_the_gradient_of_an_overlapped_all_to_all_has_one() -> None:
    engine = make(toy.Net(), 0)
    exchange, rank = engine.states.exchange(engine.mesh.dense.both), dist.get_rank()
    rows = (torch.arange(6.0).view(3, 2) + rank).requires_grad_()
    crossing = Crossing(exchange, [1, 2], [1 + rank, 1 + rank])
    arrived = crossing.arrive(crossing.depart(rows))
    (grad,) = torch.autograd.grad(arrived.pow(3).sum(), rows, create_graph=True)
    assert torch.equal(grad, 3 * rows**2)
    (second,) = torch.autograd.grad(grad.sum(), rows)
    assert torch.equal(second, 6 * rows)
    engine.destroy()


class Balanced(nn.Module):
    def __init__(self, rate: float | None) -> None:
        super().__init__()
        self.moe = MoE(8, None, EXPERTS, k=1, ep_size=2, expert_size=8, balance_rate=rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0].square().mean()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_bias_balances_the_load_of_all_ranks(transport: str) -> None:
    torch.manual_seed(0)
    model = Balanced(0.01)
    with torch.no_grad():
        model.moe.router.weight.mul_(10)
    engine = make(model, 2, transport, bf16={"enabled": True})
    worst = []
    for step in range(60):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        x = (torch.randn(256, 8, generator=generator) + 0.5).bfloat16()
        engine.backward(engine(x))
        engine.step()
        load = expert_loads(engine.module)["moe"].clone()
        assert load.sum() == 256
        dist.all_reduce(load)
        worst.append(load.max().item() / 128)
    assert worst[0] > 1.6 and sum(worst[-5:]) / 5 < 1.25, worst
    balance = engine.module.moe.balance
    both = torch.stack([torch.empty_like(balance) for _ in range(2)])
    dist.all_gather(list(both.unbind()), balance)
    assert torch.equal(both[0], both[1]) and balance.abs().max() > 10
    engine.destroy()


@distributed(world_size=2)
def test_a_skipped_step_moves_no_bias_and_leaves_no_load() -> None:
    engine = make(Balanced(0.01), 1, fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "hysteresis": 1})
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).half()
    for factor in (1e5, 1.0, 1.0):
        before = engine.module.moe.balance.clone()
        engine.backward(engine(x).float() * factor)
        engine.step()
        assert engine.step_applied == (factor == 1.0)
        assert torch.equal(engine.module.moe.balance, before) != engine.step_applied
        assert expert_loads(engine.module)["moe"].sum() == 64 and sum(engine.expert_load()["moe"].routes) == 128
    engine.destroy()


class Dropping(nn.Module):
    """Our layer, DeepSpeed's, and one of transformers that chooses experts 0 and 1 for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = MoE(8, None, EXPERTS, k=2, ep_size=2, expert_size=8, capacity_factor=0.5, min_capacity=1)
        self.theirs = deepspeed_moe.MoE(8, nn.Linear(8, 8), EXPERTS, ep_size=2, k=1, drop_tokens=False, use_rts=False)
        self.foreign = foreign("Mixtral").model.layers[0].mlp.experts
        self.wide = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.ours(x)
        routes = torch.tensor([[0, 1]]).expand(len(x), 2)
        last = self.foreign(self.wide(x), routes, torch.full_like(routes, 0.5, dtype=torch.float32))
        return (out + self.theirs(x)[0]).square().mean() + last.square().mean() + 0.01 * loss


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_log_and_the_engine_have_the_load_of_all_ranks(transport: str) -> None:
    torch.manual_seed(0)
    engine = make(Dropping(), 2, transport, steps_per_print=2, expert_parallel={"enabled": True, "autoep_size": 2})
    layers = {"ours": 2, "theirs.deepspeed_moe": 1, "foreign": 2}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream.train").addHandler(handler)
    own = {name: torch.zeros(EXPERTS, dtype=torch.int64) for name in layers}
    for step in range(2):
        x = torch.randn(20 + 12 * dist.get_rank(), 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x))
        engine.step()
        loads = expert_loads(engine.module)
        assert {name: int(load.sum()) for name, load in loads.items()} == {name: k * len(x) for name, k in layers.items()}
        for name, load in loads.items():
            own[name] += load
        dist.all_reduce(total := torch.stack(list(loads.values())))
        each = engine.expert_load()
        assert [list(load.routes) for load in each.values()] == total.tolist()
    assert 0.3 < each["ours"].dropped < 0.7 and each["foreign"].dropped == each["theirs.deepspeed_moe"].dropped == 0
    assert each["foreign"].routes == (52, 52, 0, 0) and each["foreign"].peak == 2 and each["foreign"].loss is None
    assert each["ours"].loss is not None and 0.5 < each["ours"].loss < 2
    logging.getLogger("slipstream.train").removeHandler(handler)
    dist.all_reduce(total := torch.stack(list(own.values())))
    entries = [text for text in records if "layers of experts" in text]
    if dist.get_rank() == 0:
        lines = entries[0].splitlines()
        assert len(entries) == 1 and lines[0].startswith("step 2, 3 layers of experts: max over mean 2.00 in 'foreign', dropped ")
        for line, routes in zip(lines[1:], total.tolist(), strict=True):
            assert line.endswith(" routes " + " ".join(map(str, routes)))
    else:
        assert not entries
    engine.destroy()


def placed(kind: str, ep: int = 2, **router: Any) -> Any:
    return make(foreign(kind), 1, expert_parallel={"enabled": True, "autoep_size": ep} | router)


ROUTER = {"top_k": 1, "route_norm": False, "route_scale": 1.5, "num_expert_groups": 2, "num_limited_groups": 2}
OTHER = {"top_k": 3, "route_norm": True, "routed_scaling_factor": 0.5, "num_expert_groups": 1, "num_limited_groups": 1}
FIXED = {"score_func": "sigmoid", "score_apply": "post", "expert_activation": "swiglu"}


@distributed(world_size=2)
@pytest.mark.parametrize("router", [ROUTER, OTHER])
def test_router_settings_of_the_config(router: dict[str, Any]) -> None:
    engine = placed("DeepseekV3", **router, **FIXED)
    names = ["num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"]
    FOREIGN["changed"] = FOREIGN["DeepseekV3"] | dict(zip(names, router.values(), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        import transformers

        for part in ("Config", "ForCausalLM"):
            patch.setattr(transformers, f"changed{part}", getattr(transformers, f"DeepseekV3{part}"), raising=False)
        twin = foreign("changed")
    del FOREIGN["changed"]
    inputs = foreign_batch("", dist.get_rank(), 0)
    torch.testing.assert_close(engine(**inputs).loss, twin(**inputs).loss)
    assert [getattr(engine.module.config, name) for name in names] == list(router.values())
    engine.destroy()
    alike = {"top_k": 2, "route_norm": True, "route_scale": 1.0, "score_func": "softmax", "num_expert_groups": 1}
    placed("Mixtral", **alike).destroy()  # what the model does anyway
    for kind, activation in (("Mixtral", "silu"), ("GptOss", "swiglu_oai")):
        placed(kind, expert_activation=activation).destroy()
    torch.manual_seed(0)
    ours = make(Balanced(None), 1, expert_parallel={"enabled": True, "autoep_size": 2, "top_k": 3, "load_balance_coeff": 0.5})
    x = torch.randn(8, 8)
    ours.backward(ours(x))
    ours.step()
    assert sum(ours.expert_load()["moe"].routes) == 48 and ours.module.moe.balance.abs().sum() > 0
    ours.destroy()


REFUSED = [
    ("Mixtral", {"score_func": "sigmoid"}, r"score_func is 'sigmoid', and the router of this model has 'softmax'"),
    ("Mixtral", {"route_norm": False}, "route_norm is False, and the router of this model has True"),
    ("Mixtral", {"num_expert_groups": 2}, "num_expert_groups is 2"),
    ("Mixtral", {"score_apply": "pre"}, "score_apply is 'pre', and the router of this model has 'post'"),
    ("Mixtral", {"expert_activation": "gelu"}, "expert_activation is 'gelu', and the router of this model has 'swiglu'"),
    ("GptOss", {"expert_activation": "swiglu"}, "expert_activation is 'swiglu', and the router of this model has 'swiglu_oai'"),
    ("Mixtral", {"load_balance_coeff": 0.01}, "moves a bias on the choice of experts, and this router has none"),
    ("Olmoe", {"top_k": 5}, r"with expert_parallel\.top_k 5: k \(5\) must lie in 1 to num_experts \(4\)"),
    ("DeepseekV3", {"num_expert_groups": 3}, "num_groups must divide"),
]


@distributed(world_size=2)
def test_a_router_that_cannot_do_what_the_config_says_is_refused() -> None:
    for kind, router, text in REFUSED:
        with pytest.raises(ValueError, match=text):
            placed(kind, **router)


@distributed(world_size=2)
def test_a_preset_must_be_that_of_the_model() -> None:
    for kind, preset in (("Mixtral", "mixtral"), ("Qwen2Moe", "qwen3_moe"), ("DeepseekV3", "deepseek_v3")):
        placed(kind, preset_model=preset).destroy()
    derived = foreign("Mixtral")
    derived.config.__class__ = type("Derived", (type(derived.config),), {"model_type": "derived"})
    make(derived, 1, expert_parallel={"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}).destroy()
    with pytest.raises(ValueError, match=r"'qwen3_moe' is for models of type qwen3_moe or qwen2_moe, .* of type mixtral"):
        placed("Mixtral", preset_model="qwen3_moe")
    with pytest.raises(ValueError, match=r"preset_model must be 'mixtral', .* got 'glm'"):
        placed("Mixtral", preset_model="glm")
    ours = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    with pytest.raises(ValueError, match=r"named layers\.N\.mlp\.experts, and this Model, .* has 'blocks\.0\.moe\.experts'"):
        make(build("top-2, gated"), 1, expert_parallel=ours)
    with pytest.raises(ValueError, match=r"the config sets expert_parallel\.preset_model, and Net has no layers of experts"):
        make(toy.Net(), 1, expert_parallel=ours | {"autoep_size": 1})


@distributed(world_size=2)
@pytest.mark.parametrize("half", [False, True])
def test_the_config_balances_the_experts_of_an_unmodified_model(half: bool) -> None:
    model = foreign("DeepseekV3")
    router = model.model.layers[1].mlp.gate
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.mul_(20)
        router.e_score_correction_bias.fill_(0.5)
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": 2, "load_balance_coeff": 2**-12}}
    rounded = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": []}}
    engine = make(model, 2, **blocks, **(rounded if half else {}))
    bias, moved = torch.full((EXPERTS,), 0.5), 0
    for step in range(8):
        engine.backward(engine(**foreign_batch("", dist.get_rank(), step)).loss)
        engine.step()
        load = torch.tensor(engine.expert_load()["model.layers.1.mlp.experts"].routes, dtype=torch.float32)
        bias += (load.mean() - load).sign() * 2**-12
        moved += int((load.mean() != load).sum())
        torch.testing.assert_close(router.e_score_correction_bias.float(), bias.to(router.e_score_correction_bias.dtype).float())
    assert moved > 20 and (router.e_score_correction_bias.dtype == torch.bfloat16) == half
    assert (bias - 0.5).abs().max() > 3 * 2**-12  # single steps are less than half a unit of bf16
    engine.destroy()


class Faulty(nn.Module):
    """Our layer, DeepSpeed's and one of transformers behind a dense one; the router of one has logits that are not finite."""

    def __init__(self, faulty: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.ours = MoE(32, None, EXPERTS, k=1, ep_size=2, expert_size=8)
        self.theirs = deepspeed_moe.MoE(32, nn.Linear(32, 32), EXPERTS, ep_size=2, k=1, use_rts=False)
        self.foreign = foreign("Mixtral").model.layers[0].mlp
        if faulty:
            with torch.no_grad():
                self.get_parameter(faulty).fill_(1e38)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (self.ours(h)[0] + self.theirs(h)[0] + self.foreign(h[None])[0]).square().mean()


def warning_of_skipped(engine: Any, x: Tensor) -> str:
    """What rank 0 says of a step that all ranks skip, because gradients are not finite."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    engine.backward(engine(x))
    engine.step()
    logging.getLogger("slipstream").removeHandler(handler)
    assert not engine.step_applied
    if dist.get_rank():
        return ""
    text = next(record for record in records if "is not finite" in record)
    assert "skipped" in text
    return text


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("faulty", "layer"),
    [
        ("ours.router.weight", "ours"),
        ("theirs.deepspeed_moe.gate.wg.weight", "theirs.deepspeed_moe"),
        ("foreign.gate.weight", "foreign.experts"),
        ("", ""),
    ],
)
def test_a_router_whose_logits_are_not_finite_is_named(faulty: str, layer: str) -> None:
    torch.manual_seed(0)
    half = {"enabled": True, "loss_scale": 1}
    engine = make(Faulty(faulty), 1, fp16=half, expert_parallel={"enabled": True, "autoep_size": 2})
    x = torch.randn(6, 8)
    if dist.get_rank():
        x[1, 1] = torch.nan if not faulty else 1.0  # without a faulty router, NaN comes from the data
    text = warning_of_skipped(engine, x.half())
    if dist.get_rank() == 0:
        assert ("the router of" in text) == bool(faulty)
        assert not faulty or f"the router of {layer!r} has NaN or infinite logits for 6 tokens that are finite" in text, text
    lost = {name: load.lost for name, load in engine.expert_load().items()}
    assert lost == {name: 12 if name == layer else 0 for name in lost}
    engine.destroy()


class Slot(nn.Module):
    """A layer of experts between dense ones, which may come later."""

    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.moe = self.filling() if filled else nn.Identity()

    def filling(self) -> MoE:
        torch.manual_seed(1)
        return MoE(16, None, EXPERTS, k=1, expert_size=8, balance_rate=0.25, aux_loss_weight=8.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        return self.out(self.moe(h)[0] if isinstance(self.moe, MoE) else h).square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_of_experts_added_in_surgery_is_one_given_to_initialize(stage: int) -> None:
    """Its load, its balance, the scale of its auxiliary loss, and the name of its router."""
    results = []
    for filled in (True, False):
        engine = make(
            toy.seeded(lambda f=filled: Slot(filled=f)), stage, fp16={"enabled": True, "loss_scale": 64, "auto_cast": True}
        )
        if not filled:
            assert engine.expert_load() == {}
            with engine.surgery():
                engine.module.moe = engine.module.filling()
        norms = train(engine, steps=2)[1]
        assert engine.module.moe.balance.any()
        load = engine.expert_load()["moe"]
        assert sum(load.routes) == 2 * 4 and load.loss > 0
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        results.append((norms, load, state))
        with slipstream.zero.gathered([engine.module.moe.router.weight], modifier_rank=0), torch.no_grad():
            engine.module.moe.router.weight.fill_(torch.nan)
        text = warning_of_skipped(engine, batch(dist.get_rank(), 0))
        assert dist.get_rank() or "the router of 'moe' has NaN or infinite logits for 4 tokens that are finite" in text
        engine.destroy()
    first, second = results
    assert first[0] == pytest.approx(second[0], rel=1e-6) and first[1] == second[1]
    for name, value in first[2].items():
        torch.testing.assert_close(value, second[2][name])


# -- optimizers and tiers --


def stepped(optimizer: dict[str, Any], ep: int, stage: int, **blocks: Any) -> dict[str, Tensor]:
    engine = make(build("top-2, gated", ep), stage, optimizer=optimizer, **blocks)
    train(engine, steps=2)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return state


class Apart(nn.Module):
    """The experts of a layer as parameters of their own."""

    def __init__(self, stack: Tensor) -> None:
        super().__init__()
        self.parts = nn.ParameterList(part.clone() for part in stack)


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_norms_are_those_of_each_expert(kind: str) -> None:
    """A stack steps as its experts would, each a parameter of its own."""
    torch.manual_seed(0)
    first, grad = torch.randn(4, 6, 5), torch.randn(4, 6, 5) * torch.tensor([1.0, 10, 100, 1000]).view(4, 1, 1)
    stack, apart = nn.Parameter(first.clone()), Apart(first)
    mark_stack(stack)
    stack.grad = grad.clone()
    for part, own in zip(apart.parts, grad, strict=True):
        part.grad = own.clone()
    extra = {"use_muon": True} if kind == "Muon" else {}
    for params in ([stack], list(apart.parts)):
        getattr(optim, kind)([{"params": params, **extra}], lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack(list(apart.parts)).detach())


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_shape_aware_optimizers_do_not_see_where_experts_are(kind: str) -> None:
    settings = {"type": kind, "params": {"lr": 1e-2}}
    whole = stepped(settings, 1, 1)
    for ep, stage in ((2, 1), (2, 3)):
        for name, value in stepped(settings, ep, stage).items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.disk
@distributed(world_size=2)
def test_experts_rest_on_the_host_and_on_disk(tmp_path: Path) -> None:
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    resident = stepped(adamw, 2, 3)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for zero in (
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": disk},
        {"offload_optimizer": disk, "offload_param": disk},
    ):
        for name, value in stepped(adamw, 2, 3, zero_optimization=zero).items():
            assert torch.equal(value, resident[name]), name


@distributed(world_size=2)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_experts_in_half_precision(half: str) -> None:
    """An overflow in an expert of one rank skips the update on all."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    scale = {"initial_scale_power": 4} if half == "fp16" else {}
    engine = make(build("top-2, gated", 2), 2, **{half: {"enabled": True} | scale})
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    if half == "fp16":
        x = batch(0, 0).to(dtype)
        engine.backward(engine(x if dist.get_rank() == 0 else x * 1e4))
        engine.step()
        assert not engine.step_applied
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    losses, norms, weights = twin("top-2, gated", 2)
    results: Any = [], []
    for step in range(STEPS):
        loss = engine(batch(dist.get_rank(), step).to(dtype))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        results[0].append(total.item() / 2)
        results[1].append(engine.global_grad_norm)
    assert results == (pytest.approx(losses, rel=2e-2), pytest.approx(norms, rel=0.1))
    moved = [(name, value) for name, value in engine.state_dict().items() if not torch.equal(value, before[name])]
    assert {name.rsplit(".", 2)[-2] for name, _ in moved} >= {"router", "gate_up", "down"}
    for name, value in moved:
        torch.testing.assert_close(value.float(), weights[name], rtol=0, atol=0.04, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


@distributed(world_size=2)
def test_a_model_on_meta_is_cut_before_it_has_memory() -> None:
    torch.manual_seed(0)
    expected = {name: value.clone() for name, value in Model("top-2, gated").state_dict().items()}
    torch.manual_seed(0)
    with slipstream.zero.Init():
        model = Model("top-2, gated", 2)
    engine = make(model, 3)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    train(engine, steps=1)
    assert {name: sum(load.routes) for name, load in engine.expert_load().items()} == dict.fromkeys(
        ("blocks.0.moe", "blocks.1.moe"), 2 * 2 * len(batch(0, 0))
    )
    engine.destroy()


@distributed(world_size=4)
def test_deepspeeds_groups_are_those_of_the_last_engine() -> None:
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    layers = [Residual(deepspeed_moe.MoE(8, expert, 4, ep_size=size, k=2)) for size in (2, 1)]
    model = nn.Sequential(nn.Linear(8, 8), *layers)
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine: Any = initialize(
        model=model,
        config={"train_batch_size": 4, "zero_optimization": {"stage": 3}, "optimizer": adamw},
        model_parameters=deepspeed_moe.configure_moe_param_groups(list(model.parameters())),
    )[0]
    rank = dist.get_rank()
    assert groups._get_max_expert_size_name() == "ep_size_2"
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert (groups._get_expert_parallel_rank("ep_size_2"), groups._get_data_parallel_world_size()) == (rank % 2, 4)
    ones = torch.ones(())
    dist.all_reduce(ones, group=groups._get_expert_parallel_group("ep_size_2"))
    dist.all_reduce(ones, group=groups._get_model_parallel_group())  # a group of one rank
    assert ones == 2
    assert groups._get_expert_parallel_group_ranks("ep_size_1") == [rank]
    assert groups._get_expert_parallel_src_rank("ep_size_2") == rank // 2 * 2
    assert (groups._get_broadcast_src_rank(), groups._get_expert_broadcast_src_rank("ep_size_2")) == (0, rank % 2)
    assert groups._get_expert_data_parallel_group_ranks("ep_size_1") == [0, 1, 2, 3]
    assert groups._get_expert_data_parallel_world_size("ep_size_1") == 4
    assert list(groups._get_expert_parallel_group_dict()) == ["ep_size_1", "ep_size_2"]
    alone = torch.ones(())
    dist.all_reduce(alone, group=groups._get_expert_parallel_group("ep_size_1"))
    assert alone == 1
    with pytest.raises(AssertionError, match="no layer of experts has the group 'ep_size_3'; there are: ep_size_1, ep_size_2"):
        groups._get_expert_parallel_group("ep_size_3")
    loss = engine(batch(rank, 0)).square().mean()
    engine.backward(loss)
    engine.step()
    assert engine.step_applied
    engine.destroy()


@distributed(world_size=2)
def test_slices_that_the_caller_did_not_make_are_refused() -> None:
    torch.manual_seed(0)
    moe = deepspeed_moe.MoE(16, nn.Linear(16, 16), EXPERTS, enable_expert_tensor_parallelism=True)
    model = nn.ModuleDict({"inp": nn.Linear(8, 16), "moe": moe})
    with pytest.raises(
        ValueError, match="enable_expert_tensor_parallelism, and no parameter of the experts is a slice over the 2 tp"
    ):
        make(model, 1, **SLICED)


def saved_whole(kind: str, path: Path) -> None:
    model = foreign(kind)
    engine = make(model, 1)
    foreign_losses(engine, 1)
    engine.destroy()
    torch.save(model, path)
    loaded = torch.load(path, weights_only=False)
    batch = foreign_batch(kind, 0, 0)
    assert loaded(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    loaded(**batch).loss.backward()


def test_a_model_of_transformers_pickles_after_an_engine(tmp_path: Path) -> None:
    for kind in ("Mixtral", "DeepseekV3"):
        run(1, saved_whole, kind, tmp_path / "model.pt")


class AllReduce(torch.autograd.Function):
    """The sum over a group in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool) -> Tensor:
        ctx.group, x = None if forward else group, x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        if ctx.group is not None:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Slice(nn.Module):
    """A rank's slice of an expert, by Megatron's marks; the whole one without a group."""

    def __init__(self, group: Any = None, index: int = 0) -> None:
        super().__init__()
        up, down = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)
        self.group = [group]  # a copied group is none
        width = 4 if group is not None else 8
        self.up, self.down = nn.Linear(16, width, bias=False), nn.Linear(width, 16, bias=False)
        rows = slice(index * width, (index + 1) * width)
        self.up.weight, self.down.weight = nn.Parameter(up.weight[rows]), nn.Parameter(down.weight[:, rows].contiguous())
        for dim, param in enumerate(self.parameters() if group is not None else ()):
            vars(param).update(tensor_model_parallel=True, partition_dim=dim, mark="mine")

    def __deepcopy__(self, memo: Any) -> Any:
        copied = Slice()
        copied.group = self.group
        copied.up, copied.down = copy.deepcopy(self.up, memo), copy.deepcopy(self.down, memo)
        return copied

    def forward(self, x: Tensor) -> Tensor:
        if self.group[0] is None:
            return self.down(torch.tanh(self.up(x)))
        hidden = torch.tanh(self.up(AllReduce.apply(x, self.group[0], False)))
        return AllReduce.apply(self.down(hidden), self.group[0], True)


class Mpu:
    """Two tp ranks, by two data-parallel ones."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = [dist.new_group([0, 1]), dist.new_group([2, 3])][self.rank // 2]
        self.data = [dist.new_group([0, 2]), dist.new_group([1, 3])][self.rank % 2]

    def get_model_parallel_rank(self) -> int:
        return self.rank % 2

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return self.rank // 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> Any:
        return self.data


def with_slices(ep: int, group: Any = None, index: int = 0) -> nn.Module:
    torch.manual_seed(0)
    inp = nn.Linear(8, 16)
    experts = deepspeed_moe.MoE(16, Slice(group, index), EXPERTS, ep_size=ep, drop_tokens=False)
    torch.manual_seed(1)
    nn.init.normal_(experts.deepspeed_moe.gate.wg.weight)
    return nn.Sequential(inp, Residual(experts))


@distributed(world_size=4)
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_that_the_caller_sliced(ep: int) -> None:
    """Each tp rank keeps its slice, and the state is that of whole experts."""
    mpu = Mpu()
    twin = with_slices(1)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine: Any = initialize(model=with_slices(ep, mpu.model, mpu.rank % 2), config=config, mpu=mpu)[0]
    stack = next(param for name, param in engine.module.named_parameters() if name.endswith("up.weight"))
    assert stack.mark == "mine" and stack.shape == (EXPERTS // ep, 4, 16)
    for step in range(2):
        loss = engine(batch(mpu.rank // 2, step)).square().mean()
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        losses = [twin(batch(rank, step)).square().mean() for rank in range(2)]
        (sum(losses, torch.zeros(())) / 2).backward()
        optimizer.step()
        assert loss.item() == pytest.approx(losses[mpu.rank // 2].item(), rel=1e-5)
    state, expected = engine.state_dict(), twin.state_dict()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()
    for group in (mpu.model, mpu.data):
        dist.destroy_process_group(group)


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.layer(x)
        return x + out + 0.01 * loss


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
RECOMPUTED = {"slipstream": {"activations": "recompute"}}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("top-2, gated", RECOMPUTED),
        ("top-1, sigmoid, shared, residual", AUTOCAST),
        pytest.param("top-2, gated", AUTOCAST, marks=pytest.mark.slow),
        pytest.param("top-1, sigmoid, shared, residual", RECOMPUTED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_under_other_features(extra: dict[str, Any], kind: str) -> None:
    """A load counts each token once, also where its block runs again."""
    run(2, train_under, extra, kind)


def train_under(extra: dict[str, Any], kind: str) -> None:
    engine = make(build(kind, 2), 3, **extra)
    x = batch(dist.get_rank(), 0)
    losses = []
    for _ in range(3):
        loss = engine(x)
        dist.all_reduce(total := loss.detach().float())
        losses.append(total.item() / 2)
        engine.backward(loss)
        engine.step()
        loads = expert_loads(engine.module)
        assert [int(load.sum()) for load in loads.values()] == [KINDS[kind]["k"] * len(x)] * 2
    expected = twin(kind, 2, 1)[0][0]
    assert losses[0] == pytest.approx(expected, rel=2e-2 if "torch_autocast" in extra else 1e-5) and losses[2] < losses[0]
    assert "memory" in str(engine.explain(x))
    engine.destroy()


@distributed(world_size=2)
def test_what_an_engine_left_is_not_split_again() -> None:
    model = build("top-2, gated", 2)
    make(model, 1).destroy()
    with pytest.raises(ValueError, match=r"'blocks\.0\.moe\.experts' has only the experts that an earlier engine left"):
        make(model, 1)
    odd = build("top-2, gated")
    with pytest.raises(ValueError, match=r"4 experts cannot be split over 3 ranks where 2 .* must divide both; use 2"):
        make(odd, 1, expert_parallel={"enabled": True, "autoep_size": 3})
    with pytest.raises(ValueError, match=r"autoep_size is 2, and Net has no layers of experts"):
        make(toy.Net(), 1, expert_parallel={"enabled": True, "autoep_size": 2})
    quantized = foreign("Mixtral")
    quantized.model.layers[1].mlp.experts.down_proj = nn.Parameter(torch.zeros(3, 32, 48))
    with pytest.raises(ValueError, match="is not a stack of 4 experts"):
        make(quantized, 1, expert_parallel={"enabled": True, "autoep_size": 2})


class Mixed(nn.Module):
    """A layer whose experts can be split, beside one whose list of experts cannot."""

    def __init__(self, *, both: bool = True) -> None:
        super().__init__()
        self.plain = Choice("experts")
        self.plain.experts[1] = nn.Linear(8, 8, bias=False)
        self.moe = MoE(8, None, EXPERTS, k=1, expert_size=8) if both else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.plain(x, 0)
        return (self.moe(h)[0] if isinstance(self.moe, MoE) else h).square().mean()


WHOLE = r"the experts of 'plain' \(Choice\) do not have parameters of the same names and shapes, and cannot be split"


@distributed(world_size=2)
def test_experts_that_stay_whole_are_named() -> None:
    def make_split(model: nn.Module, **keys: Any) -> Any:
        return make(model, 1, expert_parallel={"enabled": True, "autoep_size": 2} | keys)

    with pytest.raises(ValueError, match=WHOLE):
        make_split(Mixed(both=False))
    with pytest.raises(ValueError, match=WHOLE):
        make_split(Mixed(), moe_layer_pattern="plain|moe")
    with pytest.raises(ValueError, match=r"Net has no layers of experts .*, and none is named by moe_layer_pattern 'moe'"):
        make_split(toy.Net(), moe_layer_pattern="moe")
    for keys in ({"moe_layer_pattern": "("}, {"moe_layer_pattern": ".", "expert_pattern": "("}):
        with pytest.raises(ValueError, match=rf"expert_parallel.{[*keys][-1]} '\(' is no regular expression"):
            make_split(Mixed(), **keys)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    for keys in ({"moe_layer_pattern": "moe"}, {"moe_layer_pattern": ".", "expert_pattern": "experts?_of_none"}, {}):
        engine = make_split(Mixed(), **keys)
        assert len(engine.module.plain.experts) == 2 and engine.module.moe.experts.exchange.size == 2
        engine.destroy()
        assert sum("cannot be split" in record for record in records) == (not keys and dist.get_rank() == 0)
    logging.getLogger("slipstream").removeHandler(handler)


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_are_those_of_the_tokens_that_travel(transport: str, ep: int) -> None:
    engine = make(build("top-2, gated", ep), 2, transport)
    x, sent = batch(dist.get_rank(), 0), 0
    modules = [block.moe for block in engine.module.blocks]
    index = modules[0].experts.exchange.index

    def count(module: Any, args: Any, result: Any) -> None:
        nonlocal sent
        counts = result[2].view(ep, -1).sum(1)
        sent += int(counts.sum() - counts[index]) * 16 * 4

    for module in modules:
        module.register_forward_hook(count)
    engine.backward(engine(x))
    received = torch.tensor(float(sent))
    exchange = modules[0].experts.exchange
    # rows there and, in the backward, their gradients; what comes back is as much as other ranks sent here
    total = exchange.sum(received)
    moved = exchange.sum(torch.tensor(float(exchange.moved["all-to-all"])))
    numbers = 2 * (ep - 1) * (EXPERTS // ep) * 8 * ep  # int64 counts of two layers
    assert moved == 4 * total + numbers
    engine.destroy()


class Choice(nn.Module):
    """A module for each expert, of which a rank runs one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        result: Tensor = getattr(self, self.name)[expert](x)
        return result


# how a module that chooses is marked -> the config that does
MARKS: dict[str, dict[str, list[str]]] = {
    "marked": {},
    "classes": {"classes": [f"{Choice.__module__}.Choice"]},
    "names": {"names": ["layer"]},
    "name_suffixes": {"name_suffixes": ["yer"]},
    "root": {"classes": ["Branches"]},
}


class Branches(nn.Module):
    """Experts that know nothing of each other, in a layer of their own, in a repeated one, or in the model itself."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.layer = Choice("experts" if where == "layer" else "paths") if where in ("layer", *MARKS) and where != "root" else None
        if where == "marked":
            set_z3_leaf_module(self.layer, True)
        self.layers = nn.ModuleList(Choice("experts") for _ in range(2)) if where == "layers" else []
        if where in ("model", "unmarked", "root"):
            self.add_module("experts" if where == "model" else "paths", nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        h = self.inp(x)
        for layer in [*([] if self.layer is None else [self.layer]), *self.layers]:
            h = layer(h, expert)
        chosen = getattr(self, "paths", getattr(self, "experts", None))
        return (h if chosen is None else chosen[expert](h)).square().mean()


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("where", ["model", "layer", "layers", *MARKS])
def test_ranks_may_run_different_experts_of_a_list(transport: str, where: str) -> None:
    rank = dist.get_rank()
    for stage in cases.stages(transport):
        torch.manual_seed(0)
        model, reference = Branches(where), Branches(where)
        reference.load_state_dict(model.state_dict())
        sgd = {"type": "SGD", "params": {"lr": 0.5}}
        zero = {"stage": stage, "leaf_module": MARKS.get(where, {})}
        engine = make(model, stage, transport, optimizer=sgd, gradient_clipping=0, zero_optimization=zero)
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(3):
            engine.backward(engine(batch(rank, step), (rank + step) % 2))
            engine.step()
            plain.zero_grad()
            sum(((reference(batch(i, step), (i + step) % 2)) for i in range(2)), torch.zeros(())).div(2).backward()
            plain.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], msg=lambda m, n=name, s=stage: f"{s} {n}: {m}")
        engine.destroy()


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
@distributed(world_size=2, transports=("gloo",))
def test_experts_over_ranks_step_by_signs_as_far_as_on_each_rank(kind: str, transport: str) -> None:
    """An expert's gradients are a sum over other ranks than a dense parameter's, so their shares of a mean differ."""
    counts = {"freeze_step": 8} if kind == "OneBitAdam" else {"var_freeze_step": 8, "local_step_clipper": 1}
    optimizer = {"type": kind, "params": {"lr": 1e-3, "betas": [0.9, 0.99], **counts}}
    moved: dict[str, list[float]] = {"expert": [], "dense": []}
    for ep in (1, 2):
        engine = make(build("top-2, gated", ep), 1, transport, optimizer=optimizer, gradient_clipping=0)
        for step in range(20):
            if step == 8:
                before = {name: value.clone() for name, value in engine.state_dict().items()}
            engine.backward(engine(batch(dist.get_rank(), step)))
            engine.step()
        steps = {name: float((value - before[name]).square().sum()) for name, value in engine.state_dict().items()}
        for part, values in moved.items():
            values.append(sum(steps[name] for name in steps if ("experts" in name) == (part == "expert")) ** 0.5)
        engine.destroy()
    for alone, apart in moved.values():
        assert 0.8 < apart / alone < 1.25, moved


@distributed(world_size=2, transports=("gloo",))
def test_modules_of_a_list_that_is_none_of_experts_are_blocks(transport: str) -> None:
    engine = make(Branches("unmarked"), 3, transport)
    with pytest.raises(PeerError, match=r"ranks took different branches in the model(.|\n)*zero_optimization.leaf_module"):
        engine(batch(dist.get_rank(), 0), dist.get_rank())
    engine.destroy()
