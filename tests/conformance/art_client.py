"""The real `openpipe-art` client against a gateway: run by `test_art.py` in an environment of its own, with the gateway's `/v1` and a key.

Prints a line for each thing that held, and ends with status 1 at the first that did not. Not a word of the client is changed; `wandb` is an
empty module, as its own package would start real runs.
"""

import asyncio
import os
import random
import sys
import tempfile
import types
from typing import Any

os.environ.pop("WANDB_API_KEY", None)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
sys.modules["wandb"] = types.ModuleType("wandb")

import art  # noqa: E402
import httpx  # noqa: E402
from art.serverless.backend import ServerlessBackend  # noqa: E402
from openai import NotFoundError  # noqa: E402

BASE_URL, KEY, BASE_MODEL, RELEASE = sys.argv[1:5]
if RELEASE == "0.5.18":
    from art.trajectories import History
else:
    from art.trajectories import LegacyHistory as History
STEPS, GROUPS, ROLLOUTS = 12, 4, 8
ENOUGH = 0.9
WANTED = set("abcdefghijkl")  # half of the model's letters


def held(what: str) -> None:
    print(f"held: {what}", flush=True)


def reward_of(text: str) -> float:
    letters = text.split()
    return sum(letter in WANTED for letter in letters) / max(1, len(letters))


def any_varies(groups: list[art.TrajectoryGroup]) -> bool:
    return any(len({trajectory.reward for trajectory in group.trajectories}) > 1 for group in groups)


def make_vary(groups: list[art.TrajectoryGroup]) -> list[art.TrajectoryGroup]:
    """Rewards that differ within each group: the model has learned the task by now."""
    for group in groups:
        for i, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(i % 2)
    return groups


async def rollout(model: art.TrainableModel, prompt: str, name: str, seed: int = 0) -> art.Trajectory:
    client = model.openai_client()
    messages: list[Any] = [{"role": "user", "content": prompt}]
    answer = await client.chat.completions.create(model=name, messages=messages, max_tokens=8, logprobs=True, seed=seed)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert all(entry.token.startswith("token_id:") for entry in choice.logprobs.content), choice.logprobs.content[0]
    trajectory = art.Trajectory(messages_and_choices=[*messages, choice], reward=reward_of(choice.message.content or ""))
    step = int(answer.model.rpartition(":step")[2])
    trajectory.initial_policy_version = trajectory.final_policy_version = step
    return trajectory


async def groups_of(model: art.TrainableModel, rng: random.Random) -> list[art.TrajectoryGroup]:
    name = model.get_inference_name()
    prompts = [" ".join(rng.choices("abcdefghijklmnopqrstuvwxy", k=3)) for _ in range(GROUPS)]
    return [await art.TrajectoryGroup([rollout(model, prompt, name, rng.randrange(2**31)) for _ in range(ROLLOUTS)]) for prompt in prompts]


def mean_reward(groups: list[art.TrajectoryGroup]) -> float:
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    return sum(rewards) / len(rewards)


async def learns(backend: ServerlessBackend, model: art.TrainableModel) -> None:
    rng = random.Random(0)
    rewards: list[float] = []
    while len(rewards) < STEPS and (not rewards or rewards[-1] < ENOUGH):
        groups = await groups_of(model, rng)
        sampled_by = {trajectory.initial_policy_version for group in groups for trajectory in group.trajectories}
        assert sampled_by == {len(rewards)}, f"rollouts of step {len(rewards)} come from versions {sampled_by}"
        rewards.append(mean_reward(groups))
        result = await backend.train(model, groups, learning_rate=5e-3)
        assert result.step == len(rewards), result
        # Without a group whose rewards differ there is no gradient step to tell of.
        assert ("loss/train" in result.metrics) == any_varies(groups), result.metrics
        assert await model.get_step() == len(rewards)
    print("rewards:", " ".join(f"{reward:.2f}" for reward in rewards), flush=True)
    assert rewards[-1] > rewards[0] + 0.15, rewards
    held(f"the reward goes up: {rewards[0]:.2f} to {rewards[-1]:.2f} in {len(rewards)} steps")
    latest = await rollout(model, "a b", model.get_inference_name())
    assert latest.initial_policy_version == len(rewards), latest.initial_policy_version
    held("the unsuffixed name serves the newest step once train has returned: every rollout of a step came from its version")
    named = await rollout(model, "a b", model.get_inference_name(len(rewards)))
    assert named.initial_policy_version == len(rewards)
    older = await rollout(model, "a b", model.get_inference_name(len(rewards) - 1))
    assert older.initial_policy_version == len(rewards) - 1
    held("a step answers by its name, also one that is not the newest")


