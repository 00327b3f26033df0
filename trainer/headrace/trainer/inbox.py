"""What a rank's pipe brings, read while the rank computes: a plan that is handed over before its turn costs no time when its turn comes.

Guarantees: messages come out in their order; a plan that is handed over ahead is kept until the next one is, and made ready meanwhile; what
fails there fails again, and is reported, when the plan is run. Gives up: more than one plan ahead.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Literal

from headrace.trainer.plan import BaseSource, HandedOver, SavePlan, StepPlan

logger = logging.getLogger(__name__)

Work = tuple[Literal["run"], StepPlan | SavePlan | None] | tuple[Literal["preload"], BaseSource] | tuple[Literal["drop"], None]
"""Only rank 0 gets the plan itself."""
Request = Work | tuple[Literal["ahead"], StepPlan] | tuple[Literal["run"], HandedOver]
"""To a rank."""


class Inbox:
    """Reads a pipe in a thread of its own.

    Args:
        pipe: To the worker.
        ready: Makes a plan ready that was handed over ahead; may raise.
    """

    def __init__(self, pipe: Connection, ready: Callable[[StepPlan], None]) -> None:
        self._pipe = pipe
        self._ready = ready
        self._ahead: StepPlan | None = None
        self._messages: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def next(self) -> Work:
        """The next message; blocks.

        Raises:
            EOFError: the parent is gone.
        """
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message

    def _read(self) -> None:
        try:
            while True:
                message: Request = self._pipe.recv()
                match message:
                    case ("ahead", StepPlan() as plan):
                        self._keep(plan)
                    case ("run", HandedOver() as now):
                        self._messages.put(("run", self._plan(now)))
                    case _:
                        self._messages.put(message)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a message can't be read, and none behind it: this rank ends")
        finally:
            self._messages.put(None)

    def _keep(self, plan: StepPlan) -> None:
        self._ahead = plan
        try:
            self._ready(plan)
        except Exception as error:  # noqa: BLE001 - it is the run's to report
            logger.debug("step %d of %s can't be made ready: %s", plan.state.step + 1, plan.state.model_id, error)

    def _plan(self, now: HandedOver) -> StepPlan | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.out_dir != now.out_dir:
            return None  # the parent never says so of another; a plan that is None fails its run
        return replace(ahead, scalars=now.scalars, snapshot=now.snapshot, load_from=now.load_from)
