"""Parameters that an engine cannot train raise an error that names them and says what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import toy
from tests.pool import distributed

STAGES = (0, 1, 2, 3)


class Functional(nn.Module):
    """A functional sparse embedding, which no module attribute reveals."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, sparse=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_before_anything_is_sharded(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' gets a sparse gradient.*`module\.sparse = False`"):
        toy.make(model, 3)
    tokens = torch.tensor([[1, 2, 2]])
    model[0].sparse = False
    engine = toy.make(model, 3)  # the fix works, and the refusal changed nothing
    engine(tokens).sum().backward()
    assert engine.gradient("0.weight").any(1).tolist() == [row in (1, 2) for row in range(10)]
    engine.destroy()
    model[0].sparse, model[0].weight.requires_grad = True, False
    engine = toy.make(model, 3)  # frozen: it has no gradient
    engine(tokens).sum().backward()
    engine.destroy()


def test_a_sparse_gradient_names_its_parameter() -> None:
    for stage in STAGES:
        engine = toy.make(Functional(), stage)
        with pytest.raises(ValueError, match=r"'table' gets a sparse gradient.*drop sparse=True"):
            engine(torch.tensor([1, 2])).sum().backward()
        engine.destroy()


@distributed(world_size=2)
def test_a_distributed_tensor_is_not_called_quantized() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for trainable in (True, False):
        model = toy.Net().requires_grad_(trainable)
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"blocks.0.up": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' is a DTensor .*over 2 ranks.*before parallelize_module"):
            toy.make(model, 1)
