"""What a script sees of a pipeline: its data between stages, boundaries, tied weights, and writes that are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import slipstream
from slipstream.parallel.layers import LayerSpec
from slipstream.parallel.mail import PairMail, connect_mail
from slipstream.parallel.module import PipelineModule
from slipstream.parallel.topology import PipeModelDataParallelTopology
from slipstream.train import pipeline
from tests import cases, toy
from tests.dist.test_pipeline import (
    CLIP,
    DIM,
    MICRO,
    batches,
    decoder,
    language,
    make,
    module,
    states_of,
    token_batches,
    token_samples,
    train,
)
from tests.pool import distributed

Carried = dict[str, Any]


class Begin(nn.Module):
    """Reads (ids, values); gives on a dictionary of everything that a tree may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(toy.VOCABULARY, DIM), nn.Linear(1, DIM)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Carried:
        ids, values = inputs
        x = self.embed(ids) + self.scale(values.unsqueeze(-1))
        positions = torch.arange(ids.shape[1])
        return {"x": x, "skip": (x * 2, None), "mask": ids % 3 == 0, "ids": ids, "rest": [positions, None, 3, "text"]}


class Between(nn.Module):
    """Changes some of it and gives on the rest, of which integers choose an embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(toy.VOCABULARY, DIM), nn.Linear(DIM, DIM)

    def forward(self, carried: Carried) -> Carried:
        positions, nothing, count, text = carried["rest"]
        assert nothing is None and carried["skip"][1] is None and (count, text) == (3, "text")
        assert carried["ids"].dtype == torch.int64 and carried["mask"].dtype == torch.bool and not carried["ids"].requires_grad
        x = self.mix(carried["x"]).masked_fill(carried["mask"].unsqueeze(-1), 0.0)
        x = x + self.embed((carried["ids"] + positions) % toy.VOCABULARY) * count
        return carried | {"x": torch.tanh(x)}


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, toy.VOCABULARY)

    def forward(self, carried: Carried) -> Tensor:
        logits: Tensor = self.head(carried["x"] + carried["skip"][0])
        return logits


def carrying(**kwargs: Any) -> PipelineModule:
    torch.manual_seed(0)
    specs = [LayerSpec(Begin), *(LayerSpec(Between) for _ in range(4)), LayerSpec(End)]
    loss = lambda logits, ids: cross_entropy(logits.flatten(0, 1), ids.flatten())  # noqa: E731
    return PipelineModule(specs, loss_fn=loss, partition_method="uniform", seed_layers=True, dynamic_shape=True, **kwargs)


def of_many_lengths(step: int, count: int = MICRO) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Micro-batches of another number of tokens each."""
    generator = torch.Generator().manual_seed(step)
    for k in range(count):
        ids = torch.randint(0, toy.VOCABULARY, (2, 3 + (5 * k + step) % 7), generator=generator)
        yield (ids, torch.rand(ids.shape, generator=generator)), ids


@distributed(world_size=2, transports=("shared", "gloo"))
def test_anything_travels_between_stages(transport: str) -> None:
    """Dictionaries, tuples, None, numbers, text, masks and integers, of changing lengths (`dynamic_shape`): as in one process."""
    whole = carrying(num_stages=1, stages=(0,))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    engines = [
        make(carrying(num_stages=2, num_chunks=chunks), stage, transport, slipstream={"pipeline": {"schedule": schedule}})
        for chunks, stage, schedule in ((1, 1, "1f1b"), (2, 3, "zero_bubble"))
    ]
    for step in range(3):
        optimizer.zero_grad()
        expected = torch.stack([whole.loss(whole.chunk(0)(x), (x, y)) for x, y in of_many_lengths(step)]).mean()
        for engine in engines:
            assert float(engine.eval_batch(of_many_lengths(step))) == pytest.approx(float(expected.detach()), rel=1e-5)
        expected.backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP))
        optimizer.step()
        for engine in engines:
            assert float(engine.train_batch(of_many_lengths(step))) == pytest.approx(float(expected.detach()), rel=1e-5)
            assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5)
    for engine in engines:
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], atol=2e-5, rtol=1e-4)
        engine.destroy()


