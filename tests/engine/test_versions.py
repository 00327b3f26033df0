"""Which models and versions an engine serves, under which names, and what it says of them on Kafka."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.core.ledgers import record
from tests.engine.site import Acks, Site, running
from transformers import AutoModelForCausalLM

from headrace.core.models import UnknownModelError, create_model, get_model
from headrace.engine.http.options import EngineOptions, listen
from headrace.engine.http.serve import EngineProcess
from headrace.schemas.base import utc_now
from headrace.schemas.deployments import DeployedModel, DeploymentFact, deployed_model_key, deployment_key
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsApplied, WeightsFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a b"}],
    "max_tokens": 6,
    "logprobs": True,
    "return_token_ids": True,
    "seed": 1,
}


def full(base: Path, folder: Path, scale: float) -> Path:
    """A folder of full weights that differ from the base."""
    folder.mkdir(parents=True)
    save_file({name: tensor * scale for name, tensor in load_file(base / "model.safetensors").items()}, folder / "model.safetensors")
    return folder


def adapter(base: Path, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def loaded(base: Path, folder: Path | None) -> torch.nn.Module:
    """The model that a folder's weights make."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if folder is not None and (folder / "adapter_config.json").is_file():
        return PeftModel.from_pretrained(model, folder).eval()
    if folder is not None:
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        model.tie_weights()
    return model.eval()


def is_of(answer: dict[str, Any], model: torch.nn.Module) -> bool:
    """Whether a model's own forward gives the log-probabilities of an answer."""
    (choice,) = answer["choices"]
    prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0].float(), dim=-1)
    expected = [logprobs[len(prompt) - 1 + n, token].item() for n, token in enumerate(ids)]
    return [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-5)


async def ask(engine: httpx.AsyncClient, name: str, status: int = 200, **fields: Any) -> Any:
    answer = await engine.post("chat/completions", json=ASK | {"model": name} | fields)
    assert answer.status_code == status, answer.text
    return answer.json()


async def names(engine: httpx.AsyncClient) -> set[str]:
    return {entry["id"] for entry in (await engine.get("models")).json()["data"]}


def applied(version: int) -> Any:
    return lambda ack: isinstance(ack, WeightsApplied) and ack.policy_version == version


@pytest_asyncio.fixture(loop_scope="module")
async def model_id(site: Site) -> str:
    """A new model, whose command no worker has read."""
    return await site.create(uuid.uuid4().hex)


@pytest_asyncio.fixture(loop_scope="module")
async def trained(site: Site, model_id: str) -> AsyncIterator[str]:
    await site.take_up(model_id)
    yield model_id


async def test_the_base_model_is_acknowledged_and_served_by_its_name(engine, acks: Acks, site):
    ack = await acks.of("e:tiny", applied(0))
    assert (ack.base_url, ack.digest, ack.served_as) == (str(engine.base_url).rstrip("/"), "base", "tiny")
    assert is_of(await ask(engine, "tiny"), loaded(site.base, None))


async def test_what_was_just_created_or_published_can_be_asked_for_at_once(engine, site):
    model_id = await site.create(uuid.uuid4().hex)
    assert (await ask(engine, model_id))["policy_version"] == 0
    await site.take_up(model_id)
    await site.publish(model_id, 1, adapter(site.base, site.new_folder() / "1", 1))
    assert (await ask(engine, f"{model_id}@1"))["policy_version"] == 1


async def test_a_model_is_served_as_soon_as_it_is_asked_for_with_no_worker_alive(engine, acks, model_id, site):
    ack = await acks.of(f"e:{model_id}", applied(0))
    assert (ack.engine_id, ack.model_id, ack.incarnation, ack.digest) == (f"e:{model_id}", model_id, "", "base")
    assert (ack.served_as, ack.base_url) == (f"{model_id}@0", str(engine.base_url).rstrip("/"))
    for name in (model_id, f"{model_id}@0"):
        answer = await ask(engine, name)
        assert (answer["model"], answer["policy_version"]) == (f"{model_id}@0", 0)
        assert is_of(answer, loaded(site.base, None))
    assert {"tiny", f"{model_id}@0"} <= await names(engine)


