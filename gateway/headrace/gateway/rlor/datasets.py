"""Datasets of the RLOR API: create, list, get, upload (multipart, or by a signed address), validate, delete.

Guarantees: READY means that every line of every file was read and fits its format, and that all files are in the store; a dataset that is
READY never changes. Gives up: changing one after its creation; splitting, transforming and downloading.
"""

import uuid
from contextlib import suppress
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.gateway.body_limit import Body, takes
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import OvertakenError, Sealed
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.dataset_facts import Dataset, find_dataset, with_files
from headrace.gateway.rlor.dataset_uploads import (
    add_file,
    body_file,
    complete,
    file_name_of,
    multipart_file,
    remove_files,
    while_it_is,
    write_change,
    write_new,
)
from headrace.gateway.rlor.lists import Asked, listed
from headrace.gateway.rlor.masks import ReadMask, answered
from headrace.gateway.rlor.names import OwnAccount, check_id
from headrace.gateway.rlor.s3_datasets import check_url
from headrace.gateway.rlor.signed_uploads import SignedUpload, check_upload, upload_url
from headrace.gateway.rlor.wire import Empty, Int64, Status, Timestamp, Wire
from headrace.schemas.base import utc_now
from headrace.schemas.rlor_resources import DatasetFact, dataset_file_key, dataset_key

router = APIRouter(prefix="/v1/accounts/{account}/datasets", tags=["RLOR: datasets"])

Format = Literal["FORMAT_UNSPECIFIED", "CHAT", "COMPLETION", "RL"]
_MULTIPART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "required": ["file"], "properties": {"file": {"type": "string", "format": "binary"}}}
            }
        },
    }
}
_BYTES = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


class UserUploaded(Wire):
    """The dataset's files come from its user."""


class DatasetObject(Wire):
    """A dataset; what only the server sets is passed over on the way in."""

    name: str | None = None
    display_name: str = Field(default="", max_length=256)
    create_time: Timestamp | None = None
    update_time: Timestamp | None = None
    created_by: str | None = None
    state: Literal["STATE_UNSPECIFIED", "UPLOADING", "READY"] | None = None
    status: Status | None = None
    format: Format = "FORMAT_UNSPECIFIED"
    example_count: Int64 | None = Field(default=None, ge=0)
    external_url: str | None = None
    user_uploaded: UserUploaded | None = None


class CreateDataset(Wire):
    """Body of a creation."""

    dataset_id: str
    dataset: DatasetObject = DatasetObject()
    source_dataset_id: str = ""


class DatasetList(Wire):
    """A page of datasets."""

    datasets: list[DatasetObject]
    next_page_token: str | None = None
    total_size: int


class Uploaded(Wire):
    """What came in; this one answer has the names of OpenAI's file objects."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(serialization_alias="created_at")
    filename: str
    purpose: Literal["fine-tune"] = "fine-tune"


class UploadSizes(Wire):
    """Files that are to be uploaded."""

    filename_to_size: dict[str, Int64] = Field(min_length=1, max_length=1000)


class UploadAddresses(Wire):
    """Where to put each of them."""

    filename_to_signed_urls: dict[str, str]


@router.post("", response_model_exclude_none=True)
async def create_dataset(account: str, body: CreateDataset, caller: OwnAccount, gate: OpenGate) -> DatasetObject:
    """Create a dataset without files. 409 where there is one of this id."""
    dataset = check_id(body.dataset_id, "datasetId")
    asked = body.dataset
    if body.source_dataset_id:
        raise ProblemError(501, "sourceDatasetId: datasets are not made from others here: upload the file again")
    if asked.external_url:
        check_url(asked.external_url)
    tables = await gate.view.fresh()
    if dataset_key(account, dataset) in tables.facts:
        raise _exists(account, dataset)
    fact = DatasetFact(
        account=account,
        dataset=dataset,
        incarnation=uuid.uuid4().hex,
        owner=caller.owner,
        display_name=asked.display_name,
        format=None if asked.format == "FORMAT_UNSPECIFIED" else asked.format,
        declared_examples=asked.example_count,
        external_url=asked.external_url or None,
        state="READY" if asked.external_url else "UPLOADING",
    )
    try:
        await write_new(gate, fact)
    except OvertakenError:
        raise _exists(account, dataset) from None
    return _shown(Dataset(fact, []))


@router.get("", response_model=DatasetList)
async def list_datasets(
    account: str,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
    asked: Asked,
) -> JSONResponse:
    """Datasets of the account; 50 a page unless asked, 200 at most."""
    tables = await gate.view.fresh()
    facts = [fact for fact in tables.facts_under(dataset_key(account, "")) if isinstance(fact, DatasetFact)]
    rows = [_shown(with_files(tables, fact)) for fact in facts]
    return JSONResponse(listed(rows, DatasetObject, asked, key="datasets", account=account))


@router.post("/{dataset}:upload", openapi_extra=_MULTIPART)
@takes(Body.UPLOAD)
async def upload(account: str, dataset: str, request: Request, caller: OwnAccount, gate: OpenGate) -> Uploaded:  # noqa: ARG001 - checks
    """Upload the dataset's file, as part `file` of a multipart body. The dataset is READY then."""
    found = find_dataset(await gate.view.fresh(), account, dataset)
    async with multipart_file(request) as part:
        file = await add_file(gate, found, file_name_of(part.filename), part.file, completes=True)
    return Uploaded(id=dataset, bytes=file.size, created_at=int(file.stored_at.timestamp()), filename=file.name)


