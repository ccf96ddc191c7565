"""Local steps with an outer optimizer: each replica is a plain model, and the rounds are Nesterov's on their differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.moe import MoE
from slipstream.ops.wire import Feedback, nbytes
from slipstream.world.mesh import Axis
from slipstream.zero.comm import LocalComm
from slipstream.zero.reduction import Rounded
from tests import cases, toy
from tests.pool import distributed

EVERY = 3
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def local(exchange: str = "fp32", **others: Any) -> dict[str, Any]:
    return {"local_steps": {"every": EVERY, "outer_lr": 0.7, "outer_momentum": 0.9, "exchange": exchange, **others}}


def lm_loss(model: nn.Module, index: int, step: int) -> Tensor:
    loss: Tensor = model(toy.tokens(index, step))
    return loss


class Twin:
    """Plain models, one for each replica of some data-parallel indices, and torch's SGD with Nesterov momentum on the mean of their
    differences. loss: of a model, an index and a step."""

    def __init__(
        self,
        replicas: list[list[int]],
        build: Callable[[], nn.Module] = lambda: toy.seeded(toy.Lm),
        loss: Callable[[nn.Module, int, int], Tensor] = lm_loss,
    ) -> None:
        self.replicas, self.loss, self.models = replicas, loss, [build() for _ in replicas]
        self.adams = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in self.models]
        self.anchor = build()
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.count, self.overlap = 0, 0
        self.began: list[list[Tensor]] = []  # the weights with which replicas began a round

    def step(self, step: int, clip: float = 0.5) -> None:
        for indices, model, adam in zip(self.replicas, self.models, self.adams, strict=True):
            adam.zero_grad()
            for index in indices:
                (self.loss(model, index, step) / len(indices)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
        self.count += 1
        if self.count % EVERY == 0:
            self.began = [[param.detach().clone() for param in model.parameters()] for model in self.models]
        if self.began and self.count % EVERY == self.overlap:
            self.take_round()

    @torch.no_grad()
    def take_round(self) -> None:
        """The outer step with the differences of the weights at the round's beginning; what replicas have moved since stays."""
        for i, anchor in enumerate(self.anchor.parameters()):
            anchor.grad = torch.stack([anchor - began[i] for began in self.began]).mean(0)
        self.outer.step()
        for model, began in zip(self.models, self.began, strict=True):
            for param, first, anchor in zip(model.parameters(), began, self.anchor.parameters(), strict=True):
                param.copy_(anchor + (param - first) if self.overlap else anchor)


