"""torch.compile of blocks and models, before and after `initialize`, in every stage."""

import shutil
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from tests import cases, toy
from tests.pool import distributed

STAGES = cases.STAGES


def train(engine: Any) -> list[Tensor]:
    losses = []
    for i in range(3):
        loss = engine(toy.floats(engine.rank, i)).square().mean()
        loss.backward()
        engine.step()
        losses.append(loss.detach())
    return losses


Backend = Callable[..., Any]


class Recorder:
    """A backend that records its graphs."""

    def __init__(self, name: str) -> None:
        self.compile = torch._dynamo.lookup_backend(name)
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # a level below
        calls = [str(node.target) for part in parts for node in part.graph.nodes if node.op == "call_function"]
        self.graphs.append(calls)
        return self.compile(graph, inputs)


def by_method(model: Any, backend: Backend) -> None:
    """Compiled code calls the hooks: graphs break around a block, not inside it."""
    for block in model.blocks:
        block.compile(backend=backend)


def by_forward(model: Any, backend: Backend) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def by_wrapper(model: Any, backend: Backend) -> None:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend=backend)


def whole(model: Any, backend: Backend) -> None:
    model.compile(backend=backend)


Way = Callable[[Any, Backend], None]
BEFORE: dict[str, Way] = {"by method": by_method, "by forward": by_forward, "by wrapper": by_wrapper, "the whole": whole}
MOST = {name: way for name, way in BEFORE.items() if cases.EVERYTHING or name in ("by forward", "the whole")}
AFTER: dict[str, Way] = {"by method": by_method, "by forward": by_forward, "the whole": whole}


def quiet_tqdm() -> None:
    """dynamo shows progress bars if tqdm is installed; their thread and semaphore would outlive the test."""
    try:
        from tqdm import tqdm
    except ImportError:
        return
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())


recorded = Recorder("aot_eager")  # a config refers to it as "tests.dist.test_compile.recorded"


def check(way: Way, before: bool, transport: str, backend: str, stages: tuple[int, ...] = STAGES, **config: Any) -> None:
    """`config`: more keys for the compiled model's engine."""
    quiet_tqdm()
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # dynamo's own check
    for stage in cases.stages(transport, stages):
        plain = toy.make(toy.seeded(toy.Net), stage, transport)
        expected = train(plain)
        plain.destroy()
        torch._dynamo.reset()
        recorder = Recorder(backend)
        model = toy.seeded(toy.Net)
        if before:
            way(model, recorder)
        engine = toy.make(model, stage, transport, **config)
        if not before:
            way(model, recorder)
        results = train(engine)
        torch.testing.assert_close(torch.stack(results), torch.stack(expected), rtol=1e-4, atol=1e-6)
        blocks = [" ".join(calls) for calls in recorder.graphs if any("relu" in call for call in calls)]
        assert blocks and len(blocks) <= 3, f"stage {stage}: {len(blocks)} graphs of three alike blocks and three steps"
        for block in blocks:
            assert block.count("linear") >= 2 and "layer_norm" in block, f"stage {stage}: only a part of a block: {block}"
        engine.destroy()
    torch._dynamo.reset()


@pytest.mark.parametrize("way", MOST)
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_compiled_before_initialize(way: str, transport: str) -> None:
    check(BEFORE[way], True, transport, "aot_eager")


@pytest.mark.parametrize("way", AFTER)
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_compiled_after_initialize(way: str, transport: str) -> None:
    check(AFTER[way], False, transport, "aot_eager")


def check_config(stage: int, transport: str, backend: str, **config: Any) -> None:
    quiet_tqdm()
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    plain = toy.make(toy.seeded(toy.Net), stage, transport, **config)
    expected = train(plain)
    plain.destroy()
    torch._dynamo.reset()
    model = toy.seeded(toy.Net)
    compiled = {"enabled": True, "backend": backend, "kwargs": {"fullgraph": True}}
    engine = toy.make(model, stage, transport, compile=compiled, **config)
    torch.testing.assert_close(torch.stack(train(engine)), torch.stack(expected), rtol=1e-4, atol=1e-6)
    engine.destroy()
    assert not any("forward" in block.__dict__ for block in model.blocks)
    torch._dynamo.reset()


@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_compile(transport: str) -> None:
    """One graph for all blocks, which contains the whole block; also with activation checkpointing."""
    for stage in cases.stages(transport, (0, 3)):
        for activations in ("keep", "recompute") if stage == 3 else ("keep",):
            recorded.graphs.clear()
            own = {"transport": transport, "activations": activations}
            check_config(stage, transport, "tests.dist.test_compile.recorded", slipstream=own)
            (block,) = {" ".join(calls) for calls in recorded.graphs}
            assert len(recorded.graphs) <= 2, f"stage {stage}: {len(recorded.graphs)} graphs of three alike blocks"
            assert block.count("linear") >= 2 and "layer_norm" in block and "relu" in block, f"only a part of a block: {block}"


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_inductor_by_the_config() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    warnings.simplefilter("ignore")  # inductor's own
    check_config(3, "shared", "inductor")


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_inductor() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    warnings.simplefilter("ignore")  # inductor's own
    check(by_forward, True, "shared", "inductor", (3,))
