"""torch.func's transforms of an engine equal those of the model, and do not affect its training."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap
from torch.utils._pytree import tree_leaves

from tests import cases, toy
from tests.pool import distributed


def by_own_parameters(model: nn.Module, x: Tensor) -> Any:
    params = {name: torch.linspace(-0.5, 0.5, param.numel()).view(param.shape) for name, param in toy.Net().named_parameters()}
    return grad(lambda given: functional_call(model, given, x).square().sum())(params)


def by_its_parameters(model: nn.Module, x: Tensor) -> Any:
    return grad(lambda given: functional_call(model, given, x).square().sum())(dict(model.named_parameters()))


TRANSFORMS: tuple[Callable[[Any, Tensor], Any], ...] = (
    lambda model, x: grad(lambda z: model(z).square().sum())(x),
    lambda model, x: grad_and_value(lambda z: model(z).square().sum())(x),
    lambda model, x: vjp(model, x)[1](torch.ones(4, 8)),
    lambda model, x: jacrev(model)(x[:1]),
    lambda model, x: grad(lambda z: grad(lambda y: model(y).tanh().sum())(z).square().sum())(x),
    lambda model, x: vmap(grad(lambda z: model(z).square().sum()))(x),
    lambda model, x: by_own_parameters(getattr(model, "module", model), x),
    lambda model, x: by_its_parameters(getattr(model, "module", model), x),
)


def train(engine: Any, output: Callable[[Any, Tensor], Tensor]) -> Tensor:
    for i in range(2):
        engine.backward(output(engine, toy.floats(engine.rank, i)).square().mean())
        engine.step()
    weights = toy.checksum(engine)
    engine.destroy()
    return weights


@distributed(world_size=2, transports=("shared", "gloo"))
def test_transforms_of_the_engine_are_the_models(transport: str) -> None:
    rank, plain = dist.get_rank(), toy.seeded(toy.Net)
    for stage in cases.stages(transport):
        engine, undisturbed = (toy.make(toy.seeded(toy.Net), stage, transport) for _ in range(2))
        x = toy.floats(rank, 0)
        for number, transform in enumerate(TRANSFORMS):
            for got, wanted in zip(tree_leaves(transform(engine, x)), tree_leaves(transform(plain, x)), strict=True):
                torch.testing.assert_close(got, wanted, msg=lambda text, number=number: f"transform {number}: {text}")
        if stage < 3 and rank == 0:  # no gradient lands, so nothing is reduced, and no other rank is needed
            TRANSFORMS[0](engine, x)
        assert train(engine, lambda model, x: model(x)) == train(undisturbed, lambda model, x: model(x))


@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_engine_trains_through_vmap(transport: str) -> None:
    """Also in fp16, whose loss scale is applied at the outputs."""
    for stage, dtype in ((3, "fp32"), (0, "fp16"), (3, "fp16")):
        grads, half = [], dtype == "fp16"
        for through in (vmap, lambda engine: engine):
            engine = toy.make(toy.seeded(toy.Net), stage, transport, dtype=dtype)
            x = toy.floats(engine.rank, 0)
            engine.backward(through(engine)(x.half() if half else x).square().mean())
            grads.append(engine.gradient("blocks.1.up.weight"))
            engine.destroy()
        assert grads[0].abs().max() > 1e-3
        torch.testing.assert_close(*grads, rtol=1e-2 if half else 1e-5, atol=1e-4 if half else 1e-6)
