"""Supervised examples first, then groups with rewards, as two jobs of one model: `python examples/sft_then_rl.py MODEL_ID`."""

import asyncio
import sys

from headrace.producers import TrajectoryProducer
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup

QUESTION = {"role": "user", "content": "2 + 2?"}
EXAMPLE = {"messages_and_choices": [QUESTION, {"role": "assistant", "content": "4"}]}
TURN = {"finish_reason": "stop", "message": {"content": "4"}, "prompt_token_ids": [2, 7, 3], "token_ids": [9, 1]}
RIGHT = {"messages_and_choices": [{**TURN, "token_logprobs": [-0.7, -0.1]}], "reward": 1.0}
WRONG = {"messages_and_choices": [{**TURN, "token_ids": [10, 1], "token_logprobs": [-1.2, -0.1]}], "reward": 0.0}


async def main(model_id: str) -> None:
    async with TrajectoryProducer(model_id=model_id) as producer:
        examples = TrajectoryGroup.model_validate({"trajectories": [EXAMPLE]})
        print("sft", await producer.submit_job([examples], sft=SftConfig(epochs=2, learning_rate=1e-4)))
        rollouts = TrajectoryGroup.model_validate({"trajectories": [RIGHT, WRONG]})
        print("rl", await producer.submit_job([rollouts], TrainConfig(learning_rate=1e-5)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
