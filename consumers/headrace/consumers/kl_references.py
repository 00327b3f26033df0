"""The policy that a step measures KL against, as a local folder for the rank.

Which one is a pure function of the config and the model's version: the base model, a step of the same model, the step so many versions
back, or an adapter in the object store. Where a step's weights are is read from the ledger, once; later steps are noted as they commit.
Guarantees: a step's weights are checked against the digest that was committed; an adapter comes from our object store only, never from a
path or another host. Gives up: an adapter's identity (the ledger holds its URI, not its digest): names in the store are never used again.
"""

import asyncio
import logging
import shutil
import uuid
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.reading import stream_to_end
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError, ObjectStore, fetch_folder
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsRef
from headrace.trainer.options import KlOptions
from headrace.trainer.plan import KlReference

logger = logging.getLogger(__name__)

BASE = KlReference(kind="base")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAMESPACE = uuid.UUID("4d3c1f8e-20f7-5f0b-8c9e-5d1a4f2e7b61")


class ReferenceMissingError(HeadraceError):
    """The reference policy can't be had; says which and why."""


class KlReferences:
    """References for the models of one lane.

    Args:
        options: Kafka client options.
        steps_topic: The ledger.
        lane: Partition number.
        store: Object store.
        folder: Local folder, ours alone.
    """

    def __init__(self, options: ClientOptions, steps_topic: str, lane: int, store: ObjectStore, folder: Path) -> None:
        self._options = options
        self._topic = steps_topic
        self._lane = lane
        self._store = store
        self._folder = folder
        self._weights: dict[tuple[str, str, int], WeightsRef] = {}
        self._held: dict[str, Path] = {}

    def note(self, record: StepRecord) -> None:
        """A step was committed."""
        self._weights[record.model_id, record.incarnation, record.step] = record.weights

    async def of(self, model_id: str, incarnation: str, version: int, kl: KlOptions) -> KlReference:
        """The reference of the step that starts from `version`.

        Raises:
            ReferenceMissingError: no such step, its weights or the adapter are gone or changed, or the adapter is not in our store.
            HeadraceError: Kafka or the store can't be reached.
        """
        if kl.adapter_uri is not None:
            return await self._fetched(model_id, kl.adapter_uri, None)
        step = kl.reference_step if kl.step_lag is None else max(0, version - kl.step_lag)
        if not step:
            return BASE
        if step > version:
            raise ReferenceMissingError(f"kl_penalty_reference_step is {step}, but the model has {version} steps: name one that exists")
        ref = await self._weights_of(model_id, incarnation, step)
        return await self._fetched(model_id, ref.uri, ref.digest)

    async def _weights_of(self, model_id: str, incarnation: str, step: int) -> WeightsRef:
        key = (model_id, incarnation, step)
        if key not in self._weights:
            async for records in stream_to_end(self._options, self._topic, [self._lane]):
                for record in records:
                    found = open_record(record.value, header_text(record.headers), (StepRecord,))
                    assert isinstance(found, StepRecord)  # noqa: S101 - narrows the type: nothing else was asked for
                    self.note(found)
        if key not in self._weights:
            raise ReferenceMissingError(f"the ledger has no step {step} of model {model_id}, which the KL reference names")
        return self._weights[key]

    async def _fetched(self, model_id: str, uri: str, digest: str | None) -> KlReference:
        folder = self._folder / str(uuid.uuid5(_NAMESPACE, uri))
        try:
            if digest is None:
                await asyncio.to_thread(self._fetch_adapter, uri, folder)
            else:
                await asyncio.to_thread(fetch_folder, self._store, uri, digest, folder)
        except ObjectNotFoundError as error:
            raise ReferenceMissingError(f"the KL reference {uri} is gone: {error}") from error
        except (InvalidKeyError, DigestMismatchError) as error:
            raise ReferenceMissingError(f"the KL reference {uri} can't be used: {error}") from error
        # One reference a model is kept: a moving one would fill the disk.
        former = self._held.get(model_id)
        self._held[model_id] = folder
        if former is not None and former not in self._held.values():
            await asyncio.to_thread(shutil.rmtree, former, ignore_errors=True)
        return KlReference(kind="weights", folder=str(folder))

    def _fetch_adapter(self, uri: str, folder: Path) -> None:
        key = self._store.resolve(uri.rstrip("/"))
        for name in _ADAPTER_FILES:
            if not (folder / name).exists():
                self._store.get_file(f"{key}/{name}", folder / name)
