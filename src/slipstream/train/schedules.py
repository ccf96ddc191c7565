"""Learning-rate schedules by DeepSpeed's names, parameters and formulas, and torch's by name.

A schedule is a pure function of one integer, `last_batch_iteration`: -1 before the first `step()`, 0 after it. That integer is its
state, so loading sets the rates at once. A value may be one number for all parameter groups or a list with one per group. Only the
rates and momenta in `optimizer.param_groups` are written.

A class is a row: its fields are the arguments, `height` is the closed form. With i = last_batch_iteration:

    LRRangeTest      min * (1 + rate * (i + 1) / size), the quotient floored with `staircase`
    WarmupLR         min + (max - min) * g(i); g = log(i + 1) / log(W) or i / W for i < W, then 1
    WarmupDecayLR    the same, then g = max(0, (T - i) / max(1, T - W))
    WarmupCosineLR   base * r(i); r = m + (1 - m) * g(i) for i < W, then c + (1 - c) (1 + cos(pi p)) / 2,
                     p = min(1, (i - W + 1) / max(1, T - W))
    OneCycle         min -> max -> min over two half cycles, then min / (1 + decay * (i - cycle + 1) / interval);
                     momentum max -> min -> max, then max * (1 + decay * ...)
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.data.batching import VariableBatchSizeLR, required_arguments
from slipstream.optim.resolve import check_arguments, nearest

log = logging.getLogger(__name__)

PerGroup = float | Sequence[float]


class RateSchedule(ABC):
    """The base of the five schedules: a rate is `low + (high - low) * height(i)`."""

    optimizer: Any  # anything with param_groups
    last_batch_iteration: int
    rates: ClassVar[tuple[str, ...]]  # the fields with the groups' rates and with their lower bounds (default 0)
    momenta: ClassVar[tuple[str, ...]] = ()  # the fields that do not scale with a group's rate

    @abstractmethod
    def height(self, i: int) -> float:
        """The position between the lower bounds (0) and the groups' own rates (1) at iteration i."""

    @abstractmethod
    def _check(self) -> None:
        """Raise ValueError for a value that the schedule cannot take; derive further fields."""

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.optimizer, "param_groups", None), list):
            raise ValueError(f"a scheduler needs an optimizer with param_groups, not a {type(self.optimizer).__name__}")
        self._check()
        self._move(self.last_batch_iteration)

    def _values(self) -> list[dict[str, Any]]:
        """The values of each parameter group at `last_batch_iteration`: always `lr`, perhaps `betas`."""
        fraction = self.height(self.last_batch_iteration)
        highs, *bounds = (self._of_groups(name) for name in self.rates)
        lows = bounds[0] if bounds else [0.0] * len(highs)
        return [{"lr": low + (high - low) * fraction} for low, high in zip(lows, highs, strict=True)]

    def _of_groups(self, name: str) -> list[float]:
        """One number per parameter group; raises ValueError for a list of another length."""
        count = len(self.optimizer.param_groups)
        values = _per_group(getattr(self, name), count)
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} values for {count} parameter groups")
        return values

    def _move(self, last_batch_iteration: int) -> None:
        self.last_batch_iteration = last_batch_iteration
        values = self._values()
        for group, new in zip(self.optimizer.param_groups, values, strict=True):
            for key, value in new.items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._last_lr = [float(new["lr"]) for new in values]

    def add_group(self, rate: float | None) -> None:
        """Extend the schedule to a group that was appended to the optimizer: the first group's values, scaled to its `rate`."""
        count = len(self.optimizer.param_groups) - 1
        first = _per_group(getattr(self, self.rates[0]), count)[0]
        factor = 1.0 if rate is None or not first else rate / first
        for name in (*self.rates, *self.momenta):
            by_group = _per_group(getattr(self, name), count)
            setattr(self, name, [*by_group, by_group[0] if name in self.momenta else by_group[0] * factor])
        if rate is not None:
            getattr(self, self.rates[0])[-1] = rate
        values = self._values()[-1]
        self.optimizer.param_groups[-1].update(values)
        self._last_lr = [*self._last_lr, float(values["lr"])]

    def step(self, iteration: int | None = None) -> None:
        """Advance by one, or to `iteration`, and set the optimizer's values."""
        self._move(self.last_batch_iteration + 1 if iteration is None else iteration)

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at `last_batch_iteration`."""
        return [float(new["lr"]) for new in self._values()]

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        iteration = state.get("last_batch_iteration")
        if not isinstance(iteration, int) or iteration < -1:
            raise ValueError(
                f"{type(self).__name__}: the saved state {dict(state)!r} has no last_batch_iteration >= -1, so it is another "
                f"scheduler's; load_lr_scheduler_states=False skips it"
            )
        self._move(iteration)


@dataclass(eq=False, repr=False)
class LRRangeTest(RateSchedule):
    """The range test (Smith 2018, arXiv 1803.09820): the rate grows without bound, to find where training diverges."""

    rates = ("lr_range_test_min_lr",)

    optimizer: Any
    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def _check(self) -> None:
        self.lr_range_test_step_size = _whole("lr_range_test_step_size", self.lr_range_test_step_size, minimum=1)

    def height(self, i: int) -> float:
        interval = (i + 1) / self.lr_range_test_step_size
        return 1 + self.lr_range_test_step_rate * (math.floor(interval) if self.lr_range_test_staircase else interval)


@dataclass(eq=False, repr=False)
class OneCycle(RateSchedule):
    """The 1-cycle policy (Smith 2018, arXiv 1803.09820) with a decay phase after the cycle.

    Momentum is beta1 of the groups that have `betas`. As in DeepSpeed, beta2 then becomes 0.99, and beta1 is `cycle_min_mom` before
    the first `step()`. `decay_step_size` 0: no decay. A stair count divides a half cycle into that many equal constant parts.
    """

    BETA2 = 0.99

    rates = ("cycle_max_lr", "cycle_min_lr")
    momenta = ("cycle_min_mom", "cycle_max_mom")

    optimizer: Any
    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def _check(self) -> None:
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        second = first if second is None else second
        if first <= 0 or second < 0 or self.decay_step_size < 0:
            raise ValueError(
                f"OneCycle: needs cycle_first_step_size ({first}) > 0, cycle_second_step_size ({second}) >= 0 and "
                f"decay_step_size ({self.decay_step_size}) >= 0"
            )
        stairs, low = self.cycle_first_stair_count, self.cycle_second_stair_count
        self._halves = ((float(first), stairs), (float(second), stairs if low is None else low))  # of a cycle: (size, stairs)
        self.total_size = float(first) + float(second)
        self.cycle_momentum = self.cycle_momentum and self._can_cycle_momentum()

    def _can_cycle_momentum(self) -> bool:
        betas = [group["betas"] for group in self.optimizer.param_groups if "betas" in group]
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            return bool(betas)  # rank 0 warns for all
        if not betas:
            log.warning("OneCycle: momentum is not cycled, because no parameter group has betas; set cycle_momentum=false")
        elif any(beta2 != self.BETA2 for _, beta2 in betas):
            text = "OneCycle: cycling the momentum sets beta2 to %s as in DeepSpeed (it was %s); cycle_momentum=false keeps betas"
            log.warning(text, self.BETA2, betas[0][1])
        return bool(betas)

    def _values(self) -> list[dict[str, Any]]:
        values, height, past = (
            super()._values(),
            self.height(self.last_batch_iteration),
            self.last_batch_iteration - self.total_size,
        )
        decay = (past + 1) / self.decay_step_size if past >= 0 and self.decay_step_size > 0 else 0.0  # intervals since the cycle
        for new in values:
            new["lr"] /= 1 + self.decay_lr_rate * decay
        if self.cycle_momentum:
            bounds = zip(*(self._of_groups(name) for name in self.momenta), strict=True)
            for group, new, (low, high) in zip(self.optimizer.param_groups, values, bounds, strict=True):
                momentum = (high - (high - low) * height) * (1 + self.decay_mom_rate * decay)
                if "betas" in group:
                    new["betas"] = (low if self.last_batch_iteration < 0 else momentum, self.BETA2)
        return values

    def height(self, i: int) -> float:
        """The height in the cycle: 0 at its ends and after it, 1 at its peak.

        Stairs are computed from the integer position, because the quotient can be an ulp below a stair's edge.
        """
        if i >= self.total_size:
            return 0.0
        position, rising = (i + 1) % self.total_size, self._halves[0][0]
        part, (size, stairs) = (position, self._halves[0]) if position <= rising else (self.total_size - position, self._halves[1])
        return math.floor(part * stairs / size) / stairs if stairs > 0 else part / size


class _Warmup(RateSchedule):
    """A schedule that begins with a ramp over `warmup_num_steps` (at least 2), linear or logarithmic (steep first)."""

    warmup_num_steps: int
    warmup_type: str

    def _check(self) -> None:
        name, kind = type(self).__name__, self.warmup_type
        if kind not in ("log", "linear"):
            raise ValueError(f"{name}: warmup_type {kind!r} must be 'log' or 'linear'{nearest(str(kind), ('log', 'linear'))}")
        self.warmup_num_steps = max(2, _whole("warmup_num_steps", self.warmup_num_steps, minimum=0))
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)
        if "total_num_steps" in vars(self):  # WarmupLR has no end
            self.total_num_steps = total = _whole("total_num_steps", vars(self)["total_num_steps"], minimum=0)
            if total < self.warmup_num_steps:
                log.warning("%s: total_num_steps %d is less than warmup_num_steps %d", name, total, self.warmup_num_steps)

    def _ramp(self, i: int) -> float:
        """Rises from 0 to 1, then stays at 1."""
        if not 0 < i < self.warmup_num_steps:
            return float(i > 0)
        return math.log(i + 1) * self.inverse_log_warm_up if self.warmup_type == "log" else i / self.warmup_num_steps


@dataclass(eq=False, repr=False)
class WarmupLR(_Warmup):
    """Rises from `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's own rate), then stays constant."""

    rates = ("warmup_max_lr", "warmup_min_lr")

    optimizer: Any
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _check(self) -> None:
        super()._check()
        self.warmup_max_lr = _rates(self.optimizer) if self.warmup_max_lr is None else self.warmup_max_lr

    def height(self, i: int) -> float:
        return self._ramp(i)


@dataclass(eq=False, repr=False)
class WarmupDecayLR(_Warmup):
    """WarmupLR, then linear decay to `warmup_min_lr` at `total_num_steps`."""

    rates = ("warmup_max_lr", "warmup_min_lr")

    optimizer: Any
    total_num_steps: int
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def height(self, i: int) -> float:
        total, warmup = self.total_num_steps, self.warmup_num_steps
        return self._ramp(i) if i < warmup else max(0.0, (total - i) / max(1, total - warmup))


@dataclass(eq=False, repr=False)
class WarmupCosineLR(_Warmup):
    """Multiples of the optimizer's own rate: warmup from `warmup_min_ratio`, then half a cosine down to `cos_min_ratio`.

    As in DeepSpeed the rate is 0 until the first `step()`, whatever the minimum ratio.
    """

    rates = ("base_lrs",)

    optimizer: Any
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _check(self) -> None:
        super()._check()
        self.base_lrs = _rates(self.optimizer)

    def height(self, i: int) -> float:
        """The multiple of the optimizer's own rate."""
        warmup, least = self.warmup_num_steps, self.cos_min_ratio
        if i < warmup:
            return 0.0 if i < 0 else self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._ramp(i)
        progress = min(1.0, (i - warmup + 1) / max(1, self.total_num_steps - warmup))
        return max(0.0, least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2)


_SCHEDULES: dict[str, type[RateSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID: tuple[str, ...] = tuple(_SCHEDULES)

# torch schedulers that JSON cannot describe.
_PASS = "; pass a callable that builds it as lr_scheduler="
_STEP_YOURSELF = "build it for the optimizer that initialize() returns and call scheduler.step(metric) where you evaluate"
_REFUSED: dict[str, str] = {
    "LRScheduler": f"is the base class of torch's schedulers{_PASS}",
    "LambdaLR": f"needs a function{_PASS}",
    "MultiplicativeLR": f"needs a function{_PASS}",
    "SequentialLR": f"needs other schedulers{_PASS}",
    "ChainedScheduler": f"needs other schedulers{_PASS}",
    "ReduceLROnPlateau": f"needs a metric at each step: {_STEP_YOURSELF}",
}


def build_scheduler(plan_type: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Build the scheduler that `scheduler.type` names: one of `VALID`, or any class of `torch.optim.lr_scheduler`."""
    torch_names = [name for name in torch.optim.lr_scheduler.__all__ if name not in _SCHEDULES]
    names = {name.lower(): name for name in (*torch_names, *VALID)}
    name = names.get(plan_type.lower())
    if name is None:
        usable = sorted(set(names.values()) - set(_REFUSED))
        raise ValueError(
            f"unknown scheduler.type {plan_type!r}{nearest(plan_type, usable)}; use one of {usable}, or pass a scheduler, or a "
            f"callable that builds one, as lr_scheduler="
        )
    if name in _REFUSED:
        raise ValueError(f"scheduler.type {name!r} {_REFUSED[name]}")
    cls: type[Any] = _SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    check_arguments(cls, params, f"scheduler.params of {name}")
    return cls(optimizer, **params)


class ArgumentsAtStep(NamedTuple):
    """An `lr_scheduler=` whose `step()` may need any arguments: DeepSpeed's `engine.step(lr_kwargs=)` can pass them."""

    given: Any


def given_scheduler(given: Any, optimizer: Any) -> Any:
    """The scheduler of `lr_scheduler=`; raises ValueError unless `advance` can step it and it sets this optimizer's rates."""
    has_arguments = isinstance(given, ArgumentsAtStep)
    given = given.given if has_arguments else given
    scheduler = given(optimizer) if callable(given) else given
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise ValueError(f"lr_scheduler= is a {name}, which has no step(); pass a scheduler, or a callable that builds one")
    if not has_arguments:
        check_step(scheduler, "which the engine cannot pass:")
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if groups and not any(group is own for group in groups for own in optimizer.param_groups):  # optimizers can share groups
        raise ValueError(
            f"lr_scheduler= is a {name} of another optimizer ({type(scheduler.optimizer).__name__}), so it would not set the "
            f"engine's learning rates: pass that optimizer as optimizer=, or as lr_scheduler= a callable, which gets the engine's"
        )
    return scheduler


def check_step(scheduler: Any, why: str) -> None:
    """Raise ValueError unless `advance` can step the scheduler; `why`: the error's clause about the arguments that it needs."""
    if isinstance(scheduler, VariableBatchSizeLR) and scheduler.base_lr_scheduler is not None:
        scheduler = scheduler.base_lr_scheduler
    needed = required_arguments(scheduler)
    if needed not in ([], ["increment"]):  # Megatron's counts samples by that name; others want an epoch or a metric
        name = type(scheduler).__name__
        raise ValueError(f"lr_scheduler= is a {name}, whose step() needs {', '.join(needed)}, {why} {_STEP_YOURSELF}")


def advance(scheduler: Any, samples: int) -> None:
    """Step a scheduler after an update. A scheduler that needs `increment`, like Megatron's, gets the number of samples."""
    scheduler.step(*([samples] if required_arguments(scheduler) else []))


_torch = torch.optim.lr_scheduler
_OF_OTHERS = (_torch.SequentialLR, _torch.ChainedScheduler)
_NAMES = "Lambda Multiplicative Step MultiStep Constant Linear Exponential Polynomial CosineAnnealing"  # and LR
_FROM_RATES = (*(getattr(_torch, f"{name}LR") for name in _NAMES.split()), _torch.CosineAnnealingWarmRestarts)


def add_group(scheduler: Any, rate: float | None) -> Callable[[], None]:
    """Extend a scheduler to a group that was appended to its optimizer, with learning rate `rate` (None: unspecified). From now on
    the group's `lr` follows the first group's in proportion.

    Returns a function that undoes this in the scheduler, not in the group. Raises ValueError, with nothing changed, for schedulers
    that cannot be extended.
    """
    parts = _parts_of(scheduler)
    for part in parts:
        if not isinstance(part, RateSchedule) and type(part) not in (*_OF_OTHERS, *_FROM_RATES):
            raise ValueError(
                f"add_param_group(): a {type(part).__name__} cannot be extended by another group. Set engine.lr_scheduler = None "
                f"before, and to a new scheduler of engine.optimizer after; or pass an empty group to initialize()"
            )
    before = [(part, dict(vars(part))) for part in parts]
    if isinstance(scheduler, RateSchedule):
        scheduler.add_group(rate)
    else:
        _add_to_torch(parts)

    def undo() -> None:
        for part, values in before:
            vars(part).update(values)

    return undo


def _parts_of(scheduler: Any) -> list[Any]:
    """The scheduler and its nested schedulers."""
    nested = scheduler._schedulers if type(scheduler) in _OF_OTHERS else []
    return [scheduler, *(part for each in nested for part in _parts_of(each))]


def _add_to_torch(parts: Sequence[Any]) -> None:
    """Extend torch schedulers: base rates, last rates and lambdas. Lists are replaced, not appended to, so that `undo` works."""
    leaf = next(part for part in parts if type(part) in _FROM_RATES)
    first, *_, group = leaf.optimizer.param_groups
    own, base = float(group["lr"]), float(leaf.base_lrs[0])
    current = own * (float(first["lr"]) / base) if base else own
    group["initial_lr"] = own
    group["lr"] = torch.tensor(current) if isinstance(group["lr"], Tensor) else current
    for part in parts:
        part._last_lr = [*part._last_lr, current]
        if type(part) in _FROM_RATES:
            part.base_lrs = [*part.base_lrs, own]
        if hasattr(part, "lr_lambdas"):
            part.lr_lambdas = [*part.lr_lambdas, part.lr_lambdas[0]]


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(value: PerGroup, count: int) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value] * count


def _whole(name: str, value: float, *, minimum: int) -> int:
    """`value` as an integer; integral floats are accepted, because other tools write sizes as floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer >= {minimum}")
    return int(value)
