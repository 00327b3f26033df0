"""The lane's commits, one at a time: all news of its memory, as one transaction.

Guarantees: what a commit said, memory knows as said, and nothing else; commits of one lane do not overlap. Gives up: anything after a
commit that did not return cleanly; the lane's memory is void then.
"""

import asyncio
from collections.abc import Callable, Mapping

from headrace.consumers.lanes.writer import LaneWriter, OutcomeUnknownError
from headrace.consumers.memory.book import LaneBook
from headrace.consumers.memory.transaction import CommittedStep, TakenSnapshot, build
from headrace.schemas.topics import Topics


class LaneCommitter:
    """Commits for one owner of a lane.

    Args:
        book: The lane's memory.
        writer: Its transactional producer.
        topics: Topic names.
        source: `ce_source` of the records.
    """

    def __init__(self, book: LaneBook, writer: LaneWriter, topics: Topics, source: str) -> None:
        self._book = book
        self._writer = writer
        self._topics = topics
        self._source = source
        self._one_at_a_time = asyncio.Lock()
        self._void = False
        """A commit did not return cleanly: it may be in, and memory does not say so."""

    async def quiet(self) -> None:
        """Wait until no commit is on its way: cancelling one would leave its outcome open."""
        async with self._one_at_a_time:
            pass

    async def commit(
        self,
        step: CommittedStep | None = None,
        *,
        ready: Callable[[], bool] | None = None,
        snapshots: Mapping[str, TakenSnapshot] | None = None,
        clean: bool = False,
    ) -> bool:
        """Commit all news, and the step; False: it was not ready.

        Args:
            step: That has run.
            ready: Called when its turn has come, with no await before its list is made: says in the book what the step leads to, or that
                it is not wanted any more. Said before, another commit that is waited for could say it without the step.
            snapshots: Of committed states, by model id.
            clean: The lane is given up in order with this.

        Raises:
            FencedError, OutcomeUnknownError: memory is void.
        """
        book = self._book
        async with self._one_at_a_time:
            if self._void:
                raise OutcomeUnknownError("an earlier commit did not return")
            self._void = True
            if ready is not None and not ready():
                self._void = False
                return False
            transaction = build(
                topics=self._topics,
                source=self._source,
                lane=book.state,
                position=book.position,
                runs=book.runs.values(),
                dead_letters=book.dead_letters,
                ledger_end=book.ledger_end,
                step=step,
                snapshots=snapshots,
                clean=clean,
            )
            written = await self._writer.commit(transaction.records, transaction.lane.mark)
            transaction.apply()
            del book.dead_letters[: transaction.dead_letters]
            # Commands may have been applied while the commit was on its way: their position stays ours.
            book.state = transaction.lane.model_copy(update={"commands_through": book.state.commands_through})
            if step is not None:
                book.ledger_end = written[self._topics.steps] + 1
            self._void = False
            return True
