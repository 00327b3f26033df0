"""The policy that a step measures KL against, as a local folder for the ranks.

The config and the model's version decide which policy: version 0 (the base model, or the weights that the model began with), a step of the
same model, the step a number of versions back, an adapter in the object store, or log-probabilities there. The ledger is read once for the
weights of steps; later steps are noted as they are committed. Guarantees: a step's weights are checked against their committed digest. An
adapter comes from the worker's object store only, never from a path or another host. A step does not begin if a sequence of it has no
stored log-probability. Limitations: the ledger has the URI of an adapter or of log-probabilities, not their digest, because names in the
store are never used again.
"""

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kept import kept_or_none
from headrace.core.reading import stream_to_end
from headrace.core.store import DigestMismatchError, InvalidKeyError, ObjectNotFoundError, ObjectStore, fetch_folder, read_manifest
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsRef
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.logprobs_file import LOGPROBS_FILE, Floats, LogprobsFileError, matched, read_logprobs
from headrace.trainer.options import KlOptions
from headrace.trainer.plan import KlReference

logger = logging.getLogger(__name__)

BASE = KlReference(kind="base")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_KEPT = 2
"""References of a model on the disk: of the step that runs, and of the step that is prepared. More would fill the disk."""
_NAMESPACE = uuid.UUID("4d3c1f8e-20f7-5f0b-8c9e-5d1a4f2e7b61")


class ReferenceMissingError(HeadraceError):
    """The reference policy can't be used; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencedStep:
    """The step that needs a reference."""

    model_id: str
    incarnation: str
    version: int
    """The version that it starts from."""
    start: WeightsRef | None = None
    """The weights of version 0; None: the base model."""
    groups: Sequence[TokenizedGroup] = ()
    evaluation: Sequence[TokenizedGroup] = ()
    is_doomed: Callable[[int], bool] = field(default=lambda _step: False)
    """Whether a client deleted a step's weights: they may be removed at any moment."""


class KlReferences:
    """References for the models of one lane."""

    def __init__(self, options: ClientOptions, steps_topic: str, lane: int, store: ObjectStore, folder: Path) -> None:
        self._options = options
        self._topic = steps_topic
        self._lane = lane
        self._store = store
        self._folder = folder
        self._weights: dict[tuple[str, str, int], WeightsRef] = {}
        self._held: dict[str, tuple[Path, ...]] = {}
        """By model, newest last."""
        self._logprobs: tuple[str, dict[bytes, Floats]] | None = None
        """The URI of the file that was read last, and its content."""

    def note(self, record: StepRecord) -> None:
        """A step was committed."""
        self._weights[record.model_id, record.incarnation, record.step] = record.weights

    async def find(self, needed: ReferencedStep, kl: KlOptions) -> KlReference:
        """The reference of a step.

        Raises:
            ReferenceMissingError: no such step; its weights, the adapter or the log-probabilities are gone or changed, are not in our
                store, or lack a sequence of the step.
            HeadraceError: Kafka or the store can't be reached.
        """
        if kl.logprobs_uri is not None:
            return await self._stored_logprobs(needed, kl.logprobs_uri)
        if kl.adapter_uri is not None:
            return await self._fetched(needed.model_id, kl.adapter_uri, None)
        version = needed.version
        step = kl.reference_step if kl.step_lag is None else max(0, version - kl.step_lag)
        if not step:
            return BASE if needed.start is None else await self._fetched(needed.model_id, needed.start.uri, needed.start.digest)
        if step > version:
            raise ReferenceMissingError(f"kl_penalty_reference_step is {step}, but the model has {version} steps: name one that exists")
        if needed.is_doomed(step):
            raise ReferenceMissingError(f"the KL reference is step {step}, a checkpoint that was deleted: name one that is there")
        ref = await self._weights_of(needed.model_id, needed.incarnation, step)
        return await self._fetched(needed.model_id, ref.uri, ref.digest)

    async def _stored_logprobs(self, needed: ReferencedStep, uri: str) -> KlReference:
        if self._logprobs is None or self._logprobs[0] != uri:
            try:
                self._logprobs = (uri, await asyncio.to_thread(self._read_logprobs, uri))
            except ObjectNotFoundError as error:
                raise ReferenceMissingError(f"kl_ref_logprobs {uri} is gone: {error}") from error
            except (InvalidKeyError, DigestMismatchError, LogprobsFileError) as error:
                raise ReferenceMissingError(f"kl_ref_logprobs {uri} can't be used: {error}") from error
        known = self._logprobs[1]
        logprobs, missing = matched(needed.groups, known)
        if missing:
            raise ReferenceMissingError(
                f"kl_ref_logprobs {uri} lacks {len(missing)} of the step's {len(logprobs)} sequences, the first of {missing[0]}: run a "
                "forward-only job on the same groups, with the same base model and chat template"
            )
        evaluation, unknown = matched(needed.evaluation, known)
        if unknown:
            logger.info("%s lacks %d of the evaluation set's %d sequences: their KL is left out", uri, len(unknown), len(evaluation))
        return KlReference(kind="logprobs", logprobs=logprobs, evaluation=evaluation)

    def _read_logprobs(self, uri: str) -> dict[bytes, Floats]:
        uri = uri.rstrip("/")
        digests = {file.path: file.sha256 for file in read_manifest(self._store, uri, None).files}
        if LOGPROBS_FILE not in digests:
            raise LogprobsFileError(f"it has no {LOGPROBS_FILE}: name `logprobs.uri` of a forward-only job's document")
        return read_logprobs(self._store.get_bytes(f"{self._store.resolve(uri)}/{LOGPROBS_FILE}", sha256=digests[LOGPROBS_FILE]))

    async def _weights_of(self, model_id: str, incarnation: str, step: int) -> WeightsRef:
        key = (model_id, incarnation, step)
        if key not in self._weights:
            async for records in stream_to_end(self._options, self._topic, [self._lane]):
                for record in records:
                    if isinstance(found := kept_or_none(record, (StepRecord,)), StepRecord):
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
        held = (*(path for path in self._held.get(model_id, ()) if path != folder), folder)
        self._held[model_id] = held[-_KEPT:]
        for former in held[:-_KEPT]:
            if not any(former in folders for folders in self._held.values()):
                await asyncio.to_thread(shutil.rmtree, former, ignore_errors=True)
        return KlReference(kind="weights", folder=str(folder))

    def _fetch_adapter(self, uri: str, folder: Path) -> None:
        key = self._store.resolve(uri.rstrip("/"))
        for name in _ADAPTER_FILES:
            if not (folder / name).exists():
                self._store.get_file(f"{key}/{name}", folder / name)
