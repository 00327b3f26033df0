"""The one error of the local services: a sentence for a person, what went wrong and what to do about it."""

from headrace.core.errors import HeadraceError


class LocalServiceError(HeadraceError):
    """A local Kafka or S3 server could not be fetched, started or kept running.

    The message names the file, port or folder and the way out.
    """
