"""Experts that are modules of a list, in a layer's own code: split over ranks, they train as in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import slipstream
from slipstream import checkpoint
from slipstream.compat.moe import has_moe_layers, split_params_into_shared_and_expert_params
from slipstream.moe import expert_loads
from slipstream.moe.listed import why_whole
from slipstream.train.planning.dry_run import dry_run
from tests import cases, toy
from tests.dist.test_moe import CLIP, STEPS, batch, make, train, warning_of_skipped
from tests.pool import distributed, run

EXPERTS, EP = 4, {"enabled": True, "autoep_size": 2}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class Mixtral(nn.Module):
    """As transformers 4 wrote it: a loop over the experts that have tokens, and the sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, x.shape[-1])
        logits = self.gate(flat)
        weights, chosen = F.softmax(logits, dim=1).topk(2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            choice, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.experts[expert[0]](flat[None, token].reshape(-1, 16)) * weights[token, choice, None])
        return out.view(x.shape), logits


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 16))
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        scores = F.linear(x.view(-1, 16), self.weight).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        return chosen, weights, scores.square().sum()


class DeepSeek(nn.Module):
    """As its remote code wrote it: every expert in turn, masks of tokens, a shared expert, and a norm of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))
        self.gate, self.shared_experts, self.norm = Gate(), Mlp(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        identity, shape = x, x.shape
        chosen, weights, loss = self.gate(x)
        x = x.reshape(-1, 16).repeat_interleave(2, dim=0)
        x = x * (torch.rand(len(x), 1) * 0 + 1).to(x)  # draws
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            y[chosen.view(-1) == i] = expert(x[chosen.view(-1) == i])
        y = (y.view(*weights.shape, -1) * weights[..., None]).sum(1).view(*shape)
        return self.norm(y + self.shared_experts(identity)), loss


class Own(nn.ModuleDict):
    """A list with a forward of its own (Switch, NLLB)."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": Mlp() for i in range(EXPERTS)})
        self.token_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            token = chosen[:, 0] == i
            out[token] = self.token_dropout(self[f"expert_{i}"](x[token]) * weights[token])
        return out


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, EXPERTS), Own()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(1, dim=-1)
        return self.experts(x, chosen, weights), logits


KINDS: dict[str, Callable[[], nn.Module]] = {"Mixtral": Mixtral, "DeepSeek": DeepSeek, "Switch": Switch}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), KINDS[kind]()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, extra = self.mlp(self.norm(x))
        return x + out, extra.square().mean()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, extra = self.inp(x), x.new_zeros(())
        for block in self.blocks:
            h, each = block(h)
            extra = extra + each
        return self.out(h).square().mean() + 0.01 * extra


def build(kind: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(kind)


def twin(
    kind: str, ranks: int, adamw: Callable[..., Any] = torch.optim.AdamW
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum((model(batch(rank, step)) for rank in range(ranks)), torch.zeros(())) / ranks
        loss.backward()
        for param in model.parameters():  # of an expert without tokens: an engine's weights decay all the same
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_list_train_as_in_one_process(transport: str, kind: str) -> None:
    losses, norms, weights = twin(kind, 4)
    for ep in (2, 4) if cases.EVERYTHING else (2 + 2 * (list(KINDS).index(kind) % 2),):  # by turns
        bits = []
        for stage in cases.stages(transport):
            engine = make(build(kind), stage, transport, expert_parallel={"enabled": True, "autoep_size": ep})
            assert sum(param.numel() > 0 for name, param in engine.module.named_parameters() if "experts.0.w1" in name) <= 2
            result = train(engine)
            assert result == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4)), (ep, stage)
            bits.append(result)
            state = engine.state_dict()
            assert list(state) == list(weights)
            for name, value in state.items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            engine.destroy()
        assert all(each == bits[0] for each in bits), ep


