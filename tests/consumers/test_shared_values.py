"""Large records reach the tokenizing process through shared memory: all of them, in order, each with its own bytes."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.consumers.test_admission import HANGS, request
from tests.consumers.test_plain_groups import content
from tests.consumers.tiny_model import TEMPLATE

from headrace.consumers.worker.admission import shared_values
from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted, Refused, Unreadable
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.consumers.worker.admission.shared_values import SharedValues, hand_back
from headrace.core.settings import Settings, StoreSettings
from headrace.schemas.reasons import RejectionReason
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence

LARGE = "x" * (1 << 17)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> SharedValues:
    monkeypatch.setattr(shared_values, "SHARED_BYTES", 1 << 18)
    return SharedValues()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdmissionPool]:
    """Of two seconds a record, and with memory for three of the records below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_values, "SHARED_BYTES", 1 << 19)
        made = AdmissionPool(Settings(store=StoreSettings(url=f"file://{tmp_path_factory.mktemp('store')}")), record_seconds=2)
        yield made
        made.close()


def valued(value: bytes | None, base: Path) -> AdmissionRequest:
    return AdmissionRequest(value=value, headers={}, fallback_id="0-0", base=None, settings=request(base).settings)


def test_values_are_handed_over_as_they_were(small_memory: SharedValues, tmp_path: Path) -> None:
    sizes = [0, 10, 1 << 16, (1 << 18) + 1, 1 << 17, (1 << 16) - 1, 1 << 16, 1 << 16]
    values = [None, *(bytes([i + 1]) * size for i, size in enumerate(sizes))]
    left = [valued(value, tmp_path) for value in values]
    batches = []
    while left:
        handed = small_memory.hand_over(left)
        restored = handed.restored(small_memory.memory)
        batches.append(len(restored))
        for asked, found, place in zip(left, restored, handed.places, strict=False):
            assert (None if found.value is None else bytes(found.value)) == asked.value
            assert (place is None) == (asked.value is None or not 1 << 16 <= len(asked.value) <= 1 << 18)
        left = left[len(restored) :]
    assert batches == [8, 1], "the last one did not fit next to the others"


@pytest.mark.parametrize("tokens", [3, 1 << 15])
def test_answers_come_back_with_arrays_of_their_own(small_memory: SharedValues, tokens: int) -> None:
    """By the memory, or by the pipe where they are larger than it."""
    sequences = tuple(
        TokenSequence(
            token_ids=np.arange(tokens, dtype=np.int32) + i,
            trainable=np.arange(tokens) > 0,
            logprobs=np.full(tokens, -0.5 - i, np.float32),
            policy_versions=None if i else np.zeros(tokens, np.int32),
        )
        for i in range(2)
    )
    group = TokenizedGroup(group_id="g", trajectories=(TokenizedTrajectory(reward=1.0, sequences=sequences),))
    answers = [Refused(group_id="r", job_id=None, reason=RejectionReason.TOO_LONG, detail="d"), Admitted(group=group, job_id="j")]
    handed = hand_back([*answers], small_memory.memory)
    assert bool(handed.places) == (tokens == 3)
    refused, admitted = handed.restored(small_memory.memory)
    ctypes.memset(small_memory.memory, 255, len(small_memory.memory))  # the next batch
    assert refused == answers[0]
    assert isinstance(admitted, Admitted)
    assert content(admitted.group) == content(group)


async def test_more_large_records_than_the_memory_holds_are_answered_in_order(tiny_model: Path, pool: AdmissionPool) -> None:
    asked = [request(tiny_model, name=str(i), logs=[LARGE]) for i in range(8)]
    answers = await pool.admit([*asked[:5], request(tiny_model, name="small"), *asked[5:]])
    names = [answer.group.group_id for answer in answers if isinstance(answer, Admitted)]
    assert names == ["0", "1", "2", "3", "4", "small", "5", "6", "7"]


async def test_large_records_that_are_poison_are_refused_alone(tiny_model: Path, tmp_path: Path, pool: AdmissionPool) -> None:
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(HANGS + TEMPLATE)
    broken = request(folder, name="b", logs=[LARGE])
    assert broken.value is not None
    asked = [
        request(folder, name="a", logs=[LARGE]),
        AdmissionRequest(value=bytes(broken.value)[:-5], headers={}, fallback_id="0-8", base=broken.base, settings=broken.settings),
        request(folder, name="c", user="hang", logs=[LARGE]),
        request(folder, name="d", logs=[LARGE]),
    ]
    first, unreadable, refused, last = await pool.admit(asked)
    assert isinstance(first, Admitted)
    assert isinstance(unreadable, Unreadable)
    assert isinstance(refused, Refused)
    assert isinstance(last, Admitted)
    assert (first.group.group_id, refused.group_id, last.group.group_id) == ("a", "c", "d")
