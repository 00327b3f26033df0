"""Datasets of the RLOR API: create, list, get, upload (multipart, or by a signed address), validate, delete.

Guarantees: READY means that every line of every file was read and fits its format, and that all files are in the store. A READY dataset
never changes.
Limitations: no change after the creation, no splits, no transformations, no downloads.
"""

import uuid
from contextlib import suppress
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from headrace.gateway.access import KnownCaller
from headrace.gateway.body_limit import Body, takes
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import OpenGate
from headrace.gateway.log_writer import OvertakenError, Turn
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.dataset_files import (
    Dataset,
    check_external_url,
    find_dataset,
    with_files,
)
from headrace.gateway.rlor.filters import ReadMask, resource_response
from headrace.gateway.rlor.lists import ListParameters, list_page
from headrace.gateway.rlor.resources import (
    Empty,
    Int64,
    ListPage,
    OwnAccount,
    Status,
    Timestamp,
    Wire,
    check_id,
    delete_records,
    records_under,
)
from headrace.gateway.rlor.uploads import (
    add_file,
    body_file,
    check_signature,
    complete,
    multipart_file,
    remove_files,
    safe_file_name,
    upload_url,
    while_unchanged,
    write_change,
)
from headrace.schemas.rlor import DatasetFact, dataset_file_key, dataset_key

router = APIRouter(prefix="/v1/accounts/{account}/datasets", tags=["RLOR: datasets"])

_BINARY = {"type": "string", "format": "binary"}
_FORM = {"schema": {"type": "object", "required": ["file"], "properties": {"file": _BINARY}}}
_MULTIPART = {"requestBody": {"required": True, "content": {"multipart/form-data": _FORM}}}
_BYTES = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": _BINARY}}}}


class UserUploaded(Wire):
    """The dataset's files come from its user."""


class DatasetObject(Wire):
    """A dataset; fields that only the server sets are ignored in requests."""

    name: str | None = None
    display_name: str = Field(default="", max_length=256)
    create_time: Timestamp | None = None
    update_time: Timestamp | None = None
    created_by: str | None = None
    state: Literal["STATE_UNSPECIFIED", "UPLOADING", "READY"] | None = None
    status: Status | None = None
    format: Literal["FORMAT_UNSPECIFIED", "CHAT", "COMPLETION", "RL"] = "FORMAT_UNSPECIFIED"
    example_count: Int64 | None = Field(default=None, ge=0)
    external_url: str | None = None
    user_uploaded: UserUploaded | None = None


class CreateDataset(Wire):
    """Body of a creation."""

    dataset_id: str
    dataset: DatasetObject = DatasetObject()
    source_dataset_id: str = ""


class DatasetList(ListPage):
    """A page of datasets."""

    datasets: list[DatasetObject]


class Uploaded(Wire):
    """An uploaded file; this one answer has the names of OpenAI's file objects."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(serialization_alias="created_at")
    filename: str
    purpose: Literal["fine-tune"] = "fine-tune"


class UploadSizes(Wire):
    """Files that will be uploaded."""

    filename_to_size: dict[str, Int64] = Field(min_length=1, max_length=1000)


class UploadAddresses(Wire):
    """The address of each of them."""

    filename_to_signed_urls: dict[str, str]


@router.post("", response_model_exclude_none=True)
async def create_dataset(account: OwnAccount, body: CreateDataset, caller: KnownCaller, gate: OpenGate) -> DatasetObject:
    """Create a dataset without files. 409 if it exists."""
    dataset = check_id(body.dataset_id, "datasetId")
    fields = body.dataset
    if body.source_dataset_id:
        raise ProblemError(501, "sourceDatasetId: datasets are not made from others here: upload the file again")
    if fields.external_url:
        check_external_url(fields.external_url)
    tables, key = await gate.view.fresh(), dataset_key(account, dataset)
    exists = ProblemError(409, f"accounts/{account}/datasets/{dataset} exists: delete it first, or take another datasetId")
    if key in tables.facts:
        raise exists
    record = DatasetFact(
        account=account,
        dataset=dataset,
        incarnation=uuid.uuid4().hex,
        owner=caller.owner,
        display_name=fields.display_name,
        format=None if fields.format == "FORMAT_UNSPECIFIED" else fields.format,
        declared_examples=fields.example_count,
        external_url=fields.external_url or None,
        state="READY" if fields.external_url else "UPLOADING",
    )
    try:
        await write_fact(gate, record, turn=Turn.while_unchanged(account, gate.view.tables.facts, {key: None}))
    except OvertakenError:
        raise exists from None
    return _resource(Dataset(record, []))


@router.get("", response_model=DatasetList)
async def list_datasets(account: OwnAccount, gate: OpenGate, parameters: ListParameters) -> JSONResponse:
    """Datasets of the account; 50 a page by default, 200 at most."""
    tables = await gate.view.fresh()
    rows = [_resource(with_files(tables, record)) for record in records_under(tables, dataset_key(account, ""), DatasetFact)]
    return JSONResponse(list_page(rows, DatasetObject, parameters, key="datasets", account=account))


@router.post("/{dataset}:upload", openapi_extra=_MULTIPART)
@takes(Body.UPLOAD)
async def upload(account: OwnAccount, dataset: str, request: Request, gate: OpenGate) -> Uploaded:
    """Upload the dataset's file, as part `file` of a multipart body. The dataset is READY then."""
    found = find_dataset(await gate.view.fresh(), account, dataset)
    async with multipart_file(request) as part:
        file = await add_file(gate, found, safe_file_name(part.filename), part.file, completes=True)
    return Uploaded(id=dataset, bytes=file.size, created_at=int(file.stored_at.timestamp()), filename=file.name)