@distributed(world_size=2)
def test_a_router_computes_once_and_the_load_is_counted() -> None:
    engine = make(build("DeepSeek"), 1, expert_parallel=EP)
    x = batch(dist.get_rank(), 0)
    state = torch.get_rng_state()
    engine.backward(engine(x))
    moved = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in engine.module.blocks:
        torch.rand(2 * len(x), 1)
    assert torch.equal(torch.get_rng_state(), moved)
    engine.step()
    assert [block.mlp.gate.calls for block in engine.module.blocks] == [1, 1]
    assert has_moe_layers(engine.module) == (True, EXPERTS)
    dense, experts = split_params_into_shared_and_expert_params(engine.module.parameters())
    assert len(experts) == 2 * EXPERTS * 3 and len(dense) == len(list(engine.module.parameters())) - len(experts)
    assert [int(load.sum()) for load in expert_loads(engine.module).values()] == [2 * len(x)] * 2
    assert sum(sum(load.routes) for load in engine.expert_load().values()) == 2 * 2 * 2 * len(x)
    engine.destroy()


class Balanced(Gate):
    """A router with settings, and a bias on the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.view(-1, 16), self.weight).sigmoid()
        chosen = (scores + self.get_buffer("e_score_correction_bias")).topk(self.top_k, dim=-1).indices
        return chosen.repeat(1, 2 // self.top_k), scores.gather(1, chosen).repeat(1, 2 // self.top_k), scores.square().sum()


@distributed(world_size=2)
@pytest.mark.parametrize("size", [1, 2])
def test_settings_of_the_config_reach_the_router_of_a_list(size: int) -> None:
    model = build("DeepSeek")
    for block in model.blocks:
        block.mlp.gate = Balanced()
    engine = make(model, 1, expert_parallel=EP | {"autoep_size": size, "top_k": 1, "load_balance_coeff": 0.5})
    engine.backward(engine(batch(dist.get_rank(), 0)))
    engine.step()
    for block, load in zip(engine.module.blocks, engine.expert_load().values(), strict=True):
        routes = torch.tensor(load.routes, dtype=torch.float64)
        assert block.mlp.gate.top_k == 1 and int(routes.sum()) == 2 * 2 * len(batch(0, 0))
        moved = 0.5 * (routes.mean() - routes).sign()
        assert torch.equal(block.mlp.gate.e_score_correction_bias, moved.float()) and moved.any()
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_that_is_not_split_is_counted_and_computes_the_same_bits(kind: str) -> None:
    bits = []
    for blocks in ({}, {"expert_parallel": {"enabled": True}}):
        engine = make(build(kind), 3, **blocks)
        bits.append(train(engine))
        routes = (1 if kind == "Switch" else 2) * 2 * len(batch(0, 0))
        assert [sum(load.routes) for load in engine.expert_load().values()] == ([routes] * 2 if blocks else [])
        engine.destroy()
    assert bits[0] == bits[1]


@distributed(world_size=2)
def test_settings_that_reach_no_router_are_refused_at_size_1() -> None:
    uneven = build("Mixtral")
    REASONS["share modules or parameters"](uneven.blocks[0].mlp.experts)
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (toy.Net(), {"top_k": 2}, r"sets expert_parallel.top_k, and Net has no layers of experts .*: drop the key"),
        (
            toy.Net(),
            {"moe_layer_pattern": "mlp"},
            r"Net has no layers of experts .* named by moe_layer_pattern 'mlp': drop the key",
        ),
        (build("Mixtral"), {"top_k": 1}, r"'blocks.0.mlp.experts': expert_parallel.top_k is 1, and the router .*: drop the key"),
        (uneven, {"load_balance_coeff": 0.1}, r"load_balance_coeff, and the experts of 'blocks.0.mlp' \(Mixtral\) share .*: use"),
    ]
    for model, keys, match in refused:
        with pytest.raises(ValueError, match=match):
            make(model, 1, expert_parallel={"enabled": True} | keys)
    make(toy.Net(), 1, expert_parallel={"enabled": True}).destroy()  # a warning


class Dense(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.new_zeros(())


@distributed(world_size=2)
def test_a_list_added_in_surgery_gets_the_settings() -> None:
    model = build("DeepSeek")
    added, model.blocks[1].mlp = model.blocks[1].mlp, Dense()
    model.blocks[0].mlp.gate, added.gate = Balanced(), Balanced()
    engine = make(model, 1, expert_parallel={"enabled": True, "top_k": 1, "load_balance_coeff": 0.5})
    with engine.surgery():
        engine.module.blocks[1].mlp = added
    engine.backward(engine(batch(dist.get_rank(), 0)))
    engine.step()
    assert [sum(load.routes) for load in engine.expert_load().values()] == [2 * 2 * len(batch(0, 0))] * 2
    assert all(block.mlp.gate.top_k == 1 and block.mlp.gate.e_score_correction_bias.any() for block in engine.module.blocks)
    match = r"'blocks.1.mlp.experts': expert_parallel.top_k is 1, and the router of this model"
    with pytest.raises(ValueError, match=match), engine.surgery():
        engine.module.blocks[1].mlp = Mixtral()
    engine.destroy()


ROUTERS = {"Mixtral": "gate.weight", "DeepSeek": "gate.weight", "Switch": "router.bias"}


@distributed(world_size=2)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_router_of_a_list_whose_logits_are_not_finite_is_named(kind: str, size: int) -> None:
    """Not one whose experts or whose tokens are not finite."""
    expert = "experts.expert_0.w2.bias" if kind == "Switch" else "experts.0.w2.bias"
    for faulty in (ROUTERS[kind], expert, ""):
        model = build(kind)
        if faulty:
            with torch.no_grad():
                model.blocks[0].mlp.get_parameter(faulty).fill_(torch.nan)
        engine = make(model, 2, bf16={"enabled": True, "check_grad_overflow": True}, expert_parallel=EP | {"autoep_size": size})
        x = batch(dist.get_rank(), 0).bfloat16()
        if not faulty and dist.get_rank():
            x[1, 1] = torch.nan
        text = warning_of_skipped(engine, x)
        is_named = faulty == ROUTERS[kind]
        said = "the router of 'blocks.0.mlp.experts' has NaN or infinite logits for 4 tokens that are finite"
        assert (said in text) == (is_named and dist.get_rank() == 0) and ("the router" in text) == (said in text), text
        assert ("or a module beside its experts" in text) == (said in text and kind == "DeepSeek"), text  # it has a shared one
        lost = [load.lost for load in engine.expert_load().values()]
        assert lost == [2 * len(x) if is_named else 0, 0], (faulty, lost)
        engine.destroy()


class Odd(Model):
    """Some ranks have no tokens in the second layer."""

    def forward(self, x: Tensor, has_tokens: bool) -> Tensor:
        h, _ = self.blocks[0](self.inp(x))
        h, _ = self.blocks[1](h[: len(h) if has_tokens else 0])
        return self.out(h).square().sum() / 4


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["Mixtral", "Switch"])
def test_a_rank_without_tokens_trains_on(transport: str, kind: str) -> None:
    model, rank = toy.seeded(lambda: Odd(kind)), dist.get_rank()
    twin = copy.deepcopy(model)
    sum((twin(batch(i, 0), i > 0) for i in range(2)), torch.zeros(())).div(2).backward()
    norm = float(nn.utils.clip_grad_norm_(twin.parameters(), 1e9))
    for stage in cases.stages(transport):
        engine = make(copy.deepcopy(model), stage, transport, expert_parallel=EP)
        engine.backward(engine(batch(rank, 0), rank > 0))
        engine.step()
        assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5)
        engine.destroy()


def stepped(ep: int, stage: int, **blocks: Any) -> dict[str, Tensor]:
    model = build("Mixtral").to(torch.bfloat16 if "bf16" in blocks else torch.float32)
    engine = make(model, stage, expert_parallel={"enabled": True, "autoep_size": ep}, **blocks)
    for step in range(2):
        x = batch(dist.get_rank(), step).to(engine.module.inp.weight.dtype)
        engine.backward(engine(x))
        engine.step()
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return state


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["Lamb", "Muon", pytest.param("NAdam", marks=pytest.mark.slow)])
def test_optimizers_do_not_see_where_experts_are(kind: str) -> None:
    """Each expert is a tensor of its own: norms and matrices are those of one."""
    settings = {"type": kind, "params": {"lr": 1e-2}}
    whole = stepped(1, 1, optimizer=settings)
    for ep, stage in ((2, 1), (2, 3)):
        for name, value in stepped(ep, stage, optimizer=settings).items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Muon", marks=pytest.mark.slow)])
def test_an_optimizers_state_is_that_of_all_experts(kind: str) -> None:
    """Of whole experts, for any layout: on a rank, some have no state."""
    states: list[Any] = []
    for ep, stage in ((1, 1), (2, 0), (4, 3)):
        settings = {"type": kind, "params": {"lr": 1e-3}}
        engine = make(build("Mixtral"), stage, optimizer=settings, expert_parallel={"enabled": True, "autoep_size": ep})
        if states:
            engine.optimizer.load_state_dict(states[0])
            loaded = engine.optimizer.state_dict()["state"]
            assert all(
                torch.equal(value, loaded[i][name]) for i, each in states[0]["state"].items() for name, value in each.items()
            )
            engine.destroy()
            engine = make(build("Mixtral"), stage, optimizer=settings, expert_parallel={"enabled": True, "autoep_size": ep})
        train(engine, steps=2)
        states.append(engine.optimizer.state_dict())
        engine.destroy()
    for state in states[1:]:
        assert state["state"].keys() == states[0]["state"].keys()
        for i, each in state["state"].items():
            for name, value in each.items():
                torch.testing.assert_close(value, states[0]["state"][i][name], rtol=0, atol=1e-5)


@pytest.mark.disk
@distributed(world_size=2)
def test_experts_of_a_list_rest_on_the_host_and_on_disk(tmp_path: Path) -> None:
    resident = stepped(2, 3)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for zero in ({"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": disk, "offload_param": disk}):
        for name, value in stepped(2, 3, zero_optimization=zero).items():
            assert torch.equal(value, resident[name]), name


@distributed(world_size=2)
@pytest.mark.parametrize(
    "extra",
    [
        {"bf16": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"slipstream": {"activations": "recompute"}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_experts_of_a_list_under_other_features(extra: dict[str, Any]) -> None:
    """The same as with all experts on each rank."""
    exact = "slipstream" in extra
    whole = stepped(1, 2, **extra)
    for name, value in stepped(2, 2, **extra).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=2e-5 if exact else 3e-2, msg=lambda m, n=name: f"{n}: {m}")


def save(path: Path, ep: int, stage: int) -> Any:
    engine = make(build("Mixtral"), stage, expert_parallel={"enabled": True, "autoep_size": ep})
    train(engine)
    engine.save_checkpoint(str(path), tag="x")
    results = train(engine, STEPS, 2)
    engine.destroy()
    return results


def resume(path: Path, ep: int, stage: int) -> Any:
    engine = make(build("Mixtral", seed=1), stage, expert_parallel={"enabled": True, "autoep_size": ep})
    engine.load_checkpoint(str(path), tag="x")
    results = train(engine, STEPS, 2)
    engine.destroy()
    return results


def test_checkpoints_have_the_names_of_the_model_and_load_at_any_size(tmp_path: Path) -> None:
    expected = run(4, save, tmp_path, 2, 2)[0]
    shapes = {name: info.shape for name, info in checkpoint.load_metadata(str(tmp_path), "x").tensors.items()}
    assert all(shapes[f"model.{name}"] == param.shape for name, param in build("Mixtral").named_parameters())
    assert run(4, resume, tmp_path, 2, 2)[0] == expected
    for ep, stage in ((4, 3), (1, 1)):
        losses, norms = run(4, resume, tmp_path, ep, stage)[0]
        assert (losses, norms) == (pytest.approx(expected[0], abs=1e-5), pytest.approx(expected[1], rel=1e-4))


def switch() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_experts": 4, "vocab_size": 64}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0, "dropout_rate": 0.0}
    config = transformers.SwitchTransformersConfig(
        **sizes, **sparse, num_decoder_layers=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def train_switch(path: Path) -> dict[str, Tensor]:
    states = []
    for ep, stage in ((1, 1), (2, 1), (2, 3)):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = make(switch(), stage, optimizer=sgd, expert_parallel={"enabled": True, "autoep_size": ep})
        ids = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        states.append({name: value.clone() for name, value in engine.state_dict().items()})
        if (ep, stage) == (2, 3):
            engine.save_pretrained(str(path))
        engine.destroy()
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    return states[-1]


def test_a_model_of_transformers_with_a_list_of_experts(tmp_path: Path) -> None:
    """Switch: `save_pretrained` writes what transformers loads."""
    state = run(2, train_switch, tmp_path)[0]
    loaded = type(switch()).from_pretrained(str(tmp_path)).state_dict()
    assert loaded.keys() == state.keys()
    for name, value in loaded.items():
        assert torch.equal(value, state[name]), name


class Other(Mixtral):
    """How its forward is not as it must be."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.runs = fault, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.runs += 1
        if self.fault == "in place":
            x.mul_(2)
        if self.fault == "arguments":
            self.experts[0](x, x)
        if self.fault == "second run" and self.runs % 2:
            self.experts[1](x)
        return super().forward(x)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("in place", "Other changes its input in place, and its forward runs twice"),
        ("arguments", r"an expert \(Mlp\) is called with 2 arguments"),
        ("second run", r"the forward of Other, .* called expert 1 .* in its first run and called expert \d .* in its second"),
    ],
)
def test_a_layer_that_cannot_run_twice_is_named(fault: str, match: str) -> None:
    torch.manual_seed(0)
    engine = make(nn.Sequential(nn.Linear(8, 16), Other(fault)), 1, expert_parallel=EP)
    with pytest.raises((ValueError, RuntimeError), match=match):
        engine(batch(0, 0))
    with pytest.raises(RuntimeError, match=r"expert \d \(Mlp\), which another rank has, is called outside of the forward"):
        for expert in engine.module[1].experts:
            expert(torch.zeros(2, 16))
    engine.destroy()


