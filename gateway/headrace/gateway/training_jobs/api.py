"""The training-jobs API as one router."""

from fastapi import APIRouter

from headrace.gateway.training_jobs import checkpoints, events, logged, models, submit

router = APIRouter()
for part in (models, checkpoints, logged, submit, events):
    router.include_router(part.router)
