"""A quantized, frozen base with adapters: bit-identical in every stage, and stored, sent and saved as bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream import checkpoint
from slipstream.compat.weights import clone_tensors_for_torch_save, consolidated
from slipstream.quantized import QuantizedLinear
from slipstream.train.planning import explain
from tests import cases, probe, toy, twin
from tests.dist.test_events import wire
from tests.pool import distributed, run

pytestmark = pytest.mark.disk

STAGES = cases.STAGES


class Lora(nn.Module):
    """A frozen base layer plus the product of two trained thin matrices."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)  # type: ignore[arg-type]
        self.b = nn.Linear(rank, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


def with_lora(model: Any) -> Any:
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return model


def lora_lm(bits: int = 4, *, dim: int = 32, block: int = 16, seed: int = 0) -> Any:
    """An `Lm` with only its adapters trained."""
    model = toy.seeded(lambda: toy.Lm(dim=dim), seed).requires_grad_(False)
    return with_lora(slipstream.quantize(model, bits=bits, block=block, skip=("head",)))


def train(engine: Any, steps: int = 3) -> Tensor:
    return torch.stack([toy.step(engine, toy.tokens(engine.rank, i)) for i in range(steps)])


OFFLOADS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host": {"stage": 3, "offload_param": {"device": "cpu"}},
    "disk": {"stage": 3, "offload_param": {"device": "nvme"}},
}


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("bits", [4, 8])
def test_losses_are_the_same_bits_in_every_stage(bits: int, transport: str, tmp_path: Path) -> None:
    losses = {}
    for name, zero in OFFLOADS.items():
        if name == "disk":
            if transport == "shared":
                continue
            zero = zero | {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
        engine = toy.make(lora_lm(bits), zero["stage"], transport, dtype="bf16", zero_optimization=zero)
        losses[name] = train(engine)
        engine.destroy()
    for name, each in losses.items():
        assert torch.equal(each, losses["stage 0"]), (name, each, losses["stage 0"])
    batches = [[[toy.tokens(rank, i) for rank in range(2)]] for i in range(3)]
    alone = twin.train(
        lora_lm(bits),
        lambda model, batch: model(batch),
        batches,
        dtype=torch.bfloat16,
        optimizer=lambda masters: torch.optim.AdamW(masters.values(), lr=1e-2),
    ).losses[:, 0, dist.get_rank()]
    assert losses["stage 0"][0] == alone[0] and len(alone.unique()) == 3
    torch.testing.assert_close(losses["stage 0"], alone, rtol=0, atol=2e-3)  # torch's AdamW rounds differently


class Scaled(torch.Tensor):
    """A wrapper subclass like torchao's tensors: codes and a scale per row, presented as a float matrix."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Scaled":
        return cls(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale), args[0].dtype)
        if func is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        numbers = [arg.codes.to(arg.dtype) * arg.scale.to(arg.dtype) if isinstance(arg, Scaled) else arg for arg in args]
        return func(*numbers, **(kwargs or {}))


def wrapped_lm() -> Any:
    """An `Lm` with `Scaled` weights under adapters."""
    model = toy.seeded(lambda: toy.Lm(dim=32))
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            layer = getattr(block, name)
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            wrapped = Scaled((layer.weight / scale).round().to(torch.int8), scale.clone(), torch.bfloat16)
            layer.weight = nn.Parameter(wrapped, requires_grad=False)
            setattr(block, name, Lora(layer))
    return model


@distributed(world_size=2, transports=("shared", "gloo"))
def test_wrapper_subclasses_are_sharded_by_their_inner_tensors(transport: str) -> None:
    losses = []
    for stage in cases.stages(transport):
        model = wrapped_lm()
        weight = model.blocks[0].up.base.weight
        engine = toy.make(model, stage, transport, dtype="bf16")
        losses.append(train(engine))
        assert model.blocks[0].up.base.weight is weight and type(weight) is Scaled
        names = {name: unit for unit in probe.units(engine) for name in unit.names}
        codes, scale = names["blocks.0.up.base.weight.codes"], names["blocks.0.up.base.weight.scale"]
        assert codes.dtypes.weights == torch.int8 and scale.dtypes.weights == torch.float32  # not the config's bf16
        if stage == 3:
            assert codes.weights.nbytes == 2 * 64 * 32 // 2
            with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.base\.weight\.codes.*gathered"):
                weight + 1
        engine.destroy()
    assert all(torch.equal(each, losses[0]) for each in losses), losses


@distributed(world_size=2)
def test_consolidated_states_hold_wrapper_subclasses() -> None:
    """Under all their names, complete, and without the base if frozen parameters are excluded."""
    model = wrapped_lm()
    model.blocks[2].up.base = model.blocks[1].up.base
    engine = toy.make(model, 3, "gloo", dtype="bf16")
    train(engine, 1)
    expected, results = engine.state_dict(), consolidated(engine)
    some = consolidated(engine, exclude_frozen=True)
    train(engine, 1)  # the gathered copy is freed
    assert (results is None) == (some is None) == (engine.rank > 0)
    if results is not None and some is not None:
        assert list(results) == list(expected)
        assert list(some) == [name for name in results if name.endswith((".a.weight", ".b.weight"))]
        for name, value in expected.items():
            ours, reference = (each.codes if isinstance(each, Scaled) else each for each in (results[name], value))
            assert type(results[name]) is type(value) and torch.equal(ours, reference), name
        assert results["blocks.2.up.base.weight"] is results["blocks.1.up.base.weight"] is not results["blocks.0.up.base.weight"]
        cloned = clone_tensors_for_torch_save(results)
        assert torch.equal(cloned["blocks.0.up.base.weight"].codes, results["blocks.0.up.base.weight"].codes)
        assert torch.equal(cloned["blocks.1.up.base.weight"].codes, results["blocks.1.up.base.weight"].codes)
        assert cloned["blocks.1.up.base.weight"] is cloned["blocks.2.up.base.weight"]
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_in_storage_on_the_wire_and_of_the_optimizer(bits: int) -> None:
    """Stage 3: half the bytes on each rank, gathered twice per step; only adapters have gradients and states."""
    blocks, numel = 3, 2 * 64 * 128
    packed = {4: 17, 8: 33}[bits] * numel // 32  # 0.53125 or 1.03125 bytes a parameter
    with wire(pytest.MonkeyPatch()) as sent:
        engine = toy.make(lora_lm(bits, dim=64, block=64), 3, "gloo", dtype="bf16", data_types={"grad_accum_dtype": "bf16"})
        for i in range(3):
            sent.clear()
            toy.step(engine, toy.tokens(engine.rank, i))
        gathered = [nbytes for name, nbytes in sent if name == "all_gather"]
    codes = [unit for unit in probe.units(engine) if unit.dtypes.weights == torch.uint8]
    assert [unit.weights.nbytes for unit in codes] == [packed // 2] * blocks
    assert all(unit.grads is None for unit in codes)
    assert all(probe.has_moments(engine, unit) == unit.trainable for unit in probe.units(engine))
    assert gathered.count(packed // 2) == 2 * blocks, gathered
    adapters = sum(unit.layout.numel for unit in probe.units(engine) if unit.trainable)
    wired = sum(nbytes for name, nbytes in sent if name != "all_reduce")
    results = explain.of_states(engine.states, toy.tokens(engine.rank, 0))
    assert explain.parts_of(engine.module, engine.plan, 2) == list(results.parts)
    everything = sum(unit.weights.nbytes for unit in probe.units(engine))
    assert sum(line.nbytes for line in results.rest if line.what == "weights") == everything
    assert sum(line.nbytes for line in results.rest if line.what == "moments") == 8 * adapters // 2
    assert results.flow.wire == wired
    engine.destroy()


def save_somewhere(path: Path, contents: str) -> tuple[Tensor, Tensor]:
    engine = toy.make(lora_lm(seed=1), 3, "gloo", dtype="bf16")
    train(engine)
    engine.save_checkpoint(str(path), tag="x", contents=contents)
    result = toy.checksum(engine), train(engine, 1)
    engine.destroy()
    return result


def load_elsewhere(path: Path, stage: int, seed: int) -> tuple[Tensor, Tensor]:
    engine = toy.make(lora_lm(seed=seed), stage, dtype="bf16")
    engine.load_checkpoint(str(path), tag="x")
    result = toy.checksum(engine), train(engine, 1)
    engine.destroy()
    return result


def test_bytes_are_saved_and_loaded_at_other_worlds_and_stages(tmp_path: Path) -> None:
    (expected, loss), *_ = run(2, save_somewhere, tmp_path, "all")
    assert run(1, load_elsewhere, tmp_path, 0, 2)[0][0] == expected
    assert run(2, load_elsewhere, tmp_path, 2, 2)[0] == (expected, loss)
    assert run(4, load_elsewhere, tmp_path, 3, 2)[0][0] == expected


def test_adapters_alone_are_saved_and_loaded_onto_the_base(tmp_path: Path) -> None:
    (expected, _), *_ = run(2, save_somewhere, tmp_path, "adapters")
    names = checkpoint.load_metadata(str(tmp_path), "x").tensors
    assert names and all(name.endswith((".a.weight", ".b.weight")) for name in names), names
    assert run(1, load_elsewhere, tmp_path, 3, 1)[0][0] == expected
    assert run(1, load_elsewhere, tmp_path, 3, 2)[0][0] != expected  # another base


@distributed(world_size=2)
def test_files_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    """No rank holds float weights or the bytes of other ranks. The bytes equal those of `quantize` in memory."""
    from safetensors.torch import save_file

    source = toy.seeded(toy.Lm).bfloat16()
    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in source.state_dict().items()}, tmp_path / "model.safetensors")
    dist.barrier()
    expected = slipstream.quantize(source.requires_grad_(False), block=16, skip=("head",)).state_dict()
    with slipstream.zero.Init():
        model = toy.Lm()
    slipstream.quantize(model.requires_grad_(False), block=16, skip=("head",))
    assert isinstance(model.blocks[0].up, QuantizedLinear) and model.blocks[0].up.weight.is_meta
    slipstream.zero.load(model, tmp_path)
    engine = toy.make(model, 3, dtype="bf16", optimizer=None)
    results = engine.state_dict()
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], value) for name, value in expected.items())
    engine.destroy()


@distributed(world_size=1)
def test_a_layer_of_two_parents_is_the_same_in_both() -> None:
    model = toy.seeded(toy.Lm)
    model.blocks[1].up, model.blocks[1].down = model.blocks[0].up, model.blocks[0].down
    slipstream.quantize(model, block=16, skip=("head", "blocks.1.down"))
    first, second, *_ = model.blocks
    assert type(first.up) is QuantizedLinear and first.up is second.up
    assert type(first.down) is nn.Linear and first.down is second.down, "named by any of its names"


@distributed(world_size=1)
def test_unsupported_uses_raise() -> None:
    model = lora_lm()
    with pytest.raises(ValueError, match=r"no nn\.Linear of Lm is left to quantize"):
        slipstream.quantize(toy.Lm(), skip=("*",))
    with pytest.raises(
        ValueError, match=r"skip=\['heads'\] matches the name of no nn\.Linear of Lm; its first are blocks\.0\.up, "
    ):
        slipstream.quantize(toy.Lm(), skip=("*.up", "heads"))
    broken = toy.Lm()
    broken.blocks[1].up.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'blocks\.1\.up' has non-finite weights"):
        slipstream.quantize(broken)
    served = toy.make(toy.Lm(), 3)
    with pytest.raises(ValueError, match=r"belongs to an engine, which trains it.*after engine\.destroy\(\), or .*save_pretrained"):
        slipstream.quantize(served.module, "int8")
    served.destroy()
    assert "bits=8" in repr(slipstream.quantize(served.module, "int8"))
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.a' is trained.*Quantize before adapters are added"):
        slipstream.quantize(with_lora(toy.Lm().requires_grad_(False)))
    assert type(broken.blocks[0].up) is nn.Linear
    with pytest.raises(RuntimeError, match="floating point"):  # torch's own
        model.blocks[0].up.base.weight.requires_grad_(True)
    trained = wrapped_lm()
    trained.blocks[0].up.base.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.up\.base\.weight' is quantized \(its parts: codes, scale\).*requires_grad_\(False\)"
    ):
        toy.make(trained, 0)


@distributed(world_size=(2, 4) if cases.EVERYTHING else 2, transports=("gloo",))
@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_hugging_face_folder_holds_the_numbers(bits: int, world_size: int, transport: str, tmp_path: Path) -> None:
    """The dequantized values of every row, even if a rank's range cuts it; adapters and other parameters unchanged."""
    from safetensors.torch import load_file

    for name, zero in OFFLOADS.items():
        if world_size == 4 and name != "stage 3":
            continue
        if name == "disk":
            zero = zero | {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
        model = lora_lm(bits, dim=40)
        expected = {
            f"{path}.weight": layer.dequantized() for path, layer in model.named_modules() if type(layer) is QuantizedLinear
        }
        engine = toy.make(model, zero["stage"], transport, dtype="bf16", zero_optimization=zero)
        train(engine, 1)
        unit = next(unit for unit in probe.units(engine) if unit.dtypes.weights == torch.uint8)
        inside = [
            (edge - slot.offset) % slot.shape[1] for slot in unit.layout.slots for edge in unit.span if edge in range(*slot.span)
        ]
        assert world_size < 4 or any(inside), "the ranges cut rows"
        for dtype in (None, "fp32"):
            folder = tmp_path / f"{name} {dtype}"
            engine.save_pretrained(str(folder), dtype=dtype, max_shard_size="20KB")
            state = engine.state_dict()
            if engine.rank == 0:
                held = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
                assert held.keys() == state.keys() and len(expected) == 6
                for key, value in held.items():
                    assert value.dtype is (torch.float32 if dtype else torch.bfloat16)
                    assert value.bfloat16().equal(expected[key].bfloat16() if key in expected else state[key]), (name, key)
                    assert dtype is None or key not in expected or value.equal(expected[key])
        engine.save_pretrained(str(tmp_path / f"{name} adapters"), only_trainable=True)
        engine.destroy()


@distributed(world_size=2)
def test_another_library_s_codes_are_in_no_folder(tmp_path: Path) -> None:
    for stage in (0, 3):
        engine = toy.make(wrapped_lm(), stage, dtype="bf16")
        with pytest.raises(
            ValueError, match=r"codes of 'blocks\.0\.up\.base\.weight', which .*only_trainable=True writes the adapters"
        ):
            engine.save_pretrained(str(tmp_path / "model"))
        assert not (tmp_path / "model").exists()
        engine.destroy()


# ---- between steps


def bare_lm(kind: str) -> tuple[Any, Any]:
    """An `Lm` with `up` and `down` quantized (if late, not yet), and the function that adds adapters to it."""
    model = toy.seeded(lambda: toy.Lm(dim=32)).requires_grad_(False)
    if kind == "wrapped":
        for block in model.blocks:
            for layer in (block.up, block.down):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                codes = (layer.weight / scale).round().to(torch.int8)
                layer.weight = nn.Parameter(Scaled(codes, scale.clone(), torch.bfloat16), requires_grad=False)
    elif kind == "ours":
        slipstream.quantize(model, block=16, skip=("head",))
    model.head.requires_grad_(True)

    def adapt() -> None:
        torch.manual_seed(4)
        if kind == "late":
            slipstream.quantize(model, block=16, skip=("head",))
        with_lora(model.requires_grad_(False))
        for block in model.blocks:
            for layer in (block.up, block.down):
                layer.a.requires_grad_(True), layer.b.requires_grad_(True)

    return model, adapt


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["wrapped", "ours", "late"])
def test_adapters_are_added_to_a_quantized_base_by_surgery(kind: str, transport: str) -> None:
    """Bit-identical to adapters that exist at initialize, in every stage; codes stay in place and stay codes."""
    losses = []
    for stage in cases.stages(transport):
        for added in (True, False):
            model, adapt = bare_lm(kind)
            if not added:
                adapt()
            engine = toy.make(model, stage, transport, dtype="fp32" if kind == "late" else "bf16")
            if added:
                toy.step(engine, toy.tokens(engine.rank, 9))  # trains the head, which is reset here
                codes = [unit for unit in probe.units(engine) if not unit.full.is_floating_point()]
                with engine.surgery():
                    model.head.load_state_dict(toy.seeded(lambda: toy.Lm(dim=32)).head.state_dict())
                    adapt()
                now = [unit for unit in probe.units(engine) if not unit.full.is_floating_point()]
                assert len(now) == 3 and (kind == "late" or now == codes), "nothing of the base was built anew"
            losses.append(train(engine))
            trained = {name for unit in probe.units(engine) if unit.grads is not None for name in unit.names}
            assert len(trained) == 12 and all(name.endswith((".a.weight", ".b.weight")) for name in trained)
            engine.destroy()
    assert all(torch.equal(each, losses[0]) for each in losses), losses


@distributed(world_size=2)
def test_a_quantized_weight_that_is_unfrozen_is_named() -> None:
    for stage in STAGES:
        engine = toy.make(wrapped_lm(), stage, dtype="bf16")
        train(engine, 1)
        weight = engine.module.blocks[1].down.base.weight
        weight.requires_grad_(True)
        with torch.no_grad():
            engine(toy.tokens(engine.rank, 0))  # requires no gradient
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'blocks\.1\.down\.base\.weight' is quantized \(its parts: codes, scale\)"):
                engine(toy.tokens(engine.rank, 0))
        with pytest.raises(ValueError, match=r"'blocks\.1\.down\.base\.weight' is quantized"), engine.surgery():
            pass
        weight.requires_grad_(False)
        with engine.surgery():
            pass
        train(engine, 1)
        engine.destroy()
