"""What a rank's pipe brings, read while the rank computes: a plan that is handed over before its turn costs no time when its turn comes.

Guarantees: messages come out in their order; a plan that is handed over ahead is kept until the next one is, and made ready meanwhile;
what fails there fails again, and is reported, when the plan is run. One that is ready, and was handed over for the step that runs, may be
continued to without a word, if no other message waits. Limitations: more than one plan ahead.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Literal

from headrace.schemas.state import TrainingScalars
from headrace.trainer.plan import Ahead, BaseSource, HandedOver, SavePlan, StateKey, StepPlan

logger = logging.getLogger(__name__)

Work = tuple[Literal["run"], StepPlan | SavePlan | None] | tuple[Literal["preload"], BaseSource] | tuple[Literal["drop"], None]
"""Only rank 0 gets the plan itself."""
Request = Work | tuple[Literal["wait"], None] | tuple[Literal["ahead"], Ahead] | tuple[Literal["run"], HandedOver]
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
        self._may_follow = False
        """Whether `_ahead` is ready, and for the step that runs to continue to."""
        self._lock = threading.Lock()
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

    def following(self, state: StateKey, scalars: TrainingScalars) -> StepPlan | None:
        """The plan to continue to from a state that was just made, with what the step before said of it; it is no one else's then."""
        with self._lock:
            plan = self._ahead
            if plan is None or not self._may_follow or plan.state != state or not self._messages.empty():
                return None
            self._ahead, self._may_follow = None, False
        return replace(plan, scalars=scalars)

    def _read(self) -> None:
        try:
            while True:
                message: Request = self._pipe.recv()
                match message:
                    case ("ahead", Ahead() as ahead):
                        self._keep(ahead)
                    case ("wait", None):
                        with self._lock:
                            self._may_follow = False
                    case ("run", what):
                        self._messages.put(("run", self._to_run(what)))
                    case _:
                        self._messages.put(message)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a message can't be read, and none behind it: this rank ends")
        finally:
            self._messages.put(None)

    def _keep(self, ahead: Ahead) -> None:
        plan = ahead.plan
        with self._lock:
            self._ahead, self._may_follow = plan, False
        try:
            self._ready(plan)
        except Exception as error:  # noqa: BLE001 - it is the run's to report
            logger.debug("step %d of %s can't be made ready: %s", plan.state.step + 1, plan.state.model_id, error)
        else:
            with self._lock:
                self._may_follow = ahead.goes_on

    def _to_run(self, what: StepPlan | SavePlan | HandedOver | None) -> StepPlan | SavePlan | None:
        with self._lock:
            self._may_follow = False  # what was handed over before was to follow another step
            if not isinstance(what, HandedOver):
                return what
            ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.out_dir != what.out_dir:
            return None  # the parent never says so of another; a plan that is None fails its run
        return replace(ahead, scalars=what.scalars, snapshot=what.snapshot, load_from=what.load_from)
