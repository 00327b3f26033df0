"""How much of a model's jobs its state may list: a state that is larger than a record can never be committed (exactly-once rule 15).

A record takes 1 MiB unless a topic says otherwise. Of that, at most: open jobs 400 kB, pending groups 360 kB (5,000, with UUIDs for job
ids), the duplicate window's ids since the snapshot 213 kB, ids of jobs that ended or were cancelled early 64 kB, an intent 55 kB.

Guarantees: sizes are those of the JSON that is committed. Gives up: all of them at their limit at once, which is more than a record.
"""

from collections.abc import Mapping, Sequence

from headrace.schemas.state import OpenJob

OPEN_JOBS_BYTES = 400_000
"""JSON of the open jobs of one model."""
CLOSED_JOBS = 256
_CLOSED_JOBS_BYTES = 32_000
DETAIL_LIMIT = 1000
MESSAGE_LIMIT = 4000
"""Characters of what is said of a model or a job."""


class JobSizes:
    """The JSON of a model's open jobs, measured once for each object."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[OpenJob, int]] = {}

    def fit(self, jobs: Mapping[str, OpenJob]) -> bool:
        """Whether a state has room for these."""
        before = self._known
        self._known = {
            name: known if (known := before.get(name)) is not None and known[0] is job else (job, len(job.model_dump_json().encode()))
            for name, job in jobs.items()
        }
        return sum(size for _, size in self._known.values()) <= OPEN_JOBS_BYTES


def latest(job_ids: Sequence[str]) -> list[str]:
    """The last of these ids, as many as a state has room for."""
    kept: list[str] = []
    size = 0
    for job_id in reversed(job_ids[-CLOSED_JOBS:]):
        size += len(job_id.encode(errors="surrogatepass"))
        if size > _CLOSED_JOBS_BYTES:
            break
        kept.append(job_id)
    return kept[::-1]
