"""Generates `tests/data/deepspeed_data.tar.xz` by the real DeepSpeed 0.19.8: what its classes for training data write and compute.

    python tests/deepspeed_data.py      # in an environment with deepspeed and torch, without slipstream

The functions take the classes, so that the tests call them with Slipstream's.
"""

import itertools
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

ARCHIVE = Path(__file__).parent / "data" / "deepspeed_data.tar.xz"
STEPS = 10_000
DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32)
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {
        "schedule_type": "fixed_linear",
        "min_difficulty": 64,
        "max_difficulty": 1001,
        "schedule_config": {"total_curriculum_step": 7000, "difficulty_step": 8},
    },
    "square root": {
        "schedule_type": "fixed_root",
        "min_difficulty": 3,
        "max_difficulty": 512,
        "schedule_config": {"total_curriculum_step": 9001, "difficulty_step": 7, "root_degree": 2},
    },
    "cube root": {
        "schedule_type": "fixed_root",
        "min_difficulty": 8,
        "max_difficulty": 2048,
        "schedule_config": {"total_curriculum_step": 6543, "difficulty_step": 1, "root_degree": 3},
    },
    "discrete": {
        "schedule_type": "fixed_discrete",
        "min_difficulty": 1,
        "max_difficulty": 9,
        "schedule_config": {"difficulty": [1, 2, 9], "max_step": [5, 4321]},
    },
}


class Numbers(Dataset[int]):
    """Samples whose metrics repeat, out of order."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> int:
        return index * 37 % 103


def write_rows(builder: Any, folder: Path) -> None:
    """Indexed datasets of every dtype, with documents, an empty row, and one merged into another."""
    for dtype in DTYPES:
        name = np.dtype(dtype).name
        for part, first in (("more", 5), ("all", 0)):
            rows = builder(f"{folder}/{name}-{part}.bin", dtype=dtype)
            for row in range(4):
                rows.add_item(torch.arange(first + row, first + 3 * row))
                if row % 2:
                    rows.end_document()
            if part == "all":
                rows.merge_file_(f"{folder}/{name}-more")
            rows.finalize(f"{folder}/{name}-{part}.idx")


def analyze(analyzer: Any, folder: Path) -> None:
    """Metrics of both types, by two workers."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "batch_size": 10,
        "metric_names": ["rarity", "words"],
        "metric_functions": [lambda batch: batch // 5, lambda batch: torch.bincount(batch, minlength=103)],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "metric_dtypes": [torch.int64, torch.int64],
        "save_path": str(folder),
    }
    for worker in (1, 0):
        analyzer(Numbers(), worker_id=worker, **options).run_map()
    analyzer(Numbers(), worker_id=0, **options).run_reduce()


def difficulties(scheduler: Any) -> dict[str, list[list[int]]]:
    """Of each schedule, for the steps from 1 on: [difficulty, how many steps] in turn."""
    found = {}
    for name, schedule in SCHEDULES.items():
        made = scheduler(schedule)
        each = [made.get_difficulty(step) for step in range(1, STEPS + 1)]
        found[name] = [[value, len(list(run))] for value, run in itertools.groupby(each)]
    return found


def main() -> None:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft)
        for name in ("rows", "analysis"):
            (folder / name).mkdir()
        write_rows(MMapIndexedDatasetBuilder, folder / "rows")
        analyze(DataAnalyzer, folder / "analysis")
        (folder / "difficulties.json").write_text(json.dumps(difficulties(CurriculumScheduler)))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for file in sorted(file for file in folder.rglob("*") if file.is_file() and "_thread" not in str(file)):
                info = archive.gettarinfo(file, str(file.relative_to(folder)))
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with file.open("rb") as data:
                    archive.addfile(info, data)


if __name__ == "__main__":
    main()
