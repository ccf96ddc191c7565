"""Repeated blocks that compute again, or leave what they save on the host: the same training, in any model, and undone."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.activations import blocks as activation
from slipstream.activations.recompute import HostMemory
from slipstream.config.plan import ActivationPlan
from tests import probe, toy
from tests.unit.test_checkpointing import Fake

RECOMPUTE = {"slipstream": {"activations": "recompute"}}


@dataclasses.dataclass
class Output:
    hidden: Tensor
    nothing: None = None


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda h: h, lambda out: out),
    "tuple": (lambda h: (h, None), lambda out: out[0]),
    "dictionary": (lambda h: {"h": h, "twice": 2 * h}, lambda out: out["twice"] - out["h"]),
    "dataclass": (Output, lambda out: out.hidden),
}


class Block(toy.Block):
    """With dropout, a keyword, running statistics, and a count of its forwards."""

    def __init__(self, kind: str) -> None:
        super().__init__(16)
        self.kind, self.runs = kind, 0
        self.drop, self.statistics = nn.Dropout(0.3), nn.BatchNorm1d(32)

    def forward(self, x: Tensor, *, shift: Tensor | None = None, note: str = "") -> Any:
        self.runs += 1
        inner = self.drop(self.statistics(torch.relu(self.up(self.norm(x)))))
        return KINDS[self.kind][0](x + self.drop(self.down(inner)) + (0 if shift is None else shift))


class Net(nn.Module):
    def __init__(self, kind: str = "tensor", depth: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(8, 16)
        self.shift = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block(kind) for _ in range(depth))

    def call(self, block: nn.Module, h: Tensor) -> Any:
        return block(h, shift=self.shift, note="text")

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = KINDS[self.kind][1](self.call(block, h))
        return h.square().mean()


class Around(Net):
    reentrant = False

    def call(self, block: nn.Module, h: Tensor) -> Any:
        return checkpoint(lambda h: block(h, shift=self.shift), h, use_reentrant=self.reentrant)


class AroundReentrant(Around):
    reentrant = True


def train(model: nn.Module, stage: int = 0, steps: int = 2, **blocks: Any) -> tuple[list[float], int, list[int]]:
    """Losses, a checksum of everything trained, and how often each block ran."""
    engine = toy.make(model, stage, gradient_accumulation_steps=2, **blocks)
    torch.manual_seed(1)
    losses = [float(toy.step(engine, toy.floats(0, i))) for i in range(2 * steps)]
    weights = int(toy.checksum(engine))
    engine.destroy()
    return losses, weights, [block.runs for block in model.blocks]


def net(kind: str = "tensor", cls: type[Net] = Net) -> Any:
    return toy.seeded(partial(cls, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_nothing_but_the_number_of_forwards(kind: str) -> None:
    """Dropout draws the same, statistics move once, frozen inputs are no matter."""
    for frozen in (False, True):
        plain, again = net(kind), net(kind)
        for model in (plain, again):
            model.inp.requires_grad_(not frozen)
        losses, weights, runs = train(plain)
        assert (losses, weights, [2 * n for n in runs]) == train(again, **RECOMPUTE)
        assert runs == [4, 4, 4]


def test_all_stages_alike() -> None:
    results = [train(net(), stage, **blocks)[:2] for stage in (0, 1, 2, 3) for blocks in ({}, RECOMPUTE)]
    assert results[0] == results[1] == results[2] == results[3] and results[4] == results[5] == results[6] == results[7]


def saved_bytes(model: Net, **blocks: Any) -> int:
    """Bytes that wait between forward and backward, the parameters aside."""
    engine = toy.make(model, 0, **blocks)
    weights = {unit.full.untyped_storage()._cdata for unit in probe.units(engine)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine(torch.ones(64, 8)).backward()
    return sum(sizes.values())


def test_what_is_kept_falls_block_by_block() -> None:
    sizes = [
        saved_bytes(net()),
        *(saved_bytes(net(), activation_checkpointing={"number_checkpoints": n}) for n in (1, 2, 3)),
        saved_bytes(net(), **RECOMPUTE),
    ]
    assert sizes[0] - sizes[1] == sizes[1] - sizes[2] > 64 * 16 * 4 * 4 and sizes[2] > sizes[3] == sizes[4]
    assert sizes[4] <= 7 * 64 * 16 * 4, "the input, what the blocks are given, and what the loss keeps"


def test_without_gradients_nothing_is_kept_or_counted() -> None:
    model = net()
    engine = toy.make(model, 0, **RECOMPUTE)
    with torch.no_grad():
        assert not engine(toy.floats(0, 0)).requires_grad
    engine.eval()
    engine(toy.floats(0, 0)).backward()
    assert [block.runs for block in model.blocks] == [3, 3, 3]  # with gradients, evaluation saves memory as well


def test_copies_and_pickles_of_the_model_are_without() -> None:
    model = net()
    engine = toy.make(model, 0, **RECOMPUTE)
    assert isinstance(model.blocks[0].forward, activation.Recomputed)
    assert "shift" in inspect.signature(model.blocks[0].forward).parameters
    other = copy.deepcopy(model)
    assert all(block.forward.__self__ is block and not isinstance(block.forward, activation.Shadow) for block in other.blocks)
    other(toy.floats(0, 0)).backward()
    assert [block.runs for block in other.blocks] == [1, 1, 1] and [block.runs for block in model.blocks] == [0, 0, 0]
    engine.destroy()
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_a_block_pickles_as_its_own() -> None:
    block = Block("tensor")
    shadow = activation.Offloaded(block, HostMemory())
    loaded = pickle.loads(pickle.dumps(block))
    assert loaded.forward.__self__ is loaded
    shadow.remove()
    assert "forward" not in block.__dict__


def test_a_forward_of_the_user_s_stays_under_it_and_over_it() -> None:
    model = net()
    calls: list[str] = []

    def over(name: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return forward(*args, **kwargs)

        return run

    block = model.blocks[0]
    under = block.forward = over("under", block.forward)
    engine = toy.make(model, 0, **RECOMPUTE)
    block.forward = over("over", block.forward)
    engine(toy.floats(0, 0)).backward()
    assert calls == ["over", "under", "under"]
    engine.destroy()
    model(toy.floats(0, 0)).backward()
    assert calls[3:] == ["over", "under"] and block.runs == 3, "what lies under the user's own passes through"
    block.forward = under


@pytest.mark.parametrize("cls", [Around, AroundReentrant])
def test_a_model_that_checkpoints_its_blocks_is_left_to_it(cls: type[Net], caplog: pytest.LogCaptureFixture) -> None:
    expected = train(net(cls=cls))
    caplog.clear()
    assert train(net(cls=cls), **RECOMPUTE) == expected and expected[2] == [8, 8, 8]
    (hint,) = [message for message in caplog.messages if "itself" in message]
    assert "blocks.0" in hint or "blocks.2" in hint


def test_a_model_without_repeated_blocks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    toy.make(nn.Linear(2, 2), 0, **RECOMPUTE)
    assert any("0 of 0 repeated blocks" in message and "activations.checkpoint" in message for message in caplog.messages)


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """What takes this machine's memory for a device's."""
    fake = Fake()
    monkeypatch.setattr(activation, "HostMemory", partial(HostMemory, min_bytes=1, transfer=fake))
    yield fake


def shadowed(model: Net, way: Any = "recompute", **options: Any) -> list[Any]:
    plan = {"num_blocks": None, "inputs_on_host": False, "synchronize": False, "profile": False} | options
    return activation.apply(ActivationPlan(way=way, **plan), model, list(model.parameters()), nullcontext)


def gradients(model: Net) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(toy.floats(0, 0)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("way", "on_host"), [("offload", False), ("recompute", True)])
def test_what_waits_on_the_host_trains_the_same(transfer: Fake, way: str, on_host: bool) -> None:
    expected = gradients(net())
    model = net()
    shadows = shadowed(model, way, inputs_on_host=on_host)
    grads = gradients(model)
    assert all(a.equal(b) for a, b in zip(grads, expected, strict=True))
    sent, fetched = (sum(line.startswith(word) for line in transfer.log) for word in ("send", "fetch"))
    assert sent > fetched > 0 and (sent == 3) is on_host, "the three blocks' inputs, and what they share once"
    assert [block.runs for block in model.blocks] == [1 + on_host] * 3
    for shadow in shadows:
        shadow.remove()
    transfer.log.clear()
    gradients(model)
    assert not transfer.log


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_stay_on_the_device_in_every_stage(transfer: Fake, stage: int) -> None:
    """Also those whose storage is empty between the forward and the backward."""
    results = []
    for way in ("keep", "offload"):
        model = net()
        engine = toy.make(model, stage)
        if way == "offload":
            plan = ActivationPlan(way="offload", num_blocks=None, inputs_on_host=False, synchronize=False, profile=False)
            resident = [unit.full for unit in probe.units(engine)]
            probe.hooks(engine).handles += activation.apply(plan, model, resident, engine.progress.timing)
        torch.manual_seed(1)
        losses = [float(toy.step(engine, toy.floats(0, i))) for i in range(3)]
        results.append((losses, int(toy.checksum(engine))))
        weights = {f"send {unit.full_nbytes}" for unit in probe.units(engine)}
        engine.destroy()
    assert results[0] == results[1]
    assert transfer.log and not weights & set(transfer.log)
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_boundaries_are_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    model = net()
    shadowed(model, synchronize=True)
    loss = model(toy.floats(0, 0))
    assert len(calls) == 2 * 3
    loss.backward()
    assert len(calls) == 4 * 3


# ---- transformers


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=32))
    if name == "t5":
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_transformers_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The cache that they make by default would be written twice; their own checkpointing is not repeated."""
    losses, forwards = {}, {}
    for way, cache in (("keep", False), ("recompute", False), ("recompute", True), ("its own", True)):
        model = tiny(name).train()
        model.config.use_cache = cache
        if way == "its own":
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()  # by version
        runs: list[int] = []
        for module in model.modules():
            if type(module).__name__ in ("LlamaMLP", "GPT2MLP", "T5LayerFF"):
                module.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        engine = toy.make(model, 3, slipstream={"activations": "keep" if way == "keep" else "recompute"})
        torch.manual_seed(1)
        values = losses[way, cache] = []
        for i in range(2):
            ids = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(i))
            loss = engine(input_ids=ids, labels=ids).loss
            values.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        forwards[way, cache] = len(runs)
        engine.destroy()
    plain = losses.pop(("keep", False))
    for values in losses.values():  # products round by where their operands lie in memory, and masks differ where a cache was made
        assert values == pytest.approx(plain, rel=1e-6)
    times = forwards.pop(("keep", False))
    assert set(forwards.values()) == {2 * times} and times > 0
    assert any("itself" in message for message in caplog.messages)
