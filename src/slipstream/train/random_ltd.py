"""Random-LTD (Yao et al. 2022, arXiv 2211.11586): in training, middle layers compute only a random subset of the tokens.

Each such layer draws, for each sequence of a micro-batch, the tokens that it computes, in order; the others pass unchanged.
Their number grows with the step from `min_value` to `max_value`. In evaluation all tokens are computed.

[Note: Which tensors have tokens] With hidden states [B, S, H] (or [S, B, H]), the drawn tokens are taken from these arguments:
masks [B or 1, *, S or 1, S], positions and masks [B or 1, S], position embeddings [B or 1, S, D], and, with hidden states
[S, B, H], tensors that begin with [S, B or 1]. So rotary angles and masks are those of the tokens' true positions. If an argument
is [S] or [S, D], the same for all sequences, all sequences of the micro-batch draw the same tokens. If a layer returns an argument
beside hidden states (T5's position bias), the output is the original argument, of all tokens. A layer that computes such an output
from the drawn tokens is refused.

[Note: The same draws] The seed of a draw is a hash of (seed, step, backwards of the step so far, layer, index in the batch axis).
So a resumed run draws what the interrupted one would have drawn, a recomputed layer repeats its draw, and slices of a layer on
several ranks draw the same. The layer's call is wrapped, so recompute and hooks see only the shorter sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.data.sampler import generator_of
from slipstream.data.schedules import fixed_root
from slipstream.parallel.around import Around, first_of, input_of, unwrap, with_first, wrap
from slipstream.train.engine import Engine
from slipstream.zero.wrap import repeated_blocks

_KEY = "data_efficiency.data_routing.random_ltd"


class RandomLTDScheduler:
    """DeepSpeed's class: the number of tokens at a step. config: the block `random_ltd`. Raises ValueError, naming keys."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        schedule = config["random_ltd_schedule"]
        steps = schedule["schedule_config"]
        self.model_layer_num, self.random_ltd_layer_num = config["total_layer_num"], config["random_ltd_layer_num"]
        self.global_batch_size = config.get("global_batch_size") or 0
        given = {
            "total_layer_num": self.model_layer_num,
            "random_ltd_layer_num": self.random_ltd_layer_num,
            **{f"random_ltd_schedule.{name}": schedule[name] for name in ("min_value", "max_value")},
            **{f"random_ltd_schedule.schedule_config.{name}": steps[name] for name in ("require_steps", "seq_per_step")},
        }
        if missing := [name for name, value in given.items() if not value]:
            raise ValueError(f"{_KEY} needs {' and '.join(missing)}")
        if schedule["schedule_type"] != "fixed_linear":
            raise ValueError(f"{_KEY}.random_ltd_schedule.schedule_type ({schedule['schedule_type']!r}) must be 'fixed_linear'")
        self.least, self.most, self.steps = schedule["min_value"], schedule["max_value"], steps
        if self.least > self.most:
            raise ValueError(f"{_KEY}.random_ltd_schedule: min_value ({self.least}) is above max_value ({self.most})")
        self.reset_to_init()

    def get_value(self, global_steps: int) -> int:
        """The number of tokens at this step, counted from 0."""
        return int(fixed_root(global_steps, self.least, self.most, self.steps["require_steps"], self.steps["seq_per_step"]))

    def reset_to_init(self) -> None:
        self.current, self.step = self.least, -1

    def get_current_seq(self) -> int:
        return self.current

    def set_current_seq(self, seq_length: int) -> None:
        self.current = seq_length

    def get_random_ltd_layer_num(self) -> int:
        return int(self.random_ltd_layer_num)

    def update_seq(self, global_steps: int) -> None:
        """Set the number of tokens to that of this step."""
        self.current, self.step = self.get_value(global_steps), global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """The sum over the first `train_iters` steps of tokens times layers computed."""
        rest = self.most * (self.model_layer_num - self.random_ltd_layer_num)
        return sum(self.global_batch_size * (self.get_value(i) * self.random_ltd_layer_num + rest) for i in range(train_iters))

    def state_dict(self) -> dict[str, Any]:
        return {
            "consumed_layer_tokens": self.get_total_layer_tokens(self.step + 1),
            "current_steps": self.step,
            "current_value": self.current,
            "min_value": self.least,
            "max_value": self.most,
        }

    get_state = state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the step, which determines everything else; the schedule's bounds stay the config's."""
        self.step, self.current = state_dict["current_steps"], state_dict["current_value"]

    set_state = load_state_dict


class TokenDrop:
    """Random-LTD of one model: its schedule, its layers, and the clock that draws follow."""

    def __init__(self, config: Mapping[str, Any], seed: int, scheduler: RandomLTDScheduler | None = None) -> None:
        self.scheduler, self.seed = scheduler or RandomLTDScheduler(config), seed
        layers, count, total = config["random_ltd_layer_id"], self.scheduler.random_ltd_layer_num, self.scheduler.model_layer_num
        if len(set(layers)) != count or max(layers, default=0) >= total:
            raise ValueError(
                f"{_KEY}.random_ltd_layer_id ({layers}) must name random_ltd_layer_num ({count}) different layers, each below "
                f"total_layer_num ({total})"
            )
        self.numbers = sorted(layers)
        self.mask_name, self.token_dim = config["model_mask_name"], 0 if config["hidden_state_order"] == "seq_batch_dim" else 1
        # returns (step, backwards in it, index in the batch axis); None: a script steps the scheduler, and torch's generator draws
        self.clock: Callable[[], tuple[int, int, int]] | None = None
        self.wrappers: list[tuple[nn.Module, Around]] = []

    def wrap(self, layers: list[nn.Module], found: str) -> None:
        """Drop tokens in the config's layers among `layers`, instead of earlier ones. Raises ValueError with `found` if their
        number is not the config's."""
        if len(layers) != self.scheduler.model_layer_num:
            raise ValueError(self._misfit(found))
        self.close()
        self.wrappers = [(layers[number], self._around(number)) for number in self.numbers]
        for layer, around in self.wrappers:
            wrap(layer, around)

    def check(self, model: nn.Module, count: int) -> None:
        """Raise ValueError if training begins before layers are chosen."""
        if model.training and not self.wrappers:
            raise ValueError(self._misfit(f"{type(model).__name__} has {count} repeated blocks"))

    def _misfit(self, found: str) -> str:
        return (
            f"{_KEY}.total_layer_num is {self.scheduler.model_layer_num}, and {found}; set it to their number, or name the class "
            "of the layers by convert_to_random_ltd(engine, LayerClass)"
        )

    def close(self) -> None:
        """Restore the layers' own classes."""
        for layer, around in self.wrappers:
            unwrap(layer, around)
        self.wrappers = []

    def _begin(self, number: int) -> torch.Generator | None:
        """Set the step's number of tokens; returns the generator of layer `number`."""
        if self.clock is None:
            return None
        step, backwards, index = self.clock()
        self.scheduler.update_seq(step)
        return generator_of(self.seed, step, backwards, number, index)

    def _around(self, number: int) -> Around:
        """The wrapper of the calls of layer `number`."""

        def call(layer: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not layer.training:
                return run(*args, **kwargs)
            x = input_of(args, kwargs)
            if not isinstance(x, Tensor) or x.dim() != 3:
                raise TypeError(
                    f"random_ltd: the first argument of {type(layer).__name__} must be hidden states of three dimensions"
                )
            self._check_arguments(layer, number, args, kwargs)
            generator = self._begin(number)
            whole, kept = x.shape[self.token_dim], self.scheduler.current
            if kept >= whole:
                return run(*args, **kwargs)
            rows = x.shape[1 - self.token_dim]
            others = [*args[1:], *(value for key, value in kwargs.items() if key != "cache_position")]
            is_shared = any(_has_only_tokens(value, whole) for value in _tensors(others))
            tokens = draw(1 if is_shared else rows, whole, kept, generator, x.device).expand(rows, -1)
            take = _Take(tokens, whole, self.token_dim)
            output = run(*map(take, args), **{key: take(value) for key, value in kwargs.items()})
            new, shape = first_of(output), [*x.shape]
            shape[self.token_dim] = kept
            if not isinstance(new, Tensor) or [*new.shape] != shape:
                raise TypeError(
                    f"random_ltd: {type(layer).__name__} must return hidden states of its input's shape, first of all, but of an "
                    f"input of shape {shape} it returns {tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__}"
                )
            output = take.whole_of(output, type(layer).__name__, number)
            return with_first(output, take.put(x, new))

        return call

    def _check_arguments(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = [*inspect.signature(type(layer).forward).parameters][1 : len(args) + 1]
        if self.mask_name is not None and self.mask_name not in (*names, *kwargs):
            raise ValueError(
                f"{_KEY}.model_mask_name is {self.mask_name!r}, but {type(layer).__name__} is called with "
                f"{', '.join((*names, *kwargs))}; name its mask, or drop the key: masks are found by their shape"
            )
        if {**dict(zip(names, args, strict=False)), **kwargs}.get("encoder_hidden_states") is not None:
            raise TypeError(
                f"random_ltd: layer {number}, {type(layer).__name__}, attends to another sequence (encoder_hidden_states), whose "
                "masks look like its own; leave the layers of a decoder out of random_ltd_layer_id"
            )


def draw(rows: int, whole: int, kept: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw `kept` of `whole` tokens for each row, ascending: int64 [rows, kept]."""
    scores = torch.rand(rows, whole, generator=generator)
    return scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values.to(device, non_blocking=True)


class RandomLayerTokenDrop(nn.Module):
    """A layer that drops tokens for a script without an engine, or with a schedule of its own; `init_config` starts dropping.

    Tokens are drawn by torch's generator of the CPU, anew for each layer and call.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self._around: Around | None = None

    def init_config(self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int) -> None:
        """config: the block `random_ltd`; only `model_mask_name` and `hidden_state_order` are read."""
        options = {"model_mask_name": None, "hidden_state_order": "batch_seq_dim", **config}
        self.random_ltd_scheduler = scheduler
        self._around = TokenDrop({**options, "random_ltd_layer_id": [random_ltd_layer_id]}, 0, scheduler)._around(
            random_ltd_layer_id
        )

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        layer = self.random_ltd_layer
        return layer(hidden_states, **kwargs) if self._around is None else self._around(layer, layer, hidden_states, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among some arguments, and in tuples and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from _tensors(value)


def _has_only_tokens(value: Tensor, whole: int) -> bool:
    """Whether a tensor is [S] or [S, D], without a batch dimension."""
    is_wide = value.dim() == 2 and value.is_floating_point() and value.shape[1] != whole and value.shape[1] > 1
    return (value.dim() == 1 or is_wide) and value.shape[0] == whole


class _Take:
    """Takes the drawn tokens from a layer's arguments, and inserts its output. tokens: [B, s], of `whole` in a sequence."""

    def __init__(self, tokens: Tensor, whole: int, token_dim: int) -> None:
        self.tokens, self.whole, self.token_dim = tokens, whole, token_dim
        self.taken: list[tuple[Tensor, Tensor]] = []  # (taken, the argument that it was taken from)

    def __call__(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self, value))
        if not isinstance(value, Tensor) or not value.dim():
            return value
        taken = self._taken(value)
        self.taken.append((taken, value))
        return taken

    def whole_of(self, output: Any, name: str, number: int) -> Any:
        """A layer's output, with whole arguments for those it passes on. Raises TypeError for other outputs of the drawn tokens."""
        if not isinstance(output, (tuple, list)):
            return output
        others = [next((given for taken, given in self.taken if taken is value), value) for value in output[1:]]
        for place, value in enumerate(others, 1):
            if isinstance(value, Tensor) and self._is_short(value):
                raise TypeError(
                    f"random_ltd: output {place} of layer {number}, {name}, is of the drawn tokens only (shape "
                    f"{tuple(value.shape)}), and others may take it for theirs; leave the layer out of random_ltd_layer_id"
                )
        return type(output)([output[0], *others])

    def _is_short(self, value: Tensor) -> bool:
        """Whether a tensor has a shape that `_taken` returns for a longer tensor."""
        (batch, kept), shape = self.tokens.shape, value.shape
        if value.dim() == 4 and shape[2] in (1, kept) and shape[3] == kept:
            return True
        return value.dim() > 1 and any(shape[at] == kept and shape[1 - at] in (1, batch) for at in {1, self.token_dim})

    def _taken(self, value: Tensor) -> Tensor:
        batch, whole, shape = len(self.tokens), self.whole, value.shape
        if _has_only_tokens(value, whole):
            return value.index_select(0, self.tokens[0])
        if value.dim() == 1:
            return value
        if value.dim() == 4 and shape[0] in (1, batch) and shape[2] in (1, whole) and shape[3] == whole:
            return self._mask(value.expand(batch, -1, -1, -1))
        if shape[1] == whole and shape[0] in (1, batch) and (self.token_dim == 1 or value.dim() == 2):
            return self._rows(value, 1)
        return self._rows(value, 0) if self.token_dim == 0 and shape[0] == whole and shape[1] in (1, batch) else value

    def _mask(self, value: Tensor) -> Tensor:
        """Take the columns, and the rows if there are several, of a mask [B, *, S or 1, S]."""
        heads = value.shape[1]
        if value.shape[2] == self.whole:
            value = value.gather(2, self.tokens[:, None, :, None].expand(-1, heads, -1, self.whole))
        return value.gather(3, self.tokens[:, None, None, :].expand(-1, heads, value.shape[2], -1))

    def _places(self, token_dim: int, batch: int) -> Tensor:
        """The tokens' flat positions in the first two dimensions of a tensor, [B or 1, S] or [S, B or 1]: [B, s] or [s, B]."""
        sequence = torch.arange(len(self.tokens), device=self.tokens.device)[:, None] if batch > 1 else 0
        return self.tokens + sequence * self.whole if token_dim else (self.tokens * batch + sequence).T

    def _rows(self, value: Tensor, token_dim: int) -> Tensor:
        places = self._places(token_dim, value.shape[1 - token_dim])
        return value.flatten(0, 1).index_select(0, places.reshape(-1)).view(*places.shape, *value.shape[2:])

    def put(self, x: Tensor, new: Tensor) -> Tensor:
        """Hidden states with the computed tokens at their positions."""
        places = self._places(self.token_dim, len(self.tokens)).reshape(-1)
        return x.to(new.dtype).flatten(0, 1).index_copy(0, places, new.flatten(0, 1)).view(x.shape)


def drop_tokens(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Prepare the model as the config's `random_ltd` says; layers are its repeated blocks. Raises ValueError."""
    if (config := plan.efficiency.get("data_routing.random_ltd")) is None:
        return None
    drop = TokenDrop({**config, "global_batch_size": plan.batch.train_batch_size}, plan.efficiency["seed"])
    blocks = [model.get_submodule(name) for name in repeated_blocks(model)]
    if len(blocks) == drop.scheduler.model_layer_num:  # otherwise convert_to_random_ltd names the layers
        drop.wrap(blocks, "")

    def connect(engine: Engine) -> None:
        engine.states.resources["random-LTD"] = drop
        drop.clock = lambda: (engine.global_steps, engine.backwards, engine.mesh.batch.index)
        engine.states.before_forward(lambda module, _: drop.check(module, len(blocks)))

    return connect


def token_drop_of(engine: Engine) -> TokenDrop:
    """The engine's random-LTD. Raises ValueError if its config has none."""
    drop = engine.states.resources.get("random-LTD")
    if drop is None:
        raise ValueError(f"random-LTD is off: set {_KEY}.enabled, data_efficiency.data_routing.enabled and data_efficiency.enabled")
    return drop


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module]) -> Any:
    """Drop tokens in the modules of this class, in their order, instead of the model's repeated blocks; returns the engine.
    Raises TypeError for anything but an engine, ValueError if their number is not the config's."""
    if not hasattr(model, "states"):
        raise TypeError(f"convert_to_random_ltd() takes the engine that initialize() returned, not a {type(model).__name__}")
    layers = [module for module in model.module.modules() if isinstance(module, convert_type)]
    token_drop_of(model).wrap(layers, f"{type(model.module).__name__} has {len(layers)} of class {convert_type.__name__}")
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The state dict of an engine or a model; random-LTD does not change its names."""
    return dict(model.state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's state dict with the names of its wrapped layers replaced by the model's own."""
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}