def compare(engine: Any, expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    weights = {name: value.clone() for name, value in engine.named_weights()}
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world_size=2, transports=("shared", "gloo"))
def test_local_steps(transport: str) -> None:
    """Every rank is a replica; at every stage."""
    twin = Twin([[0], [1]])
    for step in range(2 * EVERY):
        twin.step(step)
    for stage in range(4):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=ADAMW, gradient_clipping=0.5, slipstream=local())
        for step in range(2 * EVERY):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        compare(engine, twin.anchor.state_dict())
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("overlap", [1, 2])
def test_rounds_beside_steps(transport: str, overlap: int, tmp_path: Path) -> None:
    """`overlap`: the weights of each replica are a twin's at each step; a checkpoint while differences travel ends their round."""
    twin, rank = Twin([[0], [1]]), dist.get_rank()
    twin.overlap = overlap
    engine = toy.make(toy.seeded(toy.Lm), 1, transport, optimizer=ADAMW, gradient_clipping=0.5, slipstream=local(overlap=overlap))
    for step in range(3 * EVERY + overlap):
        twin.step(step)
        toy.step(engine, toy.tokens(rank, step))
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(
                value, twin.models[rank].state_dict()[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    toy.step(engine, toy.tokens(rank, 30))
    engine.save_checkpoint(str(tmp_path), tag="t")
    sums = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sums, toy.checksum(engine))
    assert sums[0] == sums[1]
    for _ in range(EVERY):
        toy.step(engine, toy.tokens(rank, 10))
    engine.load_checkpoint(str(tmp_path), tag="t")  # while differences travel: they are dropped
    for _ in range(EVERY + overlap):
        toy.step(engine, toy.tokens(rank, 10))
    first = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.load_checkpoint(str(tmp_path), tag="t")
    for _ in range(EVERY + overlap):
        toy.step(engine, toy.tokens(rank, 10))
    for name, value in engine.state_dict().items():
        assert torch.equal(value, first[name]), name
    engine.destroy()


@pytest.mark.disk
@distributed(world_size=2)
def test_rounds_with_states_on_disk(tmp_path: Path) -> None:
    twin = Twin([[0], [1]])
    for step in range(EVERY):
        twin.step(step)
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    options: dict[str, Any] = {"optimizer": ADAMW, "gradient_clipping": 0.5, "zero_optimization": zero}
    engine = toy.make(toy.seeded(toy.Lm), 3, slipstream=local(), **options)
    for step in range(EVERY):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    compare(engine, twin.anchor.state_dict())
    engine.destroy()


@distributed(world_size=4, transports=("gloo",))
def test_replicas_of_sharded_states(transport: str) -> None:
    """With mics_shard_size 2, two replicas of two ranks each; accumulation and codes with error feedback."""
    twin = Twin([[0, 1], [2, 3]])
    for step in range(2 * EVERY):
        twin.step(step)
    zero = {"stage": 3, "mics_shard_size": 2}
    for exchange, atol in (("fp32", 1e-5), ("bf16", 2e-3), ("int8", 2e-3)):
        options: dict[str, Any] = {"optimizer": ADAMW, "gradient_clipping": 0.5, "zero_optimization": zero}
        engine = toy.make(toy.seeded(toy.Lm), 3, transport, slipstream=local(exchange), **options)
        for step in range(2 * EVERY):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        compare(engine, twin.anchor.state_dict(), atol)
        engine.destroy()


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_replicas_that_are_cut_into_slices_or_stages(transport: str, axis: str, tmp_path: Path) -> None:
    """Two replicas of two ranks, of a decoder whose embeddings are tied: both stages hold them. Also from a checkpoint."""
    tensor = pytest.importorskip("tests.dist.test_tensor")

    def loss(model: nn.Module, index: int, step: int) -> Tensor:
        each = [model(**tensor.batch(step, 10 * index + micro), use_cache=False).loss for micro in range(2)]
        return torch.stack(each).mean()

    def train(engine: Any, first: int) -> None:
        for step in range(first, first + EVERY):
            micros = [tensor.batch(step, 10 * engine.mesh.batch.index + micro) for micro in range(2)]
            if axis == "pp":
                engine.train_batch(iter(micros))
                continue
            for each in micros:
                engine.backward(engine(**each, use_cache=False).loss)
                engine.step()

    eps = {"eps": 1e-5}  # biases of keys have no gradient but its rounding
    twin = Twin([[0], [1]], lambda: tensor.build("qwen2"), loss)
    for adam in twin.adams:
        adam.param_groups[0].update(eps)
    for step in range(2 * EVERY):
        twin.step(step)
    adamw = ADAMW | {"params": ADAMW["params"] | eps}
    options: dict[str, Any] = {"optimizer": adamw, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    for stage in cases.STAGES if cases.EVERYTHING else (3,) if axis == "tp" else (1,):
        own = {**local(), "mesh": {axis: 2}}
        engine = toy.make(tensor.build("qwen2"), stage, transport, slipstream=own, **options)
        assert (engine.mesh.num_apart, engine.mesh.replica.size, engine.mesh.num_means) == (2, 2, 1)
        train(engine, 0)
        train(engine, EVERY)
        compare(engine, twin.anchor.state_dict(), 3e-5)
        engine.save_checkpoint(str(tmp_path), tag="t")
        train(engine, 0)
        sums = int(toy.checksum(engine))
        engine.load_checkpoint(str(tmp_path), tag="t")
        train(engine, 0)
        assert int(toy.checksum(engine)) == sums, stage
        engine.destroy()


@contextmanager
def sent() -> Iterator[list[str]]:
    """The names of torch's collectives that this rank has called."""
    calls: list[str] = []
    names = ("all_reduce", "all_gather", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "broadcast", "isend")
    names += ("all_gather_object", "broadcast_object_list", "gather_object")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if (function := getattr(dist, name, None)) is not None:

                def counting(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
                    calls.append(_name)
                    return _function(*args, **kwargs)

                patch.setattr(dist, name, counting)
        yield calls


@pytest.mark.disk
@distributed(world_size=2, transports=("gloo",))
def test_nothing_travels_between_rounds(transport: str, tmp_path: Path) -> None:
    on_disk = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    for stage, options in ((1, {}), (3, {}), (3, on_disk)):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=ADAMW, slipstream=local(), **options)
        toy.step(engine, toy.tokens(dist.get_rank(), 0))  # the first forward and step compare what ranks do
        for step in range(1, 2 * EVERY):
            with sent() as calls:
                toy.step(engine, toy.tokens(dist.get_rank(), step))
            assert bool(calls) == ((step + 1) % EVERY == 0), (stage, step, calls)
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_checkpoint_ends_a_period(transport: str, tmp_path: Path) -> None:
    """All replicas then have the anchor and the mean of their optimizer states, and a run goes on from it as the one that saved."""
    engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ADAMW, slipstream=local())
    for step in range(EVERY + 1):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    rounds = engine.states.outer.rounds
    engine.save_checkpoint(str(tmp_path), tag="t")
    assert engine.states.outer.rounds == rounds + 1 and engine.states.outer.since == 0
    for _ in range(EVERY):
        toy.step(engine, toy.tokens(dist.get_rank(), 10))
    expected = {name: value.clone() for name, value in engine.named_weights()}
    engine.destroy()
    for stage in (0, 2):
        other = toy.make(toy.seeded(toy.Lm, 7), stage, transport, optimizer=ADAMW, slipstream=local())
        toy.step(other, toy.tokens(dist.get_rank(), 30))  # in the middle of a period of its own
        other.load_checkpoint(str(tmp_path), tag="t")
        for _ in range(EVERY):
            toy.step(other, toy.tokens(dist.get_rank(), 10))
        compare(other, expected, 0.0 if stage == 0 else 1e-5)
        other.destroy()
    plain = toy.make(toy.seeded(toy.Lm, 7), 1, transport, optimizer=ADAMW)
    plain.load_checkpoint(str(tmp_path), tag="t")
    plain.save_checkpoint(str(tmp_path), tag="plain")
    plain.destroy()
    again = toy.make(toy.seeded(toy.Lm, 7), 1, transport, optimizer=ADAMW, slipstream=local())
    again.load_checkpoint(str(tmp_path), tag="plain")  # without momentum: it starts anew
    assert not any(tensor.data.any() for tensor in again.states.outer.tensors().values())
    again.destroy()


@distributed(world_size=2)
def test_a_replica_that_skips_a_step_stays_in_the_round() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ADAMW, slipstream=local())
    for step in range(2 * EVERY):
        loss = engine(toy.tokens(dist.get_rank(), step))
        engine.backward(loss * (float("inf") if (dist.get_rank(), step) == (1, 1) else 1.0))
        engine.step()
    assert engine.skipped_steps == dist.get_rank()
    sums = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sums, toy.checksum(engine))
    assert sums[0] == sums[1]
    engine.destroy()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}}, "drop local_steps, or use AdamW"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "not supported with experts that are split"),
        ({"slipstream": local(outer_momentum=1.0)}, "outer_momentum"),
        ({"slipstream": local(overlap=EVERY)}, r"overlap \(3\) must be less than every \(3\)"),
    ],
)
def test_settings_that_replicas_apart_cannot_share(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make(toy.seeded(toy.Lm), 1, **({"slipstream": local()} | keys))


@distributed(world_size=2)
def test_a_surgery_is_refused() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ADAMW, slipstream=local())
    with pytest.raises(ValueError, match="does not work with slipstream"), engine.surgery():
        pass
    toy.step(engine, toy.tokens(dist.get_rank(), 0))
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_rank_that_comes_late_is_waited_for(transport: str) -> None:
    sums = set()
    for seconds in (0.0, 1.5):
        engine = toy.make(toy.seeded(toy.Lm), 1, transport, optimizer=ADAMW, slipstream=local("int8"))
        began = time.monotonic()
        for step in range(2 * EVERY):
            if dist.get_rank() and step == EVERY - 1:
                time.sleep(seconds)
            toy.step(engine, toy.tokens(dist.get_rank(), step))
            if not dist.get_rank() and step == EVERY - 2:
                assert time.monotonic() - began < 1.5 + seconds  # it has not waited before the round
        sums.add(int(toy.checksum(engine)))
        engine.destroy()
    assert len(sums) == 1


