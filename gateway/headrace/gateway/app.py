"""The gateway as one app: both hosted APIs, inference and the dashboard over one gate.

Guarantees: what is answered was read from, or committed to, Kafka; there is no other state. Gives up: nothing here; see the parts.
"""

from fastapi import FastAPI

from headrace.core.settings import Settings
from headrace.gateway import exchanges, health, inference, problems
from headrace.gateway.access import Pace
from headrace.gateway.access_log import AccessLog
from headrace.gateway.body_limit import BodyLimit
from headrace.gateway.dashboard import data, pages
from headrace.gateway.gate import Gate
from headrace.gateway.training_jobs import api as training_jobs


def create_app(settings: Settings) -> FastAPI:
    """The app; its gate (`app.state.gate`) is opened by who serves it, before the first request.

    Raises:
        TokensError: the tokens can't be read.
    """
    gate = Gate(settings, Pace(settings.gateway.requests_per_minute))
    app = FastAPI(
        title="Headrace",
        summary="Reinforcement-learning training backend for LLM agents, on Kafka",
        version="1",
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.gate = gate
    problems.install(app)
    for router in (health.router, inference.router, exchanges.router, training_jobs.router):
        app.include_router(router)
    app.include_router(data.router)
    pages.install(app)
    app.add_middleware(BodyLimit, settings=settings.gateway, is_upload=_is_upload)
    app.add_middleware(AccessLog)
    return app


def _is_upload(path: str) -> bool:
    return path.endswith(":upload") or "/uploads/" in path
