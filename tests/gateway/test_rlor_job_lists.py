"""Lists of RLOR jobs: filter, order, masks and pages."""

import httpx
from tests.gateway.rlor_calls import JOBS, create, keep_alive


async def test_lists_are_filtered_ordered_masked_and_paged(gateway: httpx.AsyncClient):
    for n in range(5):
        await create(gateway, f"j{n}", keep_alive(displayName=f"number {9 - n}", nodeCount=1 + n % 2))

    async def names(**params: object) -> list[str]:
        answer = await gateway.get(JOBS, params=params)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return [job["name"].rpartition("/")[2] for job in answer.json()["rlorTrainerJobs"]]

    everything = ["j0", "j1", "j2", "j3", "j4"]
    assert await names() == everything
    assert await names(pageSize=500) == everything
    assert await names(filter='state="JOB_STATE_PENDING" AND node_count = 2') == ["j1", "j3"]
    assert await names(orderBy="display_name") == everything[::-1]
    assert await names(orderBy="node_count desc, create_time desc") == ["j3", "j1", "j4", "j2", "j0"]
    seen, token = [], ""
    while True:
        page = (await gateway.get(JOBS, params={"pageSize": 2, "pageToken": token, "orderBy": "name desc", "readMask": "name"})).json()
        assert page["totalSize"] == 5
        assert all(job.keys() == {"name"} for job in page["rlorTrainerJobs"])
        seen += [job["name"].rpartition("/")[2] for job in page["rlorTrainerJobs"]]
        if not (token := page.get("nextPageToken", "")):
            break
        other = await gateway.get(JOBS, params={"pageSize": 2, "pageToken": token})
        assert (other.status_code, "pageToken" in other.json()["message"]) == (400, True)
    assert seen == everything[::-1]
    masked = (await gateway.get(f"{JOBS}/j1", params={"readMask": "state,training_config.base_model,trainingConfig.loraRank"})).json()
    assert masked == {"state": "JOB_STATE_PENDING", "trainingConfig": {"baseModel": "accounts/fireworks/models/tiny", "loraRank": 8}}
    assert (await gateway.get(f"{JOBS}/j1", params={"readMask": "*"})).json() == (await gateway.get(f"{JOBS}/j1")).json()
    for params, message in (
        ({"filter": "sate = 1"}, "filter: position 1: 'sate'"),
        ({"orderBy": "name down"}, "orderBy: 'name down'"),
        ({"orderBy": "x"}, "orderBy: 'x'"),
        ({"readMask": "name,x"}, "readMask: 'x'"),
        ({"pageSize": -1}, "pageSize"),
        ({"pageToken": "zz"}, "pageToken"),
    ):
        wrong = await gateway.get(JOBS, params=params)
        assert (wrong.status_code, message in wrong.json()["message"]) == (400, True), wrong.text
