"""All routes of the RLOR API as one router, with `GET /v1/accounts`, by which a client asks for the account of its key."""

from typing import Annotated

from fastapi import APIRouter, Query

from headrace.gateway.access import KnownCaller
from headrace.gateway.rlor import checkpoints, datasets, deployments, jobs, loading, models
from headrace.gateway.rlor.resources import Wire

_accounts = APIRouter(prefix="/v1/accounts", tags=["RLOR: accounts"])


class Account(Wire):
    """An account."""

    name: str
    email: str | None = None


class AccountList(Wire):
    """The accounts of a key."""

    accounts: list[Account]
    total_size: int


@_accounts.get("", response_model_exclude_none=True)
async def list_accounts(
    caller: KnownCaller,
    page_size: Annotated[int | None, Query(alias="pageSize")] = None,  # noqa: ARG001 - a key has one account
    page_token: Annotated[str, Query(alias="pageToken")] = "",  # noqa: ARG001 - as above
) -> AccountList:
    """The account of the key."""
    return AccountList(accounts=[Account(name=f"accounts/{caller.account}")], total_size=1)


router = APIRouter()
router.include_router(_accounts)
for _part in (
    *(datasets.router, jobs.router, checkpoints.router, models.router),
    *(deployments.router, loading.router, loading.hot_load_router),
):
    router.include_router(_part)
