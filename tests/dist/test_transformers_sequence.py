"""Ulysses in unmodified models of transformers, against one process on whole sequences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.parallel.transformers_sequence import SequenceShares
from tests import cases, toy
from tests.dist.test_tensor import ADAMW, DECODERS, SMALL, VOCAB, build, settings
from tests.pool import distributed

transformers = pytest.importorskip("transformers")
STEPS, LENGTH = cases.STEPS, 12


def batch(step: int, kind: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 7:11] = -100  # more of the second rank's
    items = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        items["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    if kind == "padded":
        items["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        items["attention_mask"][1, 9:] = 0
        labels[1, 9:] = -100
    return items


def reference(model: nn.Module, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        items = batch(step, kind)
        if kind == "packed":  # each sample by itself
            parts = [model(input_ids=items["input_ids"][:, part], use_cache=False).logits for part in (slice(0, 5), slice(5, None))]
            logits, labels = torch.cat(parts, 1)[:, :-1], items["labels"][:, 1:]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = model(**items, use_cache=False).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, dict(model.state_dict())


def compare(kind: str, stage: int, sp: int, data: str = "", tensor: dict[str, Any] | None = None, **changes: Any) -> None:
    expected, expected_norms, weights = reference(build(kind, **changes), data)
    config = settings(stage, sequence_parallel_size=sp, **({} if tensor is None else {"tensor_parallel": tensor}))
    engine = slipstream.initialize(model=build(kind, **changes), config=config)[0]
    for step in range(STEPS):
        loss = engine(**batch(step, data)).loss
        engine.backward(loss)
        engine.step()
        assert float(loss.detach()) == pytest.approx(expected[step], abs=3e-5)
        assert engine.global_grad_norm == pytest.approx(expected_norms[step], rel=2e-4)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=5e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "stage", "data"),
    [
        ("llama", 0, ""),
        ("llama", 1, "packed"),
        ("llama", 3, "padded"),
        ("qwen3", 2, ""),
        ("mistral", 3, "packed"),
        ("gpt2", 1, ""),
        ("gemma", 2, ""),
    ],
)
def test_an_unmodified_model(kind: str, stage: int, data: str) -> None:
    compare(kind, stage, 2, data, **({"sliding_window": 4} if kind == "mistral" and not data else {}))


@distributed(world_size=2)
def test_ranks_of_a_sequence_with_other_batches_are_refused() -> None:
    """They would train on half of each, without an error; lengths that differ later, too, would end in gloo's abort."""
    transport = {"slipstream": {"transport": "gloo"}}
    engine = slipstream.initialize(model=build("llama"), config=settings(1, sequence_parallel_size=2, **transport))[0]
    with pytest.raises(ValueError, match=r"ranks 0 and 1 have shares of the same sequences \(sp\), and the inputs of its first"):
        engine(**batch(dist.get_rank()))
    engine.backward(engine(**batch(0)).loss)
    engine.step()
    longer = {name: torch.cat([value] * (1 + dist.get_rank()), 1) for name, value in batch(1).items()}
    shares = {"input_ids": longer["input_ids"], "shift_labels": longer["labels"]}
    for items in (longer, shares):
        with pytest.raises(ValueError, match=r"ranks 0 and 1 .* \(sp\), and the numbers of tokens differ \(12 and 24\)"):
            engine(**items)
    engine.backward(engine(**batch(1)).loss)
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_shares_without_positions(kind: str) -> None:
    """Positions are those in the whole sequence, also of a model that counts them by its token ids."""
    model = build(kind) if kind == "llama" else encoder("RobertaForMaskedLM")
    items = batch(0)
    expected = model(**items).logits.detach()
    engine = slipstream.initialize(model=model, config=settings(1, sequence_parallel_size=2))[0]
    part = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    outputs = engine(input_ids=items["input_ids"][:, part], shift_labels=items["labels"][:, part])
    torch.testing.assert_close(outputs.logits.detach(), expected[:, part], atol=3e-5, rtol=1e-5)
    engine.destroy()


