"""All routes of the RLOR API, as one router."""

from fastapi import APIRouter

from headrace.gateway.rlor import accounts, checkpoints, datasets, job_verbs, jobs

router = APIRouter()
for _part in (datasets.router, accounts.router, job_verbs.router, jobs.router, checkpoints.router):
    router.include_router(_part)
