"""Every operation of the OpenAPI document, called with what fits it and with what does not, without a key and with one.

Nothing breaks, each answer is documented, nobody without a key gets anything, and the gateway's health is answered all the while.
"""

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import orjson
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from tests.conformance.conftest import Part
from tests.gateway.conftest import gateway_settings

from headrace.core.topic_admin import apply
from headrace.gateway.app import openapi_json
from headrace.gateway.tokens import create_token

DOCUMENT = Path(__file__).parents[2] / "schemas" / "openapi.json"
api = schemathesis.openapi.from_dict(orjson.loads(openapi_json()))


def test_the_document_is_committed_as_it_is_served() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == openapi_json()


OPEN = {"/v1/health", "/v1/system-check"}


@pytest.fixture(scope="module")
def known(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A gateway as a process, without engines and workers, and a key of it."""
    import asyncio  # noqa: PLC0415 - the module's tests are not async

    folder = tmp_path_factory.mktemp("openapi")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, token = create_token(folder / "tokens", account="acme", owner="ada")
    own = {"port": port, "inference_wait_seconds": 0, "tokens_file": folder / "tokens"}
    settings = gateway_settings(kafka, f"openapi{folder.name[-2:]}{port}.", folder, **own)
    asyncio.run(apply(settings))
    gateway = Part(settings, folder / "gateway.log", "gateway")
    try:
        gateway.until_it_answers(f"http://127.0.0.1:{port}/v1/health", 60)
        yield f"http://127.0.0.1:{port}", {"X-Api-Key": token}
    finally:
        gateway.stop()
        assert "Traceback" not in gateway.log.read_text()


@api.parametrize()
@hypothesis.settings(max_examples=3, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), derandomize=True)
@pytest.mark.timeout(300)
def test_every_operation_answers_as_documented(case: schemathesis.Case, known: tuple[str, dict[str, str]]) -> None:
    address, key = known
    told = [status_code_conformance, content_type_conformance, response_schema_conformance]
    for headers in ({"X-Api-Key": ""}, key):
        response = case.call(base_url=address, timeout=30, headers=headers)
        # What is not built, and engines that are not there, are said so.
        broken = [] if response.status_code in {501, 503} else [checks.not_a_server_error]
        case.validate_response(response, checks=[*told, *broken])
        assert response.headers["x-content-type-options"] == ["nosniff"]
        if headers is not key:
            assert response.status_code >= 400 or case.path in OPEN
    with urllib.request.urlopen(f"{address}/v1/health", timeout=30) as health:  # noqa: S310 - its own address
        assert health.status == 200
