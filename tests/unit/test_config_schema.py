"""The schema: what people and launchers write parses, what nobody meant is refused by name."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.config import parse as parsing
from slipstream.config.keys import table
from slipstream.config.parse import RENAMED, parse
from slipstream.config.schema import Config, child
from slipstream.config.values import Block

KEYS = sorted(table())
# Names that open a block count as keys too: a typo in one loses everything below it.
NAMES = sorted({".".join(key.split(".")[: i + 1]) for key in KEYS for i in range(key.count(".") + 1)})
CHECKED = [name for name in NAMES if not name.endswith("*") and not name.startswith("amp.")]  # amp takes any key


def value_of(raw: Mapping[str, Any], path: str) -> Any:
    return parse(raw).leaves[path].value


def nest(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"; a `*` below a list becomes its first item, elsewhere the name g1."""
    *parents, last = name.split(".")
    inner: Any = {last: value}
    for position in range(len(parents) - 1, -1, -1):
        if parents[position] != "*":
            inner = {parents[position]: inner}
        else:
            inner = [inner] if parents[position - 1] == "layer_specs" else {"g1": inner}
    return inner


def concrete(name: str) -> str:
    return name.replace("layer_specs.*", "layer_specs.0").replace("*", "g1")


def test_a_letter_too_many_names_the_key() -> None:
    for name in CHECKED:
        typo = f"{name}q"
        with pytest.raises(ValueError, match=f"unknown config key {re.escape(concrete(typo))};") as error:
            parse(nest(typo, 1))
        assert concrete(name) in meant(str(error.value))


def meant(message: str) -> list[str]:
    return message.split("did you mean ")[1].rstrip("?").split(" or ")


