"""How far the weights of a fork are from the original's: Euclidean distances, tensor by tensor and over all.

    relative = ||ours - theirs|| / ||theirs||

Guarantees: float64 sums, whatever the weights are stored as; tensors that only one side has are refused, since nothing could be said of
them. An adapter is compared factor by factor, not as the product of both. Blocks, and imports torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Between two tensors, or between all of two models."""

    name: str
    distance: float
    """||ours - theirs||."""
    norm: float
    """||theirs||."""

    @property
    def relative(self) -> float:
        """Distance by norm; infinite where only the norm is 0."""
        return self.distance / self.norm if self.norm else (math.inf if self.distance else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDistance:
    """Between two folders of weights."""

    total: Distance
    tensors: tuple[Distance, ...]
    """The farthest first, by relative distance."""


def weights_distance(ours: Path, theirs: Path) -> WeightsDistance:
    """Compare two folders as `WeightsWriter` writes them.

    Args:
        ours: Of the fork.
        theirs: Of the original.

    Raises:
        HeadraceError: they do not have the same tensors, of the same shapes.
    """
    from safetensors import safe_open  # noqa: PLC0415 - reads into torch, which takes seconds

    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    if names != sorted(path.name for path in ours.glob("*.safetensors")):
        raise HeadraceError(f"the weights in {ours} and {theirs} are not in files of the same names: they can't be compared")
    found: list[Distance] = []
    for name in names:
        with safe_open(ours / name, "pt") as a, safe_open(theirs / name, "pt") as b:
            if set(a.keys()) != set(b.keys()):
                raise HeadraceError(f"{name} has other tensors than the original's: they can't be compared")
            for key in a.keys():  # noqa: SIM118 - safe_open is no mapping
                left, right = a.get_tensor(key).double(), b.get_tensor(key).double()
                if left.shape != right.shape:
                    raise HeadraceError(f"{key} has shape {list(left.shape)}, the original's {list(right.shape)}: they can't be compared")
                found.append(Distance(name=key, distance=float((left - right).norm()), norm=float(right.norm())))
    total = Distance(name="all", distance=math.hypot(*(each.distance for each in found)), norm=math.hypot(*(each.norm for each in found)))
    return WeightsDistance(total=total, tensors=tuple(sorted(found, key=lambda each: (-each.relative, each.name))))
