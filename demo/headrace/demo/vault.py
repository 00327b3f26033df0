"""The demo's task: fetch a secret through a tool, in two turns.

The user names a key. Only the tool knows the key's secret, and secrets are drawn again in every episode, so nothing can be
learned by heart. Turn 1: call the tool with that key; the tool answers. Turn 2: say what the tool said. The reward is 1 if the
final answer is the key's secret, else 0: no shaping, no partial credit.

    user       what is in amber ?
    assistant  vault amber
    tool       heron
    assistant  answer heron

Guarantees: an episode is a pure function of its random generator. Limitations: no second chance; a call of the wrong form ends the episode.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.schemas.chat import Message, Tool, ToolFunction

KEYS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "grove", "harbor", "iris", "jade")
SECRETS = ("heron", "lynx", "moth", "newt", "otter", "puma", "quail", "raven", "stork", "tapir")
CALL = "vault"
ANSWER = "answer"
END = "<|end|>"
"""Marks the end of a turn; the stop token."""
QUESTION = ("what", "is", "in", "?")
"""The words of the user's sentence, the key is before the last one."""

TOOL = Tool(
    function=ToolFunction(
        name=CALL,
        description="Says the secret that is kept under a key.",
        parameters={"type": "object", "properties": {"key": {"type": "string", "enum": list(KEYS)}}, "required": ["key"]},
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One task: the key in question, and the vault's content, which only the tool sees."""

    key: str
    secrets: Mapping[str, str]

    @property
    def question(self) -> Message:
        """What the user says."""
        *words, mark = QUESTION
        return Message(role="user", content=" ".join([*words, self.key, mark]))

    def call(self, words: Sequence[str]) -> str | None:
        """The key that the assistant's turn calls the tool with; None if its form is wrong."""
        match words:
            case [said, key, last] if said == CALL and last == END and key in self.secrets:
                return key
        return None

    def reward(self, words: Sequence[str]) -> float:
        """1.0 if the final turn says the key's secret in the right form, else 0.0."""
        return float(list(words) == [ANSWER, self.secrets[self.key], END])


def draw_episode(rng: random.Random, key: str | None = None) -> Episode:
    """A new episode; `key` fixes the question, the secrets are new all the same, and no two keys share one."""
    return Episode(key=key or rng.choice(KEYS), secrets=dict(zip(KEYS, rng.sample(SECRETS, len(KEYS)), strict=True)))
