"""REFERENCE.md, CONFIG.md and DEEPSPEED_KEYS.md are what docs/reference.py makes of the code, and what it says is so."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import torch

import slipstream

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_reference_and_the_keys_are_current() -> None:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for name, text in reference.pages(DOCS).items():
        assert (DOCS / name).read_text() == text, "run `python docs/reference.py`"


def test_the_engine_has_the_attributes_that_its_docstring_lists() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = slipstream.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    rows = re.findall(r"^(\w+(?:, \w+)*)  +\S", inspect.getdoc(slipstream.Engine) or "", re.M)
    names = [name for row in rows for name in row.split(", ")]
    assert len(names) >= 16 and [name for name in names if not hasattr(engine, name)] == []
    engine.destroy()


def test_each_argument_of_initialize_is_told() -> None:
    text = inspect.getdoc(slipstream.initialize) or ""
    assert [name for name in inspect.signature(slipstream.initialize).parameters if not re.search(rf"\b{name}\b", text)] == []
