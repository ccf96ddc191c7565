"""Generates `tests/data/deepspeed.tar.xz` with the real DeepSpeed 0.19.8, and defines the model that the tests resume.

    python tests/deepspeed_checkpoints.py       # in an environment with deepspeed and torch, without slipstream

Each case is a folder written by `save_checkpoint` after `STEPS` steps (without the scripts that DeepSpeed adds), or converted from
one by `ds_to_universal`; `losses.json` has the mean losses of DeepSpeed's own next steps.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, MORE, ROWS = 3, 4, 8
ARCHIVE = Path(__file__).parent / "data" / "deepspeed.tar.xz"


class Case(NamedTuple):
    world: int
    stage: int
    dtype: str
    universal: bool = False

    @property
    def name(self) -> str:
        return f"z{self.stage}-w{self.world}-{self.dtype}" + ("-universal" if self.universal else "")


CASES = [
    Case(2, 1, "bf16"),
    Case(4, 1, "fp32"),
    Case(2, 2, "fp16"),
    Case(4, 2, "bf16"),
    Case(2, 3, "fp32"),
    Case(4, 3, "bf16"),
    Case(2, 1, "fp32", True),
    Case(4, 2, "fp32", True),
    Case(2, 3, "bf16", True),
]


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen block, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.frozen = nn.Linear(5, 5)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.arange(5) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        h = h + self.frozen(h) + self.shift.to(h.dtype)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens[:, 1:].flatten())


def model() -> Model:
    torch.manual_seed(3)
    return Model()


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors without it and with a higher learning rate."""
    trained = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


def batch(step: int, rank: int, world: int) -> Tensor:
    """This rank's rows of a global batch that does not depend on the world size."""
    rows = torch.randint(13, (ROWS, 7), generator=torch.Generator().manual_seed(step))
    return rows[rank * ROWS // world : (rank + 1) * ROWS // world]


def config(case: Case, world: int, stage: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 2e-2, "warmup_type": "linear"}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    if case.dtype != "fp32":
        settings[case.dtype] = {"enabled": True}
    if case.dtype == "fp16":
        settings["fp16"] |= {"initial_scale_power": 12, "loss_scale_window": 5}
    return settings


def train(case: Case, folder: Path) -> None:
    """Train and save one rank's part with DeepSpeed."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # refused on CPUs, although they support it

    settings = config(case, case.world, case.stage)
    if case.stage == 3:
        settings["zero_optimization"] |= {"sub_group_size": 60, "stage3_param_persistence_threshold": 0}
    module = model()
    engine = deepspeed.initialize(model=module, model_parameters=groups(module), config=settings)[0]
    losses = []
    for step in range(STEPS + MORE):
        loss = engine(batch(step, dist.get_rank(), case.world))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / case.world)
        if step == STEPS - 1:
            engine.save_checkpoint(str(folder), client_state={"epoch": 7, "names": ["a", None], "seen": (1, 2.5)})
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))


def launch(case: Case, folder: Path) -> None:
    folder.mkdir()
    variables = {"WORLD_SIZE": str(case.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(case), str(folder)],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(case.world)
    ]
    codes = [rank.wait() for rank in ranks]
    assert not any(codes), case
    if case.universal:
        tag = (folder / "latest").read_text()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "deepspeed.checkpoint.ds_to_universal",
                "--input_folder",
                str(folder / tag),
                "--output_folder",
                str(folder / f"{tag}_universal"),
                "--inject_missing_state",
            ],
            check=True,
        )
        (folder / "latest").unlink()
        for file in (folder / tag).iterdir():
            file.unlink()
        (folder / tag).rmdir()
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Case(*json.loads(sys.argv[1])), Path(sys.argv[2]))
    else:
        ARCHIVE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            for each in CASES:
                launch(each, Path(scratch) / each.name)
            with tarfile.open(ARCHIVE, "w:xz") as archive:
                archive.add(scratch, "deepspeed")
