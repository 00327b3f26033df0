"""Rollouts of an agent that is a program of its own: `python examples/agent_process.py MODEL_ID COMMAND…`.

Starts the command with a task as its last argument, once for each rollout. Each prints one trajectory as a line of JSON; a rollout that
fails is counted as such. The trajectories of one task are sent as one group.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

from headrace.producers import TrajectoryProducer
from headrace.schemas.trajectory import RolloutException, Trajectory, TrajectoryGroup

TASKS, ROLLOUTS = ("What is 2 + 3?", "What is 4 + 5?"), 4


async def rollout(command: list[str], task: str, model_id: str) -> Trajectory | RolloutException:
    agent = await asyncio.create_subprocess_exec(*command, task, stdout=PIPE, stderr=PIPE, env=os.environ | {"MODEL": model_id})
    output, errors = await agent.communicate()
    if agent.returncode:
        return RolloutException(type="AgentFailed", message=errors.decode(errors="replace")[-500:])
    return Trajectory.model_validate_json(output)


async def main(model_id: str, command: list[str]) -> None:
    async with TrajectoryProducer(model_id=model_id) as producer:
        for task in TASKS:
            members = await asyncio.gather(*[rollout(command, task, model_id) for _ in range(ROLLOUTS)])
            trajectories = [member for member in members if isinstance(member, Trajectory)]
            failed = [member for member in members if isinstance(member, RolloutException)]
            print(await producer.send(TrajectoryGroup(trajectories=trajectories, exceptions=failed)), f"failed={len(failed)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:] or [sys.executable, "examples/plain_agent.py"]))
