"""The client of the RLOR API and its deployment manager, unmodified: deployments, LoRA load and unload, hot load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.clients import FIREWORKS_SDK, client_python, run_client
from tests.conformance.conftest import Part, Site, free_port


@pytest.fixture
def engine_of_the_deployment(site: Site) -> Iterator[None]:
    """An engine of `dep-1`."""
    port = free_port()
    words = ("engine", "--base-model", "tiny", "--port", str(port), "--threads", "1", "--deployment", "dep-1")
    part = Part(site.settings, site.folder / "engine-dep-1.log", *words)
    try:
        part.until_it_answers(f"http://127.0.0.1:{port}/health", 120)
        yield
    finally:
        part.stop()
        print(f"--- engine of dep-1\n{part.log.read_text()[-3000:]}")  # noqa: T201 - pytest shows it with a failure


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("engine_of_the_deployment")
def test_the_client_loads_loras_and_snapshots_on_a_deployment(site: Site, tmp_path: Path) -> None:
    script = Path(__file__).with_name("fireworks_deployments_client.py")
    python = client_python("fireworks-sdk", FIREWORKS_SDK)
    said = run_client(python, script, site.address, site.key, site.account, "tiny", seconds=300, cwd=tmp_path)
    print(said)  # noqa: T201 - pytest shows it with a failure, `make conformance` always
    assert said.endswith("all held\n")
