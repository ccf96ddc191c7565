"""FLOP by module equal the formulas, forward and backward; a profiled step computes what an unprofiled one does."""

import json
import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slipstream
from slipstream.observe.flops import Counts, FlopCounter, FlopSum, count
from slipstream.observe.profile import FlopsProfiler, get_model_profile, number_to_string

B, S, D = 2, 16, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, S, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))


class Block(nn.Module):
    """Of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class Blocks(nn.Module):
    """repeats: by activation checkpointing. looks: at numbers, which fake tensors do not have."""

    def __init__(self, repeats: bool | None = None, looks: bool = False) -> None:
        super().__init__()
        self.layers, self.repeats, self.looks = nn.ModuleList(Block() for _ in range(2)), repeats, looks

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if self.looks and float(x.sum()) > 0 else x
        for layer in self.layers:
            x = layer(x) if self.repeats is None else checkpoint(layer, x, use_reentrant=self.repeats)
        return x.square().mean()


PRODUCTS, SCORES = 2 * B * S * 12 * D * D, 4 * B * S * S * D  # of a block's forward
BACKWARD = 2 * PRODUCTS + SCORES * 5 // 2  # flash attention computes the scores again


def total(counts: Counts) -> FlopSum:
    work = FlopSum()
    for each in counts.values():
        work.add(each)
    return work


def counted(model: nn.Module, x: Tensor, **options: Any) -> Counts:
    return count(model, (x,), {}, dict(model.named_modules()), **options)


def test_keys_of_fewer_heads_cost_what_as_many_cost() -> None:
    """torch before 2.12 does not count them."""

    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = x.view(B, S, 4, D // 4).transpose(1, 2), x[..., : D // 2].reshape(B, S, 2, D // 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).square().mean()

    found = total(counted(Grouped(), torch.randn(B, S, D, requires_grad=True)))
    assert (found.forward, found.backward) == (SCORES, SCORES * 5 // 2)


def test_work_by_module_is_that_of_the_formula() -> None:
    model, x = Blocks(), torch.randn(B, S, D, requires_grad=True)
    counts = counted(model, x)
    assert total(counts) == FlopSum(2 * (PRODUCTS + SCORES), 2 * BACKWARD)
    for layer in ("layers.0", "layers.1"):
        assert counts[f"{layer}.attention"] == FlopSum(SCORES, SCORES * 5 // 2)
        assert counts[f"{layer}.mlp.0"] == FlopSum(8 * B * S * D * D, 16 * B * S * D * D)
    counter = FlopCounter(dict(model.named_modules()))
    with counter:
        model(x).backward()
    assert counter.counts == counts, "fake tensors and real ones"
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    with torch.no_grad():
        assert total(counted(model, x)).backward == 0
    frozen = total(counted(model, x.detach()))
    assert frozen.backward == BACKWARD, "of the second layer alone"


@pytest.mark.parametrize("repeats", [False, True])
def test_recomputation_counts_in_the_backward_of_its_module(repeats: bool) -> None:
    x = torch.randn(B, S, D, requires_grad=True)
    counts = counted(Blocks(repeats), x)
    forward = 2 * (PRODUCTS + SCORES)
    again = forward if repeats else forward - 2 * 8 * B * S * D * D  # nothing needs the output of the last product
    assert total(counts) == FlopSum(forward, 2 * BACKWARD + again, again)
    if not repeats:
        assert counted(Blocks(), x, recomputed=["layers.0", "layers.1"]) == counts


def trained(steps: int = 4, looks: bool = False, **blocks: Any) -> list[float]:
    """Losses of steps of two micro-batches."""
    torch.manual_seed(0)
    batches = torch.randn(steps, 2, B, S, D)
    config = {"train_micro_batch_size_per_gpu": B, "gradient_accumulation_steps": 2, **blocks}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = slipstream.initialize(model=Blocks(looks=looks), config=config)
    losses = []
    for step in batches:
        for batch in step:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


def value(text: str, label: str) -> str:
    (found,) = re.findall(rf"^{re.escape(label)}.*?: +(\S.*?) *$", text, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("looks", [False, True])
def test_flops_profiler(stage: int, looks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step is profiled, in DeepSpeed's layout; losses are those of a run without."""
    plain = trained(looks=looks, zero_optimization={"stage": stage})
    file = tmp_path / "new" / "profile.txt"
    block = {"enabled": True, "profile_step": 2, "top_modules": 2, "module_depth": 3, "output_file": str(file)}
    assert trained(looks=looks, zero_optimization={"stage": stage}, flops_profiler=block) == plain
    text, profile = file.read_text(), json.loads((tmp_path / "new" / "profile.txt.json").read_text())
    ElementTree.parse(tmp_path / "new" / "profile.txt.svg")
    params = sum(param.numel() for param in Blocks().parameters())
    assert (profile["params"], profile["forward_flops"], profile["backward_flops"]) == (
        params,
        2 * (PRODUCTS + SCORES),
        2 * BACKWARD,
    )
    assert profile["step"] == 2 and profile["calls"] == profile["micro_batches"] == 2 and profile["macs"] == PRODUCTS + SCORES
    assert value(text, "params per GPU") == number_to_string(params)
    assert value(text, "fwd MACs per GPU") == f"{number_to_string(PRODUCTS + SCORES)}MACs"
    assert value(text, "fwd flops per GPU") == number_to_string(2 * (PRODUCTS + SCORES))
    for label in ("fwd latency", "bwd latency", "step latency", "iter latency"):
        assert value(text, label).endswith("s")
    for label in ("fwd FLOPS per GPU = ", "FLOPS per GPU = "):
        assert value(text, label).endswith("FLOPS")
    assert float(value(text, "samples/second")) > 0
    times = profile["seconds"]
    done = profile["forward_flops"] + profile["backward_flops"]
    assert profile["flops_per_second"] == pytest.approx(
        done / (times["forward"] + times["backward"] + times["step"] / profile["micro_batches"]), rel=1e-6
    ) and list(times) == ["forward", "backward", "step"]
    assert re.findall(r"^depth (\d):", text, re.MULTILINE) == ["0", "1", "2", "3"]
    assert "    MACs        - {'Sequential': '524.29 KMACs', 'Attention': '327.68 KMACs'}" in text
    assert re.search(
        r"\(qkv\): Linear\(3.17 K = 12.53% Params, 98.3 KMACs = 11.54% MACs, .* = .*% latency, .*FLOPS, in_features=32", text
    )
    by_name = {row["name"]: row for row in profile["modules"]}
    assert by_name["layers.0"]["forward_seconds"] >= by_name["layers.0.mlp"]["forward_seconds"] > 0
    assert by_name["layers"]["forward_seconds"] > 0 and capsys.readouterr().out == ""
    trained(flops_profiler={"enabled": True, "detailed": False})
    text = capsys.readouterr().out
    assert "Profile Summary at step 1:" in text and "qkv" not in text and "depth 4:" in text
    trained(flops_profiler={"enabled": False, "output_file": str(tmp_path / "none")})
    assert not (tmp_path / "none").exists() and capsys.readouterr().out == ""


