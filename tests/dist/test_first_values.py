"""Models larger than memory: on meta until `initialize`, then initialized block by block or loaded directly from files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import slipstream
from slipstream.checkpoint.weights import WeightFiles
from slipstream.zero.comm import ProcessGroupComm
from slipstream.zero.layout import overlap
from slipstream.zero.shared import SharedComm
from tests import probe, toy
from tests.pool import distributed, run

pytestmark = pytest.mark.disk

WORDS, DIM = 24, 48  # rows of 48: spans end inside a row


class Block(nn.Module):
    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(DIM))
        self.norm = nn.BatchNorm1d(DIM)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(x) * self.gain) + self.shared.weight.mean()


class Reaching(nn.Module):
    """Initialized by other modules, as in transformers: the model initializes its blocks, and blocks their shared modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(3))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.shared.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Block):
            nn.init.normal_(module.up.weight, std=0.5)
            nn.init.constant_(module.shared.weight, 9.0)  # the model's branch below takes precedence
        elif isinstance(module, Reaching):
            nn.init.normal_(module.shared.weight, std=0.02)
            for block in module.blocks:
                nn.init.constant_(block.gain, 2.0)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.shared(tokens[:, :-1]).flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).float(), tokens[:, 1:].flatten())


def on_meta(kind: Any = Reaching) -> Any:
    """Without `zero.Init`, which records initialization in constructors (test_recording.py)."""
    with torch.device("meta"):
        return kind()


def settings(stage: int, folder: Path | None, **blocks: Any) -> dict[str, Any]:
    """A config; stage 3 with a folder stores all states on disk."""
    zero: dict[str, Any] = {"sub_group_size": 4096}
    if folder is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
        if stage == 3:
            zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
    return blocks | {"zero_optimization": zero}


def drawn(folder: Path) -> list[dict[str, int]]:
    """Checksums of the weights, in memory and on disk."""
    results = []
    for stage, where in ((0, None), (3, None), (3, folder)):
        torch.manual_seed(7 + dist.get_rank())  # rank 0's draw is used
        engine = toy.make(on_meta(), stage, **settings(stage, where))
        state = engine.state_dict()
        assert state["head.weight"].equal(state["shared.weight"]) and 0.01 < state["shared.weight"].std() < 0.03
        assert state["blocks.1.up.weight"].std() > 0.4 and state["blocks.2.gain"].eq(2).all()
        assert state["blocks.0.norm.running_var"].eq(1).all() and state["blocks.0.norm.weight"].eq(1).all()
        results.append({name: zlib.crc32(value.numpy().tobytes()) for name, value in state.items()})
        toy.step(engine, toy.tokens(engine.rank, 0) % WORDS)
        engine.destroy()
    return results


def test_initial_values_do_not_depend_on_stage_tier_or_world(tmp_path: Path) -> None:
    first, *others = [each for world in (1, 2) for rank in run(world, drawn, tmp_path) for each in rank]
    assert all(each == first for each in others)


# ---- directly from files


def saved(folder: Path) -> dict[str, Tensor]:
    """Save the weights of a model in two files and an index; tied weights under one name only."""
    torch.manual_seed(3)
    model = Reaching()
    for block in model.blocks:
        block.norm.running_mean.normal_()
    state = {name: value.detach() for name, value in model.state_dict().items() if "shared" not in name}
    parts = {"a.safetensors": dict(list(state.items())[::2]), "b.safetensors": dict(list(state.items())[1::2])}
    folder.mkdir()
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


