"""Choose the environment variables that are exported to other hosts, and parse environment files. Pure functions.

Ranks on this host inherit the whole environment. Other hosts receive only variables that affect training (`PREFIXES`, `NAMES`),
except host-specific ones (`LOCAL`) and likely secrets; environment files add any others. The files are `.deepspeed_env` and
`.slipstream_env`, in the home directory, then in the working directory; later files win.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipstream.world.brief import RECORDS

FILES = (".deepspeed_env", ".slipstream_env")

PREFIXES = (
    *("SLIPSTREAM_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "KMP_"),
    *("GOMP_", "UCX_", "FI_", "MV2_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "MLFLOW_", "WANDB_", "TRITON_"),
)
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TZ", "LANG", "LC_ALL")
# Specific to one host or process: wrong or harmful on another.
LOCAL = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_ERROR_FILE", "PYTHONSTARTUP", RECORDS)
_SECRET = re.compile(r"(^|_)(API_?KEYS?|KEYS?|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def propagated(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that are exported to other hosts, sorted by name."""
    chosen = (
        name
        for name in environ
        if (name in NAMES or name.startswith(PREFIXES))
        and name not in LOCAL
        and not is_secret(name)
        and environ[name]
        and _NAME.match(name)
    )
    return {name: environ[name] for name in sorted(chosen)}


def parse_file(text: str, path: str) -> dict[str, str]:
    """Parse `VAR=VALUE` lines. Lines that begin with `#` are comments; quotes around a whole value are removed.

    Raises ValueError, with `path` and line number, for any other line.
    """
    variables: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.match(name):
            raise ValueError(f"{path}:{number}: {line!r} is not VAR=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[name] = value
    return variables


def shown(variables: Mapping[str, str]) -> str:
    """The variables in one line, for the user; secrets are masked and long values truncated."""
    words = []
    for name, value in variables.items():
        text = "***" if is_secret(name) else value if len(value) <= 60 else value[:57] + "..."
        words.append(f"{name}={text}")
    return " ".join(words)
