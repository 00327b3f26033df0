"""Groups for benchmarks, with token ids and log-probabilities distributed like real ones (compression depends on it)."""

import random

import orjson

from headrace.schemas.codec import SampledGroup, decode_group

VOCABULARY = 150_000


def tokens(n: int, rng: random.Random) -> tuple[list[int], list[float]]:
    """Token ids with a long tail, and log-probabilities of a sampler at temperature 1 (mean about -0.6)."""
    ids = [min(int(rng.paretovariate(0.6) * 10), VOCABULARY - 1) for _ in range(n)]
    return ids, [-rng.expovariate(1.6) for _ in range(n)]


def hosted_json(trajectories: int, length: int, seed: int = 0) -> bytes:
    """A group as the hosted APIs send it: one object for every token."""
    rng = random.Random(seed)
    members = []
    for i in range(trajectories):
        ids, logprobs = tokens(length, rng)
        content = [
            {"token": f"token_id:{token}", "bytes": [97, 98, 99], "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        members.append(
            {
                "messages_and_choices": [
                    {"role": "system", "content": "You are an agent. Think, then answer in one line."},
                    {"role": "user", "content": "What is the sum of all prime numbers below one hundred? " * 4},
                    {
                        "finish_reason": "stop",
                        "index": 0,
                        "logprobs": {"content": content, "refusal": None},
                        "message": {"role": "assistant", "content": "abc" * length, "refusal": None, "tool_calls": None},
                    },
                ],
                "tools": None,
                "additional_histories": [],
                "reward": float(i % 2),
                "initial_policy_version": 3,
                "final_policy_version": 3,
                "metrics": {"correct": i % 2 == 1},
                "metadata": {"scenario": "primes"},
                "logs": [],
            }
        )
    return orjson.dumps({"trajectories": members, "group_id": f"bench-{seed}", "metadata": {}, "metrics": {}, "logs": []})


def group(trajectories: int, length: int, seed: int = 0) -> SampledGroup:
    """The same, in memory."""
    return decode_group(hosted_json(trajectories, length, seed))
