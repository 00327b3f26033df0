"""Datasets over HTTP: accepted and rejected files, with the reason, and the objects left in the store."""

import asyncio
from pathlib import Path

import httpx
import orjson
import pytest
from tests.gateway.conftest import gateway_settings, running

from headrace.core.settings import Settings
from headrace.core.store import ObjectNotFoundError, open_store
from headrace.core.store.keys import STORE_FILE
from headrace.core.topic_admin import apply
from headrace.gateway.log_view import LogView
from headrace.gateway.rlor.dataset_files import find_dataset, read_lines
from headrace.gateway.tokens import create_token

DATASETS = "/v1/accounts/default/datasets"


def rl_line(*scores: float, text: str = "yes") -> bytes:
    prompt = {"role": "user", "content": "Is it?"}
    samples = [{"messages": [prompt, {"role": "assistant", "content": f"{text} {n}"}], "evals": {"score": s}} for n, s in enumerate(scores)]
    return orjson.dumps({"samples": samples})


GOOD = b"\n".join([rl_line(0, 1), rl_line(1, 0)]) + b"\n"


async def create(client: httpx.AsyncClient, dataset: str, kind: str = "RL", **more: object) -> httpx.Response:
    body = {"datasetId": dataset, "dataset": {"displayName": "D", "exampleCount": "2", "format": kind, "userUploaded": {}, **more}}
    return await client.post(DATASETS, json=body)


async def upload(client: httpx.AsyncClient, dataset: str, content: bytes, name: str = "d.jsonl") -> httpx.Response:
    return await client.post(f"{DATASETS}/{dataset}:upload", files={"file": (name, content)})


def stored(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "store").rglob("*") if path.is_file() and path.name != STORE_FILE)


async def test_a_dataset_is_created_uploaded_read_and_deleted(gateway: httpx.AsyncClient, settings: Settings, tmp_path: Path):
    made = (await create(gateway, "d1")).json()
    assert made["name"] == "accounts/default/datasets/d1"
    assert (made["state"], made["exampleCount"], made["format"], made["userUploaded"]) == ("UPLOADING", "2", "RL", {})
    assert made["createTime"].endswith("Z")
    again = await create(gateway, "d1")
    assert (again.status_code, again.json()["code"], again.headers["x-should-retry"]) == (409, 6, "false")
    assert (await create(gateway, "Bad_Id")).status_code == 400
    assert (await create(gateway, "d2", exampleCount=str(2**63))).status_code == 400
    assert (await create(gateway, "d2", displayName=None, exampleCount=None)).json()["displayName"] == ""

    content = b"\xef\xbb\xbf" + rl_line(0, 1) + b"\r\n\r\n" + rl_line(1, 0)  # a mark, CRLF, an empty line, no end
    answer = (await upload(gateway, "d1", content)).json()
    assert (answer["bytes"], answer["filename"], answer["object"]) == (len(content), "d.jsonl", "file")
    found = (await gateway.get(f"{DATASETS}/d1")).json()
    assert (found["state"], found["exampleCount"], found["status"]["code"]) == ("READY", "2", "OK")
    async with running(settings) as other:  # another gateway has it, too
        assert (await other.get(f"{DATASETS}/d1")).json() == found
    assert (await upload(gateway, "d1", content)).status_code == 200  # a repeat
    for more in (await upload(gateway, "d1", GOOD), await upload(gateway, "d1", content, "2.jsonl")):
        assert (more.status_code, more.json()["code"]) == (400, 9)

    assert [path.suffix for path in stored(tmp_path)] == [".jsonl"]
    assert (await gateway.delete(f"{DATASETS}/d1")).json() == {}
    assert stored(tmp_path) == []
    assert (await gateway.get(f"{DATASETS}/d1")).status_code == 404
    assert (await gateway.delete(f"{DATASETS}/d1")).status_code == 404
    assert (await create(gateway, "d1")).json()["state"] == "UPLOADING"


