"""The batch that comes after the one that is being stored: foreseen where the log alone decides it.

Guarantees: a pure look, nothing is refused or moved; what is foreseen is what `cut.next_batch` will give once the current step is
committed, unless a command or a clock comes in between. So only the stream is foreseen: a job's step needs its intent first (exactly-once
rule 9), as does a linger. Gives up: batches of which a member would be refused at the next version, or trains without what its group says
(a shadow's): they wait for the cut.
"""

from headrace.consumers.memory.model_run import ModelRun
from headrace.consumers.steps.cut import Batch, job_batch, judge, stream_batch


def foreseen(run: ModelRun, current: Batch, nodes: int) -> Batch | None:
    """The model's next batch if `current` is committed as the next version; None where that can't be known yet.

    Args:
        run: The model; its state is the one that `current` started from.
        current: Has run, and is not committed.
        nodes: Machines of the world.
    """
    if not run.trains or run.rebasing is not None or run.start_from is not None or run.lingered:
        return None
    batch = stream_batch(run, without=frozenset(current.offsets))
    if batch is None:
        return None
    jobs = (job_batch(run, job, nodes) for job in run.jobs.values() if job.job_id != current.job_id)
    if any(job is not None and job.completed_at < batch.completed_at for job in jobs):
        return None
    version, shadow = run.state.policy_version + 1, run.state.shadow_of is not None
    unchanged = all(judge(run.state.settings, version, waiting.group, shadow=shadow).group is waiting.group for waiting in batch.groups)
    return batch if unchanged else None