@distributed(world_size=4, transports=("gloo",))
@pytest.mark.parametrize("kind", ["stages", "balanced experts"])
def test_replicas_meet_in_rounds_only(transport: str, kind: str) -> None:
    """One comes late to each step, a second in all before the round, and skips one: the others are not kept waiting."""
    model: nn.Module = Balanced()
    own: dict[str, Any] = local()
    if kind == "stages":
        model, own = pytest.importorskip("tests.dist.test_pipeline").decoder(), own | {"mesh": {"pp": 2}}
    engine = toy.make(model, 1, transport, optimizer=ADAMW, slipstream=own)
    late = engine.mesh.batch.index == engine.mesh.batch.size - 1
    for step in range(2 * EVERY):
        began = time.monotonic()
        if late and step > EVERY:
            time.sleep(0.5)
        if kind == "stages":
            engine.train_batch(iter([{"input_ids": ids, "labels": ids} for ids in [toy.tokens(engine.rank, step) % 64]]))
        else:
            scale = float("inf") if late and step == EVERY + 1 else 1.0
            engine.backward(engine(toy.floats(engine.rank, step)) * scale)
            engine.step()
        if not late and EVERY < step < 2 * EVERY - 1:
            assert time.monotonic() - began < 0.4, (kind, step)
    engine.destroy()