@distributed(world_size=2)
def test_the_boundary_is_the_last_backward_of_a_step() -> None:
    """`is_gradient_accumulation_boundary`, as a hook of a layer sees it, on each stage and for each order of actions."""
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("1f1b", 2)):
        model = module(num_stages=2, num_chunks=chunks)
        engine = make(model, 1, "auto", slipstream={"pipeline": {"schedule": schedule}})
        seen: list[bool] = []
        for i in range(chunks):
            first = model.chunk(i).funcs[0]
            first.register_forward_hook(lambda *_: seen.append(engine.is_gradient_accumulation_boundary()))
            weight = next(first.parameters())
            weight.register_hook(lambda _: seen.append(engine.is_gradient_accumulation_boundary()))
        for _ in range(2):
            train(engine, 1)
            assert len(seen) == 2 * MICRO * chunks
            assert seen == [False] * (len(seen) - 1) + [True], (schedule, chunks)
            assert not engine.is_gradient_accumulation_boundary()
            seen.clear()
        engine.destroy()


@distributed(world_size=4)
def test_the_groups_of_tied_weights() -> None:
    """DeepSpeed's queries: with whom a rank shares which weight, and the sum of its gradients without an engine."""
    model = language(2)
    rank = dist.get_rank()
    assert list(model.tied_comms) == ["embed"]
    comm = model.tied_comms["embed"]
    assert comm["ranks"] == [rank % 2, rank % 2 + 2] == dist.get_process_group_ranks(comm["group"])
    assert comm["weight_attr"] == ["weight"] and comm["module"] is model.tied_modules["embed"]
    ((weight, group),) = model.get_tied_weights_and_groups()
    assert weight is comm["module"].weight and group is comm["group"]
    weight.grad = torch.full_like(weight, 1.0 + rank)
    model.allreduce_tied_weight_gradients()
    assert weight.grad.eq(2.0 * (1 + rank % 2) + 2).all()
    plain = module(num_stages=2)
    assert plain.tied_comms == {} and plain.get_tied_weights_and_groups() == []
    plain.allreduce_tied_weight_gradients()
    weight.grad = None
    engine = make(model, 1, "auto")
    engine.train_batch(token_batches(engine.mesh.batch.index, 0))
    tables = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(tables, weight.detach().clone(), group=group)
    assert torch.equal(*tables)
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_write_that_one_stage_refuses_is_refused_by_all(transport: str) -> None:
    """Unknown states, other shapes and frozen parameters of either stage: each rank raises, and nothing is written."""
    for stage in cases.stages(transport):
        model = module(num_stages=2)
        frozen = f"{model.parts[model.stage_id]}."
        next(child for name, child in model.named_children() if f"{name}." == frozen).requires_grad_(False)
        engine = make(model, stage, transport)
        train(engine, 1)
        before = states_of(engine)
        bias, weights = torch.zeros(DIM), (f"{model.parts[0]}.bias", f"{model.parts[1]}.norm.weight")  # frozen, one of each stage
        for name, key in (("1.norm.bias", "exp_av"), ("6.norm.bias", "exp_av"), (weights[0], "exp_avg"), (weights[1], "exp_avg")):
            with pytest.raises(KeyError, match=f"no optimizer state '{key}' of '{name}'; there are \\['master'"):
                engine.set_optimizer_state(name, {"master": bias, key: bias})
        for name in ("1.norm.bias", "6.norm.bias"):
            with pytest.raises(ValueError, match=rf"the exp_avg of '{name}' has shape \(3,\), the parameter \({DIM},\)"):
                engine.set_optimizer_state(name, {"exp_avg": torch.zeros(3)})
            with pytest.raises(ValueError, match=rf"the gradient of '{name}' has shape \(3,\)"):
                engine.set_gradient(name, torch.zeros(3))
        for name in weights:
            with pytest.raises(ValueError, match=f"parameter '{name}' is frozen and has no gradient"):
                engine.set_gradient(name, bias)
            assert engine.optimizer_state(name).keys() == {"master"}
        for call in (engine.optimizer_state, engine.gradient, lambda name: engine.set_gradient(name, bias)):
            with pytest.raises(KeyError, match=r"no parameter '1\.norm\.bia'"):
                call("1.norm.bia")
        after = states_of(engine)
        assert after.keys() == before.keys()
        for name, value in after.items():
            assert torch.equal(value, before[name]), (stage, name)
        new = {key: torch.full((DIM,), 0.25 * (i + 1)) for i, key in enumerate(("master", "exp_avg", "exp_avg_sq"))}
        for name in ("1.norm.bias", "6.norm.bias"):
            engine.set_optimizer_state(name, new)
            for key, value in engine.optimizer_state(name).items():
                assert value.equal(new[key]), (stage, name, key)
        engine.destroy()


