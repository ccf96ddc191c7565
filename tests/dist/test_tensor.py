"""Tensor parallelism: unmodified models of transformers and own layers, cut over tp ranks, against one process."""

import logging
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.optim import attention_heads, muon_groups
from slipstream.parallel.exchange import connect_activations
from slipstream.parallel.tensor import even_share
from slipstream.train.handover import bare
from slipstream.world.mesh import build_mesh
from slipstream.world.watch import Watch
from tests import cases, toy
from tests.dist.test_axes import Enter, Leave
from tests.pool import distributed

transformers = pytest.importorskip("transformers")
STEPS, VOCAB = cases.STEPS, 66
SMALL = {"num_hidden_layers": 2, "vocab_size": VOCAB, "num_attention_heads": 4, "hidden_size": 32}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2},
    "mistral": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gemma": SMALL | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8},
    "gpt2": {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": VOCAB,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt_neox": SMALL | {"intermediate_size": 48},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": VOCAB},
    "phi3": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
    "mixtral": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
}


def build(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[kind](**DECODERS[kind] | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if kind == "bloom" else "sdpa"
    )
    with torch.no_grad():  # biases of zero would hide mistakes
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.02)
    return model


# With torch's eps of 1e-8, a step has the sign of rounding where a gradient is 0 but for it.
ADAMW = {"lr": 1e-2, "eps": 1e-5}


def batch(step: int, rank: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": ids, "labels": ids}


def settings(stage: int, **blocks: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **blocks,
    }


def trained(model: nn.Module, config: dict[str, Any], replicas: int = 1, replica: int = 0) -> tuple[list[float], list[float], Any]:
    engine = slipstream.initialize(model=model, config=config)[0]
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**batch(step, replica), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.global_grad_norm))
    return losses, norms, engine


def reference(model: nn.Module, replicas: int = 1, optimizer: Any = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """One process over the batches of all replicas, plain torch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [model(**batch(step, replica), use_cache=False).loss for replica in range(replicas)]
        torch.stack(each).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(each[0].detach()))
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def compare(kind: str, stage: int, tp: int, transport: str = "auto", model: Any = build, **changes: Any) -> None:
    blocks = {"tensor_parallel": {"autotp_size": tp}, "slipstream": {"transport": transport}}
    blocks |= changes.pop("blocks", {})
    replicas = dist.get_world_size() // tp
    losses, norms, engine = trained(model(kind, **changes), settings(stage, **blocks), replicas, dist.get_rank() // tp)
    expected, expected_norms, weights = reference(model(kind, **changes), replicas)
    if dist.get_rank() < tp:
        assert losses == pytest.approx(expected, abs=2e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    state = engine.state_dict()
    assert state.keys() == weights.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, weights[name], atol=3e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize(("kind", "stage"), [(kind, i % 4) for i, kind in enumerate(DECODERS)])
def test_an_unmodified_model(kind: str, stage: int) -> None:
    compare(kind, stage, tp=2)


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SMALL | {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCAB,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 4,
    }
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5},
}


def build_encoder(kind: str) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[kind](**ENCODERS[kind])
    kinds = {
        "bert": transformers.BertForMaskedLM,
        "t5": transformers.T5ForConditionalGeneration,
        "vit": transformers.ViTForImageClassification,
    }
    return Adapted(kinds[kind](config), kind)


class Adapted(nn.Module):
    """A model that is called with token ids and labels."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.config = model, kind, model.config

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        if self.kind == "vit":
            generator = torch.Generator().manual_seed(int(input_ids.sum()))
            return self.inner(pixel_values=torch.randn(2, 3, 16, 16, generator=generator), labels=labels[:, 0] % 5)
        return self.inner(input_ids=input_ids, labels=labels)


@distributed(world_size=2)
@pytest.mark.parametrize(("kind", "stage"), [(kind, 1 + i % 3) for i, kind in enumerate(ENCODERS)])
def test_an_encoder(kind: str, stage: int) -> None:
    compare(kind, stage, tp=2, model=build_encoder)


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("kind", "stage", "tp", "changes"),
    [
        ("llama", 3, 2, {}),
        ("gpt2", 1, 2, {}),
        # two ranks have each key head
        pytest.param("llama", 2, 4, {"num_attention_heads": 8, "num_key_value_heads": 2}, marks=pytest.mark.slow),
        ("llama", 1, 4, {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}),  # uneven shares
    ],
)
def test_four_ranks(kind: str, stage: int, tp: int, changes: dict[str, Any]) -> None:
    compare(kind, stage, tp, transport="gloo" if stage == 1 else "auto", **changes)


