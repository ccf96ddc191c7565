"""The time and memory model of layouts, and the page that shows it."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.launch.cli import main
from slipstream.parallel.layouts import Cluster, MeshLayout, Model, cost_of, layouts, ranked
from slipstream.parallel.schedule import style_of

MODEL = Model(blocks=8, block_params=12_000_000, other_params=8_000_000, width=1024, heads=8, length=1024, batch=32)
CLUSTER = Cluster(ranks=16, hosts=2, flops=1e13, inside=1e11, between=1e9)


def test_the_parts_of_a_step() -> None:
    alone = cost_of(
        MODEL, Cluster(ranks=1, hosts=1, flops=1e13, inside=1e11, between=1e9), MeshLayout(1, 1, 1, 1, 1, "1f1b", 1, False)
    )
    flops = 6 * 32 * 1024 * (8 * (12_000_000 + 1024 * 1024) + 4_000_000)
    assert alone.seconds == alone.compute == pytest.approx(flops / 1e13) and alone.bubble == alone.tp == alone.sp == alone.dp == 0
    assert alone.memory == pytest.approx(16 * MODEL.num_params + 8 * 34 * 1024 * 1024)
    piped = cost_of(MODEL, CLUSTER, MeshLayout(2, 8, 1, 1, 1, "1f1b", 1, False))
    assert piped.bubble == pytest.approx(piped.compute / 4)  # m = 4
    assert piped.pp == pytest.approx(2 * 1024 * 1024 * 2 / 1e9 * 8)  # 8 ranks share the link
    both = cost_of(MODEL, CLUSTER, MeshLayout(2, 4, 1, 2, 1, "1f1b", 1, False))
    assert both.pp == pytest.approx(piped.pp / 2), "tp ranks send shares"
    chunks = cost_of(MODEL, CLUSTER, MeshLayout(2, 8, 1, 1, 1, "1f1b", 1, False, 2))
    assert chunks.bubble == pytest.approx(piped.bubble / 2) and chunks.pp == pytest.approx(3 * piped.pp)
    assert chunks.memory > piped.memory
    zero_bubble = cost_of(MODEL, CLUSTER, MeshLayout(2, 8, 1, 1, 1, "zero_bubble", 1, False))
    assert zero_bubble.bubble < piped.bubble
    sliced = cost_of(MODEL, CLUSTER, MeshLayout(1, 8, 1, 2, 1, "1f1b", 1, False))
    assert sliced.tp == pytest.approx(
        4 * 8 * 4 * (1024 * 1024 * 2) / 1e11 + 0.03 * sliced.compute
    )  # 4 sums in 8 blocks, 4 micro-batches
    sequences = cost_of(MODEL, CLUSTER, MeshLayout(1, 8, 2, 1, 1, "1f1b", 1, False))
    assert sequences.sp == pytest.approx(8 * 8 * 4 * (1024 * 1024 // 2 * 2) / 2 / 1e11 + 0.03 * sequences.compute)
    data = cost_of(MODEL, CLUSTER, MeshLayout(1, 16, 1, 1, 1, "1f1b", 1, False))
    behind = data.compute / 2 * 2 / 3  # two micro-batches: the reduction hides behind the last one's backward
    assert data.dp == pytest.approx(2 * 15 / 16 * MODEL.num_params * 2 / 1e9 - behind)
    fast = cost_of(MODEL, replace(CLUSTER, between=1e12), MeshLayout(1, 16, 1, 1, 1, "1f1b", 1, False))
    assert fast.dp == pytest.approx(2 * 15 / 16 * MODEL.num_params * 2 / 1e11 / 9)  # one of 8 blocks, or what is outside
    assert cost_of(MODEL, CLUSTER, MeshLayout(1, 16, 1, 1, 3, "1f1b", 1, False)).memory < data.memory
    recomputed = cost_of(MODEL, CLUSTER, MeshLayout(1, 16, 1, 1, 1, "1f1b", 1, True))
    assert recomputed.compute == pytest.approx(data.compute * 4 / 3) and recomputed.memory < data.memory


def test_the_stage_with_the_head() -> None:
    """A head as large as three of eight blocks: stages of 6 and 2; of 3, 2, 2 and 1, which go round the ranks, or out and back."""
    large, busiest = replace(MODEL, other_params=2 * 36_000_000), {}
    for schedule, chunks, products, blocks in (("1f1b", 1, 6, 6), ("v", 2, 7, 4), ("zero_bubble", 2, 6, 3)):
        cost = cost_of(large, CLUSTER, MeshLayout(2, 8, 1, 1, 1, schedule, 1, False, chunks))
        assert cost.compute == pytest.approx(6 * 4 * 1024 * (products * 12_000_000 + blocks * 1024 * 1024) / 1e13), schedule
        busiest[schedule] = cost
    even = busiest["1f1b"]
    assert even.memory == pytest.approx((6 * 12_000_000 + 36_000_000) * (4 + 12 / 8) + 1024 * 1024 * 2 * 6 * 34)


def test_layouts_fit_the_model() -> None:
    every = list(layouts(MODEL, CLUSTER))
    assert every
    for layout in every:
        assert layout.pp * layout.dp * layout.sp * layout.tp == 16
        assert MODEL.blocks % layout.pp == 0 and MODEL.heads % (layout.sp * layout.tp) == 0
        assert MODEL.batch % (layout.dp * layout.micro_batch) == 0
    results = ranked(MODEL, CLUSTER)
    assert [cost.seconds for _, cost in results] == sorted(cost.seconds for _, cost in results)
    small = ranked(MODEL, Cluster(ranks=16, hosts=2, flops=1e13, inside=1e11, between=1e9, memory=4e8))
    assert small and all(cost.memory <= 4e8 for _, cost in small) and len(small) < len(results)
    assert ranked(MODEL, Cluster(ranks=16, hosts=2, flops=1e13, inside=1e11, between=1e9, memory=1e6)) == []
    assert math.isclose(sum(results[0][1][:6]), results[0][1].seconds)


def llama(folder: Path) -> str:
    facts = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008}
    (folder / "config.json").write_text(
        json.dumps(facts | {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000})
    )
    return str(folder)


def test_the_page_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs" / "SCALE.md").read_text()
    command, *shown = re.findall(r"```\n(.*?)\n```", page, re.DOTALL)
    words = [llama(tmp_path) if word == "llama7b" else word for word in command.split()[1:]]
    for bandwidth, rows in zip(("400G", "100G"), shown, strict=True):
        assert main([bandwidth if word == "400G" else word for word in words]) == 0
        assert capsys.readouterr().out.endswith(rows + "\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = llama(tmp_path)
    rates = ["--rate", "flops=100T", "--rate", "memory=1T"]
    assert main(["plan", "--model", folder, "--ranks", "16", "--hosts", "2", "--bandwidth", "10G", *rates, "--draw", "text"]) == 0
    out = capsys.readouterr().out
    assert '"slipstream"' in out and "rank 0 |" in out
    assert main(["plan", "--model", folder, "--ranks", "16", *rates, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"]
    words = ["plan", "--model", folder, "--ranks", "16", "--hosts", "2", "--bandwidth", "400G", "--rate", "wire=500G", *rates]
    assert main([*words, "--json"]) == 0
    first = next(each["layout"] for each in json.loads(capsys.readouterr().out)["layouts"] if each["layout"]["pp"] > 1)
    assert main([*words, "--draw", "text"]) == 0
    drawn = " ".join(capsys.readouterr().out.split())
    assert f"{style_of(first['schedule'], first['chunks'])}, {first['pp']} ranks" in drawn
    assert first["chunks"] == 2 and "lower case: a later chunk" in drawn
    assert main(["plan", "--model", folder, "--ranks", "16", *rates, "--memory", "1M"]) == 1
    assert "no layout of 16 ranks fits" in capsys.readouterr().out
    parts = str(tmp_path / "parts.json")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "zero_optimization": {"stage": 1}}
    own = {"mesh": {"pp": 2, "tp": 4}, "pipeline": {"chunks": 2}, "activations": "recompute"}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    Path(parts).write_text(json.dumps(config | {"slipstream": own, "bf16": {"enabled": True}, "optimizer": optimizer}))
    words = ["plan", parts, "--model", folder, "--world", "16", "--hosts", "2", "--bandwidth", "10G", *rates]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "pp 2 x dp 2 x tp 4" in shown and "1f1b x 2, recompute" in shown and "32 sequences of 2048 tokens" in shown
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    layout = MeshLayout(2, 2, 1, 4, 1, "1f1b", 1, True, 2)
    assert MeshLayout(**answer["layout"]) == layout and answer["seconds"] == pytest.approx(sum([*answer["cost"].values()][:6]))
    own["pipeline"], own["mesh"] = {"chunks": 8}, {"pp": 8}
    many = str(tmp_path / "many.json")
    Path(many).write_text(json.dumps(config | {"slipstream": own, "optimizer": optimizer}))
    for words, text in (
        ([many, "--model", folder, "--world", "16", *rates], "the model has 32 blocks, fewer than the stages of pp 8"),
        (["--ranks", "16"], "--ranks needs --model"),
        (["--ranks", "16", "--hosts", "3", "--model", folder], "hosts have equal numbers"),
        ([parts, "--world", "16", "--num-params", "1G"], "pp 2, sp 1, tp 4, experts over 1"),
        ([], "slipstream plan: give a config, or --ranks"),
    ):
        assert main(["plan", *words]) != 0
        assert text in capsys.readouterr().err
