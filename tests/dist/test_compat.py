"""DeepSpeed's API on two ranks: models built in shards, gathered parameters, states of a rank's own part."""

import copy
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.checkpoint.errors import CheckpointError
from slipstream.compat import fragments, held, zero
from slipstream.compat.engine import initialize
from slipstream.compat.moe import MoE
from slipstream.parallel import ColumnParallelLinear, RowParallelLinear
from tests import toy
from tests.dist.test_first_values import Peak, Wide
from tests.pool import distributed


@distributed(world_size=2)
def test_a_sharded_model_trains_as_a_complete_one() -> None:
    """Rank 0's values are used, or those of the named modifier rank; each rank keeps a half."""
    rank = dist.get_rank()
    plain = toy.seeded(toy.Lm)
    with torch.no_grad():
        plain.head.weight.fill_(0.25)
        plain.blocks[0].up.weight.mul_(2)
    with held.Init():
        model = toy.seeded(toy.Lm, seed=rank)
        model.blocks[0].up.weight.data.mul_(2)
        skipped = nn.Sequential(nn.utils.skip_init(nn.TransformerEncoderLayer, 4, 2, 8))
    weight = model.head.weight
    assert held.is_held(weight) and weight.ds_tensor.numel() == weight.numel() // 2
    assert all(param.ds_tensor.numel() * 2 == param.ds_numel for param in skipped.parameters())
    with zero.GatheredParameters({weight, *model.parameters()}, modifier_rank=1):  # a set: its order differs by rank
        if rank == 1:
            weight.data.fill_(0.25)
    with zero.GatheredParameters(weight):
        assert weight.eq(0.25).all() and weight.ds_status is held.ZeroParamStatus.AVAILABLE
    ours, reference = (initialize(model=each, config=toy.settings(3))[0] for each in (model, plain))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0, msg=name)
    for i in range(2):
        losses = []
        for engine in (ours, reference):
            losses.append(engine(toy.tokens(rank, i)).item())
            engine.backward(engine(toy.tokens(rank, i)))
            engine.step()
        assert losses[0] == losses[1]
    state = ours._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank > 0)
    whole = reference.state_dict()
    assert state is None or (list(state) == list(whole) and all(torch.equal(state[name], whole[name]) for name in whole))
    ours.destroy()
    reference.destroy()


@distributed(world_size=2)
def test_saved_weights_are_whole() -> None:
    """Also those of sliced layers, and of experts that another rank has."""
    sliced = nn.Sequential(ColumnParallelLinear(8, 6), nn.GELU(), RowParallelLinear(6, 8))
    experts = MoE(8, nn.Linear(8, 8), 4, ep_size=2)
    for stage, model, block in ((1, sliced, {"mesh": {"tp": 2}}), (3, sliced, {"mesh": {"tp": 2}}), (2, experts, {})):
        engine = initialize(model=copy.deepcopy(model), config=toy.settings(stage, slipstream=block))[0]
        assert engine.autotp_size() == (0 if model is experts else 2)
        whole, state = engine.state_dict(), engine._consolidated_16bit_state_dict()
        assert (state is None) == (dist.get_rank() > 0)
        assert state is None or all(torch.equal(state[name], whole[name].to(state[name])) for name in model.state_dict())
        engine.destroy()


class Solo:
    """An mpu of ranks that share one replica."""

    def __init__(self) -> None:
        self.group, _ = dist.new_subgroups(1)

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


