"""What can go wrong between a group and the log, one class for each thing that a caller does about it."""

from headrace.core.errors import HeadraceError


class ProducerError(HeadraceError):
    """Base of the producer's own errors; an unreachable Kafka at start is `headrace.core.kafka.KafkaUnavailableError`."""


class InvalidGroupError(ProducerError):
    """The group, or what was said with it, is not valid: nothing was sent. Correct it; sending it again as it is helps nothing.

    Args:
        path: The field, as `trajectories[0].reward`.
        detail: What is wrong there and what to do.
    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}" if path else detail)
        self.path = path
        self.detail = detail

    def inside(self, where: str) -> "InvalidGroupError":
        """The same error about a part of something larger: `reward` inside `groups[2]` is `groups[2].reward`."""
        return InvalidGroupError(f"{where}.{self.path}" if self.path else where, self.detail)


class BufferFullError(ProducerError):
    """`try_send` found no room in the buffer: nothing was sent. Wait, drop the group, or use `send`."""


class ProducerClosedError(ProducerError):
    """The producer is not started, or closed: nothing was sent."""


class DeliveryError(ProducerError):
    """A buffered group was not acknowledged.

    Args:
        group_id: Of the group (or the job id of a training job).
        detail: What happened.
        unknown: True if it may be in the log all the same. Sending the same object again is safe either way: it keeps its
            `group_id`, and the lane drops a repeat as a duplicate.
    """

    def __init__(self, group_id: str, detail: str, *, unknown: bool) -> None:
        outcome = "it may be in the log; sending the same object again is safe, the lane drops a repeat" if unknown else "it was not sent"
        super().__init__(f"group {group_id} was not acknowledged: {detail} ({outcome})")
        self.group_id = group_id
        self.unknown = unknown
