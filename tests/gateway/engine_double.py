"""What an engine of a deployment would say, without serving: for tests of what the gateway makes of it."""

from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import Sealed, sealed
from headrace.schemas.weights import WeightsApplied, WeightsFailed


class EngineDouble:
    """Acks as an engine does.

    Args:
        gate: Of a gateway that runs.
        engine: Name.
        deployment: That it belongs to.
    """

    def __init__(self, gate: Gate, engine: str, deployment: str) -> None:
        self._gate = gate
        self._engine = engine
        self._deployment = deployment

    async def serves(self, model_id: str, incarnation: str = "", version: int = 0) -> None:
        """It took a version."""
        ack = WeightsApplied(
            engine_id=f"{self._engine}:{model_id}",
            model_id=model_id,
            incarnation=incarnation,
            policy_version=version,
            digest="0" * 64,
            base_url="http://127.0.0.1:9/v1",
            deployment=self._deployment,
            seconds=0.1,
        )
        await self._write(sealed(ack, topic=self._gate.settings.topic_names.weight_acks, key=ack.engine_id))

    async def fails(self, model_id: str, incarnation: str, version: int, error: str) -> None:
        """It could not take a version."""
        ack = WeightsFailed(
            engine_id=f"{self._engine}:{model_id}",
            model_id=model_id,
            incarnation=incarnation,
            policy_version=version,
            digest="0" * 64,
            error=error,
            deployment=self._deployment,
        )
        await self._write(sealed(ack, topic=self._gate.settings.topic_names.weight_acks, key=ack.engine_id))

    async def forgets(self, model_id: str) -> None:
        """It serves a model no longer."""
        await self._write(Sealed(topic=self._gate.settings.topic_names.weight_acks, key=f"{self._engine}:{model_id}", value=None))

    async def _write(self, record: Sealed) -> None:
        await self._gate.writer.commit([record], is_in=lambda: True)