@distributed(world_size=4)
@pytest.mark.parametrize("heads", [pytest.param(4, marks=pytest.mark.slow), 1])
def test_stages_of_shares_have_equal_bits(heads: int) -> None:
    """sp 2 x dp 2, clipped, in bf16: losses, norms and weights of stages 0 to 3. Also as a ring."""
    results = []
    for stage in cases.STAGES:
        config = settings(stage, bf16={"enabled": True}, sequence_parallel_size=2)
        model = build("llama", num_attention_heads=heads, num_key_value_heads=min(heads, 2))
        engine, losses = slipstream.initialize(model=model, config=config)[0], []
        for step in range(STEPS):
            loss = engine(**batch(10 * step + engine.mesh.batch.index)).loss
            engine.backward(loss)
            engine.step()
            losses += [float(loss.detach()), engine.global_grad_norm]
        results.append((losses, int(toy.checksum(engine))))
        engine.destroy()
    assert all(each == results[0] for each in results)


@distributed(world_size=2)
def test_heads_that_the_ranks_do_not_divide() -> None:
    """Six query heads with three key heads, and three with as many: one rank computes more of them."""
    grouped = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    compare("llama", 1, 2, "padded", **grouped)
    compare("qwen2", 3, 2, hidden_size=24, num_attention_heads=3, num_key_value_heads=3)


@distributed(world_size=4)
def test_shares_in_slices() -> None:
    """A head whose logits are not gathered; fewer heads on each rank than ranks that share the sequence."""
    compare("llama", 1, 2, "padded", {"autotp_size": 2, "vocab_parallel_lm_head": True})
    compare("llama", 1, 2, "packed", {"autotp_size": 2}, num_attention_heads=2, num_key_value_heads=2)


@distributed(world_size=4)
def test_four_ranks_and_windows() -> None:
    compare("llama", 1, 4)  # two key heads
    compare("mistral", 3, 4, sliding_window=4)


@distributed(world_size=(2, 4))
def test_more_ranks_than_heads(world_size: int) -> None:
    """Ring attention: two spans a rank if the sequence divides so (12 tokens by 4), else one (by 8: it does not)."""
    one = {"num_attention_heads": 1, "num_key_value_heads": 1}
    two = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if world_size == 4 or cases.EVERYTHING:  # by turns
        compare("llama", 1, world_size, "", **(one if world_size == 2 else two))
        compare("qwen3", 2, world_size, "padded", **one)
    if world_size == 2 or cases.EVERYTHING:
        compare("llama", 3, world_size, "packed", **one)
        compare("mistral", 0, world_size, sliding_window=4, **one)


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("kind", "heads", "recompute"),
    [("llama", 4, False), pytest.param("llama", 4, True, marks=pytest.mark.slow), ("qwen3", 1, True)],
)
def test_stages_of_shares(kind: str, heads: int, recompute: bool) -> None:
    """pp 2 x sp 2, micro-batches packed in different ways: a recomputed attention has its own positions. Also as a ring."""

    def micro(step: int, i: int) -> dict[str, Tensor]:
        items = batch(10 * step + i)
        first = 4 + 3 * i
        return items | {"position_ids": torch.cat([torch.arange(first), torch.arange(LENGTH - first)]).expand(2, -1)}

    def loss_of(model: nn.Module, items: dict[str, Tensor]) -> Tensor:
        first = int((items["position_ids"][0].diff() != 1).nonzero()[0]) + 1
        parts = (slice(0, first), slice(first, None))
        logits = torch.cat([model(input_ids=items["input_ids"][:, part], use_cache=False).logits for part in parts], 1)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), items["labels"][:, 1:].flatten())

    changes = {"num_attention_heads": heads, "num_key_value_heads": min(heads, 2)}
    own = {"mesh": {"pp": 2, "sp": 2}, "activations": "recompute" if recompute else "keep"}
    config = settings(1, slipstream=own, gradient_accumulation_steps=3)
    engine = slipstream.initialize(model=build(kind, **changes), config=config)[0]
    model = build(kind, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    for step in range(STEPS):
        micros = [micro(step, i) for i in range(3)]
        assert float(engine.eval_batch(iter(micros))) == pytest.approx(
            float(torch.stack([loss_of(model, each).detach() for each in micros]).mean()), abs=3e-5
        )
        loss = engine.train_batch(iter(micros))
        optimizer.zero_grad()
        expected = torch.stack([loss_of(model, each) for each in micros]).mean()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert float(loss) == pytest.approx(float(expected.detach()), abs=3e-5)
        assert engine.global_grad_norm == pytest.approx(float(norm), rel=2e-4)
    engine.destroy()


@distributed(world_size=2)
def test_a_loader_of_shares() -> None:
    """Each rank's own samples, one after another, as shares of all ranks: the training of two data-parallel micro-batches."""
    expected, _, weights = reference_of_two()
    engine = slipstream.initialize(
        model=build("llama"), config=settings(1, sequence_parallel_size=2, gradient_accumulation_steps=2)
    )[0]
    rank = dist.get_rank()
    own = [batch(10 * step + rank) for step in range(STEPS)]
    shares = SequenceShares(own, rank, engine.mesh.sp.group, 2, "cpu")
    assert len(shares) == 2 * STEPS
    losses = []
    for items in shares:
        assert items["input_ids"].shape == (2, LENGTH // 2) and "labels" not in items
        outputs = engine(**items)
        loss = engine.module.loss_function(outputs.logits, labels=None, shift_labels=items["shift_labels"], vocab_size=VOCAB)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected, abs=3e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=5e-4, rtol=0)
    with pytest.raises(ValueError, match=r"ranks \[0\] have no batch left"):
        list(SequenceShares(own[: 1 + rank], rank, engine.mesh.sp.group, 2, "cpu"))
    engine.destroy()


def reference_of_two() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, weight_decay=0.0)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [model(**batch(10 * step + rank), use_cache=False).loss for rank in range(2)]
        torch.stack(each).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses += [float(loss.detach()) for loss in each]
    return losses, norms, dict(model.state_dict())