def test_steps_have_no_hook_but_the_profiled_one_and_the_one_before(tmp_path: Path) -> None:
    model = Blocks()
    config = {"train_micro_batch_size_per_gpu": B, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    block = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "profile")}
    engine, *_ = slipstream.initialize(model=model, config={**config, "flops_profiler": block})
    hooks = []
    for _ in range(4):
        hooks.append(len(model.layers[0].mlp[0]._forward_hooks))
        loss = engine(torch.randn(B, S, D))
        engine.backward(loss)
        engine.step()
    assert hooks == [1, 1, 0, 0], "the step before counts"


def test_the_rate_in_progress_lines(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    block = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "profile")}
    with caplog.at_level(logging.INFO):
        trained(5, flops_profiler=block, steps_per_print=1)
    lines = [line for line in caplog.messages if line.startswith("step ")]
    rates = [re.search(r"([\d.e-]+) samples/s, ([\d.e-]+) TFLOPS", line) for line in lines]
    assert [rate is None for rate in rates] == [True, False, False, False, False]
    for rate in rates[1:]:
        assert rate is not None
        samples, tera = map(float, rate.groups())
        assert tera * 1e12 == pytest.approx(samples / B * 2 * (PRODUCTS + SCORES + BACKWARD), rel=0.01)


class Looking(nn.Module):
    """Runs a layer as often as a number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0])):
            x = self.linear(x)
        return x


@pytest.mark.parametrize("number", [1, 3])
def test_get_model_profile(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = Blocks()
    params = sum(param.numel() for param in model.parameters())
    found = get_model_profile(model, (B, S, D), print_profile=False)
    assert found == (
        number_to_string(2 * (PRODUCTS + SCORES)),
        f"{number_to_string(PRODUCTS + SCORES)}MACs",
        number_to_string(params),
    )
    numbers = get_model_profile(model, args=[torch.ones(B, S, D)], as_string=False, ignore_modules=[nn.Linear], detailed=True)
    assert numbers == (2 * (PRODUCTS + SCORES), PRODUCTS + SCORES, params)
    text = capsys.readouterr().out
    assert "world size" not in text and "(qkv): Linear(3.17 K = 12.53% Params, 0 MACs = 0% MACs" in text
    looking = get_model_profile(Looking(), args=[torch.full((5, 4), float(number))], as_string=False, print_profile=False)
    assert looking == (number * 2 * 5 * 4 * 4, number * 5 * 4 * 4, 20)
    with pytest.raises(ValueError, match="use 'forward' or 'generate'"):
        get_model_profile(model, (B, S, D), mode="backward")
    with pytest.raises(ValueError, match="input_shape, args or kwargs"):
        get_model_profile(model)


def test_the_profiler_by_hand() -> None:
    """Forward and backward between start and stop; several calls add up."""
    model = Blocks()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        model(torch.randn(B, S, D)).backward()
    profiler.stop_profile()
    assert profiler.get_total_flops() == 4 * (PRODUCTS + SCORES) and profiler.get_total_duration() > 0
    assert profiler.get_total_flops(as_string=True) == "3.41 M" and profiler.get_total_params(as_string=True) == "25.28 K"
    assert profiler.get_total_duration(as_string=True).endswith("s") and profiler.get_total_macs(as_string=True) == "1.7 MMACs"
    model(torch.randn(B, S, D))
    assert profiler.calls == 2, "stopped"
    profiler.end_profile()
    assert profiler.get_total_flops() == 0 and not any(module._forward_hooks for module in model.modules())


def test_products_with_a_vector_count() -> None:
    class Vectors(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x[0] @ x[:, 0]

    assert total(counted(Vectors(), torch.randn(4, 8))).forward == 2 * (4 * 8 + 4)


def test_own_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block-sparse attention by its tiles, on fake tensors as in a real step."""
    from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layout = BlockLayout(torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]), 16)

        def forward(self, q: Tensor) -> Tensor:
            return block_sparse_attention(q, q, q, self.layout)

    q = torch.randn(2, 4, 48, 8, requires_grad=True)
    product = 2 * 5 * 16 * 16 * 8 * 2 * 4
    counts = total(counted(Sparse(), q))
    counter = FlopCounter({"": (model := Sparse())})
    with counter:
        model(q).sum().backward()
    assert total(counter.counts) == counts == FlopSum(2 * product, 5 * product)


def test_fused_layers_count() -> None:
    from slipstream.ops.fused import add_norm, mlp

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.norm = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            _, x = add_norm(x, self.norm.weight, self.norm.bias, norm="layer", dropout=0.1)
            return mlp(x, self.first.weight, self.last.weight, kind="gelu").sum()

    product = 2 * B * S * 8 * D * D
    assert total(counted(Fused(), torch.randn(B, S, D))) == FlopSum(product, 2 * product)
