"""Claim checks: a group that is too large for the log goes to the object store first, and the log carries where it is.

Guarantees: the name is the SHA-256 of what is stored, so a repeat is the same object; `redeem` checks the claim's sizes before it reads,
size and digest before it decompresses, and never makes more than `raw_size` bytes. Limitations: deleting payloads; they live as long as the
bucket's lifecycle says. Blocks and computes: not for an event loop.
"""

from typing import Any

import cramjam
import numpy as np

from headrace.core.errors import HeadraceError
from headrace.core.store.folders import sha256_of_bytes
from headrace.core.store.interface import InvalidKeyError, ObjectNotFoundError, ObjectStore
from headrace.schemas.claim import GroupClaim
from headrace.schemas.jobs import GroupSet

ZSTD_LEVEL = 1
"""529 MB/s and half the size; higher levels gain little on trajectories."""
MAX_RAW_BYTES = 256 * 1024 * 1024
"""The most that a claim can make a reader allocate; no group is larger."""

_MAX_PACKED_BYTES = MAX_RAW_BYTES + MAX_RAW_BYTES // 128
"""zstd makes no more of what can't be compressed."""


class PayloadError(HeadraceError):
    """A claim that can't be redeemed, for ever: trying again does not help (unlike `StoreUnavailableError`)."""


class PayloadMissingError(PayloadError):
    """The store has no such object."""


class PayloadDigestError(PayloadError):
    """What is stored is not what the claim names: another digest or another size."""


class PayloadUnreadableError(PayloadError):
    """Not zstd, not the claimed size once decompressed, or a URI outside of our store."""


class PayloadTooLargeError(PayloadError):
    """A group that no reader would take."""


def claim(store: ObjectStore, body: bytes, content_type: str, group_id: str | None, job_id: str | None = None) -> GroupClaim:
    """Store an encoded group and make the message that stands for it. The object is durable when this returns.

    Args:
        store: Where to.
        body: The encoded group, at least one byte.
        content_type: Of `body`.
        group_id: As in the group.
        job_id: As in the group.

    Raises:
        PayloadTooLargeError: `body` is above `MAX_RAW_BYTES`.
        StoreError: it could not be stored.
    """
    if len(body) > MAX_RAW_BYTES:
        raise PayloadTooLargeError(f"group {group_id} has {len(body)} bytes, at most {MAX_RAW_BYTES} can be sent: split it")
    packed = bytes(cramjam.zstd.compress(body, level=ZSTD_LEVEL))
    digest = sha256_of_bytes(packed)
    key = f"payloads/{digest[:2]}/{digest}.zst"
    store.put_bytes_if_absent(key, packed)
    return GroupClaim(
        uri=store.uri(key),
        sha256=digest,
        size=len(packed),
        raw_size=len(body),
        content_type=content_type,
        group_id=group_id,
        job_id=job_id,
    )


def redeem(store: ObjectStore, claimed: GroupClaim | GroupSet) -> memoryview:
    """The encoded group behind a claim, or the lines of a set, checked; no one else has the memory, or writes into it.

    Raises:
        PayloadMissingError: gone, or never there.
        PayloadDigestError: not the bytes that were claimed.
        PayloadUnreadableError: they do not decompress to `raw_size` bytes, or the URI is not ours.
        StoreUnavailableError: the store could not answer; the claim may still be good.
    """
    if claimed.raw_size > MAX_RAW_BYTES:
        raise PayloadUnreadableError(f"{claimed.uri}: raw_size {claimed.raw_size} is above {MAX_RAW_BYTES} bytes")
    if claimed.size > _MAX_PACKED_BYTES:
        raise PayloadUnreadableError(f"{claimed.uri}: size {claimed.size} is above {_MAX_PACKED_BYTES} bytes")
    try:
        packed = _read(store, store.resolve(claimed.uri), claimed.size)
    except InvalidKeyError as error:
        raise PayloadUnreadableError(str(error)) from error
    except ObjectNotFoundError as error:
        raise PayloadMissingError(f"{claimed.uri} does not exist: the payload was deleted, or the message came before it") from error
    if len(packed) > claimed.size:
        raise PayloadDigestError(f"{claimed.uri} has more than {claimed.size} bytes, which the claim says")
    if (found := sha256_of_bytes(packed)) != claimed.sha256:
        raise PayloadDigestError(f"{claimed.uri} has SHA-256 {found} and {len(packed)} bytes, the claim says {claimed.sha256}")
    return _decompress(packed, claimed)


def _read(store: ObjectStore, key: str, size: int) -> bytes:
    """The object, or its beginning if it has more than `size` bytes: a foreign object of any size must not come into memory."""
    packed = bytearray()
    for chunk in store.get_chunks(key):
        packed += chunk
        if len(packed) > size:
            break
    return bytes(packed)


def _decompress(packed: bytes, claimed: GroupClaim | GroupSet) -> memoryview:
    """Into a buffer of exactly the claimed size: the decompressor stops where it is full."""
    raw = np.empty(claimed.raw_size, np.uint8)  # not cleared first, as a bytearray is
    try:
        size: Any = cramjam.zstd.decompress_into(packed, raw.data)
    except cramjam.DecompressionError as error:
        raise PayloadUnreadableError(f"{claimed.uri} is no zstd of {claimed.raw_size} bytes (raw_size): {error}") from error
    if size != claimed.raw_size:
        raise PayloadUnreadableError(f"{claimed.uri} decompresses to {size} bytes, the claim says {claimed.raw_size} (raw_size)")
    return raw.data.toreadonly()
