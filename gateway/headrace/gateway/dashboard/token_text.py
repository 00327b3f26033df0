"""What token ids say: as the sampler wrote them next to the ids, else by the base model's tokenizer.

Guarantees: one text for each token; the texts of a sequence together are its text. Limitations: without either, ids are all there is; base
models that lie in the object store are not fetched for it.
"""

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.settings import Settings
from headrace.schemas.codec import SAFETENSORS_TYPE
from headrace.schemas.errors import CodecError
from headrace.schemas.parsing import load_json
from headrace.schemas.turns import raw_choices

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def tokenizer_of(settings: Settings, base_model: str) -> "Tokenizer | None":
    """The base model's tokenizer; None where its folder has none, or the library is not installed. Blocks."""
    entry = settings.base_models.get(base_model)
    if entry is None or "://" in entry.path:
        return None
    file = Path(entry.path) / _FILE
    try:
        return _load(str(file), file.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _load(file: str, _changed: int) -> "Tokenizer | None":
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - part of an extra
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(file)
    except Exception:  # noqa: BLE001 - the library raises no type of its own
        return None


def texts_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str] | None:
    """A text for each token of one sequence: one that ends no character has none, the one that does has it whole. None: it can't say."""
    from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - as above

    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, token) or "" for token in ids]
    except Exception:  # noqa: BLE001 - the library raises no type of its own
        return None


def said_texts(body: bytes, content_type: str) -> Mapping[int, list[str]]:
    """The token texts that a group's JSON has, by the number of the choice: of entries with `bytes`, or with a text that is no id."""
    if content_type.startswith(SAFETENSORS_TYPE):
        return {}
    try:
        choices = list(raw_choices(load_json(body)))
    except CodecError:
        return {}
    found = {}
    for number, (choice, _) in enumerate(choices):
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if isinstance(entries, list) and (texts := _said(entries)) is not None:
            found[number] = texts
    return found


def _said(entries: list[Any]) -> list[str] | None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for entry in entries:
        if not isinstance(entry, dict):
            return None
        token, said = entry.get("token"), entry.get("bytes")
        if not isinstance(token, str):
            return None
        named = token.startswith("token_id:")
        if isinstance(said, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in said) and bytes(said) != token.encode():
            texts.append(decoder.decode(bytes(said)))
        elif named:
            return None
        else:
            texts.append(token)
    return texts or None