async def test_the_incarnation_is_said_once_the_owner_has_read_the_command(engine, acks, site, model_id):
    await acks.of(f"e:{model_id}", applied(0))
    incarnation = await site.take_up(model_id)
    ack = await acks.of(f"e:{model_id}", lambda ack: ack.incarnation == incarnation)
    assert (ack.policy_version, ack.digest) == (0, "base")


@pytest.mark.parametrize("kind", ["lora", "full"])
async def test_a_published_version_is_served_and_acknowledged_and_the_one_before_it_is_kept(engine, acks, site, trained, kind):
    make = adapter if kind == "lora" else lambda *at: full(*at[:2], 1 + at[2] / 4)
    folders = {version: make(site.base, site.new_folder() / str(version), version) for version in (1, 2)}
    for version, folder in folders.items():
        published = await site.publish(trained, version, folder)
        ack = await acks.of(f"e:{trained}", applied(version))
        assert (ack.digest, ack.incarnation, ack.served_as) == (published.digest, published.incarnation, f"{trained}@{version}")
        answer = await ask(engine, trained)
        assert (answer["model"], answer["policy_version"]) == (f"{trained}@{version}", version)
        assert answer["choices"][0]["policy_versions"] == [version] * len(answer["choices"][0]["token_ids"])
        assert is_of(answer, loaded(site.base, folder))
    for version, folder in {0: None, **folders}.items():
        assert is_of(await ask(engine, f"{trained}@{version}"), loaded(site.base, folder))
    assert {f"{trained}@{version}" for version in (0, 1, 2)} <= await names(engine)


async def test_two_models_and_two_versions_are_served_at_once(engine, acks, site):
    made = {}
    for name in ("left", "right"):
        model_id = await site.create(uuid.uuid4().hex)
        await site.take_up(model_id)
        for version in (1, 2):
            make = adapter if name == "left" else lambda *at: full(*at[:2], 1 + at[2] / 4)
            folder = await asyncio.to_thread(make, site.base, site.new_folder() / f"{name}{version}", version + (name == "left"))
            await site.publish(model_id, version, folder)
            await acks.of(f"e:{model_id}", applied(version))
            made[f"{model_id}@{version}"] = loaded(site.base, folder)
    wanted = [*made, "tiny"] * 4
    answers = await asyncio.gather(*[ask(engine, name, seed=i) for i, name in enumerate(wanted)])
    made["tiny"] = loaded(site.base, None)
    for name, answer in zip(wanted, answers, strict=True):
        assert is_of(answer, made[name]), name


async def test_an_older_version_that_is_not_held_comes_from_the_ledger(engine, acks, site, trained):
    folders = {version: adapter(site.base, site.new_folder() / str(version), version) for version in range(1, 6)}
    incarnation = site.incarnations[trained]
    for version, folder in folders.items():
        published = await site.publish(trained, version, folder)
        step = record(version, model_id=trained, incarnation=incarnation)
        ref = step.weights.model_copy(update={"uri": published.uri, "digest": published.digest})
        await site.send(site.settings.topic_names.steps, trained, step.model_copy(update={"weights": ref}))
        await acks.of(f"e:{trained}", applied(version))
    assert f"{trained}@1" not in await names(engine)
    answers = await asyncio.gather(*[ask(engine, f"{trained}@{version}", seed=version) for version in (1, 1, 2, 3, 5, 1)])
    for version, answer in zip((1, 1, 2, 3, 5, 1), answers, strict=True):
        assert answer["policy_version"] == version
        assert is_of(answer, loaded(site.base, folders[version]))
    assert (await ask(engine, trained))["policy_version"] == 5  # what is asked for next to it never makes it go back
    held = [name for name in await names(engine) if name.startswith(trained)]
    assert len(held) == 3  # version 0, the current one, and one more


async def test_a_version_that_does_not_exist_is_a_404_that_says_so(engine, acks, site, trained):
    assert "not published yet: the latest is 0" in (await ask(engine, f"{trained}@1", 404))["error"]["message"]
    published = await site.publish(trained, 4, adapter(site.base, site.new_folder() / "4", 4))
    await acks.of(f"e:{trained}", applied(4))
    assert "is not in the ledger" in (await ask(engine, f"{trained}@3", 404))["error"]["message"]
    step = record(2, model_id=trained, incarnation=published.incarnation)
    gone = step.weights.model_copy(update={"uri": f"{published.uri}-gone"})
    await site.send(site.settings.topic_names.steps, trained, step.model_copy(update={"weights": gone}))
    assert "no longer stored" in (await ask(engine, f"{trained}@2", 404))["error"]["message"]
    for name in (f"{trained}@x", f"{trained}@-1", f"{trained}@", "nobody", "nobody@1", "other"):
        assert (await ask(engine, name, 404))["error"]["code"] == "model_not_found"


