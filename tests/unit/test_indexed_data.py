"""Indexed datasets and analyses: the bytes of the format, round trips, results by brute force, refusals."""

import itertools
import pickle
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import DataAnalyzer, MMapIndexedDataset, MMapIndexedDatasetBuilder
from slipstream.data.indexed import DTYPES, find_fit_int_dtype, make_builder, make_dataset, write_rows

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"


def test_the_bytes_of_the_format(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "x.bin"), torch.int16)
    builder.add_item(torch.tensor([1, -2, 3]))
    builder.end_document()
    builder.add_items([np.array([], np.int64), np.array([7])])
    builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<4h", 1, -2, 3, 7)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 3, 3, 3) + struct.pack("<3i", 3, 0, 1) + struct.pack("<3q", 0, 6, 6)
    assert (tmp_path / "x.idx").read_bytes() == expected + struct.pack("<3q", 0, 1, 3)


rows = st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=12)


@given(rows=rows, more=rows, code=st.sampled_from(sorted(DTYPES)))
def test_what_is_written_is_read(tmp_path_factory: Any, rows: list[list[int]], more: list[list[int]], code: int) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_rows(f"{folder}/more", DTYPES[code], [np.array(row, np.int64) for row in more])
    builder = MMapIndexedDatasetBuilder(f"{folder}/x.bin", DTYPES[code])
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int64))
    builder.end_document()
    builder.merge_file_(f"{folder}/more")
    builder.finalize(f"{folder}/x.idx")
    data = pickle.loads(pickle.dumps(MMapIndexedDataset(f"{folder}/x")))
    expected = rows + more
    assert len(data) == len(expected) and data.dtype == DTYPES[code]
    assert [data[i].tolist() for i in range(len(data))] == [part.tolist() for part in data[:]] == expected
    assert data.flat().tolist() == list(itertools.chain(*expected)) and data.sizes.tolist() == [len(row) for row in expected]
    assert data.doc_idx.tolist() == [0, len(rows), len(expected)]
    for i, row in enumerate(expected):
        assert data.get(i, 1, 2).tolist() == row[1:3] or len(row) < 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*x\.idx"):
        MMapIndexedDataset(tmp_path / "x")
    write_rows(f"{tmp_path}/x", np.int32, [np.arange(5), np.arange(3)])
    index, data = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes()
    for content, problem in {
        b"TNTIDX\0\0" + index[8:]: "does not begin with",
        index[:-4]: "rows and .* documents at least",
        index[:17] + b"\x63" + index[18:]: "dtype code 99",
    }.items():
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(ValueError, match=problem):
            MMapIndexedDataset(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="has 31 of the 32 bytes"):
        MMapIndexedDataset(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(IndexError, match="row 2 of 2"):
        MMapIndexedDataset(tmp_path / "x")[2]
    with pytest.raises(ValueError, match="must be contiguous"):
        MMapIndexedDataset(tmp_path / "x")[::2]
    with pytest.raises(ValueError, match="float32 has no code"):
        MMapIndexedDatasetBuilder(f"{tmp_path}/y.bin", np.float32)
    builder = make_builder(f"{tmp_path}/y.bin", "mmap", vocab_size=100)
    with pytest.raises(ValueError, match="is int32, and this dataset's is uint16"):
        builder.merge_file_(f"{tmp_path}/x")
    builder.finalize(f"{tmp_path}/y.idx")
    with pytest.raises(ValueError, match="the format 'lazy'"):
        make_dataset(f"{tmp_path}/x", "lazy")


def test_numbers_that_a_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    """The tokens of a larger vocabulary would be others."""
    builder = make_builder(f"{tmp_path}/x.bin", "mmap", vocab_size=50_000)
    builder.add_item(torch.tensor([0, 65_535]))
    with pytest.raises(ValueError, match=r"x.bin: a row has numbers from 3 to 65536, and uint16 those from 0 to 65535"):
        builder.add_item(torch.tensor([3, 65_536]))
    with pytest.raises(ValueError, match="numbers from -1 to 1"):
        builder.add_items(np.array([[0, 1], [-1, 0]]))
    builder.finalize(f"{tmp_path}/x.idx")
    assert MMapIndexedDataset(f"{tmp_path}/x")[0].tolist() == [0, 65_535]


def test_tokens_of_megatron(tmp_path: Path) -> None:
    """Megatron-LM's code 8 is uint16, DeepSpeed's uint64."""
    write_rows(f"{tmp_path}/x", np.uint16, [np.arange(5), np.arange(3)])
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(index[:17] + b"\x08" + index[18:])
    assert [row.tolist() for row in MMapIndexedDataset(tmp_path / "x")[:]] == [[0, 1, 2, 3, 4], [0, 1, 2]]


@pytest.mark.parametrize(("low", "high", "name"), [(0, 255, "uint8"), (0, 256, "uint16"), (-1, 127, "int8"), (-129, 5, "int16")])
def test_the_narrowest_dtype(low: int, high: int, name: str) -> None:
    assert find_fit_int_dtype(low, high).__name__ == name


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.values = [(i * 7 + 3) % 31 - 5 for i in range(count)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]


def metrics(**more: Any) -> dict[str, Any]:
    return {
        "metric_names": ["value", "total"],
        "metric_functions": [lambda batch: batch, lambda batch: torch.stack([batch.sum(), batch.square().sum()])],
        "metric_types": [SINGLE, SUM],
        "metric_dtypes": [torch.int64, torch.int64],
        **more,
    }


def check(folder: Path, values: list[int]) -> None:
    """The files of `metrics` by brute force."""
    by_value = defaultdict(list)
    for i, value in enumerate(values):
        by_value[value].append(i)
    read = {name: MMapIndexedDataset(f"{folder}/value/value_{name}") for name in ("sample_to_metric", "index_to_metric")}
    assert [row.tolist() for row in read["sample_to_metric"][:]] == [[value] for value in values]
    assert [row.tolist() for row in read["index_to_metric"][:]] == [[value] for value in sorted(by_value)]
    expected = [by_value[value] for value in sorted(by_value)]
    for name in ("index_to_sample", "index_to_sample_percentile_merged"):
        assert [row.tolist() for row in MMapIndexedDataset(f"{folder}/value/value_{name}")[:]] == expected
    assert MMapIndexedDataset(f"{folder}/value/value_index_to_sample").dtype == np.uint8
    total = MMapIndexedDataset(f"{folder}/total/total_metric_value")
    assert total[0].tolist() == [sum(values), sum(value * value for value in values)]


def test_workers_write_and_the_first_merges(tmp_path: Path) -> None:
    data = Numbers(103)
    options = {"num_workers": 2, "num_threads": 2, "num_threads_reduce": 2, "batch_size": 10, "save_path": tmp_path, **metrics()}
    DataAnalyzer(data, worker_id=1, **options).run_map()
    first = DataAnalyzer(data, worker_id=0, specific_threads=[0], **options)
    first.run_map()
    with pytest.raises(ValueError, match="worker0_thread1"):
        first.run_reduce()
    DataAnalyzer(data, worker_id=0, specific_threads=[1], **options).run_map()
    first.run_reduce()
    check(tmp_path, data.values)
    # each process that merges ends a document, and one ends after them
    assert MMapIndexedDataset(f"{tmp_path}/value/value_sample_to_metric").doc_idx.tolist() == [0, 51, 103, 103]


def test_samples_have_numbers_of_their_own(tmp_path: Path) -> None:
    data = Numbers(20)
    order = list(reversed(range(20)))
    DataAnalyzer(data, sample_indices=order, save_path=tmp_path, batch_size=7, **metrics()).run_map_reduce()
    index = MMapIndexedDataset(f"{tmp_path}/value/value_index_to_sample")
    values = MMapIndexedDataset(f"{tmp_path}/value/value_index_to_metric").flat()
    assert all(data.values[19 - i] == value for value, row in zip(values, index[:], strict=True) for i in row)


def test_functions_in_place_of_the_measuring(tmp_path: Path) -> None:
    seen: list[Any] = []
    custom = {
        "custom_map_init": lambda thread, *rest: seen.append(("init", thread)) or seen,
        "custom_map_update": lambda data, kinds, dtypes, functions, results, first: results.append((first, data.tolist())),
        "custom_map_finalize": lambda kinds, dtypes, results: results.append("end"),
        "custom_reduce": lambda dataset, names, *rest: seen.append(names),
    }
    DataAnalyzer(Numbers(5), batch_size=3, save_path=tmp_path, **metrics(), **custom).run_map_reduce()
    assert seen == [("init", 0), (0, [-2, 5, 12]), (3, [19, -5]), "end", ["value", "total"]]
    with pytest.raises(ValueError, match="replace the measuring together"):
        DataAnalyzer(Numbers(5), custom_map_init=lambda *_: None, **metrics())


def test_a_sum_is_of_more_than_its_values_dtype_holds(tmp_path: Path) -> None:
    sums = {"metric_functions": [lambda batch: batch, lambda batch: batch.sum(dtype=torch.int8).view(1)]}
    options = metrics(**sums, metric_dtypes=[torch.int64, torch.int8])
    with pytest.raises(ValueError, match="and int8 those from -128 to 127: use a wider dtype"):
        DataAnalyzer(Numbers(103), save_path=tmp_path, **options).run_map()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"metric_names": ["value"]}, "1 metric_names, 2 metric_functions"),
        ({"metric_types": [SINGLE, "mean"]}, r"\['mean'\] are not"),
        (
            {"metric_dtypes": [torch.int32, torch.int64]},
            "metric value: its function returns int64, and metric_dtypes says torch.int32",
        ),
        (
            {"metric_functions": [lambda batch: batch[:1], lambda batch: batch.sum()]},
            r"shape \(1,\) has not one value for each of 4",
        ),
        ({"metric_functions": [lambda batch: 3, lambda batch: batch.sum()]}, "must return a tensor or an array, not a int"),
        ({"metric_functions": [lambda batch: batch * 0.5, lambda batch: batch.sum()]}, "float32 has no code"),
    ],
)
def test_bad_metrics(tmp_path: Path, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DataAnalyzer(Numbers(4), batch_size=4, save_path=tmp_path, **metrics(**more)).run_map()
