"""Where a config comes from: files, dictionaries, flags, and what happens when two of them speak."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from slipstream.config import add_config_arguments, load_config

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    return file


def arguments(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    return parser.parse_args(line)


def test_a_path_a_dictionary_and_a_flag_are_the_same(path: Path) -> None:
    assert load_config(str(path)) == load_config(path) == load_config(CONFIG) == CONFIG
    assert load_config(config_params=CONFIG) == CONFIG
    assert load_config(args=arguments("--deepspeed", "--deepspeed_config", str(path))) == CONFIG
    assert load_config(args={"deepspeed_config": str(path)}) == CONFIG


def test_older_flags(path: Path) -> None:
    args = arguments("--deepscale", "--deepscale_config", str(path))
    assert args.deepscale and not args.deepspeed
    assert load_config(args=args) == CONFIG


def test_a_dictionary_is_copied() -> None:
    loaded = load_config(CONFIG)
    loaded["zero_optimization"]["stage"] = 3
    assert CONFIG["zero_optimization"] == {"stage": 2}


def test_the_same_config_twice_is_fine(path: Path) -> None:
    args = arguments("--deepspeed_config", str(path))
    assert load_config(str(path), args=args) == CONFIG
    assert load_config(CONFIG, config_params=dict(CONFIG)) == CONFIG
    assert load_config(CONFIG, args=arguments()) == CONFIG
    assert load_config(CONFIG, args=argparse.Namespace()) == CONFIG


def test_two_configs_are_refused(path: Path) -> None:
    args = arguments("--deepspeed_config", str(path))
    with pytest.raises(ValueError, match=r"initialize\(config=\) is a dictionary of 2 keys and --deepspeed_config is"):
        load_config(CONFIG, args=args)
    with pytest.raises(ValueError, match="two configs"):
        load_config(CONFIG, config_params={"train_batch_size": 16})
    with pytest.raises(ValueError, match="two configs"):
        load_config(str(path), args=arguments("--deepscale_config", "other.json"))


def test_no_config_teaches() -> None:
    with pytest.raises(ValueError, match="--deepspeed_config PATH"):
        load_config(args=arguments())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"stage": 1, "stage": 2}}', "'stage' twice in one object"),
        ('{"a": 1,}', "is not JSON: .*line 1"),
        ("// no\n{}", "JSON has no comments"),
        ("[1]", "holds a JSON list"),
        ("", "is not JSON"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(file)


def test_a_missing_file_and_a_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config file at .*gone\.json"):
        load_config(tmp_path / "gone.json")
    with pytest.raises(ValueError, match="a config is a path or a dictionary, got int"):
        load_config(3)  # type: ignore[arg-type]


def test_infinity_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "inf.json"
    file.write_text('{"steps_per_print": Infinity}')
    assert load_config(file)["steps_per_print"] == float("inf")
