"""JSON Schemas of the records, for readers and writers in other languages: one document a record, named like its `ce_type`.

Guarantees: the same models give the same bytes. Says what may be written (fields with defaults are not required). Limitations: rules that
span fields (lengths that must agree); those the codec checks.
"""

from typing import Any

import orjson
from pydantic import BaseModel

from headrace.schemas.envelope import record_models, type_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one record, with everything it refers to in `$defs`."""
    name = type_of(model)
    return {"$schema": DIALECT, "$id": f"urn:{name.replace('.', ':')}", **model.model_json_schema()}


def json_schema_files() -> dict[str, str]:
    """Every record's schema as file content by file name: `step-completed.v1.json`."""
    return {
        f"{type_of(model).removeprefix('headrace.')}.json": orjson.dumps(json_schema(model), option=orjson.OPT_INDENT_2).decode() + "\n"
        for model in record_models()
    }
