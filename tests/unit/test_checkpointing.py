"""`slipstream.activations.recompute`: recomputing is torch's, and what waits in host memory comes back bit for bit, in time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from slipstream.activations import recompute as checkpointing
from slipstream.activations.random_states import tracked
from slipstream.activations.recompute import Arrival, HostMemory, checkpoint


class Fake:
    """Takes the host for a device, and other memory of it for the host. `log`: what it was asked, and what was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.hosts: list[weakref.ref[Tensor]] = []

    def __call__(self, device: torch.device) -> Fake:
        return self

    def send(self, storage: torch.UntypedStorage) -> Arrival:
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.log.append(f"send {storage.nbytes()}")
        host = source.clone()
        self.hosts.append(weakref.ref(host))
        return Arrival(host, lambda: self.log.append("left"))

    def fetch(self, host: Tensor) -> Arrival:
        self.log.append(f"fetch {host.numel()}")
        back = torch.full_like(host, 255)

        def wait() -> None:
            self.log.append("back")
            back.copy_(host)  # not earlier: who does not wait reads 255

        return Arrival(back, wait)


class Block(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        a, b = self.up(x).chunk(2, -1)  # two views of one storage are saved
        y = torch.cat([torch.sigmoid(a) * b, a * b], -1)
        y = self.drop(self.down(y))
        return x + y if scale is None else x + y * scale


def blocks(depth: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(depth))


def gradients(run: Any, layers: nn.ModuleList) -> list[Tensor]:
    """Of the parameters and the input, after `run(block, h)` for each block, with the same draws."""
    torch.manual_seed(1)
    x = torch.randn(8, 16, requires_grad=True)
    h = x
    for block in layers:
        h = run(block, h)
    layers.zero_grad()
    h.square().sum().backward()
    return [x.grad, h.detach(), *(p.grad.clone() for p in layers.parameters())]  # type: ignore[list-item, union-attr]


def equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


def test_checkpoint_is_torch_s_bit_for_bit() -> None:
    layers, scale = blocks(), torch.tensor(0.5, requires_grad=True)
    plain = gradients(lambda block, h: block(h, scale=scale), layers)
    equal(gradients(lambda block, h: torch_checkpoint(block, h, scale=scale, use_reentrant=False), layers), plain)
    equal(gradients(lambda block, h: checkpoint(block, h, scale=scale), layers), plain)
    equal(gradients(lambda block, h: checkpoint(lambda h: checkpoint(block, h, scale=scale), h), layers), plain)


class Apart(nn.Module):
    """A block whose own dropout draws from another random state, as the ranks of sliced layers do."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        with tracked.fork():
            h = nn.functional.dropout(h, 0.5)
        return nn.functional.dropout(self.block(h), 0.2)


def test_a_recomputed_block_draws_from_other_states_as_before() -> None:
    """Also where checkpoints are nested; a third state of the same seed is refused."""
    layers = nn.ModuleList(Apart(block) for block in blocks())  # type: ignore[arg-type]
    ways = (
        lambda block, h: block(h),
        checkpoint,
        lambda block, h: checkpoint(lambda h: checkpoint(block, block(h)), h),
        lambda block, h: block(block(h)),
    )
    results, states = [], []
    try:
        for way in ways:
            tracked.reset()
            tracked.add("model-parallel-rng", 7)
            results.append(gradients(way, layers))
            states.append(tracked.get_states()["model-parallel-rng"])
        equal(results[1], results[0])
        equal(results[2], results[3])
        assert torch.equal(states[0], states[1]) and torch.equal(states[2], states[3]) and not torch.equal(states[0], states[2])
        before = torch.get_rng_state()
        for name, seed in (("model-parallel-rng", 8), ("another", 7)):
            with pytest.raises(ValueError, match=f"there is a random state '{name}' or one with the seed {seed} already"):
                tracked.add(name, seed)
        with pytest.raises(ValueError, match="there is no random state 'another'"), tracked.fork("another"):
            pass
        assert torch.equal(before, torch.get_rng_state())
    finally:
        tracked.reset()


def saved_bytes(run: Any, layers: nn.ModuleList) -> int:
    """Bytes of distinct storages, without the parameters', that autograd holds between forward and backward."""
    sizes: dict[int, int] = {}
    params = {p.untyped_storage()._cdata for p in layers.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in params:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients(run, layers)
    return sum(sizes.values())


def test_only_the_inputs_are_kept() -> None:
    plain, less = (saved_bytes(run, blocks()) for run in (lambda block, h: block(h), checkpoint))
    assert less <= 5 * 8 * 16 * 4 < plain / 8  # four blocks' inputs and the loss's


def test_what_waits_on_the_host_comes_back_bit_for_bit() -> None:
    layers = blocks()
    plain = gradients(lambda block, h: block(h), layers)
    for with_recompute in (False, True):
        fake = Fake()
        host = HostMemory(layers.parameters(), min_bytes=1, transfer=fake)

        def run(block: nn.Module, h: Tensor, host: HostMemory = host, recompute: bool = with_recompute) -> Any:
            if recompute:
                return checkpoint(block, h, host=host)
            with host.saving():
                return block(h)

        for _ in range(2):
            fake.log.clear()
            equal(gradients(run, layers), plain)
            sent, fetched = (sum(line.startswith(word) for line in fake.log) for word in ("send", "fetch"))
            assert fetched < sent, "the last block's had not left"
            assert sent == (4 if with_recompute else 4 * 5), "each storage once: input, up's output, sigmoid's, y, the mask"
            assert fake.log.count("back") >= fetched, "nothing is read before it is there"
        gc.collect()
        assert not any(ref() is not None for ref in fake.hosts), "after the backward nothing is left on the host"


def test_parameters_small_tensors_and_their_views_stay() -> None:
    fake = Fake()
    weight = nn.Parameter(torch.randn(64, 64))
    mask = torch.ones(64, 64)
    host = HostMemory([weight, mask], min_bytes=1024, transfer=fake)
    with host.saving():
        y = (torch.randn(64, 64) @ weight.t()) * mask.t() * weight.view(-1).view(64, 64)
        z = torch.randn(4) * torch.randn(4, requires_grad=True)
    assert fake.log == ["send 16384"] * 2  # the input and the masked product
    torch.autograd.backward(y.sum() + z.sum())


def test_a_call_s_memory_is_free_when_the_next_ends_and_the_one_before_is_fetched_ahead() -> None:
    fake = Fake()
    host = HostMemory(min_bytes=1, transfer=fake)
    h = torch.ones(8, requires_grad=True)
    for call in range(4):
        with host.saving():
            h = h.exp().sin().exp()  # saves two storages, the first one twice
        assert fake.log.count("send 32") == 2 * call + 2 and fake.log.count("left") == 2 * call
    fake.log.clear()
    torch.autograd.backward(h.sum())
    assert fake.log[:5] == ["fetch 32"] * 4 + ["back"], (
        "the fourth is here, and two calls are on their way before the third's is read"
    )
    assert fake.log.count("fetch 32") == 6


def test_a_retained_graph_can_be_used_twice() -> None:
    host = HostMemory(min_bytes=1, transfer=Fake())
    x = torch.randn(8, requires_grad=True)
    with host.saving():
        y = x.exp().sin()
    with host.saving():
        y = y.exp()
    with host.saving():
        y = y.exp()
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_forward_without_a_backward_leaves_nothing(min_bytes: int) -> None:
    host = HostMemory(min_bytes=min_bytes, transfer=Fake())
    x = torch.randn(8, requires_grad=True)
    with host.saving():
        y = x.exp().sin().exp()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_what_is_changed_in_place_while_it_leaves_raises() -> None:
    host = HostMemory(min_bytes=1, transfer=Fake())
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"shape \(8,\).*changed in place"):
        with host.saving():
            y = x.exp()
        y.detach().add_(1)
        with host.saving():
            y.exp()


def test_on_the_host_nothing_moves() -> None:
    layers = blocks()
    host = HostMemory(layers.parameters(), min_bytes=1)
    plain = gradients(lambda block, h: block(h), layers)
    equal(gradients(lambda block, h: checkpoint(block, h, host=host), layers), plain)
    assert not host.parcels


def test_inside_checkpoint() -> None:
    inside: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        inside.append(checkpointing.inside_checkpoint())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward(fn(x).sum())
    assert inside == [False]
    torch.autograd.backward(torch_checkpoint(fn, x, use_reentrant=False).sum())
    assert inside == [False, True, True]
    torch.autograd.backward(torch_checkpoint(fn, x, use_reentrant=True).sum())
    assert inside == [False, True, True, False, True]  # the reentrant forward runs without gradients: nothing to keep
