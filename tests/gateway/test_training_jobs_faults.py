"""Bodies that can't be taken: every fault is told at once, with its place, and nothing is written."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.gateway.conftest import running
from tests.gateway.job_bodies import choice, faults, group, job, make_model, placeholder, trajectory
from tests.gateway.test_training_jobs_submit import JOBS, in_the_log

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUPS = "body.trajectory_groups"
CONFIG = "body.experimental_config"


async def test_the_placeholder_body_is_refused_with_the_name_of_each_field_that_has_no_fitting_value(
    shared_gateway: httpx.AsyncClient,
) -> None:
    model = await make_model(shared_gateway)
    found = faults(await shared_gateway.post(JOBS, json={**placeholder(), "model_id": model}))
    assert set(found) == {
        f"{CONFIG}.advantage_balance",
        f"{CONFIG}.kl_penalty_reference_step",
        f"{CONFIG}.kl_penalty_step_lag",
        f"{CONFIG}.kl_ref_adapter_path",
        f"{CONFIG}.learning_rate",
        f"{CONFIG}.num_trajectories_learning_rate_multiplier_power",
        f"{GROUPS}.0.trajectories.0.tools.0.type",
        f"{GROUPS}.0.trajectories.0.initial_policy_version",
        f"{GROUPS}.0.trajectories.0.final_policy_version",
    }
    assert "exclude each other" in found[f"{CONFIG}.kl_penalty_step_lag"]
    assert await in_the_log(shared_gateway.gate.settings, model) == []  # type: ignore[attr-defined]


async def test_all_faults_of_all_groups_are_told_at_once(shared_gateway: httpx.AsyncClient) -> None:
    model = await make_model(shared_gateway)
    bad = group()
    bad["trajectories"][0]["reward"] = "high"
    bad["trajectories"][1]["messages_and_choices"][1]["logprobs"]["content"][0]["logprob"] = "low"
    worse = group(exceptions=[{"message": "boom"}])
    worse["trajectories"][0]["messages_and_choices"] += [{"role": "robot", "content": "x"}, choice([1], token_ids=[1, 2])]
    found = faults(
        await shared_gateway.post(JOBS, json=job(model, group(), bad, worse, config={"epsilon": -1, "ppo": True, "loss_fn": "cispo"}))
    )
    assert set(found) == {
        f"{GROUPS}.1.trajectories.0.reward",
        f"{GROUPS}.1.trajectories.1.messages_and_choices.1.logprobs.content.0.logprob",
        f"{GROUPS}.2.exceptions.0.type",
        f"{GROUPS}.2.trajectories.0.messages_and_choices.2.role",
        f"{GROUPS}.2.trajectories.0.messages_and_choices.3",
        f"{CONFIG}.epsilon",
        f"{CONFIG}.ppo",
        f"{CONFIG}.loss_fn",
    }


async def test_a_missing_reward_and_a_tokens_version_that_was_never_published_are_told_with_their_places(
    shared_gateway: httpx.AsyncClient,
) -> None:
    model = await make_model(shared_gateway)
    bad = group()
    del bad["trajectories"][0]["reward"]
    bad["trajectories"][1]["messages_and_choices"] = [
        {"role": "user", "content": "q"},
        choice([1, 2, 3], token_ids=[1, 2, 3], policy_versions=[0, None, 7]),
    ]
    found = faults(await shared_gateway.post(JOBS, json=job(model, group(), bad)))
    assert set(found) == {
        f"{GROUPS}.1.trajectories.0.reward",
        f"{GROUPS}.1.trajectories.1.messages_and_choices.1.policy_versions.2",
    }
    assert found[f"{GROUPS}.1.trajectories.0.reward"].startswith("reward is missing")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_what_is_no_number_is_refused_with_its_place(shared_gateway: httpx.AsyncClient, number: str) -> None:
    model = await make_model(shared_gateway)
    body = job(model, group(), group(1, metadata={'a "key": [1,': "@"}), group(2))
    body["trajectory_groups"][1]["trajectories"][1]["reward"] = "@"
    text = copy.deepcopy(body)
    sent = httpx.Request("POST", "http://x", json=text).content.decode().replace('"@"', number)
    found = faults(await shared_gateway.post(JOBS, content=sent))
    assert f"{GROUPS}.1.trajectories.1.reward" in found
    assert len(found) == 2
    assert all("NaN or infinity" in message for message in found.values())


async def test_half_of_a_character_costs_one_trajectory_and_not_the_body(shared_gateway: httpx.AsyncClient) -> None:
    model = await make_model(shared_gateway)
    body = job(model, group(), group(1))
    body["trajectory_groups"][1]["trajectories"][0]["messages_and_choices"][0]["content"] = "@"
    sent = httpx.Request("POST", "http://x", json=body).content.replace(b'"@"', rb'"\ud83d"')
    assert (await shared_gateway.post(JOBS, content=sent)).status_code == 200
    _, damaged = [record.group for record in await in_the_log(shared_gateway.gate.settings, model) if hasattr(record, "group")]  # type: ignore[attr-defined]
    assert [(member.model_extra or {}).get("unreadable", "")[:31] for member in damaged.trajectories] == [
        "messages_and_choices[0].content",
        "",
    ]


BAD: list[tuple[Any, str]] = [
    (b"", "body"),
    (b"{", "body"),
    (b"[]", "body"),
    (b'{"model_id": "\xff"}', "body.model_id"),
    (b'{"model_id": 5}', "body.model_id"),
    (b'{"trajectory_groups": {}}', GROUPS),
    (b"[" * 100_000, "body"),
]


@pytest.mark.parametrize(("content", "place"), BAD)
async def test_what_is_no_job_is_refused_whatever_it_is(shared_gateway: httpx.AsyncClient, content: bytes, place: str) -> None:
    assert place in faults(await shared_gateway.post(JOBS, content=content))


OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"packed_sequence_length": 65536}, f"{CONFIG}.packed_sequence_length", "max_sequence_tokens=32768"),
    ({"kl_penalty_reference_step": 3}, f"{CONFIG}.kl_penalty_reference_step", "its newest is 0"),
    ({"kl_penalty_step_lag": 0}, f"{CONFIG}.kl_penalty_step_lag", "greater than or equal to 1"),
    ({"learning_rate": "fast"}, f"{CONFIG}.learning_rate", "valid number"),
    ({"x": "y" * 70_000}, CONFIG, "bytes"),
]


@pytest.mark.parametrize(("config", "place", "message"), OTHERS)
async def test_a_config_is_judged_with_its_model(
    shared_gateway: httpx.AsyncClient, config: dict[str, Any], place: str, message: str
) -> None:
    found = faults(await shared_gateway.post(JOBS, json=job(await make_model(shared_gateway), group(), config=config)))
    assert list(found) == [place]
    assert message in found[place]


async def test_faults_beyond_a_hundred_are_not_listed(shared_gateway: httpx.AsyncClient) -> None:
    model = await make_model(shared_gateway)
    many = {"trajectories": [trajectory("x", [1]) for _ in range(300)]}  # type: ignore[arg-type]
    found = faults(await shared_gateway.post(JOBS, json=job(model, many)))
    assert len(found) == 101
    assert "more faults" in found["body"]


async def test_unknown_options_and_those_without_effect_are_warned_of_and_the_job_is_taken(shared_gateway: httpx.AsyncClient) -> None:
    model = await make_model(shared_gateway)
    config = {"brand_new": 1, "truncated_importance_sampling": 2.0, "kl_penalty_step_lag": 1, "epsilon": None, "epsilon_high": None}
    job_id = (await shared_gateway.post(JOBS, json=job(model, group(), config=config))).json()["id"]
    events = (await shared_gateway.get(f"{JOBS}/{job_id}/events")).json()["data"]
    assert [event["type"] for event in events] == ["warning"] * 3
    said = [event["data"]["message"] for event in events]
    assert all(any(name in message for message in said) for name in ("brand_new", "truncated_importance_sampling", "kl_penalty_step_lag"))
    rest = (await shared_gateway.get(f"{JOBS}/{job_id}/events", params={"after": events[0]["id"], "limit": 1})).json()
    assert (rest["data"], rest["has_more"]) == ([events[1]], True)
    assert faults(await shared_gateway.get(f"{JOBS}/{job_id}/events", params={"after": "what"})).keys() == {"query.after"}


async def test_recorded_bodies_of_the_real_client_are_taken(shared_gateway: httpx.AsyncClient) -> None:
    import json  # noqa: PLC0415

    from tests.gateway.job_bodies import FIXTURES  # noqa: PLC0415

    lines = [json.loads(line) for line in (FIXTURES / "art-client-traffic.jsonl").read_text().splitlines()]
    bodies = [line["body"] for line in lines if line["method"] == "POST" and line["path"].endswith("/training-jobs")]
    model = await make_model(shared_gateway)
    answers = [await shared_gateway.post(JOBS, json={**body, "model_id": model}) for body in bodies]
    assert [answer.status_code for answer in answers] == [200] * len(bodies), [answer.text for answer in answers]
    assert len(bodies) >= 9


@pytest_asyncio.fixture(loop_scope="module")
async def small(shared_gateway: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that takes two groups a job."""
    settings = shared_gateway.gate.settings  # type: ignore[attr-defined]
    few = settings.gateway.model_copy(update={"max_groups": 2, "instance": "small"})
    async with running(settings.model_copy(update={"gateway": few})) as http:
        yield http


