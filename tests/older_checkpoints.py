"""Generates `tests/data/older.tar.xz`: checkpoints of earlier commits of Slipstream, which later ones must load.

    python -m tests.older_checkpoints      # in the repository, whose history has the commits

Each case is a folder written by `save_checkpoint` on two ranks after `STEPS` steps of the model in `deepspeed_checkpoints.py`.
Beside it are the whole weights of that moment, and the mean losses of that commit's own next steps.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import deepspeed_checkpoints as ds

ARCHIVE = Path(__file__).parent / "data" / "older.tar.xz"
WORLD = 2
CLIENT_STATE = {"epoch": 7, "names": ["a", None], "seen": (1, 2.5)}


class Case(NamedTuple):
    commit: str
    version: int  # of metadata.json
    trained: ds.Case

    @property
    def name(self) -> str:
        return f"{self.commit}-v{self.version}-{self.trained.name}"


# the first with checkpoints; the last before families and States; the first of version 2, whose mesh had one axis
COMMITS = {"390224b": 1, "76ff52b": 1, "5f296d8": 2}
TRAINED = [ds.Case(WORLD, 1, "fp32"), ds.Case(WORLD, 2, "fp16"), ds.Case(WORLD, 3, "bf16")]
CASES = [Case(commit, version, trained) for commit, version in COMMITS.items() for trained in TRAINED]


def train(case: ds.Case, folder: Path) -> None:
    """Train and save one rank's part with the `slipstream` that is imported."""
    import random

    import numpy as np
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    import slipstream

    slipstream.init_distributed("gloo")
    random.seed(0)
    np.random.seed(0)  # alike everywhere, which keeps the archive small
    module, settings = ds.model(), ds.config(case, WORLD, case.stage)
    del settings["optimizer"]["params"]["torch_adam"]
    engine = slipstream.initialize(model=module, model_parameters=ds.groups(module), config=settings)[0]
    losses = []
    for step in range(ds.STEPS + ds.MORE):
        losses.append(ds.data_step(engine, ds.Case(*case), step))
        if step == ds.STEPS - 1:
            engine.save_checkpoint(str(folder), client_state=CLIENT_STATE)
            weights = {name: value.clone() for name, value in engine.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(weights, folder / "weights.safetensors")
        (folder / "losses.json").write_text(json.dumps(losses[ds.STEPS :]))
        print(folder.name, torch.tensor(losses))
    engine.destroy()
    dist.destroy_process_group()


def launch(case: Case, source: Path, folder: Path) -> None:
    variables = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29618"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.older_checkpoints", json.dumps(case.trained), str(folder)],
            env=os.environ
            | variables
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD)
    ]
    codes = [rank.wait() for rank in ranks]
    assert not any(codes), case


if __name__ == "__main__":
    if sys.argv[1:]:
        train(ds.Case(*json.loads(sys.argv[1])), Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            for commit in COMMITS:
                tree = f"{scratch}/{commit}"
                subprocess.run(["git", "worktree", "add", "--detach", tree, commit], check=True)
                for case in CASES:
                    if case.commit == commit:
                        launch(case, Path(tree, "src"), Path(scratch, "older", case.name))
                subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
            with tarfile.open(ARCHIVE, "w:xz") as archive:
                archive.add(Path(scratch) / "older", "older")
