"""The training-jobs API as one router."""

from fastapi import APIRouter

from headrace.gateway.training_jobs import checkpoints, events, logged, models, sft, submit

router = APIRouter()
for part in (models, checkpoints, logged, submit, sft, events):
    router.include_router(part.router)
