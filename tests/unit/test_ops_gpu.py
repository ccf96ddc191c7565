"""When Triton's kernels compute a training step's passes."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.ops import gpu, products


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gpu._is_usable.cache_clear()
    yield
    gpu._is_usable.cache_clear()


def test_a_triton_that_does_not_import_is_told_once_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('made for another torch')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" or name == "slipstream.ops.triton.flat"]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        assert gpu.kernels() is None and gpu.kernels() is None
        x = torch.arange(8.0).view(2, 4).as_subclass(type("OnGpu", (Tensor,), {"is_cuda": True}))  # a packed layer's input
        assert products.linear_by_rows(x, torch.eye(4), None).equal(x)
    assert [record.getMessage() for record in caplog.records] == [
        "the installed triton cannot be used (made for another torch); torch's operations compute in place of its kernels"
    ]
