"""What every rank runs on CUDA: `python -m tests.gpu.cases`, in torchrun's environment. One JSON line per case on rank 0.

World 1 meets over NCCL. Two ranks share the one device, so they meet through gloo and the host's memory.
"""

import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.optim import Lamb
from slipstream.world.watch import PeerError
from slipstream.zero import build
from slipstream.zero.storage.lane import CudaLane, Event
from slipstream.zero.storage.store import DiskStore, HostStore
from tests import emulation, probe, toy, twin
from tests.on_gpu import EMULATED, tensors_of_tests

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of a parameter's whole update, relative. CUDA adds in other orders than the twin's single process does.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02}
SCALE = 256.0
STEPS = 4

CASES: dict[str, Callable[[], None]] = {}
ALONE: set[str] = set()
TOGETHER: set[str] = set()


def case(body: Callable[[], None]) -> Callable[[], None]:
    CASES[body.__name__] = body
    return body


def alone(body: Callable[[], None]) -> Callable[[], None]:
    """A case of one process."""
    ALONE.add(body.__name__)
    return case(body)


def together(body: Callable[[], None]) -> Callable[[], None]:
    """A case of several processes."""
    TOGETHER.add(body.__name__)
    return case(body)


def device() -> torch.device:
    return torch.device("cuda", 0)


def model(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    """Weights that `dtype` can hold, in fp32, on the device."""
    return toy.seeded(kind).to(dtype).float().to(device())


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = module(batch)
    return value


def batches(steps: int = STEPS, accumulation: int = 1) -> list[list[list[Tensor]]]:
    world = dist.get_world_size()
    return [
        [[toy.tokens(rank, i, micro).to(device()) for rank in range(world)] for micro in range(accumulation)] for i in range(steps)
    ]


def train(engine: Any, data: list[list[list[Tensor]]]) -> list[float]:
    return [float(toy.step(engine, ranks[engine.rank])) for micros in data for ranks in micros]


def engines(dtype: str = "fp32", **blocks: Any) -> Iterator[tuple[int, Any]]:
    for stage in STAGES:
        engine = toy.make(model(toy.Lm, DTYPES[dtype]), stage, dtype=dtype, **blocks)
        yield stage, engine
        engine.destroy()


def compare_with_twin(dtype: str, optimizer: str = "AdamW") -> None:
    data, step = batches(accumulation=2), {"lr": 1e-3, "weight_decay": 0.01}
    scale = SCALE if dtype == "fp16" else 1.0
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "clip": 0.5, "loss_scale": scale}
    if optimizer == "Lamb":
        options["optimizer"] = lambda masters: Lamb(masters.values(), **step)
    expected = twin.train(model(toy.Lm, DTYPES[dtype]), loss, data, **options)
    start = dict(model(toy.Lm, DTYPES[dtype]).named_parameters())
    blocks: dict[str, Any] = {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": optimizer, "params": step},
        "fp16": {"enabled": True, "loss_scale": SCALE} if dtype == "fp16" else None,
    }
    for stage, engine in engines(dtype, **blocks):
        measured = train(engine, data)
        wanted = expected.losses[:, :, engine.rank].flatten().tolist()
        gap = max(abs(a - b) for a, b in zip(measured, wanted, strict=True))
        assert gap < 20 * torch.finfo(DTYPES[dtype]).eps, f"stage {stage}: losses differ by {gap}"
        for name, value in engine.state_dict().items():
            assert value.dtype is DTYPES[dtype] and value.device == device()
            master = engine.optimizer_state(name)["master"].to(device())
            way = (start[name].detach() - expected.masters[name]).norm().item()
            error = (master - expected.masters[name]).norm().item()
            assert error <= TOLERANCE[dtype] * way, f"stage {stage}: the update of {name} is off by {error:.3g} of {way:.3g}"


@case
def fp32_equals_plain_torch() -> None:
    compare_with_twin("fp32")


@case
def bf16_equals_plain_torch() -> None:
    compare_with_twin("bf16")


@case
def fp16_equals_plain_torch() -> None:
    compare_with_twin("fp16")


@case
def lamb_equals_its_own_loop() -> None:
    compare_with_twin("fp32", "Lamb")