@distributed(world_size=(1, 2), transports=("shared", "gloo"), timeout=120)
def test_each_rank_reads_its_spans(tmp_path: Path, transport: str) -> None:
    folder = tmp_path / f"rank{dist.get_rank() if dist.is_initialized() else 0}"  # another rank's may be incomplete
    state = saved(folder)
    cases = [(stage, disk) for stage in range(4) for disk in (False, True)]
    for stage, disk in cases:
        read: list[tuple[str, int, int]] = []
        real = WeightFiles.read
        model = on_meta()
        names = set(model.state_dict())
        slipstream.zero.load(model, folder)
        refuse = {"side_effect": AssertionError("every rank reads for itself")}
        with (
            mock.patch.object(WeightFiles, "read", lambda self, *what: read.append(what) or real(self, *what)),
            mock.patch.object(SharedComm, "broadcast", **refuse),
            mock.patch.object(ProcessGroupComm, "broadcast", **refuse),
        ):
            engine = toy.make(
                model,
                stage,
                "gloo" if disk and stage == 3 else transport,
                dtype="bf16",
                **settings(stage, tmp_path if disk else None),
            )
        for unit in probe.units(engine):
            want = {}
            for slot in unit.layout.slots:
                first, last = overlap(slot.span, unit.span if stage == 3 else (0, unit.layout.numel))
                if first < last:
                    want[slot.name] = last - first
            got = {name: sum(stop - start for asked, start, stop in read if asked == name) for name in want}
            assert got == want, f"stage {stage}, unit {unit.name}"
        assert {name for name, *_ in read} <= names
        for name, value in engine.state_dict().items():
            expected = state[name if name in state else "head.weight"]
            assert value.equal(expected.bfloat16() if expected.is_floating_point() else expected), (stage, disk, name)
        for name in ("shared.weight", "blocks.1.up.weight"):  # masters are the file's values, not their rounding
            master = engine.optimizer_state(name)["master"]
            assert master.equal(state["head.weight" if name == "shared.weight" else name]), (stage, disk, name)
        toy.step(engine, toy.tokens(engine.rank, 0) % WORDS)
        engine.destroy()


@distributed(world_size=2)
def test_files_are_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    ours = tmp_path / f"rank{dist.get_rank()}"
    state = saved(ours)
    if dist.get_rank() == 1:
        save_file(dict(list(state.items())[2::2]), ours / "a.safetensors")
    model = on_meta()
    for path, message in (
        (ours, r"rank 1 of 2: the weights in .* do not fit this Reaching: they lack 'blocks.0"),
        (ours / "b.safetensors", r"they lack .* and \d+ more. Give rename= .* strict=False"),
        (tmp_path / "nothing", r"there is no .*nothing"),
    ):
        slipstream.zero.load(model, path)
        with pytest.raises(ValueError, match=message) as raised:
            toy.make(model, 3)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, str(raised.value).replace("rank0", "rank1"))
        assert told[0] == told[1] and all(tensor.is_meta for tensor in model.state_dict().values())


def test_what_the_files_lack_is_initialized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = saved(tmp_path / "files")
    for name in ("blocks.1.up.weight", "blocks.1.norm.running_var", "blocks.2.gain"):
        del state[name]
    save_file(state | {"scale": torch.ones(1)}, tmp_path / "some.safetensors")
    model = on_meta()
    slipstream.zero.load(model, [tmp_path / "some.safetensors"], strict=False)
    with caplog.at_level(logging.WARNING):
        engine = toy.make(model, 3, **settings(3, tmp_path))
    assert "lack 'blocks.1.up.weight'" in caplog.text and "have 'scale'" in caplog.text
    results = engine.state_dict()
    assert results["blocks.1.up.weight"].std() > 0.4 and results["blocks.2.gain"].eq(2).all()
    assert results["blocks.1.norm.running_var"].eq(1).all()
    assert all(results[name].equal(value) for name, value in state.items())
    engine.destroy()


# ---- memory


class Wide(nn.Module):
    """Blocks of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Peak:
    """Peak resident memory inside the context, above the level at its end, in blocks of `Wide`."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else memory that malloc kept from earlier tests is reused inside and distorts the result
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current level
        return self

    def __exit__(self, *_: object) -> None:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak, now = (int(lines[key].split()[0]) for key in ("VmHWM", "VmRSS"))
        self.blocks = (peak - now) / 4096


