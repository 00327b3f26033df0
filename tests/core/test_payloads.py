"""Claim checks: what goes in comes out, and each way to fail has its own error."""

import hashlib
import os
from pathlib import Path

import cramjam
import pytest

from headrace.core import payloads
from headrace.core.payloads import (
    PayloadDigestError,
    PayloadMissingError,
    PayloadTooLargeError,
    PayloadUnreadableError,
    claim,
    redeem,
)
from headrace.core.settings import S3Settings
from headrace.core.store import ObjectStore, StoreUnavailableError, open_store
from headrace.schemas.claim import GroupClaim

BODY = b'{"trajectories": []}' * 500


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store", S3Settings())


def stored_as_is(store: ObjectStore, packed: bytes, raw_size: int) -> GroupClaim:
    store.put_bytes_if_absent("foreign", packed)
    sha256 = hashlib.sha256(packed).hexdigest()
    return GroupClaim(uri=store.uri("foreign"), sha256=sha256, size=len(packed), raw_size=raw_size, content_type="application/json")


def test_a_claim_names_the_compressed_payload_by_its_digest(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1", "j1")
    assert made.uri == store.uri(f"payloads/{made.sha256[:2]}/{made.sha256}.zst")
    assert (made.raw_size, made.content_type, made.group_id, made.job_id) == (len(BODY), "application/json", "g1", "j1")
    assert made.size < len(BODY) // 10
    assert redeem(store, made) == BODY


def test_a_repeated_claim_is_the_same_object(store: ObjectStore) -> None:
    assert claim(store, BODY, "application/json", "g1") == claim(store, BODY, "application/json", "g1")
    assert len(list(store.list())) == 1


def test_a_missing_payload_is_told_from_a_store_that_is_away(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1")
    store.delete(store.resolve(made.uri))
    with pytest.raises(PayloadMissingError, match="does not exist"):
        redeem(store, made)
    settings = S3Settings.model_validate({"endpoint_url": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"})
    away = open_store("s3://bucket", settings)
    with pytest.raises(StoreUnavailableError):
        redeem(away, made.model_copy(update={"uri": "s3://bucket/payloads/x"}))


def test_other_bytes_of_the_same_size_are_a_digest_error(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1")
    with pytest.raises(PayloadDigestError, match="the claim says"):
        redeem(store, made.model_copy(update={"sha256": "0" * 64}))


def test_a_larger_object_is_not_read_to_its_end(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1")
    with pytest.raises(PayloadDigestError, match=r"has more than 5 bytes, which the claim says"):
        redeem(store, made.model_copy(update={"size": 5}))


def test_a_zip_bomb_is_stopped_at_the_claimed_size(store: ObjectStore) -> None:
    bomb = bytes(cramjam.zstd.compress(b"\0" * 50_000_000, level=19))
    with pytest.raises(PayloadUnreadableError, match=r"no zstd of 1000 bytes \(raw_size\)"):
        redeem(store, stored_as_is(store, bomb, raw_size=1000))


def test_a_claim_of_an_absurd_size_is_refused_before_anything_is_allocated(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1")
    with pytest.raises(PayloadUnreadableError, match="raw_size 1099511627776 is above"):
        redeem(store, made.model_copy(update={"raw_size": 1 << 40}))


def test_fewer_bytes_than_claimed_are_unreadable(store: ObjectStore) -> None:
    packed = bytes(cramjam.zstd.compress(b"short", level=1))
    with pytest.raises(PayloadUnreadableError, match="decompresses to 5 bytes, the claim says 6"):
        redeem(store, stored_as_is(store, packed, raw_size=6))


def test_what_is_no_zstd_or_a_truncated_one_is_unreadable(store: ObjectStore) -> None:
    with pytest.raises(PayloadUnreadableError, match="no zstd"):
        redeem(store, stored_as_is(store, os.urandom(100), raw_size=100))
    store.delete("foreign")
    with pytest.raises(PayloadUnreadableError, match="no zstd"):
        redeem(store, stored_as_is(store, bytes(cramjam.zstd.compress(BODY))[:-4], raw_size=len(BODY)))


def test_a_uri_outside_of_the_store_is_unreadable(store: ObjectStore) -> None:
    made = claim(store, BODY, "application/json", "g1")
    for uri in ("file:///etc/passwd", store.uri("a").removesuffix("a") + "../../etc/passwd"):
        with pytest.raises(PayloadUnreadableError):
            redeem(store, made.model_copy(update={"uri": uri}))


def test_a_group_above_the_bound_is_refused_at_the_producer(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MAX_RAW_BYTES", len(BODY) - 1)
    with pytest.raises(PayloadTooLargeError, match="split it"):
        claim(store, BODY, "application/json", "g1")
    assert list(store.list()) == []
