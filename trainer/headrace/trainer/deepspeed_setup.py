"""DeepSpeed for one rank of a world: float32 with gloo on a CPU, bf16 autocast over float32 weights on a GPU.

Guarantees: starts in a second, without a compiler or MPI, and a world on one machine without a free port; sums over ranks in one order,
so equal worlds give equal bits. Limitations: DeepSpeed's shared-memory all-reduce for CPU ranks, which it would compile with the C++
compiler of the machine at the first start (37 s measured, and a failure where there is none); its fused CPU Adam, for the same reason;
overlap of communication and backward; and bf16 master weights: on a GPU the weights stay float32, so that a snapshot is the whole state.
"""

import logging
import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from headrace.trainer.world import Seat, WorldSettings


@cache
def device() -> torch.device:
    """The device of this rank; asked once, since torch looks for a driver each time (0.2 ms)."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def join_world(world: WorldSettings, seat: Seat) -> None:
    """Import DeepSpeed (seconds) and join the world; once a process. Returns when every rank is there."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(seat.local_rank)
    import deepspeed  # noqa: PLC0415 - takes seconds, and reads the environment set above

    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if torch.distributed.is_initialized():
        return
    # Said to be incompatible, the shared-memory operator is not compiled (see above); gloo does its work. The list is replaced, not
    # changed: DeepSpeed makes its own when it is first looked at, and asks the C compiler about every operator (0.3 s).
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False, "deepspeed_not_implemented": False}
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        # Some CUDA kernels add in an order of their own; a replay needs the same bits. Where there is no other kernel, torch says so once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=world.collective_seconds)
    if world.size > 1 and seat.rendezvous is None:
        torch.distributed.init_process_group(backend, timeout=timeout, rank=seat.rank, world_size=world.size)
    else:
        # A store in this process, or in a file: ranks of one machine need no port.
        meeting = seat.rendezvous
        store = torch.distributed.HashStore() if meeting is None else torch.distributed.FileStore(meeting, world.size)  # type: ignore[attr-defined]  # exported at run time only
        torch.distributed.init_process_group(backend, store=store, timeout=timeout, rank=seat.rank, world_size=world.size)
    deepspeed.init_distributed(backend, verbose=False)


def start_engine(model: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float, world: WorldSettings) -> Any:  # noqa: ANN401 - deepspeed is untyped
    """A DeepSpeed engine over the model; it accumulates until `set_gradient_accumulation_boundary(True)`.

    Args:
        model: With the parameters that train.
        optimizer: Over those parameters.
        max_grad_norm: Clip.
        world: ZeRO stage, offload.
    """
    import deepspeed  # noqa: PLC0415 - `join_world` imported it

    zero: dict[str, object] = {"stage": world.zero_stage, "overlap_comm": False}
    if world.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            # Micro steps differ in number from update to update: the boundary is set by hand, and the normalisers are in the loss before
            # the first backward, not a division by a number of micro batches.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {"enabled": torch.cuda.is_available(), "dtype": "bfloat16"},
            "steps_per_print": 2**31,
        },
    )
    return engine


def over_ranks(values: torch.Tensor, operation: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
    """A small tensor reduced over all ranks, on the CPU. Called by all ranks."""
    if torch.distributed.get_world_size() == 1:
        return values.cpu()
    values = values.to(device())
    torch.distributed.all_reduce(values, op=operation)
    return values.cpu()


def set_clip(engine: Any, max_grad_norm: float) -> None:  # noqa: ANN401 - deepspeed is untyped
    """Clip the next updates at another norm: a world serves several models and kinds of jobs."""
    engine._config.gradient_clipping = max_grad_norm
    if hasattr(engine.optimizer, "clip_grad"):  # ZeRO's own
        engine.optimizer.clip_grad = max_grad_norm
