"""DeepSpeed's utilities on two ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from slipstream.compat.config import DeepSpeedConfig
from slipstream.compat.groups import _create_expert_and_data_parallel
from slipstream.compat.runtime_utils import clip_grad_norm_, get_weight_norm
from slipstream.compat.sequence import _SeqAllToAll
from slipstream.world.watch import PeerError
from tests.pool import distributed


class Mpu:
    """All ranks hold parts of one model."""

    @staticmethod
    def get_model_parallel_group() -> object:
        return dist.group.WORLD

    @staticmethod
    def get_model_parallel_rank() -> int:
        return dist.get_rank()

    @staticmethod
    def get_data_parallel_world_size() -> int:
        return 1


@distributed(world_size=2)
def test_norms_are_the_ranks_together() -> None:
    rank = dist.get_rank()
    param = torch.nn.Parameter(torch.full((4,), 1.0 + rank))
    param.grad = torch.tensor([3.0 + rank, 0.0, 0.0, 0.0])
    assert get_weight_norm(param, mpu=Mpu()) == 2.0  # rank 0 counts parameters that all ranks have
    param.model_parallel = True  # type: ignore[attr-defined]
    assert math.isclose(get_weight_norm([param], mpu=Mpu()), math.sqrt(4 + 16), rel_tol=1e-6)
    assert float(clip_grad_norm_([param], 7.0)) == 3.5 and param.grad[0] == 3.0 + rank  # the mean of 3 and 4
    assert math.isclose(float(clip_grad_norm_([param], 1.0, mpu=Mpu())), 5.0, rel_tol=1e-6)
    torch.testing.assert_close(param.grad[0], torch.tensor((3.0 + rank) / 5), rtol=1e-5, atol=0)

    given = {"train_batch_size": 12, "gradient_accumulation_steps": 2}
    assert [DeepSpeedConfig(given, mpu).train_micro_batch_size_per_gpu for mpu in (None, Mpu())] == [3, 6]


@distributed(world_size=2)
def test_heads_for_tokens() -> None:
    rank = dist.get_rank()
    whole = torch.arange(48.0, dtype=torch.float64).view(1, 4, 6, 2)  # [batch, tokens, heads, d]
    own = whole.chunk(2, 1)[rank].clone().requires_grad_()
    heads = _SeqAllToAll.apply(dist.group.WORLD, own, 2, 1)
    assert torch.equal(heads, whole.chunk(2, 2)[rank])
    back = _SeqAllToAll.apply(dist.group.WORLD, heads * (rank + 1), 1, 2, 0)
    back.square().sum().backward()
    weights = torch.tensor([1.0, 1, 1, 2, 2, 2])[:, None]
    torch.testing.assert_close(own.grad, 2 * own.detach() * weights**2, rtol=0, atol=0)
    with pytest.raises(ValueError, match="2 ranks do not divide dimension 2"):
        _SeqAllToAll.apply(None, own[:, :, :5], 2, 1)
    with pytest.raises(PeerError, match=r"exchange of (12|18) elements"):
        _SeqAllToAll.apply(None, whole[:, : 2 + rank].contiguous(), 2, 1)
    with pytest.raises(ValueError, match="over 3 ranks each"):
        _create_expert_and_data_parallel(3)
    _create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
