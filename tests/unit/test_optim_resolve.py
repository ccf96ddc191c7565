"""Names, DeepSpeed's extra keys, refusals; and what "elementwise" means, by cutting parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.optim import Lamb, Lion, Muon, Resolved, is_elementwise, optimizer_class, resolve_optimizer


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("Adam", torch.optim.AdamW),
        ("ADAMW", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("Lion", Lion),
        ("lamb", Lamb),
        ("Muon", Muon),
        ("Adagrad", torch.optim.Adagrad),
        ("adafactor", torch.optim.Adafactor),
        ("NAdam", torch.optim.NAdam),
    ],
)
def test_names(name: str, cls: type[torch.optim.Optimizer]) -> None:
    assert optimizer_class(name)[0] is cls


def test_every_torch_optimizer_is_known_or_refused() -> None:
    for name in torch.optim.__all__:
        cls = getattr(torch.optim, name)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or name == "Optimizer":
            continue
        if name == "LBFGS":
            with pytest.raises(ValueError, match=f"{name}' needs"):
                optimizer_class(name)
        else:
            optimizer_class(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("LBFGS", "closure"), ("MuAdam", "mup package"), ("AdamWW", "did you mean 'AdamW'"), ("Optimizer", "not known")],
)
def test_refused_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_class(name)


def test_adam_means_adamw() -> None:
    assert resolve_optimizer("Adam", {"lr": 1e-3}) == Resolved(torch.optim.AdamW, {"weight_decay": 0.0, "lr": 1e-3}, {}, True)
    assert resolve_optimizer("Adam", {"adam_w_mode": False}).cls is torch.optim.Adam
    assert resolve_optimizer("Adam", {"adam_w_mode": True}).cls is torch.optim.AdamW
    assert resolve_optimizer("AdamW", {"adam_w_mode": False}).cls is torch.optim.AdamW


def test_deepspeed_keys() -> None:
    params = {
        "lr": 1e-3,
        "betas": [0.8, 0.9],
        "torch_adam": False,
        "set_grad_none": True,
        "fp32_optimizer_states": True,
        "max_grad_norm": 0.0,
        "amsgrad": False,
        "bias_correction": False,
    }
    resolved = resolve_optimizer("AdamW", params)
    assert resolved.kwargs == {"weight_decay": 0.0, "lr": 1e-3, "betas": (0.8, 0.9), "amsgrad": False}
    assert resolved.group_options == {"bias_correction": False}
    assert resolved.native
    assert params["betas"] == [0.8, 0.9]  # the configuration is left as it is
    resolved.cls([torch.zeros(1)], **resolved.kwargs)
    lamb = resolve_optimizer("Lamb", {"max_coeff": 0.3, "min_coeff": 0.1, "amsgrad": False, "max_grad_norm": 0})
    assert lamb.kwargs == {"max_coeff": 0.3, "min_coeff": 0.1}
    muon = resolve_optimizer("Muon", {"muon_lr": 0.1, "adam_lr": 0.2, "torch_adam": True, "ns_method": "gram"})
    assert muon.kwargs == {"muon_lr": 0.1, "adam_lr": 0.2, "ns_method": "gram"}


@pytest.mark.parametrize(
    ("params", "native"), [({}, True), ({"torch_adam": True}, True), ({"amsgrad": True}, False), ({"maximize": True}, False)]
)
def test_native(params: dict[str, Any], native: bool) -> None:
    assert resolve_optimizer("Adam", params).native is native


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdamW", {"weight_deacy": 0.1}, "unknown 'weight_deacy', did you mean 'weight_decay'"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("Lion", {"fp32_optimizer_states": False}, "bf16_optimizer_states"),
        ("Lamb", {"amsgrad": True}, "not a variant"),
        ("Lion", {"per_head_muon": True}, "is an option of Muon"),
        ("SGD", {"torch_adam": True}, "unknown 'torch_adam'"),
        ("AdamW", {"bias_correction": False, "amsgrad": True}, "only the native kernel supports"),
        ("SGD", {"params": []}, "unknown 'params'"),
    ],
)
def test_refused_params(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_optimizer(name, params)


ELEMENTWISE = [*("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")]
SHAPE_AWARE = ["Adafactor", "Lamb"]


ODD = [64, 64, 192, 193, 320]  # whole blocks, nothing, one element, an odd end


def cut(tensor: Tensor, at: list[int]) -> list[Tensor]:
    """Ranges of a flat buffer."""
    return [part.clone() for part in tensor.flatten().tensor_split(at)]


def run(name: str, options: dict[str, Any], params: list[Tensor], grads: list[list[Tensor]]) -> None:
    cls, defaults = (torch.optim.Adam, {}) if name == "Adam" else optimizer_class(name)
    optimizer = cls(params, **{**defaults, **options})
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def cut_changes(name: str, options: dict[str, Any], at: list[int]) -> float:
    """The largest difference that cutting a parameter makes, over that which training makes."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(18, 20, generator=generator)
    grads = [torch.randn(18, 20, generator=generator) for _ in range(8)]
    uncut, pieces = start.clone(), cut(start, at)
    run(name, options, [uncut], [[grad] for grad in grads])
    run(name, options, pieces, [cut(grad, at) for grad in grads])
    moved = (uncut - start).abs().max().item()
    assert moved > 0
    return (uncut.flatten() - torch.cat(pieces)).abs().max().item() / moved


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("foreach", [False, True])
def test_elementwise_ones_may_be_cut(name: str, foreach: bool) -> None:
    cls = torch.optim.Adam if name == "Adam" else optimizer_class(name)[0]
    assert is_elementwise(cls)
    options: dict[str, Any] = {} if name == "Lion" else {"foreach": foreach}
    if name == "SGD":
        options |= {"momentum": 0.9, "nesterov": True, "lr": 0.1}
    if name == "RMSprop":
        options |= {"momentum": 0.9, "centered": True}
    if name in ("Adam", "AdamW"):
        options |= {"amsgrad": True}
    if name == "ASGD":
        options |= {"t0": 2.0, "lambd": 0.1}
    if name == "NAdam":
        options |= {"weight_decay": 0.1, "decoupled_weight_decay": True}
    assert cut_changes(name, options, ODD) < 1e-6