class Balanced(nn.Module):
    """A layer of experts whose choice is balanced by what all tokens of a step have chosen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(8, lambda: nn.Linear(8, 8), 4, balance_rate=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.moe(x)[0]).square().mean()


@distributed(world_size=2)
def test_weights_that_replicas_would_not_share() -> None:
    """Loaded by name, they are where the next round begins; unfrozen later, they are refused."""
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ADAMW, slipstream=local())
    for step in range(EVERY):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    state = {name: value.clone() + 1 for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    for name, value in engine.named_weights():
        torch.testing.assert_close(value, state[name])
    engine.states.outer.take_round()
    for name, value in engine.named_weights():
        torch.testing.assert_close(value, state[name])
    engine.destroy()
    model = toy.seeded(toy.Lm)
    for param in model.head.parameters():
        param.requires_grad_(False)
    engine = toy.make(model, 1, optimizer=ADAMW, slipstream=local())
    for param in model.head.parameters():
        param.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'head\.weight' was frozen at initialize\(\) and is trained now"):
        for step in range(EVERY):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_a_replica_that_is_not_finite_goes_on_from_the_others(transport: str) -> None:
    twin, rank = Twin([[0]]), dist.get_rank()
    for step in range(EVERY):
        twin.step(step)
    for exchange, atol in (("fp32", 1e-5), ("bf16", 2e-3), ("int8", 2e-3)):
        engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ADAMW, gradient_clipping=0.5, slipstream=local(exchange))
        for step in range(EVERY):
            if rank and step == EVERY - 1:
                with torch.no_grad():
                    engine.module.head.weight[0] = float("nan")
            toy.step(engine, toy.tokens(rank, step))
        compare(engine, twin.anchor.state_dict(), atol)
        for step in range(EVERY):
            assert toy.step(engine, toy.tokens(rank, 10 + step)).isfinite()
        engine.destroy()
    engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ADAMW, slipstream=local())
    with torch.no_grad():
        engine.module.head.weight[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"no replica of slipstream\.local_steps has finite weights"):
        for step in range(EVERY):
            toy.step(engine, toy.tokens(rank, step))
    engine.destroy()


def test_what_rounding_to_bf16_loses_is_added_in_the_next_round() -> None:
    comm, numel = LocalComm(Axis("dp_replicate", None, (0,), 0, 1), torch.device("cpu")), 512
    reduction, x = Rounded(comm), torch.randn(numel, generator=torch.Generator().manual_seed(0))
    full, wire = comm.allocate([(numel, torch.float32), (numel, torch.bfloat16)])
    sent, served = (Feedback(torch.zeros(nbytes(numel, 8), dtype=torch.uint8)) for _ in range(2))
    total = torch.zeros(numel)
    for kept in ((None, None), (sent, served)):
        total.zero_()
        for _ in range(64):
            reduction.scatter(x, wire, [0, numel], full.tensor, kept[0], alpha=1.0, accumulate=False).wait()
            reduction.spread(full, wire, [0, numel], kept[1]).wait()
            total += full.tensor
        error = float((total / 64 - x).abs().max() / x.abs().max())
        assert error > 5e-4 if kept[0] is None else error < 1e-4
