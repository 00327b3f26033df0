"""The one error of the local services: a sentence for a person, what went wrong and what to do about it."""


class LocalServiceError(RuntimeError):
    """A local Kafka or S3 server could not be fetched, started or kept running.

    The message is written for the person at the terminal: it names the file, port or folder and the way out.
    Callers that face people (the command line) print it without a traceback.
    """
