"""Offset ranges of the ledger, and the table of topics."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.state import offset_ranges
from headrace.schemas.topics import TOPICS, Topics, lane_key


@given(st.sets(st.integers(0, 200), max_size=80), st.randoms())
def test_ranges_hold_exactly_the_offsets_and_are_as_few_as_can_be(offsets: set[int], order: object):
    shuffled = [*offsets]
    order.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    ranges = offset_ranges(shuffled)
    assert [offset for r in ranges for offset in range(r.first, r.last + 1)] == sorted(offsets)
    assert all(a.last + 1 < b.first for a, b in itertools.pairwise(ranges)), "neighbours would be one range"


def test_what_a_lane_owns_is_keyed_by_model_and_has_the_lanes_partitions():
    lanes = {topic.name for topic in TOPICS if topic.lane}
    assert lanes == {"trajectory-groups", "commands", "steps", "models", "training-events", "weights"}
    assert {topic.name for topic in TOPICS} - lanes == {"weight-acks", "jobs", "gateway", "dead-letters"}
    assert all("model id" in topic.key for topic in TOPICS if topic.lane)


def test_topics_are_cleaned_up_as_the_design_says():
    configs = {topic.name: topic.config for topic in TOPICS}
    day = 24 * 60 * 60 * 1000
    assert {name for name, config in configs.items() if config["cleanup.policy"] == "compact"} == {
        "models",
        "weights",
        "weight-acks",
        "jobs",
        "gateway",
    }
    assert configs["steps"]["retention.ms"] == "-1"
    assert configs["steps"]["retention.bytes"] == "-1"
    assert configs["trajectory-groups"]["retention.ms"] == str(7 * day)
    assert configs["trajectory-groups"]["message.timestamp.type"] == "LogAppendTime"
    for name in ("commands", "training-events", "dead-letters"):
        assert configs[name]["retention.ms"] == str(30 * day)
    assert configs["models"]["segment.bytes"] == str(16 * 1024 * 1024)
    assert configs["models"]["segment.ms"] == str(10 * 60 * 1000)


def test_full_names_carry_the_prefix_and_there_is_one_for_every_topic():
    names = Topics(prefix="p.")
    properties = {getattr(names, topic.name.replace("-", "_")) for topic in TOPICS}
    assert properties == {names.full(topic.name) for topic in TOPICS}
    assert all(name.startswith("p.") for name in properties)
    assert lane_key(3) == "lane:3"
