"""All routes of the RLOR API, as one router."""

from fastapi import APIRouter

from headrace.gateway.rlor import accounts, checkpoints, datasets, deployed_models, deployments, hot_load, job_verbs, jobs, models

router = APIRouter()
for _part in (
    accounts.router,
    datasets.router,
    job_verbs.router,
    jobs.router,
    checkpoints.router,
    models.router,
    deployments.router,
    deployed_models.router,
    hot_load.router,
):
    router.include_router(_part)
