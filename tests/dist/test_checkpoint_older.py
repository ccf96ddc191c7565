"""Checkpoints that earlier commits wrote: today's engine has their weights to the bit, and continues with their losses."""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.checkpoint.document import METADATA, parse
from tests import deepspeed_checkpoints as ds
from tests import older_checkpoints as older
from tests.dist.test_checkpoint_deepspeed import CLOSE, build, go_on
from tests.pool import distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    with tarfile.open(older.ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path / "older"


@distributed(world_size=(1, 2))
def test_training_continues_as_at_the_commit_that_saved(world_size: int, folder: Path) -> None:
    """On two ranks at the stage of the commit, on one at another."""
    for i, case in enumerate(older.CASES):
        stage = case.trained.stage if world_size == older.WORLD else i % 4
        engine = build(case.trained, stage)
        path, client = engine.load_checkpoint(str(folder / case.name))
        document = Path(path, METADATA).read_bytes()
        assert document.startswith(b'{"format": "slipstream-checkpoint", "version": %d, ' % case.version)
        assert parse(document).mesh == {"batch": older.WORLD}
        assert client == older.CLIENT_STATE
        assert (engine.global_steps, engine.global_samples) == (ds.STEPS, ds.STEPS * ds.ROWS)
        weights, expected = engine.state_dict(), load_file(folder / case.name / "weights.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items()), case.name
        losses = json.loads((folder / case.name / "losses.json").read_text())
        assert go_on(engine, case.trained) == pytest.approx(losses, rel=CLOSE[case.trained.dtype]), case.name
        engine.destroy()
