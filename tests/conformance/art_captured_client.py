"""Captured trajectories of the real `openpipe-art` 0.5.23 against a gateway: run by `test_art.py` with the gateway's `/v1`, a key, the base
model and the id of a dataset of examples.

The agent is not written for training: it calls a model inside of `with art.Trajectory()`. Prints a line for each thing that held, and ends
with status 1 at the first that did not.
"""

import asyncio
import os
import sys
import tempfile
import types
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.pop("WANDB_API_KEY", None)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
sys.modules["wandb"] = types.ModuleType("wandb")

import art  # noqa: E402
import httpx  # noqa: E402
from art.serverless.backend import ServerlessBackend  # noqa: E402

BASE_URL, KEY, BASE_MODEL, EXAMPLES = sys.argv[1:5]
TOKENS = 4
"""Of an answer."""


def held(what: str) -> None:
    print(f"held: {what}", flush=True)


class Agent:
    """Answers two questions, one behind the other."""

    def __init__(self, model: art.TrainableModel) -> None:
        self._client = model.openai_client()
        self._name = model.get_inference_name()

    async def chat(self, *, stream: bool = False) -> None:
        messages: list[Any] = [{"role": "user", "content": "a b c"}]
        for _ in range(2):
            asked = self._client.chat.completions.create(
                model=self._name, messages=messages, max_tokens=TOKENS, logprobs=True, stream=stream
            )
            messages += [{"role": "assistant", "content": await _text(await asked, stream=stream)}, {"role": "user", "content": "d"}]

    async def streamed(self) -> None:
        await self.chat(stream=True)

    async def completion(self) -> None:
        await self._client.completions.create(model=self._name, prompt="a b", max_tokens=2 * TOKENS, logprobs=0)

    async def by_http(self) -> None:
        """Without any client of OpenAI's."""
        body = {"model": self._name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2 * TOKENS, "logprobs": True}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60) as http:
            (await http.post(f"{BASE_URL}/chat/completions", json=body)).raise_for_status()


async def _text(answer: Any, *, stream: bool) -> str:
    if not stream:
        return answer.choices[0].message.content or ""
    parts = [chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices]
    return "".join(parts)


async def rollout(run: Callable[[], Awaitable[None]], reward: float) -> art.Trajectory:
    with art.Trajectory(metadata={"task": {"tags": ["a", None], "id": 7}}) as trajectory:
        await run()
    trajectory.reward = reward
    trajectory.metrics["right"] = reward > 0
    return trajectory


async def trains_what_was_captured(backend: ServerlessBackend, model: art.TrainableModel) -> int:
    step = 0
    for name in ("chat", "streamed", "completion", "by_http"):
        run = getattr(Agent(model), name)
        group = await art.trajectory_group([rollout(run, float(i)) for i in range(2)])
        assert all(not trajectory.messages_and_choices for trajectory in group), name
        sampled = sum(_sampled(trajectory) for trajectory in group)
        result = await backend.train(model, [group], learning_rate=1e-3)
        step += 1
        assert result.step == step, result
        assert result.metrics.get("data/step_trainable_assistant_tokens") == sampled, (name, sampled, result.metrics)
        held(f"captured by {name}: all {sampled} sampled tokens train, a reward of 0 among them")
    return step


def _sampled(trajectory: art.Trajectory) -> int:
    dump = trajectory.model_dump(mode="json")["exchanges"]
    choices = [choice for kind in dump.values() for exchange in kind for choice in exchange["response"]["choices"]]
    return sum(len(choice["token_ids"]) for choice in choices)


async def gathers(backend: ServerlessBackend, model: art.TrainableModel, step: int) -> None:
    async def fails() -> art.Trajectory:
        raise ValueError("the rollout failed")

    agent = Agent(model)
    groups = await art.gather_trajectory_groups(
        (art.trajectory_group([rollout(agent.chat, 0.0), rollout(agent.chat, 1.0), fails()], return_exceptions=True) for _ in range(2)),
        max_exceptions=4,
    )
    assert [len(group.exceptions) for group in groups] == [1, 1]
    everything: dict[str, Any] = {
        "kl_penalty_coef": 0.1,
        "kl_penalty_source": "sample",
        "kl_penalty_reference_step": 0,
        "allow_training_without_logprobs": False,
        "plot_tensors": False,
        "truncated_importance_sampling": 2.0,
        "precalculate_logprobs": True,
        "scale_learning_rate_by_reward_std_dev": True,
        "logprob_calculation_chunk_size": 16,
        "packed_sequence_length": 64,
        "num_trajectories_learning_rate_multiplier_power": 0.5,
    }
    result = await backend.train(model, groups, learning_rate=1e-3, **everything)
    assert result.step == step + 1
    assert result.metrics["data/step_trainable_assistant_tokens"] == sum(_sampled(t) for group in groups for t in group), result.metrics
    held("gathered groups with a failed rollout train with every option")
    await model.log(groups, split="train", metrics=result.metrics)
    client = backend._client
    await client.models.log(model_id=str(model.id), trajectory_groups=[*groups, art.TrajectoryGroup([])], split="val")
    held("captured groups are logged, and a group without anything is")
    assert (await backend.train(model, [art.TrajectoryGroup([])])).step == step + 2
    held("an empty group ends well and counts as a step")
    await model.delete_checkpoints()
    left = [checkpoint.step async for checkpoint in client.models.checkpoints.list(model_id=str(model.id))]
    assert left == [step + 2], left
    held("delete_checkpoints keeps the newest")


async def imitates(backend: ServerlessBackend, model: art.TrainableModel) -> None:
    client = backend._client
    trained = {}
    for turns in ("all", "last"):
        job = await client.sft_training_jobs.create(
            model_id=str(model.id),
            training_data_url=EXAMPLES,
            config={
                "batch_size": 1,
                "learning_rate": [1e-4, 1e-5],
                "assistant_turns": turns,
                "metric_logging": {"enabled": True, "target_training_step": 9},
            },
        )
        seen: list[Any] = []
        while not seen or seen[-1].type not in {"training_ended", "training_failed"}:
            await asyncio.sleep(0.2)
            seen = [event async for event in client.sft_training_jobs.events.list(training_job_id=job.id)]
        assert seen[-1].type == "training_ended", seen[-1]
        trained[turns] = sum(event.data["num_trainable_tokens"] for event in seen if event.type == "gradient_step")
    assert trained["all"] > trained["last"] > 0, trained
    held(f"supervised: {trained['all']:.0f} tokens of all turns train, {trained['last']:.0f} of the last ones")


async def main() -> None:
    backend = ServerlessBackend(api_key=KEY, base_url=BASE_URL)
    with tempfile.TemporaryDirectory() as folder:
        model = art.TrainableModel(name="agent", run_name="captured", project="conformance", base_model=BASE_MODEL, base_path=folder)
        await model.register(backend)
        await gathers(backend, model, await trains_what_was_captured(backend, model))
        await imitates(backend, model)
        await backend.close()


asyncio.run(main())
print("all held", flush=True)
