"""DeepSpeed's utilities on two ranks."""

import math

import torch
import torch.distributed as dist

from slipstream.compat.config import DeepSpeedConfig
from slipstream.compat.runtime_utils import CheckOverflow, PartitionedTensor, clip_grad_norm_, get_grad_zeros, get_weight_norm
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
def test_parts_norms_and_overflow_are_the_ranks_together() -> None:
    rank = dist.get_rank()
    whole = torch.arange(15.0, dtype=torch.bfloat16).view(3, 5)
    ours = PartitionedTensor(whole, dist.group.WORLD)
    assert ours.local_size() == (8 - rank,) and ours.to_meta().tolist() == [2, 3, 5, 2, rank, 0, 8, 15]
    again = PartitionedTensor.from_meta(ours.to_meta(), ours.data(), dist.group.WORLD)
    assert torch.equal(ours.full(), whole) and torch.equal(again.full(torch.device("cpu")), whole)

    param = torch.nn.Parameter(torch.full((4,), 1.0 + rank))
    param.grad = torch.tensor([3.0 + rank, 0.0, 0.0, 0.0])
    assert get_weight_norm(param, mpu=Mpu()) == 2.0  # rank 0 counts parameters that all ranks have
    param.model_parallel = True  # type: ignore[attr-defined]
    assert math.isclose(get_weight_norm([param], mpu=Mpu()), math.sqrt(4 + 16), rel_tol=1e-6)
    assert get_grad_zeros([param], mpu=Mpu()) == 6.0
    assert float(clip_grad_norm_([param], 7.0)) == 3.5 and param.grad[0] == 3.0 + rank  # the mean of 3 and 4
    assert math.isclose(float(clip_grad_norm_([param], 1.0, mpu=Mpu())), 5.0, rel_tol=1e-6)
    torch.testing.assert_close(param.grad[0], torch.tensor((3.0 + rank) / 5), rtol=1e-5, atol=0)

    if rank == 1:
        param.grad[0] = math.inf
    results = [
        check.check([[param]]) for check in (CheckOverflow(), CheckOverflow(mpu=Mpu()), CheckOverflow(zero_reduce_scatter=True))
    ]
    assert results == [rank == 1, True, True]
    assert CheckOverflow().check_using_norm([-1.0 if rank else 1.0])

    given = {"train_batch_size": 12, "gradient_accumulation_steps": 2}
    assert [DeepSpeedConfig(given, mpu).train_micro_batch_size_per_gpu for mpu in (None, Mpu())] == [3, 6]
