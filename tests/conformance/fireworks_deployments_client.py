"""The `fireworks-ai` client and its training SDK's deployment manager, unmodified, against a gateway, a worker and an engine of `dep-1`.

Run by `test_fireworks_deployments.py` in an environment of its own, with the address and a key. Prints a line for each check that held, and
ends with status 1 at the first that did not.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from fireworks import BadRequestError, Fireworks, NotFoundError
from fireworks.training.sdk.deployment import DeploymentConfig, DeploymentManager

ADDRESS, KEY, ACCOUNT, BASE_MODEL = sys.argv[1:5]
DEPLOYMENT, JOB = "dep-1", "loads"
BASE = f"accounts/fireworks/models/{BASE_MODEL}"

Found = TypeVar("Found")


def held(what: str) -> None:
    print(f"held: {what}", flush=True)


def name(kind: str, of: str) -> str:
    return f"accounts/{ACCOUNT}/{kind}/{of}"


def until(what: str, look: Callable[[], Found], enough: Callable[[Found], bool], seconds: float = 120) -> Found:
    ends = time.monotonic() + seconds
    while not enough(found := look()):
        assert time.monotonic() < ends, f"{what}: not within {seconds} s: {found}"
        time.sleep(0.2)
    return found


def model_of(api: Fireworks, model: str) -> Any:
    try:
        return api.models.get(model)
    except NotFoundError:
        return None


def makes_a_deployment(api: Fireworks, manager: DeploymentManager) -> None:
    config = DeploymentConfig(
        deployment_id=DEPLOYMENT,
        base_model=BASE,
        hot_load_transition_type="SYNC",
        accept_shapeless_risk=True,
        accelerator_type="NVIDIA_L4_24GB",
    )
    made = manager.create_or_get(config)
    assert (made.deployment_id, made.hot_load_transition_type) == (DEPLOYMENT, "SYNC"), made
    ready = manager.wait_for_ready(DEPLOYMENT, timeout_s=60, poll_interval_s=0)
    assert ready.state == "READY", ready
    found = api.deployments.get(DEPLOYMENT)
    assert (found.name, found.state, found.replica_count) == (name("deployments", DEPLOYMENT), "READY", 1), found
    assert (found.enable_hot_load, found.hot_load_bucket_type) == (True, "FW_HOSTED"), found
    assert [one.name for one in api.deployments.list(page_size=1)] == [found.name]
    assert manager.hotload_check_status(DEPLOYMENT, BASE)["replicas"][0]["loading_state"] == {"stage": "idle"}
    assert manager.warmup(name("deployments", DEPLOYMENT), max_retries=1)
    held("a deployment is created, READY with its engine, and answers with the base model")


def uploads_a_large_way(api: Fireworks, dataset: str) -> None:
    lines = [
        {
            "samples": [
                {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], "evals": {"score": float(n)}}
                for n, answer in enumerate(("a b c d", "x y"))
            ]
        }
        for prompt in ("a b c", "d e f")
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    api.datasets.create(dataset_id=dataset, dataset={"format": "RL", "user_uploaded": {}})
    urls = api.datasets.get_upload_endpoint(dataset, filename_to_size={"d.jsonl": str(len(content))}).filename_to_signed_urls
    assert urls is not None
    httpx.put(urls["d.jsonl"], content=content, trust_env=False).raise_for_status()
    api.datasets.validate_upload(dataset, body={})
    found = api.datasets.get(dataset)
    assert (found.state, found.example_count, found.format) == ("READY", "2", "RL"), found
    assert dataset in [(one.name or "").rpartition("/")[2] for one in api.datasets.list()]


def steps(api: Fireworks, model: str) -> Any:
    api.reinforcement_fine_tuning_steps.execute(JOB, dataset=name("datasets", "loads"), output_model=name("models", model))
    return until("the model", lambda: model_of(api, model), lambda found: found is not None and found.state == "READY")


def loads_a_lora(api: Fireworks) -> None:
    api.reinforcement_fine_tuning_steps.create(
        rlor_trainer_job_id=JOB,
        keep_alive=True,
        hot_load_deployment_id=DEPLOYMENT,
        training_config={"base_model": BASE, "learning_rate": 1e-2, "lora_rank": 8, "max_context_length": 64},
    )
    until("the job", lambda: api.reinforcement_fine_tuning_steps.get(JOB), lambda job: job.state == "JOB_STATE_RUNNING")
    uploads_a_large_way(api, "loads")
    held("a dataset comes by a signed address")
    made = steps(api, "loads-1")
    assert made.peft_details is not None
    assert (made.kind, made.peft_details.r) == ("HF_PEFT_ADDON", 8), made
    assert api.models.get(BASE_MODEL, account_id="fireworks").kind == "HF_BASE_MODEL"

    loaded = api.lora.load(model=name("models", "loads-1"), deployment=name("deployments", DEPLOYMENT), replace_merged_addon=True)
    assert loaded.name is not None
    at = loaded.name.rpartition("/")[2]
    until("the adapter", lambda: api.lora.get(at), lambda one: one.state == "DEPLOYED")
    assert [(one.model, one.deployment, one.state) for one in api.lora.list()] == [
        (name("models", "loads-1"), name("deployments", DEPLOYMENT), "DEPLOYED")
    ]
    refs = api.models.get("loads-1").deployed_model_refs
    assert refs is not None
    assert refs[0].state == "DEPLOYED", refs
    held("a LoRA is loaded on the deployment")
    for asked in ("models/loads-1", f"deployments/{DEPLOYMENT}"):
        answer = api.chat.completions.create(
            model=f"accounts/{ACCOUNT}/{asked}", messages=[{"role": "user", "content": "a b"}], max_tokens=4
        )
        assert answer.choices[0].message.content is not None, answer
    held("it answers by its own name and by its deployment's")
    api.lora.unload(at)
    until("the adapter", lambda: [one.state for one in api.lora.list()], lambda states: states == [])
    held("it is unloaded again")


def hot_loads_a_snapshot(api: Fireworks, manager: DeploymentManager) -> None:
    made = steps(api, "loads-2")
    identity = made.to_dict()["hotLoadIdentity"]
    manager.hotload(DEPLOYMENT, BASE, identity)
    assert manager.wait_for_hotload(DEPLOYMENT, BASE, identity, 60, poll_interval=1), manager.last_hotload_error_message
    replica = manager.hotload_check_status(DEPLOYMENT, BASE)["replicas"][0]
    assert replica["current_snapshot_identity"] == identity, replica
    assert replica["loading_state"] == {"stage": "completed", "target_snapshot_identity": identity}, replica
    manager.hotload(DEPLOYMENT, BASE, identity)  # a repeat
    assert manager.warmup(name("deployments", DEPLOYMENT), max_retries=1)
    held("a snapshot is hot-loaded, and the deployment warms up")


def serves_on_after_the_job(api: Fireworks, manager: DeploymentManager) -> None:
    api.reinforcement_fine_tuning_steps.delete(JOB)
    loaded = api.lora.load(model="loads-2", deployment=DEPLOYMENT, replace_merged_addon=True)
    assert loaded.name is not None
    at = loaded.name.rpartition("/")[2]
    until("the adapter", lambda: api.lora.get(at), lambda one: one.state == "DEPLOYED")
    assert manager.warmup(name("models", "loads-2"), max_retries=2, retry_interval_s=1)
    held("a model outlives its job")


def attaches_to_another_trainer(api: Fireworks, manager: DeploymentManager) -> None:
    other = "loads-other"
    api.reinforcement_fine_tuning_steps.create(rlor_trainer_job_id=other, keep_alive=True, training_config={"base_model": BASE_MODEL})
    trainer = name("rlorTrainerJobs", other)
    found = manager.reattach_trainer(DEPLOYMENT, base_model=BASE, trainer_job_name=trainer, timeout_s=30, hot_load_transition_type="ASYNC")
    assert (found.hot_load_trainer_job, found.hot_load_transition_type) == (trainer, "ASYNC"), found
    fault = ""
    try:
        api.reinforcement_fine_tuning_steps.create(
            keep_alive=True, hot_load_deployment_id=DEPLOYMENT, training_config={"base_model": BASE_MODEL}
        )
    except BadRequestError as error:
        fault = str(error)
    assert "hotLoadTrainerJob" in fault, fault
    held("a deployment is attached to another trainer")
    manager.scale_to_zero(DEPLOYMENT)
    manager.delete(DEPLOYMENT)
    assert manager.get(DEPLOYMENT) is None
    api.reinforcement_fine_tuning_steps.delete(other)
    held("it is scaled to zero and deleted")


def main() -> None:
    api = Fireworks(api_key=KEY, account_id=ACCOUNT, base_url=ADDRESS, _strict_response_validation=True)
    manager = DeploymentManager(api_key=KEY, base_url=ADDRESS)
    makes_a_deployment(api, manager)
    loads_a_lora(api)
    hot_loads_a_snapshot(api, manager)
    serves_on_after_the_job(api, manager)
    attaches_to_another_trainer(api, manager)
    print("all held", flush=True)


if __name__ == "__main__":
    main()