def wide(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file({f"layers.{i}.0.weight": torch.full((1024, 1024), float(i)) for i in range(16)}, path / "model.safetensors")
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@distributed(world_size=(1, 2))
def test_building_needs_one_block_more_than_the_stored_states(tmp_path: Path, world_size: int) -> None:
    """Of 16 blocks. Also for saving and loading checkpoints, and for destroy() with the weights on disk."""
    wide(tmp_path / "weights")
    disk = world_size == 1  # else two ranks, each with half
    for source in ("draw", "file"):
        model = on_meta(Wide)
        if source == "file":
            slipstream.zero.load(model, tmp_path / "weights")
        took: dict[str, float] = {}
        with Peak() as peak:
            engine = toy.make(model, 3, "gloo", **settings(3, tmp_path if disk else None))
        took["build"] = peak.blocks
        if disk:
            before = resident()
            with Peak() as peak:
                engine.save_checkpoint(str(tmp_path / "saved"))
            took["save"] = peak.blocks
            with Peak() as peak:
                engine.load_checkpoint(str(tmp_path / "saved"))
            took["load"] = peak.blocks
            with Peak() as peak:
                engine.destroy()
            took["destroy"] = peak.blocks
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # nor is memory that malloc keeps for later
            assert resident() - before < 10, "blocks stay"  # the remainder is modules that saving imports
        engine.destroy()
        del engine, model
        limits = dict.fromkeys(took, 6) | {"save": 10}  # of 48 that are saved; 4 are staging buffers of the file
        assert all(took[what] < limits[what] for what in took), f"disk {disk}, {source}: {took} of 16 blocks at once"


def resident() -> float:
    """Resident memory in blocks of `Wide`."""
    return int(Path("/proc/self/statm").read_text().split()[1]) / 1024


@distributed(world_size=2)
def test_destroying_with_weights_on_disk_leaves_meta(tmp_path: Path) -> None:
    saved(tmp_path / f"rank{dist.get_rank()}")
    model = on_meta()
    params = dict(model.named_parameters())
    params["blocks.0.gain"].kind = "a user's own"
    for _ in range(2):
        slipstream.zero.load(model, tmp_path / f"rank{dist.get_rank()}")
        engine = toy.make(model, 3, **settings(3, tmp_path))
        loss = engine(toy.tokens(engine.rank, 0) % WORDS)  # a live graph
        trained = engine.state_dict()
        engine.backward(loss)
        engine.step()
        engine.destroy()
        assert all(
            param is params[name] and type(param) is nn.Parameter and param.is_meta and param.grad is None
            for name, param in model.named_parameters()
        )
        assert not any(value.is_meta for value in trained.values()) and params["blocks.0.gain"].kind == "a user's own"


# ---- zero.Init


def test_init_builds_on_meta_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="mine"), slipstream.zero.Init(dtype=torch.bfloat16):
        outer = nn.Linear(2, 2)
        with slipstream.zero.Init(dtype=torch.float16), slipstream.zero.Init(enabled=False, dtype=torch.float64):
            inner = nn.Linear(2, 2)
        again = nn.Linear(2, 2)
        raise RuntimeError("mine")
    assert all(layer.weight.is_meta for layer in (outer, inner, again))
    assert [layer.weight.dtype for layer in (outer, inner, again)] == [torch.bfloat16, torch.float16, torch.bfloat16]
    after = nn.Linear(2, 2)
    assert after.weight.dtype is torch.float32 and not after.weight.is_meta and not caplog.text
    with slipstream.zero.Init(remote_device="cpu", pin_memory=True, config_dict_or_path={"zero_optimization": {"stage": 3}}):
        pass
    (said,) = caplog.messages
    assert "remote_device" in said and "config_dict_or_path" in said and "mpu, " not in said.split(":")[1]
    with pytest.raises(ValueError, match="this Linear has been built already"):
        slipstream.zero.Init(after)
    with pytest.raises(ValueError, match="floating point"):
        slipstream.zero.Init(dtype=torch.int8)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_from_a_folder(tmp_path: Path) -> None:
    """Unmodified constructors; folders of `save_pretrained`; a base model's folder into a model with a head."""
    transformers: Any = pytest.importorskip("transformers")
    from tests.dist.test_huggingface import gpt2, llama

    for kind in (llama, gpt2):
        plain = toy.seeded(kind, 5)
        plain.save_pretrained(tmp_path / kind.__name__, max_shard_size="40KB")
        with slipstream.zero.Init():
            model = transformers.AutoModelForCausalLM.from_config(plain.config)
        assert all(param.is_meta for param in model.parameters())
        slipstream.zero.load(model, tmp_path / kind.__name__)
        engine = toy.make(model, 3)
        assert all(value.equal(plain.state_dict()[name]) for name, value in engine.state_dict().items())
        engine.destroy()
    plain.transformer.save_pretrained(tmp_path / "base")
    model = on_meta(gpt2)
    slipstream.zero.load(model, tmp_path / "base")
    with pytest.raises(ValueError, match=r'Give rename=lambda name: "transformer\." \+ name'):
        toy.make(model, 3)
    slipstream.zero.load(model, tmp_path / "base", rename=lambda name: "transformer." + name)
    engine = toy.make(model, 3)
    assert all(value.equal(plain.state_dict()[name]) for name, value in engine.state_dict().items())
    engine.destroy()
