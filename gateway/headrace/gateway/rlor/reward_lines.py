"""A line of a dataset as a group: its samples with their rewards.

A sample's reward is the sum of weight times metric over the metrics of `rewardWeights`; with none listed, the only metric there is.
Guarantees: a line that can't be read says its number, the sample and what is wrong; every line has as many samples as the first. Gives up:
token ids; these files have text, and the completion of a sample trains.
"""

import math
from collections.abc import Mapping
from typing import cast

from headrace.core.errors import HeadraceError
from headrace.gateway.rlor.dataset_lines import DatasetFaultError, Line, RlLine, RlSample, read_line
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup


class LineError(HeadraceError):
    """A line that is no group of samples with rewards."""


class RewardLines:
    """Turns the lines of one dataset into groups, in their order.

    Args:
        what: The dataset, for messages.
        weights: Of metrics; empty: the only metric of the samples.
    """

    def __init__(self, what: str, weights: Mapping[str, float]) -> None:
        self._what = what
        self._weights = dict(weights)
        self._size: int | None = None
        self._number = 0

    def read(self, text: bytes) -> TrajectoryGroup:
        """The next line, as a group without an id.

        Raises:
            LineError: says where; lines are counted without the empty ones.
        """
        self._number += 1
        try:
            line = cast("RlLine", read_line(Line(self._number, text, ended=True), "RL"))
        except DatasetFaultError as error:
            raise LineError(f"{self._what} {error}") from None
        where = f"{self._what} line {self._number}"
        size = len(line.samples)
        if self._size is not None and size != self._size:
            raise LineError(f"{where}: {size} samples, but the lines before have {self._size}: every line needs the same number")
        self._size = size
        return TrajectoryGroup(
            trajectories=[self._trajectory(sample, f"{where} sample {index + 1}") for index, sample in enumerate(line.samples)],
            allow_training_without_logprobs=True,
        )

    def _trajectory(self, sample: RlSample, where: str) -> Trajectory:
        metrics = sample.metrics
        there = ", ".join(sorted(metrics))
        if not self._weights:
            if len(metrics) != 1:
                raise LineError(f"{where}: which metric is the reward? There are {there}: name some in rewardWeights")
            self._weights = dict.fromkeys(metrics, 1.0)
        for name in self._weights:
            if name not in metrics:
                raise LineError(f"{where}: the metric {name!r} of the reward is missing; there are {there}")
        reward = math.fsum(weight * metrics[name] for name, weight in self._weights.items())
        if not math.isfinite(reward):
            raise LineError(f"{where}: the reward, the weighted sum of {', '.join(self._weights)}, is not finite")
        return Trajectory(messages_and_choices=[*sample.messages], tools=sample.tools, reward=reward, metrics={**metrics})
