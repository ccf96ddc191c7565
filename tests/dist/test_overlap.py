"""`tensor_parallel.tp_overlap_comm`: sums of sliced layers that run while a rank computes (parallel/overlap.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.parallel import exchange as exchanges
from slipstream.parallel import overlap
from slipstream.zero.comm import Pending
from tests.dist.test_sequence_parallel import connected
from tests.dist.test_tensor import Own, build, settings
from tests.pool import distributed

transformers = pytest.importorskip("transformers")
TOKENS, BLOCKS = 96, 2


def batch(step: int, rank: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 66, (4, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": ids, "labels": ids}


@contextmanager
def chunks() -> Iterator[None]:
    """Let small row layers have chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "_CHUNK_NBYTES", 8 << 10)
        yield


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def trained(model: nn.Module, config: dict[str, Any], replica: int, overlaps: bool) -> Trained:
    """Losses, norms and whole weights."""
    parallel = {"autotp_size": 2, "tp_overlap_comm": overlaps}
    micros = config.get("gradient_accumulation_steps", 1)
    with chunks():
        engine = slipstream.initialize(model=model, config=config | {"tensor_parallel": parallel})[0]
        losses, norms = [], []
        for step in range(2):
            if "pp" in config.get("slipstream", {}).get("mesh", {}):
                losses.append(float(engine.train_batch(iter([batch(micros * step + i, replica) for i in range(micros)]))))
            else:
                for i in range(micros):
                    loss = engine(**batch(micros * step + i, replica), use_cache=False).loss
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss.detach()))
            norms.append(float(engine.global_grad_norm))
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.destroy()
    return losses, norms, state


def compare(build_model: Callable[[], nn.Module], config: dict[str, Any], replica: int = 0) -> None:
    plain, overlapped = (trained(build_model(), config, replica, each) for each in (False, True))
    assert overlapped[:2] == plain[:2]
    assert all(torch.equal(overlapped[2][name], value) for name, value in plain[2].items())


def own(transport: str, **blocks: Any) -> dict[str, Any]:
    return {"slipstream": {"transport": transport, **blocks}}


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize(("kind", "stage"), [("llama", 0), ("gpt2", 1), ("qwen2", 2), ("opt", 3), ("mixtral", 3)])
def test_overlapped_sums_have_the_same_bits(kind: str, stage: int, transport: str) -> None:
    """opt has biases, gpt2 transposed weights and fused ones, qwen2 tied embeddings, mixtral experts."""
    compare(lambda: build(kind), settings(stage, **own(transport), gradient_accumulation_steps=2))


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize(("kind", "stage"), [("llama", 1), ("gpt2", 3)])
def test_overlap_between_shares_of_the_tokens(kind: str, stage: int, transport: str) -> None:
    compare(lambda: build(kind), settings(stage, **own(transport, tensor={"sequence_parallel": True})))


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("stage", "blocks"), [pytest.param(2, {}, marks=pytest.mark.slow), (3, {}), (1, {"bf16": {"enabled": True}})]
)
def test_overlap_with_recomputation_and_dropout(stage: int, blocks: dict[str, Any]) -> None:
    def model() -> nn.Module:
        built = build("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
        torch.manual_seed(7)
        return built

    compare(model, settings(stage, **own("gloo", activations="recompute"), **blocks))


@distributed(world_size=4)
@pytest.mark.parametrize(("stage", "over"), [(3, "gloo"), (2, "auto")])
def test_overlap_on_two_axes(stage: int, over: str) -> None:
    """Gradients of weights are reduced over the replicas while the sum over the slices is under way."""
    compare(lambda: build("llama"), settings(stage, **own(over)), dist.get_rank() // 2)


@distributed(world_size=4)
@pytest.mark.parametrize(("stage", "schedule"), [(1, "1f1b"), (3, "zero_bubble")])
def test_overlap_in_stages(stage: int, schedule: str) -> None:
    blocks = own("gloo", mesh={"pp": 2, "tp": 2}, pipeline={"schedule": schedule})
    compare(lambda: build("qwen2"), settings(stage, **blocks, gradient_accumulation_steps=2))


@distributed(world_size=2)
def test_a_second_derivative_of_overlapped_sums() -> None:
    """A penalty on the gradient of the inputs, by create_graph; own layers with a gathered head."""

    class Penalized(Own):
        def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
            x = self.embed(input_ids)
            x = x + self.down(torch.tanh(self.up(x))) + self.side(x)
            loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
            (of_embedding,) = torch.autograd.grad(loss, [self.embed.weight], create_graph=True)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss + of_embedding.square().sum())

    def model() -> nn.Module:
        torch.manual_seed(5)
        return Penalized()

    compare(model, settings(0, **own("gloo")))


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("tokens", [False, True])
def test_what_runs_during_a_sum(tokens: bool, transport: str) -> None:
    """Backward: all weight gradients of a region, 3 in attention and 2 in an MLP. Forward, over gloo: a sum starts before the last
    has ended."""
    events: list[str] = []
    weight_gradient, exchange_class = overlap._weight_gradient, exchanges.Exchange

    def recorded(started: Pending[Tensor]) -> Pending[Tensor]:
        events.append("(")

        def finish() -> Tensor:
            result = started.wait()
            events.append(")")
            return result

        return Pending(finish)

    def spied(x: Tensor, *others: Any) -> Tensor:
        events.append("w")
        return weight_gradient(x, *others)

    blocks = own(transport, tensor={"sequence_parallel": tokens}) | {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}
    with chunks(), pytest.MonkeyPatch.context() as patch:
        for name in ("start_sum", "start_reduce_scatter"):
            start = getattr(exchange_class, name)
            patch.setattr(exchange_class, name, lambda self, *args, start=start: recorded(start(self, *args)))
        patch.setattr(overlap, "_weight_gradient", spied)
        engine = slipstream.initialize(model=build("llama", num_hidden_layers=BLOCKS), config=settings(1, **blocks))[0]
        engine(**batch(0), use_cache=False)
        events.clear()
        loss = engine(**batch(0), use_cache=False).loss
        forward, _ = "".join(events), events.clear()
        engine.backward(loss)
        engine.step()
        engine.destroy()
    assert ("(((" in forward) == (transport == "gloo"), forward
    # the head's own region comes first, if its vocabulary is cut; row layers' weight gradients are not in regions
    regions = [part.split(")")[0].count("w") for part in "".join(events).split("(")[1:]]
    assert [count for count in regions if count > 1] == [2, 3] * BLOCKS, events


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
def test_sums_that_were_started(transport: str, world_size: int) -> None:
    """Several at once, waited for in another order and after other operations, long ones in pieces: the results of `sum`."""
    with connected(transport) as exchange:
        rank = dist.get_rank()
        values = [torch.arange(n, dtype=torch.float32) * (rank + 1) for n in (8, 40_000, 3)]
        expected = [exchange.sum(each) for each in values]
        share = exchange.reduce_scatter(values[1].view(100, 400), 1)
        if isinstance(exchange, exchanges.SharedExchange):
            exchange.piece = 16 << 10
        one, other = exchange.start_sum(values[0]), exchange.start_sum(values[1])
        third = exchange.start_reduce_scatter(values[1].view(100, 400), 1)
        last = exchange.start_sum(values[2])
        assert torch.equal(exchange.gather(values[2], 0), torch.cat([torch.arange(3.0) * (r + 1) for r in range(world_size)]))
        assert torch.equal(last.wait(), expected[2])
        assert torch.equal(other.wait(), expected[1])
        assert torch.equal(one.wait(), expected[0])
        assert torch.equal(third.wait(), share)
