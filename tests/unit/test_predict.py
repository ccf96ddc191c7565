"""What is predicted before anything runs, against what then is: memory and disk traffic of a process, and the plan that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from benchmarks.memory import MALLOC
from torch import Tensor

from slipstream.config import DataWorld, ModelFacts, Plan, resolve
from slipstream.launch.cli import main
from slipstream.train.planning import predict, propose
from slipstream.train.planning.dry_run import DryRunError, dry_run, profiles
from tests import forecast, toy
from tests.ranks import SpawnRanks

pytestmark = pytest.mark.disk

RATES = predict.Rates(flops=1e11, memory=1e10, disk_read=1e9, disk_write=5e8)


def resolved(stage: int = 0, **blocks: Any) -> Plan:
    return resolve(toy.settings(stage, **blocks), world=DataWorld(ranks=1), facts=ModelFacts(device_type="cpu", supports_bf16=True))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("case", forecast.CASES, ids=str)
def test_peak_and_traffic_are_the_kernel_s_counts(case: forecast.Case, tmp_path: Path, spawn_ranks: SpawnRanks) -> None:
    """46 million parameters; malloc returns freed memory at once, so that the kernel counts what is alive."""
    ranks = spawn_ranks(f"from tests import forecast\nforecast.run(forecast.{case!r}, {str(tmp_path)!r})", case.ranks, MALLOC)
    assert ranks.wait(timeout=120) == [0] * case.ranks, ranks.stderr(0)
    peaks = []
    for rank in range(case.ranks):
        counts = json.loads(ranks.stdout(rank).splitlines()[-1])
        peaks.append(counts["memory"])
        for predicted, measured in (counts["read"], counts["written"]):
            assert measured == pytest.approx(predicted, rel=0.02), counts
    predicted, measured = (sum(column) for column in zip(*peaks, strict=True))  # buffers of gloo differ between ranks
    assert max(predicted / measured, measured / predicted) <= 1.1, peaks


class Chain(nn.Module):
    """Blocks whose activations can be counted by hand: y = tanh(W x) keeps y, and W keeps x."""

    def __init__(self, depth: int = 3, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_dry_run_counts_what_is_alive() -> None:
    """At the end of the forward: the input and every tanh's output; products are counted as they are written down."""
    batch, width, depth = 32, 64, 3
    profile = dry_run(
        Chain(), resolved(train_micro_batch_size_per_gpu=batch), (torch.zeros(batch, width),), {}, micro_batch_size=batch
    )
    one = batch * width * 4
    forward = [moment for moment in profile.moments if moment.phase == "forward" and moment.block]
    # in block i: the outputs of those before, and the product that its tanh still has beside its own
    assert [moment.activations for moment in forward] == [(i + 2) * one for i in range(depth)]
    assert profile.forward.flops == depth * 2 * batch * width**2
    assert profile.backward.flops == (2 * depth - 1) * 2 * batch * width**2  # the input wants no gradient
    twice = dry_run(
        Chain(), resolved(train_micro_batch_size_per_gpu=batch), (torch.zeros(batch, width),), {}, micro_batch_size=2 * batch
    )
    assert twice.forward.flops == 2 * profile.forward.flops


def test_recompute_keeps_inputs_only() -> None:
    batch = 256
    profile_of = profiles(toy.Net(depth=8), resolved(train_micro_batch_size_per_gpu=batch), 1, (torch.zeros(batch, 8),), {})
    keep, again = (max(moment.activations for moment in profile_of(way, batch).moments) for way in (False, True))
    assert keep > 2 * again
    assert profile_of(True, batch).backward.flops > profile_of(False, batch).backward.flops


