"""Resource names of the RLOR API, such as `accounts/acme/datasets/d1`, and whose they are.

Guarantees: what belongs to another account, or to a token that does not cover project `rlor`, is 404, as if it were not there. Gives up:
resources that accounts share.
"""

import re
from typing import Annotated

from fastapi import Depends

from headrace.core.models import model_id_of
from headrace.gateway.access import Caller, KnownCaller
from headrace.gateway.problems import ProblemError

PROJECT = "rlor"
"""The project of all models that RLOR jobs train."""
_ID = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")


def name_of(account: str, kind: str, id: str) -> str:  # noqa: A002 - the API's word
    """`accounts/<account>/<kind>/<id>`; `kind` as in the path: `datasets`, `models`, …"""
    return f"accounts/{account}/{kind}/{id}"


def id_in(account: str, kind: str, name: str, field: str) -> str:
    """The id out of a resource name of this account, or a bare id as it is.

    Args:
        account: The caller's.
        kind: As in `name_of`.
        name: What a field holds.
        field: Which, for the message.

    Raises:
        ProblemError: 400: a name of another kind; 404: one of another account.
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
    """An id that a client chose.

    Raises:
        ProblemError: 400.
    """
    if not _ID.fullmatch(id):
        raise ProblemError(400, f"{field}: {id[:80]!r}: an id has 1 to 63 characters of a-z, 0-9 and -, and neither begins nor ends with -")
    return id


def rlor_model_id(account: str, job_id: str) -> str:
    """The id of the model that an RLOR job trains: the model is the job."""
    return model_id_of(account, PROJECT, job_id)


async def _own_account(account: str, caller: KnownCaller) -> Caller:
    if not caller.sees(account, PROJECT):
        raise ProblemError(404, f"accounts/{account[:80]} does not exist, or the key is not one of it")
    return caller


OwnAccount = Annotated[Caller, Depends(_own_account)]
"""The caller of a route below `/v1/accounts/{account}`, whose account that is."""