@router.post("/{dataset}:getUploadEndpoint")
async def get_upload_endpoint(
    *,
    account: str,
    dataset: str,
    body: UploadSizes,
    request: Request,
    caller: OwnAccount,  # noqa: ARG001 - checks
    gate: OpenGate,
) -> UploadAddresses:
    """Addresses to PUT files to, without a key; each is good for an hour. Call :validateUpload when all are there."""
    found = find_dataset(await gate.view.fresh(), account, dataset)
    settings = gate.settings.gateway
    for name, size in body.filename_to_size.items():
        if file_name_of(name) != name:
            raise ProblemError(
                400, f"filenameToSize: {name[:200]!r}: a file name has 1 to 128 letters, digits, dots, dashes and underscores"
            )
        if not 0 < size <= settings.max_upload_bytes:
            raise ProblemError(400, f"filenameToSize: {name}: {size} bytes: 1 to {settings.max_upload_bytes} are possible: split the file")
    names = tuple(sorted({*found.fact.expected, *body.filename_to_size}))
    if names != found.fact.expected and found.fact.state == "UPLOADING":
        await write_change(gate, found.fact.model_copy(update={"expected": names, "updated_at": utc_now()}), before=found.fact)
    base = str(request.base_url)
    urls = {name: upload_url(settings, base, found.fact, name, size) for name, size in body.filename_to_size.items()}
    return UploadAddresses(filename_to_signed_urls=urls)


@router.put("/{dataset}/uploads/{name}", openapi_extra=_BYTES)
@takes(Body.SIGNED_UPLOAD)
async def put_file(
    *, account: str, dataset: str, name: str, size: int, expires: int, signature: str, request: Request, gate: OpenGate
) -> Empty:
    """Upload one file to an address of :getUploadEndpoint; the address is the permission."""
    found = find_dataset(await gate.view.fresh(), account, dataset)
    check_upload(gate.settings.gateway, found.fact, SignedUpload(name=name, size=size, expires=expires, signature=signature))
    async with body_file(request, size) as spool:
        await add_file(gate, found, name, spool, completes=False)
    return Empty()


@router.post("/{dataset}:validateUpload")
async def validate_upload(account: str, dataset: str, caller: OwnAccount, gate: OpenGate, body: Empty | None = None) -> Empty:  # noqa: ARG001 - checks
    """All files are there: make the dataset READY."""
    await complete(gate, find_dataset(await gate.view.fresh(), account, dataset))
    return Empty()


@router.get("/{dataset}", response_model=DatasetObject)
async def get_dataset(account: str, dataset: str, caller: OwnAccount, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:  # noqa: ARG001 - checks
    """One dataset."""
    return answered(_shown(find_dataset(await gate.view.fresh(), account, dataset)), read_mask)


@router.delete("/{dataset}")
async def delete_dataset(account: str, dataset: str, caller: OwnAccount, gate: OpenGate) -> Empty:  # noqa: ARG001 - checks
    """Delete a dataset and its files."""
    key, topic = dataset_key(account, dataset), gate.settings.topic_names.gateway
    while True:
        found = find_dataset(await gate.view.fresh(), account, dataset)
        gone = [Sealed(topic=topic, key=name, value=None) for name in (key, *map(dataset_file_key, found.files))]
        with suppress(OvertakenError):  # a file has come in meanwhile, which is to go as well
            await gate.writer.commit(gone, is_in=lambda: key not in gate.view.tables.facts, turn=while_it_is(gate, found.fact))
            await remove_files(gate, list(found.files))
            return Empty()


def _exists(account: str, dataset: str) -> ProblemError:
    return ProblemError(409, f"accounts/{account}/datasets/{dataset} exists: delete it first, or take another datasetId")


def _shown(dataset: Dataset) -> DatasetObject:
    fact = dataset.fact
    count = dataset.examples if dataset.files or (fact.state == "READY" and not fact.external_url) else fact.declared_examples
    said = fact.format or next((file.format for file in dataset.files), None)
    return DatasetObject(
        name=dataset.name,
        display_name=fact.display_name,
        create_time=fact.created_at,
        update_time=fact.updated_at,
        created_by=fact.owner,
        state=fact.state,
        status=Status() if fact.fault is None else Status(code="INVALID_ARGUMENT", message=fact.fault),
        format=said or "FORMAT_UNSPECIFIED",
        example_count=count,
        external_url=fact.external_url,
        user_uploaded=None if fact.external_url else UserUploaded(),
    )
