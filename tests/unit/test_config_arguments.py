"""Where a config comes from: files, dictionaries, flags, and what happens when two of them speak."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import add_config_arguments, load_config
from slipstream.config.arguments import read_config

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
        ('{"a": 1,\n "b" 2}', "is not JSON: .*line 2"),
        ('// yes\n{"a": 1,\n "b" 2,}', "nor JSON with comments: .*line 3 column 6"),
        ('{"a": 1 /* no end', "nor JSON with comments"),
        ('{"a": "no end', "is not JSON"),
        ("[1]", "contains a JSON list"),
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
    with pytest.raises(ValueError, match="the config must be a path or a dictionary, got int"):
        load_config(3)  # type: ignore[arg-type]


def test_infinity_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "inf.json"
    file.write_text('{"steps_per_print": Infinity}')
    assert load_config(file)["steps_per_print"] == float("inf")


def test_comments_and_trailing_commas_are_accepted_and_said_once(tmp_path: Path) -> None:
    """What looks like a comment inside a string stays."""
    file = tmp_path / "hjson.json"
    file.write_text(
        '\ufeff// DeepSpeed reads this\n{"a": "http://x/#1 /* no */, }", # one\n  /* two\n lines */ "b": [1, 2,],\n'
        '  "c": {"_comment": 1, "_comment": 2, "d": "\\"//",},\n}\n',
        encoding="utf-8",
    )
    raw, notes, _ = read_config(file)
    assert raw == {"a": "http://x/#1 /* no */, }", "b": [1, 2], "c": {"_comment": 2, "d": '"//'}}
    (note,) = notes
    assert str(file) in note and "comments or trailing commas" in note
    file.write_text(json.dumps(raw))
    assert read_config(file) == (raw, (), file)


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("{" + '"a": {' * 3000 + "}" * 3001)
    circle: dict[str, Any] = {}
    circle.update(a=circle, b=circle)
    configs: tuple[Any, ...] = (file, nested(3000), {"optimizer": {"params": nested(3000)}}, {"train_batch_size": 8, "x": circle})
    for config in configs:
        with pytest.raises(ValueError, match=r"nested more than 50 levels deep; .*remove the inner"):
            load_config(config)
    assert load_config(nested(40)) == nested(40)


@pytest.mark.parametrize("piece", ['"\\', "/*", "//", ",", '"', "#", "[", ',"a":1'])
def test_hostile_text_takes_bounded_time(tmp_path: Path, piece: str) -> None:
    file = tmp_path / "long.json"
    file.write_text("{" + piece * (200_000 // len(piece)))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"long\.json"):
        load_config(file)
    assert time.process_time() - start < 2
