import asyncio
import sys

from headrace.producers import TrajectoryProducer
from headrace.schemas.trajectory import TrajectoryGroup

turn = {"finish_reason": "stop", "message": {"content": "4"}, "prompt_token_ids": [2, 7, 3], "token_ids": [9, 1]}
right = {"messages_and_choices": [{**turn, "token_logprobs": [-0.7, -0.1]}], "reward": 1.0, "initial_policy_version": 0}
wrong = {"messages_and_choices": [{**turn, "token_ids": [10, 1], "token_logprobs": [-1.2, -0.1]}], "reward": 0.0}


async def main(model_id: str) -> None:
    async with TrajectoryProducer(model_id=model_id) as producer:
        print(await producer.send(TrajectoryGroup.model_validate({"trajectories": [right, wrong]})))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
