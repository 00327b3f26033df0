"""The OpenAPI document, as the gateway serves it at `/openapi.json` and as it stands in `schemas/openapi.json`.

Guarantees: the same code gives the same text. Gives up: nothing; no Kafka and no store are reached for it.
"""

import json

from headrace.core.settings import GatewaySettings, KafkaSettings, Settings, StoreSettings
from headrace.gateway.app import create_app


def openapi_json() -> str:
    """The document as text."""
    # Built without the environment: none of the caller's own settings may change the document, and nothing of it is reached.
    settings = Settings.model_construct(
        kafka=KafkaSettings(bootstrap_servers="localhost:9092"), store=StoreSettings(url="file:///nowhere"), gateway=GatewaySettings()
    )
    return json.dumps(create_app(settings).openapi(), indent=1, ensure_ascii=False) + "\n"