async def trains_whatever_it_is_given(backend: ServerlessBackend, model: art.TrainableModel) -> None:
    rng = random.Random(1)
    step = await model.get_step()
    result = await backend.train(
        model,
        make_vary(await groups_of(model, rng)),
        learning_rate=1e-3,
        ppo=True,
        epsilon=0.2,
        epsilon_high=0.28,
        advantage_balance=0.5,
        scale_rewards=False,
        importance_sampling_level="sequence",
        max_negative_advantage_importance_sampling_weight=2.0,
        mask_prob_ratio=True,
        kimi_k2_tau=0.1,
        precalculate_logprobs=True,
        verbose=True,
    )
    assert result.step == step + 1
    held("all options train")
    for level in ("average", "geometric_average"):
        result = await backend.train(model, make_vary(await groups_of(model, rng)), importance_sampling_level=level)  # type: ignore[arg-type]
    assert result.step == step + 3
    held("every importance sampling level trains")
    same = await groups_of(model, rng)
    for group in same:
        for trajectory in group.trajectories:
            trajectory.reward = 0.5
    assert (await backend.train(model, same)).step == step + 4
    held("groups of equal rewards end well and count as a step")

    broken = art.TrajectoryGroup([], exceptions=[ValueError("boom"), ValueError("again")])
    assert len(broken.exceptions) == 2
    assert (await backend.train(model, [broken])).step == step + 5
    held("a group of exceptions alone ends well and counts as a step")
    assert (await backend.train(model, [])).step == step + 6
    held("no group at all ends well and counts as a step")
    await odd_groups(backend, model, step + 6)


async def odd_groups(backend: ServerlessBackend, model: art.TrainableModel, step: int) -> None:
    rng = random.Random(2)
    plain = [
        art.Trajectory(messages_and_choices=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], reward=r)
        for r in (0, 1)
    ]
    assert (await backend.train(model, [art.TrajectoryGroup(plain)])).step == step + 1
    held("text without log-probabilities trains nothing, and says so by ending")
    long = [
        art.Trajectory(messages_and_choices=[{"role": "user", "content": "a " * 5000}, *t.messages_and_choices[1:]], reward=t.reward)
        for t in (await groups_of(model, rng))[0].trajectories
    ]
    assert (await backend.train(model, [art.TrajectoryGroup(long)])).step == step + 2
    held("over-long trajectories end well")
    with_tools = (await groups_of(model, rng))[0]
    for i, trajectory in enumerate(with_tools.trajectories):
        trajectory.tools = [
            {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}
        ]
        trajectory.additional_histories = [History(messages_and_choices=list(trajectory.messages_and_choices))]
        trajectory.metrics, trajectory.metadata = {"correct": bool(i % 2)}, {"scenario_id": "s1"}
        trajectory.log("a log line")
    assert (await backend.train(model, [with_tools])).step == step + 3
    held("tools, additional histories, metrics, metadata and logs are taken")


