"""An agent that knows nothing of Headrace and could be in any language: `python examples/plain_agent.py TASK`.

It calls an OpenAI-compatible engine, and prints one line of JSON: the calls that it made, and the reward.
"""

import json
import os
import sys
from datetime import UTC, datetime
from urllib.request import Request, urlopen

ENGINE_URL = os.environ.get("ENGINE_URL", "http://127.0.0.1:8200/v1")


def call(request: dict) -> dict:
    """One call, as it was sent and as it was answered."""
    started = datetime.now(UTC).isoformat()
    body = json.dumps(request).encode()
    with urlopen(Request(f"{ENGINE_URL.rstrip('/')}/chat/completions", body, {"content-type": "application/json"}), timeout=60) as answer:
        response = json.load(answer)
    return {"request": request, "response": response, "start_time": started, "end_time": datetime.now(UTC).isoformat()}


def main(task: str) -> None:
    request = {"model": os.environ["MODEL"], "logprobs": True, "return_token_ids": True, "max_tokens": 16}
    messages = [{"role": "user", "content": task}]
    first = call(request | {"messages": messages})
    messages += [first["response"]["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
    second = call(request | {"messages": messages})
    # Short answers are worth more.
    length = sum(len(made["response"]["choices"][0]["token_ids"]) for made in (first, second))
    print(json.dumps({"reward": 1 - length / 32, "exchanges": {"chat_completions": [first, second]}}))


if __name__ == "__main__":
    main(sys.argv[1])