async def test_too_many_groups_are_refused_with_the_setting(small: httpx.AsyncClient) -> None:
    found = faults(await small.post(JOBS, json=job(await make_model(small), group(), group(1), group(2))))
    assert "gateway.max_groups" in found[GROUPS]


async def test_a_reward_is_required_where_the_client_is_none_that_leaves_out_what_has_its_default(
    shared_gateway: httpx.AsyncClient,
) -> None:
    model = await make_model(shared_gateway)
    without = {"trajectories": [trajectory(1.0, [9, 1]), {key: value for key, value in trajectory(0.0, [9, 1]).items() if key != "reward"}]}
    assert faults(await shared_gateway.post(JOBS, json=job(model, without))).keys() == {"body.trajectory_groups.0.trajectories.1.reward"}
    # What `openpipe-art` 0.5.23 sends: every option, and no field that has its default.
    names = (
        "kl_ref_adapter_path",
        "loss_fn",
        "normalize_advantages",
        "plot_tensors",
        "truncated_importance_sampling",
        "packed_sequence_length",
    )
    options = dict.fromkeys(names) | {"loss_fn": "cispo", "ppo": False}
    failed = {"exceptions": [{"type": "ValueError", "message": "boom", "traceback": ""}]}
    assert (await shared_gateway.post(JOBS, json=job(model, without, failed, {}, config=options))).status_code == 200
    assert (await shared_gateway.post(JOBS, json=job(model, failed))).status_code == 200
