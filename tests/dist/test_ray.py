"""Ray Train with two workers on this host, one of which is killed: needs `pip install "ray[train]"`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

DRIVER = """
import json, os, signal, sys
import ray, torch, torch.nn as nn
import slipstream
from slipstream.integrations.ray import report, trainer


def train(options):
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
              "slipstream": {"checkpoint": {"folder": options["folder"], "every_steps": 1}}}
    engine, *_ = slipstream.initialize(model=model, model_parameters=model.parameters(), config=config)
    with open(f"{options['folder']}.begins{rank}", "a") as file:
        file.write(f"{engine.global_steps}\\n")
    while engine.global_steps < 6:
        if options["kill"] and engine.global_steps == 4 and rank == 1 and not os.path.exists(options["kill"]):
            open(options["kill"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(engine.global_steps * 2 + rank)
        loss = engine(torch.randn(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        report(engine, {"loss": loss.item()})
    engine.destroy()


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
here = sys.argv[1]
for name, kill in (("whole", ""), ("killed", f"{here}/kill")):
    options = {"folder": f"{here}/{name}", "kill": kill}
    result = trainer(train, options, num_workers=2, storage=f"{here}/storage", name=name, max_failures=2).fit()
    print(json.dumps({"name": name, "metrics": {key: result.metrics[key] for key in ("step", "loss")}}))
ray.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_worker_is_killed_and_the_job_ends_as_if_it_was_not(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    src = Path(__file__).parents[2] / "src"
    command = [sys.executable, "driver.py", str(tmp_path)]
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # paths of sockets have at most 107 bytes
        ray = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short}
        env = os.environ | ray | {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    whole, killed = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"'))
    assert whole["metrics"] == killed["metrics"] and whole["metrics"]["step"] == 6
    begins = [(tmp_path / f"killed.begins{rank}").read_text().split() for rank in range(2)]
    assert begins == [["0", "4"], ["0", "4"]], "resumed where the last checkpoint was"