@distributed(world_size=(2, 4) if cases.EVERYTHING else 2)
@pytest.mark.parametrize(
    ("optimizer", "stage", "uneven"),
    [
        *(("Lamb", 1, True), ("Lamb", 3, False), ("Muon", 2, True), ("Muon", 0, False), ("Adafactor", 1, True)),
        ("Muon per head", 1, True),
    ],
)
def test_optimizers_of_whole_parameters(world_size: int, optimizer: str, stage: int, uneven: bool) -> None:
    """LAMB's norms, Muon's matrices and Adafactor's sums are those of whole parameters, which tp ranks have parts of."""
    optimizer, _, per_head = optimizer.partition(" ")
    rate = {"Lamb": 1e-2, "Muon": 1e-3, "Adafactor": 1e-2}[optimizer]
    changes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24} if uneven else {}
    model, plain, replicas = build("llama", **changes), build("llama", **changes), world_size // 2
    options = {"lr": rate, **({"per_head_muon": True} if per_head else {})}
    config = settings(stage, tensor_parallel={"autotp_size": 2}, optimizer={"type": optimizer, "params": options})
    kinds: dict[str, Any] = {"Lamb": slipstream.optim.Lamb, "Muon": slipstream.optim.Muon, "Adafactor": torch.optim.Adafactor}
    heads = attention_heads(plain) if per_head else None
    params = muon_groups(plain.named_parameters(), heads=heads) if optimizer == "Muon" else plain.parameters()
    losses, norms, engine = trained(model, config, replicas, dist.get_rank() // 2)
    expected, expected_norms, weights = reference(plain, replicas, kinds[optimizer](params, lr=rate))
    if dist.get_rank() < 2:
        assert losses == pytest.approx(expected, abs=2e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=3e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@pytest.mark.slow
@distributed(world_size=4)
@pytest.mark.parametrize("stages", [(0, 1, 2, 3)])
def test_slices_exchange_signs(stages: tuple[int, ...]) -> None:
    """tp 2 x dp 2: norms are those of whole gradients, stages have equal bits, and signs move weights as far as without slices."""
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "freeze_step": 4}}
    moved, sums = [], set[int]()
    for tp, stage in ((1, 1), *((2, stage) for stage in stages)):
        config = settings(stage, tensor_parallel={"autotp_size": tp}, optimizer=optimizer, gradient_clipping=0.0)
        engine, norms = slipstream.initialize(model=build("llama"), config=config)[0], []
        for step in range(9):
            if step == 4:
                before = {name: value.clone() for name, value in engine.state_dict().items()}
                expected = signs_norm(before, step)
            engine.backward(engine(**batch(step, dist.get_rank() // 2), use_cache=False).loss)  # pairs of ranks have one batch
            engine.step()
            norms.append(float(engine.global_grad_norm))
        assert norms[4] == pytest.approx(expected, rel=1e-4)
        after = engine.state_dict()
        moved.append({name: float((value - before[name]).norm()) for name, value in after.items()})
        sums |= {int(toy.checksum(engine))} if tp > 1 else set()
        engine.destroy()
    assert len(sums) == 1
    whole, sliced = moved[:2]
    ratios = [sliced[name] / whole[name] for name in whole if whole[name]]
    assert min(ratios) > 0.8 and max(ratios) < 1.25, dict(zip(whole, ratios, strict=False))


def signs_norm(weights: dict[str, Tensor], step: int) -> float:
    """The root of the mean over two replicas of their squared norms; embeddings, which are not compressed, are averaged before."""
    model = build("llama")
    model.load_state_dict(weights)
    names = [name for name, _ in model.named_parameters()]
    each = [torch.autograd.grad(model(**batch(step, i), use_cache=False).loss, list(model.parameters())) for i in range(2)]
    return (
        sum(
            float(torch.stack(pair).mean(0).square().sum() if "embed" in name else torch.stack(pair).square().sum() / 2)
            for name, *pair in zip(names, *each, strict=True)
        )
        ** 0.5
    )


@distributed(world_size=2)
def test_an_optimizer_that_cannot_have_wholes_is_refused() -> None:
    lamb = {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 2}}
    with pytest.raises(ValueError, match="OneBitLamb keeps one trust ratio for each parameter, and some parameters are parts"):
        slipstream.initialize(model=build("llama"), config=settings(1, tensor_parallel={"autotp_size": 2}, optimizer=lamb))


@distributed(world_size=2)
def test_a_loss_over_shares_of_the_vocabulary() -> None:
    compare("llama", 1, 2, blocks={"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}})
    compare("gpt2", 3, 2, blocks={"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}})


@distributed(world_size=2)
@pytest.mark.parametrize(("kind", "stage"), [("llama", 1), ("qwen3", 3), ("gpt2", 2), ("opt", 1)])
def test_shares_of_the_tokens(kind: str, stage: int) -> None:
    blocks = {"slipstream": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}}
    compare(kind, stage, 2, blocks={"tensor_parallel": {}} | blocks)


class Own(nn.Module):
    """Our own layers, which are ordinary ones in one process."""

    def __init__(self) -> None:
        super().__init__()
        layers = slipstream.parallel
        self.embed = layers.VocabParallelEmbedding(VOCAB, 16)
        self.up = layers.ColumnParallelLinear(16, 36)
        self.down = layers.RowParallelLinear(36, 16)
        self.side = layers.RowParallelLinear(16, 16, bias=False, input_is_parallel=False)
        self.head = layers.ColumnParallelLinear(16, VOCAB, gather_output=True)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        x = self.embed(input_ids)
        x = x + self.down(torch.relu(self.up(x))) + self.side(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def build_own(kind: str, meta: bool = False) -> nn.Module:
    torch.manual_seed(5)
    if not meta:
        return Own()
    with slipstream.zero.Init():
        return Own()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_own_layers(stage: int) -> None:
    compare("", stage, 2, model=build_own)


@distributed(world_size=4)
@pytest.mark.parametrize("model", [build, build_own])
def test_stages_of_slices_have_equal_bits(model: Any) -> None:
    """tp 2 x dp 2, clipped, in bf16: weights, losses and norms of stages 0 to 3, also with the tokens shared between layers."""
    for shares in (False, True) if model is build else (False,):
        results = []
        for stage in cases.STAGES:
            own = {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": shares}}
            config = settings(stage, bf16={"enabled": True}, slipstream=own)
            losses, norms, engine = trained(model("llama"), config, 2, dist.get_rank() // 2)
            results.append((losses, norms, int(toy.checksum(engine))))
            engine.destroy()
        assert all(each == results[0] for each in results), shares


@distributed(world_size=4)
def test_slices_are_sharded_within_groups() -> None:
    """tp 2 x dp 2 with mics_shard_size 1 and 2: a group of two ranks has all slices, and nothing is gathered beyond it."""
    losses, norms, weights = reference(build("qwen2"), 2)
    for size in (1, 2):
        blocks = {"zero_optimization": {"stage": 3, "mics_shard_size": size}, "slipstream": {"mesh": {"tp": 2}}}
        trained_on = trained(build("qwen2"), settings(3, **blocks), 2, dist.get_rank() // 2)
        engine = trained_on[2]
        assert {bool(key): each.shards.size for key, each in engine.mesh.families.items()} == {False: size, True: 1}
        if dist.get_rank() < 2:
            assert trained_on[:2] == (pytest.approx(losses, abs=2e-5), pytest.approx(norms, rel=1e-4))
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
        engine.destroy()


@distributed(world_size=2)
def test_a_whole_state_dict_loads_into_slices() -> None:
    """Of a tied embedding, by both names."""
    for stage in (0, 3):
        engine = slipstream.initialize(model=build("qwen2"), config=settings(stage, slipstream={"mesh": {"tp": 2}}))[0]
        wanted = {name: value + 1 for name, value in engine.state_dict().items()}
        assert engine.load_state_dict(wanted).missing_keys == []
        for name, value in engine.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        engine.destroy()


@distributed(world_size=2)
def test_values_that_are_cut_as_they_arise(tmp_path: Path) -> None:
    """zero.Init's recorded values, a module's own on meta, and files: each rank gets its part of the whole's values."""

    def values(model: nn.Module, tp: int) -> dict[str, Tensor]:
        torch.manual_seed(5)
        engine = slipstream.initialize(model=model, config=settings(3, slipstream={"mesh": {"tp": tp}}))[0]
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.destroy()
        return state

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Own()

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        for name, value in one.items():
            assert torch.equal(other[name], value), name

    whole = build_own("").state_dict()
    same(values(build_own("", meta=True), 2), whole)
    same(values(on_meta(), 2), values(on_meta(), 1))
    files = tmp_path / "model.safetensors"
    if dist.get_rank() == 0:
        safetensors.torch.save_file(whole, files)
    dist.barrier()
    model = on_meta()
    slipstream.zero.load(model, files)
    same(values(model, 2), whole)


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("stage", "schedule", "tokens"),
    [
        (1, "1f1b", False),
        (3, "1f1b", True),
        (2, "zero_bubble", True),
        pytest.param(3, "zero_bubble", False, marks=pytest.mark.slow),
    ],
)
def test_stages_of_slices(stage: int, schedule: str, tokens: bool) -> None:
    """pp 2 x tp 2 against one process, and tied embeddings, which are shares of the vocabulary on both stages."""
    mesh = {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": schedule}, "tensor": {"sequence_parallel": tokens}}
    mesh |= {"transport": "gloo" if schedule == "zero_bubble" else "auto"}  # over gloo, stages send shares
    config = settings(stage, slipstream=mesh, gradient_accumulation_steps=2)
    engine = slipstream.initialize(model=build("qwen2"), config=config)[0]
    model = build("qwen2")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    for step in range(STEPS):
        micros = [batch(step, i) for i in range(2)]
        loss = engine.train_batch(iter(micros))
        optimizer.zero_grad()
        expected = torch.stack([model(**each, use_cache=False).loss for each in micros]).mean()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert float(loss) == pytest.approx(float(expected.detach()), abs=2e-5)
        assert float(engine.global_grad_norm) == pytest.approx(float(norm), rel=1e-4)
    engine.destroy()


@distributed(world_size=2)
def test_checkpoints_of_slices(tmp_path: Path) -> None:
    """Saved at tp 2, loaded by two data-parallel ranks, and back: the same weights, masters and moments."""
    blocks = {"bf16": {"enabled": True}}
    first = trained(build("gpt2"), settings(1, slipstream={"mesh": {"tp": 2}}, **blocks))[2]
    first.save_checkpoint(tmp_path, tag="sliced")
    whole = slipstream.initialize(model=build("gpt2"), config=settings(3, **blocks))[0]
    whole.load_checkpoint(tmp_path, tag="sliced")
    whole.save_checkpoint(tmp_path, tag="whole")
    again = slipstream.initialize(model=build("gpt2"), config=settings(2, slipstream={"mesh": {"tp": 2}}, **blocks))[0]
    again.load_checkpoint(tmp_path, tag="whole")
    states = [engine.state_dict() for engine in (first, whole, again)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) and torch.equal(value, states[2][name]), name
    losses = []
    for engine in (first, again):
        loss = engine(**batch(9), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append((float(loss.detach()), float(engine.global_grad_norm)))
    assert losses[0] == losses[1]
    for engine in (first, whole, again):
        engine.destroy()


@distributed(world_size=2)
def test_a_quantized_base_is_refused() -> None:
    """By the layer's name, before any is cut: our codes, and another library's."""
    ours, theirs = build("llama").requires_grad_(False), build("llama")
    slipstream.quantize(ours, bits=4, block=16)
    theirs.model.layers[0].self_attn.q_proj.weight.quant_state = object()
    for model, name in ((ours, r"model\.layers\.0\.\w+\.\w+_proj"), (theirs, r"model\.layers\.0\.self_attn\.q_proj")):
        before = [param.shape for param in model.parameters()]
        with pytest.raises(ValueError, match=rf"parameter '{name}\.weight' is quantized; a quantized weight cannot be cut over tp"):
            slipstream.initialize(model=model, config=settings(1, tensor_parallel={"autotp_size": 2}))
        assert [param.shape for param in model.parameters()] == before


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_cross_entropy_over_shares_of_the_vocabulary(transport: str) -> None:
    """Values and gradients of torch's, with a vocabulary that the ranks do not divide, and tokens that do not count."""
    torch.manual_seed(0)
    axis = build_mesh(tp=2).tp
    exchange = connect_activations(axis, torch.device("cpu"), transport, Watch(20.0))
    for dtype, vocabulary, ignore_index in ((torch.float32, 11, -100), (torch.float32, 8, 3), (torch.bfloat16, 7, -100)):
        logits = (5 * torch.randn(3, 4, vocabulary)).to(dtype).requires_grad_()
        targets = torch.randint(0, vocabulary, (3, 4))
        targets[0], targets[1, 2] = ignore_index, ignore_index  # all of a sequence, and one token
        slope = torch.randn(3, 4)
        start, stop = even_share(vocabulary, axis)
        own = logits.detach()[..., start:stop].clone().requires_grad_()
        losses = slipstream.parallel.vocab_parallel_cross_entropy(own, targets, exchange, ignore_index=ignore_index)
        wanted = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none"
        ).view(3, 4)
        assert losses.dtype is torch.float32 and losses[0].eq(0).all()
        torch.testing.assert_close(losses, wanted)
        (losses * slope).sum().backward()
        (wanted * slope).sum().backward()
        assert own.grad.dtype is dtype and own.grad[0].eq(0).all()
        torch.testing.assert_close(own.grad, logits.grad[..., start:stop])
    large = torch.full((2, vocabulary), 300.0 if dist.get_rank() else -300.0)[:, start:stop]  # no exponential overflows
    losses = slipstream.parallel.vocab_parallel_cross_entropy(large, torch.tensor([0, vocabulary - 1]), exchange)
    torch.testing.assert_close(losses, torch.tensor([600.0, 0.0]) + torch.tensor(float(vocabulary // 2)).log())
    exchange.close()


@distributed(world_size=2)
def test_adapters_on_slices() -> None:
    """LoRA over column and row layers, fused ones, and a frozen base."""
    peft = pytest.importorskip("peft")

    def adapted(kind: str) -> nn.Module:
        targets = {"llama": ["q_proj", "o_proj", "down_proj", "up_proj"], "gpt2": ["c_attn", "c_proj"]}[kind]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft calls what transformers renamed
            model: nn.Module = peft.get_peft_model(
                build(kind), peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2")
            )
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(generator=torch.Generator().manual_seed(len(name)))
        return model

    compare("llama", 1, 2, model=adapted)
    compare("gpt2", 3, 2, model=adapted)
    for kind, stage in (("llama", 1), ("gpt2", 3)):
        whole: Any = adapted(kind)
        whole.merge_adapter()
        expected = {bare(name): value.clone() for name, value in whole.named_parameters() if "lora_" not in name}
        engine = slipstream.initialize(model=adapted(kind), config=settings(stage, tensor_parallel={"autotp_size": 2}))[0]
        handed = {name: value.clone() for name, value in engine.named_weights()}
        assert handed.keys() == expected.keys()
        for name, value in handed.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("tokens", [False, True])
def test_the_bytes_of_a_block_are_those_of_the_formula(tokens: bool) -> None:
    """Two sums of b S h elements in the forward and two in the backward; with shares of the tokens, as many bytes in other ways."""
    moved = []
    for depth in (2, 5):
        blocks: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}, "slipstream": {"tensor": {"sequence_parallel": tokens}}}
        engine = slipstream.initialize(model=build("llama", num_hidden_layers=depth), config=settings(1, **blocks))[0]
        engine(**batch(0), use_cache=False)  # compares the inputs
        exchange = engine.exchange("tp")
        exchange.moved.clear()
        engine.backward(engine(**batch(0), use_cache=False).loss)
        moved.append(exchange.moved.copy())
        engine.step()
        engine.destroy()
    per_block = sum((moved[1] - moved[0]).values()) / 3
    hidden = 2 * 10 * DECODERS["llama"]["hidden_size"] * 4
    assert per_block == 4 * 2 * hidden / 2


@distributed(world_size=2)
def test_ranks_of_a_replica_with_other_batches_are_refused() -> None:
    engine = slipstream.initialize(model=build("llama"), config=settings(1, tensor_parallel={"autotp_size": 2}))[0]
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 have slices of the same layers \(tp\), and the inputs of its first forward"
    ):
        engine(**batch(0, dist.get_rank()))
    engine.destroy()
    model = build("gpt2", resid_pdrop=0.2)
    engine = slipstream.initialize(model=model, config=settings(1, tensor_parallel={"autotp_size": 2}))[0]
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="state of its random generator differ"):
        engine(**batch(0, 0))
    engine.backward(engine(**batch(0, 0)).loss)
    engine.step()
    engine.destroy()


@distributed(world_size=2)
def test_dropout_in_slices() -> None:
    """Outside of regions, ranks drop alike, so losses agree; inside, they do not; recomputation drops the same again."""
    blocks = {"tensor_parallel": {"autotp_size": 2}}

    def losses(recompute: bool, **rates: float) -> list[float]:
        model = build("gpt2", **rates)
        torch.manual_seed(7)
        extra = {"slipstream": {"activations": "recompute"}} if recompute else {}
        values, norms, engine = trained(model, settings(1, **blocks, **extra))
        engine.destroy()
        every: list[Any] = [None, None]
        dist.all_gather_object(every, values)
        assert every[0] == every[1]
        return values + norms

    rates = {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
    assert losses(False, **rates) == losses(True, **rates)
    seen: list[Tensor] = []
    drop = nn.functional.dropout

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((out := drop(x, *args, **kwargs)) != 0)
        return out

    class Dropping(Own):
        def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
            x = spy(self.embed(input_ids), 0.5)
            hidden = spy(torch.ones_like(self.up(x)), 0.5)
            x = x + self.down(hidden)
            return transformers.modeling_outputs.CausalLMOutput(loss=spy(self.head(x), 0.5).square().mean())

    torch.manual_seed(5)
    model = Dropping()
    model.dropout = 0.5  # type: ignore[assignment]
    trained(model, settings(0, slipstream={"mesh": {"tp": 2}}))[2].destroy()
    masks: list[Any] = [None, None]
    dist.all_gather_object(masks, seen)
    alike = [torch.equal(one, other) for one, other in zip(*masks, strict=True)]
    assert alike == [True, False, True] * STEPS


def build_derived(kind: str) -> nn.Module:
    """A model of a type of its own, whose configuration derives from that of a known one."""
    model: Any = build(kind)

    class Derived(type(model.config)):  # type: ignore[misc]
        model_type = "derived"

    model.config.__class__ = Derived
    return model  # type: ignore[no-any-return]


@distributed(world_size=2)
def test_a_partition_config() -> None:
    def specs(*entries: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": list(entries), **options}}}

    column = {"patterns": [r".*\.(gate|up)_proj\.weight$"], "partition_type": "column"}
    row = {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"}
    compare("llama", 1, 2, blocks=specs(column, row, use_default_specs=False))
    ends = {"patterns": [r".*(lm_head|embed_tokens)\.weight$", r".*(norm|mlp|rotary_emb)\.weight$"], "partition_type": "row"}
    compare("llama", 1, 2, blocks=specs(column, row, ends, use_default_specs=False))
    compare("llama", 1, 2, blocks=specs({"patterns": [".*"], "partition_type": "skip"}, use_default_specs=False))
    fused = {"patterns": [".*c_attn.weight$"], "partition_type": "column", "shape": [[32, 32, 32], -1], "model_types": ["gpt2"]}
    gathered = {"patterns": [".*c_fc.weight$"], "partition_type": "column", "gather_output": True}
    kept = {"patterns": [".*mlp.c_proj.weight$"], "partition_type": "skip"}
    compare("gpt2", 2, 2, blocks=specs(fused, gathered, kept))
    compare("llama", 0, 2, blocks={"tensor_parallel": {"tp": {"tp_size": 2}, "preset_model": "llama"}})
    compare("mistral", 0, 2, blocks={"tensor_parallel": {"autotp_size": 2, "preset_model": "mistral"}})  # transformers' plan
    compare("gpt2", 0, 2, model=build_derived)
    compare("gpt2", 0, 2, model=build_derived, blocks=specs({**fused, "shape": ((32, 32, 32), -1)}))  # a dictionary may have tuples


@distributed(world_size=2)
def test_an_entry_that_fits_no_layer_is_named() -> None:
    """It would leave layers whole without a word, and a typing error would end in an error of shapes in the forward."""
    entries = [{"patterns": patterns, "partition_type": "row"} for patterns in ([".*down_proj"], ["down_proj.weight", "dwon.*"])]
    entries.append({"patterns": ["absent"], "model_types": ["gpt2"]})
    block = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": entries, "use_default_specs": True}}}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    slipstream.initialize(model=build("llama"), config=settings(1, **block))[0].destroy()
    logging.getLogger("slipstream").removeHandler(handler)
    named = [text for text in said if "partition_config" in text]
    assert len(named) == (dist.get_rank() == 0), "once, on the first rank"
    assert all("'down_proj.weight', 'dwon.*'" in text and "embed_tokens.weight" in text for text in named)


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"partition_config": {"layer_specs": [{"patterns": ["nothing"]}], "use_default_specs": False}}, "no pattern", {}),
    ({"partition_config": {"layer_specs": [{"patterns": ["("]}]}}, "not a regular expression", {}),
    ({"partition_config": {"layer_specs": [{"patterns": [".*q_proj"], "shape": [-1, -1]}]}}, "has no parts", {}),
    ({"partition_config": {"layer_specs": [{"patterns": [".*q_proj"], "partition_dim": 1}]}}, "partition_dim 1", {}),
    (
        {"partition_config": {"layer_specs": [{"patterns": [".*up_proj"]}], "use_default_specs": False, "strict_mode": True}},
        "strict_mode.*q_proj",
        {},
    ),
    ({"partition_config": {"layer_spec": []}}, "unknown keys layer_spec", {}),
    ({"partition_config": {"layer_specs": [{"pattern": [".*q_proj"]}]}}, r"layer_specs\[0\] has unknown keys pattern", {}),
    ({"partition_config": {"layer_specs": [{"patterns": [".*q_proj"], "partition_type": "col"}]}}, "'col' is none of", {}),
    ({"preset_model": "glm"}, "'glm' is none of", {}),
    ({}, "3 query and 1 key heads .* use 1", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}),
]


@distributed(world_size=2)
def test_partition_configs_that_are_refused() -> None:
    for block, text, changes in REFUSED:
        model = build("llama", **changes)
        shapes = [param.shape for param in model.parameters()]
        with pytest.raises(ValueError, match=text):
            slipstream.initialize(model=model, config=settings(1, tensor_parallel={"autotp_size": 2} | block))
        assert [param.shape for param in model.parameters()] == shapes, text
    for name in ("Bert", "EuroBert"):  # the second computes it by `self.loss_function`
        config = getattr(transformers, f"{name}Config")(**ENCODERS["bert"] | {"pad_token_id": 1})
        encoder = getattr(transformers, f"{name}ForMaskedLM")(config)
        spec = {"patterns": [r".*decoder\.weight|lm_head\.weight"], "partition_type": "column"}
        for option in ({"vocab_parallel_lm_head": True}, {"partition_config": {"layer_specs": [spec], "use_default_specs": True}}):
            block = {"autotp_size": 2} | option
            with pytest.raises(ValueError, match=f"{name}ForMaskedLM computes a loss of its own from whole logits"):
                slipstream.initialize(model=encoder, config=settings(1, tensor_parallel=block))
    packed = build("llama")
    projection = packed.model.layers[1].self_attn.q_proj = nn.Identity()  # as GPTQ's layers: no `weight`
    projection.register_buffer("qweight", torch.zeros(4, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj' \(Identity\) has no 2D weight to cut, but qweight"):
        slipstream.initialize(model=packed, config=settings(1, tensor_parallel={"autotp_size": 2}))
    with pytest.raises(ValueError, match="Linear has no plan"):
        slipstream.initialize(model=nn.Linear(4, 4), config=settings(1, tensor_parallel={"autotp_size": 2}))


class Megatron:
    """An mpu of 2 x 2 ranks whose tensor-parallel ranks are two apart."""

    def __init__(self, prefix: str) -> None:
        self.tensor, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        self.data, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        self.stages = 1
        getters = {"group": self.tensor, "rank": dist.get_rank() // 2, "world_size": 2}
        for what, value in getters.items():
            setattr(self, f"get_{prefix}_{what}", lambda value=value: value)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.stages


class MegatronMlp(nn.Module):
    """The user's own slices, by torch's collectives and Megatron's attributes."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.group = group
        if group is not None:
            rows = slice(12 * dist.get_rank(group), 12 * dist.get_rank(group) + 12)
            for name, param, cut, dim in (
                ("weight", self.up, (rows,), 0),
                ("bias", self.up, (rows,), 0),
                ("weight", self.down, (..., rows), 1),
            ):
                part = nn.Parameter(getattr(param, name).detach()[cut].clone())
                part.tensor_model_parallel, part.partition_dim = True, dim  # type: ignore[attr-defined]
                setattr(param, name, part)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.down(torch.relu(self.up(h if self.group is None else Enter.apply(h, self.group))))
        return (x + (h if self.group is None else Leave.apply(h, self.group))).square().mean()


@distributed(world_size=2)
def test_an_unmodified_model_with_an_mpu() -> None:
    """DeepSpeed's examples pass their groups beside autotp_size; the batch then counts replicas."""
    whole = build("llama").model.layers[0].mlp.up_proj.weight.shape
    answers = {"model_parallel_world_size": 2, "model_parallel_rank": dist.get_rank(), "data_parallel_rank": 0}
    mpu = types.SimpleNamespace(**{f"get_{what}": lambda value=value: value for what, value in answers.items()})
    for block in ({"autotp_size": 2}, {"tp": {"tp_size": 2}}):
        config = settings(1, tensor_parallel=block, train_batch_size=2, train_micro_batch_size_per_gpu=2)
        engine = slipstream.initialize(model=build("llama"), config=config, mpu=mpu)[0]
        assert engine.module.model.layers[0].mlp.up_proj.weight.shape == (whole[0] // 2, whole[1])
        assert engine.plan.batch.accumulation == 1
        engine.destroy()


def continued(engine: Any, folder: Path) -> int | None:
    """The rank that saved whose random state this rank continues."""
    torch.manual_seed(99)
    engine.load_checkpoint(folder)
    return next(
        (rank for rank in range(4) if torch.equal(torch.Generator().manual_seed(rank).get_state(), torch.get_rng_state())), None
    )


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize(
    ("stage", "prefix"),
    [(0, "model_parallel"), (3, "tensor_model_parallel"), pytest.param(1, "tensor_model_parallel", marks=pytest.mark.slow)],
)
def test_slices_of_your_own(stage: int, prefix: str, transport: str, tmp_path: Path) -> None:
    """With tp outermost: ranks 0 and 2 have slices of one replica."""
    mpu = Megatron(prefix)
    config = settings(stage, slipstream={"transport": transport})
    engine = slipstream.initialize(model=MegatronMlp(mpu.tensor), config=config, mpu=mpu)[0]
    assert (engine.mesh.tp.index, engine.mesh.batch.index) == divmod(dist.get_rank(), 2)
    model = MegatronMlp()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    for step in range(STEPS):
        engine.backward(engine(toy.floats(mpu.get_data_parallel_rank(), step)))
        engine.step()
        optimizer.zero_grad()
        torch.stack([model(toy.floats(replica, step)) for replica in range(2)]).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert engine.global_grad_norm == pytest.approx(float(norm), rel=1e-5)
    torch.manual_seed(dist.get_rank())
    engine.save_checkpoint(tmp_path)
    assert continued(engine, tmp_path) == dist.get_rank()
    state = engine.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0)
    engine.destroy()
    whole = slipstream.initialize(model=MegatronMlp(), config=settings(2))[0]
    place = dist.get_rank()  # along the batch, where ranks 0 and 1 were: those of the first slices; 2 and 3 are new
    assert continued(whole, tmp_path) == (place if place < 2 else None)
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    whole.destroy()
    descending = dist.get_rank() // 2 == 0
    setattr(mpu, f"get_{prefix}_rank", lambda: int(descending))
    with pytest.raises(ValueError, match=r"rank 3: data 1 model 0\): consecutive ranks must ascend along one of the two"):
        slipstream.initialize(model=MegatronMlp(mpu.tensor), config=settings(1), mpu=mpu)
    mpu.stages = 2
    with pytest.raises(ValueError, match="mpu has 2 pipeline stages"):
        slipstream.initialize(model=MegatronMlp(mpu.tensor), config=settings(1), mpu=mpu)


@distributed(world_size=2)
def test_deepspeeds_tp_model_init() -> None:
    from slipstream.compat.zero import GatherReplacedLayerParams, set_autotp_mode
    from slipstream.parallel.slicing import tp_model_init

    set_autotp_mode(training=True)
    for stage in (1, 3):
        model = tp_model_init(build("llama"), tp_size=2, dtype=torch.float32)
        engine = slipstream.initialize(model=model, config=settings(stage))[0]
        assert engine.mesh.tp.size == 2 and model.model.layers[0].mlp.up_proj.weight.shape == (24, 32)
        state = engine.state_dict()
        for name, param in model.named_parameters():  # as OpenRLHF sends weights to vLLM
            with GatherReplacedLayerParams([param], model, enabled=True):
                assert torch.equal(param.data, state[name])
            with slipstream.zero.gathered(param):
                part = param.data.clone()
                with GatherReplacedLayerParams([param], model, enabled=True):
                    assert torch.equal(param.data, state[name])
                assert torch.equal(param.data, part)
        assert model.model.layers[0].mlp.up_proj.weight.shape == (24, 32)
        engine.destroy()
    with pytest.raises(ValueError, match=r"slipstream.mesh.tp \(1\) and the model or an argument \(2\)"):
        slipstream.initialize(model=tp_model_init(build("llama"), 2), config=settings(1, slipstream={"mesh": {"tp": 1}}))
    tp_model_init(build("llama"), 2, config=settings(1, tensor_parallel={"autotp_size": 2}), tp_group=dist.group.WORLD)
    for name, arguments in (
        ("config", {"config": settings(1, tensor_parallel={"autotp_size": 4})}),
        ("tp_group", {"tp_group": dist.new_group([0, 1])}),
    ):
        size = 2 if name == "config" else 4
        with pytest.raises(ValueError, match=f"tp_size={size}.*its {name} has {6 - size} tensor-parallel ranks"):
            tp_model_init(build("llama"), size, **arguments)


@distributed(world_size=4)
def test_layers_that_are_too_few_name_the_slices_that_fit() -> None:
    """On meta, before anything is allocated."""
    for changes, message in (
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "2 query and 2 key heads .* cannot be dealt to 4 tp ranks; use 2"),
        ({"intermediate_size": 3}, r"3 features cannot be shared among 4 tp ranks; use tp 2 \(slipstream.mesh.tp\)"),
    ):
        with slipstream.zero.Init():
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"intermediate_size": 48} | changes))
        with pytest.raises(ValueError, match=message):
            slipstream.initialize(model=model, config=settings(1, tensor_parallel={"autotp_size": 4}))


@distributed(world_size=2)
def test_a_forecast_of_slices() -> None:
    """A dry run exchanges shapes."""
    engine = slipstream.initialize(model=build("llama"), config=settings(1, tensor_parallel={"autotp_size": 2}))[0]
    ids = torch.zeros(2, 8, dtype=torch.int64)
    assert "activations" in str(engine.explain(input_ids=ids, labels=ids))
    engine.destroy()
