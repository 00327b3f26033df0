"""Resource names of the RLOR API, such as `accounts/acme/datasets/d1`, and the records in topic `gateway` that resources are made of.

Guarantees: a resource of another account, or one whose project `rlor` the token does not cover, is 404, as if it did not exist.
Limitations: accounts share no resources.
"""

import re
from collections.abc import Sequence
from typing import Annotated, TypeVar

from fastapi import Depends
from pydantic import BaseModel

from headrace.core.models import model_id_of
from headrace.gateway.access import KnownCaller
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import Sealed, Turn
from headrace.gateway.problems import ProblemError
from headrace.gateway.tables import Tables

PROJECT = "rlor"
"""The project of all models that RLOR jobs train."""
_ID = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")
Record = TypeVar("Record", bound=BaseModel)


def resource_name(account: str, kind: str, id: str) -> str:  # noqa: A002 - the API's word
    """`accounts/<account>/<kind>/<id>`; `kind` as in the path: `datasets`, `models`, …"""
    return f"accounts/{account}/{kind}/{id}"


def resource_id(account: str, kind: str, name: str, field: str) -> str:
    """The id in a resource name of this account; a bare id is returned unchanged. `field` is the request's field, for the message.

    Raises ProblemError (400: a name of another kind; 404: a name of another account).
    """
    parts = name.split("/")
    if len(parts) == 1 and name:
        return name
    if len(parts) != 4 or parts[0] != "accounts" or parts[2] != kind or not parts[3]:
        raise ProblemError(400, f"{field}: {name[:200]!r} is no name of this kind: accounts/{account}/{kind}/<id> is needed")
    if parts[1] != account:
        raise ProblemError(404, f"{field}: {name[:200]} does not exist, or belongs to another account")
    return parts[3]


def check_id(id: str, field: str) -> str:  # noqa: A002 - the API's word
    """An id that a client chose, unchanged. Raises ProblemError (400: the id is not valid)."""
    if not _ID.fullmatch(id):
        raise ProblemError(400, f"{field}: {id[:80]!r}: an id has 1 to 63 characters of a-z, 0-9 and -, and neither begins nor ends with -")
    return id


def rlor_model_id(account: str, job_id: str) -> str:
    """The id of the model that an RLOR job trains: the model is the job."""
    return model_id_of(account, PROJECT, job_id)


def find_record(tables: Tables, key: str, kind: type[Record], name: str) -> Record:
    """A record by its key. Raises ProblemError (404: there is none; the message has the resource's `name`)."""
    record = tables.facts.get(key)
    if not isinstance(record, kind):
        raise ProblemError(404, f"{name[:300]} does not exist")
    return record


def records_under(tables: Tables, prefix: str, kind: type[Record]) -> list[Record]:
    """All records of a kind whose keys begin with `prefix`, in the order of their keys."""
    return [record for record in tables.facts_under(prefix) if isinstance(record, kind)]


async def delete_records(gate: Gate, keys: Sequence[str], turn: Turn | None = None) -> None:
    """Delete records in one transaction; raises as `LogWriter.commit`."""
    tombstones = [Sealed(topic=gate.settings.topic_names.gateway, key=key, value=None) for key in keys]
    await gate.writer.commit(tombstones, is_in=lambda: not any(key in gate.view.tables.facts for key in keys), turn=turn)


async def _own_account(account: str, caller: KnownCaller) -> str:
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"accounts/{account[:80]} does not exist, or the key is not one of it")
    return account


OwnAccount = Annotated[str, Depends(_own_account)]
"""The account in the path of a route, which is the caller's."""
