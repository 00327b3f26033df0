"""A lane without an owner is noticed and mended, whatever the group's leader knew when it assigned."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from headrace.consumers.worker import balancer as balancer_module
from headrace.consumers.worker.balancer import Balancer, SessionTimeoutError
from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.core.topic_admin import apply


async def until(balancer: Balancer, lanes: set[int]) -> None:
    async with asyncio.timeout(60):
        while balancer.lanes != lanes:
            balancer.changed.clear()
            await balancer.changed.wait()


async def test_a_worker_whose_metadata_request_fails_as_it_joins_still_gives_out_the_lanes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    really: Callable[..., Any] = AIOKafkaClient._metadata_update

    async def fails_twice(self: AIOKafkaClient, cluster: Any, topics: Any) -> bool:
        # As it goes when the broker is killed between a worker's first connection and its first question about the topic.
        nonlocal asked
        if settings.topic_names.trajectory_groups in topics:
            asked += 1
            if asked <= 2:
                return False
        return bool(await really(self, cluster, topics))

    monkeypatch.setattr(AIOKafkaClient, "_metadata_update", fails_twice)
    balancer = Balancer(settings)
    await balancer.start()
    await until(balancer, {0, 1})
    assert asked > 2
    await balancer.stop()


async def test_lanes_of_topics_that_are_made_after_the_workers_joined_are_given_out(settings: Settings) -> None:
    balancers = [Balancer(settings), Balancer(settings)]
    await asyncio.gather(*(balancer.start() for balancer in balancers))
    admin = AIOKafkaAdminClient(**client_options(settings.kafka, "test-admin"))
    await admin.start()
    await admin.delete_topics([settings.topic_names.trajectory_groups])
    await asyncio.gather(*(until(balancer, set()) for balancer in balancers))
    await admin.close()
    await apply(settings)
    async with asyncio.timeout(60):
        while balancers[0].lanes | balancers[1].lanes != {0, 1}:
            for balancer in balancers:
                balancer.changed.clear()
            changes = [asyncio.ensure_future(balancer.changed.wait()) for balancer in balancers]
            await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(balancer.stop() for balancer in balancers))


async def test_a_lane_that_the_leader_gave_to_no_worker_is_noticed_and_given_out(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(balancer_module, "_LOOK_SECONDS", 0.1)
    really = StickyPartitionAssignor.assign
    assignments = 0

    def gives_nothing_at_first(cls: type[StickyPartitionAssignor], cluster: Any, members: dict[str, Any]) -> Any:
        nonlocal assignments
        assignments += 1
        if assignments == 1:
            return dict.fromkeys(members, ConsumerProtocolMemberAssignment(0, [], b"").encode())
        return really(cluster, members)

    monkeypatch.setattr(StickyPartitionAssignor, "assign", classmethod(gives_nothing_at_first))
    balancer = Balancer(settings)
    await balancer.start()
    assert balancer.lanes == set()
    await until(balancer, {0, 1})
    assert [record.getMessage() for record in caplog.records if "owns lanes" in record.message] == [
        f"no worker of group {settings.worker_group_id} owns lanes [0, 1]: joining the group again"
    ]
    await balancer.stop()


async def test_a_session_timeout_that_the_broker_refuses_is_one_error_that_names_the_setting(settings: Settings) -> None:
    worker = settings.worker.model_copy(update={"session_timeout_ms": 2000})
    balancer = Balancer(settings.model_copy(update={"worker": worker}))
    with pytest.raises(SessionTimeoutError, match=r"worker\.session_timeout_ms=2000 is outside what the broker allows"):
        await balancer.start()