class OwnSlice(nn.Module):
    """This rank's part of a weight, with Megatron's attributes."""

    def __init__(self, whole: torch.Tensor, dim: int) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(whole.chunk(2, dim)[dist.get_rank()].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, dim


@distributed(world_size=2)
def test_slices_of_your_own_are_built_in_shards() -> None:
    mpu, whole = Solo(), torch.arange(96.0).view(12, 8)
    for dim in (0, 1):
        with held.Init(mpu=mpu):
            model = nn.Sequential(OwnSlice(whole, dim))
        assert held.is_held(model[0].weight)
        engine, *_ = initialize(model=model, mpu=mpu, config=toy.settings(3))
        assert torch.equal(engine.state_dict()["0.weight"], whole)
        engine.destroy()


@distributed(world_size=2)
def test_a_ranks_own_part_of_a_state() -> None:
    rank = dist.get_rank()
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=toy.settings(3))
    weight = engine.module.blocks[1].down.weight
    engine.backward(engine(toy.tokens(rank, 0)))
    own_part, whole = fragments.safe_get_local_fp32_param(weight), fragments.safe_get_full_fp32_param(weight)
    sizes = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([float(own_part.numel())]))
    assert sum(sizes).item() == weight.numel()  # type: ignore[union-attr]
    fragments.safe_set_local_fp32_param(weight, own_part + 1)
    torch.testing.assert_close(fragments.safe_get_full_fp32_param(weight), whole + 1)
    fragments.safe_set_local_grad(weight, torch.full_like(fragments.safe_get_local_grad(weight), 3.0))
    assert fragments.safe_get_full_grad(weight).eq(3).all()  # type: ignore[union-attr]
    engine.destroy()


@pytest.mark.disk
@distributed(world_size=2, transports=("shared", "gloo"))
def test_ds_tensor_is_the_ranks_shard(transport: str, tmp_path: Path) -> None:
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=toy.settings(3, transport))
    weight = engine.module.blocks[1].down.weight
    for _ in range(2):  # in place: a step changes it
        toy.step(engine, toy.tokens(engine.rank, 0))
        pieces: list[Any] = [None, None]
        dist.all_gather_object(pieces, weight.ds_tensor)
        assert torch.cat(pieces).equal(engine.state_dict()["blocks.1.down.weight"].view(-1))
        assert weight.ds_tensor.ds_numel == weight.ds_tensor.numel() and weight.ds_persist is False
        engine.sleep(device="disk", path=str(tmp_path))
        assert not hasattr(weight, "ds_tensor")
        engine.wake()
    engine.destroy()
    assert not hasattr(weight, "ds_tensor")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@distributed(world_size=2)