@given(data=st.data())
def test_any_one_letter_typo_names_the_key(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(CHECKED))
    prefix, _, word = name.rpartition(".")
    spot = data.draw(st.integers(0, len(word) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_0123456789"))
    typo = data.draw(
        st.sampled_from(
            [
                word[:spot] + word[spot + 1 :],
                word[:spot] + letter + word[spot + 1 :],
                word[:spot] + letter + word[spot:],
                word[:spot] + word[spot + 1 : spot + 2] + word[spot] + word[spot + 2 :],
            ]
        )
    )
    wrong = f"{prefix}.{typo}" if prefix else typo
    assume(typo and not typo.startswith("_") and wrong not in NAMES and wrong not in RENAMED)  # "_" begins comments
    with pytest.raises(ValueError, match="unknown config key") as error:
        parse(nest(wrong, 1))
    assert concrete(name) in meant(str(error.value))


def test_a_key_in_the_wrong_block_names_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"unknown config key stage; did you mean zero_optimization\.stage"):
        parse({"stage": 3})
    with pytest.raises(ValueError, match=r"zero_optimization\.gradient_clipping; did you mean gradient_clipping"):
        parse({"zero_optimization": {"gradient_clipping": 1.0}})


def test_every_error_is_reported_at_once() -> None:
    with pytest.raises(ValueError) as error:
        parse({"train_batch_siz": 8, "zero_optimization": {"stage": 7}, "fp16": {"enabled": "maybe"}})
    text = str(error.value)
    assert "several errors" in text
    assert "unknown config key train_batch_siz; did you mean train_batch_size" in text
    assert "zero_optimization.stage must be 0, 1, 2 or 3, got 7" in text
    assert "fp16.enabled must be a valid boolean" in text and "got 'maybe'" in text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"fp16": True}, r'config key fp16 must be an object such as \{"enabled": true\}, got True'),
        ({"train_batch_size": "eight"}, "train_batch_size must be a number, got 'eight'"),
        ({"train_batch_size": 8.5}, "train_batch_size must be a whole number, got 8.5"),
        ({"train_batch_size": True}, "train_batch_size must be a number, got True"),
        ({"train_batch_size": 0}, "train_batch_size must be greater than or equal to 1, got 0"),
        ({"steps_per_print": -1}, "steps_per_print must be greater than or equal to 1"),
        ({"gradient_clipping": -1.0}, "gradient_clipping must be greater than or equal to 0"),
        ({"communication_data_type": "fp8"}, "communication_data_type must be one of fp32, fp16, bf16, int8, int4"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op must be 'mean' or 'sum', got 'max'"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "must be 'none', 'cpu' or 'nvme'"),
        ({"zero_optimization": 3}, "config key zero_optimization must be an object"),
        ({"optimizer": {"params": {}}}, "config key optimizer.type is missing"),
        ({"slipstream": {"transport": "nvlink"}}, "transport must be 'auto', 'shared' or 'gloo'"),
        ({"checkpoint": {"tag_validation": "loud"}}, "tag_validation must be 'ignore', 'warn' or 'fail'"),
        ({"pipeline": {"stages": [1]}}, "pipeline.stages"),
        ({3: 1}, "config keys must be strings, got 3"),
        ({"bf16": {}, "bfloat16": {}}, "bf16 and bfloat16 are two spellings of the same key"),
    ],
)
def test_bad_values_are_refused_with_key_and_value(raw: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(raw)


def test_numbers_as_launchers_write_them() -> None:
    zero = {"reduce_bucket_size": 0.9 * 768 * 768, "sub_group_size": "1e9", "stage3_max_live_parameters": math.inf}
    raw = {"train_batch_size": "32", "gradient_accumulation_steps": 4.0, "zero_optimization": zero}
    assert value_of(raw, "train_batch_size") == 32
    assert value_of(raw, "gradient_accumulation_steps") == 4
    assert value_of(raw, "zero_optimization.reduce_bucket_size") == int(0.9 * 768 * 768)
    assert value_of(raw, "zero_optimization.sub_group_size") == 10**9
    assert value_of(raw, "zero_optimization.stage3_max_live_parameters") == sys.maxsize
    assert value_of({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage") == 2
    assert value_of({"gradient_clipping": "0.5"}, "gradient_clipping") == 0.5


@pytest.mark.parametrize("never", [math.inf, "Infinity", 0, None])
def test_steps_per_print_never(never: Any) -> None:
    assert value_of({"steps_per_print": never}, "steps_per_print") is None


@pytest.mark.parametrize(
    ("spelling", "name"), [("fp32", "fp32"), ("torch.bfloat16", "bf16"), ("half", "fp16"), ("BFloat16", "bf16"), ("float", "fp32")]
)
def test_dtype_spellings(spelling: str, name: str) -> None:
    assert value_of({"data_types": {"grad_accum_dtype": spelling}}, "data_types.grad_accum_dtype") == name


def test_a_type_of_null_is_none() -> None:
    """As in DeepSpeed, which asks whether the type is set."""
    for block in ("optimizer", "scheduler"):
        assert getattr(parse({block: {"type": None, "params": {"lr": 1}}}).config, block) is None
        with pytest.raises(ValueError, match=f"config key {block}.type is missing"):
            parse({block: {"params": {}}})


def test_null_means_not_set_at_every_level() -> None:
    raw = {"optimizer": None, "gradient_clipping": None, "zero_optimization": {"stage": 2, "offload_param": None}}
    parsed = parse(raw)
    assert parsed.config.optimizer is None
    assert parsed.leaves["gradient_clipping"].value == 1.0
    assert not parsed.leaves["gradient_clipping"].given
    assert parsed.config.zero_optimization.offload_param is None


def test_auto_is_accepted_for_every_key() -> None:
    types = ("optimizer.type", "scheduler.type")
    for name in types:
        with pytest.raises(ValueError, match=f"{name} is missing"):
            parse(nest(name, "auto"))
    wrong = {}
    for name in (each for each in CHECKED if each not in types):
        raw = nest(name, "auto")
        for block in ("optimizer", "scheduler"):
            if isinstance(raw.get(block), dict):
                raw[block]["type"] = "Adam"
        try:
            parsed = parse(raw)
        except ValueError as error:
            wrong[name] = str(error)
        else:
            given = [path for path, leaf in parsed.leaves.items() if path == concrete(name) and leaf.given]
            if parsed.autos != {concrete(name)} or given:
                wrong[name] = f"auto: {parsed.autos}, given: {given}"
    assert not wrong


def test_legacy_forms() -> None:
    assert value_of({"zero_optimization": True, "allgather_size": 5e8}, "zero_optimization.stage") == 1
    assert value_of({"zero_optimization": False}, "zero_optimization.stage") == 0
    assert value_of({"bfloat16": {"enabled": True}}, "bf16.enabled") is True
    assert value_of({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload") is True


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_renamed_keys_lead_to_keys(old: str, new: str) -> None:
    assert old not in NAMES and new in NAMES
    assert parse(nest(old, "auto")).autos == {new}


# What accelerate and transformers hand over: their own resolution done in part, theirs and ours mixed.
ACCELERATE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "1",
    "gradient_clipping": "auto",
    "steps_per_print": math.inf,
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 589824.0,
        "stage3_prefetch_bucket_size": 0.9 * 768 * 768,
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "fp16": {"enabled": False, "auto_cast": True},
    "bf16": {"enabled": "auto"},
    "msamp": {},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
}


def test_what_accelerate_hands_over() -> None:
    parsed = parse(ACCELERATE)
    assert parsed.leaves["zero_optimization.offload_optimizer.device"].value == "none"
    assert parsed.leaves["zero_optimization.offload_param.nvme_path"].value is None
    assert parsed.leaves["zero_optimization.stage3_prefetch_bucket_size"].value == int(0.9 * 768 * 768)
    assert parsed.leaves["steps_per_print"].value is None
    assert "bf16.enabled" in parsed.autos and "gradient_clipping" in parsed.autos


def test_the_input_is_not_changed() -> None:
    before = json.dumps(ACCELERATE)
    parse(ACCELERATE)
    assert json.dumps(ACCELERATE) == before


def test_apex_arguments_are_free() -> None:
    assert parse({"amp": {"enabled": False, "opt_level": "O1", "loss_scale": "dynamic"}})


def test_near_names_are_few_and_close() -> None:
    assert parsing.nearest("stag", ["stage", "rng", "optimizer"]) == ["stage"]
    assert parsing.nearest("xyz", ["stage"]) == []


# Comments and unknown keys


WARN: dict[str, Any] = {"slipstream": {"unknown_keys": "warn"}}
LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"


def typos(word: str) -> Iterator[str]:
    """Every word that is one letter away: a letter less, more, other, or two swapped."""
    for i in range(len(word) + 1):
        yield from (word[:i] + letter + word[i:] for letter in LETTERS)
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :]
        yield from (word[:i] + letter + word[i + 1 :] for letter in LETTERS)


def blocks(block: type[Block], visited: set[type[Block]]) -> set[type[Block]]:
    if block not in visited:
        visited.add(block)
        below = [child(field.annotation) for field in block.model_fields.values()]
        for opened in below:
            visited |= blocks(opened.block, visited) if opened else set()
    return visited


def test_every_one_letter_typo_of_every_key_is_refused() -> None:
    """In each block natively; at the top level also where unknown keys are left out. Half a million words, so not by `parse`:
    what is left out or read as a comment is decided by these two functions alone. A key behind an underscore is switched off."""
    for block in sorted(blocks(Config, set()), key=lambda block: block.__name__):
        assert block.model_config["extra"] == "forbid" or block.__name__ == "Amp"
        names = {old.rpartition(".")[2] for old in RENAMED} | set(block.model_fields)
        for name in block.model_fields:
            for typo in set(typos(name)) - names - {f"_{name}"}:
                assert not (typo.startswith("_") and parsing.is_comment(typo, block)), f"{block.__name__}.{typo}"
                assert block is not Config or not parsing.is_left_out(typo), typo


@given(data=st.data())
def test_a_typo_is_refused_although_unknown_keys_are_left_out(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(CHECKED))
    *parents, word = name.split(".")
    typo = data.draw(st.sampled_from(sorted(set(typos(word)) - {f"_{word}"})))
    wrong = ".".join([*parents, typo])
    assume(typo and not typo.startswith("_") and wrong not in NAMES and wrong not in RENAMED)  # "_" begins comments
    raw = nest(wrong, 1)
    with pytest.raises(ValueError, match="unknown config key"):
        parse(WARN | raw if "slipstream" not in raw else {"slipstream": WARN["slipstream"] | raw["slipstream"]})


def test_unknown_keys() -> None:
    raw = {"train_batch_size": 8, "model_name": "x", "max_epochs": 3, "overlap_comm": True}
    with pytest.raises(ValueError) as error:
        parse(raw)
    assert 'model_name; no similar key exists: remove it, or set "slipstream": {"unknown_keys": "warn"}' in str(error.value)
    (note,) = parse(raw | WARN).notes
    assert "model_name" in note and "max_epochs" in note and "overlap_comm' (zero_optimization.overlap_comm?)" in note
    assert parse(raw | WARN).config == parse({"train_batch_size": 8} | WARN).config
    for near in ("gradient_accumulation", "FP16", "zero_optimisation", "f16", "train_micro_batch_size"):
        with pytest.raises(ValueError, match=f"unknown config key {near}; did you mean"):
            parse({near: 1} | WARN)
    with pytest.raises(ValueError, match=r"zero_optimization\.model_name"):
        parse({"zero_optimization": {"model_name": 1}} | WARN)


def test_keys_that_start_with_an_underscore_are_comments() -> None:
    raw = {"_comment": "mine", "zero_optimization": {"stage": 2, "_why": [1], "__": {}}, "fp16": {"_note": 1}}
    parsed = parse(raw)
    assert parsed.config == parse({"zero_optimization": {"stage": 2}, "fp16": {}}).config and parsed.notes == ()
    parsed = parse({"_optimizer": {"type": "Adam"}, "zero_optimization": {"_stage": 3}})
    assert parsed.config.optimizer is None and parsed.config.zero_optimization.stage == 0
    (note,) = parsed.notes
    assert "start with an underscore" in note and "_optimizer" in note and "zero_optimization._stage" in note
    with pytest.raises(ValueError, match="_ptimizer; did you mean optimizer"):
        parse({"_ptimizer": {}})


@pytest.mark.parametrize("lenient", [False, True], ids=["error", "warn"])
@pytest.mark.parametrize("block", [None, "zero_optimization", "fp16"])
def test_ten_thousand_unknown_keys_are_refused_at_once(block: str | None, lenient: bool) -> None:
    many: dict[str, Any] = {f"key{i}": i for i in range(10_000)}
    raw = {block: many} if block else many
    start = time.process_time()
    with pytest.raises(ValueError) as error:
        parse(raw | (WARN if lenient else {}))
    assert time.process_time() - start < 3
    assert "key0" in str(error.value) and len(str(error.value)) < 10_000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gradient_clipping": math.inf}, "gradient_clipping must be a finite number, got inf"),
        ({"fp16": {"loss_scale": 1e308}}, r"fp16\.loss_scale must be less than or equal to .*, got 1e\+308"),
        ({"fp16": {"min_loss_scale": 1e308}}, r"fp16\.min_loss_scale must be less than or equal to"),
        ({"slipstream": {"seed": -1}}, r"slipstream\.seed must be greater than or equal to 0, got -1"),
        ({"data_efficiency": {"seed": -1}}, r"data_efficiency\.seed must be greater than or equal to 0"),
        ({"train_batch_size": 10**30}, "train_batch_size must be less than or equal to"),
        ({"optimizer": ["x" * 10**6]}, "config key optimizer must be an object .{0,200}$"),
        ({"x" * 10**6: 1}, "unknown config key x{100}; .{0,200}$"),
    ],
)
def test_values_out_of_range_are_refused_shortly(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(raw)
