"""DeepSpeed's `ds_to_universal`: the command and its module."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slipstream.checkpoint import convert


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_to_universal.py", description=main.__doc__)
    parser.add_argument("--input_folder", required=True, help="one checkpoint: checkpoints/global_step100")
    parser.add_argument("--output_folder", required=True, help="the folder to write: checkpoints/global_step100_universal")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, help="no effect: one tensor at a time is read and written")
    for name in ("--keep_temp_folder", "--no_strict", "--strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="no effect: there are no temporary files, and nothing is missing")
    return parser.parse_args()


def main(args: argparse.Namespace | None = None) -> int:
    """Write a checkpoint in DeepSpeed's universal format, and its name into `latest_universal` beside it.

    Raises ValueError if it cannot be read, which the command (without `args`) prints."""
    given = args or parse_arguments()
    output = Path(os.path.abspath(given.output_folder))
    try:
        sys.stdout.write(f"{convert(given.input_folder, output.parent, 'deepspeed', name=output.name)}\n")
    except ValueError as error:
        if args is not None:
            raise
        sys.stderr.write(f"ds_to_universal.py: {error}\n")
        return 2
    return 0