def slices(*layers: tuple[str, str]) -> dict[str, Any]:
    """A config of tp 2: patterns of weights, and how they are cut."""
    specs = [{"patterns": [pattern], "partition_type": kind} for pattern, kind in layers]
    specs[0]["gather_output"] = len(specs) == 1
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}}


WHOLE = slices((".*inp.weight$", "column"))
SLICED = slices((r".*experts\.\d+\.w1\.weight$", "column"), (r".*experts\.\d+\.w2\.weight$", "row"))
BESIDE = {"tp, ep 2": (WHOLE, 2), "tp, ep 4": (WHOLE, 4), "tp, sliced": (SLICED, 2), "sp": ({"slipstream": {"mesh": {"sp": 2}}}, 2)}


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("layout", [pytest.param(each, marks=[pytest.mark.slow] * ("ep 4" in each)) for each in BESIDE])
def test_experts_of_a_list_beside_other_axes(transport: str, layout: str) -> None:
    """tp ranks have the same tokens, and share them among the experts unless they have slices of these."""
    blocks, ep = BESIDE[layout]
    losses, norms, weights = twin("Mixtral", 4 if layout == "sp" else 2)
    engine = make(build("Mixtral"), 2, transport, expert_parallel={"enabled": True, "autoep_size": ep}, **blocks)
    assert train(engine) == (pytest.approx(losses, abs=1e-5), pytest.approx(norms, rel=1e-4))
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