@case
def samples_lie_where_the_dataset_has_them() -> None:
    """A batch of the host's samples is pinned; one of the device's is not, and needs no copy."""
    for where in ("cpu", device()):
        samples = [{"tokens": row.to(where), "place": i} for i, row in enumerate(toy.tokens(0, 0).repeat(4, 1).cpu())]
        engine, _, loader, _ = slipstream.initialize(model=model(toy.Lm), config=toy.settings(1), training_data=samples)
        for batch in loader:
            assert batch["tokens"].device.type == torch.device(where).type
            assert batch["tokens"].is_pinned() == batch["place"].is_pinned() == (where == "cpu")
            toy.step(engine, batch["tokens"].to(device(), non_blocking=True))
        engine.destroy()


@case
def deepspeeds_inference_engine_moves_the_module_here() -> None:
    """A module of the CPU, whole or in slices, in floats and in int8, unless it is to stay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipstream.compat.inference import init_inference

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    ids, cuts = torch.arange(8)[None], {"mp_size": dist.get_world_size()}
    for options, limit in ((cuts, 1e-4), (cuts | {"dtype": torch.int8}, 0.1), ({"keep_module_on_host": True}, 1e-4)):
        torch.manual_seed(0)
        net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
        expected = net(ids).logits
        engine = init_inference(net, **options)
        where = torch.device("cpu") if "keep_module_on_host" in options else device()
        logits = engine(ids.to(where)).logits
        assert logits.device == where and {one.device for one in engine.module.parameters()} == {where}, options
        assert (logits.float().cpu() - expected).abs().max() < limit * expected.abs().max(), options
        answer = engine.generate(ids.to(where), max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert answer.shape == (1, 11) and answer.device == where


@case
def states_by_name_are_here() -> None:
    """Wherever they rest, so that a script may compute with them and the weights."""
    for stage, zero in ((0, {}), (3, {}), (2, HOST), (3, HOST)):
        engine = toy.make(model(toy.Net), stage, dtype="bf16", zero_optimization=zero)
        engine.backward(engine(toy.floats(engine.rank, 0).to(device(), torch.bfloat16)).float().square().mean())
        engine.step()
        states = engine.optimizer_state("out.weight")
        assert states.keys() == {"master", "exp_avg", "exp_avg_sq"} and {value.device for value in states.values()} == {device()}
        engine.destroy()


@together
def ranks_tell_each_other_values_of_the_device() -> None:
    """By DeepSpeed's name; over gloo, too."""
    from slipstream.compat.engine import initialize

    engine = initialize(model=model(toy.Net), config=toy.settings(1))[0]
    every = engine.all_gather_scalar(torch.tensor([dist.get_rank() + 0.5], device=device()), dp_group=None)
    assert [value.item() for value in every] == [rank + 0.5 for rank in range(dist.get_world_size())]
    assert all(value.device == device() for value in every)
    engine.destroy()


@together
def a_wait_for_values_of_a_late_rank_ends() -> None:
    """The host reads the values, and must not block in CUDA until they come."""
    engine = slipstream.initialize(model=model(toy.Net), config=toy.settings(1))[0]
    engine.watch.timeout_s = 0.5
    time.sleep(3 * dist.get_rank())
    try:
        engine.states.comms.data.exchange(torch.ones(1, dtype=torch.float64))
    except PeerError as error:
        assert dist.get_rank() == 0 and "waited 0 s in exchange" in str(error)
    else:
        assert dist.get_rank() == 1, "the first rank waited for the second"


@case
def stages_agree_bit_for_bit() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = []
    for stage, engine in engines("bf16", gradient_clipping=0.5):
        losses = train(engine, batches(20))
        weights = torch.cat([value.flatten().float() for value in engine.state_dict().values()])
        results.append((stage, losses, engine.global_grad_norm, weights))
    _, losses, norm, weights = results[0]
    for stage, other_losses, other_norm, other_weights in results[1:]:
        assert other_losses == losses and other_norm == norm, f"stage {stage} and stage 0: losses or norm differ"
        assert torch.equal(other_weights, weights), f"stage {stage} and stage 0: weights differ"


