"""Gradients of embeddings as rows: the same bits as dense reductions, and the bytes of the rows that a batch uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.compat.engine import initialize
from slipstream.optim import Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests import cases, toy
from tests.dist.test_codes_on_the_wire import sent
from tests.pool import distributed, run

WORDS, WIDTH = 512, 64


class Bag(nn.Module):
    """Two embeddings, one of which may be sparse, a bag, and a small head."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse), nn.Embedding(16, WIDTH)
        self.bag = nn.EmbeddingBag(64, 32, mode="sum", sparse=sparse)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return (self.head(x.mean(1)) * self.bag(tokens % 64)).square().mean()


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(100 * rank + step))


def trained(engine: Any, steps: int) -> list[int]:
    sums = []
    for step in range(steps):
        toy.step(engine, tokens(dist.get_rank(), step))
        sums.append(int(toy.checksum(engine)))
    norm = torch.tensor(engine.global_grad_norm, dtype=torch.float32)
    engine.destroy()
    return [*sums, int(norm.view(torch.int32))]


@distributed(world_size=2, transports=("shared", "gloo"))
def test_rows_of_embeddings(transport: str) -> None:
    """Clipped, with and without a bag's sparse gradients, in bf16 and accumulated: dense reductions give the same bits."""
    for stage in cases.stages(transport):
        for dtype, accumulation in (("fp32", 1), ("bf16", 2)):
            keys: dict[str, Any] = {"gradient_clipping": 0.1, "gradient_accumulation_steps": accumulation}
            dense = trained(toy.make(toy.seeded(Bag), stage, transport, dtype=dtype, **keys), 4)
            for kind in (Bag, lambda: Bag(sparse=True)):
                rows = toy.make(toy.seeded(kind), stage, transport, dtype=dtype, sparse_gradients=True, **keys)
                assert trained(rows, 4) == dense, (stage, dtype)
            assert trained(toy.make(toy.seeded(lambda: Bag(sparse=True)), stage, transport, dtype=dtype, **keys), 4) == dense


@distributed(world_size=4, transports=("gloo",))
def test_rows_over_four_ranks_one_of_which_uses_none(transport: str) -> None:
    for stage in (0, 2):
        results = []
        for rows in (True, False):
            engine = toy.make(toy.seeded(Bag), stage, transport, sparse_gradients=rows)
            for step in range(2):
                batch = tokens(dist.get_rank(), step)
                loss = engine(batch)
                engine.backward(loss * 0 if dist.get_rank() == 1 else loss)
                engine.step()
            results.append(int(toy.checksum(engine)))
            engine.destroy()
        assert results[0] == results[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(tokens)).flatten(0, 1), tokens.flatten())


@distributed(world_size=2, transports=("gloo",))
def test_a_tied_embedding_is_sent_whole(transport: str) -> None:
    bytes_sent, sums = [], []
    for rows in (True, False):
        engine = toy.make(toy.seeded(Tied), 2, transport, sparse_gradients=rows)
        with sent() as counted:
            toy.step(engine, tokens(dist.get_rank(), 0))
        bytes_sent.append(sum(counted))
        sums.append(int(toy.checksum(engine)))
        engine.destroy()
    assert sums[0] == sums[1]
    assert bytes_sent[1] <= bytes_sent[0] <= bytes_sent[1] + 256  # headers


