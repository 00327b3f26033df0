"""The client of the training-jobs API, unmodified: it registers, samples, trains, lists and deletes, and the model learns."""

from pathlib import Path

import pytest
from tests.conformance.clients import ART, client_python, run_client
from tests.conformance.conftest import Site


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_client_of_the_training_jobs_api_works_unmodified_and_its_model_learns(site: Site, tmp_path: Path) -> None:
    script = Path(__file__).with_name("art_client.py")
    said = run_client(client_python("art", ART), script, f"{site.address}/v1", site.key, "tiny", seconds=500, cwd=tmp_path)
    print(said)  # noqa: T201 - pytest shows it with a failure, `make conformance` always
    assert said.endswith("all held\n")