def compare_with_workers(twin: Any, stages: Sequence[int], **blocks: Any) -> None:
    """Stages have equal bits, close to a simulation on the CPU: another sum there may turn a sign or a code."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    start = {name: value.clone() for name, value in twin.model.state_dict().items()}
    for i in range(STEPS + 2):
        twin.step(i)
    results = []
    for stage in stages:
        engine = toy.make(model(toy.Lm), stage, **blocks)
        losses = train(engine, batches(STEPS + 2))
        weights = {name: value.cpu() for name, value in engine.state_dict().items()}
        engine.destroy()
        for name, value in twin.model.state_dict().items():
            way, error = (value - start[name]).norm().item(), (weights[name] - value).norm().item()
            assert error <= 0.02 * way, f"stage {stage}: the update of {name} is off by {error:.3g} of {way:.3g}"
        results.append((losses, torch.cat([value.flatten() for value in weights.values()])))
    for losses, values in results[1:]:
        assert losses == results[0][0] and torch.equal(values, results[0][1]), f"stages {stages} differ"


@case
def signs_of_momentum_are_those_of_simulated_workers() -> None:
    from tests.dist.test_onebit import ONE_BIT, Twin

    compare_with_workers(Twin(dist.get_world_size()), STAGES, optimizer=ONE_BIT)


@case
def gradients_in_codes_are_those_of_simulated_workers() -> None:
    from tests.dist.test_codes_on_the_wire import Twin

    world, sgd = dist.get_world_size(), {"type": "SGD", "params": {"lr": 1.0}}
    if world == 1:
        return  # nothing is sent, so nothing is coded
    for stages, mean_bits in (((0,), 8), ((1, 2, 3), None)):
        twin = Twin(4, world, mean_bits)
        compare_with_workers(twin, stages, optimizer=sgd, zero_optimization={"zero_quantized_gradients": True})


HOST = {"offload_optimizer": {"device": "cpu"}}


class InTurn(CudaLane):
    """Every copy has ended before anything else happens: what a missing wait is held against."""

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        torch.cuda.synchronize(self.device)
        event = super().copy(target, source, after)
        event.wait()
        return event


def with_tiers(zero: dict[str, Any], stage: int, dtype: str, micros: int) -> list[Any]:
    """Losses, norms and weights of a model whose copies take longer than launching them. Blocks of 1,050,000 weights."""
    engine = toy.make(
        model(lambda: toy.Lm(dim=512, depth=4), DTYPES[dtype]),
        stage,
        dtype=dtype,
        gradient_clipping=0.5,
        gradient_accumulation_steps=micros,
        zero_optimization={"sub_group_size": 100_000} | zero,
    )
    measured: list[Any] = [*train(engine, batches(6, micros)), engine.global_grad_norm]
    if zero:
        store = probe.stores(engine, probe.units(engine)[0])["exp_avg"]
        assert isinstance(store, DiskStore) or (isinstance(store, HostStore) and store.tensor.is_pinned()), "states left the device"
    measured += [value.clone() for value in engine.state_dict().values()]
    engine.destroy()
    return measured


def compare_tiers(expected: list[Any], measured: list[Any], what: str) -> None:
    for one, other in zip(expected, measured, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, f"{what}: {one} is {other}"


def tiers_of(stage: int, folder: str) -> dict[str, dict[str, Any]]:
    disk = {"device": "nvme", "nvme_path": folder}
    measured = {"optimizer on the host": HOST, "optimizer on disk": {"offload_optimizer": disk}}
    if stage == 3:
        measured["weights on the host"] = HOST | {"offload_param": {"device": "cpu"}}
        measured["all on disk"] = {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    return measured


@case
def copies_beside_computing_change_nothing() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for stage, micros in itertools.product(STAGES, (1, 3)):
        for name, zero in tiers_of(stage, tempfile.mkdtemp()).items():
            with patch.object(build, "lane_of", InTurn):
                expected = with_tiers(zero, stage, "bf16", micros)
            compare_tiers(expected, with_tiers(zero, stage, "bf16", micros), f"stage {stage}, {micros} micro-batches, {name}")


@case
def states_on_the_host_give_the_bits_of_resident_ones() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype, stage in itertools.product(DTYPES, STAGES):
        expected = with_tiers({}, stage, dtype, 2)
        for name, zero in tiers_of(stage, tempfile.mkdtemp()).items():
            compare_tiers(expected, with_tiers(zero, stage, dtype, 2), f"stage {stage}, {dtype}, {name}")


@case
def sleep_gives_the_device_back_and_wakes_the_same() -> None:
    for stage, zero in ((0, {}), (2, HOST), (3, HOST | {"offload_param": {"device": "cpu"}})):
        ends = []
        for naps in (False, True):
            engine = toy.make(
                model(lambda: toy.Lm(dim=512, depth=4)), stage, dtype="bf16", zero_optimization=zero, gradient_accumulation_steps=2
            )
            for i in range(5):
                toy.step(engine, batches(5)[i][0][engine.rank])
                if naps:
                    held = torch.cuda.memory_allocated()
                    given = engine.sleep()
                    assert torch.cuda.memory_allocated() <= held - given
                    engine.wake()
            ends.append([value.clone() for value in engine.state_dict().values()])
            engine.destroy()
        compare_tiers(ends[0], ends[1], f"stage {stage}")


@case
def released_weights_give_their_memory_back() -> None:
    if dist.get_world_size() == 1:
        return  # one rank has all weights, and releases none
    engine = toy.make(model(lambda: toy.Lm(dim=256, depth=8)), 3)
    train(engine, batches(2))
    torch.cuda.synchronize()
    for unit in probe.units(engine):
        held = unit.full.untyped_storage().nbytes()
        assert held == 0, f"unit {unit.name} holds {held} bytes while released"
    param = probe.units(engine)[1].params[0]
    try:
        param.sum()
    except RuntimeError as error:
        assert "gathered" in str(error)
    else:
        raise AssertionError("a released parameter was read")
    with slipstream.zero.gathered(param):
        assert bool(torch.isfinite(param).all())
    engine.destroy()
    torch.cuda.synchronize()


@case
def engines_come_and_go_at_flat_memory() -> None:
    held = []
    for _ in range(12):
        engine = toy.make(model(toy.Lm), 3, dtype="bf16")
        train(engine, batches(1))
        engine.destroy()
        del engine
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[3], f"bytes allocated after each engine: {held}"


@case
def an_overflow_is_skipped_on_all_ranks() -> None:
    for stage, engine in engines("fp16", fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}):
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        value = engine(batches(1)[0][0][engine.rank])
        engine.backward(value * (float("inf") if engine.rank == 0 else 1.0))
        engine.step()
        assert engine.skipped_steps == 1 and engine.precision.loss_scale == 128.0, f"stage {stage}"
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items()), f"stage {stage}"


@case
def a_checkpoint_moves_between_stages() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    data = batches(4)
    engine = toy.make(model(toy.Lm), 3, dtype="bf16")
    train(engine, data[:2])
    engine.save_checkpoint(folder[0])
    saved = engine.state_dict()
    further = train(engine, data[2:])
    engine.destroy()
    for stage in STAGES:
        engine = toy.make(model(toy.Lm), stage, dtype="bf16")
        engine.load_checkpoint(folder[0])
        assert all(torch.equal(value, saved[name]) for name, value in engine.state_dict().items()), f"stage {stage}"
        again = train(engine, data[2:])
        assert max(abs(a - b) for a, b in zip(again, further, strict=True)) < 1e-2, f"stage {stage}: {again}, {further}"
        engine.destroy()


@together
def slices_of_matrices_are_joined() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    for stage in (1, 3):
        torch.manual_seed(0)
        net = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=False, **sizes))
        whole = {name: value.clone() for name, value in net.state_dict().items()}
        engine = toy.make(net, stage, tensor_parallel={"autotp_size": 2}, optimizer={"type": "AdamW", "params": {"lr": 0.0}})
        ids = torch.arange(16, device=device()).view(2, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        for name, value in engine.state_dict().items():
            assert torch.equal(value.cpu(), whole[name]), (stage, name)
        engine.destroy()


@together
def stages_of_a_pipeline_have_the_bits_of_one() -> None:
    """Headers of their messages lie in host memory, which a group of NCCL alone does not send."""
    from tests.dist import test_pipeline

    with tensors_of_tests():
        test_pipeline.same_bits("auto", "fp32", 1, dp=1, num_stages=2, schedules=test_pipeline.SCHEDULES[:2])


@case
def checkpointed_and_compiled_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(toy.Net):
        def body(self, h: Tensor) -> Tensor:
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return h

    results = []
    for kind in ("plain", "checkpointed", "compiled"):
        net = model(Checkpointed if kind == "checkpointed" else toy.Net)
        if kind == "compiled":
            for block in net.blocks:
                block.compile(backend="aot_eager")
        engine = toy.make(net, 3)
        for i in range(3):
            engine.backward(engine(toy.floats(engine.rank, i).to(device())).square().mean())
            engine.step()
        results.append(engine.state_dict())
        engine.destroy()
    for other in results[1:]:
        for name, value in other.items():
            torch.testing.assert_close(value, results[0][name.replace("_orig_mod.", "")])


@case
def a_hugging_face_llama_trains_and_generates() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
    )
    engine = toy.make(LlamaForCausalLM(config), 3, dtype="bf16")
    ids = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(engine.rank)).to(device())
    losses = []
    for _ in range(8):
        value = engine(input_ids=ids, labels=ids).loss
        engine.backward(value)
        engine.step()
        losses.append(float(value))
    assert losses[-1] < losses[0], losses
    with torch.no_grad():
        out = engine.module.generate(ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 8)
    engine.destroy()


def served(runner: Any, prompts: list[list[int]], new: int = 8) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy continuations: prompts in one batch, then each token in one. With the logits of each forward."""
    from slipstream.inference.core import Batch, Chunk, Request, SamplingParams

    free = iter(range(runner.num_blocks))
    requests = [Request(id=str(i), tokens=list(prompt), params=SamplingParams()) for i, prompt in enumerate(prompts)]
    logits = []
    for _ in range(new):
        for request in requests:
            while len(request.blocks) * runner.block_size < len(request.tokens):
                request.blocks.append(next(free))
        chunks = tuple(Chunk(request, request.num_computed, len(request.tokens)) for request in requests)
        logits.append(runner.forward(Batch(chunks, ())))
        for request, token in zip(requests, logits[-1].argmax(-1).tolist(), strict=True):
            request.num_computed = len(request.tokens)
            request.tokens.append(token)
    return [request.tokens for request in requests], logits


