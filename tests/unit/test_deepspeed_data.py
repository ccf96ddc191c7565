"""Files and schedules of training data, byte for byte and step for step those of DeepSpeed 0.19.8 (`tests/deepspeed_data.py`)."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from slipstream.data import CurriculumScheduler, DataAnalyzer, MMapIndexedDataset, MMapIndexedDatasetBuilder
from tests import deepspeed_data


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(deepspeed_data.ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_rows_have_their_bytes(theirs: Path, tmp_path: Path) -> None:
    deepspeed_data.write_rows(MMapIndexedDatasetBuilder, tmp_path)
    assert files_of(tmp_path) == files_of(theirs / "rows")
    for dtype in deepspeed_data.DTYPES:
        data = MMapIndexedDataset(theirs / "rows" / f"{np.dtype(dtype).name}-all")
        expected = [list(range(first + row, first + 3 * row)) for first in (0, 5) for row in range(4)]
        assert data.dtype == dtype and [row.tolist() for row in data[:]] == expected


def test_analyses_have_their_bytes(theirs: Path, tmp_path: Path) -> None:
    deepspeed_data.analyze(DataAnalyzer, tmp_path)
    ours, expected = (  # without what the workers leave for each other
        {name: data for name, data in files_of(folder).items() if "_thread" not in name}
        for folder in (tmp_path, theirs / "analysis")
    )
    assert ours.keys() == expected.keys() and len(ours) == 10
    assert [name for name, data in ours.items() if data != expected[name]] == []


def test_difficulties_are_theirs_at_every_step(theirs: Path) -> None:
    expected = json.loads((theirs / "difficulties.json").read_text())
    assert deepspeed_data.difficulties(CurriculumScheduler) == expected
    assert expected.keys() == deepspeed_data.SCHEDULES.keys()