def test_a_model_in_ranges_takes_a_block_more_than_they_do() -> None:
    """Of 16 blocks. Shards are freed as the engine copies them: no rank holds its shards twice (8 more blocks)."""
    with Peak() as building, held.Init():
        model = toy.seeded(Wide)
    before = torch.cat([param.ds_tensor[:1] for param in model.parameters()])
    with Peak() as joining:
        engine, *_ = initialize(model=model, config=toy.settings(3, "gloo", optimizer=None))
    assert building.blocks < 3 and joining.blocks < 3, f"{building.blocks:.1f} and {joining.blocks:.1f} of 16 blocks at once"
    state = engine.state_dict()
    firsts = torch.stack([value.view(-1)[engine.rank * value.numel() // 2] for value in state.values()])
    assert torch.equal(firsts, before)
    engine.destroy()


@torch.no_grad()
def change(param: Any, how: str) -> None:
    if how == "in place":
        param[-1, -1] = param[-1, -1]  # counts as a write, whatever the value
    elif how == ".data":
        param.data[0, 0] += 0.5
    elif how == ".data =":
        param.data = param.data + 0.5


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_change_without_modifier_rank_raises_on_all_ranks(transport: str) -> None:
    """Of a sharded model and of an engine's, made on one rank. The values stay, and a change that is undone does not count."""
    with held.Init():
        model = toy.seeded(toy.Lm)
    engines = {stage: initialize(model=toy.seeded(toy.Lm), config=toy.settings(stage, transport))[0] for stage in (0, 3)}
    for holder in (model, *(engine.module for engine in engines.values())):
        weight, params = holder.blocks[1].up.weight, list(holder.parameters())
        with zero.GatheredParameters(weight):
            before = weight.detach().clone()
        for rank, how in enumerate(("in place", ".data", ".data =")):
            said = "shape \\(32, 16\\)" if holder is model else "'blocks.1.up.weight'"
            with pytest.raises(RuntimeError, match=f"{said} was changed inside GatheredParameters.*modifier_rank=0"):
                with zero.GatheredParameters(params):
                    change(weight, how if dist.get_rank() == rank % 2 or how == ".data" else "")
        with zero.GatheredParameters(params):
            for sign in (1, -1):  # as PEFT merges and unmerges an adapter
                weight.data += sign * 0.3 * torch.ones(32, 16)
        with zero.GatheredParameters(params, modifier_rank=0):
            change(weight, ".data")
            with zero.GatheredParameters(params):  # already gathered by the outer one
                assert weight[0, 0] == before[0, 0] + 0.5
            weight.data.copy_(before)
        with zero.GatheredParameters(weight):
            assert torch.equal(weight, before)
    for engine in engines.values():
        toy.step(engine, toy.tokens(engine.rank, 0))
        engine.destroy()


class Positions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(4, 4))
        self.inner = torch.nn.Linear(4, 4)
        with zero.GatheredParameters(self.inner.weight, modifier_rank=None):  # as in transformers' PatchTST
            self.inner.weight.data.fill_(dist.get_rank() + 1.0)


@distributed(world_size=2)
def test_a_constructor_writes_without_modifier_rank() -> None:
    with held.Init():
        model = Positions()
    with zero.GatheredParameters(model.inner.weight):
        assert model.inner.weight.eq(1.0).all(), "the first rank's values count"


class Saved(toy.Lm):
    """Saved by transformers' own method."""

    def save_pretrained(
        self, folder: Path, is_main_process: bool = True, state_dict: dict[str, torch.Tensor] | None = None
    ) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / f"{dist.get_rank()}.pt")


@distributed(world_size=2)
def test_a_copied_model_saves_its_own_weights(tmp_path: Path) -> None:
    engine, *_ = initialize(model=toy.seeded(Saved), config=toy.settings(3))
    with zero.GatheredParameters(engine.module.parameters()):
        average = copy.deepcopy(engine.module)
    with torch.no_grad():
        average.head.weight.fill_(0.25)
    average.save_pretrained(tmp_path, is_main_process=engine.rank == 0)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"], "and not on others, as the engine's"
    assert torch.load(tmp_path / "0.pt")["head.weight"].eq(0.25).all()
    engine.destroy()


@distributed(world_size=2)
def test_a_model_saves_the_state_that_its_caller_has_gathered(tmp_path: Path) -> None:
    """OpenRLHF has rank 0 alone save PEFT's adapters at stage 3, with no state passed."""
    engine, *_ = initialize(model=toy.seeded(Saved), config=toy.settings(3))
    state = engine._consolidated_16bit_state_dict()
    if engine.rank == 0:
        engine.module.save_pretrained(tmp_path)
        saved = torch.load(tmp_path / "0.pt")
        assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
        del state
        gc.collect()
        with pytest.raises(RuntimeError, match="not gathered here"):
            engine.module.save_pretrained(tmp_path)

    def train() -> None:
        engine.backward(engine(toy.tokens(engine.rank, 0)))
        engine.step()

    def write() -> None:
        with zero.GatheredParameters(engine.module.head.bias, modifier_rank=0):
            engine.module.head.bias.data.fill_(3)

    engine.save_checkpoint(tmp_path / "saved")
    for change in (train, write, lambda: engine.load_checkpoint(tmp_path / "saved")):
        stale = engine._consolidated_16bit_state_dict()
        change()
        if engine.rank == 0:
            with pytest.raises(RuntimeError, match="not gathered here"):
                engine.module.save_pretrained(tmp_path)
        assert (stale is None) == (engine.rank != 0), "held until here"
    engine.destroy()


@distributed(world_size=2)
def test_a_state_dict_of_released_parameters_has_their_names_and_shapes(tmp_path: Path) -> None:
    """OpenRLHF looks which buffers are persistent, and which tensors it has not gathered."""
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=toy.settings(3))
    plain, state = toy.seeded(toy.Lm).state_dict(), engine.module.state_dict()
    assert {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in plain.items()}
    assert engine.module.head.state_dict()["weight"] is engine.module.head.weight  # PEFT reads the names of modules_to_save
    with pytest.raises(RuntimeError, match=r"'(head|embedding|blocks\.\d)\..* not gathered here"):
        torch.save(state, tmp_path / f"{engine.rank}.pt")
    with zero.GatheredParameters(engine.module.parameters()):
        state = engine.module.state_dict()
        assert all(torch.equal(value, plain[name]) and not value.requires_grad for name, value in state.items())
        assert all(value.requires_grad for value in engine.module.state_dict(keep_vars=True).values())
    model, weight = engine.module, engine.module.head.weight
    assert model.cpu().to(torch.float32) is model and 0 < weight.partition_numel() < weight.numel()  # as Lightning calls them
    model.register_buffer("scale", torch.ones(2, dtype=torch.float16))
    model.score = nn.Linear(2, 2, dtype=torch.float16)
    score = model.float().score.weight
    assert model.scale.dtype is score.dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"to_empty\(\) would lose the weights.*before deepspeed.initialize"):
        model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"bfloat16 on parameter .* not gathered here"):
        model.bfloat16()
    engine.destroy()
    assert model.cpu().to_empty(device="cpu") is model and not hasattr(weight, "partition_numel")