@distributed(world_size=2)
def test_a_model_without_memory_is_cut_before_it_has_some(tmp_path: Path) -> None:
    """What constructors drew inside zero.Init, and what files have."""
    expected = {name: value.clone() for name, value in build("Switch").state_dict().items()}
    torch.manual_seed(0)
    with slipstream.zero.Init():
        drawn = Model("Switch")
    if dist.get_rank() == 0:
        save_file(expected, tmp_path / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        read = Model("Switch")
    slipstream.zero.load(read, str(tmp_path))
    for model in (drawn, read):
        engine = make(model, 3, expert_parallel=EP)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, expected[name]), name
        train(engine, steps=1)
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize(("kind", "ep"), [("Mixtral", 2), ("DeepSeek", 1), ("Switch", 2)])
def test_explain_counts_an_even_load_of_experts(kind: str, ep: int) -> None:
    """Their layers read which experts tokens chose; the FLOP are those of any routes."""
    x = batch(0, 0)
    with FlopCounterMode(display=False) as counter:
        build(kind)(x).backward()
    engine = make(build(kind), 1, train_micro_batch_size_per_gpu=len(x), expert_parallel=EP | {"autoep_size": ep})
    profile = dry_run(engine.module, engine.states.plan, (x,), {}, micro_batch_size=len(x))
    assert profile.forward.flops + profile.backward.flops == counter.get_total_flops()
    assert "peak" in engine.explain(x)
    engine.destroy()


