"""DeepSpeed's names over two ranks: models built in ranges, parameters shown whole, states of a rank's own part."""

import torch
import torch.distributed as dist

from slipstream.compat import fragments, zero
from slipstream.compat.engine import initialize
from tests import toy
from tests.pool import distributed


@distributed(world_size=2)
def test_a_model_in_ranges_trains_as_one_that_was_whole() -> None:
    """The first rank's values count, written by whichever rank is named; each rank keeps a half."""
    rank = dist.get_rank()
    plain = toy.seeded(toy.Lm)
    with torch.no_grad():
        plain.head.weight.fill_(0.25)
        plain.blocks[0].up.weight.mul_(2)
    with zero.Init():
        model = toy.seeded(toy.Lm, seed=rank)
        model.blocks[0].up.weight.data.mul_(2)
    weight = model.head.weight
    assert zero.is_held(weight) and weight.ds_tensor.numel() == weight.numel() // 2
    with zero.GatheredParameters({weight, *model.parameters()}, modifier_rank=1):  # a set: its order differs from rank to rank
        if rank == 1:
            weight.data.fill_(0.25)
    with zero.GatheredParameters(weight):
        assert weight.eq(0.25).all() and weight.ds_status is zero.ZeroParamStatus.AVAILABLE
        weight.data.zero_()
    ours, theirs = (initialize(model=each, config=toy.settings(3))[0] for each in (model, plain))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0, msg=name)
    for i in range(2):
        losses = []
        for engine in (ours, theirs):
            losses.append(engine(toy.tokens(rank, i)).item())
            engine.backward(engine(toy.tokens(rank, i)))
            engine.step()
        assert losses[0] == losses[1]
    state = ours._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank > 0)
    whole = theirs.state_dict()
    assert state is None or (list(state) == list(whole) and all(torch.equal(state[name], whole[name]) for name in whole))
    ours.destroy()
    theirs.destroy()


@distributed(world_size=2)
def test_a_ranks_own_part_of_a_state() -> None:
    rank = dist.get_rank()
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=toy.settings(3))
    weight = engine.module.blocks[1].down.weight
    engine.backward(engine(toy.tokens(rank, 0)))
    mine, whole = fragments.safe_get_local_fp32_param(weight), fragments.safe_get_full_fp32_param(weight)
    sizes = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([float(mine.numel())]))
    assert sum(sizes).item() == weight.numel()  # type: ignore[union-attr]
    fragments.safe_set_local_fp32_param(weight, mine + 1)
    torch.testing.assert_close(fragments.safe_get_full_fp32_param(weight), whole + 1)
    fragments.safe_set_local_grad(weight, torch.full_like(fragments.safe_get_local_grad(weight), 3.0))
    assert fragments.safe_get_full_grad(weight).eq(3).all()  # type: ignore[union-attr]
    engine.destroy()
