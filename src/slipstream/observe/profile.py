"""The flops profiler: parameters, MACs, FLOP and latency of every module in one step, as text, JSON and a picture.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(batch)
    profiler.print_model_profile()
    profiler.end_profile()

FLOP and MACs come from observe/flops.py: they are counted on fake tensors before a forward runs, or, for a model that reads values,
while it runs. Latencies come from hooks, which only exist between `start_profile` and `stop_profile`.
"""

from __future__ import annotations

import html
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.observe import clock, flops
from slipstream.observe.flops import Counts, FlopCounter, FlopSum

logger = logging.getLogger(__name__)

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def number_to_string(number: float, units: str | None = None, precision: int = 2) -> str:
    """2160000000 -> "2.16 G"."""
    size = abs(number)
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if (unit == units if units else size >= scale)), (1.0, ""))
    return f"{round(number / scale, precision):g} {unit}"


def _text(number: float, of: str = "") -> str:
    return number_to_string(number) + of


@dataclass(slots=True)
class ModuleProfile:
    """A module and everything inside it. `FlopSum` and seconds are per micro-batch."""

    name: str  # "": the model
    kind: str  # its class
    depth: int
    params: int  # full sizes, also of sharded parameters
    work: FlopSum = field(default_factory=FlopSum)
    seconds: float = 0.0  # of its forward

    @property
    def macs(self) -> int:
        return self.work.forward // 2

    def row(self) -> dict[str, Any]:
        work = {f"{name}_flops": value for name, value in asdict(self.work).items()}
        row = {"name": self.name, "class": self.kind, "params": self.params, "macs": self.macs, **work}
        return row | {"forward_seconds": self.seconds}


def _total(what: str, unit: str = "") -> Callable[..., Any]:
    """Create a method that returns a figure of the whole model, as a number or as text."""

    def total(self: FlopsProfiler, as_string: bool = False) -> Any:
        model = self.rows()[0]
        value = getattr(model.work if what in ("forward", "backward") else model, what)
        return _text(value, unit) if as_string else value

    return total


