"""DeepSpeed for one rank: float32 with gloo on a CPU, bf16 autocast over float32 weights on a GPU.

Guarantees: starts in a second, without a compiler, a free port or MPI. Gives up: DeepSpeed's shared-memory all-reduce for CPU
ranks, which it would compile with the C++ compiler of the machine at the first start (37 s measured, and a failure where there is
none); and bf16 master weights: on a GPU the weights stay float32, so that a snapshot is the whole state.
"""

import logging
import os
from typing import Any

import torch


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def join_world() -> None:
    """Import DeepSpeed (seconds) and make the world of one rank; once a process."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed  # noqa: PLC0415 - takes seconds, and reads the environment set above

    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if torch.distributed.is_initialized():
        return
    # Said to be incompatible, the shared-memory operator is not compiled (see above); gloo does its work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # A store inside the process: one rank needs no port.
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # exported at run time only
    deepspeed.init_distributed(backend, verbose=False)


def start_engine(model: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Any:  # noqa: ANN401 - deepspeed is untyped
    """A DeepSpeed engine over the model; it accumulates until `set_gradient_accumulation_boundary(True)`.

    Args:
        model: With the parameters that train.
        optimizer: Over those parameters.
        max_grad_norm: Clip.
    """
    import deepspeed  # noqa: PLC0415 - `join_world` imported it

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            # Micro batches differ in number from step to step: the boundary is set by hand, and the loss is normalised by the step's
            # token count before the first backward, not divided by a number of micro batches.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
            "zero_optimization": {"stage": 0},
            "torch_autocast": {"enabled": torch.cuda.is_available(), "dtype": "bfloat16"},
            "steps_per_print": 2**31,
        },
    )
    return engine
