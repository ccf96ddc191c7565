"""The commands: `deepspeed`, `ds_report`, `accelerate launch`, each with a script that knows nothing of Slipstream."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.clients.conftest import needs
from tests.pool import single_threaded

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def start(folder: Path, *command: str) -> str:
    """What a command of the environment says."""
    env = single_threaded(os.environ) | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    if done.returncode:
        output = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{output}", pytrace=False)
    return done.stdout


@needs()
def test_deepspeed_starts_a_script_with_its_flags(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e7, "overlap_comm": True, "cpu_offload": False},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    flags = ("--deepspeed", "--deepspeed_config", "ds_config.json")
    output = start(tmp_path, "deepspeed", "--num_gpus", "2", str(HERE / "cifar_script.py"), *flags)
    facts = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert (facts["world"], facts["stage"], facts["local_rank"], facts["flag"]) == (2, 2, 0, True)
    assert len(facts["losses"]) == 30 and sum(facts["losses"][-5:]) < 0.7 * sum(facts["losses"][:5])
    assert (tmp_path / "out" / "latest").read_text().strip() == "global_step30"


@needs("accelerate", "transformers")
def test_deepspeed_starts_a_trainer(tmp_path: Path) -> None:
    """Nothing in the script or in its flags says that there is no GPU."""
    script = "from tests.clients.transformers_script import *; llama().save_pretrained('model'); print(json.dumps(config_of(3)))"
    config = json.loads(start(tmp_path, sys.executable, "-c", f"import json; {script}").splitlines()[-1])
    config["zero_optimization"] |= {kind: {"device": "cpu", "pin_memory": True} for kind in ("offload_optimizer", "offload_param")}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    flags = (
        "--folder model --deepspeed ds.json --output_dir out --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        "--max_steps 8 --learning_rate 1e-2 --warmup_steps 2 --logging_steps 1 --save_steps 4 --report_to none"
    )
    output = start(tmp_path, "deepspeed", "--num_gpus", "2", str(HERE / "clm_script.py"), *flags.split())
    facts = json.loads(next(line for line in output.splitlines() if line.startswith('{"world"')))
    assert facts["world"] == 2 and len(facts["losses"]) == 8 and facts["eval"] < facts["losses"][0] - 0.1
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "checkpoint-8" / "global_step8").is_dir()


@needs()
def test_ds_report_says_what_is_installed(tmp_path: Path) -> None:
    output = start(tmp_path, "ds_report")
    assert "torch" in output and "slipstream" in output.lower()


@needs("accelerate", "transformers")
def test_accelerate_launches_from_its_own_file(tmp_path: Path) -> None:
    """As `accelerate config` writes it."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        "deepspeed_config:",
        "  gradient_accumulation_steps: 2",
        "  gradient_clipping: 0.5",
        "  offload_optimizer_device: cpu",
        "  offload_param_device: none",
        "  zero3_init_flag: true",
        "  zero3_save_16bit_model: true",
        "  zero_stage: 3",
        "distributed_type: DEEPSPEED",
        "downcast_bf16: 'no'",
        "machine_rank: 0",
        "main_training_function: main",
        "mixed_precision: bf16",
        "num_machines: 1",
        "num_processes: 2",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
    ]
    (tmp_path / "accelerate.yaml").write_text("\n".join(lines) + "\n")
    port = str(20000 + os.getpid() % 20000)
    script = str(HERE / "launched_script.py")
    output = start(tmp_path, "accelerate", "launch", "--config_file", "accelerate.yaml", "--main_process_port", port, script)
    facts = json.loads(next(line for line in output.splitlines() if line.startswith('{"world"')))
    assert (facts["world"], facts["stage"], facts["accumulation"], facts["bf16"]) == (2, 3, 2, True)
    assert facts["losses"][-1] < facts["losses"][0] and facts["steps"] == 8
    assert facts["rates"][0] == facts["rates"][1] < 1e-2  # the schedule was made of an optimizer that accelerate has exchanged
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert len(saved) == 20 and all(value.dtype is torch.bfloat16 and value.isfinite().all() for value in saved.values())