ENCODERS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 48, "pad_token_id": 1}


def encoder(architecture: str) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(architecture.partition("For")[0].lower(), **SMALL | ENCODERS)
    model: nn.Module = getattr(transformers, architecture)._from_config(config, attn_implementation="sdpa")
    return model


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("architecture", "stage"), [("BertForMaskedLM", 1), ("RobertaForMaskedLM", 3), ("BertForTokenClassification", 0)]
)
def test_a_loss_without_the_models_loss_function(architecture: str, stage: int) -> None:
    """Labels are spread unevenly; RoBERTa counts positions by its token ids. The model is whole again at the end."""

    def items(step: int) -> dict[str, Tensor]:
        found = batch(step, "padded")
        found["input_ids"] = found["input_ids"].clamp(min=2).where(found["attention_mask"].bool(), torch.tensor(1))
        if architecture == "BertForTokenClassification":
            found["labels"] = found["labels"].where(found["labels"] < 0, found["labels"] % 2)
        return found

    plain = encoder(architecture)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, weight_decay=0.0)
    engine = slipstream.initialize(model=encoder(architecture), config=settings(stage, sequence_parallel_size=2))[0]
    for step in range(STEPS):
        optimizer.zero_grad()
        expected = plain(**items(step)).loss
        expected.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        optimizer.step()
        output = engine(**items(step))
        assert next(iter(output)) == "loss"
        engine.backward(output.loss)
        engine.step()
        assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=3e-5)
        assert engine.global_grad_norm == pytest.approx(norm, rel=2e-4)
    expected, given = plain(**items(0)).loss.detach(), engine(**items(0), return_dict=False)[0].detach()
    assert float(given) == pytest.approx(float(expected), abs=3e-3)
    engine.destroy()
    assert float(engine.module(**items(0)).loss.detach()) == pytest.approx(float(expected), abs=3e-3)


