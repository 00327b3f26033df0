"""Calls of the RLOR API that several tests make."""

import httpx
import orjson

ACCOUNT = "/v1/accounts/default"
JOBS = f"{ACCOUNT}/rlorTrainerJobs"


def rl_line(prompt: str, scores: list[float], **more: list[float]) -> bytes:
    """A line of a dataset: one prompt, an answer for each score."""
    samples = [
        {
            "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"answer {n}"}],
            "evals": {"score": score} | {name: values[n] for name, values in more.items()},
        }
        for n, score in enumerate(scores)
    ]
    return orjson.dumps({"samples": samples})


async def dataset(client: httpx.AsyncClient, name: str, *lines: bytes) -> None:
    """A dataset that is READY."""
    body = {"datasetId": name, "dataset": {"format": "RL", "userUploaded": {}}}
    made = await client.post(f"{ACCOUNT}/datasets", json=body)
    assert made.status_code == 200, made.text
    content = b"\n".join(lines or (rl_line("2 + 2?", [0, 1]), rl_line("3 + 3?", [1, 0]))) + b"\n"
    uploaded = await client.post(f"{ACCOUNT}/datasets/{name}:upload", files={"file": ("data.jsonl", content)})
    assert uploaded.status_code == 200, uploaded.text


def keep_alive(**more: object) -> dict[str, object]:
    """The body of a job that takes steps."""
    config = {"baseModel": "accounts/fireworks/models/tiny", "learningRate": 1e-4, "loraRank": 8, "maxContextLength": 4096}
    return {"displayName": "mine", "keepAlive": True, "trainingConfig": config, **more}


def one_shot(data: str = "d1", **more: object) -> dict[str, object]:
    """The body of a job of one step."""
    return {"dataset": f"accounts/default/datasets/{data}", "trainingConfig": {"baseModel": "tiny"}, **more}


async def create(client: httpx.AsyncClient, job_id: str, body: dict[str, object], **headers: str) -> httpx.Response:
    """Create a job."""
    return await client.post(JOBS, params={"rlorTrainerJobId": job_id}, json=body, headers=headers)


async def state(client: httpx.AsyncClient, job_id: str) -> str:
    """Without its prefix."""
    return str((await client.get(f"{JOBS}/{job_id}")).json()["state"]).removeprefix("JOB_STATE_")