def between_slices(zeros: bool = False, **kwargs: Any) -> PipelineModule:
    """The stages are cut between a column layer and its row layer: tp ranks have other activations there.

    zeros: of the row layer's weight, so that at the first step no gradient differs.
    """
    torch.manual_seed(0)
    own = slipstream.parallel
    specs = [LayerSpec(own.ColumnParallelLinear, 8, 4 * DIM), torch.tanh, LayerSpec(own.RowParallelLinear, 4 * DIM, 4)]
    model = PipelineModule(specs, loss_fn=mse_loss, seed_layers=True, parts=[0, 2, 3], **kwargs)
    for layer in model.modules():
        if zeros and isinstance(layer, own.RowParallelLinear):
            nn.init.zeros_(layer.weight)
    return model


def counted(engine: Any) -> dict[str, int]:
    """The bytes of tensors that this rank will send, by kind of message."""
    mail = getattr(engine.mail, "inner", engine.mail)
    nbytes, send = {"F": 0, "B": 0}, mail._send_tensor

    def sending(key: Any, to: int, i: int, flat: Tensor) -> None:
        nbytes[str(key[0])] += flat.nbytes
        send(key, to, i, flat)

    mail._send_tensor = sending
    return nbytes


def pair_mail(axis: Any, device: torch.device, transport: str, watch: Any, routes: Any, slots: int) -> PairMail:
    """As between GPUs, with gloo in place of NCCL."""
    return PairMail(axis, device, watch, routes, backend="gloo")


@distributed(world_size=4)
def test_what_slices_have_alike_travels_once() -> None:
    """`pipe_partitioned` and `grad_partitioned` over gloo: half of the bytes at tp 2, with the same bits; not inside of slices."""
    kinds = ("F", "B")
    results = []
    for outputs, grads, connect in (
        (False, False, connect_mail),
        (True, False, connect_mail),
        (True, True, connect_mail),
        (True, True, pair_mail),
    ):
        pipe = {"stages": 2, "pipe_partitioned": outputs, "grad_partitioned": grads}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "connect_mail", connect)
            engine = make(decoder(), 1, "gloo", pipeline=pipe, slipstream={"mesh": {"tp": 2}})
        nbytes = counted(engine)
        losses = [float(engine.train_batch(token_samples(0, step))) for step in range(2)]
        results.append((losses, engine.global_grad_norm, int(toy.checksum(engine))))
        whole = 2 * sum(4 * 16 * each["input_ids"].numel() for each in token_samples(0, 0))  # two steps of 16 features in fp32
        asked = dict(zip(kinds, (outputs, grads), strict=True))
        sent = kinds[engine.stage_id]  # activations from the first stage, gradients from the last
        assert nbytes == {kind: (whole // 2 if asked[kind] else whole) if kind == sent else 0 for kind in kinds}
        engine.destroy()
    assert results[1:] == results[:1] * 3


@distributed(world_size=4)
@pytest.mark.parametrize("zeros", [False, True])
def test_what_differs_between_slices_travels_whole(zeros: bool) -> None:
    results = []
    for is_shared in (True, False):
        pipe = {"pipe_partitioned": is_shared, "grad_partitioned": is_shared}
        engine = make(between_slices(zeros, topology=PipeModelDataParallelTopology(2, 2, 1)), 1, "gloo", pipeline=pipe)
        nbytes = counted(engine)
        results.append((train(engine, 3), int(toy.checksum(engine)), {} if zeros else nbytes))
        engine.destroy()
    assert results[0] == results[1]
    alone = between_slices(zeros, num_stages=2, stages=(0, 1))
    expected = torch.stack([mse_loss(alone.chunk(1)(alone.chunk(0)(x)), y) for x, y in batches(0, 0)]).mean()
    assert results[0][0][0][0] == pytest.approx(float(expected.detach()), rel=1e-5)