async def checkpoints(backend: ServerlessBackend, model: art.TrainableModel) -> None:
    http = httpx.AsyncClient(base_url=BASE_URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    path = f"/preview/models/{model.id}/checkpoints"
    newest = await model.get_step()
    for order, expected in (("asc", list(range(newest + 1))), ("desc", list(range(newest, -1, -1)))):
        seen: list[int] = []
        after: dict[str, str] = {}
        while True:
            page = (await http.get(path, params={"limit": 2, "order": order, **after})).json()
            seen += [item["step"] for item in page["data"]]
            after = {"after": page["last_id"]}
            if not page["has_more"]:
                break
        assert seen == expected, (order, seen)
    held("checkpoints are listed in both orders, page by page")
    client = backend._client
    old = [0, 1, 2]
    deleted = await client.models.checkpoints.delete(model_id=model.id, steps=[*old, 999])
    assert deleted.deleted_count == len(old), deleted
    assert list(deleted.not_found_steps) == [999], deleted
    left = [item.step async for item in client.models.checkpoints.list(model_id=model.id, order="asc")]
    assert left == list(range(3, newest + 1)), left
    held("checkpoints are deleted, and those that are not there are named")
    await http.aclose()


async def failures(model: art.TrainableModel) -> None:
    http = httpx.AsyncClient(base_url=BASE_URL, timeout=30)
    body = {"model_id": model.id, "trajectory_groups": []}
    wrong = await http.post("/preview/training-jobs", json=body, headers={"Authorization": "Bearer wrong"})
    assert wrong.status_code == 401, wrong.text
    known = {"Authorization": f"Bearer {KEY}"}
    unknown = await http.post("/preview/training-jobs", json=body | {"model_id": "8e3e1861-0000-4000-8000-000000000000"}, headers=known)
    assert unknown.status_code == 404, unknown.text
    malformed = await http.post("/preview/training-jobs", json={"model_id": model.id, "trajectory_groups": [{}]}, headers=known)
    assert malformed.status_code == 422, malformed.text
    (fault,) = malformed.json()["detail"]
    assert fault["loc"] == ["body", "trajectory_groups", 0, "trajectories"], fault
    nan = await http.post(
        "/preview/training-jobs",
        content=f'{{"model_id": "{model.id}", "trajectory_groups": [{{"trajectories": [{{"reward": NaN}}]}}]}}',
        headers={**known, "content-type": "application/json"},
    )
    assert nan.status_code == 422, nan.text
    held("a wrong key is 401, an unknown model 404, a malformed body and NaN 422")
    await http.aclose()


async def main() -> None:
    backend = ServerlessBackend(api_key=KEY, base_url=BASE_URL)
    with tempfile.TemporaryDirectory() as folder:

        def model_of(name: str) -> art.TrainableModel:
            named: dict[str, Any] = {"name": name} if RELEASE == "0.5.18" else {"name": "agent", "run_name": name}
            return art.TrainableModel(**named, project="conformance", base_model=BASE_MODEL, base_path=folder)

        model = model_of(f"agent-{RELEASE}")
        await model.register(backend)
        assert model.id
        assert model.entity
        assert await model.get_step() == 0
        again = model_of(f"agent-{RELEASE}")
        await again.register(backend)
        assert again.id == model.id
        held("register, twice: the same model")
        await learns(backend, model)
        await trains_whatever_it_is_given(backend, model)
        await checkpoints(backend, model)
        await failures(model)
        await backend._client.models.log(
            model_id=model.id,
            trajectory_groups=[art.TrajectoryGroup([art.Trajectory(messages_and_choices=[], reward=1.0)], exceptions=[ValueError("boom")])],
            split="val",
        )
        held("logging trajectories")
        await backend._delete_checkpoint_files(model, [await model.get_step()])
        await backend.delete(model)
        try:
            await backend.train(again, [])
        except NotFoundError:
            held("a deleted model trains no more")
        else:
            raise AssertionError("the model was deleted")
        await backend.close()


asyncio.run(main())
print("all held", flush=True)
