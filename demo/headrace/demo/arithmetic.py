"""The task for a real pretrained model: sums of small numbers, asked in its own chat template.

The reward is 1 if the answer is the sum and nothing else, otherwise 0. Guarantees: a question is a pure function of its random
generator. Limitations: answers in words are wrong.
"""

import random
from dataclasses import dataclass
from typing import Literal

from headrace.schemas.chat import Message

MAX_TOKENS = 8
LARGEST = 9
_EXAMPLES = ("2 + 2", "4", "5 + 1", "6")
"""Question and answer in turns: they show the form, which a model of this size does not take from an instruction alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One sum. Example: `Question(left=3, right=4).reward("7")` is 1.0."""

    left: int
    right: int

    def conversation(self) -> list[Message]:
        """What the model is shown: an instruction, two examples, and the sum."""
        roles: tuple[Literal["user", "assistant"], ...] = ("user", "assistant")
        examples = [Message(role=roles[i % 2], content=text) for i, text in enumerate(_EXAMPLES)]
        system = Message(role="system", content="You are a calculator. Answer with one number.")
        return [system, *examples, Message(role="user", content=f"{self.left} + {self.right}")]

    def reward(self, text: str) -> float:
        """1.0 if the answer is the sum and nothing else, else 0.0."""
        return float(text.strip() == str(self.left + self.right))


def draw_question(rng: random.Random) -> Question:
    """A new question; both numbers are 1 to `LARGEST`."""
    return Question(left=rng.randint(1, LARGEST), right=rng.randint(1, LARGEST))
