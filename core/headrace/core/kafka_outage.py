"""What a process logs while Kafka is away: a warning when it begins to wait, one a minute meanwhile, and one when Kafka answers again.

aiokafka logs each failed attempt of each client, hundreds of lines a second. Inside `folding` those lines, and those of Headrace that pass
through `log_trouble`, start a question to Kafka, asked once a second. If Kafka does not answer, the lines are dropped and this module's
warnings replace them. If it answers, they are logged, each kind of aiokafka's once a minute at most.

Guarantees: only clients that are started inside `folding` are affected; other aiokafka clients of the same process log as they did. Clients
of one event loop and one address share the warnings. Limitations: an outage that is shorter than one question is not reported. Without any
complaint for two minutes the waiting ends without the last warning: its clients are gone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from weakref import WeakKeyDictionary

from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError

from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, KafkaUnavailableError
from headrace.core.topic_admin import cluster_id

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 60.0
_ASK_SECONDS = 5.0
_PAUSE_SECONDS = 1.0
_SILENT_SECONDS = 120.0
_AWAY = (KafkaUnavailableError, KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, RequestTimedOutError)

_options: ContextVar[Callable[[], ClientOptions] | None] = ContextVar("kafka_outage", default=None)
_asks: ContextVar[bool] = ContextVar("kafka_outage_asks", default=False)


@contextmanager
def folding(options: Callable[[], ClientOptions]) -> Iterator[None]:
    """Fold what clients log that are started inside the block, also by tasks that are created there.

    Args:
        options: Of the Kafka that they use; called when the first of them complains.
    """
    for name, known in list(logging.root.manager.loggerDict.items()):
        if name.split(".")[0] == "aiokafka" and isinstance(known, logging.Logger):
            known.addFilter(_fold)  # adding it again has no effect
    token = _options.set(cache(options))
    try:
        yield
    finally:
        _options.reset(token)


def log_trouble(log: logging.Logger, level: int, error: BaseException, message: str, *args: object) -> None:
    """Log a message about an error; inside `folding`, an error that Kafka's absence explains is folded."""
    outage = _outage() if is_outage(error) else None
    if outage is None:
        log.log(level, message, *args)
    elif log.isEnabledFor(level):
        outage.complain(log.makeRecord(log.name, level, "", 0, message, args, None))


def is_outage(error: BaseException) -> bool:
    """Whether an error says that Kafka is away, itself or as a cause."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_outage(part) for part in error.exceptions)
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, KafkaError | HeadraceError) and error.__cause__ is not None and is_outage(error.__cause__)


def is_away() -> bool:
    """Whether Kafka is known to be away."""
    outage = _outage()
    return outage is not None and outage.away


async def kafka_back() -> None:
    """Wait until Kafka answers, if it is known to be away."""
    outage = _outage()
    if outage is not None:
        await outage.back.wait()


async def kafka_problem(options: ClientOptions) -> str | None:
    """Ask Kafka for a sign of life, for a few seconds: why it does not answer; None: it does."""
    try:
        async with deadline(_ASK_SECONDS):
            await cluster_id(options)
    except HeadraceError as error:
        return str(error)
    except TimeoutError:
        return f"Kafka at {options['bootstrap_servers']} does not answer within {_ASK_SECONDS:g} s"
    return None


class _Outage:
    """One address, as one event loop reaches it."""

    def __init__(self, options: ClientOptions) -> None:
        self.back = asyncio.Event()
        self.back.set()
        self._options = options
        self._asking: asyncio.Task[None] | None = None
        self._held: dict[str, logging.LogRecord] = {}
        self._logged: dict[str, float] = {}
        self._warned = -_EVERY_SECONDS
        self._complained = 0.0
        self._dropped = 0
        """Messages of Headrace; those of aiokafka are attempts, which no one misses."""

    @property
    def away(self) -> bool:
        return not self.back.is_set()

    def complain(self, record: logging.LogRecord) -> None:
        """Something failed: drop the record or log it later, as Kafka answers."""
        self._complained = time.monotonic()
        if self.away:
            self._dropped += _is_ours(record)
        else:
            self._held.setdefault(record.getMessage() if _is_ours(record) else record.msg, record)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="kafka outage")

    async def _ask(self) -> None:
        _asks.set(True)  # of this task: what this question's own client logs is dropped
        since = time.time()
        problem = await kafka_problem(self._options)
        if problem is None:
            self._log_held()
            return
        self._dropped = sum(map(_is_ours, self._held.values()))
        self._held.clear()
        self.back.clear()
        reported = False
        try:
            while problem is not None and time.monotonic() - self._complained < _SILENT_SECONDS:
                if time.monotonic() - self._warned >= _EVERY_SECONDS:
                    self._warned, reported = time.monotonic(), True
                    logger.warning("Waiting for Kafka since %s: %s", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since)), problem)
                await asyncio.sleep(_PAUSE_SECONDS)  # a pause between two questions
                problem = await kafka_problem(self._options)
            if reported and problem is None:
                where = self._options["bootstrap_servers"]
                dropped = f"; {self._dropped} messages about failures in between are not logged" if self._dropped else ""
                logger.warning("Kafka at %s answers again after %.0f s%s", where, time.time() - since, dropped)
        finally:
            self.back.set()

    def _log_held(self) -> None:
        now = time.monotonic()
        for kind, record in self._held.items():
            if _is_ours(record) or now - self._logged.get(kind, -_EVERY_SECONDS) >= _EVERY_SECONDS:
                if not _is_ours(record):
                    self._logged[kind] = now
                logging.getLogger(record.name).callHandlers(record)
        self._held.clear()


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.startswith("headrace.")


_outages: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Outage]]" = WeakKeyDictionary()


def _outage() -> _Outage | None:
    """Of the running loop, inside `folding`."""
    made = _options.get()
    if made is None:
        return None
    try:
        of_loop = _outages.setdefault(asyncio.get_running_loop(), {})
        options = made()
    except (RuntimeError, HeadraceError):  # no loop runs, or no Kafka is configured
        return None
    where = options["bootstrap_servers"]
    if where not in of_loop:
        of_loop[where] = _Outage(options)
    return of_loop[where]


def _fold(record: logging.LogRecord) -> bool:
    if _asks.get():
        return False
    if record.levelno < logging.WARNING or record.exc_info or (outage := _outage()) is None:
        return True
    outage.complain(record)
    return False
