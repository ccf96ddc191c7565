"""Compression: roundings by their formulas, bits over steps, masks, cleaned models, students; by classes and by the JSON."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slipstream
from slipstream import compression
from slipstream.compression.compress import clock_of
from slipstream.compression.eigenvalue import Eigenvalue
from slipstream.compression.layers import Compressed
from slipstream.compression.quantize import quantized, top_mask
from slipstream.compression.schedule import Bits


def block(**techniques: Any) -> dict[str, Any]:
    return {"compression_training": techniques}


def technique(
    shared: dict[str, Any] | None = None, modules: list[str] | None = None, related: Any = None, **params: Any
) -> dict[str, Any]:
    group: dict[str, Any] = {"params": params, "modules": modules or ["*"]}
    if related is not None:
        group["related_modules"] = related
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **(shared or {})}, "different_groups": {"a": group}}


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


# Roundings


@settings(max_examples=40, deadline=None)
@given(bits=st.integers(1, 8), groups=st.sampled_from([1, 2, 8]), symmetric=st.booleans(), seed=st.integers(0, 99))
def test_a_weight_is_rounded_by_the_formula(bits: int, groups: int, symmetric: bool, seed: int) -> None:
    if bits <= 2 and not symmetric:
        return
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    w[3] = 0
    for row, out in zip(
        w.view(groups, -1), quantized(w, bits, groups, "symmetric" if symmetric else "asymmetric").view(groups, -1), strict=True
    ):
        q = 2**bits
        for x, y in zip(row.tolist(), out.tolist(), strict=True):
            if bits == 1:
                expected = row.abs().mean().item() * (x > 0) - row.abs().mean().item() * (x < 0)
            elif bits == 2:
                t = 0.7 * row.abs().mean().item()
                large = [abs(v) for v in row.tolist() if abs(v) > t]
                a = sum(large) / max(len(large), 1)
                expected = a if x > t else -a if x < -t else 0.0
            elif symmetric:
                s = 2 * row.abs().max().item() / q or 1.0
                expected = min(max(round(x / s), -q // 2), q // 2 - 1) * s
            else:
                s = (row.max() - row.min()).item() / q or 1.0
                z = round(row.min().item() / s) * s
                expected = min(max(round((x - z) / s), 0), q - 1) * s + z
            near = symmetric and bits > 2 and abs(abs(x / s) % 1 - 0.5) < 1e-4  # a tie in other precision
            assert near or y == pytest.approx(expected, abs=1e-5)


def test_gradients_pass_and_random_rounding_is_unbiased() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 8, requires_grad=True)
    compression.fake_quantize(w, 4).square().sum().backward()
    torch.testing.assert_close(w.grad, 2 * quantized(w.detach(), 4))
    mean = torch.stack([quantized(w.detach(), 4, stochastic=True) for _ in range(2000)]).mean(0)
    scale = 2 * w.detach().abs().max() / 16
    inside = w.detach() < 6.5 * scale
    assert (mean - w.detach())[inside].abs().max() < 0.05 * scale and not torch.allclose(mean, quantized(w.detach(), 4))
    out = compression.fake_quantize(w, 8, 4)
    assert torch.equal(out, quantized(w, 8, 4)) and out.requires_grad


def test_what_is_served_is_what_was_trained() -> None:
    from slipstream import ops

    w = torch.randn(8, 64)
    eight, four = quantized(w, 8, kind="served"), quantized(w, 4, kind="served")
    assert torch.equal(ops.dequantize_int8(*ops.quantize_int8(eight)), eight)
    torch.testing.assert_close(ops.dequantize_int4(*ops.quantize_int4(four, 32)), four, atol=2e-3, rtol=0)
    assert (eight - w).abs().max() < 0.03 and (four - w).abs().max() < 0.4


@given(
    start=st.integers(1, 16),
    fewer=st.integers(0, 8),
    period=st.integers(1, 9),
    offset=st.integers(0, 5),
    mixed=st.sampled_from([0.0, 0.3]),
)
def test_bits_fall_with_the_steps(start: int, fewer: int, period: int, offset: int, mixed: float) -> None:
    """As counters that are kept from step to step."""
    schedule = Bits(start=start, target=max(1, start - fewer), period=period, offset=offset, mixed=mixed)
    bits, length, count, ratio = start, period, 0, 1.0
    assert offset == 0 or schedule.at(offset - 1) is None
    for step in range(offset, offset + 60):
        now = schedule.at(step)
        assert now is not None and now[0] == bits
        assert now[1] == pytest.approx(max(0.0, ratio) if mixed else 0.0, abs=1e-9)
        count, ratio = count + 1, ratio - mixed
        if bits > schedule.target and count >= length:
            bits, length, ratio = bits - 1, 2 * length, 1.0


def test_the_largest_scores() -> None:
    assert top_mask(torch.tensor([3.0, 1.0, 3.0, 2.0]), 0.5).tolist() == [True, False, True, False]
    assert top_mask(torch.zeros(5), 0.3).tolist() == [True, True, False, False, False]
    scores = torch.randn(3, 4, requires_grad=True)
    compression.TopKBinarizer.apply(scores, 0.25, False).mul(2).sum().backward()
    assert torch.equal(scores.grad, torch.full((3, 4), 2.0))


# Layers


def test_weights_are_quantized_in_the_forward() -> None:
    plain, net = Net(), Net()
    names = [name for name, _ in net.named_parameters()]
    config = block(
        weight_quantization=technique(
            {"quantize_groups": 4}, ["first", "second"], start_bits=6, target_bits=4, quantization_period=2
        )
    )
    compression.init_compression(net, config)
    assert [name for name, _ in net.named_parameters()] == names and isinstance(net.first, compression.LinearLayer_Compress)
    assert type(net.head) is nn.Linear
    scheduler, x = compression.compression_scheduler(net), torch.randn(3, 8)
    for bits in (6, 6, 5, 5, 4, 4):
        twin = copy.deepcopy(plain)
        for layer in (twin.first, twin.second):
            layer.weight.data = quantized(layer.weight.data, bits, 4)
        assert torch.equal(net(x), twin(x))
        net(x).sum().backward()
        twin(x).sum().backward()
        for param, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad, other.grad)
        net.zero_grad()
        scheduler.step()
    cleaned = compression.redundancy_clean(net, config)
    assert type(cleaned.first) is nn.Linear and torch.equal(cleaned(x), twin(x)) and clock_of(cleaned) is None


def test_inputs_are_quantized() -> None:
    x = torch.randn(5, 8) * torch.arange(1, 6)[:, None]
    for shared in ({}, {"quantization_type": "asymmetric"}):
        net = compression.init_compression(Net(), block(activation_quantization=technique(shared, ["first"], bits=4)))
        seen = quantized(x, 4, 5, shared.get("quantization_type", "symmetric"))  # type: ignore[arg-type]
        assert torch.equal(net(x), Net()(seen))
    config = block(activation_quantization=technique({"range_calibration": "static"}, ["first"], bits=8))
    net = compression.init_compression(Net(), config)
    clock = compression.compression_scheduler(net)
    first = net(x)
    net(x / 2)
    assert torch.equal(net(x), first)  # a range moves with the steps, not with the forwards
    clock.step()
    assert net.first.input_range.tolist() == [x.min().item(), x.max().item()]
    net(2 * x)
    clock.step()
    assert net.first.input_range[1].item() == pytest.approx(x.max().item() * (0.95 + 0.1))
    before = net.first.input_range.clone()
    net(x * torch.inf)
    clock.step()
    assert torch.equal(net.first.input_range, before)
    net.eval()
    before = net.first.input_range.clone()
    out = net(x)
    assert torch.equal(net.first.input_range, before)
    torch.testing.assert_close(out, Net()(x), atol=0.2, rtol=0.1)
    assert isinstance(compression.redundancy_clean(net, config).first, compression.LinearLayer_Compress)


def test_rows_are_dropped_beside_an_embedding_that_has_none() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.ModuleDict({"words": nn.Embedding(8, 16), "up": nn.Linear(16, 8)})
            self.down = nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(self.part["up"](self.part["words"](ids)))  # type: ignore[no-any-return]

    config = block(row_pruning=technique({}, ["part"], [["down"]], dense_ratio=0.5))
    model, ids = compression.init_compression(Words(), config), torch.arange(8)
    before = model(ids)
    compression.redundancy_clean(model, config)
    assert model.get_submodule("part.up").weight.shape == (4, 16) and model.get_submodule("down").weight.shape == (4, 4)
    torch.testing.assert_close(model(ids), before)


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("kind", ["sparse_pruning", "row_pruning"])
def test_masked_and_cleaned(method: str, kind: str) -> None:
    net, x = Net(), torch.randn(3, 8)
    related = [["second"]] if kind == "row_pruning" else None
    config = block(**{kind: technique({"method": method}, ["first"], related, dense_ratio=0.5)})
    compression.init_compression(net, config)
    with torch.no_grad():
        for _ in range(2):  # in training scores move
            net(x)
    net(x).sum().backward()
    if method == "topk":
        name = kind.removesuffix("_pruning")
        assert net.first.get_parameter(f"{name}_scores").grad.any()
    masked = net(x).detach()
    zeros = (net.first.compressed()["weight"] == 0).sum().item()
    assert zeros == 8 * 16 // 2
    if method == "l1" and kind == "sparse_pruning":
        size = Net().first.weight.abs()
        assert torch.equal(net.first.compressed()["weight"] != 0, size >= size.flatten().sort().values[64])
    cleaned = compression.redundancy_clean(net, config)
    torch.testing.assert_close(cleaned(x), masked, atol=1e-6, rtol=1e-5)
    shapes = [tuple(layer.weight.shape) for layer in (cleaned.first, cleaned.second)]
    assert shapes == ([(16, 8), (16, 16)] if related is None else [(8, 8), (16, 8)])
    assert cleaned.first.out_features == shapes[0][0] and cleaned.second.in_features == shapes[1][1]
    assert not [name for name, _ in (*cleaned.named_parameters(), *cleaned.named_buffers()) if "mask" in name or "scores" in name]


def test_channels_of_convolutions_go_with_their_norm() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    config = block(channel_pruning=technique({"method": "l1"}, ["^0$"], [["^1$", "^3$"]], dense_ratio=0.25))
    compression.init_compression(net, config).eval()
    x = torch.randn(2, 3, 5, 5)
    nn.init.zeros_(net[1].bias)
    masked = net(x).detach()
    cleaned = compression.redundancy_clean(net, config)
    assert [tuple(cleaned[i].weight.shape) for i in (0, 1, 3)] == [(2, 3, 3, 3), (2,), (4, 2, 1, 1)]
    torch.testing.assert_close(cleaned(x), masked, atol=1e-6, rtol=1e-5)


def test_heads_of_bert() -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()  # type: ignore[arg-type]
    related = [["attention.self.query", "attention.self.key", "attention.self.value"]]
    config = block(head_pruning=technique({"num_heads": 4}, ["attention.output.dense"], related, dense_ratio=0.5))
    compression.init_compression(model, config)
    ids = torch.arange(10)[None]
    masked = model(ids).last_hidden_state.detach()
    cleaned = compression.redundancy_clean(model, config)
    attention = cleaned.encoder.layer[1].attention
    assert tuple(attention.self.query.weight.shape) == (16, 32) and tuple(attention.output.dense.weight.shape) == (32, 16)
    torch.testing.assert_close(cleaned(ids).last_hidden_state, masked, atol=1e-5, rtol=1e-4)


def test_embeddings_have_a_scale_per_row_and_other_linear_classes_are_served() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    net = nn.ModuleDict({"table": nn.Embedding(6, 8), "linear": Doubled(8, 4)})
    table, weight = (net[name].weight.detach().clone() for name in ("table", "linear"))
    bias = net["linear"].bias
    compression.init_compression(net, block(weight_quantization=technique(start_bits=4, target_bits=4)))
    ids = torch.tensor([1, 5])
    x = net["table"](ids)
    assert torch.equal(x, quantized(table, 4, 6)[ids])
    torch.testing.assert_close(net["linear"](x), 2 * (x @ quantized(weight, 4).t() + bias))
    assert isinstance(net["linear"], compression.LinearLayer_Compress) and isinstance(net["linear"], Doubled)
    compression.redundancy_clean(net, block(weight_quantization=technique(start_bits=4, target_bits=4)))
    assert type(net["linear"]) is Doubled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["", "avx2", "portable"])
def test_kernels_round_as_the_twin(dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.ops import cpu, grid

    best = cpu.isa()
    if not best or not cpu.use_isa(isa or best):
        pytest.skip("not on this machine")
    monkeypatch.setattr(grid, "_PIECE", 48)
    try:
        for shape, groups in (((7, 5), 7), ((3, 50), 1), ((4, 96), 2), ((8, 200), 8)):
            w = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            w[0] = 0
            for bits, kind in ((8, "symmetric"), (4, "symmetric"), (8, "asymmetric"), (12, "asymmetric")):
                ours = quantized(w, bits, groups, kind)  # type: ignore[arg-type]
                with monkeypatch.context() as patch:
                    patch.setattr(cpu, "_kernels", lambda: None)
                    assert torch.equal(ours, quantized(w, bits, groups, kind))  # type: ignore[arg-type]
            w[1, 1] = float("nan")
            assert quantized(w, 8, groups).view(groups, -1).isnan().any(1).sum() == 1
    finally:
        cpu.use_isa(best)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_static_ranges_of_zeros_and_before_training(kind: str) -> None:
    shared = {"range_calibration": "static", "quantization_type": kind}
    config = block(activation_quantization=technique(shared, ["first"], bits=8))
    net, x = compression.init_compression(Net(), config).eval(), torch.randn(5, 8)
    torch.testing.assert_close(net(x), Net()(x), atol=0.1, rtol=0.1)  # the input's own range
    assert not net.first.input_range.any()
    net.train()
    torch.testing.assert_close(net(torch.zeros(5, 8)), Net()(torch.zeros(5, 8)))
    compression.compression_scheduler(net).step()
    net.eval()
    assert net(x).isfinite().all()


def test_a_compiled_layer_serves_every_step() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = block(weight_quantization=technique({"schedule_offset": 1}, start_bits=8, target_bits=3, quantization_period=1))
    net, twin, x = (compression.init_compression(Net(), config) for _ in range(2)), None, torch.randn(3, 8)
    net, twin = net
    clocks = [compression.compression_scheduler(each) for each in (net, twin)]
    compiled = torch.compile(net, backend=backend)
    for _ in range(40):
        torch.testing.assert_close(compiled(x), twin(x))
        for clock in clocks:
            clock.step()
    before = len(graphs)
    assert before <= 8  # before quantization and since, however the layers are cut
    clocks[0].step()
    compiled(x)
    assert len(graphs) == before


# Students, conversion, refusals


def test_a_student_takes_layers() -> None:
    class Stack(nn.Module):
        def __init__(self, count: int, width: int = 4) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
            self.head = nn.Linear(width, 2)

    teacher, student = Stack(6), Stack(3)
    reduction = {
        "enabled": True,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3, 5],
        "other_module_name": ["head"],
        "keep_number_layer": 3,
    }
    config = block(layer_reduction=reduction)
    compression.init_compression(student, config, teacher_model=teacher)
    assert all(torch.equal(student.layers[i].weight, teacher.layers[2 * i + 1].weight) for i in range(3))
    assert torch.equal(student.head.weight, teacher.head.weight)
    for problem, run in {
        r"needs the teacher": lambda: compression.init_compression(Stack(3), config),
        r"layers\.0\.weight of the student has shape \(4, 4\).*\(8, 8\).*does not fit": lambda: compression.student_initialization(
            Stack(3), Stack(6, 8), config
        ),
        r"the teacher has no module 'layers\.5'": lambda: compression.student_initialization(Stack(3), Stack(5), config),
        r"must list one layer .* 2 \(keep_number_layer\)": lambda: compression.student_initialization(
            Stack(3), teacher, block(layer_reduction=reduction | {"keep_number_layer": 2})
        ),
    }.items():
        with pytest.raises(ValueError, match=problem):
            run()


def test_conv1d_becomes_linear() -> None:
    from transformers.pytorch_utils import Conv1D

    net = nn.Sequential(Conv1D(6, 4), nn.ReLU())
    x = torch.randn(2, 4)
    expected = net(x)
    compression.convert_conv1d_to_linear(net, Conv1D)
    assert type(net[0]) is nn.Linear and net[0].out_features == 6
    torch.testing.assert_close(net(x), expected)


TECHNIQUES: list[dict[str, Any]] = [
    {"weight_quantization": technique({"quantize_groups": 3}, start_bits=4, target_bits=4)},
    {"weight_quantization": technique({"quantization_type": "served"}, start_bits=8, target_bits=8)},
    {"row_pruning": technique({}, ["up"], [["down"]], dense_ratio=0.5)},
    {"head_pruning": technique({"num_heads": 3}, ["down"], [["up"]], dense_ratio=0.5)},
    {"sparse_pruning": technique({"method": "l1"}, dense_ratio=0.25)},
    {"activation_quantization": technique({"range_calibration": "static"}, bits=8)},
]


@pytest.mark.parametrize("techniques", TECHNIQUES, ids=["groups", "served", "rows", "heads", "sparse", "static"])
def test_a_transposed_layer_is_compressed_as_a_linear_one(techniques: dict[str, Any]) -> None:
    """transformers' Conv1D, whose groups, rows and heads are those of its outputs: in training, and cleaned."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    net = nn.Sequential()
    net.up, net.down = Conv1D(12, 8), Conv1D(6, 12)
    twin = compression.convert_conv1d_to_linear(copy.deepcopy(net), Conv1D)
    config, x, found = block(**techniques), torch.randn(4, 8), []
    plain = twin.down(torch.relu(twin.up(x)))
    for each in (net, twin):
        torch.manual_seed(1)  # of learned scores
        compression.init_compression(each, config)
        out = each.down(torch.relu(each.up(x)))
        out.square().sum().backward()
        compression.compression_scheduler(each).step()
        grads = [each.up.weight.grad, each.down.weight.grad]
        cleaned = compression.redundancy_clean(each, config)
        found.append((out, *(grad if each is twin else grad.t() for grad in grads), cleaned.down(torch.relu(cleaned.up(x)))))
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0][0], plain)
    assert [*net.up.weight.shape] == [*twin.up.weight.t().shape] and net.up.nf == twin.up.out_features
    assert net.down.nx == twin.down.in_features and [*net.down.weight.shape] == [*twin.down.weight.t().shape]


