"""Datasets that lie in S3, read with the credentials that a job brings."""

from pathlib import Path

import boto3
import orjson
from tests.gateway.conftest import gateway_settings, running
from tests.gateway.rlor_calls import ACCOUNT, create, one_shot, rl_line

from headrace.core.kafka import client_options
from headrace.core.local import LocalS3
from headrace.core.reading import read_to_end
from headrace.core.settings import S3Settings
from headrace.core.topic_admin import apply


async def test_a_dataset_in_s3_is_read_with_the_jobs_own_credentials_only(s3: LocalS3, kafka: str, topic_prefix: str, tmp_path: Path):
    access = {"aws_access_key_id": s3.access_key, "aws_secret_access_key": s3.secret_key}
    client = boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1", **access)
    folder = topic_prefix.rstrip(".")
    files = {"a.jsonl": [rl_line("1", [0, 1]), rl_line("2", [1, 0])], "b.jsonl": [b"", rl_line("3", [1, 0])], "notes.txt": [b"none"]}
    for name, lines in files.items():
        client.put_object(Bucket=s3.bucket, Key=f"{folder}/{name}", Body=b"\n".join(lines))
    client.put_object(Bucket=s3.bucket, Key=f"{folder}-bad/a.jsonl", Body=b"{")
    settings = gateway_settings(kafka, topic_prefix, tmp_path, secrets_key="k" * 32)
    own = S3Settings(endpoint_url=s3.endpoint_url, region="us-east-1")
    settings = settings.model_copy(update={"s3": own})
    await apply(settings)
    secret = {"credentialsSecret": orjson.dumps(access).decode()}
    wrong = {"credentialsSecret": orjson.dumps({**access, "aws_secret_access_key": "no"}).decode()}
    async with running(settings) as gateway:

        async def dataset(name: str, url: str) -> int:
            body = {"datasetId": name, "dataset": {"externalUrl": url, "format": "RL"}}
            return (await gateway.post(f"{ACCOUNT}/datasets", json=body)).status_code

        url = f"s3://{s3.bucket}/{folder}"
        for name, place in {"all": "/", "one": "/b.jsonl", "none": "/nothing/", "bad": "-bad/"}.items():
            assert await dataset(name, url + place) == 200
        for place in ("s3://", "s3://bucket", "s3://bucket/../x/"):
            assert await dataset("no", place) == 400
        found = (await gateway.get(f"{ACCOUNT}/datasets/all")).json()
        assert (found["state"], found["externalUrl"]) == ("READY", f"{url}/")

        for number, (name, config, message) in enumerate(
            (
                ("all", None, "give awsS3Config.credentialsSecret"),
                ("all", wrong, "can't be read with the job's awsS3Config"),
                ("none", secret, "has no file that ends with .jsonl"),
                ("bad", secret, "accounts/default/datasets/bad line 1"),
            )
        ):
            rejected = await create(gateway, f"no-{number}", one_shot(name, awsS3Config=config))
            assert (rejected.status_code, message in rejected.json()["message"]) == (400, True), rejected.text
            assert s3.secret_key not in rejected.text
        for name, groups in (("all", 3), ("one", 1)):
            made = await create(gateway, f"j-{name}", one_shot(name, awsS3Config=secret))
            assert made.status_code == 200, made.text
            assert made.json()["jobProgress"]["totalInputRequests"] == groups
    for topic in (settings.topic_names.gateway, settings.topic_names.trajectory_groups):
        for record in await read_to_end(client_options(settings.kafka, "test"), topic):
            assert s3.secret_key.encode() not in (record.value or b"")