@distributed(world_size=2)
def test_a_sharded_model_without_an_engine_does_not_compute() -> None:
    """Layers raise, where NaN would come of what the parameters show. Under DeepSpeed their shapes are wrong."""
    makers = (lambda: nn.Linear(4, 4), lambda: nn.Embedding(9, 4), lambda: nn.Conv2d(2, 3, 1), lambda: nn.LayerNorm(4))
    makers += (lambda: nn.MultiheadAttention(4, 2),)
    inputs = ((torch.zeros(1, 4),), (torch.zeros(1, dtype=torch.long),), (torch.zeros(1, 2, 3, 3),), (torch.zeros(1, 4),))
    inputs += ((torch.zeros(3, 1, 4),) * 3,)
    for make, given in zip(makers, inputs, strict=True):
        with held.Init():
            layer = make()
        with pytest.raises(RuntimeError, match=r"a layer uses a parameter of shape .* no engine gathers it: pass the model to"):
            layer(*given)
        with zero.GatheredParameters(layer.parameters()):
            layer(*given)


@distributed(world_size=2)
def test_an_engine_that_cannot_be_made_leaves_the_model_in_ranges() -> None:
    with held.Init():
        model = toy.seeded(toy.Lm)
    with pytest.raises(ValueError, match="gradient_clipping"):
        initialize(model=model, config=toy.settings(3) | {"gradient_cliping": 1.0})
    if dist.get_rank() == 0:  # all ranks raise
        model.head.weight.data[0].zero_()
    for collective in (zero.GatheredParameters(model).__enter__, lambda: initialize(model=model, config=toy.settings(3))):
        with pytest.raises(RuntimeError, match="a view of it was written on a rank"):
            collective()
    assert all(held.is_held(param) for param in model.parameters())
    if dist.get_rank() == 0:
        model.head.weight.data[0].fill_(float("nan"))  # as before
    with zero.GatheredParameters(model.head.weight):
        assert model.head.weight.std() > 0
    initialize(model=model, config=toy.settings(3))[0].destroy()


