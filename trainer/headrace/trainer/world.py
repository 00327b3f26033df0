"""How the ranks of a training world are arranged. Plain data, no torch: the worker's process reads it too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """How the ranks of a world train together.

    Example: two ranks that shard their optimizer: `WorldSettings(size=2, zero_stage=1)`.
    """

    size: int = 1
    """Ranks."""
    threads: int = 0
    """Torch threads of a rank; 0: its share of all cores. Part of the fingerprint: another number gives other bits."""
    zero_stage: int = 0
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    tokens_per_pass: int = 0
    """Tokens of a row where the config says nothing; 0: by device."""
    silence_seconds: float = 60.0
    """A rank without a sign of life for so long is hung."""
    collective_seconds: float = 1800.0
    """How long a rank waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of this process in its world."""

    rank: int = 0
    local_rank: int = 0
    rendezvous: str | None = None
    """A file that the ranks of one machine meet at; None: alone, or by the launcher's environment (torchrun, deepspeed)."""
