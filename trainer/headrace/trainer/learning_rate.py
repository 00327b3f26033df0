"""The learning rate of one optimizer update.

    rate(u) = base * warm-up(u) * decay(u) * (reward multiplier) * k ** p

u counts updates from 0; W = warmup_updates, S = schedule_updates, q = min_rate_ratio:

    warm-up(u) = (u + 1) / (W + 1)                    for u < W, then 1
    x(u)       = (u - W) / (S - W), clipped to [0, 1]
    decay(u)   = 1                                    constant
               = 1 - (1 - q) x(u)                     linear
               = q + (1 - q) (1 + cos(pi x(u))) / 2   cosine

k is the number of trajectories that train in the whole update (the peer counts the branches of one packed row, so that its rate depends on
the packing). Guarantees: pure functions of their arguments, so a replay has the same rates; a finite rate, never above 10, the largest that
a config may ask for: the reward multiplier has no bound of its own.
"""

import math

from headrace.schemas.training import OptimizerSettings, RateSchedule, SftConfig

MAX_RATE = 10.0


def update_rate(
    base: float, optimizer: OptimizerSettings, update: int, *, reward_multiplier: float, trajectories: int, power: float
) -> float:
    """The rate of a policy-gradient update.

    Args:
        base: The config's `learning_rate`.
        optimizer: Warm-up and schedule, over the model's life.
        update: Updates that the model has behind it; 0 is the first.
        reward_multiplier: From `headrace.trainer.reward_trend.multiplier`; 1 where the option is off.
        trajectories: k, trajectories that train in the whole update; at least 1.
        power: p, `num_trajectories_learning_rate_multiplier_power`.

    Raises:
        ValueError: `trajectories` is below 1, `update` below 0, or `reward_multiplier` negative or not finite.
    """
    if trajectories < 1:
        raise ValueError(f"an update trains on at least one trajectory, not {trajectories}")
    if not 0 <= reward_multiplier < math.inf:
        raise ValueError(f"the reward multiplier must be finite and at least 0, not {reward_multiplier}")
    factor = _factor(optimizer.schedule, update, optimizer.warmup_updates, optimizer.schedule_updates, optimizer.min_rate_ratio)
    return min(MAX_RATE, base * factor * reward_multiplier * math.pow(trajectories, power))


def sft_rate(config: SftConfig, update: int, updates: int) -> float:
    """The rate of an update of supervised fine-tuning; its schedule ends with the job (S = updates).

    A warm-up as long as the job or longer fills it, and nothing decays.

    Args:
        config: Rate (of several, that of this update, or the last), warm-up and schedule.
        update: From 0, in this job.
        updates: Of the whole job.

    Raises:
        ValueError: `update` is below 0.
    """
    rates = config.learning_rate if isinstance(config.learning_rate, tuple) else (config.learning_rate,)
    return rates[min(update, len(rates) - 1)] * _factor(config.schedule, update, config.warmup_updates, updates, config.min_rate_ratio)


def _factor(schedule: RateSchedule, update: int, warmup: int, end: int | None, least: float) -> float:
    if update < 0:
        raise ValueError(f"updates count from 0, not {update}")
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule == "constant" or end is None:
        return 1.0
    x = min(1.0, (update - warmup) / (end - warmup)) if end > warmup else 1.0
    if schedule == "linear":
        return 1 - (1 - least) * x
    return least + (1 - least) * (1 + math.cos(math.pi * x)) / 2