@distributed(world_size=2)
def test_models_whose_outputs_are_not_by_token_are_refused() -> None:
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**DECODERS["llama"]))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification computes its outputs from one token's state"):
        slipstream.initialize(model=classifier, config=settings(1, sequence_parallel_size=2))
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCAB}
    both = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
    with pytest.raises(ValueError, match="shares of an encoder's sequence and a decoder's"):
        slipstream.initialize(model=both, config=settings(1, sequence_parallel_size=2))
    decoder = transformers.BartForCausalLM._from_config(
        transformers.BartConfig(**sizes, is_decoder=True, is_encoder_decoder=False), attn_implementation="sdpa"
    )
    engine = slipstream.initialize(model=decoder, config=settings(1, sequence_parallel_size=2))[0]
    with pytest.raises(ValueError, match="BartForCausalLM computes a loss of its own"):
        engine(**batch(0))
    engine.destroy()
    own = build("llama")
    own.loss_function = nn.functional.mse_loss
    engine = slipstream.initialize(model=own, config=settings(1, sequence_parallel_size=2))[0]
    with pytest.raises(ValueError, match=r"a loss of its own \(mse_loss\)"):
        engine(**batch(0))
    engine.destroy()


@distributed(world_size=2)
def test_parts_of_a_model_get_their_own_attention_back() -> None:
    """transformers sets the attention of a whole on its parts, too, and they may have different ones."""
    parts = {
        "text_config": transformers.LlamaConfig(**DECODERS["llama"]),
        "vision_config": transformers.CLIPVisionConfig(**SMALL | {"intermediate_size": 48}),
    }
    own = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration._from_config(transformers.LlavaConfig(**parts), attn_implementation=own)
    engine = slipstream.initialize(model=model, config=settings(1, sequence_parallel_size=2))[0]
    configs = (model.config, model.config.text_config, model.config.vision_config)
    assert [each._attn_implementation for each in configs] == 3 * ["slipstream_ulysses"]
    engine.destroy()
    assert [each._attn_implementation for each in configs] == list(own.values())


@distributed(world_size=2)
def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="computes attention by 'eager'"):
        slipstream.initialize(model=build("bloom"), config=settings(1, sequence_parallel_size=2))
    dropped = build("llama", num_attention_heads=1, num_key_value_heads=1, attention_dropout=0.5)
    engine = slipstream.initialize(model=dropped, config=settings(1, sequence_parallel_size=2))[0]
    with pytest.raises(ValueError, match=r"has attention dropout 0\.5, and more ranks share a sequence than it has heads"):
        engine(**batch(0))
    engine.destroy()
    engine = slipstream.initialize(model=build("llama"), config=settings(1, sequence_parallel_size=2))[0]
    with pytest.raises(ValueError, match=r"a sequence of 11 tokens cannot be shared by 2 ranks .*pad it to 12"):
        engine(input_ids=torch.zeros(1, 11, dtype=torch.long))
    engine.destroy()


