"""The server answers as its OpenAPI document says, whatever it is sent: schemathesis reads the document and writes requests that it
allows, and ones that it does not. No 5xx, every error in OpenAI's form, nothing accepted that the document forbids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from slipstream.inference.engine import Engine  # noqa: E402
from slipstream.inference.server.chat import ChatRequest  # noqa: E402
from slipstream.inference.server.completions import CompletionRequest  # noqa: E402
from tests.inference.blocks import check_engine  # noqa: E402
from tests.inference.fake_engine import FakeEngine  # noqa: E402
from tests.inference.test_server import CHAT, COMPLETIONS, USER, call, serving  # noqa: E402
from tests.unit.test_inference_engine import HashRunner, byte_tokenizer  # noqa: E402

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The engine itself, whose model is a hash."""
    tokenizer = byte_tokenizer()
    tokenizer.templates = {"default": "{{ tools }}{{ messages[-1].content }}:"}
    engine = Engine(HashRunner(1024, 16, 4096), tokenizer, max_running=128, model_name="fake/model")
    engine.start()
    try:
        with serving(engine) as address:  # type: ignore[arg-type]
            yield address
    finally:
        engine.close()
        check_engine(engine)


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    checks = {"negative_data_rejection": {"expected-statuses": [400, 404, 413]}}
    config = schemathesis.config.SchemathesisConfig.from_dict({"checks": checks})
    return schemathesis.openapi.from_url(f"http://{address}/openapi.json", config=config)


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", [pytest.param(COMPLETIONS, marks=pytest.mark.slow), CHAT])
def test_any_body(document: Any, path: str, mode: GenerationMode) -> None:
    base = {"model": "fake/model", "max_tokens": 5, **({"prompt": "hi"} if path == COMPLETIONS else {"messages": [USER]})}
    names = sorted((CompletionRequest if path == COMPLETIONS else ChatRequest).model_fields)
    statuses = Counter[int]()

    @settings(derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=document[path]["POST"].as_strategy(generation_mode=mode), optional=st.sets(st.sampled_from(names), max_size=3))
    def check(case: Any, optional: set[str]) -> None:
        bodies = [case.body]
        if mode is GenerationMode.POSITIVE:  # of a body whose fields are all drawn, nearly always two exclude each other
            bodies.append(base | {name: value for name, value in case.body.items() if name in optional})
        for case.body in bodies:
            response = case.call_and_validate(checks=CHECKS)
            assert response.status_code < 500
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            statuses[response.status_code] += 1

    check()
    assert statuses[200] >= 30 if mode is GenerationMode.POSITIVE else not statuses[200], statuses


def test_any_path(document: Any) -> None:
    @settings(max_examples=50, derandomize=True, database=None, deadline=None)
    @given(case=document["/v1/models/{name}"]["GET"].as_strategy())
    def check(case: Any) -> None:
        assert case.call_and_validate(checks=CHECKS).status_code == 404

    check()


def test_what_is_asked_without_a_body(document: Any) -> None:
    paths = [path for path in document if "get" in [*document[path]] and "{" not in path]
    assert {"/v1/models", "/health", "/metrics"} <= set(paths)
    for path in paths:
        assert document[path]["GET"].Case().call_and_validate(checks=CHECKS).status_code == 200


def test_streams_and_keys_are_in_the_document(address: str) -> None:
    plain = json.loads(call(address, "GET", "/openapi.json").body)
    assert "security" not in plain
    for path, fields in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
        reply = call(address, "POST", path, json.dumps({"model": "fake/model", "stream": True, **fields}))
        answers = plain["paths"][path]["post"]["responses"]["200"]["content"]
        assert reply.headers["content-type"].partition(";")[0] in answers and "application/json" in answers
    with serving(FakeEngine(), api_keys=["key"]) as address:
        text = call(address, "GET", "/openapi.json", headers={"Authorization": "Bearer key"}).body
    secured = json.loads(text)
    [[scheme]] = secured["security"]
    assert secured["components"]["securitySchemes"][scheme] == {"type": "http", "scheme": "bearer"}
    assert secured["paths"]["/health"]["get"]["security"] == []