@distributed(world_size=2)
def test_a_surgery_keeps_deepspeed_s_attributes_true() -> None:
    """Attributes of new, resized and removed parameters; a module built in shards inside keeps its values."""
    marks = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_active_sub_modules", "ds_tensor", "ds_persist")
    for stage in range(4):
        engine, *_ = initialize(model=toy.seeded(Saved), config=toy.settings(stage))
        model, gone = engine.module, engine.module.blocks[2]
        weight = model.head.weight
        known = getattr(weight, "ds_id", None)
        torch.manual_seed(engine.rank)
        with engine.surgery():
            del model.blocks[2]
            model.head.weight.data, model.head.bias.data = torch.ones(60, 16), torch.ones(60)
            model.extra = torch.nn.Linear(3, 5)
            with held.Init():
                model.held = torch.nn.Linear(4, 4)
        params = list(model.parameters())
        for param in params:
            assert [hasattr(param, name) for name in marks] == [stage == 3] * len(marks)
        assert not any(hasattr(param, name) for param in gone.parameters() for name in marks)
        if stage == 3:
            assert len({param.ds_id for param in params}) == len(params) and weight.ds_id == known
            assert weight.ds_shape == (60, 16) and all(param.ds_numel == param.numel() for param in params)
            with zero.GatheredParameters(model.extra.weight):
                assert model.extra.weight.ds_status is held.ZeroParamStatus.AVAILABLE
            assert model.extra.weight.ds_status is held.ZeroParamStatus.NOT_AVAILABLE
            model.save_pretrained(None, is_main_process=False)  # nothing is read
        engine.backward(engine(toy.tokens(engine.rank, 0)))
        grad = fragments.safe_get_full_grad(weight)
        assert grad is not None and grad.shape == (60, 16)
        engine.step()
        for new in (model.extra.weight, model.held.weight):
            master = fragments.safe_get_full_fp32_param(new)
            reference = [torch.empty_like(master) for _ in range(2)]
            dist.all_gather(reference, master)
            assert reference[0].equal(reference[1]) and master.isfinite().all() and master.std() > 0
            fragments.safe_set_full_fp32_param(new, torch.full(new.shape, 2.0))
            assert fragments.safe_get_full_fp32_param(new).eq(2).all()
            assert fragments.safe_get_full_optimizer_state(new, "exp_avg") is not None
        engine.destroy()
        assert not any(hasattr(param, name) for param in params for name in marks)


@distributed(world_size=2)
def test_deepspeeds_assertions(tmp_path: Path) -> None:
    """Different tags with tag_validation "Fail", and the first unused parameter, raise AssertionError on all ranks."""
    zero_block = {"stage": 2, "ignore_unused_parameters": False}
    config = toy.settings(2, zero_optimization=zero_block, checkpoint={"tag_validation": "Fail"})
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=config)
    for behind in (engine.rank, engine.rank == 0 or None):
        with pytest.raises(AssertionError, match="tags differ"):
            engine.save_checkpoint(str(tmp_path), tag=behind)
    engine.save_checkpoint(str(tmp_path), tag=7)
    if engine.rank == 0:  # which has written all of it
        assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
        script = tmp_path / "zero_to_fp32.py"  # run as ./zero_to_fp32.py
        assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env python")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / script.name).symlink_to(tmp_path / "nowhere" / script.name)
    with pytest.raises(CheckpointError, match=r"No such file .*zero_to_fp32"):  # on all ranks
        engine.save_checkpoint(str(tmp_path / "b"))
    engine.backward(engine.module.head.weight.square().sum() + engine(toy.tokens(engine.rank, 0)) * 0)
    engine.step()
    engine.backward(engine.module.embedding(toy.tokens(engine.rank, 0)).square().sum())
    with pytest.raises(AssertionError, match=r"'head.weight' got no gradient .*ignore_unused_parameters"):
        engine.step()
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_one_reduction_of_several_backwards(transport: str) -> None:
    """Inside, a gradient is this rank's own sum so far; the step uses the mean over ranks, as usual."""
    for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16")):
        ours, reference = (
            initialize(model=toy.seeded(toy.Lm), config=toy.settings(stage, transport, dtype=dtype))[0] for _ in range(2)
        )
        alone = toy.seeded(toy.Lm)
        weight = ours.module.blocks[1].up.weight
        with ours.coalesce_grad_reduction():
            assert fragments.safe_get_full_grad(weight) is None
            for i in range(2):
                batch = toy.tokens(ours.rank, i)
                ours.backward(ours(batch))
                reference.backward(reference(batch))
                alone(batch).backward()
                own, mean = fragments.safe_get_full_grad(weight), alone.blocks[1].up.weight.grad
                torch.testing.assert_close(own.float(), mean, rtol=0.1, atol=1e-3)
                assert own.dtype is {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32}[dtype]
            others: list[Any] = [None, None]
            dist.all_gather_object(others, own)
            assert not torch.equal(*others), "nothing is reduced yet"
            for call in (ours.step, ours.no_sync().__enter__, ours.coalesce_grad_reduction().__enter__):
                with pytest.raises(AssertionError, match="no_sync"):
                    call()
        reduced = fragments.safe_get_full_grad(weight)
        torch.testing.assert_close(reduced, (others[0].float() + others[1].float()) / 2, rtol=1e-2, atol=1e-4)
        ours.step()
        reference.step()
        assert abs(ours.global_grad_norm - reference.global_grad_norm) < 1e-2 * reference.global_grad_norm
        with ours.no_sync(), pytest.raises(AssertionError, match="nested inside no_sync"):
            ours.coalesce_grad_reduction().__enter__()
        ours.destroy()
        reference.destroy()