@distributed(world_size=1)
def test_explain_of_switch_transformers() -> None:
    """Of two batch sizes the larger has as many times the work of the experts."""
    import transformers

    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    config = transformers.SwitchTransformersConfig(**sizes, num_experts=4, expert_capacity=64, decoder_start_token_id=0)
    engine = make(transformers.SwitchTransformersForConditionalGeneration(config), 1, train_micro_batch_size_per_gpu=2)
    ids = torch.randint(50, (2, 8))
    arguments = {"input_ids": ids, "labels": ids}
    flops = [dry_run(engine.module, engine.states.plan, (), arguments, micro_batch_size=size).forward.flops for size in (2, 4)]
    assert flops[1] == 2 * flops[0]
    engine.destroy()


REASONS: dict[str, Callable[[nn.ModuleList], Any]] = {
    "share modules or parameters": lambda experts: setattr(experts[1], "w1", experts[0].w1),
    "do not have parameters of the same names and shapes": lambda experts: setattr(experts[1], "w1", nn.Linear(16, 24)),
    "have buffers that a checkpoint has": lambda experts: experts[0].register_buffer("seen", torch.zeros(2)),
}


@distributed(world_size=2)
@pytest.mark.parametrize("reason", REASONS)
def test_a_list_that_cannot_be_split_is_named_with_the_reason(reason: str) -> None:
    model = build("Mixtral")
    REASONS[reason](model.blocks[0].mlp.experts)
    engine = make(model, 1, expert_parallel=EP)  # the other layer's are split
    assert all(param.numel() for param in engine.module.blocks[0].parameters())
    assert not all(param.numel() for param in engine.module.blocks[1].parameters())
    engine.destroy()
    model = build("Mixtral")
    REASONS[reason](model.blocks[0].mlp.experts)
    with pytest.raises(ValueError, match=rf"the experts of 'blocks.0.mlp' \(Mixtral\) {reason}, and cannot be split"):
        make(model, 1, expert_parallel=EP | {"moe_layer_pattern": "mlp"})


def test_a_list_that_the_model_itself_calls_stays_whole() -> None:
    model: Any = nn.Module()
    model.experts = nn.ModuleList(Mlp() for _ in range(2))
    assert why_whole(model, "experts") == "are called by the model itself, not by a layer of it"


class Stage(nn.Module):
    """A block whose auxiliary loss stays in its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mixtral()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)[0]


@distributed(world_size=4)
def test_experts_of_a_list_in_pipeline_stages() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), Stage(), Stage(), nn.Linear(16, 4)]

    twin, index = nn.Sequential(*layers()), dist.get_rank() % 2
    losses = [twin(batch(rank, 0, micro)).square().mean() for rank in range(2) for micro in range(2)]
    torch.stack(losses).mean().backward()
    norm = float(nn.utils.clip_grad_norm_(twin.parameters(), 1e9))
    module = slipstream.PipelineModule(layers(), num_stages=2, loss_fn=lambda out, _: out.square().mean())
    engine = make(module, 1, gradient_accumulation_steps=2, expert_parallel=EP)
    assert engine.mesh.batch.index == index
    engine.train_batch(iter([(batch(index, 0, micro), batch(index, 0, micro)) for micro in range(2)]))
    assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5)
    engine.destroy()
