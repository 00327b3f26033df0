"""The real `fireworks-ai` client, and its training SDK, against a gateway, a worker and an engine.

Run by `test_fireworks.py` in an environment of its own, with the address, a key, its account and the name of a base model. Prints a line
for each check that held, and ends with status 1 at the first that did not. The client is unmodified and validates every answer strictly.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fireworks
from fireworks import Fireworks
from fireworks.training.sdk.trainer import TrainerJobConfig, TrainerJobManager

ADDRESS, KEY, ACCOUNT, BASE_MODEL = sys.argv[1:5]
STEPS = 3
PROMPTS = ("a b c", "d e f", "g h", "i j k")
ANSWERS = ("a b c d", "x y", "k l", "m n o p")

Found = TypeVar("Found")


def held(what: str) -> None:
    print(f"held: {what}", flush=True)


def client(**more: Any) -> Fireworks:
    return Fireworks(api_key=KEY, account_id=ACCOUNT, base_url=ADDRESS, _strict_response_validation=True, **more)


def name(kind: str, of: str) -> str:
    return f"accounts/{ACCOUNT}/{kind}/{of}"


def until(what: str, look: Callable[[], Found], enough: Callable[[Found], bool], seconds: float = 120) -> Found:
    """Poll until the value is as expected, as every client of a job does."""
    ends = time.monotonic() + seconds
    while not enough(found := look()):
        assert time.monotonic() < ends, f"{what}: not within {seconds} s: {found}"
        time.sleep(0.2)
    return found


def rejected(kind: type[Exception], ask: Callable[[], object], *said: str) -> None:
    found: Exception | None = None
    try:
        ask()
    except kind as error:
        found = error
    assert found is not None, f"nothing was raised, {kind.__name__} was expected"
    assert all(text in str(found) for text in said), found


def model_of(api: Fireworks, model: str) -> Any:
    """The model; None while its step has not begun."""
    try:
        return api.models.get(model)
    except fireworks.NotFoundError:
        return None


def until_over(api: Fireworks, job: str) -> Any:
    """The job, once it has ended."""
    running = {"JOB_STATE_PENDING", "JOB_STATE_RUNNING"}
    return until(job, lambda: api.reinforcement_fine_tuning_steps.get(job), lambda found: found.state not in running)


def rollouts(step: int) -> bytes:
    """A dataset of one step: every prompt with its answers, one of which has a reward."""
    lines = []
    for prompt in PROMPTS:
        samples = [
            {
                "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
                "evals": {"score": float(n == step % len(ANSWERS))},
            }
            for n, answer in enumerate(ANSWERS)
        ]
        lines.append(json.dumps({"samples": samples}))
    return ("\n".join(lines) + "\n").encode()


def upload(api: Fireworks, dataset: str, content: bytes) -> None:
    made = api.datasets.create(
        dataset_id=dataset,
        dataset={"display_name": dataset, "example_count": str(content.count(b"\n")), "format": "RL", "user_uploaded": {}},
    )
    assert (made.name, made.state) == (name("datasets", dataset), "UPLOADING"), made
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(content)
        file.flush()
        api.datasets.upload(dataset, file=Path(file.name))
    ready = until("the dataset", lambda: api.datasets.get(dataset), lambda found: found.state == "READY")
    assert ready.example_count == str(content.count(b"\n")), ready


def keeps_a_job_alive_over_steps(api: Fireworks) -> None:
    steps = api.reinforcement_fine_tuning_steps
    rejected(fireworks.NotFoundError, lambda: steps.delete("keep"), "404")
    made = steps.create(
        rlor_trainer_job_id="keep",
        display_name="kept alive",
        keep_alive=True,
        training_config={
            "base_model": f"accounts/fireworks/models/{BASE_MODEL}",
            "learning_rate": 1e-2,
            "lora_rank": 8,
            "max_context_length": 64,
            "batch_size": 32768,
        },
        extra_body={"inactivityTimeout": "1800s", "useReservation": True},
    )
    assert made.name == name("rlorTrainerJobs", "keep"), made
    assert made.state in {"JOB_STATE_PENDING", "JOB_STATE_RUNNING"}, made
    rejected(
        fireworks.ConflictError,
        lambda: steps.create(rlor_trainer_job_id="keep", keep_alive=True, training_config={"base_model": BASE_MODEL}),
        "exists",
    )
    until("the job", lambda: steps.get("keep"), lambda job: job.state == "JOB_STATE_RUNNING")
    held("a keep-alive job is created, and waits in RUNNING")

    for step in range(STEPS):
        dataset, model = f"rollouts-{step}", f"keep-{step}"
        upload(api, dataset, rollouts(step))
        rejected(fireworks.NotFoundError, lambda model=model: api.models.get(model), "404")
        steps.execute("keep", dataset=name("datasets", dataset), output_model=name("models", model))
        ready = until("the model", lambda model=model: model_of(api, model), lambda found: found is not None and found.state == "READY")
        assert ready is not None
        assert ready.name == name("models", model), ready
        assert ready.kind == "HF_PEFT_ADDON", ready
        job = steps.get("keep")
        assert job.state == "JOB_STATE_RUNNING", job
        assert job.job_progress is not None
        assert job.job_progress.percent == 100, job
        api.datasets.delete(dataset)
        rejected(fireworks.NotFoundError, lambda dataset=dataset: api.datasets.get(dataset), "404")
    assert job.accelerator_seconds, job
    held(f"{STEPS} steps: upload, executeTrainStep, the model READY")
    rejected(
        fireworks.ConflictError,
        lambda: steps.execute("keep", dataset=name("datasets", "rollouts-0"), output_model=name("models", "keep-0")),
        "exists",
    )
    rejected(
        fireworks.NotFoundError, lambda: steps.execute("keep", dataset="rollouts-0", output_model="keep-9"), "rollouts-0 does not exist"
    )


def lists_cancels_resumes_and_deletes_jobs(api: Fireworks) -> None:
    steps = api.reinforcement_fine_tuning_steps
    for n in range(3):
        steps.create(rlor_trainer_job_id=f"list-{n}", keep_alive=True, training_config={"base_model": BASE_MODEL})
    masked = steps.get("list-1", read_mask="name,state")
    assert masked.name == name("rlorTrainerJobs", "list-1"), masked
    assert masked.display_name is None, masked
    found = [job.name for job in steps.list(page_size=2, filter='name="*list-*"', order_by="create_time desc", read_mask="*")]
    assert found == [name("rlorTrainerJobs", f"list-{n}") for n in (2, 1, 0)], found
    assert len([*steps.list(page_size=500)]) >= 4
    held("get and list with mask, filter, order and pages")
    steps.cancel("list-0", body={})
    assert steps.get("list-0").state == "JOB_STATE_CANCELLED"
    assert until("the job", lambda: steps.resume("list-0", body={}), lambda job: job.state == "JOB_STATE_RUNNING").name is not None
    for n in range(3):
        steps.delete(f"list-{n}")
        deleted = steps.get(f"list-{n}")
        assert (deleted.state, deleted.completed_time is not None) == ("JOB_STATE_DELETING", True), deleted
    assert [job.name for job in steps.list(filter='name="*list-*"')] == []
    held("cancel, resume and delete")

    def create(**more: Any) -> Callable[[], object]:
        return lambda: steps.create(**more)

    base = {"base_model": BASE_MODEL}
    rejected(fireworks.BadRequestError, create(), "exactly one says what to begin with")
    rejected(fireworks.BadRequestError, create(keep_alive=True, training_config={**base, "lora_rank": 5}), "loraRank")
    loss: Any = {"method": "DAPO", "kl_beta": 0.1}
    rejected(fireworks.BadRequestError, create(keep_alive=True, training_config=base, loss_config=loss), "loss_config.kl_beta must be 0")
    began = time.monotonic()
    rejected(fireworks.InternalServerError, create(service_mode=True, training_config={**base, "lora_rank": 0}), "501")
    assert time.monotonic() - began < 5, "501 was tried again"
    held("rejections are the client's own errors, without retries")


def runs_a_job_of_one_step_and_continues_from_it(api: Fireworks) -> None:
    steps = api.reinforcement_fine_tuning_steps
    upload(api, "shots", rollouts(0))
    config: Any = {
        "base_model": BASE_MODEL,
        "output_model": "shot-1",
        "lora_rank": 8,
        "max_context_length": 64,
        "batch_size": 128,  # several updates in each of two epochs
        "epochs": 2,
        "learning_rate": 1e-3,
    }
    steps.create(
        rlor_trainer_job_id="shot-1",
        dataset=name("datasets", "shots"),
        evaluation_dataset=name("datasets", "shots"),
        reward_weights=["score=1.0"],
        loss_config={"method": "GRPO", "kl_beta": 0.001},
        training_config=config,
    )
    done: Any = until_over(api, "shot-1")
    assert (done.state, done.status.code) == ("JOB_STATE_COMPLETED", "OK"), done
    assert done.completed_time is not None
    assert (done.job_progress.percent, done.job_progress.epoch) == (100, 1), done
    assert done.metrics["updates"] > 1, done.metrics
    assert done.evaluation, done
    assert api.models.get("shot-1").state == "READY"
    held(f"a job of one step, two epochs and several updates, evaluated ({done.evaluation}), ends COMPLETED and its model is READY")
    steps.create(
        rlor_trainer_job_id="shot-2",
        dataset=name("datasets", "shots"),
        training_config={"warm_start_from": name("models", "shot-1"), "output_model": name("models", "shot-2")},
    )
    done = until_over(api, "shot-2")
    assert done.state == "JOB_STATE_COMPLETED", done
    assert done.training_config.epochs == 2, done
    assert api.models.get("shot-2").state == "READY"
    held("the next one continues from it")


def scores_without_training_and_trains_against_it(api: Fireworks) -> None:
    steps = api.reinforcement_fine_tuning_steps
    config: Any = {"base_model": BASE_MODEL, "lora_rank": 8, "max_context_length": 64}
    shots = name("datasets", "shots")
    steps.create(rlor_trainer_job_id="reference", dataset=shots, forward_only=True, training_config=config)
    done: Any = until_over(api, "reference")
    assert done.state == "JOB_STATE_COMPLETED", done
    assert done.logprobs["uri"], done
    loss: Any = {"method": "GRPO", "kl_beta": 0.01, "kl_reference_job": name("rlorTrainerJobs", "reference")}
    steps.create(rlor_trainer_job_id="against", dataset=shots, loss_config=loss, training_config=config)
    done = until_over(api, "against")
    assert done.state == "JOB_STATE_COMPLETED", done
    assert "kl_reference" in done.metrics, done.metrics
    held("forwardOnly writes log-probabilities, and another job trains against them")


def speaks_with_the_training_sdk(api: Fireworks) -> None:
    manager = TrainerJobManager(api_key=KEY, base_url=ADDRESS)
    assert manager.account_id == ACCOUNT
    assert manager.try_get("missing") is None
    assert manager.get("keep")["state"] == "JOB_STATE_RUNNING"
    rows = manager.list_checkpoints("keep")
    assert [row["name"] for row in rows] == [f"{name('rlorTrainerJobs', 'keep')}/checkpoints/keep-v{n + 1}" for n in range(STEPS)], rows
    assert all(row["promotable"] for row in rows)
    base = f"accounts/fireworks/models/{BASE_MODEL}"
    promoted = manager.promote_checkpoint(name=rows[0]["name"], output_model_id="best", base_model=base)
    assert (promoted["state"], promoted["kind"]) == ("READY", "HF_PEFT_ADDON"), promoted
    assert api.models.get("best").state == "READY"
    held("the training SDK lists and promotes checkpoints")
    service = TrainerJobConfig(base_model=base, max_context_length=64, accelerator_type="NVIDIA_H100_80GB")
    rejected(Exception, lambda: manager.create(service), "serviceMode is not built yet")
    held("its service mode is rejected at once, with the reason")


def speaks_with_either_client(api: Fireworks) -> None:
    wrong = Fireworks(api_key="wrong", account_id=ACCOUNT, base_url=ADDRESS, max_retries=0)
    rejected(fireworks.AuthenticationError, wrong.reinforcement_fine_tuning_steps.list, "401")
    rejected(fireworks.NotFoundError, lambda: api.reinforcement_fine_tuning_steps.list(account_id="other"), "404")
    held("keys and accounts")


def main() -> None:
    api = client()
    speaks_with_either_client(api)
    keeps_a_job_alive_over_steps(api)
    lists_cancels_resumes_and_deletes_jobs(api)
    runs_a_job_of_one_step_and_continues_from_it(api)
    scores_without_training_and_trains_against_it(api)
    speaks_with_the_training_sdk(api)
    api.reinforcement_fine_tuning_steps.delete("keep")
    print("all held", flush=True)


if __name__ == "__main__":
    main()
