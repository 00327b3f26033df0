"""What a lane is doing, as an explicit state machine.

CLAIMING: fencing the former owner, reading states. SERVING: reading, training, committing. FENCED: another producer with our
id has started, or the outcome of a commit is unknown: everything in memory is void. RELEASED: not ours any more; the end.
"""

from enum import StrEnum


class LanePhase(StrEnum):
    """Phases of a lane on one worker."""

    CLAIMING = "claiming"
    SERVING = "serving"
    FENCED = "fenced"
    RELEASED = "released"


ALLOWED: dict[LanePhase, frozenset[LanePhase]] = {
    LanePhase.CLAIMING: frozenset({LanePhase.SERVING, LanePhase.FENCED, LanePhase.RELEASED}),
    LanePhase.SERVING: frozenset({LanePhase.FENCED, LanePhase.RELEASED}),
    LanePhase.FENCED: frozenset({LanePhase.CLAIMING, LanePhase.RELEASED}),
    LanePhase.RELEASED: frozenset(),
}


def move(current: LanePhase, to: LanePhase) -> LanePhase:
    """The next phase.

    Raises:
        RuntimeError: the transition is not allowed; always a defect of ours.
    """
    if to not in ALLOWED[current]:
        raise RuntimeError(f"a lane can't go from {current} to {to}")
    return to
