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
