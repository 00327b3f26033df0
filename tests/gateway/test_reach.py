"""Accounts and the store: a request names what its own account made, and shared folders; all else is as if it did not exist."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.job_bodies import faults, group, job, make_model
from tests.gateway.test_training_jobs_sft import SFT, URL, example, lines

from headrace.core.settings import S3Settings, Settings
from headrace.core.store import ObjectStore, open_store
from headrace.core.topic_admin import apply
from headrace.gateway.log_writer import sealed
from headrace.gateway.rlor.resources import rlor_model_id
from headrace.gateway.tokens import create_token
from headrace.schemas.gateway import DeletedCheckpoint, checkpoint_key

JOBS = "/v1/preview/training-jobs"
CONFIG = "body.experimental_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An account with a key, a model and a dataset."""

    account: str
    key: dict[str, str]
    http: httpx.AsyncClient
    model: str
    dataset: str
    """URI of its file."""

    async def trains_on(self, url: str) -> httpx.Response:
        """Ask for a supervised job on what a URL names."""
        return await self.http.post(SFT, json={"model_id": self.model, "training_data_url": url}, headers=self.key)

    async def measures_against(self, uri: str, field: str = "kl_ref_adapter_path") -> httpx.Response:
        """Ask for a job whose KL reference a URI names."""
        config = {"kl_penalty_coef": 0.1, field: uri}
        return await self.http.post(JOBS, json=job(self.model, group(), config=config), headers=self.key)


async def tenant(http: httpx.AsyncClient, tokens: Path, account: str) -> Tenant:
    _, token = create_token(tokens, account=account, owner=f"somebody@{account}")
    key = {"Authorization": f"Bearer {token}"}
    body = {"project": "tests", "name": "agent", "base_model": "tiny"}
    model = (await http.post("/v1/preview/models", json=body, headers=key)).json()["id"]
    datasets = f"/v1/accounts/{account}/datasets"
    made = await http.post(datasets, json={"datasetId": "talks", "dataset": {"format": "CHAT", "userUploaded": {}}}, headers=key)
    assert made.status_code == 200, made.text
    content = lines(example(f"of {account}")).encode()
    assert (await http.post(f"{datasets}/talks:upload", files={"file": ("d.jsonl", content)}, headers=key)).status_code == 200
    facts = (await http.gate.view.fresh()).facts_under(f"dataset-file/{account}/")  # type: ignore[attr-defined]
    return Tenant(account=account, key=key, http=http, model=model, dataset=facts[0].uri)


def put(store: ObjectStore, key: str) -> str:
    """An example under a key, as if it were any of what lies there; its URI."""
    store.put_bytes_if_absent(key, lines(example()).encode())
    return store.uri(key)


@asynccontextmanager
async def two_tenants(settings: Settings, tokens: Path) -> AsyncIterator[tuple[Tenant, Tenant, ObjectStore]]:
    create_token(tokens, account="operator", owner="op")
    await apply(settings)
    async with running(settings) as http:
        # The one's name is the beginning of the other's.
        yield await tenant(http, tokens, "acc"), await tenant(http, tokens, "acc2"), http.gate.store  # type: ignore[attr-defined]


@pytest.fixture
def settings(kafka: str, topic_prefix: str, tmp_path: Path, store_url: tuple[str, S3Settings]) -> Settings:
    url, s3 = store_url
    shared = ("shared", "public/adapters")
    found = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens", shared_folders=shared)
    return found.model_copy(update={"store": found.store.model_copy(update={"url": url}), "s3": s3})


async def test_what_another_account_made_is_as_if_it_did_not_exist(settings: Settings, tmp_path: Path) -> None:
    async with two_tenants(settings, tmp_path / "tokens") as (mine, theirs, store):
        base = settings.store.url
        scheme, _, place = base.partition("://")
        foreign = [
            *(put(store, f"models/{theirs.model}/i/{kind}/00000001-a/x") for kind in ("weights", "snapshots", "reports", "logprobs")),
            put(store, f"logged/{theirs.model}/x"),
            put(store, "payloads/ab/abc.zst"),
            put(store, "group-sets/ab/abc.jsonl.zst"),
            put(store, "exchanges/abc/x"),
            put(store, "forks/1/snapshot/x"),
            put(store, "deployments/d/i/manifest.json"),
            put(store, "anything.jsonl"),
            theirs.dataset,
            # Names that are nearly one's own, or a shared folder's.
            put(store, f"models/{mine.model}2/i/weights/00000001-a/x"),
            put(store, f"models/{mine.model.upper()}/i/weights/00000001-a/x"),
            put(store, f"Models/{mine.model}/i/weights/00000001-a/x"),
            put(store, f"x/models/{mine.model}/y"),
            put(store, "shared2/x"),
            put(store, "Shared/x"),
            put(store, "public/x"),
            f"{base}/models/{mine.model}/../{theirs.model}/i/weights/00000001-a/x",
            f"{base}/shared/../anything.jsonl",
            f"{base}/./anything.jsonl",
            f"{base}//anything.jsonl",
            f"{base}/shared/..%2fanything.jsonl",
            f"{base}/shared%2f..%2fanything.jsonl",
            f"{base}/shared\\..\\anything.jsonl",
            f"{base}2/shared/x",
            f"{base.upper()}/shared/x",
            f"{scheme}://elsewhere{place}/shared/x",
            "file:///etc/passwd",
            "s3://another-bucket/shared/x",
            "http://localhost/shared/x",
        ]
        for uri in foreign:
            said = faults(await mine.trains_on(uri))
            assert list(said) == [URL], uri
            for field in ("kl_ref_adapter_path", "kl_ref_logprobs"):
                assert list(faults(await mine.measures_against(uri, field))) == [f"{CONFIG}.{field}"], uri
        there, nowhere = theirs.dataset, f"{base}/datasets/nowhere"
        words = [faults(await mine.trains_on(uri))[URL].replace(uri, "") for uri in (there, nowhere)]
        assert words[0] == words[1]
        assert "does not exist" in words[0]
        assert "gateway.shared_folders" in words[0]
        for named in (f"accounts/{theirs.account}/datasets/talks", f"accounts/{theirs.account}%2Fdatasets/talks"):
            assert list(faults(await mine.trains_on(named))) == [URL], named
        made = await mine.http.post(
            "/v1/preview/models",
            json={"project": "tests", "name": "other", "base_model": "tiny", "config": {"train": {"kl_ref_adapter_path": foreign[0]}}},
            headers=mine.key,
        )
        assert list(faults(made)) == ["body.config.train.kl_ref_adapter_path"]