def test_the_older_block_quantizes_every_matrix_of_gpt2() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16))
    matrices = {name for name, param in model.named_parameters() if param.dim() == 2}
    older = {"enabled": True, "quantize_bits": {"start_bits": 4, "target_bits": 4}}
    compression.init_compression(model, {"quantize_training": older})
    done = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Compressed)}
    assert matrices <= done and len(matrices) == 6
    with pytest.raises(ValueError, match='"served" with 4 bits is not built for Conv1D'):
        served = technique({"quantization_type": "served"}, ["c_fc"], start_bits=4, target_bits=4)
        compression.init_compression(copy.deepcopy(model), block(weight_quantization=served))


def test_what_cannot_be_compressed_is_refused_before_it_is_changed() -> None:
    def weights(shared: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
        return block(weight_quantization=technique(shared, **params))

    for problem, config in {
        r"start_bits \(4\) is below target_bits \(8\)": weights(start_bits=4, target_bits=8),
        r"target_bits \(20\) must be one of 1 to 16": weights(start_bits=30, target_bits=20),
        r"quantization_type \('both'\)": weights({"quantization_type": "both"}),
        r"rounding \('up'\)": weights({"rounding": "up"}),
        r"2 bits are symmetric": weights({"quantization_type": "asymmetric"}, start_bits=2, target_bits=2),
        r'"served" has 8 or 4 bits': weights({"quantization_type": "served"}, start_bits=8, target_bits=4),
        r"no Linear, .* 'nothing'": block(weight_quantization=technique(None, ["nothing"])),
        r"needs num_heads": block(head_pruning=technique()),
        r"method \('l2'\)": block(row_pruning=technique({"method": "l2"})),
        r"dense_ratio": block(row_pruning=technique(dense_ratio=0)),
        r"has no different_groups": block(row_pruning={"shared_parameters": {"enabled": True}}),
        r"target_bit\b": weights(target_bit=4),
        r"drop one of them": weights() | {"quantize_training": {"enabled": True}},
    }.items():
        net = Net()
        with pytest.raises(ValueError, match=problem):
            compression.init_compression(net, config)
        assert type(net.first) is nn.Linear
    with pytest.raises(ValueError, match="call init_compression first"):
        compression.compression_scheduler(Net())


# By the JSON, on an engine


def losses(config: dict[str, Any], steps: int = 6, **more: Any) -> tuple[list[float], Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}
    engine, *_ = slipstream.initialize(model=Net(), config=base | config | more)
    out = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        out.append(loss.item())
    return out, engine


@pytest.mark.parametrize("stage", [0, 3])
def test_by_the_json_alone(stage: int, tmp_path: Any) -> None:
    params = {"start_bits": 5, "target_bits": 3, "quantization_period": 2}
    config = block(weight_quantization=technique(None, **params))
    model, schedule = Net(), Bits(start=5, target=3, period=2)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(6):
        now = schedule.at(step)
        assert now is not None
        rounded = {name: compression.fake_quantize(p, now[0]) if p.dim() > 1 else p for name, p in model.named_parameters()}
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = torch.func.functional_call(model, rounded, x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    ours, engine = losses(config, zero_optimization={"stage": stage})
    assert ours == pytest.approx(expected, rel=1e-5)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = losses(config, steps=0)[1]
    engine.load_checkpoint(str(tmp_path))
    engine(torch.randn(4, 8))
    assert clock_of(engine.module).step == 6
    engine.destroy()


def test_the_older_block_is_weight_quantization() -> None:
    older = {
        "enabled": True,
        "quantize_groups": 2,
        "quantize_bits": {"start_bits": 6, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        "quantize_algo": {"q_type": "asymmetric", "rounding": "nearest"},
    }
    shared = {"quantize_groups": 2, "quantization_type": "asymmetric", "schedule_offset": 1}
    newer = block(weight_quantization=technique(shared, start_bits=6, target_bits=4, quantization_period=2))
    one, engine = losses({"quantize_training": older})
    engine.destroy()
    other, engine = losses(newer)
    engine.destroy()
    plain, engine = losses({})
    engine.destroy()
    assert one == other and one[0] == plain[0] and one[1] != plain[1]


def test_a_model_in_a_wrapper_counts_its_steps() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)  # type: ignore[no-any-return]

    config = block(weight_quantization=technique(start_bits=5, target_bits=3, quantization_period=2))
    model = compression.init_compression(Wrapper(), config)
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}
    engine, *_ = slipstream.initialize(model=model, config=base | config)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    assert clock_of(model).step == clock_of(model.module).step == 3
    engine.destroy()


def test_knowledge_distillation() -> None:
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    expected = sum(
        (torch.softmax(t / 2, -1) * (torch.log_softmax(t / 2, -1) - torch.log_softmax(s / 2, -1))).sum()
        for s, t in zip(student.flatten(0, 1), teacher.flatten(0, 1), strict=True)
    )
    loss = compression.kd_loss(student, teacher, temperature=2.0)
    assert loss.item() == pytest.approx(float(expected) * 4 / 6, rel=1e-5) and math.isfinite(loss.item())


# The second-order schedule


class Curved(nn.Module):
    """Residual blocks of which each adds to another extent to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for weight, layer in zip((1.0, 0.3, 2.0), self.layers, strict=True):
            x = x + weight * layer(x)
        return self.out(x).square().mean()


def hessian_shares(model: Curved, x: Tensor) -> list[float]:
    """The largest sizes of eigenvalues of each block's Hessian, over the largest of them."""
    largest = []
    for i, block in enumerate(model.layers):
        names, shapes = zip(*((f"layers.{i}.{name}", p.shape) for name, p in block.named_parameters()), strict=True)

        def loss(flat: Tensor, names: Any = names, shapes: Any = shapes) -> Tensor:
            parts = flat.split([math.prod(shape) for shape in shapes])
            values = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
            return torch.func.functional_call(model, values, (x,))  # type: ignore[no-any-return]

        matrix = torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in block.parameters()]))
        largest.append(torch.linalg.eigvalsh(matrix).abs().max().item())
    return [each / max(largest) for each in largest]


