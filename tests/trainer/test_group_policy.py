"""What becomes of a group that lost members, by the model's policy."""

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conversations import USER, choice, group_of, only, refusal, runs, tokenize
from tests.trainer.tiny import END

from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.trainer.plan import BaseSource
from headrace.trainer.tokenize import GroupTokenizer

GOOD = [USER, choice("fine")]
NOTHING: list[dict[str, Any]] = [USER]
UNKNOWN = [USER, choice("", [999])]
LONG = [{"role": "user", "content": "q" * 390}, choice("0123456789")]
FAILED = {"exceptions": [{"type": "E", "message": "boom"}]}


@pytest.fixture(scope="module")
def tokenizer(tiny: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(tiny)


def test_partial_trains_on_what_is_left_and_says_each_loss(tokenizer: GroupTokenizer):
    group = tokenize(tokenizer, UNKNOWN, GOOD, NOTHING, GOOD)
    assert [t.reward for t in group.trajectories] == [1.0, 3.0]
    assert [(member.index, member.reason) for member in group.rejected] == [
        (0, Reason.TOKEN_OUT_OF_VOCABULARY),
        (2, Reason.NO_TRAINABLE_TOKENS),
    ]
    assert group.indices == [1, 3]


def test_the_sampled_tokens_of_the_next_member_are_its_own_also_after_one_that_failed_half_way(tokenizer: GroupTokenizer):
    """All turns of a group come in one list: a member that is dropped in its first turn must not leave its second to the next."""
    broken = [USER, choice("", [999]), USER, choice("", [7, 8, 9], prompt_token_ids=[1])]
    group = tokenize(tokenizer, broken, [choice("", [5, 6], prompt_token_ids=[3])])
    assert group.trajectories[0].sequences[0].token_ids.tolist() == [3, 5, 6]


def test_a_group_with_nobody_left_is_refused_with_its_first_members_reason_and_names_the_others(tokenizer: GroupTokenizer):
    refused = refusal(tokenizer, NOTHING, UNKNOWN)
    assert (refused.reason, refused.trajectory) == (Reason.NO_TRAINABLE_TOKENS, 0)
    assert refused.detail.startswith("trajectories[0]: no sampled token")
    assert "trajectories[1] token_out_of_vocabulary" in refused.detail


@pytest.mark.parametrize(("policy", "size"), [("partial", None), ("minimum", 1), ("complete", None)])
def test_nobody_left_is_the_same_under_every_policy(tokenizer: GroupTokenizer, policy: str, size: int | None):
    refused = refusal(tokenizer, NOTHING, batch={"incomplete_groups": policy, "minimum_group_size": size})
    assert refused.reason is Reason.NO_TRAINABLE_TOKENS


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (3, False)])
def test_minimum_counts_who_is_left(tokenizer: GroupTokenizer, size: int, *, fits: bool):
    batch = {"incomplete_groups": "minimum", "minimum_group_size": size}
    if fits:
        assert len(tokenize(tokenizer, GOOD, UNKNOWN, GOOD, batch=batch, group=FAILED).trajectories) == 2
        return
    refused = refusal(tokenizer, GOOD, UNKNOWN, GOOD, batch=batch, group=FAILED)
    assert (refused.reason, refused.trajectory) == (Reason.INCOMPLETE_GROUP, 1)
    assert refused.detail.startswith(
        "2 of 4 members are missing (incomplete_groups=minimum, minimum_group_size=3): "
        "trajectories[1] token_out_of_vocabulary, 1 exception; trajectories[1]: messages_and_choices[1].token_ids[0] is 999"
    )


def test_a_small_group_that_lost_nobody_is_complete(tokenizer: GroupTokenizer):
    assert tokenize(tokenizer, GOOD, batch={"incomplete_groups": "minimum", "minimum_group_size": 4}).rejected == ()
    assert tokenize(tokenizer, GOOD, batch={"incomplete_groups": "complete"}).rejected == ()


def test_complete_trains_only_where_nobody_is_missing_and_an_exception_is_somebody(tokenizer: GroupTokenizer):
    complete = {"incomplete_groups": "complete"}
    assert refusal(tokenizer, GOOD, NOTHING, batch=complete).reason is Reason.INCOMPLETE_GROUP
    refused = refusal(tokenizer, GOOD, GOOD, batch=complete, group=FAILED)
    assert (refused.reason, refused.trajectory) == (Reason.INCOMPLETE_GROUP, None)
    assert "1 of 3 members are missing (incomplete_groups=complete): 1 exception" in refused.detail


def test_equal_rewards_of_who_is_left_are_refused_where_the_model_says_so(tokenizer: GroupTokenizer):
    refused = refusal(tokenizer, GOOD, NOTHING, batch={"zero_variance": "refuse"})
    assert refused.reason is Reason.ZERO_VARIANCE
    assert "all 1 rewards are 0.0 (without trajectories[1] no_trainable_tokens)" in refused.detail


