"""Layers of experts in engines: expert parallelism at every ZeRO stage is one process, whatever ranks route where."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream import checkpoint, optim
from slipstream.compat import groups
from slipstream.compat import moe as deepspeed_moe
from slipstream.compat.engine import initialize
from slipstream.moe import MoE, expert_loads
from slipstream.world.watch import PeerError
from slipstream.zero.leaves import mark_stack
from tests import cases, toy
from tests.pool import distributed, run

STEPS, CLIP, EXPERTS = 3, 0.05, 4
KINDS: dict[str, dict[str, Any]] = {
    "top-2, gated": {"k": 2, "expert_size": 24},
    "top-1, sigmoid, shared": {"k": 1, "score": "sigmoid", "expert_size": 24},
    "one by one": {"k": 2},
}


def layer(kind: str, ep: int | None, dim: int = 16) -> MoE:
    expert = None
    if kind == "one by one":
        expert = lambda: nn.Sequential(nn.Linear(dim, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, dim))  # noqa: E731
    shared = nn.Linear(dim, dim) if "shared" in kind else None
    return MoE(dim, expert, EXPERTS, ep_size=ep, shared=shared, **KINDS[kind])


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
@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_several_ranks_train_as_one_process(transport: str, kind: str) -> None:
    losses, norms, weights = twin(kind, 4)
    assert all(norm > CLIP for norm in norms)
    for ep in (1, 2, 4):
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


def save(path: Path, stage: int, ep: int) -> tuple[Any, Any]:
    engine = make(build("top-2, gated", ep), stage)
    train(engine)
    engine.save_checkpoint(str(path), tag="x")
    return train(engine, STEPS, 2)


def resume(path: Path, stage: int, ep: int) -> tuple[Any, Any]:
    torch.manual_seed(1)
    engine = make(Model("top-2, gated", ep), stage)
    engine.load_checkpoint(str(path), tag="x")
    return train(engine, STEPS, 2)


def test_checkpoints_load_at_any_expert_parallel_size(tmp_path: Path) -> None:
    expected = run(4, save, tmp_path, 2, 2)[0]
    shapes = {name: info.shape for name, info in checkpoint.load_metadata(str(tmp_path), "x").tensors.items()}
    assert shapes["model.blocks.0.moe.experts.stack.expert.gate_up.weight"] == (EXPERTS, 48, 16)
    assert run(4, resume, tmp_path, 2, 2)[0] == expected
    for stage, ep in ((3, 4), (0, 1)):
        losses, norms = run(4, resume, tmp_path, stage, ep)[0]
        assert (losses, norms) == (pytest.approx(expected[0], abs=1e-5), pytest.approx(expected[1], rel=1e-4))


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
}


def foreign(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | FOREIGN[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # some leave parameters as they were allocated
        for param in model.parameters():
            param.normal_(0, 0.05)
    return model


def foreign_losses(engine: Any, ranks: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        ids = toy.tokens(engine.mesh.batch.index, step)
        loss = engine(input_ids=ids, labels=ids).loss
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
        batches = [toy.tokens(rank, step) for rank in range(ranks)]
        loss = sum((model(input_ids=ids, labels=ids).loss for ids in batches), torch.zeros(())) / ranks
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


SPEC = {"patterns": [".*inp.weight$"], "partition_type": "column", "gather_output": True}
SLICED = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": [SPEC]}}}


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_ranks_of_a_replica_share_the_tokens_of_experts(transport: str, ep: int) -> None:
    """tp 2: neighbors have the same batches, and other experts."""
    losses, norms, weights = twin("top-2, gated", 2)
    engine = make(build("top-2, gated", ep), 3, transport, **SLICED)
    assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4))
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


@distributed(world_size=4)
def test_experts_of_parts_of_a_sequence() -> None:
    """sp 2: each rank has tokens of its own."""
    losses, norms, _ = twin("top-2, gated", 4)
    engine = make(build("top-2, gated", 2), 1, slipstream={"mesh": {"sp": 2}})
    assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4))
    engine.destroy()


@distributed(world_size=4)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "tokens": True}, {"pp": 2}], ids=str)
def test_experts_beside_other_axes(layout: dict[str, Any]) -> None:
    losses, norms, _ = foreign_twin("Mixtral", 2)
    mesh = {axis: size for axis, size in layout.items() if axis != "tokens"}
    extra = {"mesh": mesh, "tensor": {"sequence_parallel": "tokens" in layout}}
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "slipstream": {"transport": "auto"} | extra}
    engine = make(foreign("Mixtral"), 1, **blocks)
    if "pp" in layout:
        results: Any = [], []
        for step in range(STEPS):
            ids = toy.tokens(engine.mesh.batch.index, step)
            results[0].append(engine.train_batch(iter([{"input_ids": ids, "labels": ids}])).item())
            results[1].append(engine.global_grad_norm)
    else:
        results = foreign_losses(engine, 4)
    assert results == (pytest.approx(losses, abs=2e-5), pytest.approx(norms, rel=2e-4))
    engine.destroy()


def train_foreign(kind: str, path: Path) -> dict[str, Tensor]:
    losses, norms, weights = foreign_twin(kind, 2)
    for ep, stage in ((1, 3), (2, 1), (2, 3)):
        engine = make(foreign(kind), stage, expert_parallel={"enabled": True, "autoep_size": ep})
        assert foreign_losses(engine, 2) == (pytest.approx(losses, abs=2e-5), pytest.approx(norms, rel=2e-4)), (ep, stage)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
        if (ep, stage) == (2, 3):
            engine.save_pretrained(str(path))
        engine.destroy()
    return state


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_unmodified_model_of_experts(kind: str, tmp_path: Path) -> None:
    import transformers

    state = run(2, train_foreign, kind, tmp_path)[0]
    loaded = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(str(tmp_path))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name


class Balanced(nn.Module):
    def __init__(self, rate: float) -> None:
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
    engine = make(build("top-2, gated", 2), 2, **{half: {"enabled": True}})
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    if half == "fp16":
        x = batch(0, 0).to(dtype)
        engine.backward(engine(x if dist.get_rank() == 0 else x * 1e4))
        engine.step()
        assert not engine.step_applied
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    for step in range(3):
        engine.backward(engine(batch(dist.get_rank(), step).to(dtype)))
        engine.step()
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
    engine.destroy()


@distributed(world_size=4)
def test_deepspeeds_groups_are_those_of_the_last_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Residual(deepspeed_moe.MoE(8, nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 4, ep_size=2, k=2))
    )
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
    with pytest.raises(AssertionError, match="no layer of experts has the group 'ep_size_3'; there are: ep_size_2"):
        groups._get_expert_parallel_group("ep_size_3")
    loss = engine(batch(rank, 0)).square().mean()
    engine.backward(loss)
    engine.step()
    assert engine.step_applied
    engine.destroy()


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.layer(x)
        return x + out + 0.01 * loss


@pytest.mark.parametrize(
    "extra",
    [{"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"slipstream": {"activations": "recompute"}}],
    ids=lambda extra: next(iter(extra)),
)
def test_experts_under_other_features(extra: dict[str, Any]) -> None:
    """A load counts each token once, also where its block runs again."""
    run(2, train_under, extra)


def train_under(extra: dict[str, Any]) -> None:
    engine = make(build("top-2, gated", 2), 3, **extra)
    x = batch(dist.get_rank(), 0)
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        loads = expert_loads(engine.module)
        assert [int(load.sum()) for load in loads.values()] == [2 * len(x)] * 2
    assert loss < engine.eval()(x) + 1  # finite
    assert "memory" in str(engine.explain(x))
    engine.destroy()


@distributed(world_size=2)
def test_what_an_engine_left_is_not_split_again() -> None:
    model = build("top-2, gated", 2)
    make(model, 1).destroy()
    with pytest.raises(ValueError, match=r"'blocks\.0\.moe\.experts' has only the experts that an earlier engine left"):
        make(model, 1)
    odd = build("top-2, gated")
    with pytest.raises(ValueError, match=r"4 experts cannot be split over 3 of 2 ranks: ep_size must divide both; use 2"):
        make(odd, 1, expert_parallel={"enabled": True, "autoep_size": 3})
    with pytest.raises(ValueError, match=r"autoep_size is 2, and Net has no layers of experts"):
        make(toy.Net(), 1, expert_parallel={"enabled": True, "autoep_size": 2})
    quantized = foreign("Mixtral")
    quantized.model.layers[1].mlp.experts.down_proj = nn.Parameter(torch.zeros(3, 32, 48))
    with pytest.raises(ValueError, match="is not a stack of 4 experts"):
        make(quantized, 1, expert_parallel={"enabled": True, "autoep_size": 2})


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_are_those_of_the_tokens_that_travel(transport: str, ep: int) -> None:
    engine = make(build("top-2, gated", ep), 2, transport)
    x, sent = batch(dist.get_rank(), 0), 0
    modules = [block.moe for block in engine.module.blocks]
    index = modules[0].experts.exchange.rank

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


class Branches(nn.Module):
    """Experts that know nothing of each other: a module for each, of which a rank runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](self.inp(x)).square().mean()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_ranks_may_run_different_modules_if_their_weights_are_there(transport: str) -> None:
    rank = dist.get_rank()
    for stage in cases.stages(transport):
        torch.manual_seed(0)
        model, reference = Branches(), Branches()
        reference.load_state_dict(model.state_dict())
        sgd = {"type": "SGD", "params": {"lr": 0.5}}
        engine = make(model, stage, transport, optimizer=sgd, gradient_clipping=0)
        if (stage, transport) == (3, "gloo"):  # experts are blocks, which are gathered from all ranks
            with pytest.raises(PeerError, match="ranks took different branches in the model"):
                engine(batch(rank, 0), rank)
            engine.destroy()
            continue
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(2):
            engine.backward(engine(batch(rank, step), (rank + step) % 2))
            engine.step()
            plain.zero_grad()
            sum(((reference(batch(i, step), (i + step) % 2)) for i in range(2)), torch.zeros(())).div(2).backward()
            plain.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], msg=lambda m, n=name, s=stage: f"{s} {n}: {m}")
        engine.destroy()
