"""A multi-turn agent with one tool, in a process of its own: `python examples/tool_agent.py MODEL_ID`.

It samples from an OpenAI-compatible engine (ENGINE_URL) and sends each group of rollouts of one task to Kafka.
"""

import asyncio
import json
import os
import random
import sys

import httpx

from headrace.producers import TrajectoryProducer, choice_from_openai, tool_message
from headrace.schemas.chat import Message, MessageOrChoice, Tool, ToolCall
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

ENGINE_URL = os.environ.get("ENGINE_URL", "http://127.0.0.1:8200/v1")
GROUPS, ROLLOUTS, TURNS, MAX_TOKENS = 2, 4, 3, 32
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = Tool.model_validate({"function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}})


def run_tool(call: ToolCall) -> Message:
    arguments = call.function.arguments
    try:
        numbers = json.loads(arguments) if isinstance(arguments, str) else arguments
        return tool_message(call, {"sum": int(numbers["a"]) + int(numbers["b"])})
    except (KeyError, TypeError, ValueError) as error:
        return tool_message(call, {"error": str(error)})


async def rollout(engine: httpx.AsyncClient, model_id: str, a: int, b: int) -> Trajectory:
    items: list[MessageOrChoice] = [Message(role="user", content=f"What is {a} + {b}?")]
    messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
    request = {"model": model_id, "tools": [ADD.model_dump(exclude_none=True)], "max_tokens": MAX_TOKENS}
    tokens, text = 0, ""
    for _ in range(TURNS):
        answer = await engine.post("chat/completions", json={**request, "messages": messages, "logprobs": True, "return_token_ids": True})
        choice = choice_from_openai(answer.raise_for_status().json())
        results = [run_tool(call) for call in choice.message.tool_calls or ()]
        items += [choice, *results]
        messages += [message.model_dump(exclude_none=True) for message in (choice.message, *results)]
        tokens, text = tokens + len(choice.token_ids or ()), choice.message.content or ""
        if not results:
            break
    # A right answer earns 1; each token costs a little, so that rollouts of one task differ.
    return Trajectory(messages_and_choices=items, tools=[ADD], reward=float(str(a + b) in text) - 0.001 * tokens)


async def main(model_id: str) -> None:
    async with TrajectoryProducer(model_id=model_id) as producer, httpx.AsyncClient(base_url=ENGINE_URL, timeout=60) as engine:
        for _ in range(GROUPS):
            a, b = random.randint(1, 9), random.randint(1, 9)
            rollouts = await asyncio.gather(*[rollout(engine, model_id, a, b) for _ in range(ROLLOUTS)])
            print(await producer.send(TrajectoryGroup(trajectories=rollouts)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
