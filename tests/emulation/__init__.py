"""CUDA without a GPU: a device in host memory that torch and Slipstream take for `cuda`, in a build of torch without CUDA.

`SLIPSTREAM_TESTS_ON_GPU=emulated python -m pytest tests/dist tests/gpu` runs engines on it, in every process of the tests. It
shows what a GPU would: tensors of two devices in one operation are an error, an address of the device crashes native code of the
host, memory that was not written is NaN, gloo refuses the device's memory, NCCL the host's. And it shows what a GPU hides: a
stream that touches memory that another one still uses, or frees it, is a race (`races`). The happens-before relation of streams,
events and waits is kept for every operation that torch dispatches, for NCCL's (on a stream of each group) and for the host's on
pinned memory.

Ranks that start with gloo share a device: what they send passes through the host. `EMULATED_CUDA_BACKEND=nccl`, or
`cpu:gloo,cuda:nccl`, is their backend instead, as if each had a device.

It does not show speed, rounding of a GPU's products, what CUDA alone refuses, two devices in one process, or an event that has
not come yet. Graphs replay torch's operations only. Triton's kernels run in numpy if the package is there (`TRITON_INTERPRET=1`),
slowly, and unseen by `races`. So are what native code of the host writes (it is taken to read a tensor when it asks for the
address), and threads of the host among themselves. A strided view counts as all memory from its first element to its last.
"""

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SOURCE = Path(__file__).with_name("device.cpp")
TOTAL_NBYTES = int(os.environ.get("EMULATED_CUDA_NBYTES", 8 << 30))
_TESTS = str(Path(__file__).parents[1])
_AWAY = 1 << 46  # added to addresses of the device: whoever reads there, as the host does not on a GPU, crashes
_WRITES_FIRST = {  # of whose parameters the first is written, the others read
    *(
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "reduce_scatter",
        "all_to_all_single",
        "scatter",
        "all_to_all",
        "all_gather",
    )
}
_READ_ONLY = {"send", "isend"}
_BY_GLOO = {"broadcast", "all_reduce"}  # what gloo does with memory of a GPU; it aborts at others
_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "recv", "irecv", *_WRITES_FIRST, *_READ_ONLY)


def build() -> Path:
    """The device as a library, compiled once for this torch and source (30 s)."""
    from torch.utils.cpp_extension import include_paths

    folder = Path(tempfile.gettempdir(), f"emulated-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} is another user's; set TMPDIR")
    library = folder / f"device-{torch.__version__}-{SOURCE.stat().st_mtime_ns}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{path}" for path in include_paths()]
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [
            "g++",
            "-std=c++20",
            "-DNDEBUG",
            "-O1",
            "-w",
            "-fPIC",
            "-shared",
            *includes,
            str(SOURCE),
            *libraries,
            "-o",
            str(made),
        ]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


def races() -> list[str]:
    """What streams did in no order since the last call, as sentences."""
    return list(torch.ops.emulated_cuda.races())


def install() -> None:
    """Make this process's torch one with a GPU. Call it before anything asks torch for a device."""
    torch.ops.load_library(str(build()))
    torch.ops.emulated_cuda.watch_host()
    torch.empty(0, pin_memory=True)  # torch believes in pinned memory from the first on
    for name, value in _functions().items():  # each an object of its own, which torch.compile's tables want
        setattr(
            torch.cuda,
            name,
            functools.partial(value) if isinstance(value, types.FunctionType | types.BuiltinFunctionType) else value,
        )
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True
    for owner in (torch.Tensor, torch.UntypedStorage):
        owner.data_ptr = _away(owner.data_ptr)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    torch.UntypedStorage.clone = _cloned(torch.UntypedStorage.clone)  # type: ignore[method-assign]
    torch.serialization.register_package(0, lambda storage: None, _unpickled)
    _install_collectives()


