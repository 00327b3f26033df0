"""Lengths of samples as runs have them: three mixes whose plans are hard in different ways.

512 samples for rows of 16,384 tokens on 8 ranks; the longest is three quarters of a row, as a run sets its longest answer below what
a row holds. `fill` is how full the fewest micro steps (12, 13 and 13) would be: what is left decides how hard the plan is.
"""

import numpy as np
import numpy.typing as npt

CAPACITY = 16_384
RANKS = 8
SAMPLES = 512
STEPS = {"lognormal": 12, "bimodal": 13, "groups of 8": 13}
_LONGEST = 12_288


def lengths(mix: str, seed: int, fill: float = 0.97) -> npt.NDArray[np.int64]:
    """int64[512].

    Raises:
        KeyError: there is no such mix.
    """
    steps = STEPS[mix]
    rng = np.random.default_rng(seed)
    if mix == "lognormal":  # many short answers and a long tail
        shape = rng.lognormal(0, 0.7, SAMPLES)
    elif mix == "bimodal":  # direct answers, and one in six that thinks first
        shape = np.where(rng.random(SAMPLES) < 1 / 6, rng.normal(7, 1, SAMPLES), rng.normal(1, 0.25, SAMPLES))
    else:  # answers to one task are of like length
        shape = np.repeat(rng.lognormal(0, 0.6, SAMPLES // 8), 8) * rng.normal(1, 0.15, SAMPLES)
    scaled = shape.clip(0.1)
    for _ in range(20):  # the clip takes some away
        scaled = np.clip(scaled * (fill * steps * CAPACITY * RANKS / scaled.sum()), 64, _LONGEST)
    return scaled.astype(np.int64)


def costs(lengths_I: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64[512]: tokens + L² / 16,384, the weights' work and attention."""
    return lengths_I + lengths_I.astype(np.float64) ** 2 / 16_384