def serving(dtype: torch.dtype, kind: str = "") -> tuple[Callable[..., Any], list[list[int]]]:
    """What makes a runner (`CudaDecoder` with `max_batch`, or `Decoder` without) of one small Llama; and prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipstream.inference.cuda import CudaDecoder
    from slipstream.inference.decoder import Decoder, head_shapes
    from slipstream.inference.kv_cache import KVCache
    from slipstream.inference.models import from_hf, from_state
    from slipstream.inference.weights import quantize

    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=512,
            max_position_embeddings=2048,
            initializer_range=0.08,
        )
    ).to(device(), dtype)
    config = from_hf(net.config.to_dict())
    weights = from_state(config, net.state_dict())
    weights = quantize(weights, kind) if kind else weights

    def make(max_batch: int | None) -> Any:
        cache = KVCache(head_shapes(config), num_blocks=512, block_size=16, dtype=dtype, device=device())
        return (
            Decoder(config, weights, cache, dtype)
            if max_batch is None
            else CudaDecoder(config, weights, cache, dtype, max_batch=max_batch)
        )

    make_ids = torch.Generator().manual_seed(1)
    return make, [torch.randint(512, (n,), generator=make_ids).tolist() for n in (3, 40, 700)]


@alone
def served_greedily_as_by_plain_torch() -> None:
    make, prompts = serving(torch.float32)
    (tokens, logits), (wanted, plain) = served(make(4), prompts), served(make(None), prompts)
    assert tokens == wanted
    torch.testing.assert_close(torch.stack(logits), torch.stack(plain), rtol=1e-3, atol=1e-3)


@alone
def served_in_few_bits_as_by_plain_torch() -> None:
    for dtype, kind in ((torch.bfloat16, ""), (torch.float16, ""), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")):
        make, prompts = serving(dtype, kind)
        first, plain = served(make(0), prompts, 1)[1][0], served(make(None), prompts, 1)[1][0]
        error = (first - plain).norm() / plain.norm()
        assert error < 0.05, f"{dtype} {kind}: logits are off by {error:.3f} of their norm"


@alone
def served_by_graphs_and_without_the_same_bits() -> None:
    for dtype, kind in ((torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")):
        make, prompts = serving(dtype, kind)
        with_graphs, without = make(4), make(0)
        assert list(with_graphs._graphs) == [1, 2, 4]
        (tokens, logits), (other_tokens, others) = served(with_graphs, prompts), served(without, prompts)
        assert tokens == other_tokens and torch.equal(torch.stack(logits), torch.stack(others)), f"{dtype} {kind}"


@alone
def served_alone_and_together_the_same_bits() -> None:
    """One row or several, a prompt of few rows or of many: other tiles, the same sums."""
    for dtype, kind in ((torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")):
        make, prompts = serving(dtype, kind)
        runner = make(4)
        together = served(runner, prompts)[1]
        for i, prompt in enumerate(prompts):
            alone = served(runner, [prompt])[1]
            for step, (one, all_of_them) in enumerate(zip(alone, together, strict=True)):
                assert torch.equal(one[0], all_of_them[i]), f"{dtype} {kind}: request {i}, forward {step}"


@alone
def layers_of_any_module_move_here_and_back() -> None:
    """By Triton's kernel for few rows, by torch for many, of sizes that no block divides."""
    torch.manual_seed(0)
    for kind, limit in (("int8", 0.02), ("int4", 0.12), ("bf16", 0.01)):
        layer, x = nn.Linear(200, 72), torch.randn(300, 200)
        expected = layer(x).detach()
        ours = slipstream.quantize(nn.Sequential(layer), kind)
        first = ours(x)
        ours.to(device())
        for rows in (1, 5, 300):
            for dtype in (torch.float32, torch.bfloat16):
                computed = ours(x[:rows].to(device(), dtype)).float().cpu()
                error = (computed - expected[:rows]).norm() / expected[:rows].norm()
                assert error < limit + 0.01 * (dtype == torch.bfloat16), f"{kind}, {rows} rows of {dtype}: off by {error:.3f}"
        assert torch.equal(ours.cpu()(x), first)