class FlopsProfiler:
    """Profiles the forwards of a model between `start_profile` and `stop_profile`, and their backwards. Has DeepSpeed's methods.

    ds_engine             the engine of the model: the profile is then per mean micro-batch of a step, and has the step's times
    recompute_fwd_factor  part of DeepSpeed's formula for the backward; unused, because the backward and its recomputation are
    counted
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._handles: list[Any] = []
        self._known: dict[Any, Counts] = {}  # counts of calls with equal shapes, until `end_profile`
        self._ignored: tuple[type, ...] = ()
        self.reset_profile()

    def reset_profile(self) -> None:
        self.counts: Counts = {}
        self.calls = 0  # of the model
        self.step_seconds: dict[str, float] = {}  # seconds of forward, backward and step, in an engine's step
        self.counting_s = 0.0  # seconds in which forwards waited to be counted; part of no latency
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        self._counter: FlopCounter | None = None

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start, or restart. Modules of the classes in `ignore_list` get no rows: their work counts for their parent."""
        self.stop_profile()
        self.reset_profile()
        self.started = True
        before, self._ignored = self._ignored, tuple(ignore_list or ())
        if before != self._ignored:
            self._known.clear()
        self._modules = {name: module for name, module in self.model.named_modules() if not isinstance(module, self._ignored)}
        self._modules.setdefault("", self.model)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:  # a function, which copies of the model do not copy
            self._begin(module, args, kwargs)

        self._handles.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))  # sees the forward's arguments
        for name, module in self._modules.items():
            self._time(module, self._marks.setdefault(name, []))

    def _time(self, module: nn.Module, marks: list[tuple[Any, Any]]) -> None:
        device, running = self._device, []

        def enter(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not in a recomputation
                running.append(clock.mark(device))

        def leave(*_: Any) -> None:
            if running:
                marks.append((running.pop(), clock.mark(device)))

        self._handles += [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)]

    @property
    def _device(self) -> torch.device:
        if self.ds_engine is not None:
            device: torch.device = self.ds_engine.device
            return device
        return next((tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count a call before it runs, or, failing that, while it runs."""
        if module is not self.model or torch._C._current_graph_task_id() != -1:
            return
        self.calls += 1
        if self._counter is not None:
            return
        key = _signature((args, kwargs, self.model.training, torch.is_grad_enabled()))
        counts = self._known.get(key)
        if counts is None:
            start = time.perf_counter()
            try:
                counts = flops.count(self.model, args, kwargs, self._modules, self._recomputed)
            except Exception:  # without values, a model may raise anything; a real error is raised again when it runs now
                self._counter = FlopCounter(self._modules)
                self._counter.__enter__()
                self._counter.enter("")  # this call's hooks were collected before
            self.counting_s += time.perf_counter() - start
            if key is not None and counts is not None:
                self._known[key] = counts
        self._add(counts or {})

    @property
    def _recomputed(self) -> Sequence[str]:
        """The blocks that the engine recomputes."""
        if self.ds_engine is None or self.ds_engine.plan.activations.way != "recompute":
            return ()
        from slipstream.train.planning import dry_run

        return dry_run.repeated_blocks(self.model)[: self.ds_engine.plan.activations.num_blocks]

    def _add(self, counts: Counts) -> None:
        for name, work in counts.items():
            self.counts.setdefault(name, FlopSum()).add(work)

    def stop_profile(self) -> None:
        """Remove all hooks; measurements stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter.remove()
            self._add(self._counter.counts)
            self._counter = None

    def end_profile(self) -> None:
        """Stop, and discard the measurements."""
        self.stop_profile()
        self.reset_profile()
        self._known.clear()
        self.started = False

    close = end_profile  # called with the engine's close

    # -- what was measured --

    @property
    def per(self) -> int:
        """The number of micro-batches over which times and counts were measured."""
        batch = None if self.ds_engine is None else self.ds_engine.plan.batch
        return batch.accumulation if batch is not None and batch.managed and self.calls > 1 else 1

    def rows(self) -> list[ModuleProfile]:
        """The modules in the order of `named_modules`, the model first."""
        counter = self._counter.counts if self._counter is not None else {}
        rows: dict[str, ModuleProfile] = {}
        for name, module in self.model.named_modules():
            params = sum(param.numel() for param in module.parameters())
            row = ModuleProfile(name, type(module).__name__, name.count(".") + 1 if name else 0, params)
            row.seconds = sum(clock.between(*pair) for pair in self._marks.get(name, ()))
            row.seconds = max(row.seconds - (0 if name else self.counting_s), 0.0) / self.per
            rows[name] = row
        for counts in (self.counts, counter):
            for name, work in counts.items():
                for outer in _path(name):
                    rows[outer].work.add(work)
        for row in rows.values():
            row.work = FlopSum(*(value // self.per for value in asdict(row.work).values()))
        for name, row in reversed(rows.items()):
            container = rows[_path(name)[-2]] if name else row
            if not self._marks.get(container.name):  # a module list, which is not called itself
                container.seconds += row.seconds
        return list(rows.values())

    get_total_flops = _total("forward")  # of the forward
    get_total_backward_flops = _total("backward")  # including recomputation; 0 without gradients
    get_total_macs = _total("macs", "MACs")  # of the forward
    get_total_params = _total("params")  # of this rank's model, in full sizes
    get_total_duration = _total("seconds", "s")  # of the forward

    def as_dict(self) -> dict[str, Any]:
        """The profile as JSON values: FLOP, seconds, and FLOP per second of this rank."""
        rows = self.rows()
        top, times = rows[0], self._times(rows[0].seconds)
        done, seconds = top.work.forward + top.work.backward, self._micro_batch(times)
        head = {"calls": self.calls, "micro_batches": self.per, "seconds": times}
        if "backward" in times:
            head["flops_per_second"] = done / seconds
        return top.row() | head | {"modules": [row.row() for row in rows]}

    def _times(self, forward: float) -> dict[str, float]:
        """Seconds of a micro-batch's forward and backward and, with an engine, of a step."""
        times = {"forward": forward} | self.step_seconds
        if "forward" in self.step_seconds:
            times["forward"] = max(times["forward"] - self.counting_s, 0.0) / self.per
        if "backward" in times:
            times["backward"] /= self.per
        return {name: times[name] for name in ("forward", "backward", "step") if name in times}

    def _micro_batch(self, times: Mapping[str, float]) -> float:
        """Seconds of a micro-batch, including its share of the step."""
        return sum(times.values()) - times.get("step", 0.0) * (1 - 1 / self.per)

    # -- as text --

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Write the profile, in DeepSpeed's layout.

        module_depth: the depth to which top modules are listed; -1: all. top_modules: how many at each depth. detailed: with the
        tree of modules. output_file: a path for the text, beside which PATH.json and PATH.svg are written; None: standard output.
        """
        if not self.started:
            return
        rows = self.rows()
        lines = ["", "-------------------------- DeepSpeed Flops Profiler --------------------------"]
        lines += [f"Profile Summary at step {profile_step}:", _NOTATIONS, *self._summary(rows[0])]
        lines += ["", "----------------------------- Aggregated Profile per GPU -----------------------------"]
        lines += self._aggregated(rows, module_depth, top_modules)
        if detailed:
            lines += ["", "------------------------------ Detailed Profile per GPU ------------------------------", _DETAILS]
            lines.append(self._tree(rows))
        text = "\n".join([*lines, "------------------------------------------------------------------------------", ""])
        if not output_file:
            sys.stdout.write(text)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        Path(f"{path}.json").write_text(json.dumps({"step": profile_step} | self.as_dict(), indent=1))
        Path(f"{path}.svg").write_text(flame(rows))

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Write the classes of modules with the most parameters, MACs and latency at each depth."""
        sys.stdout.write("\n".join([*self._aggregated(self.rows(), module_depth, top_modules), ""]))

    def _summary(self, top: ModuleProfile) -> list[str]:
        engine, parallel, samples = self.ds_engine, 1, 0
        values: dict[str, Any] = {}
        if engine is not None:
            mesh, samples = engine.mesh, engine.plan.batch.micro_batch_size
            parallel = mesh.tp.size
            values = {"world size: ": mesh.world.size, "data parallel size: ": mesh.batch.size}
            values |= {"model parallel size: ": parallel, "batch size per GPU: ": samples}
        times, work = self._times(top.seconds), top.work
        values |= {
            "params per GPU: ": _text(top.params),
            "params of model = params per GPU * mp_size: ": _text(top.params * parallel),
            "fwd MACs per GPU: ": _text(top.macs, "MACs"),
            "fwd flops per GPU: ": _text(work.forward),
            "fwd flops of model = fwd flops per GPU * mp_size: ": _text(work.forward * parallel),
            "bwd flops per GPU: ": _text(work.backward),
            "recomputed flops per GPU, part of bwd: ": _text(work.recomputed),
            "fwd latency: ": _text(times["forward"], "s"),
            "fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ": _rate(work.forward, times["forward"]),
        }
        if "backward" in times:
            both = work.forward + work.backward
            values |= {
                "bwd latency: ": _text(times["backward"], "s"),
                "bwd FLOPS per GPU = bwd flops per GPU / bwd latency: ": _rate(work.backward, times["backward"]),
                "fwd+bwd FLOPS per GPU = (fwd+bwd) flops per GPU / (fwd+bwd latency): ": _rate(
                    both, times["forward"] + times["backward"]
                ),
                "step latency: ": _text(times.get("step", 0.0), "s"),
                "iter latency: ": _text(seconds := self._micro_batch(times), "s"),
                "FLOPS per GPU = (fwd+bwd) flops per GPU / iter latency: ": _rate(both, seconds),
                "samples/second: ": round(engine.plan.batch.per_pass / seconds, 2),
            }
        return [f"{label:<70}  {value!s:<8}" for label, value in values.items()]

    def _aggregated(self, rows: Sequence[ModuleProfile], module_depth: int, top_modules: int) -> list[str]:
        deepest = max(row.depth for row in rows)
        lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
        columns: dict[str, tuple[Callable[[ModuleProfile], float], str]] = {
            "params": (lambda row: row.params, ""),
            "MACs": (lambda row: row.macs, "MACs"),
            "fwd latency": (lambda row: row.seconds, "s"),
        }
        for depth in range(1 + (deepest if module_depth < 0 else min(module_depth, deepest))):
            lines.append(f"depth {depth}:")
            for title, (read, unit) in columns.items():
                sums: dict[str, float] = {}
                for row in rows:
                    if row.depth == depth:
                        sums[row.kind] = sums.get(row.kind, 0) + read(row)
                top = sorted(sums.items(), key=lambda item: -item[1])[:top_modules]
                lines.append(f"    {title:<11} - { {kind: _text(value, unit) for kind, value in top} }")
        return lines

    def _tree(self, rows: Sequence[ModuleProfile]) -> str:
        """`repr` of the model with the figures of each module."""
        top, names = rows[0], {id(module): name for name, module in self.model.named_modules()}
        by_name = {row.name: row for row in rows}

        def figures(module: nn.Module, own: Callable[[], str]) -> str:
            row = by_name[names[id(module)]]
            parts = [
                f"{_text(row.params)} = {_share(row.params, top.params)}% Params",
                f"{_text(row.macs, 'MACs')} = {_share(row.macs, top.macs)}% MACs",
                f"{_text(row.seconds, 's')} = {_share(row.seconds, top.seconds)}% latency",
                _rate(row.work.forward, row.seconds),
            ]
            return ", ".join([*parts, own()] if own() else parts)

        modules = list(self.model.modules())
        try:
            for module in modules:
                own = module.extra_repr
                vars(module)["extra_repr"] = lambda module=module, own=own: figures(module, own)
            return repr(self.model)
        finally:
            for module in modules:
                vars(module).pop("extra_repr", None)


def _rate(work: float, seconds: float) -> str:
    return _text(work / seconds if seconds else 0.0, "FLOPS")


def _share(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 2) if whole else 0:g}"


def _path(name: str) -> list[str]:
    """A module and those that contain it: "a.b" -> ["", "a", "a.b"]."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _signature(value: Any) -> Any:
    """What the work of a call depends on, if that is only shapes and plain values; else None: the call is counted separately."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (list, tuple)):
        parts = tuple(_signature(item) for item in value)
        return None if None in parts else parts
    return ("",) if value is None else value if isinstance(value, (int, float, str)) else None


def flame(rows: Sequence[ModuleProfile], width: int = 1200) -> str:
    """SVG of the tree. Width is a module's FLOP, forward and backward; submodules are lower."""
    height, out = 20, []
    total = max(rows[0].work.forward + rows[0].work.backward, 1)
    starts: dict[str, float] = {"": 0.0}  # of the next submodule
    for row in rows:
        share = (row.work.forward + row.work.backward) / total
        outer = _path(row.name)[-2] if row.name else None
        x = 0.0 if outer is None else starts[outer]
        if outer is not None:
            starts[outer] += share
        starts[row.name] = x
        if share * width < 1:
            continue
        title = f"{row.name or row.kind}: {_text(row.work.forward)} forward, {_text(row.work.backward)} backward"
        fit = int(share * width / 7)
        label = (row.name.rpartition(".")[2] or row.kind)[:fit] if fit > 2 else ""
        hue = 10 + sum(map(ord, row.kind)) % 50
        y = row.depth * height
        box = f'x="{x * width:.1f}" y="{y}" width="{share * width:.1f}" height="{height - 1}" fill="hsl({hue},85%,65%)"'
        text = f'<text x="{x * width + 3:.1f}" y="{y + 14}">{html.escape(label)}</text>'
        out.append(f"<g><title>{html.escape(title)}, {100 * share:.1f} %</title><rect {box}/>{text}</g>")
    size = f'width="{width}" height="{height * (1 + max(row.depth for row in rows))}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, *out, "</svg>", ""])


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOP, MACs, parameters) of a forward, or of `model.generate` with mode "generate"; as text: ("2.16 G", "1.08 GMACs", "5 M").

    input_shape: of a tensor of ones, which replaces args and kwargs. warm_up: calls before the measured one. Gradients are
    disabled. Other arguments: as in `print_model_profile` and `start_profile`. Raises ValueError without arguments or for another
    mode.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"get_model_profile(mode={mode!r}): use 'forward' or 'generate'")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError("get_model_profile() needs input_shape, args or kwargs: what the model is called with")
    call: Any = model if mode == "forward" else model.generate
    profiler, training = FlopsProfiler(model), {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))
            profiler.start_profile(ignore_modules)
            call(*args, **(kwargs or {}))
            profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        totals = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
        return tuple(total(as_string) for total in totals)
    finally:
        profiler.end_profile()
        for module, was_training in training.items():
            module.training = was_training


