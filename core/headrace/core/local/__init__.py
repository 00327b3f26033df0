"""Real services on this machine for tests, demos and a first look: Apache Kafka and an S3 server.

`LocalBroker` and `LocalS3` fetch pinned jars into the user's cache once, run them with the Java of the extra `local`
(or `JAVA_HOME`), and end with the process that started them.
"""

from headrace.core.local.broker import LocalBroker, ensure_broker
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.s3 import LocalS3

__all__ = ["LocalBroker", "LocalS3", "LocalServiceError", "ensure_broker"]
