"""Why something was not trained on: the closed lists of reasons.

Dead letters are for what can't be read; a rejection is for what was read and refused. Values are part of the wire: never renamed.

The error of everything that can't be read: a reason from the closed list, the path of the field, and what is wrong there.
"""

from enum import StrEnum


class DeadLetterReason(StrEnum):
    """Why a record went to `dead-letters` with its bytes untouched."""

    NOT_JSON = "not_json"
    """The body is not JSON (or not safetensors, where the content type says so)."""
    INVALID_SCHEMA = "invalid_schema"
    """A field is missing or of the wrong type; the detail names its path."""
    NOT_FINITE = "not_finite"
    """NaN or infinity; the detail names the path."""
    LENGTH_MISMATCH = "length_mismatch"
    """Log-probabilities (or versions) of another length than the tokens."""
    SPAN_MISMATCH = "span_mismatch"
    """Turn spans that do not tile the flat arrays."""
    UNKNOWN_TYPE = "unknown_type"
    """A `ce_type` that this topic does not carry."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """A known `ce_type` of a major version that this release does not know."""
    UNREADABLE_HEADERS = "unreadable_headers"
    """Header names that are no UTF-8: the Kafka client can't hand the record over; it stays at its offset in the source topic."""
    TOO_LARGE = "too_large"
    """The record, a part of it, or its batch once it is unpacked, is larger than a reader takes; the detail says which."""
    MISSING_KEY = "missing_key"
    """No key, or one that is not UTF-8: the model is unknown."""
    WRONG_LANE = "wrong_lane"
    """murmur2(key) mod n is not the record's partition."""
    UNKNOWN_MODEL = "unknown_model"
    """No such model, after the commands were read to their end."""


class RejectionReason(StrEnum):
    """Why a group that could be read was refused (`GroupRejected`), or one trajectory of it (`TrajectoryRejected`)."""

    NO_TRAJECTORIES = "no_trajectories"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    MISSING_REWARD = "missing_reward"
    """A trajectory to train on by reinforcement came without a reward, which is not a reward of 0."""
    MISSING_LOGPROBS = "missing_logprobs"
    INVALID_LOGPROBS = "invalid_logprobs"
    """A log-probability is above 0 by more than rounding."""
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"  # noqa: S105 - not a password
    UNSUPPORTED_CONTENT = "unsupported_content"
    TOKENIZATION_FAILED = "tokenization_failed"
    TOO_LONG = "too_long"
    INCOMPLETE_GROUP = "incomplete_group"
    """Members are missing and `batch.incomplete_groups` does not train on the rest; the detail names them and their reasons."""
    ZERO_VARIANCE = "zero_variance"
    DUPLICATE = "duplicate"
    STALE = "stale"
    UNKNOWN_POLICY_VERSION = "unknown_policy_version"
    PAYLOAD_MISSING = "payload_missing"
    PAYLOAD_DIGEST_MISMATCH = "payload_digest_mismatch"
    PAYLOAD_UNREADABLE = "payload_unreadable"
    BACKLOG_FULL = "backlog_full"
    EXPIRED = "expired"
    JOB_CLOSED = "job_closed"
    JOB_CANCELLED = "job_cancelled"
    JOB_TIMED_OUT = "job_timed_out"
    """Its job was dropped, because not all of its groups came in time."""
    JOB_KIND_MISMATCH = "job_kind_mismatch"
    """A group of purpose `sft` in a job of kind `rl`, or the other way round: the job fails and nothing of it trains."""
    SFT_WITHOUT_JOB = "sft_without_job"
    """Purpose `sft` without a job id: the stream is for rollouts."""
    MODEL_DELETED = "model_deleted"
    MODEL_STOPPED = "model_stopped"
    STEP_FAILED = "step_failed"


class CodecError(ValueError):
    """A message that can't be read. `reason` is for machines; `path` and `detail` are for people.

    Args:
        reason: From the closed list of dead-letter reasons.
        path: Where, as `trajectories[0].reward`; empty for the whole body.
        detail: What is wrong and what to do.
    """

    def __init__(self, reason: DeadLetterReason, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}" if path else detail)
        self.reason = reason
        self.path = path
        self.detail = detail