@distributed(world_size=2)
def test_deepspeeds_recipe() -> None:
    """register_with_transformers, its mpu, the adapter, and the loss that the caller averages over ranks."""
    from slipstream.compat.sequence import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    expected, expected_norms, weights = reference_of_two()
    model = build("llama")
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, micro_batch_size=2, disable_in_eval=True)
    assert mpu is not None
    engine = slipstream.initialize(model=model, config=settings(1, gradient_accumulation_steps=2), mpu=mpu)[0]
    assert engine.mesh.sp.size == 2 and engine.mesh.batch.size == 1
    own = [batch(10 * step + dist.get_rank()) for step in range(STEPS)]
    rank, group, size = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    losses = []
    for items in UlyssesSPDataLoaderAdapter(own, rank, group, size, "cpu"):
        outputs = engine(**items)
        targets = items["shift_labels"]
        loss = engine.module.loss_function(outputs.logits, labels=None, shift_labels=targets, vocab_size=VOCAB)
        dist.all_reduce(count := (targets != -100).sum())
        weight = 2 * (targets != -100).sum() / count  # of this rank's loss in the mean that accelerate and `Trainer` take
        engine.backward(loss * weight)
        engine.step()
        losses.append(float(loss.detach()))
        if len(losses) % 2 == 0:
            assert engine.global_grad_norm == pytest.approx(expected_norms[len(losses) // 2 - 1], rel=2e-4)
    assert losses == pytest.approx(expected, abs=3e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=5e-4, rtol=0)
    whole = {name: value[:, :11] for name, value in batch(rank).items()}  # this rank's own, which two ranks could not share
    plain = build("llama").eval()
    plain.load_state_dict(engine.state_dict())
    engine.eval()
    with torch.no_grad():
        outputs, expected = engine(**whole), float(plain(**whole).loss)
        computed = engine.module.loss_function(outputs.logits, labels=whole["labels"], vocab_size=VOCAB)  # as accelerate does
        assert [float(outputs.loss), float(computed)] == pytest.approx([expected, expected], abs=3e-5)
        assert engine.train()(**items).logits.shape[1] == LENGTH // 2
    engine.destroy()
    assert not model.config._attn_implementation.startswith("slipstream")
    for mesh_param in ((1, 2), (2, 1)):
        engine = slipstream.initialize(model=build("llama"), config=settings(1), mesh_param=mesh_param)[0]
        assert (engine.mesh.batch.size, engine.mesh.sp.size) == mesh_param
        engine.destroy()
    with pytest.raises(ValueError, match=r"mesh_param \(2, 2\) must be"):
        slipstream.initialize(model=build("llama"), config=settings(1), mesh_param=(2, 2))


def turned(x: Tensor, angles: Tensor, token_dim: int) -> Tensor:
    """The first features of each token as complex numbers, turned by its angles [tokens, features / 2]."""
    half = angles.shape[1]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    shape = [x.shape[token_dim] if dim == token_dim else 1 for dim in range(3)]
    pairs = pairs * torch.exp(1j * angles.double()).view(*shape, half)
    return torch.cat([pairs.real.to(x.dtype), pairs.imag.to(x.dtype), x[..., 2 * half :]], -1)


@distributed(world_size=2)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_distributed_attention(batch_dim: int) -> None:
    """Against attention over the whole sequence: values, gradients, and how many heads this rank computes."""
    from slipstream.compat.sequence import DistributedAttention

    token_dim, order = 1 - batch_dim, (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
    back = (0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3)
    seen: list[int] = []

    def local(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, *, merged: bool = False) -> Tensor:
        seen.append(q.shape[2])
        heads = (x.permute(order) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True).permute(back)
        return out.flatten(2) if merged else out

    def share(x: Tensor) -> Tensor:
        return x.movedim(token_dim, 0).chunk(2)[dist.get_rank()].movedim(0, token_dim)

    torch.manual_seed(1)
    angles = torch.rand(8, 1)
    rotary = [torch.cat([part, part], 1).view(8, 1, 1, 2) for part in (angles.cos(), angles.sin())]
    # (heads of the query, of the key, arguments of the class, of the call, heads of each rank)
    cases_of: list[tuple[int, int, dict[str, Any], tuple[Any, ...], dict[str, Any], list[int]]] = [
        (6, 3, {"gather_idx": token_dim}, (), {"merged": True}, [4, 2]),
        (6, 6, {"sp_stream": object()}, (batch_dim,), {}, [3, 3]),
        (6, 6, {"num_kv_heads": 3}, (batch_dim, None, False), {}, [4, 2]),
        (4, 2, {}, (batch_dim, rotary), {"is_causal": True}, [2, 2]),
    ]
    for queries, keys, options, args, kwargs, heads in cases_of:
        whole = [torch.randn(2, 8, n, 4) for n in (queries, keys, keys)]
        whole = [(x if batch_dim == 0 else x.transpose(0, 1).contiguous()).requires_grad_() for x in whole]
        turn = len(args) > 1 and args[1] is not None
        q, k = (turned(x, angles, token_dim) if turn else x for x in whole[:2])
        expected = local(q, k, whole[2], *args[2:], **kwargs)
        slope = torch.randn(expected.shape)
        wanted = torch.autograd.grad(expected, whole, slope)
        shares = [share(x.detach()).requires_grad_() for x in whole]
        out = DistributedAttention(local, None, **options)(*shares, *args, **kwargs)
        assert seen[-1] == heads[dist.get_rank()], options
        torch.testing.assert_close(out, share(expected))
        for one, other in zip(torch.autograd.grad(out, shares, share(slope)), wanted, strict=True):
            torch.testing.assert_close(one, share(other))
    module = DistributedAttention(local, None, num_kv_heads=3)
    for args, text in (
        ((2,), r"batch_dim_idx 2 must be 0, for \[b, s, heads, d\], or 1"),
        ((batch_dim,), "num_kv_heads 3 must divide the 2 heads of the key"),
    ):
        with pytest.raises(ValueError, match=text):
            module(*shares, *args)
    with pytest.raises(ValueError, match=r"rotary_pos_emb has the shapes \(4, 1, 1, 2\) .*\[8, 1 or 2, 1, features\]"):
        DistributedAttention(local, None)(*shares, batch_dim, [part[:4] for part in rotary])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"core_attn_implementation": "eager"}, r"'eager' cannot be shared \(eager builds whole masks\); use one of sdpa, flash"),
        ({"core_attn_implementation": "no_such"}, "'no_such' cannot be shared"),
        ({"core_attn_implementation": "flash_attention_2"}, "is 'flash_attention_2', but the model's attention is 'sdpa'"),
        ({"seq_length_is_variable": False}, "seq_length_is_variable=False needs seq_length"),
        ({}, r"sequence_parallel_size \(2\) does not divide the number of ranks \(1\); use 1"),
    ],
)
def test_what_the_recipe_refuses(changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.compat.sequence import UlyssesSPAttentionHF

    monkeypatch.delenv("RANK", raising=False)
    asked = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 2} | changes
    with pytest.raises(ValueError, match=text):
        UlyssesSPAttentionHF.register_with_transformers(build("llama"), **asked)
    assert UlyssesSPAttentionHF.register_with_transformers("any", **asked | {"sequence_parallel_size": 1}) is None