async def test_weights_that_do_not_fit_are_reported_and_the_version_before_goes_on(engine, acks, site, trained):
    good = adapter(site.base, site.new_folder() / "good", 1)
    await site.publish(trained, 1, good)
    await acks.of(f"e:{trained}", applied(1))
    bad = adapter(site.base, site.new_folder() / "bad", 2)
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, bad / "adapter_model.safetensors")
    await site.publish(trained, 2, bad)
    ack = await acks.of(f"e:{trained}", lambda ack: isinstance(ack, WeightsFailed))
    assert ack.policy_version == 2
    assert "does not fit" in ack.error
    answer = await ask(engine, trained)
    assert answer["policy_version"] == 1
    assert is_of(answer, loaded(site.base, good))
    assert "could not be loaded" in (await ask(engine, f"{trained}@2", 503))["error"]["message"]


async def test_a_deleted_model_is_gone_and_a_new_one_of_its_name_begins_at_version_0(engine, acks, site):
    name = uuid.uuid4().hex
    model_id = await site.create(name)
    await site.take_up(model_id)
    await site.publish(model_id, 3, adapter(site.base, site.new_folder() / "3", 3))
    await acks.of(f"e:{model_id}", applied(3))
    await site.delete(model_id)
    await acks.of(f"e:{model_id}", lambda ack: ack is None)
    await ask(engine, model_id, 404)
    assert await site.create(name) == model_id
    await acks.of(f"e:{model_id}", applied(0))
    answer = await ask(engine, model_id)
    assert answer["policy_version"] == 0
    assert is_of(answer, loaded(site.base, None))


async def test_version_0_of_a_warm_start_is_what_it_starts_from(engine, acks, site, trained):
    wanted = ModelSettings.model_validate({"base_model": "tiny"})
    started: dict[str, Path] = {}
    for seed in (8, 9):
        folder = adapter(site.base, site.new_folder() / "start", seed)
        start = site.stored(trained, seed, folder)
        view = await create_model(site.settings, project="p", name=uuid.uuid4().hex, model=wanted, start_weights=start)
        ack = await acks.of(f"e:{view.model_id}", applied(0))
        assert ack.digest == start.digest
        started[view.model_id] = folder
    for model_id, folder in started.items():
        for name in (model_id, f"{model_id}@0"):
            assert is_of(await ask(engine, name), loaded(site.base, folder))


async def test_a_late_engine_goes_to_the_latest_version_and_takes_its_acks_back_when_it_ends(acks, site, trained):
    for version in (1, 2, 3):
        folder = adapter(site.base, site.new_folder() / str(version), version)
        await site.publish(trained, version, folder)
    unknown = EngineOptions(base_model="tiny", models=("nobody",), port=0)
    with listen(unknown.host, 0) as listener, pytest.raises(UnknownModelError, match="there is no model 'nobody'"):
        await EngineProcess(site.settings, unknown, listener).run()
    name = (await get_model(site.settings, trained)).name
    async with running(site, engine_id="late", models=(name,)) as late:
        answer = await ask(late, name)  # waits for it, rather than to answer with the base model
        assert answer["policy_version"] == 3
        assert is_of(answer, loaded(site.base, folder))
        assert await names(late) == {"tiny", f"{trained}@0", f"{trained}@3"}
        await acks.of(f"late:{trained}", applied(3))
    for key in (f"late:{trained}", "late:tiny"):
        await acks.of(key, lambda ack: ack is None)


async def test_an_engine_of_a_deployment_serves_what_names_it(acks, site):
    blue, green = [await site.create(uuid.uuid4().hex) for _ in range(2)]
    for model_id, deployment in ((blue, "blue"), (green, "green")):
        await site.take_up(model_id)
        await site.publish(model_id, 1, adapter(site.base, site.new_folder() / deployment, 1), rollout_deployments=(deployment,))
    async with running(site, engine_id="b", deployment="blue") as engine:
        ack = await acks.of(f"b:{blue}", applied(1))
        assert ack.deployment == "blue"
        assert (await ask(engine, blue))["policy_version"] == 1
        await ask(engine, green, 404)


