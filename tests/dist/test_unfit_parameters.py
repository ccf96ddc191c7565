"""Parameters that an engine cannot train raise an error that names them and says what to do."""

import pytest
import torch
from torch import Tensor, nn

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


class Spectral(nn.Module):
    """As layers of Fourier neural operators have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.modes = nn.Linear(8, 8), nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.inp(x)) * self.modes, n=8)


@distributed(world_size=2)
def test_a_complex_parameter_is_refused_until_it_is_frozen() -> None:
    """At every stage at first, and when it is made to train later; an optimizer's error would come from one rank's step."""
    text = r"'modes' is complex \(torch\.complex64\) .*torch\.view_as_real\(\.\.\.\) of it"
    for stage in (1, 3):
        model = Spectral()
        with pytest.raises(ValueError, match=text):
            toy.make(model, stage)
        model.modes.requires_grad_(False)
        engine = toy.make(model, stage)
        for _ in range(2):
            engine(toy.floats(0, 0)).square().mean().backward()
            engine.step()
        assert engine.state_dict()["modes"].dtype is torch.complex64
        model.modes.requires_grad_()
        with pytest.raises(ValueError, match=text):
            engine(toy.floats(0, 0))
        engine.destroy()