def test_tiles() -> None:
    from slipstream.compat.sequence import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

    torch.manual_seed(0)
    mlp, head = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.Linear(8, 11)
    x, y = torch.randn(2, 12, 8, requires_grad=True), torch.randint(0, 11, (2, 12))
    params = [x, *mlp.parameters(), *head.parameters()]

    def plain() -> Tensor:
        return nn.functional.cross_entropy(head(mlp(x)).flatten(0, 1), y.flatten())

    def tiled() -> Tensor:
        hidden = TiledMLP.apply(lambda module, part: module(part), mlp, x, 4, list(mlp.parameters()))
        return TiledFusedLogitsLoss.apply(
            lambda module, h, targets: nn.functional.cross_entropy(module(h), targets), head, hidden, y, None, 3, None, "mean"
        )

    def computed() -> Tensor:
        hidden = sequence_tiled_compute(lambda h: mlp(h), 12, 5, {"h": x}, {}, "h", None, 1, None)
        call = lambda h, targets, scale: nn.functional.cross_entropy(head(h).flatten(0, 1), targets.flatten()) * scale  # noqa: E731
        return sequence_tiled_compute(call, 12, 4, {"h": hidden, "targets": y}, {"scale": 1.0}, "h")

    expected = torch.autograd.grad(plain(), params)
    for each in (tiled, computed):
        torch.testing.assert_close(each(), plain())
        for one, other in zip(torch.autograd.grad(each(), params), expected, strict=True):
            torch.testing.assert_close(one, other)
    few = x[:, :1], torch.zeros(2, 1)  # two tokens, and 8 shards
    loss = TiledFusedLogitsLoss.apply(lambda module, h, target: (h.sum(1) - target).mean(), head, *few, None, 8)
    torch.testing.assert_close(loss, x[:, 0].sum(1).mean())
    with pytest.raises(ValueError, match="must be a tensor with 11 tokens"):
        sequence_tiled_compute(mlp, 11, 2, {"x": x}, {})
