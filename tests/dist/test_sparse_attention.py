"""Block-sparse attention in engines: stages, recompute, accumulation, pipelines, slices and compile train as a plain loop."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import slipstream
from slipstream import attention
from tests.pool import distributed

PATTERN: dict[str, Any] = {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "num_sliding_window_blocks": 1}
LENGTH, MICRO, STEPS = 90, 2, 2  # tokens: no multiple of the block
RATE = 0.5


def built(kind: str) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    if kind == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, **sizes, **quiet))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **sizes))


def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return {"input_ids": ids, "labels": ids}


def twin(kind: str, ranks: int, pattern: dict[str, Any] | None = PATTERN) -> tuple[list[float], dict[str, Tensor]]:
    """Mean losses of steps by a plain loop, and the weights that it ends with."""
    model = built(kind)
    if pattern is not None:
        attention.use_sparse_attention(model, pattern)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(**batch(step, micro, rank)).loss for micro in range(MICRO) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append(torch.stack(losses).mean().item())
    return found, model.state_dict()


def engine_of(model: nn.Module, stage: int, own: dict[str, Any], **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage},
        "sparse_attention": PATTERN,
        "slipstream": own,
        **more,
    }
    return slipstream.initialize(model=model, config=config)[0]


def train(engine: Any, rank: int) -> list[float]:
    """Mean losses of steps, of this rank's batches."""
    found = []
    for step in range(STEPS):
        batches = [batch(step, micro, rank) for micro in range(MICRO)]
        if engine.mesh.pp.size > 1:
            found.append(float(engine.train_batch(iter(batches))))
            continue
        losses = []
        for each in batches:
            losses.append(engine(**each).loss)
            engine.backward(losses[-1])
            engine.step()
        found.append(torch.stack(losses).mean().item())
    return found


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_shards_train_as_one_process(kind: str, transport: str) -> None:
    losses, weights = twin(kind, ranks=2)
    for stage, way in ((1, "keep"), (3, "recompute")):
        engine = engine_of(built(kind), stage, {"transport": transport, "activations": way})
        found = torch.tensor(train(engine, dist.get_rank()))
        dist.all_reduce(found)
        assert (found / 2).tolist() == pytest.approx(losses, rel=1e-4)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=1e-4, rtol=1e-3)
        engine.destroy()


LAYOUTS: list[dict[str, Any]] = [{"mesh": {"pp": 2}}, {"mesh": {"pp": 2}, "activations": "recompute"}, {"mesh": {"tp": 2}}]


@distributed(world_size=2)
def test_stages_and_slices_train_as_one_process() -> None:
    losses, _ = twin("llama", ranks=1)
    for own in LAYOUTS:
        engine = engine_of(built("llama"), 1, own)
        assert train(engine, 0) == pytest.approx(losses, rel=1e-4), own
        engine.destroy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own check
def test_compiled_blocks_train_alike() -> None:
    losses, _ = twin("llama", ranks=1)
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    engine = engine_of(built("llama"), 1, {}, **compiled)
    assert train(engine, 0) == pytest.approx(losses, rel=1e-4)
    engine.destroy()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.attend = attention.SparseSelfAttention(attention.BigBirdSparsityConfig(2, 16, num_random_blocks=2), max_seq_length=256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)  # type: ignore[no-any-return]


@distributed(world_size=2)
def test_the_layout_is_that_of_the_first_rank() -> None:
    """Random blocks of a module's own pattern are drawn on each rank; a layout that was used before is forgotten, too."""
    random.seed(dist.get_rank())
    torch.manual_seed(0)
    model, x = Own(), torch.randn(1, 160, 32)
    with torch.no_grad():
        before = model(x)
    drawn: list[Any] = [None, None]
    dist.all_gather_object(drawn, (model.attend.master_layout.clone(), before))
    assert not torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])
    for stage in (0, 3):
        engine = engine_of(model, stage, {}, sparse_attention={"mode": "fixed"}, gradient_accumulation_steps=1)
        assert torch.equal(model.attend.master_layout, drawn[0][0])
        torch.testing.assert_close(engine(x).detach(), drawn[0][1])
        engine.destroy()