@pytest.mark.parametrize("name", SHAPE_AWARE)
def test_shape_aware_ones_may_not_be_cut(name: str) -> None:
    assert not is_elementwise(optimizer_class(name)[0])
    assert cut_changes(name, {"weight_decay": 0.1}, [64]) > 1e-2


def test_the_declared_set_is_the_tested_one() -> None:
    for name in torch.optim.__all__:
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            assert is_elementwise(cls) is (name in ELEMENTWISE), name
    assert not is_elementwise(Muon)


def test_elementwise_is_declared_not_inherited_from_torch() -> None:
    class Mine(torch.optim.AdamW):
        pass

    class Declared(torch.optim.Optimizer):
        elementwise = True

    class Withdrawn(Lion):
        elementwise = False

    weight = [torch.zeros(2)]
    assert not is_elementwise(Mine)
    assert not is_elementwise(Mine(weight))
    assert is_elementwise(torch.optim.AdamW(weight))
    assert is_elementwise(Declared)
    assert is_elementwise(Lion(weight))
    assert not is_elementwise(Withdrawn)
    owned = Mine(weight)
    owned.elementwise = True  # type: ignore[attr-defined]
    assert is_elementwise(owned)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"betas": [0.9]}, r"betas must be 2 numbers, like \[0\.9, 0\.999\], not \(0\.9,\)"),
        ({"lr": "fast"}, r"lr must be a number, like 0\.001, not 'fast'"),
    ],
)
def test_values_of_another_kind_are_told_by_key(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.params of AdamW: {message}"):
        resolve_optimizer("AdamW", params)
