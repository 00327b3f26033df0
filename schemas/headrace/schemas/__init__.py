"""Every message, event, record and job field of Headrace, as pydantic v2 models, with topic names, keys, headers and the codec.

Guarantees: importing any module here pulls in nothing but pydantic and orjson; unknown fields are kept and passed on;
NaN and infinity never get through. Limitations: convenience imports here, so that `import headrace.schemas.topics` stays cheap.
"""
