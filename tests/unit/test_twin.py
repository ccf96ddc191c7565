"""The twin against the plainest loops there are: what parity is measured with must itself be right."""

import pytest
import torch
from torch import Tensor, nn

from tests import twin


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x.to(next(model.parameters()).dtype))
    return out.float().square().mean()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.fixture
def data() -> Tensor:
    return torch.randn(4, 2, 3, 6, 5, generator=torch.Generator().manual_seed(1))  # step, micro, rank, batch, dim


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_fp32_is_training_on_the_whole_batch(model: nn.Module, data: Tensor, clip: float) -> None:
    run = twin.train(model, loss, [[list(micro) for micro in step] for step in data], clip=clip)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, step in enumerate(data):
        reference = loss(model, step.flatten(0, 2))
        reference.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        torch.testing.assert_close(run.losses[i].mean(), reference.detach())
        torch.testing.assert_close(run.norms[i], norm)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.weights[name], parameter.detach())
    assert run.losses.shape == (4, 2, 3) and (clip == 0 or (run.norms > clip).all())


def test_bf16_steps_fp32_masters_on_rounded_gradients(model: nn.Module, data: Tensor) -> None:
    """Accumulation 1, written out for one step: gradients rounded once after the sum over ranks."""
    model = model.bfloat16()
    ranks = list(data[0, 0])
    run = twin.train(model, loss, [[ranks]], dtype=torch.bfloat16)
    grads = [torch.autograd.grad(loss(model, x), list(model.parameters())) for x in ranks]
    masters = [p.detach().float() for p in model.parameters()]
    for master, *parts in zip(masters, *grads, strict=True):
        total = parts[0].float() + parts[1].float() + parts[2].float()
        master.grad = (total * (1 / 3)).bfloat16().float()
    torch.optim.AdamW(masters, lr=1e-3).step()
    for expected, master, weight in zip(masters, run.masters.values(), run.weights.values(), strict=True):
        assert torch.equal(expected, master.detach()) and torch.equal(weight, expected.bfloat16())


def test_gradients_are_kept_in_fp32_above_accumulation_1(model: nn.Module, data: Tensor) -> None:
    steps = [[list(micro) for micro in step] for step in data]
    model = model.bfloat16()
    default, fp32, bf16 = (
        twin.train(model, loss, steps, dtype=torch.bfloat16, accum_dtype=accum) for accum in (None, torch.float32, torch.bfloat16)
    )
    assert torch.equal(default.norms, fp32.norms) and not torch.equal(default.norms, bf16.norms)


def test_fp16_scale_leaves_no_trace_but_rounding(model: nn.Module, data: Tensor) -> None:
    model = model.half()
    runs = [twin.train(model, loss, [[[x] for x in data[0, 0]]], dtype=torch.float16, loss_scale=scale) for scale in (1.0, 1024.0)]
    assert torch.equal(runs[0].losses, runs[1].losses)
    torch.testing.assert_close(runs[0].norms, runs[1].norms, rtol=1e-3, atol=0)


def test_unused_is_zero_frozen_stays_tied_counts_once() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({k: nn.Linear(3, 3, bias=False) for k in ("used", "tied", "unused", "frozen")})
    model["tied"].weight = model["used"].weight
    model["frozen"].requires_grad_(False)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def tied_loss(module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.ModuleDict)
        out: Tensor = module["frozen"](module["tied"](module["used"](x)))
        return out.square().mean()

    run = twin.train(model, tied_loss, [[[torch.ones(2, 3)]]])
    assert set(run.weights) == {"used.weight", "unused.weight"}
    assert not torch.equal(run.weights["used.weight"], start["used.weight"])
    torch.testing.assert_close(run.weights["unused.weight"], start["unused.weight"] * (1 - 1e-3 * 1e-2))
    assert torch.equal(model.get_parameter("used.weight"), start["used.weight"]), "the model given is not touched"
