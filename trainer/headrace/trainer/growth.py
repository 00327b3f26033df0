"""Divergence that stays finite: an update must not make the weights many times larger than they were.

    |w after| <= growth * max(|w before|, 0.01 * sqrt(n))

|w| is the Euclidean norm of all weights that train, n their number, `growth` the model's `optimizer.max_weight_growth`. Each update is
compared with the one before it. The bound holds the update, too: one that is longer than (growth + 1) times the right side breaks it. The
second term is the norm of weights of size 0.01: it keeps weights that begin at 0 from making the bound 0.

Guarantees: AdamW moves a weight by about the rate, so healthy rates are far below the bound, in a LoRA model's first step too, where one
factor is 0 and the other has its norm. Nothing changes the bits of a step that is taken. Limitations: an update that spoils the weights
without making them larger is not found here.
"""

import math

from headrace.trainer.plan import DivergedError
from headrace.trainer.shards import Trainable
from headrace.trainer.training_state import check_finite

_SMALL = 0.01


class Growth:
    """Looks at the weights' norm before the first update and after each. Called by all ranks.

    Args:
        trainable: The model's state.
        most: `max_weight_growth`.
    """

    def __init__(self, trainable: Trainable, most: float) -> None:
        self._trainable = trainable
        self._most = most
        self._before, count = trainable.norm()
        self._least = _SMALL * math.sqrt(count)

    def check(self, update: str, rate: float) -> None:
        """After an update.

        Args:
            update: Which, for the message.
            rate: Its learning rate.

        Raises:
            DivergedError: the weights grew too much, or are not finite.
        """
        norm, _ = self._trainable.norm()
        bound = self._most * max(self._before, self._least)
        if not norm <= bound:
            check_finite(self._trainable)
            raise DivergedError(
                f"{update}, at rate {rate:g}, takes the weights' norm from {self._before:.4g} to {norm:.4g}, above {bound:.4g} "
                f"(optimizer.max_weight_growth={self._most:g}): lower the learning rate or the weight decay; the step is not taken"
            )
        self._before = norm