def test_an_over_long_member_is_dropped_alone(tokenizer: GroupTokenizer):
    group = tokenize(tokenizer, GOOD, LONG, limit=400)
    (rejected,) = group.rejected
    assert (rejected.index, rejected.reason) == (1, Reason.TOO_LONG)
    assert group.truncated == 0


def test_an_over_long_member_is_cut_where_the_model_says_so_and_counted(tokenizer: GroupTokenizer):
    truncate = {"over_long": "truncate"}
    group = tokenize(tokenizer, GOOD, LONG, limit=412, batch=truncate)
    assert (group.rejected, group.truncated) == ((), 1)
    (cut,) = group.trajectories[1].sequences
    assert len(cut) == 412
    assert runs(cut) == [(False, 409), (True, 3)]
    assert bytes(cut.token_ids[-3:].tolist()) == b"012"
    assert cut.logprobs[-1] == pytest.approx(-0.52)
    assert group.trajectories[1].truncated == 1


def test_a_cut_that_leaves_no_sampled_token_is_too_long(tokenizer: GroupTokenizer):
    (rejected,) = tokenize(tokenizer, GOOD, LONG, limit=409, batch={"over_long": "truncate"}).rejected
    assert (rejected.reason, rejected.detail) == (Reason.TOO_LONG, "trajectories[1]: no sampled token is left within 409 tokens")


def test_of_several_sequences_only_what_fits_is_kept(tokenizer: GroupTokenizer):
    """The second history begins beyond the limit: nothing of it is left, but the first one trains."""
    extra = {"messages_and_choices": LONG}
    sequence = only(tokenize(tokenizer, GOOD, limit=300, batch={"over_long": "truncate"}, additional_histories=[extra]))
    assert sequence.trainable_tokens == 5


def test_whatever_a_member_makes_the_tokenizer_raise_stays_its_own(tokenizer: GroupTokenizer, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr("headrace.trainer.rollout_tokens.sequences_of", explode)
    refused = refusal(tokenizer, GOOD)
    assert (refused.reason, refused.detail) == (Reason.TOKENIZATION_FAILED, "trajectories[0]: ZeroDivisionError: deep inside")


def test_examples_train_on_every_assistant_turn_with_its_end_whatever_rewards_and_versions_say(tokenizer: GroupTokenizer):
    items = [USER, {"role": "assistant", "content": "one"}, USER, {"role": "assistant", "content": "two"}]
    batch = {"zero_variance": "refuse", "incomplete_groups": "complete", "over_long": "truncate"}
    group = tokenize(tokenizer, items, LONG, batch=batch, group={"purpose": "sft", **FAILED}, initial_policy_version=99)
    sequence = only(group)
    assert (group.sft, group.trajectories[0].initial_policy_version) == (True, None)
    assert runs(sequence) == [(False, 20), (True, 4), (False, 21), (True, 4)]
    assert sequence.token_ids[23] == END
    assert [(member.index, member.reason) for member in group.rejected] == [(1, Reason.TOO_LONG)]


def test_an_example_is_the_samplers_tokens_where_it_has_them_and_may_leave_turns_out(tokenizer: GroupTokenizer):
    told = {"role": "assistant", "content": "not this", "weight": 0}
    cut = {"finish_reason": "length", "message": {"content": "cut"}}
    items = [USER, told, USER, choice("", [5, 6], token_logprobs=None), USER, cut]
    sequences = tokenize(tokenizer, items, group={"purpose": "sft"}).trajectories[0].sequences
    assert [s.token_ids[s.trainable].tolist() for s in sequences] == [[5, 6], list(b"cut")]


def test_a_base_without_a_tokenizer_costs_only_the_trajectories_that_need_one(make_base: Any):
    base = make_base()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(base.path) / name).unlink()
    bare = GroupTokenizer(base)
    group = bare.tokenize(group_of(GOOD, [choice("", [5], prompt_token_ids=[3])]), "g", ModelSettings(base_model="tiny"))
    assert group.indices == [1]
    assert group.rejected[0].reason is Reason.TOKENIZATION_FAILED
    assert "has no tokenizer" in group.rejected[0].detail


@pytest.mark.parametrize(("of_model", "of_job", "trained"), [(True, None, True), (True, False, False), (None, True, True)])
def test_what_the_job_allows_stands_in_the_group_and_hides_what_the_model_allows(
    tokenizer: GroupTokenizer, of_model: bool | None, of_job: bool | None, *, trained: bool
):
    config = TrainConfig(allow_training_without_logprobs=of_model)
    items = [USER, {"role": "assistant", "content": "told"}]
    group = tokenize(tokenizer, items, GOOD, config=config, group={"allow_training_without_logprobs": of_job})
    assert (group.indices == [0, 1]) is trained
