"""DeepSpeed-MII's API over a tiny model: in this process, and in a server's of which another process becomes a client."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'slipstream[serve]'")

import slipstream
from slipstream.compat import mii
from tests import tiny_chat

ROOT = Path(__file__).parents[2]
PROMPTS = ["Once upon", "a time", "x"]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.write(tmp_path_factory.mktemp("mii") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with slipstream.init_inference(folder) as engine:
        answers: list[Any] = engine.generate(PROMPTS, max_new_tokens=12)
        return answers


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    for file in tmp_path.glob("slipstream-mii-*/*.json"):
        mii.client(file.stem).terminate_server()


def check(responses: list[mii.Response], expected: list[Any]) -> None:
    assert [str(one) for one in responses] == [one.text for one in expected]
    for response, one in zip(responses, expected, strict=True):
        assert (response.prompt_length, response.generated_length) == (one.usage.prompt_tokens, one.usage.completion_tokens)
        assert response.finish_reason == one.finish_reason
        assert mii.Response.from_msg_dict(response.to_msg_dict()) == response


def check_streams(generator: Any, expected: list[Any]) -> None:
    numbers = []
    for _ in range(10):  # tokens that arrive together are one increment
        parts: list[mii.Response] = []
        (whole,) = generator.generate(PROMPTS[0], streaming_fn=parts.extend, **GREEDY)
        check([whole], expected[:1])
        assert "".join(map(str, parts)) == expected[0].text
        numbers.append(len(parts))
    assert max(numbers) > 1, numbers
    assert sum(part.generated_length for part in parts) == whole.generated_length
    with pytest.raises(RuntimeError, match="a stream answers one prompt"):
        generator.generate(PROMPTS, streaming_fn=parts.extend)


def test_a_pipeline(folder: Path, expected: list[Any]) -> None:
    pipe = mii.pipeline(str(folder), max_length=40)
    check(pipe(PROMPTS, **GREEDY), expected)
    check(pipe(PROMPTS[1], **GREEDY), expected[1:2])
    (full,) = pipe(PROMPTS[0], return_full_text=True, **GREEDY)
    assert str(full) == PROMPTS[0] + expected[0].text
    check_streams(pipe, expected)
    (long,) = pipe("x" * 30, ignore_eos=True, do_sample=False)
    assert (long.prompt_length, long.generated_length, long.finish_reason) == (30, 10, mii.GenerationFinishReason.LENGTH)
    (cut,) = pipe(PROMPTS[0], stop=expected[0].text[3:5], **GREEDY)
    assert str(cut) == expected[0].text.partition(expected[0].text[3:5])[0] and cut.finish_reason == "stop"
    samples = {str(pipe(PROMPTS[0], max_new_tokens=6, temperature=2.0, top_p=1.0)[0]) for _ in range(5)}
    assert len(samples) > 1
    with pytest.raises(mii.UnknownArgument, match="generation has no option 'max_tokens'; did you mean"):
        pipe(PROMPTS[0], max_tokens=3)
    with pytest.raises(ValueError, match="the prompt has 40 tokens and max_length is 40"):
        pipe("x" * 40)
    pipe.destroy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, r"tp_size \(2\) need 2 processes, and 1 run this"),
        ({"replica_num": 2}, "replica_num=2 is not served"),
        ({"task": "fill-mask"}, "task='fill-mask' is not served"),
        ({"quantization_mode": "wf6af16"}, "must be None, int8 or int4"),
        ({"max_lenght": 3}, "no option 'max_lenght'; did you mean max_length"),
        ({"max_length": 5, "model_config": {"max_length": 6}}, "max_length is given twice, as 6 and as 5"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mii.pipeline("model", **options)


@pytest.mark.slow
def test_a_deployment(folder: Path, expected: list[Any], home: Path) -> None:
    client = mii.serve(str(folder), deployment_name="mine", max_length=40)
    check(client(PROMPTS, **GREEDY), expected)
    check(mii.client("mine").generate(PROMPTS[1], **GREEDY), expected[1:2])
    check_streams(client, expected)
    (long,) = client("x" * 30, ignore_eos=True, do_sample=False)
    assert (long.prompt_length, long.generated_length) == (30, 10)
    file = next(home.glob("slipstream-mii-*")) / "mine.json"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(mii.ServerError, match="a deployment 'mine' runs already"):
        mii.serve(str(folder), deployment_name="mine")
    with pytest.raises(mii.DeploymentNotFoundError, match="no deployment 'yours' runs; there are mine"):
        mii.client("yours")
    with pytest.raises(mii.ServerError, match="mine: temperature"):
        client(PROMPTS[0], temperature=1000.0)

    script = "import mii; client = mii.client('mine'); print(client('a time', do_sample=False, max_new_tokens=12)[0]); "
    script += "client.terminate_server()"
    environment = {"PYTHONPATH": f"{ROOT / 'compat' / 'mii'}:{ROOT / 'src'}", "TMPDIR": str(home), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{expected[1].text}\n"), done.stderr
    assert not file.exists()
    with pytest.raises(mii.ServerError, match="the server of mine does not answer"):
        client(PROMPTS[0])
    client.terminate_server()


@pytest.mark.slow
def test_a_server_that_does_not_start(tmp_path: Path, home: Path) -> None:
    with pytest.raises(mii.ServerError, match=r"the server of empty-mii-deployment did not start:\n.*empty is not a path"):
        mii.serve(str(tmp_path / "empty"))
    with pytest.raises(mii.ServerError, match="--tp cuts one model over processes, and --replicas starts several"):
        mii.serve(str(tiny_chat.write(tmp_path / "model")), tensor_parallel=2, replica_num=2)
    with pytest.raises(ValueError, match="deployment_name is 'a/b'"):
        mii.serve("model", deployment_name="a/b")


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    (code,) = (
        each for each in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "SERVING.md").read_text(), re.S) if "mii" in each
    )
    tiny_chat.write(tmp_path / "model")
    environment = {"PYTHONPATH": f"{ROOT / 'compat' / 'mii'}:{ROOT / 'src'}", "TMPDIR": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 3, done.stderr
    assert not list(tmp_path.glob("slipstream-mii-*/*.json"))
