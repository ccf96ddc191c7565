"""Parameters that an engine cannot train raise an error that names them and says what to do."""

import pytest

from tests import toy
from tests.pool import distributed


@distributed(world_size=2)
def test_a_distributed_tensor_is_not_called_quantized() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for trainable in (True, False):
        model = toy.Net().requires_grad_(trainable)
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"blocks.0.up": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' is a DTensor .*over 2 ranks.*before parallelize_module"):
            toy.make(model, 1)
