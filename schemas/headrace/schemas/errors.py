"""The error of everything that can't be read: a reason from the closed list, the path of the field, and what is wrong there."""

from headrace.schemas.reasons import DeadLetterReason


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
