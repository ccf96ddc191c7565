"""What we rely on in torch without its promise: each test fails first when torch moves. The user is named in each."""

import gc
import signal
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data._utils.pin_memory import pin_memory

from slipstream.activations import recompute as checkpointing
from slipstream.zero import comm, hooks, parameter, transforms, unit


def test_a_class_swap_keeps_the_object_and_its_graph() -> None:
    """zero/parameter.py: released, reduced and plain are classes of one object."""

    class Released(nn.Parameter):
        pass

    param = nn.Parameter(torch.ones(4))
    fired: list[int] = []
    param.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    y = (param * 2).sum()
    param.__class__ = Released
    assert isinstance(param, Released)
    param.__class__ = nn.Parameter
    assert type(param) is nn.Parameter
    torch.autograd.backward(y)
    assert fired == [id(param)] and param.grad is not None and param.grad.tolist() == [2.0] * 4


def test_a_storage_can_lose_its_memory_and_get_it_back() -> None:
    """zero/unit.py: a view that autograd saved is alive again once its storage is."""
    full = torch.arange(8.0)
    view = full[2:6].view(2, 2)
    nbytes = full.untyped_storage().nbytes()
    full.untyped_storage().resize_(0)
    assert full.untyped_storage().nbytes() == 0 and view.shape == (2, 2)
    full.untyped_storage().resize_(nbytes)
    full.copy_(torch.arange(8.0) + 1)
    assert view.tolist() == [[3.0, 4.0], [5.0, 6.0]]


def test_writes_under_a_preserved_version_are_not_counted() -> None:
    """zero/unit.py: gathering again is no change, publishing is one."""
    weight = nn.Parameter(torch.ones(3))
    y = (weight * weight).sum()
    before = weight._version
    with unit._preserve_version(weight), torch.no_grad():
        weight.fill_(2.0)
    assert weight._version == before
    torch.autograd.backward(y)  # and reads what is there now
    torch.autograd.graph.increment_version([weight])
    assert weight._version == before + 1


def test_a_callback_runs_once_at_the_end_of_backward() -> None:
    """zero/hooks.py: queued in the first hook that fires; also that a hook knows that it runs inside a backward."""
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    middle = x * 2

    def first(grad: Tensor) -> None:
        assert hooks._in_backward()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: events.append("end"))
        events.append("first")

    middle.register_hook(first)
    x.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
    assert not hooks._in_backward()
    torch.autograd.backward(middle.sum())
    assert events == ["first", "last gradient", "end"]


def test_a_checkpoint_shows_in_the_hooks_of_saved_tensors() -> None:
    """checkpointing.py: `inside_checkpoint`; also that what torch's keeps of the inputs (before 2.12 an empty tensor, too) passes
    through the hooks around it."""
    packed: list[int] = []
    inside: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        inside.append(checkpointing.inside_checkpoint())
        return x.exp()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor

    x = torch.ones(2, requires_grad=True) * 2
    assert not checkpointing.inside_checkpoint()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert not checkpointing.inside_checkpoint()
        checkpointing.checkpoint(fn, x)
    assert inside == [True] and [at for at in packed if at] == [x.data_ptr()]