BAD: list[tuple[str, bytes, str]] = [
    ("RL", GOOD + b'{"samples": [', "line 3: not JSON"),
    (
        "RL",
        GOOD + b'{"samples": [' + b"[]," * 300_000 + b"[]]}",
        "line 3 holds more than 500000 brackets and commas: split it",
    ),
    ("RL", GOOD + b'{"samples": "' + b"x" * 2**24, "line 3 has more than 16777216 bytes"),
    ("RL", GOOD + b'{"samples": [', "was the file cut off?"),
    ("RL", GOOD + b"\n\nnone\n", "line 5: not JSON"),
    ("RL", GOOD + rl_line(0, 1, 1), "line 3 has 3 samples, those before have 2"),
    ("RL", rl_line(1), "line 1: samples"),
    ("RL", GOOD.replace(b'"score":1', b'"score":true'), "evals.score: a metric is a JSON number, not bool"),
    ("RL", GOOD.replace(b'"score":1', b'"score":"high"'), "not str"),
    ("RL", GOOD.replace(b'"evals":{"score":1}', b'"evals":{}'), "no metric"),
    ("RL", GOOD.replace(b"assistant", b"user"), "must be the last"),
    ("RL", b'{"messages": [{"role": "user", "content": "a"}]}', "line 1: samples: Field required"),
    ("CHAT", GOOD, "line 1: messages: Field required"),
    ("FORMAT_UNSPECIFIED", b"[1]", "line 1 is no example"),
    ("RL", b"\xff\xfe{}", "line 1: not JSON"),
    ("RL", b"\n\r\n", "every line is empty"),
]


async def test_an_invalid_file_is_rejected_with_its_line_and_leaves_nothing(gateway: httpx.AsyncClient, tmp_path: Path):
    for number, (kind, content, message) in enumerate(BAD):
        assert (await create(gateway, f"bad-{number}", kind)).status_code == 200
        rejected = await upload(gateway, f"bad-{number}", content)
        assert rejected.status_code == 400
        assert message in rejected.json()["message"], rejected.json()
        assert stored(tmp_path) == []
        shown = (await gateway.get(f"{DATASETS}/bad-{number}")).json()
        assert (shown["state"], shown["status"]) == ("UPLOADING", {"code": "INVALID_ARGUMENT", "message": rejected.json()["message"]})


async def test_an_undeclared_format_is_that_of_the_first_line(gateway: httpx.AsyncClient):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = {"RL": rl_line(0, 1), "CHAT": orjson.dumps({"messages": talk}), "COMPLETION": b'{"prompt": "a", "completion": "b"}'}
    for kind, line in lines.items():
        await create(gateway, kind.lower(), "FORMAT_UNSPECIFIED")
        assert (await upload(gateway, kind.lower(), line + b"\n" + line)).status_code == 200
        assert (await gateway.get(f"{DATASETS}/{kind.lower()}")).json()["format"] == kind


async def test_signed_addresses_accept_files_without_a_key(kafka: str, topic_prefix: str, tmp_path: Path):
    _, key = create_token(tmp_path / "tokens", account="default", owner="ada@example.org")
    settings = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens", secrets_key="s" * 32)
    await apply(settings)
    async with running(settings) as anybody, running(settings) as second:
        client = httpx.AsyncClient(base_url=anybody.base_url, headers={"x-api-key": key}, trust_env=False)
        await create(client, "d")
        sizes = {"b.jsonl": str(len(GOOD)), "a.jsonl": str(len(GOOD) + 1)}
        urls = (await client.post(f"{DATASETS}/d:getUploadEndpoint", json={"filenameToSize": sizes})).json()["filenameToSignedUrls"]
        early = await client.post(f"{DATASETS}/d:validateUpload", json={})
        assert (early.status_code, "a.jsonl, b.jsonl" in early.json()["message"]) == (400, True)

        url = httpx.URL(urls["b.jsonl"])
        assert (await anybody.put(url, content=GOOD)).json() == {}
        assert (await anybody.put(url, content=GOOD[:-1])).status_code == 400
        assert (await anybody.put(url.copy_set_param("size", len(GOOD) - 1), content=GOOD[:-1])).status_code == 403
        assert (await anybody.put(httpx.URL(urls["a.jsonl"].replace("a.jsonl", "c.jsonl")), content=b"\n" + GOOD)).status_code == 403
        elsewhere = str(urls["a.jsonl"]).replace(str(anybody.base_url).rstrip("/"), str(second.base_url).rstrip("/"))
        assert (await second.put(elsewhere, content=b"\n" + GOOD)).json() == {}  # a gateway with the same secret takes it

        assert (await client.post(f"{DATASETS}/d:validateUpload", json={})).json() == {}
        found = (await client.get(f"{DATASETS}/d")).json()
        assert (found["state"], found["exampleCount"]) == ("READY", "4")
        await client.aclose()