def family(place: int) -> Callable[[], None]:
    """Every eighth family, decoders and encoders, as by plain torch, and each prompt with the same bits alone and among others."""

    def body() -> None:
        from tests.inference import test_embedding, test_families, test_long_rope
        from tests.inference import test_triton_families as checks

        for name, dtype in itertools.product([*test_families.CASES][place::8], (torch.float32, torch.bfloat16)):
            checks.check_logits(test_families.model_of(name), checks.PROMPTS, dtype)
        for name, dtype in itertools.product([*test_embedding.CASES][place::8], (torch.float32, torch.bfloat16)):
            checks.check_hidden(test_embedding.model_of(name), checks.TEXTS, dtype)
        for name in [*test_long_rope.CASES][place::8]:
            checks.check_logits(test_long_rope.model_of(name), test_long_rope.TEXTS, whole=True)

    body.__name__ = f"families_are_served_as_by_plain_torch_{place}"
    return body


for eighth in range(8):
    alone(family(eighth))


def small_llama() -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model of transformers; prompts; and both of these with what it says greedily."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    net = LlamaForCausalLM(config).to(device()).eval()
    prompts = [[i * i % 127 + 1 for i in range(length)] for length in (5, 30)]
    wanted = [net.generate(torch.tensor([p], device=device()), max_new_tokens=12, do_sample=False)[0].tolist() for p in prompts]
    return net, prompts, wanted


