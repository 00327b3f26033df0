"""The gateway as one app: both hosted APIs, inference and the dashboard over one gate.

Guarantees: what is answered was read from, or committed to, Kafka; there is no other state. Limitations: nothing here; see the parts.
"""

import json

from fastapi import FastAPI

from headrace.core.settings import GatewaySettings, KafkaSettings, Settings, StoreSettings
from headrace.gateway import exchanges, health, inference, problems
from headrace.gateway.access_log import AccessLog
from headrace.gateway.body_limit import BodyLimit
from headrace.gateway.dashboard import data, pages
from headrace.gateway.gate import Gate
from headrace.gateway.openapi import describe
from headrace.gateway.rlor import api as rlor
from headrace.gateway.training_jobs import api as training_jobs


def create_app(settings: Settings) -> FastAPI:
    """The app; its gate (`app.state.gate`) is opened by who serves it, before the first request.

    Raises:
        TokensError: the tokens can't be read.
    """
    gate = Gate(settings)
    app = FastAPI(
        title="Headrace",
        summary="Reinforcement-learning training backend for LLM agents, on Kafka",
        version="1",
        docs_url=None,  # its page takes scripts from elsewhere; the document is at /openapi.json
        redoc_url=None,
    )
    app.state.gate = gate
    problems.install(app)
    for router in (health.router, inference.router, exchanges.router, training_jobs.router):
        app.include_router(router)
    app.include_router(rlor.router)
    app.include_router(data.router)
    pages.install(app)
    describe(app)
    app.add_middleware(BodyLimit, settings=settings.gateway)
    app.add_middleware(AccessLog)
    return app


def openapi_json() -> str:
    """The app's OpenAPI document as text, built without the environment: none of the caller's own settings may change it."""
    settings = Settings.model_construct(
        kafka=KafkaSettings(bootstrap_servers="localhost:9092"), store=StoreSettings(url="file:///nowhere"), gateway=GatewaySettings()
    )
    return json.dumps(create_app(settings).openapi(), indent=1, ensure_ascii=False) + "\n"