def test_a_model_that_looks_at_values_is_named() -> None:
    class Looks(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.max().item() > 0 else x.sum()

    with pytest.raises(DryRunError, match=r"forward of the root: .*--activations 300M"):
        dry_run(Looks(), resolved(), (torch.zeros(2, 64),), {}, micro_batch_size=2)


@pytest.mark.slow
def test_the_fastest_that_fits(tmp_path: Path) -> None:
    """Less and less memory: first nothing changes, then recompute or smaller micro-batches, then the disk; then nothing fits."""
    with torch.device("meta"):
        model = Chain(depth=8, width=512)
    plan = resolved(train_batch_size=64, train_micro_batch_size_per_gpu=64, gradient_accumulation_steps=1)
    profile_of = profiles(model, plan, 1, (torch.zeros(64, 512),), {})

    def fitting(budget: int) -> Any:
        return propose.choose(propose.survey(model, plan, 1, "cpu", str(tmp_path), RATES, profile_of, budget), budget)

    states = 16 * 8 * 512**2
    plenty = fitting(10 * states)
    assert plenty[0].changes == {}
    again = fitting(10 * states)
    assert [(each.plan, each.peak, each.seconds) for each in plenty] == [(each.plan, each.peak, each.seconds) for each in again]
    for budget in (states, states * 3 // 4):
        proposals = fitting(budget)
        assert isinstance(proposals, list), f"{proposals}"
        assert all(proposal.peak.memory <= budget for proposal in proposals)
        assert proposals[0].changes["zero_optimization.offload_optimizer"]["device"] == "nvme"
        assert proposals[0].seconds <= proposals[-1].seconds
    (narrow, *_) = fitting(12 << 20)
    assert narrow.changes["zero_optimization.sub_group_size"] < plan.offload.chunk_numel, "smaller chunks, where larger do not fit"
    refused = fitting(1 << 20)
    assert isinstance(refused, propose.Least)
    assert "nothing fits into 1.00 MiB: of " in str(refused)


def test_the_command_proposes_a_config_that_resolves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens_model.py").write_text(
        "import torch.nn as nn, torch.nn.functional as F\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(64, 512)\n"
        "        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(16))\n"
        "    def forward(self, tokens):\n"
        "        x = self.table(tokens)\n"
        "        for block in self.blocks:\n"
        "            x = block(x)\n"
        "        return F.cross_entropy(x.flatten(0, 1), tokens.flatten())\n"
        "def build():\n    return Model()\n"
    )
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    monkeypatch.chdir(tmp_path)
    command = [
        "plan",
        "ds.json",
        "--model",
        "tokens_model:build",
        "--device",
        "cpu",
        "--rate",
        "flops=100G",
        "--rate",
        "memory=10G",
    ]
    assert main([*command, "--batch-shape", "4x32", "--memory", "40M", "--disk", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "limited by" in text and "changes of the config for the fastest:" in text
    changes = json.loads(text[text.rindex("changes of the config for the fastest:") :].split(":", 1)[1])
    merged = json.loads(config.read_text())
    for block, values in changes.items():
        merged[block] = {**merged.get(block, {}), **values} if isinstance(values, dict) else values
    resolve(merged, world=DataWorld(ranks=1), facts=ModelFacts(device_type="cpu", supports_bf16=True))
    assert main([*command, "--batch-shape", "4x32", "--memory", "1M", "--json"]) == 1
    machine = json.loads(capsys.readouterr().out)
    assert machine["proposals"] == [] and machine["peak"]["memory_bytes"] > 16 * machine["parameters"]
    capsys.readouterr()
    peaks = []
    for shape in ("4x32", "2x32"):  # the config says how many rows, and its plan is what is printed
        assert main([*command, "--batch-shape", shape]) == 0
        text = capsys.readouterr().out
        assert ("note: --batch-shape has 2 rows; using the config's micro-batch size, 4" in text) == (shape == "2x32")
        peaks += [line for line in text.splitlines() if line.strip().startswith("peak")]
    assert len(peaks) == 2 and peaks[0] == peaks[1]
    assert main([*command, "--activations", "10M"]) == 0
    assert "activations are those given" in capsys.readouterr().out
    for wrong, says in (
        (["--batch-shape", "many"], "is not a shape of token ids"),
        (["--memory", "1G"], "--memory needs the size of the activations"),
        (["--batch-shape", "4x32", "--rate", "speed=1"], "names are flops"),
    ):
        assert main([*command, *wrong]) == 2
        assert says in capsys.readouterr().err


def test_the_command_reads_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of a folder that holds nothing but a config, with the loss that transformers computes."""
    values = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "ds.json").write_text(json.dumps(toy.settings(3, dtype="bf16")))
    command = ["plan", str(tmp_path / "ds.json"), "--model", str(tmp_path), "--batch-shape", "2x16", "--device", "cpu", "--json"]
    assert main([*command, "--world", "2", "--rate", "flops=1T", "--rate", "memory=10G"]) == 0
    report = json.loads(capsys.readouterr().out)
    states = sum(line["nbytes"] for line in report["memory"] if line["what"] in ("weights", "gradients", "masters", "moments"))
    assert states == pytest.approx(16 * report["parameters"] / 2, rel=0.05)
    assert report["limited_by"] == "compute" and report["traffic_per_step"]["wire"] == 0
