"""docs/gateway.md, docs/rlor.md and docs/rlor-resources.md against the gateway: every path and every setting stands there."""

import re
from pathlib import Path

import orjson

from headrace.core.settings import GatewaySettings
from headrace.gateway.app import openapi_json

DOCS = Path(__file__).parents[2] / "docs"
GATEWAY = (DOCS / "gateway.md").read_text(encoding="utf-8")
RLOR = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("rlor.md", "rlor-resources.md"))


def test_every_path_outside_the_rlor_api_is_documented() -> None:
    paths = [path for path in orjson.loads(openapi_json())["paths"] if not path.startswith(("/v1/accounts", "/hot_load"))]
    assert len(paths) >= 12
    shown = [path.removeprefix("/v1/preview/").removesuffix("/events") for path in paths]
    assert [path for path in shown if path not in GATEWAY] == []


def test_every_kind_of_resource_of_the_rlor_api_is_documented() -> None:
    paths = [path for path in orjson.loads(openapi_json())["paths"] if path.startswith(("/v1/accounts/", "/hot_load"))]
    kinds = {path.split("/")[4] if path.startswith("/v1/accounts/") else "hot_load" for path in paths}
    verbs = {path.rpartition(":")[2] for path in paths if ":" in path}
    assert {"rlorTrainerJobs", "datasets", "deployments", "hot_load"} <= kinds
    assert [word for word in sorted(kinds | verbs) if word not in RLOR] == []


def test_every_setting_is_documented_with_its_default() -> None:
    table = GATEWAY.partition("## Settings")[2]
    for name, field in GatewaySettings.model_fields.items():
        row = next((line for line in table.splitlines() if f"`{name}`" in line), None)
        assert row is not None, name
        if isinstance(field.default, int) and not isinstance(field.default, bool) and field.default < 10_000 and name != "port":
            assert re.search(rf"\b{field.default:,}\b|\b{field.default}\b", row), (name, row)
