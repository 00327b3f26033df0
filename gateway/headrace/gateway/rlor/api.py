"""All routes of the RLOR API, as one router."""

from fastapi import APIRouter

from headrace.gateway.rlor import datasets

router = APIRouter()
for _part in (datasets.router,):
    router.include_router(_part)
