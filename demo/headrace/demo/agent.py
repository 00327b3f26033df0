"""One agent process of the demo: `python -m headrace.demo.agent '{…}'`.

It samples with an engine of its own, sends its groups to Kafka, and follows the weights that the trainer publishes. It shares only the
topics and the object store with the worker. Guarantees: never more groups under way than the lag allows; a slot whose group was
refused is given back. Ends by SIGTERM.
"""

import asyncio
import logging
import random
import sys
from contextlib import aclosing
from pathlib import Path

from headrace.consumers import LocalEngine, LocalEngineAdapter, WeightSubscriber
from headrace.core.kafka import client_options
from headrace.core.kept import kept_or_none
from headrace.core.lanes import lane_of
from headrace.core.reading import follow
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count
from headrace.demo.options import AgentConfig
from headrace.demo.tasks import ArithmeticTask, VaultTask
from headrace.producers import PaceGate, TrajectoryProducer
from headrace.schemas import topics
from headrace.schemas.carried import CARRIED
from headrace.schemas.events import GroupRejected
from headrace.schemas.weights import WeightsPublished

logger = logging.getLogger(__name__)


async def run_agent(config: AgentConfig, settings: Settings) -> None:
    """Sample and send until cancelled."""
    task = VaultTask() if config.task == "vault" else ArithmeticTask()
    rng = random.Random(config.seed)
    await _model_exists(config, settings)
    engine = await asyncio.to_thread(LocalEngine, config.base_path, threads=1, seed=config.seed)
    gate = PaceGate(config.max_policy_lag, config.groups_per_step, config.share)
    mine: set[str] = set()

    async def applied(record: WeightsPublished) -> None:
        gate.observe(record.policy_version)

    async with (
        TrajectoryProducer(settings, model_id=config.model_id, source=config.name) as producer,
        WeightSubscriber(
            settings,
            LocalEngineAdapter(engine),
            model_id=config.model_id,
            engine_id=config.name,
            cache_dir=Path(config.cache_dir),
            on_applied=applied,
        ) as weights,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(_give_back_refused(config, settings, gate, mine))
        tasks.create_task(weights.wait_for(sys.maxsize))  # raises what ends the subscriber: without weights the gate would stay shut
        gate.observe(engine.policy_version)
        while True:
            await gate.acquire()
            # As many as may be sampled now, in one batch; at most half of the agent's share, so that the trainer is not kept waiting.
            count = 1
            while gate.free and count < max(1, round(config.groups_per_step * config.share / 2)):
                await gate.acquire()
                count += 1
            for group in await asyncio.to_thread(task.sample, engine, rng, groups=count, rollouts=config.rollouts):
                delivery = await producer.submit(group)
                mine.add(str(group.group.group_id))
            await delivery


async def _model_exists(config: AgentConfig, settings: Settings) -> None:
    """Wait until the model is in `models`: from then on its base model is there, and groups for it are taken."""
    options = client_options(settings.kafka, config.name)
    lane = lane_of(config.model_id, await lane_count(options, settings.topic_names))
    async with aclosing(follow(options, settings.topic_names.models, lane)) as batches:
        async for batch in batches:
            if any(record.key == config.model_id.encode() for record in batch):
                return


async def _give_back_refused(config: AgentConfig, settings: Settings, gate: PaceGate, mine: set[str]) -> None:
    """A refused group trains nothing: its slot is free again."""
    options = client_options(settings.kafka, config.name)
    lane = lane_of(config.model_id, await lane_count(options, settings.topic_names))
    async with aclosing(follow(options, settings.topic_names.training_events, lane)) as batches:
        async for batch in batches:
            for record in batch:
                refused = kept_or_none(record, CARRIED[topics.TRAINING_EVENTS])
                if isinstance(refused, GroupRejected) and refused.group_id in mine:
                    logger.info("group %s was refused: %s (%s)", refused.group_id, refused.reason, refused.detail)
                    mine.discard(refused.group_id)
                    gate.give_back()


def main() -> None:
    """Run with the configuration in the first argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run_agent(AgentConfig.model_validate_json(sys.argv[1]), Settings()))


if __name__ == "__main__":
    main()
