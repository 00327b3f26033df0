"""`GET /v1/accounts`: the one account that a key belongs to. Clients that were told no account ask for it first."""

from typing import Annotated

from fastapi import APIRouter, Query

from headrace.gateway.access import KnownCaller
from headrace.gateway.rlor.wire import Wire

router = APIRouter(prefix="/v1/accounts", tags=["RLOR: accounts"])


class Account(Wire):
    """An account."""

    name: str
    email: str | None = None


class AccountList(Wire):
    """The accounts of a key."""

    accounts: list[Account]
    total_size: int


@router.get("", response_model_exclude_none=True)
async def list_accounts(
    caller: KnownCaller,
    page_size: Annotated[int | None, Query(alias="pageSize")] = None,  # noqa: ARG001 - there is one
    page_token: Annotated[str, Query(alias="pageToken")] = "",  # noqa: ARG001 - as above
) -> AccountList:
    """The account of the key."""
    return AccountList(accounts=[Account(name=f"accounts/{caller.account}")], total_size=1)