# -- torch.cuda --


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        return super().__new__(cls, **kwargs) if kwargs else super().__new__(cls, device="cuda", priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The stream's handle."""
        return int(self.stream_id)


class Event(torch.Event):
    """`torch.cuda.Event`. Makes torch's own, because `elapsed_time` takes no subclass."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)


def _current_stream(device: Any = None) -> Stream:
    now = torch.accelerator.current_stream()
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


class StreamContext:
    """`torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self.stream or self.before)

    def __exit__(self, *_: Any) -> None:
        torch.accelerator.set_stream(self.before)


class _Runtime:
    """`torch.cuda.cudart()`."""

    cudaError = types.SimpleNamespace(success=0)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        torch.ops.emulated_cuda.pin(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        torch.ops.emulated_cuda.unpin(address)
        return 0


class Graph:
    """`torch.cuda.CUDAGraph`: the operations that were captured, run again on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        """Run them."""
        for function, args, kwargs, out in self.tape:
            for kept, made in zip(_tensors(out), _tensors(function(*args, **kwargs)), strict=True):
                if kept.data_ptr() != made.data_ptr():
                    kept.copy_(made)

    def reset(self) -> None:
        """Forget them."""
        self.tape = []

    def pool(self) -> tuple[int, int]:
        """The graph's memory."""
        return (0, 0)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.graph.tape.append((func, args, kwargs or {}, out))
        return out


@contextlib.contextmanager
def _captured(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    with StreamContext(stream), _Capture(graph):
        yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _functions() -> dict[str, Any]:
    def memory() -> int:
        return int(torch.ops.emulated_cuda.memory()[0])

    def peak() -> int:
        return int(torch.ops.emulated_cuda.memory()[1])

    properties = types.SimpleNamespace(
        name="Emulated",
        total_memory=TOTAL_NBYTES,
        major=9,
        minor=0,
        multi_processor_count=4,
        uuid="0",
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )

    def nothing(*_: Any, **__: Any) -> None:
        pass

    always = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "is_bf16_supported": True,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "can_device_access_peer": True,
        "graph_pool_handle": (0, 0),
        "cudart": _Runtime(),
    }
    return {
        **{name: functools.partial(lambda value, *_, **__: value, value) for name, value in always.items()},
        **dict.fromkeys(("init", "_lazy_init", "set_device", "empty_cache", "ipc_collect", "seed"), nothing),
        **dict.fromkeys(("device", "device_of"), contextlib.nullcontext),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: StreamContext(stream),
        "StreamContext": StreamContext,
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
        "current_stream": _current_stream,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=0, device_type=1),
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "mem_get_info": lambda device=None: (TOTAL_NBYTES - memory(), TOTAL_NBYTES),
        "memory_allocated": lambda device=None: memory(),
        "memory_reserved": lambda device=None: memory(),
        "max_memory_allocated": lambda device=None: peak(),
        "max_memory_reserved": lambda device=None: peak(),
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": memory(), "allocated_bytes.all.peak": peak()},
        "reset_peak_memory_stats": lambda device=None: torch.ops.emulated_cuda.reset_peak(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "initial_seed": torch.default_generator.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "default_generators": (torch.default_generator,),
        "CUDAGraph": Graph,
        "graph": _captured,
        "nvtx": types.SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing),
        "nccl": types.SimpleNamespace(version=lambda: (2, 27, 3)),
    }


def _away(address: Callable[[Any], int]) -> Callable[[Any], int]:
    def data_ptr(self: Any) -> int:
        at = address(self)
        if self.device.type == "cuda":
            return at + _AWAY if at else at
        if isinstance(self, Tensor):  # native code of the host is about to read it, at least
            torch.ops.emulated_cuda.touch_by_host(self)
        return at

    return data_ptr


def _resized(resize: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def resize_(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        torch.ops.emulated_cuda.resize_storage(_bytes_of(self), nbytes)
        return self

    return resize_


def _cloned(clone: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: clone(self) if self.device.type != "cuda" else _bytes_of(self).clone().untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpickled(storage: torch.UntypedStorage, location: str) -> Any:
    """What `torch.load` makes of a storage of the device; None for others."""
    if not location.startswith("cuda"):
        return None
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to("cuda").untyped_storage()


# -- torch.distributed: NCCL's operations, by gloo on the same memory --


class _Work:
    """What an asynchronous collective returns: it ran already, but streams are told only by `wait`."""

    def __init__(self, work: Any, event: torch.Event, result: Any) -> None:
        self._work, self._event, self._result = work, event, result

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        self._event.wait(_current_stream())
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Nccl:
    """NCCL's part of a group: gloo's, by another name."""

    def __init__(self, of_cpu: Any) -> None:
        self._of_cpu = of_cpu

    def name(self) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_cpu, name)


_nccl: weakref.WeakKeyDictionary[Any, Stream] = weakref.WeakKeyDictionary()  # of each group


def _hosted(value: Any) -> Any:
    return torch.ops.emulated_cuda.host(value.detach()) if isinstance(value, Tensor) and value.is_cuda else value


def _collective(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_cuda]
        named = signature.bind(*args, **kwargs).arguments
        caller = sys._getframe(1).f_code.co_filename
        of_a_test = caller.startswith(_TESTS)  # which asks what ranks have
        if not tensors:
            if dist.get_backend(named.get("group")) == "nccl" and not (of_a_test or caller == c10d.__file__):
                raise RuntimeError(f"{name}: NCCL sends no memory of the host")
            return function(*args, **kwargs)
        if name not in _BY_GLOO and "nccl" not in dist.get_backend(named.get("group")) and not of_a_test:
            raise RuntimeError(f"{name}: gloo sends no memory of a GPU")
        written = [] if name in _READ_ONLY else _tensors(next(iter(named.values()))) if name in _WRITES_FIRST else tensors
        read = [tensor for tensor in tensors if not any(tensor is other for other in written)]
        stream = _nccl.setdefault(named.get("group") or dist.group.WORLD, Stream())
        stream.wait_stream(_current_stream())
        with StreamContext(stream):
            torch.ops.emulated_cuda.touch(read, written, name)
            for tensor in tensors:
                tensor.record_stream(stream)
        work = function(*tree_map(_hosted, args), **tree_map(_hosted, kwargs))
        done = Event()
        done.record(stream)
        if isinstance(work, dist.Work):
            return _Work(work, done, written)
        done.wait(_current_stream())
        return work

    return call


def _install_collectives() -> None:
    for name in filter(functools.partial(hasattr, dist), _COLLECTIVES):
        wrapped = _collective(name, getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(c10d, name, wrapped)

    init, new_group = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs | {"device_id": None})
        _call_it(dist.group.WORLD, os.environ.get("EMULATED_CUDA_BACKEND") or backend)

    @functools.wraps(new_group)
    def new(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        made = new_group(*args, backend="gloo", **kwargs | {"device_id": None})
        if made is not None and made is not dist.GroupMember.NON_GROUP_MEMBER:
            _call_it(made, backend or dist.get_backend())
        return made

    def _call_it(group: Any, backend: Any) -> None:
        """Group of gloo, as one of the backend that was asked for."""
        backend = backend or "cpu:gloo,cuda:nccl"
        c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))

    dist.init_process_group = c10d.init_process_group = init_process_group
    dist.new_group = c10d.new_group = new
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    group = torch._C._distributed_c10d.ProcessGroup
    backend_of = group._get_backend

    def _get_backend(self: Any, device: torch.device) -> Any:
        of_cpu = backend_of(self, torch.device("cpu"))
        return _Nccl(of_cpu) if device.type == "cuda" and "nccl" in dist.get_backend(self) else of_cpu

    group._get_backend = _get_backend
