"""Checkpoints between layouts: what one layout of ranks saves, every other loads, with the same bits of all states."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from tests import probe
from tests.dist.test_pipeline import Group
from tests.dist.test_tensor import ADAMW, batch, build, settings
from tests.pool import distributed, run

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
ZERO_BUBBLE = {"pipeline": {"schedule": "zero_bubble"}}
# name: (ZeRO stage, axes, the rest of our block); on four ranks
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dp4 zero1": (1, {}, {}),
    "dp4 zero3": (3, {}, {}),
    "one process": (0, {}, {}),
    "pp2 dp2 zero2": (2, {"pp": 2}, {}),
    "tp2 dp2 zero1": (1, {"tp": 2}, {}),
    "tp4 zero2": (2, {"tp": 4}, {}),
    "pp2 tp2 zero3": (3, {"pp": 2, "tp": 2}, ZERO_BUBBLE),
    "sp2 tp2 zero3": (3, {"sp": 2, "tp": 2}, {}),
}


def engine_of(layout: str) -> Any:
    """A small Qwen 2 in bf16 with fp32 masters: tied embeddings, biases of fused heads, two key heads."""
    stage, mesh, own = LAYOUTS[layout]
    config = settings(stage, bf16={"enabled": True}, slipstream={"mesh": mesh, **own}, gradient_accumulation_steps=2)
    mpu = Group(1) if layout == "one process" else None  # four engines of one rank
    return slipstream.initialize(model=build("qwen2"), config=config, mpu=mpu)[0]


def step(engine: Any) -> None:
    micros = [batch(i, engine.mesh.batch.index) for i in range(2)]
    if engine.mesh.pp.size > 1:
        engine.train_batch(iter(micros))
        return
    for micro in micros:
        engine.backward(engine(**micro).loss)
        engine.step()


def folder_of(folder: Path, layout: str) -> Path:
    """Four engines of one rank save apart; the first one's files count."""
    return folder / f"rank{dist.get_rank()}" if layout == "one process" and dist.get_rank() else folder


def states_in(folder: Path, tag: str) -> dict[str, Tensor]:
    """All states of a checkpoint, by one process."""
    engine = engine_of("one process")
    engine.load_checkpoint(folder, tag=tag)
    states = {name: value.clone() for name, value in probe.states(engine).items()}
    engine.destroy()
    return states


def pairs_of(folder: Path, pairs: list[tuple[str, str]]) -> None:
    saved: dict[str, dict[str, Tensor]] = {}
    for source in dict.fromkeys(source for source, _ in pairs):
        engine = engine_of(source)
        step(engine)
        engine.save_checkpoint(folder_of(folder, source), tag=source)
        engine.destroy()
        dist.barrier()
        saved[source] = states_in(folder, source)
        assert any("exp_avg" in name for name in saved[source]), sorted(saved[source])[:9]
    for source, target in pairs:
        engine = engine_of(target)
        engine.load_checkpoint(folder, tag=source)
        assert engine.global_steps == 1
        tag = f"{source} by {target}"
        engine.save_checkpoint(folder_of(folder, target), tag=tag)
        engine.destroy()
        dist.barrier()
        results = states_in(folder, tag)
        assert results.keys() == saved[source].keys(), tag
        for name, value in results.items():
            assert torch.equal(value, saved[source][name]), f"{tag}: {name}"


@pytest.mark.slow
@distributed(world_size=4)
def test_each_layout_is_saved_and_loaded(tmp_path: Path) -> None:
    names = list(LAYOUTS)
    pairs_of(tmp_path, list(zip(names[::2], names[5:] + names[:5], strict=False)))


def of_three_axes(folder: Path) -> dict[str, Tensor]:
    """What pp 2 x dp 2 x tp 2 has after a step, and has saved."""
    own = {"mesh": {"pp": 2, "tp": 2}}
    config = settings(1, bf16={"enabled": True}, slipstream=own, gradient_accumulation_steps=2)
    engine = slipstream.initialize(model=build("qwen2"), config=config)[0]
    assert engine.mesh.sizes == {"pp": 2, "batch": 2, "tp": 2}
    step(engine)
    engine.save_checkpoint(folder, tag="three axes")
    engine.destroy()
    dist.barrier()
    return states_in(folder, "three axes")


