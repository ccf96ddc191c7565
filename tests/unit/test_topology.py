"""DeepSpeed's topology: coordinates, groups and names of ranks; the grid with real groups of two processes."""

import math

import pytest
import torch
import torch.distributed as dist

from slipstream.parallel.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _prime_factors,
)
from tests.pool import distributed


def test_ranks_are_row_major() -> None:
    topo = ProcessTopology(["a", "b", "c"], [2, 3, 4])
    assert topo.world_size() == 24 and [topo.get_dim(axis) for axis in "abcx"] == [2, 3, 4, 0]
    assert [topo.get_rank(a=a, b=b, c=c) for a in range(2) for b in range(3) for c in range(4)] == list(range(24))
    assert all(topo.get_rank(**topo.get_coord(rank)._asdict()) == rank for rank in range(24))
    assert topo.get_coord(23) == topo.ProcessCoord(1, 2, 3) and topo.get_coord(4).b == 1
    assert topo.get_axis_list("a", 1) == list(range(12, 24)) and topo.filter_match(b=1, c=1) == [5, 17]
    with pytest.raises(ValueError, match="filter_match"):
        topo.get_rank(a=0)
    with pytest.raises(ValueError, match="outside"):
        topo.get_rank(a=2, b=0, c=0)
    with pytest.raises(ValueError, match="rank 24"):
        topo.get_coord(24)


def test_groups_and_names_of_a_3d_topology() -> None:
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.get_axis_names() == ["pipe", "data", "model"]
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topo.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topo.get_axis_comm_lists("other") == []
    assert [topo.get_rank_repr(rank) for rank in range(4)] == ["model_00", "model_01"] * 2
    assert topo.get_rank_repr(7, omit_axes=[], inner_sep="+", outer_sep="/") == "pipe+01/data+01/model+01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_prime_factors() -> None:
    for number in range(1, 50):
        primes = _prime_factors(number)
        assert math.prod(primes) == number and all(_prime_factors(prime) == [prime] for prime in primes)
    with pytest.raises(ValueError, match="positive"):
        _prime_factors(0)


@distributed(world_size=2)
def test_a_grid_has_groups() -> None:
    rank = dist.get_rank()
    for num_pp, num_dp in ((2, 1), (1, 2)):
        grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp, num_dp))
        assert grid.get_pipe_parallel_world_size() == num_pp and grid.get_data_parallel_world_size() == num_dp
        assert grid.is_first_stage == (grid.get_stage_id() == 0) and grid.stage_id == (rank if num_pp == 2 else 0)
        assert grid.is_last_stage == (grid.get_stage_id() == num_pp - 1)
        for group, ranks in (
            (grid.get_pipe_parallel_group(), grid.pp_group),
            (grid.get_data_parallel_group(), grid.dp_group),
            (grid.get_slice_parallel_group(), [rank]),
            (grid.get_model_parallel_group(), grid.pp_group),
        ):
            total = torch.tensor(rank)
            dist.all_reduce(total, group=group)
            assert total == sum(ranks) and rank in ranks
        assert grid.stage_to_global(num_pp - 1) == (1 if num_pp == 2 else rank)
        assert grid.get_tensor_model_parallel_world_size() == 1 and grid.get_slice_parallel_rank() == 0
    assert PipelineParallelGrid().get_pipe_parallel_world_size() == 2
    with pytest.raises(ValueError, match="4 ranks, and there are 2"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 2))
