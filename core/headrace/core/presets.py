"""Training configs by the name of a published method, as the RLOR loss config names them.

| method | loss | ratio's clip | KL in the loss (k3) | aggregation |
|---|---|---|---|---|
| GRPO (arXiv 2402.03300) | PPO, ratio per token | [0.8, 1.2] | 0.001 unless said | token mean |
| DAPO (arXiv 2503.14476) | PPO, ratio per token | [0.8, 1.28] | none | token mean |
| GSPO (arXiv 2507.18071) | PPO, ratio per sequence | [1 - 0.0003, 1 + 0.0004] | none | sequence mean of token means |

None rescales advantages over the batch. Guarantees: a preset is a plain `TrainConfig`, so any option may be set over it, and no other
module knows methods. Limitations: DAPO's dynamic sampling and over-long shaping, as the hosted service does; DPO and ORPO.
"""

import math

from headrace.core.errors import HeadraceError
from headrace.schemas.training import TrainConfig

GRPO = TrainConfig(
    loss_fn="ppo", epsilon=0.2, epsilon_high=0.2, kl_loss_coef=0.001, loss_aggregation="token_mean", rescale_advantages=False
)
DAPO = TrainConfig(loss_fn="ppo", epsilon=0.2, epsilon_high=0.28, loss_aggregation="token_mean", rescale_advantages=False)
GSPO = TrainConfig(
    loss_fn="ppo",
    importance_sampling_level="sequence",
    epsilon=0.0003,
    epsilon_high=0.0004,
    loss_aggregation="sequence_mean_token_mean",
    rescale_advantages=False,
)

# By the names of the hosted API; GSPO under its paper's name too.
_BY_NAME = {"METHOD_UNSPECIFIED": GRPO, "GRPO": GRPO, "DAPO": DAPO, "GSPO": GSPO, "GSPO_TOKEN": GSPO}
_NOT_BUILT = ("DPO", "ORPO")


class PresetError(HeadraceError):
    """There is no such preset, or not with this KL coefficient."""


class MethodNotBuiltError(PresetError):
    """The method exists, but not in this release."""


def preset(name: str, kl_beta: float | None = None) -> TrainConfig:
    """The config of a method.

    Args:
        name: GRPO, DAPO, GSPO, GSPO_TOKEN or METHOD_UNSPECIFIED (GRPO), in any case.
        kl_beta: `klBeta`, coefficient of KL in the loss; None or 0: the method's own.

    Raises:
        MethodNotBuiltError: DPO, ORPO.
        PresetError: an unknown name; a coefficient that is negative, not finite, or not 0 with a method without KL.
    """
    method = name.upper()
    if method in _NOT_BUILT:
        raise MethodNotBuiltError(f"method {method} is not built yet; there are GRPO, DAPO and GSPO_TOKEN")
    if method not in _BY_NAME:
        raise PresetError(f"unknown method {name!r}; there are {', '.join(_BY_NAME)}")
    config = _BY_NAME[method]
    if not kl_beta:
        return config.model_copy()
    if not 0 < kl_beta < math.inf:
        raise PresetError(f"kl_beta must be a finite number of at least 0, not {kl_beta}")
    if config.kl_loss_coef is None:
        raise PresetError(f"loss_config.kl_beta must be 0 or unset for method {method}, which has no KL term; it is {kl_beta}")
    return config.model_copy(update={"kl_loss_coef": kl_beta})