async def test_an_engine_of_a_deployment_serves_models_of_its_account_only(acks, site):
    foreign, own = [await site.create(uuid.uuid4().hex) for _ in range(2)]
    for account in ("umbrella", "default"):
        fact = DeploymentFact(account=account, id=f"of-{account}", owner="me", base_model="tiny", request={})
        await site.fact(deployment_key(account, fact.id), fact)
    for model_id, deployment in ((foreign, "of-umbrella"), (own, "of-default")):
        await site.take_up(model_id)
        await site.publish(model_id, 1, adapter(site.base, site.new_folder() / deployment, 1), rollout_deployments=(deployment,))
    async with running(site, engine_id="o", deployment="of-default") as engine:
        await acks.of(f"o:{own}", applied(1))
    async with running(site, engine_id="u", deployment="of-umbrella") as engine:
        await ask(engine, foreign, 404)


async def test_an_engine_of_a_deployment_serves_what_it_is_asked_to_load_until_that_is_taken_back(acks, site):
    model_id = await site.create(uuid.uuid4().hex)
    await site.take_up(model_id)
    published = await site.publish(model_id, 2, adapter(site.base, site.new_folder() / "2", 2))
    wanted = DeployedModel(
        account="default", deployment="red", published=published.model_copy(update={"files": ()}), id="d", model="m", owner="me"
    )
    fact = partial(site.fact, deployed_model_key("default", "d"))
    async with running(site, engine_id="r", deployment="red") as engine:
        await ask(engine, model_id, 404)
        await fact(wanted)
        ack = await acks.of(f"r:{model_id}", applied(2))
        assert (ack.deployment, ack.digest) == ("red", published.digest)
        assert (await ask(engine, model_id))["policy_version"] == 2
        await fact(wanted.model_copy(update={"removed_at": utc_now()}))
        await acks.of(f"r:{model_id}", lambda ack: ack is None)
        await ask(engine, model_id, 404)


async def test_a_late_engine_whose_newest_version_can_not_be_had_serves_the_newest_that_can(acks, site, trained):
    folders = {version: adapter(site.base, site.new_folder() / str(version), version) for version in (1, 2, 3, 4)}
    for version, folder in folders.items():
        published = await site.publish(trained, version, folder)
        step = record(version, model_id=trained, incarnation=published.incarnation)
        uri = published.uri if version < 3 else f"{published.uri}-gone"
        ref = step.weights.model_copy(update={"uri": uri, "digest": published.digest})
        await site.send(site.settings.topic_names.steps, trained, step.model_copy(update={"weights": ref}))
    await site.send(site.settings.topic_names.weights, trained, published.model_copy(update={"policy_version": 5, "uri": uri}))
    async with running(site, engine_id="late", models=(trained,)) as late:
        ack = await acks.of(f"late:{trained}", lambda ack: isinstance(ack, WeightsFailed))
        assert (ack.policy_version, ack.serving) == (5, 2)
        answer = await ask(late, trained)
        assert answer["policy_version"] == 2
        assert is_of(answer, loaded(site.base, folders[2]))


async def test_an_engine_of_a_deployment_serves_what_it_is_asked_to_load_though_its_job_was_deleted(acks, site):
    model_id = await site.create(uuid.uuid4().hex)
    await site.take_up(model_id)
    published = await site.publish(model_id, 2, adapter(site.base, site.new_folder() / "2", 2))
    await site.fact(
        deployed_model_key("default", "gone"),
        DeployedModel(account="default", deployment="grey", published=published, id="gone", model="m", owner="me"),
    )
    await site.delete(model_id)
    async with running(site, engine_id="g", deployment="grey") as engine:
        await acks.of(f"g:{model_id}", applied(2))
        assert (await ask(engine, model_id))["policy_version"] == 2


async def test_models_of_another_base_model_are_left_alone(engine, site):
    wanted = ModelSettings.model_validate({"base_model": "other"})
    other = (await create_model(site.settings, project="p", name=uuid.uuid4().hex, model=wanted)).model_id
    mine = await site.create(uuid.uuid4().hex)
    async with running(site, engine_id="o") as another:
        assert f"{mine}@0" in await names(another)
        await ask(another, other, 404)
