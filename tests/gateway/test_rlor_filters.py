"""Filter expressions, pure."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.filters import field_path, parse_filter
from headrace.gateway.rlor.job_status import RlorTrainerJob

JOB: dict[str, Any] = {
    "name": "accounts/a/rlorTrainerJobs/one",
    "state": "JOB_STATE_RUNNING",
    "displayName": 'say "hi"',
    "keepAlive": True,
    "nodeCount": 2,
    "inactivityTimeout": "600s",
    "createTime": "2026-11-30T04:05:06.5Z",
    "trainingConfig": {"loraRank": 8, "learningRate": 1e-5},
    "acceleratorSeconds": {"CPU": "12"},
    "rewardWeights": ["score"],
}


def holds(expression: str, job: dict[str, Any] = JOB) -> bool:
    return parse_filter(expression, RlorTrainerJob)(job)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        'state="JOB_STATE_RUNNING"',
        "state = JOB_STATE_RUNNING",
        "state != 'JOB_STATE_FAILED' AND keep_alive = true",
        "trainingConfig.loraRank >= 8 AND training_config.learning_rate < 0.001",
        'display_name = "say \\"hi\\""',
        'create_time > "2026-11-30T05:05:05+01:00" AND createTime <= 2026-11-30T04:05:06.5Z',
        "accelerator_seconds.CPU > 9",
        "inactivity_timeout < 3600s",
        'name = "accounts/a/*"',
        'name = "*one" AND NOT name = "*two"',
        "NOT (state = JOB_STATE_FAILED OR -keep_alive = true)",
        "node_count = 1 OR node_count = 2 AND keep_alive = true",
        'completed_time != "2026-01-01T00:00:00Z"',
    ],
)
def test_filters_that_match(expression: str):
    assert holds(expression)


@pytest.mark.parametrize(
    "expression",
    [
        'state="JOB_STATE_FAILED"',
        "node_count < 2",
        "node_count > 1 AND keep_alive = false",
        'completed_time > "2026-01-01T00:00:00Z"',
        "accelerator_seconds.GPU = 12",
        # OR binds tighter, as AIP-160 has it
        "node_count = 1 AND node_count = 1 OR node_count = 2",
    ],
)
def test_filters_that_do_not_match(expression: str):
    assert not holds(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("sate = 1", "position 1: 'sate': the resource has no field 'sate'; there are"),
        ("state =", "position 8: a value after '=' is needed, not the end"),
        ("state", "position 6: a comparison"),
        ("state = 1 node_count = 2", "position 11: 'node_count' is too much"),
        ('state = "open', "position 9: '\"open' can't be read: is a quote not closed?"),
        ("(state = 1", "a closing parenthesis is needed, not the end"),
        ("state = AND", "a value after '=' is needed, not 'AND'"),
        ("trainingConfig.rank = 1", "trainingConfig has no field 'rank'"),
        ("state.x = 1", "state has no fields"),
        ("NOT " * 60 + "state = 1", "nested deeper"),
        ("(" * 5000, "4096 at most"),
    ],
)
def test_invalid_filters_are_rejected_with_the_position(expression: str, message: str):
    with pytest.raises(ProblemError) as rejected:
        holds(expression)
    assert message in str(rejected.value)


@given(st.text(alphabet="ab_. =\"'\\()<>!-*0128sTZ:ANDORNOTstate", max_size=60))
def test_any_text_is_a_filter_or_is_rejected(expression: str):
    with contextlib.suppress(ProblemError):
        holds(expression)


@given(st.text(min_size=1, max_size=30).filter(lambda text: "*" not in text))
def test_any_text_in_quotes_equals_itself(text: str):
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    assert holds(f'display_name = "{quoted}"', {"displayName": text})


def test_a_path_can_be_written_in_both_cases_and_unknown_fields_are_rejected():
    assert field_path(RlorTrainerJob, "aws_s3_config.iam_role_arn", "") == field_path(RlorTrainerJob, "awsS3Config.iamRoleArn", "")
    for wrong in ("", ".", "name.", "trainingConfig..loraRank", "__class__"):
        with pytest.raises(ProblemError):
            field_path(RlorTrainerJob, wrong, "readMask")
