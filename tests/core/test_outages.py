"""What is an outage, what is the work's own failure, and how an outage is waited for."""

import errno
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headrace.core import outages
from headrace.core.errors import HeadraceError
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.outages import outage_of, outlast
from headrace.core.store import DigestMismatchError, ObjectNotFoundError, StoreFullError, StoreUnavailableError

ROOM = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE]


@pytest.mark.parametrize("number", ROOM)
def test_a_disk_that_takes_nothing_is_an_outage_by_whichever_library_it_is_noticed(number: int) -> None:
    by_python = OSError(number, "said by Python")
    by_rust = SafetensorError(f"Error while serializing: I/O error: said by Rust (os error {number})")
    by_copying = shutil.Error([("a", "b", "said by shutil")])
    for error in (by_python, by_rust, by_copying):
        assert outage_of(error) is not None
        wrapped = HeadraceError("the step's files can't be written")
        wrapped.__cause__ = error
        assert outage_of(wrapped) == "HeadraceError: the step's files can't be written"


def test_what_the_work_itself_does_wrong_is_no_outage(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no safetensors")
    with pytest.raises(SafetensorError) as damaged:
        load_file(tmp_path / "x")
    with pytest.raises(SafetensorError) as missing:
        save_file({"a": np.zeros(1)}, tmp_path / "nowhere" / "x")
    for error in (ValueError("loss"), KeyError("x"), FileNotFoundError(errno.ENOENT, "x"), MemoryError(), damaged.value, missing.value):
        assert outage_of(error) is None
    for final in (ObjectNotFoundError("k"), DigestMismatchError("k")):
        assert outage_of(final) is None


def test_an_error_without_a_message_is_named() -> None:
    assert outage_of(TimeoutError()) == "TimeoutError (without a message)"
    assert outage_of(ConnectionResetError()) == "ConnectionResetError (without a message)"
    assert outage_of(KafkaUnavailableError("Kafka at x does not answer")) == "Kafka at x does not answer"


async def test_an_outage_is_waited_for_and_said_once_when_it_begins_and_once_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "FIRST_PAUSE_SECONDS", 0.0)
    fails: list[Exception] = [StoreFullError("no space"), OSError(errno.EROFS, "Read-only file system"), StoreUnavailableError("503")]
    told: list[int] = []

    async def store() -> str:
        if fails:
            raise fails.pop(0)
        return "stored"

    async def tell() -> None:
        told.append(len(fails))

    with caplog.at_level(logging.INFO):
        assert await outlast("step 5 of m", store, waits=tell) == "stored"
    assert told == [2]
    assert [record.getMessage() for record in caplog.records] == [
        "step 5 of m waits, and is tried again until it works: no space",
        "step 5 of m waits no longer: it works again",
    ]


async def test_what_is_no_outage_is_raised_at_once() -> None:
    async def store() -> str:
        raise DigestMismatchError("changed")

    with pytest.raises(DigestMismatchError):
        await outlast("step 5 of m", store)
