"""The clients of the training-jobs API, unmodified: they register, sample, train, list and delete, and the model learns."""

import json
from pathlib import Path

import httpx
import pytest
from tests.conformance.clients import ART, ART_0518, client_python, newer_python, run_client
from tests.conformance.conftest import Site

NEEDS_312 = "openpipe-art 0.5.20 and later need Python 3.12, and none was found: put python3.12 on the path"


def art_python() -> Path:
    """Of the environment of 0.5.23; skips where the machine has no Python for it."""
    python = newer_python()
    if python is None:
        pytest.skip(NEEDS_312)
    return client_python("art-0.5.23", ART, python)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", ["0.5.18", "0.5.23"])
def test_the_client_of_the_training_jobs_api_works_unmodified_and_its_model_learns(site: Site, tmp_path: Path, release: str) -> None:
    python = client_python("art", ART_0518) if release == "0.5.18" else art_python()
    script = Path(__file__).with_name("art_client.py")
    said = run_client(python, script, f"{site.address}/v1", site.key, "tiny", release, seconds=500, cwd=tmp_path)
    print(said)  # noqa: T201 - pytest shows it with a failure, `make conformance` always
    assert said.endswith("all held\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trajectories_that_the_client_captured_train_every_token_that_was_sampled(site: Site, tmp_path: Path) -> None:
    talk = {"messages": [{"role": role, "content": letter} for role, letter in zip(("user", "assistant") * 2, "abcd", strict=True)]}
    datasets = f"{site.address}/v1/accounts/{site.account}/datasets"
    with httpx.Client(headers={"Authorization": f"Bearer {site.key}"}, trust_env=False, timeout=60) as http:
        http.post(datasets, json={"datasetId": "talks", "dataset": {"format": "CHAT", "userUploaded": {}}}).raise_for_status()
        lines = f"{json.dumps(talk)}\n".encode() * 2
        http.post(f"{datasets}/talks:upload", files={"file": ("talks.jsonl", lines)}).raise_for_status()
    script = Path(__file__).with_name("art_captured_client.py")
    said = run_client(art_python(), script, f"{site.address}/v1", site.key, "tiny", "talks", seconds=200, cwd=tmp_path)
    print(said)  # noqa: T201 - as above
    assert said.endswith("all held\n")