@router.post("/{dataset}:getUploadEndpoint")
async def get_upload_endpoint(account: OwnAccount, dataset: str, body: UploadSizes, request: Request, gate: OpenGate) -> UploadAddresses:
    """Addresses to PUT files to without a key, each valid for an hour. Call :validateUpload after all uploads."""
    record = find_dataset(await gate.view.fresh(), account, dataset).record
    settings = gate.settings.gateway
    for name, size in body.filename_to_size.items():
        if safe_file_name(name) != name:
            raise ProblemError(
                400, f"filenameToSize: {name[:200]!r}: a file name has 1 to 128 letters, digits, dots, dashes and underscores"
            )
        if not 0 < size <= settings.max_upload_bytes:
            raise ProblemError(400, f"filenameToSize: {name}: {size} bytes: 1 to {settings.max_upload_bytes} are possible: split the file")
    names = tuple(sorted({*record.expected, *body.filename_to_size}))
    if names != record.expected and record.state == "UPLOADING":
        await write_change(gate, record, expected=names)
    base = str(request.base_url)
    urls = {name: upload_url(settings, base, record, name, size) for name, size in body.filename_to_size.items()}
    return UploadAddresses(filename_to_signed_urls=urls)


@router.put("/{dataset}/uploads/{name}", openapi_extra=_BYTES)
@takes(Body.SIGNED_UPLOAD)
async def put_file(
    *, account: str, dataset: str, name: str, size: int, expires: int, signature: str, request: Request, gate: OpenGate
) -> Empty:
    """Upload one file to an address of :getUploadEndpoint; the address is the permission."""
    found = find_dataset(await gate.view.fresh(), account, dataset)
    check_signature(gate.settings.gateway, found.record, name, size=size, expires=expires, signature=signature)
    async with body_file(request, size) as spool:
        await add_file(gate, found, name, spool, completes=False)
    return Empty()


@router.post("/{dataset}:validateUpload")
async def validate_upload(account: OwnAccount, dataset: str, gate: OpenGate, body: Empty | None = None) -> Empty:  # noqa: ARG001 - documents it
    """Make the dataset READY after all uploads."""
    await complete(gate, find_dataset(await gate.view.fresh(), account, dataset))
    return Empty()


@router.get("/{dataset}", response_model=DatasetObject)
async def get_dataset(account: OwnAccount, dataset: str, gate: OpenGate, read_mask: ReadMask = "") -> JSONResponse:
    """One dataset."""
    return resource_response(_resource(find_dataset(await gate.view.fresh(), account, dataset)), read_mask)


@router.delete("/{dataset}")
async def delete_dataset(account: OwnAccount, dataset: str, gate: OpenGate) -> Empty:
    """Delete a dataset and its files."""
    while True:
        found = find_dataset(await gate.view.fresh(), account, dataset)
        keys = [dataset_key(account, dataset), *map(dataset_file_key, found.files)]
        with suppress(OvertakenError):  # a file was added meanwhile, which must go too
            await delete_records(gate, keys, while_unchanged(gate, found.record))
            await remove_files(gate, list(found.files))
            return Empty()


def _resource(dataset: Dataset) -> DatasetObject:
    record = dataset.record
    is_counted = dataset.files or (record.state == "READY" and not record.external_url)
    return DatasetObject(
        name=dataset.name,
        display_name=record.display_name,
        create_time=record.created_at,
        update_time=record.updated_at,
        created_by=record.owner,
        state=record.state,
        status=Status() if record.fault is None else Status(code="INVALID_ARGUMENT", message=record.fault),
        format=record.format or next((file.format for file in dataset.files), "FORMAT_UNSPECIFIED"),
        example_count=dataset.examples if is_counted else record.declared_examples,
        external_url=record.external_url,
        user_uploaded=None if record.external_url else UserUploaded(),
    )