def by_three_ranks(folder: Path) -> dict[str, Tensor]:
    """The same, loaded and saved by ZeRO-3 on three ranks."""
    config = settings(3, bf16={"enabled": True}, gradient_accumulation_steps=2)
    engine = slipstream.initialize(model=build("qwen2"), config=config)[0]
    engine.load_checkpoint(folder, tag="three axes")
    assert (engine.global_steps, engine.mesh.sizes) == (1, {"batch": 3})
    engine.save_checkpoint(folder, tag="three ranks")
    step(engine)  # and trains on
    engine.destroy()
    dist.barrier()
    return states_in(folder, "three ranks")


@pytest.mark.slow
def test_three_axes_are_loaded_by_three_ranks(tmp_path: Path) -> None:
    saved, loaded = run(8, of_three_axes, tmp_path)[0], run(3, by_three_ranks, tmp_path)[0]
    assert saved.keys() == loaded.keys() and any("exp_avg" in name for name in saved)
    for name, value in loaded.items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.slow
@distributed(world_size=4)
def test_every_layout_writes_a_hugging_face_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = dict(build("qwen2").named_parameters())
    for layout in LAYOUTS:
        engine = engine_of(layout)
        folder = folder_of(tmp_path, layout) / layout
        engine.save_pretrained(str(folder), dtype="fp32", max_shard_size="40KB")
        handed = {name: value.float().clone() for name, value in engine.named_weights()}
        engine.destroy()
        dist.barrier()
        assert handed.keys() == whole.keys(), layout
        for name, value in handed.items():
            assert torch.equal(value, whole[name].bfloat16().float()), (layout, name)
        assert (folder / "model.safetensors.index.json").exists(), sorted(folder.iterdir())
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
        results = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        assert results.keys() == whole.keys(), layout
        for name, value in results.items():
            assert torch.equal(value, whole[name]), (layout, name)


@pytest.mark.slow
@distributed(world_size=4)
def test_twenty_steps_are_those_of_one_process() -> None:
    """In fp32, losses within 1e-5 of plain torch's."""
    layouts = {"pp2 sp2 zero1": (1, {"pp": 2, "sp": 2}, {}), **{name: LAYOUTS[name] for name in list(LAYOUTS)[3:]}}
    model = build("qwen2")
    adamw = ADAMW | {"lr": 1e-3}
    optimizer = torch.optim.AdamW(model.parameters(), **adamw, weight_decay=0.0)
    expected = []
    for i in range(20):
        optimizer.zero_grad()
        loss = torch.stack([model(**batch(i, k), use_cache=False).loss for k in range(4)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(float(loss.detach()))
    for layout, (stage, mesh, own) in layouts.items():
        replicas = 4 // math.prod(mesh.values())
        config = settings(stage, slipstream={"mesh": mesh, **own}, gradient_accumulation_steps=4 // replicas)
        config["optimizer"]["params"] = adamw
        engine = slipstream.initialize(model=build("qwen2"), config=config)[0]
        for i in range(20):
            micros = [batch(i, k) for k in range(4)][engine.mesh.batch.index :: replicas]
            if engine.mesh.pp.size > 1:
                loss = engine.train_batch(iter(micros))
            else:
                loss = torch.stack([step_on(engine, micro) for micro in micros]).mean()
            total = loss.detach().double()
            dist.all_reduce(total)
            assert float(total) / 4 == pytest.approx(expected[i], abs=1e-5), (layout, i)
        engine.destroy()


def step_on(engine: Any, micro: dict[str, Tensor]) -> Tensor:
    loss: Tensor = engine(**micro).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


@pytest.mark.slow
@distributed(world_size=4, timeout=300.0)
def test_all_pairs(tmp_path: Path) -> None:
    pairs_of(tmp_path, [(source, target) for source in LAYOUTS for target in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [["--pp", "2"], ["--tp", "2"], ["--sp", "2"]])
def test_the_example_on_axes(axes: list[str], tmp_path: Path) -> None:
    """`make train ARGS="--pp 2"`: trains, evaluates and resumes; slices also as a whole. Layers of a pipeline have other names."""
    pytest.importorskip("tokenizers")
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.py").write_text("".join(f"def f{i}_{k}(x):\n    return x + {k}\n\n" for k in range(200)))
    script = [str(ROOT / "examples" / "pretrain" / "train.py"), "--data", str(text), "--out", str(tmp_path / "out")]
    script += ["--steps", "4", "--new-tokens", "4"]
    launch = [sys.executable, "-m", "slipstream", "run", "--nproc", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    first = subprocess.run([*launch, *script, *axes], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert first.returncode == 0 and "validation loss" in first.stdout, first.stdout + first.stderr
    again = subprocess.run(
        [*launch, *script, "--resume", *(axes if "--pp" in axes else [])],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert again.returncode == 0 and "step 8/8" in again.stdout, again.stdout + again.stderr
