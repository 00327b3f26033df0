"""Addresses to which a file of a dataset may be put without a key, for an hour.

Guarantees: an address is good for this dataset, file name and size only, and not for a dataset that was made anew under its name; all
gateways with one `gateway.secrets_key` take each other's. Gives up: without that key an address is good at the gateway process that gave it
only; taking an address back before it expires.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from headrace.core.settings import GatewaySettings
from headrace.gateway.problems import ProblemError
from headrace.schemas.rlor_resources import DatasetFact

VALID_SECONDS = 3600
_OF_THIS_PROCESS = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedUpload:
    """What an address says."""

    name: str
    size: int
    expires: int
    signature: str


def upload_url(settings: GatewaySettings, base_url: str, dataset: DatasetFact, name: str, size: int) -> str:
    """An address for one file.

    Args:
        settings: Of the gateway.
        base_url: Where the client reached it, with a slash at its end.
        dataset: What the file is to be part of.
        name: Of the file.
        size: In bytes.
    """
    expires = int(time.time()) + VALID_SECONDS
    path = "/".join(quote(part, safe="") for part in ("v1", "accounts", dataset.account, "datasets", dataset.dataset, "uploads", name))
    query = {"size": size, "expires": expires, "signature": _signature(settings, dataset, name, size, expires)}
    return f"{base_url}{path}?{urlencode(query)}"


def check_upload(settings: GatewaySettings, dataset: DatasetFact, upload: SignedUpload) -> None:
    """Refuse an address that this gateway did not give.

    Raises:
        ProblemError: 403.
    """
    right = _signature(settings, dataset, upload.name, upload.size, upload.expires)
    if not hmac.compare_digest(right.encode(), upload.signature.encode()):
        raise ProblemError(403, "the address is not one that this gateway gave for this file: ask :getUploadEndpoint for one")
    if upload.expires < time.time():
        raise ProblemError(403, "the address has expired: ask :getUploadEndpoint for a new one")


def _signature(settings: GatewaySettings, dataset: DatasetFact, name: str, size: int, expires: int) -> str:
    secret = settings.secrets_key
    key = _OF_THIS_PROCESS if secret is None else hmac.digest(secret.get_secret_value().encode(), b"dataset uploads", "sha256")
    said = "\n".join((dataset.account, dataset.dataset, dataset.incarnation, name, str(size), str(expires)))
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()
