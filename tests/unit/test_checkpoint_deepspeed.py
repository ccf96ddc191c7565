"""DeepSpeed's files without processes: damage that a checksum sees, and files that are dear to look at."""

from __future__ import annotations

import random
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from slipstream.checkpoint import CheckpointError, convert, load, load_metadata
from tests import deepspeed_checkpoints as ds

CASE = ds.CASES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    with tarfile.open(ds.ARCHIVE) as archive:
        archive.extractall(path, [member for member in archive.getmembers() if CASE.name in member.name], filter="data")
    return path / "deepspeed" / CASE.name


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name."""
    metadata = load_metadata(folder, "global_step3")
    tensors = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in metadata.tensors.items()}
    load(folder, "global_step3", tensors=tensors)
    return tensors


def records(folder: Path) -> list[tuple[Path, int, str]]:
    """A byte of each tensor's: (file, offset, zip record)."""
    places = []
    for file in sorted(folder.rglob("*.pt")):
        raw = file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if "/data/" in record.filename and record.file_size:
                    at = raw.index(archive.read(record), record.header_offset)
                    places.append((file, at + record.file_size // 2, record.filename))
    return places


@contextmanager
def flipped(file: Path, at: int, bit: int) -> Iterator[None]:
    original = file.read_bytes()
    raw = bytearray(original)
    raw[at] ^= 1 << bit
    file.write_bytes(raw)
    try:
        yield
    finally:
        file.write_bytes(original)


def test_a_flipped_bit_is_refused_by_file_and_record(folder: Path) -> None:
    """Or lies in a tensor that is not read, a 16-bit copy of a weight: it never gives another value."""
    expected, rng, refused = values(folder), random.Random(5), set()
    for file, at, record in records(folder):
        with flipped(file, at, rng.randrange(8)):
            try:
                loaded = values(folder)
            except CheckpointError as error:
                assert f"{file} is damaged: its zip record {record!r} has the checksum" in str(error)
                refused.add((file.name, record))
            else:
                assert all(loaded[name].equal(expected[name]) for name in expected), f"{file.name}: {record}"
    # Of two ranks' two groups: masters and two moments; of the rest a frozen block, a buffer and step counts
    assert len([file for file, _ in refused if "optim_states" in file]) >= 12 and len(refused) >= 15


def test_other_readers_see_it_too(folder: Path, tmp_path: Path) -> None:
    """`slipstream convert`; and a bit of the pickle."""
    states = [entry for entry in records(folder) if "optim_states" in entry[0].name]
    file, at, record = max(states, key=lambda entry: zipfile.ZipFile(entry[0]).getinfo(entry[2]).file_size)
    words = re.escape(f"{file} is damaged: its zip record {record!r}")
    with flipped(file, at, 3):
        with pytest.raises(CheckpointError, match=words):
            convert(folder, tmp_path / "converted", "slipstream")
    with (
        flipped(file, file.read_bytes().index(b"exp_avg"), 0),
        pytest.raises(CheckpointError, match=r"checksum of its zip record '.*data\.pkl'"),
    ):
        load_metadata(folder, "global_step3")


def test_a_source_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("file", "is a file"), ("missing", "does not exist"), ("missing/deeper", "does not exist")):
        with pytest.raises(CheckpointError, match=rf"{name} {words}; give the folder of a checkpoint, of several, or of"):
            convert(tmp_path / name, tmp_path / "converted", "hf")


def test_a_file_that_was_saved_without_checksums_loads(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(folder, tmp_path / "c")
    file = next((tmp_path / "c").rglob("*_model_states.pt"))
    state = torch.load(file, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, file)
    finally:
        torch.serialization.set_crc32_options(True)
    loaded, expected = values(tmp_path / "c"), values(folder)
    assert all(loaded[name].equal(expected[name]) for name in expected)
    assert f"{file} was saved without checksums" in caplog.text


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_without_bytes_are_counted_before_they_are_made(folder: Path, tmp_path: Path, is_shared: bool) -> None:
    """20,000 of them, each with a record of its own, or all views of one."""
    shutil.copytree(folder, tmp_path / "c")
    file = next((tmp_path / "c").rglob("*_model_states.pt"))
    state, one = torch.load(file, weights_only=True), torch.empty(0)
    torch.save(state | {"mine": [one.view(0, 1) if is_shared else torch.empty(0) for _ in range(20_000)]}, file)
    words = r"more than 1\d,\d{3} tensors, and too few bytes" if is_shared else "20,000 of its records are empty"
    with pytest.raises(CheckpointError, match=words):
        load_metadata(tmp_path / "c", "global_step3")


EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."
CUTS = {"moe.deepspeed_moe.gate.wg.weight": None} | {
    f"{EXPERT}{i}.{leaf}": dim for i in range(2) for leaf, dim in (("up.weight", 0), ("down.weight", 1), ("down.bias", None))
}  # the dimension of each parameter along which two ranks have slices
INFO = {
    "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
    "tp_replicated_parameter_patterns": [r".*\.wg\.weight", r".*\.bias"],
}


def write_slices(folder: Path) -> dict[str, torch.Tensor]:
    """Write what DeepSpeed saves at ZeRO-1 of experts that a Megatron has sliced; returns the whole parameters."""
    shapes = {"wg.weight": (2, 4), "up.weight": (6, 4), "down.weight": (4, 6), "down.bias": (4,)}
    whole = {name: torch.randn(shapes[".".join(name.split(".")[-2:])]) for name in CUTS}
    folder.mkdir()
    for rank in range(2):
        own = {name: value if CUTS[name] is None else value.chunk(2, CUTS[name])[rank] for name, value in whole.items()}
        starts, mapping = 0, {}
        for name, value in own.items():
            mapping[name] = {"start": starts, "numel": value.numel()}
            starts += value.numel()
        for i in range(2):
            state = {name: value.bfloat16() for name, value in own.items() if name.startswith(f"{EXPERT}{i}.")}
            torch.save(state, folder / f"layer_0_expert_{i}_mp_rank_{rank:02d}_model_states.pt")
        flat = torch.cat([value.flatten() for value in own.values()])
        optimizer = {
            "partition_count": [1],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {
                "state": {0: {"exp_avg": flat * 2, "exp_avg_sq": flat * 3}},
                "param_groups": [{"lr": 0.1, "eps": 0.1}],
            },
            "param_slice_mappings": [mapping],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
        nothing = dict.fromkeys(("optimizer", "lr_scheduler", "frozen_param_shapes", "frozen_param_fragments"))
        counters = {"skipped_steps": 0, "global_steps": 3, "global_samples": 24}
        model = nothing | counters | {"module": {}, "buffer_names": [], "shared_params": {}, "num_experts": [2], "ds_config": {}}
        shapes_of = [{name: tuple(value.shape) for name, value in own.items()}]
        model |= {"param_shapes": shapes_of, "universal_checkpoint_info": INFO}
        torch.save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return whole


def test_experts_in_slices_are_joined(tmp_path: Path) -> None:
    """Each model-parallel rank has a file of its own for each expert."""
    whole = write_slices(tmp_path / "global_step3")
    found = values(tmp_path)
    for leaf in ("up.weight", "down.weight", "down.bias"):
        stack = torch.stack([whole[f"{EXPERT}{i}.{leaf}"] for i in range(2)])
        for kind, factor in (("model", 1), ("optim.exp_avg", 2), ("optim.exp_avg_sq", 3)):
            assert found[f"{kind}.moe.deepspeed_moe.experts.stack.expert.{leaf}"].equal(stack * factor), (kind, leaf)
    assert found["model.moe.deepspeed_moe.gate.wg.weight"].equal(whole["moe.deepspeed_moe.gate.wg.weight"])
    missing = tmp_path / "global_step3" / "layer_0_expert_1_mp_rank_01_model_states.pt"
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"it has no {missing.name}"):
        load_metadata(tmp_path, "global_step3")