async def test_lines_are_read_as_they_were_uploaded_file_by_file(settings: Settings):
    async with running(settings) as client:
        await create(client, "d")
        for name, lines in {"2.jsonl": GOOD, "1.jsonl": b"\n" + rl_line(1, 1)}.items():
            sizes = {"filenameToSize": {name: str(len(lines))}}
            urls = (await client.post(f"{DATASETS}/d:getUploadEndpoint", json=sizes)).json()["filenameToSignedUrls"]
            await client.put(urls[name], content=lines)
        await client.post(f"{DATASETS}/d:validateUpload")
        async with LogView(settings) as view:
            found = find_dataset(view.tables, "default", "d")
        store = open_store(settings.store.url, settings.s3)
        assert list(read_lines(store, found.files)) == [rl_line(1, 1), rl_line(0, 1), rl_line(1, 0)]
        await client.delete(f"{DATASETS}/d")
        with pytest.raises(ObjectNotFoundError):
            list(read_lines(store, found.files))


async def test_an_upload_that_breaks_off_leaves_nothing(gateway: httpx.AsyncClient, tmp_path: Path):
    await create(gateway, "d")
    host, port = gateway.base_url.host, gateway.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    headers = f"Host: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 5000\r\n\r\n"
    head = f"POST {DATASETS}/d:upload HTTP/1.1\r\n{headers}"
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="d.jsonl"\r\n\r\n' + GOOD
    writer.write(head.encode() + part)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert await reader.read() == b""
    cut = b"--x\r\n" + part.partition(b"\r\n")[2]  # it has its length, and no end of the part
    rejected = await gateway.post(f"{DATASETS}/d:upload", content=cut, headers={"content-type": "multipart/form-data; boundary=x"})
    assert rejected.status_code == 400
    assert (await gateway.get(f"{DATASETS}/d")).json()["state"] == "UPLOADING"
    assert stored(tmp_path) == []


async def test_datasets_are_listed_by_name_page_by_page(gateway: httpx.AsyncClient):
    for name in ("c", "a", "b"):
        await create(gateway, name)
    first = (await gateway.get(DATASETS, params={"pageSize": 2})).json()
    assert [d["name"].rpartition("/")[2] for d in first["datasets"]] == ["a", "b"]
    assert first["totalSize"] == 3
    await gateway.delete(f"{DATASETS}/a")
    last = (await gateway.get(DATASETS, params={"pageSize": 2, "pageToken": first["nextPageToken"]})).json()
    assert [d["name"].rpartition("/")[2] for d in last["datasets"]] == ["c"]
    assert "nextPageToken" not in last
    assert (await gateway.get(DATASETS, params={"pageToken": "zz"})).status_code == 400


async def test_missing_features_are_501_and_other_accounts_404(gateway: httpx.AsyncClient):
    for url in ("gs://b/x", "https://b/x"):
        rejected = await create(gateway, "d", externalUrl=url)
        assert (rejected.status_code, rejected.json()["code"], rejected.headers["x-should-retry"]) == (501, 12, "false")
    assert (await gateway.get("/v1/accounts/other/datasets")).status_code == 404
    assert (await gateway.post(f"{DATASETS}/none:upload", files={"file": ("d", GOOD)})).status_code == 404