@distributed(world_size=2, transports=("gloo",))
def test_bytes_of_rows(transport: str) -> None:
    """A row of 64 values takes its values and one number; rows of the other rank's span are sent once."""
    model = nn.Sequential(nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    engine = toy.make(model, 1, transport, sparse_gradients=True, optimizer=optimizer)
    batch = torch.randint(4096, (4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    with sent() as counted:
        engine.backward(engine(batch).square().mean())
        engine.step()
    half = engine.units[0].layout.numel // 2 // WIDTH
    own = dist.get_rank()
    others = len({int(i) for i in batch.flatten() if (int(i) < half) != (own == 0)})
    rows = others * (4 + 4 * WIDTH)
    found = [n for n in counted if rows <= n <= rows + 3 * 64]
    assert len(found) == 1, (counted, rows)
    engine.destroy()


@pytest.mark.parametrize("width", [5, 64])
def test_short_rows_are_reduced_densely(width: int) -> None:
    """One process: nothing is sent, and any width trains."""
    engine = toy.make(nn.Sequential(nn.Embedding(10, width), nn.Linear(width, 1)), 2, sparse_gradients=True)
    engine.backward(engine(torch.tensor([[1, 2]])).square().mean())
    engine.step()
    engine.destroy()


class Functional(nn.Module):
    """A functional sparse embedding, which no module attribute reveals."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.sparse = nn.Parameter(torch.ones(10, 4)), sparse

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table, sparse=self.sparse)


def test_a_functional_sparse_gradient_is_the_dense_one() -> None:
    for stage in range(4):
        weights = []
        for sparse in (True, False):
            engine = toy.make(Functional(sparse), stage)
            for _ in range(2):
                engine.backward(engine(torch.tensor([1, 2, 2])).sum())
                assert engine.gradient("table").any(1).tolist() == [row in (1, 2) for row in range(10)]
                engine.step()
            weights.append(engine.state_dict()["table"])
            engine.destroy()
        assert torch.equal(*weights)


@pytest.mark.parametrize("kind", [Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_without_an_engine_a_dense_optimizer_refuses_sparse_gradients(kind: Any) -> None:
    """Before any parameter is stepped; inside an engine the same model trains."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Embedding(10, 4, sparse=True))
    optimizer = kind(model.named_parameters(), lr=0.1)
    (model[0](torch.ones(2)) * model[1](torch.tensor([1]))).sum().backward()
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"parameter of shape \(10, 4\) in group \d has a sparse gradient: drop sparse=True"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


class Words(nn.Module):
    """Embeddings with sparse gradients, which are trained, and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(WORDS, 32, sparse=True), nn.EmbeddingBag(64, 32, mode="sum", sparse=True)
        self.head = nn.Linear(32, 8).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.head(self.words(tokens).mean(1)) + self.bag(tokens % 64)[:, :8]).square().mean()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_sparse_adam_steps_the_rows_that_are_used(transport: str) -> None:
    """Moments of other rows do not decay: the steps are torch's with the ranks' gradients added."""
    plain = toy.seeded(Words)
    adam = torch.optim.SparseAdam([plain.words.weight, plain.bag.weight], lr=0.1)
    for step in range(3):
        adam.zero_grad()
        for rank in range(2):
            (plain(tokens(rank, step)) / 2).backward()
        adam.step()
    for stage in cases.stages(transport):
        for keys in ({}, {"sparse_gradients": True}):
            model = toy.seeded(Words)
            optimizer = torch.optim.SparseAdam([model.words.weight, model.bag.weight], lr=0.1)
            settings = toy.settings(stage, transport, optimizer=None, **keys)
            engine = slipstream.initialize(model=model, optimizer=optimizer, config=settings)[0]
            for step in range(3):
                toy.step(engine, tokens(dist.get_rank(), step))
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
            engine.destroy()


def of_rows(lazy: bool, stage: int, transport: str) -> Any:
    """An engine that sends rows, with moments that decay in each step, or only where rows are used."""
    model = toy.seeded(Words) if lazy else toy.seeded(lambda: Bag(sparse=True))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SparseAdam(params, lr=0.1) if lazy else torch.optim.AdamW(params, lr=0.1)
    config = toy.settings(stage, transport, optimizer=None, sparse_gradients=True)
    return slipstream.initialize(model=model, optimizer=optimizer, config=config)[0]


def losses_of(engine: Any, steps: range) -> list[float]:
    """The same four texts in each step, whatever the number of ranks."""
    each = 4 // dist.get_world_size()
    texts = [torch.cat([tokens(rank, step) for rank in range(2)]) for step in steps]
    return [toy.step(engine, text[each * dist.get_rank() :][:each]).item() for text in texts]


def save_rows(folder: Path, lazy: bool) -> list[float]:
    engine = of_rows(lazy, 2, "shared")
    losses_of(engine, range(3))
    engine.save_checkpoint(str(folder))
    losses = losses_of(engine, range(3, 6))
    engine.destroy()
    return losses


def load_rows(folder: Path, lazy: bool, stage: int, transport: str) -> list[float]:
    engine = of_rows(lazy, stage, transport)
    assert engine.load_checkpoint(str(folder))[0] is not None and engine.global_steps == 3
    losses = losses_of(engine, range(3, 6))
    engine.destroy()
    return losses


@pytest.mark.parametrize("lazy", [False, True])
def test_checkpoints_of_rows_load_at_other_sizes_and_stages(lazy: bool, tmp_path: Path) -> None:
    """The uninterrupted run's losses: its bits on as many ranks, else within rounding."""
    expected = run(2, save_rows, tmp_path, lazy)
    assert run(2, load_rows, tmp_path, lazy, 1, "gloo") == expected
    for world, stage, transport in ((4, 3, "gloo"), (1, 0, "auto")):
        results = run(world, load_rows, tmp_path, lazy, stage, transport)
        torch.testing.assert_close(torch.tensor(results).mean(0), torch.tensor(expected).mean(0), rtol=1e-5, atol=0)


@distributed(world_size=2, transports=("gloo",))
def test_deepspeeds_names_about_rows(transport: str) -> None:
    """What scripts read of an engine that sends rows; DeepSpeed's own sums of rows say what to use."""
    model = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 1))
    engine = initialize(model=model, config=toy.settings(1, transport, sparse_gradients=True))[0]
    assert engine.sparse_gradients_enabled() and engine.sparse_tensor_module_names == {"0.weight"} and engine.gradient_average
    every = engine.all_gather_scalar(torch.tensor(dist.get_rank() + 0.5), dp_group=None)
    assert [float(each) for each in every] == [0.5, 1.5]
    with pytest.raises(AttributeError, match='"sparse_gradients": true'):
        engine.sparse_allreduce_bucket([], None)
    engine.destroy()