@distributed(world_size=2)
def test_gradients_of_slices_before_one_reduction() -> None:
    """Inside, a gradient is that of this rank's slice, and cannot be set; afterwards it is whole."""
    model = nn.Sequential(ColumnParallelLinear(8, 16, bias=False), RowParallelLinear(16, 4, bias=False))
    engine = initialize(model=model, config=toy.settings(1, slipstream={"mesh": {"tp": 2}}))[0]
    weight = engine.module[0].weight
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(2, 8)).square().sum())
        own = fragments.safe_get_full_grad(weight)
        assert own.shape == weight.shape == (8, 8)
        assert torch.equal(fragments.safe_get_local_grad(weight), own.reshape(-1))
        with pytest.raises(RuntimeError, match=r"'0.weight' is not reduced inside coalesce_grad_reduction"):
            fragments.safe_update_full_grad_vectorized([weight], lambda gradient, param: gradient * 2)
    fragments.safe_update_full_grad_vectorized([weight], lambda gradient, param: gradient * 2)
    whole = fragments.safe_get_full_grad(weight)
    assert whole.shape == (16, 8)
    torch.testing.assert_close(whole.chunk(2)[engine.mesh.tp.index], own * 2)
    assert torch.equal(fragments.safe_get_local_grad(weight), whole.chunk(2)[engine.mesh.tp.index].reshape(-1))
    engine.destroy()


@distributed(world_size=2)
def test_a_schedule_of_torch_by_name_follows_the_engine_without_a_warning() -> None:
    """It steps the returned optimizer's rates; torch warns if that optimizer's step is not the one that it has wrapped."""
    config = toy.settings(2, scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}})
    engine, optimizer, _, scheduler = initialize(model=toy.seeded(toy.Lm), config=config)
    rate = optimizer.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy.step(engine, toy.tokens(engine.rank, 0))
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()  # a user's own, made of it
    assert scheduler.optimizer is optimizer and optimizer.param_groups[0]["lr"] == pytest.approx(rate * 0.5 * 0.1)
    engine.destroy()


@distributed(world_size=2)
def test_gradients_are_averaged_or_summed_as_the_script_sets(tmp_path: Path) -> None:
    for stage in (1, 3):
        config = toy.settings(stage, optimizer={"type": "SGD", "params": {"lr": 0.0}})
        engine, *_ = initialize(model=toy.seeded(toy.Lm), config=config)
        norms = []
        for averages in (True, False, True):
            engine.gradient_average = averages
            toy.step(engine, toy.tokens(0, 0))
            norms.append(engine.get_global_grad_norm())
        assert norms == [norms[0], pytest.approx(2 * norms[0]), norms[0]] and engine.gradient_average
        engine.backward(engine(toy.tokens(0, 0)))
        with pytest.raises(RuntimeError, match="gradient_average set after 1 backward passes"):
            engine.gradient_average = False
        engine.destroy()
    measured = toy.settings(1, slipstream={"noise_scale_every": 1}, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=measured)
    with pytest.raises(ValueError, match="noise_scale_every measure means"):
        engine.gradient_average = False
    engine.destroy()
