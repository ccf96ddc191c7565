"""Ulysses in unmodified models of transformers, against one process on whole sequences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.parallel.transformers_sequence import SequenceShares
from tests.dist.test_tensor import VOCAB, build, settings
from tests.pool import distributed

transformers = pytest.importorskip("transformers")
STEPS, LENGTH = 3, 12


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
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


def compare(kind: str, stage: int, sp: int, data: str = "", **changes: Any) -> None:
    expected, expected_norms, weights = reference(build(kind, **changes), data)
    engine = slipstream.initialize(model=build(kind, **changes), config=settings(stage, sequence_parallel_size=sp))[0]
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


@distributed(world_size=4)
def test_four_ranks_and_windows() -> None:
    compare("llama", 1, 4)  # two key heads
    compare("mistral", 3, 4, sliding_window=4)


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
    engine.destroy()


def reference_of_two() -> tuple[list[float], None, dict[str, Tensor]]:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [model(**batch(10 * step + rank), use_cache=False).loss for rank in range(2)]
        torch.stack(each).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [float(loss.detach()) for loss in each]
    return losses, None, dict(model.state_dict())


@distributed(world_size=2)
def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="computes attention by 'eager'"):
        slipstream.initialize(model=build("bloom"), config=settings(1, sequence_parallel_size=2))
    with pytest.raises(ValueError, match="1 attention heads, fewer than the 2 ranks"):
        model = build("llama", num_attention_heads=1, num_key_value_heads=1)
        slipstream.initialize(model=model, config=settings(1, sequence_parallel_size=2))
    engine = slipstream.initialize(model=build("llama"), config=settings(1, sequence_parallel_size=2))[0]
    with pytest.raises(ValueError, match="a sequence of 11 tokens cannot be shared by 2 ranks .*pad it to 12"):
        engine(input_ids=torch.zeros(1, 11, dtype=torch.long))
    engine.destroy()
