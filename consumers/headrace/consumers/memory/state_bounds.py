"""How much of a model's jobs its state may list: a state that is larger than a record can never be committed (exactly-once rule 15).

A record takes 1 MiB unless a topic says otherwise. Of that, at most: open jobs 350 kB, pending groups 360 kB (5,000, with UUIDs for job
ids; fewer with longer ones), the duplicate window's ids since the snapshot 213 kB, ids of jobs that ended or were cancelled early 64 kB, an
intent 55 kB.

Guarantees: sizes are those of the JSON that is committed, but for a document's times and counts. Gives up: all of them at their limit at
once, which is more than a record.
"""

from collections.abc import Mapping, Sequence

import orjson

from headrace.schemas.state import OpenJob

OPEN_JOBS_BYTES = 350_000
"""JSON of the open jobs of one model."""
CLOSED_JOBS = 256
_CLOSED_JOBS_BYTES = 32_000
_UUID_BYTES = 38
DETAIL_LIMIT = 1000
MESSAGE_LIMIT = 4000
"""Characters of what is said of a model or a job."""


def pending_room(maximum: int, job_id: str | None) -> int:
    """How many groups may wait for one more of this job to be admitted: the state lists each with the id of its job."""
    return maximum if job_id is None else maximum * _UUID_BYTES // max(_UUID_BYTES, len(orjson.dumps(job_id)))


class JobSizes:
    """The JSON of a model's open jobs, measured as they grow."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[OpenJob, int]] = {}
        self._total = 0

    def fit(self, jobs: Mapping[str, OpenJob], grown: str) -> bool:
        """Whether a state has room for these; `grown` is the one that was added or has more in it, and must end if not."""
        measured = self._known.get(grown, (None, 0))[1]
        if len(jobs) == len(self._known) + (grown not in self._known):
            self._known[grown] = (jobs[grown], self._size(jobs[grown]))
            self._total += self._known[grown][1] - measured
        else:
            # Others have ended meanwhile.
            self._known = {name: (job, self._size(job)) for name, job in jobs.items()}
            self._total = sum(size for _, size in self._known.values())
        if self._total <= OPEN_JOBS_BYTES:
            return True
        self._total -= self._known.pop(grown)[1]
        return False

    def _size(self, job: OpenJob) -> int:
        before, size = self._known.get(job.job_id, (None, 0))
        if before is job:
            return size
        if before is not None and before.group_ids is job.group_ids and (before.document is None) == (job.document is None):
            # What a job that waits gets more of; one job may have thousands, and comes here with each.
            refused = sum(len(orjson.dumps(group_id)) + 1 for group_id in job.refused[len(before.refused) :])
            return size + refused + _rejections_size(job) - _rejections_size(before)
        return len(job.model_dump_json().encode())


def _rejections_size(job: OpenJob) -> int:
    return len((job.rejections if job.document is None else job.document.rejections).model_dump_json())


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