_NOTATIONS = """Notations:
params: parameters; MACs: multiply-accumulate operations of products, convolutions and attention; flops: two for each of these
FLOPS: flops per second; fwd, bwd: forward and backward of a micro-batch; step: the update of the weights; iter: all three
"""
_DETAILS = """In each module: params, share of all; MACs, share of all; fwd latency, share of all; fwd FLOPS.
A module's own operations, and losses outside of modules, are the difference to the sum of the modules in it.
"""


def profile_step(engine: Any) -> None:
    """Profile the step that the engine's plan names, on rank 0, and write the profile afterwards.

    FLOP are counted in the step before: after a count, caches are cold, and a forward of 18 ms takes 25 ms.
    """
    plan, step, states = engine.plan.profile, engine.plan.profile.profile_step, engine.states
    if not engine.mesh.is_first:
        return
    profiler = states.resources["flops profiler"] = FlopsProfiler(engine.module, engine)

    def follow(_: bool = True) -> None:
        if engine.global_steps in (step - 1, step):
            profiler.model = engine.module
            profiler.start_profile()
        elif profiler.started:
            profiler.step_seconds = dict(engine.progress.seconds)
            profiler.stop_profile()
            top = profiler.rows()[0].work
            engine.progress.flops = (top.forward + top.backward) * profiler.per
            try:
                profiler.print_model_profile(step, plan.module_depth, plan.top_modules, plan.detailed, plan.output_file)
            except OSError as error:  # raised on rank 0 only: the other ranks would wait for it
                logger.warning("the profile of step %d is not written: %s", step, error)
            profiler.end_profile()

    states.after_step.append(follow)
    follow()
