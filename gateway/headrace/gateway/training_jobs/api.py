"""The training-jobs API as one router."""

from fastapi import APIRouter

from headrace.gateway.training_jobs import checkpoints, events, models, submit

router = APIRouter()
for part in (models, checkpoints, submit, events):
    router.include_router(part.router)