def test_eigenvalues_are_those_of_the_hessian(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Curved(), torch.randn(5, 4)
    measure = Eigenvalue(layer_name="layers", tol=1e-6, max_iter=2000)
    expected = hessian_shares(model, x)
    assert measure.shares(model(x), model.layers) == pytest.approx(expected, rel=1e-3)
    with pytest.warns(UserWarning, match="create_graph=True"):
        model(x).backward(create_graph=True)
    found = measure.compute_eigenvalue(model)
    assert [found[id(layer[2].bias)] for layer in model.layers] == [(pytest.approx(v, rel=1e-3), i) for i, v in enumerate(expected)]
    model.zero_grad()
    model(x).backward()
    assert measure.compute_eigenvalue(model) == {} and "create_graph=True" in caplog.text
    assert measure.post_process([0.0, math.nan, -4.0, 1.0]) == [1.0, 1.0, 1.0, 0.25]
    for name, num in (("encoder", 0), ("layers", 4)):
        with pytest.raises(ValueError, match=r"its lists are 'layers', 'layers\.0'"):
            Eigenvalue(layer_name=name, layer_num=num).get_layers(model)


def curved(config: dict[str, Any], steps: int, x: Tensor, model: Curved | None = None, **more: Any) -> Any:
    base = {"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = slipstream.initialize(model=model or Curved(), config=base | config | more)
    for _ in range(steps):
        engine.backward(engine(x))
        engine.step()
    return engine


def losses_of(engine: Any) -> list[list[int]]:
    """The steps at which the weights of each block lose their bits."""
    schedules = [layer[0].scheduled for layer in engine.module.layers]
    return [each.bits.losses(each.factors) for each in schedules]


MOQ = block(weight_quantization=technique(start_bits=16, target_bits=14, quantization_period=2))


@pytest.mark.parametrize("more", [{"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 3}}, {"remat": True}])
def test_sensitive_layers_keep_their_bits(more: dict[str, Any], tmp_path: Any) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    more = {"slipstream": {"activations": "recompute"}} if "remat" in more else more
    ordered = MOQ | {"eigenvalue": {"enabled": True, "layer_name": "layers", "tol": 1e-4}}
    factors = [1 + math.floor(4 * share) for share in hessian_shares(Curved(), x)]
    assert len(set(factors)) > 1
    engine = curved(ordered, 2, x, **more)
    assert losses_of(engine) == [[2, 4 * factor] for factor in factors]
    plain = curved(MOQ, 2, x, **more)
    assert losses_of(plain) == [[2, 4]] * 3
    plain.destroy()
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    resumed = curved(ordered, 0, x)
    resumed.load_checkpoint(str(tmp_path))
    assert losses_of(resumed) == [[2, 4 * factor] for factor in factors]
    resumed.destroy()
    low = curved(ordered, 2, x.bfloat16(), bf16={"enabled": True}, **more)
    assert [2 < last <= 20 for _, last in losses_of(low)] == [True] * 3 and len({last for _, last in losses_of(low)}) > 1
    low.destroy()


def test_layers_keep_their_bits_if_curvature_is_measured_seldom() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    measured = {"enabled": True, "layer_name": "layers", "tol": 1e-4, "gas_boundary_resolution": 3}
    seldom = curved(MOQ | {"eigenvalue": measured}, 2, x)
    assert losses_of(seldom) == [[2, 4]] * 3
    seldom.destroy()


def test_a_measurement_changes_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Losses and weights are those without it, at every number of micro-batches; a backward that is not the engine's is told."""
    still = block(weight_quantization=technique(start_bits=16, target_bits=15, quantization_period=2))
    block_ = {"enabled": True, "layer_name": "layers", "verbose": True, "layer_num": 2, "max_iter": 3}
    x, found = torch.randn(5, 4), []
    for more in ({}, {"eigenvalue": block_}):
        engine = curved(still | more, 0, x, optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_accumulation_steps=2)
        for _ in range(8):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        found.append((loss.item(), {name: value for name, value in engine.state_dict().items() if "factors" not in name}))
        engine.destroy()
    assert found[0][0] == found[1][0] and all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())
    assert caplog.text.count("over the largest") == 1
    engine = curved(still | {"eigenvalue": block_}, 0, x)
    for _ in range(2):
        engine(x).backward()
        engine.step()
    assert "no engine.backward(loss)" in caplog.text
    engine.destroy()
    with pytest.raises(ValueError, match="none loses any"):
        curved(block(weight_quantization=technique()) | {"eigenvalue": block_}, 0, x)


def test_what_the_second_order_needs_is_said() -> None:
    ordered: dict[str, Any] = {"eigenvalue": {"enabled": True, "layer_name": "layers"}}
    other = {"quantize_training": {"enabled": True, "eigenvalue": {"enabled": True, "layer_name": "blocks"}}}
    for problem, config in {
        "but nothing quantizes weights": ordered,
        "both enabled, but have different settings": ordered | other,
        "which slipstream.fused_layers does not support": ordered | MOQ | {"slipstream": {"fused_layers": True}},
        "which fp16.enabled does not support": ordered | MOQ | {"fp16": {"enabled": True}},
        "which compile.enabled does not support": ordered | MOQ | {"compile": {"enabled": True}},
    }.items():
        with pytest.raises(ValueError, match=problem):
            curved(config, 0, torch.randn(5, 4))


def snipped(modules: list[str], pattern: str = "2x4", **shared: Any) -> dict[str, Any]:
    options = {"method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 5, "schedule_offset_stride": 2}
    return block(sparse_pruning=technique({**options, "block_pattern": pattern, **shared}, modules, dense_ratio=0.25))


@pytest.mark.parametrize("pattern", ["2x4", "4x1", "2:4"])
def test_weights_are_pruned_by_scores_of_training(pattern: str) -> None:
    """Masks of averages of |weight x gradient|, in blocks; more go as the steps go on, and cleaning makes them zeros."""
    net = Net()
    compression.init_compression(net, config := snipped(["second"], pattern))
    scheduler, layer = compression.compression_scheduler(net), net.second
    scores, mask, kept = torch.zeros(16, 16), torch.ones(16, 16), []
    for step in range(7):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        hidden = torch.relu(net.first(x)).detach()
        out = nn.functional.linear(hidden, layer.weight.detach() * mask, layer.bias.detach())
        net.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        head = torch.autograd.grad(net.head(torch.relu(out.requires_grad_())).square().sum(), out)[0]
        if step >= 1:
            assert (layer.weight.grad[mask == 0] == 0).all()
            scores = 0.9 * scores + (layer.weight.detach() * mask * (head.t() @ hidden)).abs()
        scheduler.step()
        if step + 1 in (3, 5):
            if pattern == "2:4":
                mask = (scores.view(-1, 4).argsort(1).argsort(1) >= 2).float().view(16, 16)
            else:
                rows, columns = map(int, pattern.split("x"))
                blocks = scores.view(16 // rows, rows, 16 // columns, columns).mean((1, 3))
                best = top_mask(blocks, 0.25 ** ((step + 1 - 1) / 4)).float()
                mask = best.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert torch.equal(layer.mask_of("sparse"), mask)
        kept.append(mask.mean().item())
        with torch.no_grad():
            layer.weight.sub_(0.01 * layer.weight.grad)
    assert kept == ([1, 1, 0.5, 0.5, 0.5, 0.5, 0.5] if pattern == "2:4" else [1, 1, 0.5, 0.5, 0.25, 0.25, 0.25])
    before, masked = layer.weight.detach() * mask, net(x).detach()
    compression.redundancy_clean(net, config)
    assert type(net.second) is nn.Linear and [*net.second.state_dict()] == ["weight", "bias"]
    assert torch.equal(net.second.weight, before) and torch.equal(net(x), masked)


def test_scores_that_cannot_prune_are_refused() -> None:
    for options, message in (
        ({"schedule_offset_end": None}, r"needs schedule_offset_end \(None\) above schedule_offset \(1\)"),
        ({"schedule_offset_stride": 0}, r"a schedule_offset_stride \(0\) of at least 1"),
        ({"pattern": "4by1"}, r"block_pattern \('4by1'\) must be NxM"),
        ({"pattern": "4:4"}, "fewer than all"),
        ({"pattern": "3x1"}, r"block_pattern 3x1 does not divide a weight of shape \(16, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            compression.init_compression(Net(), snipped(["second"], **options))
