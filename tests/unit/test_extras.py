"""After `pip install .` alone: what needs an optional package says in one line how to get it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="writes the folder")
pytest.importorskip("tokenizers", reason="writes the folder")

from tests import tiny_chat

# One process imports torch; each case is a fork of it, in which modules are hidden as if they were not installed.
SCRIPT = """
import contextlib, io, json, os, sys, traceback
import numpy, safetensors.torch, torch
import slipstream
from slipstream.launch.cli import main

torch.set_num_threads(1)
said = []
for hidden, command in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        sys.modules.update(dict.fromkeys(hidden))
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(command) if command[0] != "init_inference" else slipstream.init_inference(*command[1:])
            except ImportError as error:
                code = f"{type(error).__name__}: {error}"
            except BaseException:
                code = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump([code, err.getvalue()], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said.append(json.load(pipe))
    os.wait()
print(json.dumps(said))
"""


@pytest.mark.slow
def test_each_missing_package_is_one_line(tmp_path: Path) -> None:
    folder, gpt2 = tiny_chat.write(tmp_path / "model"), tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    (gpt2 / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    on_cpu = [str(folder), "--device", "cpu", "--kv-cache-bytes", "1M"]
    cases = [
        ("tokenizers", "serve", ["serve", *on_cpu]),
        ("tokenizers", "serve", ["generate", *on_cpu, "a"]),
        ("tokenizers", "serve", ["init_inference", str(folder)]),
        ("fastapi", "serve", ["serve", *on_cpu]),
        ("uvicorn", "serve", ["serve", *on_cpu]),
        ("jinja2", "serve", ["chat", *on_cpu]),
        ("llguidance", "serve", ["generate", *on_cpu, "a", "--json-schema", str(schema)]),
        ("transformers", "hf", ["generate", str(gpt2), "--device", "cpu", "a"]),
    ]
    argument = json.dumps([([package], command) for package, _, command in cases])
    done = subprocess.run([sys.executable, "-c", SCRIPT, argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (package, extra, command), (code, err) in zip(cases, json.loads(done.stdout), strict=True):
        if command[0] == "init_inference":
            assert code.startswith("MissingPackageError: ") and "\n" not in code
            message = code
        else:
            assert code == 2, (package, command, code, err)
            message = err.splitlines()[-1]
            assert message.startswith(f"slipstream {command[0]}: ") and "Traceback" not in err
        assert f" needs the package {package}, which is not installed: pip install '.[{extra}]'" in message, message
