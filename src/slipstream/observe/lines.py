"""Makes log lines visible if the config asks for them and the script has not configured logging."""

from __future__ import annotations

import logging
import sys


def show(logger: logging.Logger) -> None:
    """Write a logger's lines of level INFO to stderr, unless the script has handlers or a level for it."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET and logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
