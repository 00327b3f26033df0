"""Sets of groups in the store: what was stored is what is read, and nothing else is taken for it."""

from pathlib import Path

import pytest

from headrace.core.group_sets import read_groups, store_groups
from headrace.core.payloads import PayloadDigestError, PayloadMissingError, PayloadUnreadableError
from headrace.core.store.files import FileStore
from headrace.schemas.codec import sampled
from headrace.schemas.trajectory import TrajectoryGroup


def make_group(group_id: str = "g") -> TrajectoryGroup:
    turn = {"finish_reason": "stop", "message": {"role": "assistant", "content": "4"}, "token_ids": [5, 6], "token_logprobs": [-0.5, None]}
    trajectory = {"messages_and_choices": [{"role": "user", "content": "2 + 2"}, turn], "reward": 1.0}
    return TrajectoryGroup.model_validate({"group_id": group_id, "trajectories": [trajectory, trajectory]})


def test_a_set_reads_as_it_was_stored_and_a_repeat_is_the_same_object(tmp_path: Path):
    store = FileStore(tmp_path)
    groups = [make_group(group_id=f"g{i}") for i in range(3)]
    stored = store_groups(store, iter(groups))
    assert list(read_groups(store, stored)) == [sampled(group) for group in groups]
    assert store_groups(store, (sampled(group) for group in groups)) == stored
    assert len(list(store.list("group-sets/"))) == 1


def test_an_empty_set_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one group"):
        store_groups(FileStore(tmp_path), [])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sha256": "0" * 64}, PayloadDigestError),
        ({"groups": 2}, PayloadUnreadableError),
        ({"raw_size": 5}, PayloadUnreadableError),
        ({"uri": "file:///elsewhere/x"}, PayloadUnreadableError),
    ],
)
def test_what_differs_from_what_is_named_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], error: type[Exception]):
    store = FileStore(tmp_path)
    stored = store_groups(store, [make_group()]).model_copy(update=change)
    with pytest.raises(error, match=stored.uri):
        list(read_groups(store, stored))


def test_a_set_that_is_gone_says_so(tmp_path: Path):
    store = FileStore(tmp_path)
    stored = store_groups(store, [make_group()])
    store.delete(store.resolve(stored.uri))
    with pytest.raises(PayloadMissingError, match="does not exist"):
        list(read_groups(store, stored))