async def test_what_an_account_made_and_what_is_shared_can_be_named(settings: Settings, tmp_path: Path) -> None:
    async with two_tenants(settings, tmp_path / "tokens") as (mine, _, store):
        of_a_job = rlor_model_id(mine.account, "job")
        body = {"keepAlive": True, "trainingConfig": {"baseModel": "tiny"}}
        created = await mine.http.post(
            f"/v1/accounts/{mine.account}/rlorTrainerJobs", params={"rlorTrainerJobId": "job"}, json=body, headers=mine.key
        )
        assert created.status_code == 200, created.text
        own = [
            mine.dataset,
            put(store, f"models/{mine.model}/i/weights/00000001-a/x"),
            put(store, f"models/{of_a_job}/i/weights/00000001-a/x"),
            put(store, f"logged/{mine.model}/x"),
            put(store, "shared/x"),
            put(store, "public/adapters/a/b"),
        ]
        for uri in own:
            assert (await mine.trains_on(uri)).status_code == 200, uri
            assert (await mine.measures_against(uri)).status_code == 200, uri
        assert (await mine.measures_against(f"{settings.store.url}/shared/adapter/", "kl_ref_logprobs")).status_code == 200
        missing = faults(await mine.trains_on(f"{settings.store.url}/models/{mine.model}/nothing"))[URL]
        assert "does not exist" in missing
        record = DeletedCheckpoint(model_id=mine.model, incarnation="i", step=1, owner="x")
        gate: Any = mine.http.gate  # type: ignore[attr-defined]
        key = checkpoint_key(mine.model, "i", 1)
        await gate.writer.commit([sealed(record, topic=settings.topic_names.gateway, key=key)], is_in=lambda: True)
        assert "does not exist" in faults(await mine.trains_on(own[1]))[URL]


async def test_a_key_for_some_projects_reaches_what_these_have_made(settings: Settings, tmp_path: Path) -> None:
    async with two_tenants(settings, tmp_path / "tokens") as (mine, _, store):
        _, token = create_token(tmp_path / "tokens", account=mine.account, owner="x", projects=["red"])
        key = {"X-Api-Key": token}
        async with httpx.AsyncClient(base_url=mine.http.base_url, headers=key, trust_env=False) as red:
            model = await make_model(red, project="red")
        for url in (put(store, f"models/{mine.model}/i/weights/00000001-a/x"), mine.dataset, "talks"):
            answer = await mine.http.post(SFT, json={"model_id": model, "training_data_url": url}, headers=key)
            assert list(faults(answer)) == [URL], url
        own = put(store, f"models/{model}/i/weights/00000001-a/x")
        assert (await mine.http.post(SFT, json={"model_id": model, "training_data_url": own}, headers=key)).status_code == 200


async def test_a_mapped_artefact_is_for_its_entity_or_for_all_if_it_lies_in_a_shared_folder(settings: Settings, tmp_path: Path) -> None:
    store = open_store(settings.store.url, settings.s3)
    mapped = {
        "wandb-artifact:///acc/p/a:v0": put(store, f"{uuid.uuid4().hex}.jsonl"),
        "wandb-artifact:///acc2/p/a:v0": put(store, f"{uuid.uuid4().hex}.jsonl"),
        "wandb-artifact:///somebody/p/a:v0": put(store, "shared/artefact.jsonl"),
    }
    gateway = settings.gateway.model_copy(update={"training_data": mapped})
    async with two_tenants(settings.model_copy(update={"gateway": gateway}), tmp_path / "tokens") as (mine, _, _store):
        answers = [(await mine.trains_on(name)).status_code for name in mapped]
        assert answers == [200, 422, 200]
        unknown, foreign = "wandb-artifact:///acc2/p/b:v0", "wandb-artifact:///acc2/p/a:v0"
        words = [faults(await mine.trains_on(name))[URL].replace(name, "") for name in (unknown, foreign)]
        assert words[0] == words[1]
