import asyncio
import sys

from headrace.producers import TrajectoryProducer
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup

question = {"role": "user", "content": "2 + 2?"}
example = {"messages_and_choices": [question, {"role": "assistant", "content": "4"}]}
turn = {"finish_reason": "stop", "message": {"content": "4"}, "prompt_token_ids": [2, 7, 3], "token_ids": [9, 1]}
right = {"messages_and_choices": [{**turn, "token_logprobs": [-0.7, -0.1]}], "reward": 1.0}
wrong = {"messages_and_choices": [{**turn, "token_ids": [10, 1], "token_logprobs": [-1.2, -0.1]}], "reward": 0.0}


async def main(model_id: str) -> None:
    async with TrajectoryProducer(model_id=model_id) as producer:
        examples = TrajectoryGroup.model_validate({"trajectories": [example]})
        print("sft", await producer.submit_job([examples], sft=SftConfig(epochs=2, learning_rate=1e-4)))
        rollouts = TrajectoryGroup.model_validate({"trajectories": [right, wrong]})
        print("rl", await producer.submit_job([rollouts], TrainConfig(loss_fn="ppo", kl_loss_coef=0.01)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