@alone
def the_engine_serves_with_kernels_and_graphs() -> None:
    net, prompts, wanted = small_llama()
    with slipstream.init_inference(net, device="cuda", max_running=4, kv_cache_bytes=1 << 24) as serving:
        assert "Triton kernels" in serving.description, serving.description
        answers = serving.generate(prompts, max_new_tokens=12, temperature=0)
    assert [p + list(answer.token_ids) for p, answer in zip(prompts, answers, strict=True)] == wanted


@alone
def an_engine_serves_weights_that_another_stream_wrote() -> None:
    """Its thread has a stream of its own. By torch's forward, which the emulated device watches."""
    from slipstream.inference import runner

    net, prompts, wanted = small_llama()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), patch.object(runner, "_why_no_kernels", lambda *_: "a test of torch's"):
        with slipstream.init_inference(net.config, device="cuda", max_running=4, kv_cache_bytes=1 << 24) as serving:
            serving.update_weights(net.named_parameters())
            answers = serving.generate(prompts, max_new_tokens=12, temperature=0)
    assert [p + list(answer.token_ids) for p, answer in zip(prompts, answers, strict=True)] == wanted


@together
def served_over_processes_as_by_one() -> None:
    """Over gloo on one GPU, over NCCL on one each: as one process in the dtype; a row has equal bits alone and beside others."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    world, each = dist.get_world_size(), torch.cuda.device_count() >= dist.get_world_size()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "vocab_size": 520, "initializer_range": 0.08}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, **ends)).eval()
    routed = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **experts, **ends)).eval()
    prompts = [[i * i % 519 + 1 for i in range(length)] for length in (3, 40, 700)]
    options: dict[str, Any] = {"max_running": 4, "kv_cache_bytes": 1 << 26}
    settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": 3}
    own, shared = f"cuda:{dist.get_rank() if each else 0}", "cuda" if each else "cuda:0"
    for net, dtype in (*((dense, dtype) for dtype in ("fp32", "bf16", "int8", "int4")), (routed, "fp32")):
        with slipstream.init_inference(net, dtype=dtype, device=own, **options) as engine:
            wanted = engine.generate(prompts, **settings)
        with slipstream.init_inference(net, dtype=dtype, device=shared, tp_size=world, **options) as engine:
            assert f"{world} processes over {'NCCL' if each else 'gloo'}" in engine.description, engine.description
            assert ("without CUDA graphs" in engine.description) != each
            if engine.leads:
                beside = engine.generate(prompts, **settings)
                for prompt, one, expected in zip(prompts, beside, wanted, strict=True):
                    compare_answers(one, expected, {"fp32": 1e-3, "bf16": 0.1}.get(dtype, 0.25), f"{type(net).__name__} in {dtype}")
                    alone = engine.generate(prompt, **settings)
                    assert alone.token_ids == one.token_ids and alone.logprobs == one.logprobs, dtype


def compare_answers(one: Any, other: Any, limit: float, what: str) -> None:
    """Log-probabilities up to the first token that differs, where the two that were drawn must be as close."""
    pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    for token, wanted, mine, theirs in pairs:
        gap = abs(mine.logprob - theirs.logprob)
        assert gap < limit, f"{what}: log-probabilities of {token} and {wanted} are {gap:.3g} apart"
        if token != wanted:
            return


@alone
def groups_end_after_graphs_of_their_operations() -> None:
    """What `ServingRanks` rests on: of NCCL, destruction ends once the graph is reset; and an abort that has begun before."""
    for ends in (dist.destroy_process_group, lambda group: group.abort()):
        group = dist.new_group(backend="nccl")
        x, out = torch.arange(8.0, device=device()), torch.zeros(8, device=device())
        dist.all_gather_into_tensor(out, x, group=group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_gather_into_tensor(out, x, group=group)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, x)
        ending = threading.Thread(target=ends, args=(group,), daemon=True)
        if ends is not dist.destroy_process_group:
            ending.start()
            time.sleep(1.0)
        graph.reset()
        if ends is dist.destroy_process_group:
            ending.start()
        ending.join(60)
        assert not ending.is_alive(), "the group does not end"


def compare_gradients(ours: Tensor, theirs: Tensor, inputs: Sequence[Tensor], limit: float, what: object) -> None:
    """Of random gradients of the outputs; errors are of the norm of what is compared."""
    grad = torch.randn_like(ours)
    pairs = zip((ours, *torch.autograd.grad(ours, inputs, grad)), (theirs, *torch.autograd.grad(theirs, inputs, grad)), strict=True)
    for i, (mine, other) in enumerate(pairs):
        error = ((mine.double() - other.double()).norm() / other.double().norm()).item()
        assert error < limit, f"{what}: {f'gradient {i - 1}' if i else 'the output'} is off by {error:.3g} of its norm"


LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@alone
def block_sparse_attention_is_its_twin() -> None:
    """Blocks of each size, narrow and wide heads; with masks and biases, and dropout of the same places as on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention, takes

    torch.manual_seed(0)
    for dtype, block, dim, causal in (
        (torch.float32, 64, 64, False),
        (torch.float32, 128, 256, True),
        (torch.bfloat16, 16, 64, True),
        (torch.bfloat16, 64, 128, False),
        (torch.float16, 48, 80, True),
        (torch.bfloat16, 64, 256, False),
    ):
        layout = BlockLayout(torch.rand(4, 768 // block, 768 // block) < 0.4, block, causal=causal)
        inputs = [
            torch.randn(2, 768, n, dim, device=device()).to(dtype).transpose(1, 2).detach().requires_grad_() for n in (4, 2, 2)
        ]
        bias = torch.randn(4, 768, 768, device=device(), requires_grad=True)
        spans = torch.randint(769, (2, 768, 2), device=device()).sort(-1).values
        for options in ({}, {"bias": bias, "spans": spans, "key_bias": torch.randn(2, 768, device=device())}):
            assert takes(inputs[0])
            ours = block_sparse_attention(*inputs, layout, **options)
            with sdpa_kernel(SDPBackend.MATH):
                theirs = block_sparse_attention(*inputs, layout, **options)
            leaves = [*inputs, bias] if options else inputs
            compare_gradients(ours, theirs, leaves, LIMITS[dtype], f"{dtype}, blocks of {block}, {dim} features, {list(options)}")
        outs = []
        for where in (device(), torch.device("cpu")):
            torch.manual_seed(1)
            outs.append(block_sparse_attention(*(x.to(where) for x in inputs), layout, dropout=0.2).to(device()))
        compare_gradients(outs[0], outs[1], inputs, LIMITS[dtype], f"{dtype}, blocks of {block}, dropout")


@alone
def passes_of_fused_layers_are_their_twins() -> None:
    """Widths that no block divides, and those of a large model. Dropout is of the same places: a hash of seed and place."""
    from slipstream.ops import fused

    def compare(call: Callable[[], Tensor], inputs: Sequence[Tensor], dtype: torch.dtype, what: object) -> None:
        outs = []
        for kernels in (fused._kernels, lambda _: None):
            torch.manual_seed(0)
            with patch.object(fused, "_kernels", kernels):
                assert (kernels(inputs[0]) is None) == bool(outs)
                out = call()
                outs.append((out, torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(-1) / out.shape[-1])))
        for i, (mine, other) in enumerate(zip((outs[0][0], *outs[0][1]), (outs[1][0], *outs[1][1]), strict=True)):
            error = ((mine.double() - other.double()).norm() / other.double().norm()).item()
            assert error < LIMITS[dtype], f"{what}: {f'gradient {i - 1}' if i else 'the output'} is off by {error:.3g} of its norm"

    torch.manual_seed(0)
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16, torch.float16), (67, 768, 8192)):
        x, other = (torch.randn(3, 700, columns, device=device()).to(dtype).requires_grad_() for _ in range(2))
        weight, shift, bias = (torch.randn(columns, device=device()).to(dtype).abs().add(0.5).requires_grad_() for _ in range(3))
        for norm, drop, inverts in itertools.product(("layer", "rms"), (0.0, 0.1), (False, dtype == torch.float32)):
            columns_of: Any = {"weight": weight, "shift": shift} if norm == "layer" else {"weight": weight}
            options: Any = {"norm": norm, "bias": bias, "residual": other, "dropout": drop, "invertible": inverts, **columns_of}
            leaves = [x, other, bias, *columns_of.values()]
            compare(lambda o=options: fused.add_norm(x, **o)[1], leaves, dtype, (dtype, columns, norm, drop, inverts))  # type: ignore[misc]
        for kind in fused.ACTIVATIONS:
            compare(lambda k=kind: fused.activation(x, k, bias=bias, up=other), [x, bias, other], dtype, (dtype, columns, kind))  # type: ignore[misc]
        logits, target = x.detach().flatten(0, 1).requires_grad_(), torch.randint(columns, (2100,), device=device())
        compare(lambda: fused.cross_entropy(logits, target, label_smoothing=0.1), [logits], dtype, (dtype, columns, "loss"))
        turned = torch.randn(2, 300, 6, 80, device=device()).to(dtype).requires_grad_()
        cosine, sine = (torch.randn(1, 300, 64, device=device()) for _ in range(2))
        compare(lambda: fused.rotary(turned, cosine, sine), [turned], dtype, (dtype, "rotary"))


def main() -> None:
    warnings.simplefilter("ignore")
    slipstream.init_distributed()
    torch.cuda.set_device(0)
    wanted = sys.argv[1:] or list(CASES)
    for name in wanted:
        start, trouble = time.monotonic(), ""
        try:
            CASES[name]()
            if EMULATED and (found := emulation.races()):
                raise AssertionError("\n".join(found))
        except Exception:
            trouble = traceback.format_exc()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, trouble)
        if dist.get_rank() == 0:
            story = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(told) if text)
            print(json.dumps({"case": name, "trouble": story, "seconds": round(time.monotonic() - start, 1)}), flush=True)
        if any(told):
            os._exit(1)  # its groups are in no known state; pytest starts the rest anew
    backend = dist.get_backend()
    if dist.get_rank() == 0:
        print(json.dumps({"backend": str(backend)}), flush=True)
    dist.barrier()
    os._exit(0)  # NCCL's own tear-down is not what is tested


if __name__ == "__main__":
    main()
