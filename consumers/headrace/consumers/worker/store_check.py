"""Whether a worker has the store of its group, and may write to it: checked before it asks for a lane.

Guarantees: a worker whose store has no bucket, refuses its credentials, or is not the one that the group's models are stored in, takes no
lane; its process ends with one sentence. The worker waits for a store that is away or full, and takes no lane meanwhile.
Limitations: a different store is only noticed after a model has committed a step.
"""

import asyncio
import os
import uuid
from collections.abc import Sequence

from headrace.core.kafka import ClientOptions
from headrace.core.model_views import latest_states
from headrace.core.outages import outlast
from headrace.core.reading import read_to_end
from headrace.core.settings import Settings
from headrace.core.store import InvalidKeyError, ObjectStore, StoreMisconfiguredError
from headrace.schemas.state import ModelState


async def check_store(settings: Settings, store: ObjectStore, options: ClientOptions) -> None:
    """Compare the store with what the log says is in it, then write, read and delete a probe; wait while the store is away.

    Raises:
        StoreMisconfiguredError: this is not the group's store, or it can't be used with these settings.
        KafkaUnavailableError: no broker.
    """
    states = latest_states(await read_to_end(options, settings.topic_names.models))
    stored = [state for state in states if isinstance(state, ModelState) and _is_stored(state, settings.worker.group)]

    async def checked() -> StoreMisconfiguredError | None:
        try:
            await asyncio.to_thread(_check, store, stored, settings.store.url)
        except StoreMisconfiguredError as error:
            return error  # no waiting helps
        return None

    if (error := await outlast(f"the worker of group {settings.worker.group}, which takes no lane before that,", checked)) is not None:
        raise error


def _is_stored(state: ModelState, group: str) -> bool:
    return state.weights is not None and state.status != "deleted" and state.worker_group == group


def _check(store: ObjectStore, stored: Sequence[ModelState], url: str) -> None:
    for state in stored:
        assert state.weights is not None  # noqa: S101 - narrows the type: only such models are given
        try:
            store.resolve(state.weights.uri)
        except InvalidKeyError:
            raise StoreMisconfiguredError(
                f"store.url is {url}, but model {state.name} of worker group {state.worker_group} is stored at {state.weights.uri}: "
                "set the store.url of the group's other workers"
            ) from None
    if stored and not any(next(store.list(f"models/{state.model_id}/"), None) for state in stored):
        raise StoreMisconfiguredError(
            f"store.url is {url}, which has no file of any of the {len(stored)} models that the log says are stored there "
            f"({stored[0].name}, …): mount it, or correct store.url and the settings under s3"
        )
    key, probe = f"worker-probes/{uuid.uuid4().hex}", os.urandom(16)
    probed = store.put_bytes_if_absent(key, probe)
    try:
        store.get_bytes(key, sha256=probed.sha256)
    finally:
        store.delete(key)