def test_a_saved_tensor_shares_its_storage_and_version() -> None:
    """checkpointing.py: a storage's address is its name while a weak reference to it lives, and writes are counted."""
    seen: list[Tensor] = []
    x = torch.ones(4, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return seen[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x.exp()
    ref = checkpointing.StorageWeakRef(y.untyped_storage())
    assert ref.cdata == y.untyped_storage()._cdata == seen[0].untyped_storage()._cdata and not ref.expired()
    y.detach().add_(1)
    assert seen[0]._version == y._version == 1
    seen.clear()
    del y
    assert ref.expired()


def test_the_gradient_slot_can_be_read_past_the_class() -> None:
    """zero/parameter.py: `.grad` of a released parameter is a property of ours; the slot under it is torch's."""
    param = nn.Parameter(torch.ones(2))
    torch.autograd.backward(param.sum())
    grad = parameter.raw_grad(param)
    assert grad is not None and grad.tolist() == [1.0, 1.0]
    parameter.drop_grad(param)
    assert param.grad is None


def test_metadata_is_reached_by_the_functions_we_let_through() -> None:
    """zero/parameter.py: `__torch_function__` sees a property as its slot's `__get__`."""
    seen: list[Any] = []

    class Spy(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    param: Any = nn.Parameter(torch.ones(2))
    param.__class__ = Spy
    _ = param.shape, param.requires_grad, param.numel(), param.stride()
    param.__class__ = nn.Parameter
    assert seen and all(func in parameter._METADATA for func in seen), seen


def test_compilation_skips_an_eager_hook_and_what_it_calls() -> None:
    """zero/hooks.py: `eager` does what torch.compiler.disable does, without its import."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.cos()

    hook = hooks.eager(lambda x: inner(x))

    def body(x: Tensor) -> Tensor:
        x = x.sin()
        hook(x)
        return x.tan()

    x = torch.ones(3)
    assert torch.equal(torch.compile(body, backend=backend)(x), x.sin().tan())
    assert len(graphs) == 2 and "sin" in str(graphs[0]) and "tan" in str(graphs[1]), graphs
    assert not any("cos" in str(graph) for graph in graphs), graphs


def test_a_gradient_hook_that_holds_a_weak_reference_lets_go() -> None:
    """zero/hooks.py: what torch keeps for a parameter in C++ must not keep an engine alive."""

    class Owner:
        def hit(self) -> None: ...

    owner = Owner()
    ref, param = weakref.ref(owner), nn.Parameter(torch.ones(1))

    def landed(_: Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive.hit()

    param.register_post_accumulate_grad_hook(landed)
    del owner
    gc.collect()
    assert ref() is None
    torch.autograd.backward(param.sum())


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_tells_its_backend_and_takes_a_time_out(group: Any) -> None:
    """zero/comm.py: which backend moves a device's tensors, and more time for it than our own waits take."""
    cpu = torch.device("cpu")
    assert cpu in group._device_types
    assert group._get_backend(cpu).name() == "gloo"
    comm._allow(100.0, group)
    assert group._get_backend(cpu).options._timeout == timedelta(seconds=160)


def test_gloo_moves_bytes_and_tells_a_time_out_from_an_end(group: Any) -> None:
    """zero/comm.py: every dtype travels as bytes; a wait that ran out leaves the operation to be waited for again."""
    sent, received = torch.arange(4.0), torch.zeros(4)
    work = dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=1))
    assert work.is_completed() and torch.equal(sent, received)


def test_schedulers_ask_an_optimizer_whether_it_stepped() -> None:
    """optim/sharded.py and train/handle.py: torch warns of a wrong order unless `_opt_called` is set."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    schedule.step()  # warnings are errors here


def test_a_mode_sees_factories_and_questions_of_tensors() -> None:
    """zero/recording.py: factories are known by a private list, and `tensor.is_meta` passes a function mode."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2, device="meta")
    with Mode():
        assert tensor.is_meta
        torch.empty(2)
    assert seen == [torch.Tensor.is_meta.__get__, torch.empty]  # type: ignore[attr-defined]
    assert {torch.empty, torch.arange, torch.tensor, torch.randn} <= _device_constructors()
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.normal_.default.tags


def test_transforms_show_their_levels_and_can_be_stepped_out_of() -> None:
    """zero/transforms.py: of torch.func."""
    weight, other = nn.Parameter(torch.ones(2)), torch.ones(2)
    seen: list[tuple[bool, list[int]]] = []

    def write() -> None:
        other.mul_(2)

    def loss(x: Tensor) -> Tensor:
        y = (x * weight).sum()
        seen.append((transforms.differentiates(), [level for level, _ in transforms.in_graphs(y)]))
        transforms.outside(write)()
        return y

    x = torch.ones(3, 2)
    assert not transforms.is_active() and torch.func.vmap(loss)(x).tolist() == [2.0] * 3
    assert torch.func.grad(loss)(x[0]).tolist() == [1.0, 1.0] and other.tolist() == [4.0, 4.0]
    assert seen == [(False, [-1]), (True, [1, -1])]


def test_autograd_runs_ready_nodes_by_falling_sequence_number() -> None:
    """parallel/overlap.py: a node that gets a lower number waits for others that are ready."""
    order: list[str] = []

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            order.append(ctx.name)
            return grad, None

    x = torch.ones(2, requires_grad=True)
    for number in (None, 0):
        first, second = Named.apply(x, "first"), Named.apply(x, "second")
        assert second.grad_fn._sequence_nr() > first.grad_fn._sequence_nr()
        if number is not None:
            second.grad_fn._set_sequence_nr(number)
        torch.autograd.backward((first * second).sum())
    assert order == ["second", "first", "first", "second"]


def test_a_row_of_a_product_is_the_same_for_any_number_of_rows_above_a_few() -> None:
    """parallel/overlap.py: chunks of a product have the bits of the whole."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows, inner, out in ((512, 1024, 512), (333, 100, 36), (130, 24, 64), (1000, 333, 100)):
            x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(out, inner, dtype=dtype)
            whole = nn.functional.linear(x, weight)
            for count in range(2, rows // 64 + 1):
                parts = [nn.functional.linear(part, weight) for part in x.tensor_split(count)]
                assert torch.equal(torch.cat(parts), whole)


def test_nodes_have_numbers_that_grow_and_the_running_one_is_known() -> None:
    """observe/flops.py: the number of a node says whose it is, and whether an operation is of a backward or computed again."""
    seen: list[tuple[str, bool]] = []
    numbers: list[int] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = torch._C._current_autograd_node()
            if func.overloadpacket is torch.ops.aten.mm:
                seen.append(("forward" if node is None else "backward", torch.is_grad_enabled()))
                if node is not None and not torch.is_grad_enabled():
                    numbers.append(node._sequence_nr())
            return func(*args, **(kwargs or {}))

    x, since = torch.randn(2, 2, requires_grad=True), []
    with Watched():
        y = x
        for _ in range(2):
            since.append(torch.autograd._get_sequence_nr())
            y = checkpoint(lambda x: x @ x @ x, y, use_reentrant=False)
        y.sum().backward()
    assert seen == [("forward", True)] * 4 + ([("backward", True)] + [("backward", False)] * 4) * 2
    assert since[0] <= numbers[-1] < since[1] <= numbers[0]


def test_a_hook_knows_whether_the_backward_accumulates() -> None:
    """zero/hooks.py: `autograd.grad` accumulates into no parameter, and `backward(inputs=...)` only into those."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    x, known = torch.ones(2, requires_grad=True), list[bool]()

    def hooked() -> Tensor:
        y = first * second * x
        y.register_hook(lambda _: known.append(hooks._writes_gradients({id(first)})))
        return y.sum()

    for inputs in (x, first):
        torch.autograd.grad(hooked(), inputs)
    hooked().backward()
    for inputs in (first, second):
        hooked().backward(inputs=[inputs])
    assert known == [False, False, True, True, False]


def test_batches_are_pinned_tensor_by_tensor() -> None:
    """train/loaders.py: containers keep their types, and whatever has `pin_memory` is asked for its pinned copy."""

    class Pinned(NamedTuple):
        ids: Any
        text: str

    there = SimpleNamespace(pin_memory=lambda: "pinned")
    assert pin_memory({"a": [there, 1], "b": Pinned(there, "x")}) == {"a": ["pinned", 1], "b": Pinned("pinned", "x")}


def test_torchrun_builds_its_ranks_by_the_class_in_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """launch/agent.py: a class of ours has the ranks, is polled and closes them, and knows which have failed."""
    called: list[str] = []

    class Ranks(multiprocessing.SubprocessContext):
        def _start(self) -> None:
            called.append("start")
            super()._start()

        def _poll(self) -> Any:
            called.append("poll")
            return super()._poll()

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            called.append(f"close {death_sig.name} {sorted(self._failures)}")
            super()._close(death_sig, timeout)

    monkeypatch.setattr(multiprocessing, "SubprocessContext", Ranks)
    assert local_elastic_agent.start_processes is multiprocessing.start_processes, "torchrun's agent calls what reads that name"
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGWINCH")  # `start` replaces the handlers of these
    before = signal.getsignal(signal.SIGWINCH)
    commands: dict[int, tuple[str, ...]] = {0: ("-c", "exit $CODE"), 1: ("-c", "exec sleep 60")}
    ranks = multiprocessing.start_processes(
        "ranks", "sh", commands, {0: {"CODE": "3"}, 1: {}}, multiprocessing.DefaultLogsSpecs(log_dir=str(tmp_path))
    )
    try:
        result = ranks.wait(timeout=60, period=0.01)
    finally:
        ranks.close(signal.SIGKILL)
        signal.signal(signal.SIGWINCH, before)
    assert isinstance(ranks, Ranks) and result is not None and result.is_failed()
    assert {i: failure.exitcode for i, failure in ranks._failures.items()} == {0: 3, 1: -signal.SIGTERM}
    assert [handler.proc.returncode for _, handler in sorted(ranks.subprocess_handlers.items())] == [3, -signal.SIGTERM]
    assert ranks.envs[0]["CODE"] == "3"
    assert list(dict.fromkeys(called)) == ["start", "poll", "close SIGTERM [0]", "close SIGKILL [0, 1]"]
