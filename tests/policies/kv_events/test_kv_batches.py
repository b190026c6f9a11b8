"""KV events as bytes, blocks of workers against a plain model, and choices of ``cache_aware`` that rely on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no annotations
import orjson
import pytest

from policies.asking import asking, ready
from router_core import Exchange, Worker
from slime_policies import CacheAware, Settings
from slime_policies.contract import check_policy
from slime_policies.kv_events.batches import Cleared, MalformedBatch, Removed, Stored, read_batch
from slime_policies.kv_events.blocks import Blocks, OutOfSync, WorkerBlocks
from slime_policies.kv_events.prompt_ids import PromptIds
from slime_policies.kv_events.publisher import Publisher, publisher_of
from slime_policies.pending import Pending


def packed(*parts: bytes | str) -> bytes:
    """msgpack, of bytes as they are and of texts as short strings."""
    return b"".join(
        part if isinstance(part, bytes) else bytes([0xA0 | len(part)]) + part.encode() for part in parts
    )


#: ``[1.0, [...], 0]`` with as many events as the byte says.
TIME, RANK = b"\x93\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", b"\x00"
#: The hash -2 as a signed number of 64 bits, and [-2, 7].
MINUS_2 = b"\xd3" + (-2).to_bytes(8, "big", signed=True)
HASHES = b"\x92" + MINUS_2 + b"\x07"
IDS = b"\x94\x0a\x0b\x0c\xcd\x01\x00"  # [10, 11, 12, 256]


def test_events_as_maps_in_the_order_of_sglangs_fields() -> None:
    stored = packed(
        b"\x87", "type", "BlockStored", "block_hashes", HASHES, "parent_block_hash", b"\x09", "token_ids", IDS,
        "block_size", b"\x02", "lora_id", b"\xc0", "medium", "GPU",
    )  # fmt: skip
    removed = packed(b"\x82", "type", "BlockRemoved", "block_hashes", b"\x91\x07")
    payload = TIME + b"\x93" + stored + removed + packed(b"\x81", "type", "AllBlocksCleared") + RANK
    assert read_batch(payload) == [Stored([-2, 7], 9, [10, 11, 12, 256], 2), Removed([7]), Cleared()]


def test_events_as_lists_in_the_order_of_sglangs_fields() -> None:
    stored = packed(b"\x96", "BlockStored", HASHES, b"\xc0", IDS, b"\x02", b"\xc0")
    later = packed(b"\x97", "BlockStored", b"\x91\x08", b"\x07", b"\x92\x05\x06", b"\x02", b"\xc0", "GPU")
    removed = packed(b"\x92", "BlockRemoved", b"\x91\x07")
    payload = TIME[:1].replace(b"\x93", b"\x92") + TIME[1:] + b"\x94" + stored + later + removed
    assert read_batch(payload + packed(b"\x91", "AllBlocksCleared")) == [
        Stored([-2, 7], None, [10, 11, 12, 256], 2),
        Stored([8], 7, [5, 6], 2),
        Removed([7]),
        Cleared(),
    ]


def batch(*events: Any) -> bytes:
    made: bytes = msgpack.packb([1.0, list(events), 0])
    return made


STORED = {
    "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2
}  # fmt: skip


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": "?"},
        ["Other", 1, 2],
        {**STORED, "medium": "CPU_PINNED"},
        {**STORED, "lora_id": 3},
        {**STORED, "lora_name": "adapter"},
        {**STORED, "cache_salt": "tenant"},
        {**STORED, "extra_keys": [["salt"]]},
        {**STORED, "group_idx": 1},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"},
        {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2},
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", "adapter"],
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", {"cache_salt": "tenant"}],
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [["salt"]]],
        ["BlockRemoved", [1], "CPU_PINNED"],
    ],
)
def test_what_ids_do_not_name_and_what_is_not_on_the_gpu_is_left_out(event: Any) -> None:
    assert read_batch(batch(event, {"type": "AllBlocksCleared"})) == [Cleared()]


@pytest.mark.parametrize(
    "event",
    [
        {**STORED, "session_id": "s", "new_field": {"a": [1]}, "medium": "GPU", "group_idx": 0},
        {**STORED, "extra_keys": [None], "lora_name": None},
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", {"session_id": "s"}],
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", ["FULL", "SWA"]],
        ["BlockStored", [1], None, [5, 6], 2, None, None, None, [None], 0, None, None, "more"],
        {**STORED, "token_ids": [[5, 6], [6, 7]]},  # EAGLE: pairs
    ],
)
def test_fields_of_other_versions_are_ignored(event: Any) -> None:
    assert read_batch(batch(event)) == [Stored([1], None, [5, 6], 2)]


def test_long_event_becomes_several_and_names_may_be_bytes() -> None:
    names = [b"%d" % number for number in range(2500)]
    read = read_batch(batch({**STORED, "block_hashes": names, "block_size": 1, "token_ids": [*range(2500)]}))
    assert [(event.parent, len(event.hashes)) for event in read if isinstance(event, Stored)] == [
        (None, 1000), (b"999", 1000), (b"1999", 500),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\x90",
        b"\x05",
        b"\xa1\xff",
        batch(5),
        batch([]),
        batch({}),
        batch([5]),
        batch({"type": 5}),
        batch({"type": "BlockRemoved"}),
        batch(["BlockRemoved", [1.5]]),
        batch(["BlockRemoved", [True]]),
        batch({**STORED, "block_hashes": ["text"]}),
        batch({**STORED, "parent_block_hash": "text"}),
        batch({**STORED, "block_size": 0}),
        batch({**STORED, "block_size": True}),
        batch({**STORED, "token_ids": [5]}),
        batch({**STORED, "token_ids": None}),
        batch({**STORED, "token_ids": [5, "6"]}),
        batch({**STORED, "token_ids": [[5, 6], []]}),
        batch(["BlockStored", [1]]),
        msgpack.packb([1.0, {}]),
        msgpack.packb({"events": []}),
        batch() + b"\x00",
    ],
)
def test_malformed_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        read_batch(payload)


# the publisher that an engine names


def info(host: str = "*", port: Any = 5557, config: Any = None) -> bytes:
    told = {
        "publisher": "zmq",
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": "kv",
        "dp_size": 4,
    }
    return orjson.dumps({"kv_events": told, "kv_events_config": config})


@pytest.mark.parametrize(
    ("told", "url", "rank", "endpoint", "replay"),
    [
        (info(), "http://10.0.0.7:30001", 0, "tcp://10.0.0.7:5557", None),
        (info("0.0.0.0"), "https://node", 3, "tcp://node:5560", None),
        (info("10.0.0.9"), "http://10.0.0.7:30001", 1, "tcp://10.0.0.9:5558", None),
        (info("::"), "http://[fd00::1]:30001", 0, "tcp://[fd00::1]:5557", None),
        (info("[fd00::2]"), "http://n", 0, "tcp://[fd00::2]:5557", None),
        (info(config='{"replay_endpoint": "tcp://*:6000"}'), "http://n", 2, "tcp://n:5559", "tcp://n:6002"),
        (info(config='{"replay_endpoint": "ipc://x"}'), "http://n", 0, "tcp://n:5557", None),
        (
            info(config='{"replay_endpoint": "tcp://*:%s"}' % ("1" * 5000)),
            "http://n",
            0,
            "tcp://n:5557",
            None,
        ),
        (info(config='{"replay_endpoint": "tcp://*:x"}'), "http://n", 0, "tcp://n:5557", None),
        (info(config="[]"), "http://n", 0, "tcp://n:5557", None),
        (info(config=5), "http://n", 0, "tcp://n:5557", None),
    ],
)
def test_wildcard_is_reached_at_the_worker(
    told: bytes, url: str, rank: int, endpoint: str, replay: str | None
) -> None:
    assert publisher_of(told, url, rank) == Publisher(endpoint, replay, b"kv", 4)


@pytest.mark.parametrize(
    "told",
    [info(port=0), info(port=65535), info(port="5557"), info("eth0;10.0.0.1"), info("a b"), b"{", b"[]"],
)
def test_publisher_without_an_address_is_none(told: bytes) -> None:
    assert publisher_of(told, "http://n", 1) is None


# blocks


class BlockModel:
    """The ids of each block up to its end, by name."""

    def __init__(self) -> None:
        self.ids: dict[int, tuple[int, ...]] = {}

    def held(self, prompt: Sequence[int], size: int) -> int:
        whole = {*self.ids.values()}
        tokens = 0
        while tokens + size <= len(prompt) and tuple(prompt[: tokens + size]) in whole:
            tokens += size
        return tokens


def ids_of(prompt: Sequence[int]) -> PromptIds:
    found = PromptIds.of(orjson.dumps({"input_ids": list(prompt)}))
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_those_of_a_plain_model(seed: int) -> None:
    choose = random.Random(seed)
    blocks = Blocks(10_000)
    sizes = (2, 2, 3)
    workers = [blocks.open(str(number)) for number in range(3)]
    models = [BlockModel() for _ in range(3)]
    name = 0
    for _ in range(400):
        place = choose.randrange(3)
        worker, model, size = workers[place], models[place], sizes[place]
        step = choose.random()
        if step < 0.02:
            worker.apply(Cleared())
            model.ids.clear()
        elif step < 0.3 and model.ids:
            gone = choose.sample([*model.ids], min(2, len(model.ids)))
            worker.apply(Removed([*gone, -1]))
            for each in gone:
                del model.ids[each]
        else:
            parent = choose.choice([None, *model.ids])
            count = choose.randrange(1, 4)
            ids = [choose.randrange(2) for _ in range(count * size)]
            names = [*range(name, name + count)]
            name += count
            worker.apply(Stored([*names], parent, ids, size))
            before = () if parent is None else model.ids[parent]
            for number, each in enumerate(names, 1):
                model.ids[each] = (*before, *ids[: number * size])
        prompt = [choose.randrange(2) for _ in range(12)]
        held = blocks.tokens_held(ids_of(prompt), workers)
        assert held == [model.held(prompt, size) for model, size in zip(models, sizes, strict=True)]
        assert [worker.names() for worker in workers] == [{*model.ids} for model in models]
        assert blocks.size == sum(len(model.ids) for model in models)
    for number in range(3):
        blocks.close(str(number))
    assert (blocks.size, blocks._holders._bits, blocks._holders._more) == (0, {}, {})
    assert {blocks.open("a").bit, blocks.open("b").bit, blocks.open("c").bit} == {1, 2, 4}


def test_contradictions_and_too_many_blocks_are_told() -> None:
    blocks = Blocks(3)
    worker = blocks.open("a")
    worker.apply(Stored([1, 2], None, [1, 2, 3, 4], 2))
    worker.apply(Stored([1, 2], None, [1, 2, 3, 4], 2))  # told again
    worker.apply(Stored([8], 99, [1, 2], 2))  # after an unknown block
    worker.apply(Stored([9], 2, [1], 1))  # an incomplete page
    assert (worker.names(), blocks.size) == ({1, 2}, 2)
    with pytest.raises(OutOfSync, match="one name for two blocks"):
        worker.apply(Stored([1], 2, [1, 2], 2))
    with pytest.raises(OutOfSync, match="--kv-events-max-blocks"):
        worker.apply(Stored([3, 4], 2, [5, 6, 7, 8], 2))
    worker.clear()
    assert (blocks.size, worker.block_size) == (0, 0)


# the ids of a prompt


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "a"}',
        b'{"input_ids": []}',
        b'{"input_ids": [[1, 2]]}',
        b'{"input_ids": [1, 2',
        b'{"input_ids": [1, 2], "lora_path": "a"}',
        b'{"extra_key": "a", "input_ids": [1, 2]}',
        b'{"messages": [{"role": "user", "content": "1"}]}',
        b"",
    ],
)
def test_prompts_that_ids_do_not_name_have_none(body: bytes) -> None:
    assert PromptIds.of(body) is None


def test_ids_are_parsed_as_far_as_they_are_read() -> None:
    ids = [random.Random(1).randrange(100_000) for _ in range(5000)]
    for body in (
        orjson.dumps({"input_ids": ids, "stream": True}),
        b'{"input_ids" : %s }' % str(ids).encode(),
    ):
        prompt = PromptIds.of(body)
        assert prompt is not None
        assert prompt.read(3)
        assert 3 <= len(prompt.ids) < 1000
        assert prompt.ids == ids[: len(prompt.ids)]
        assert prompt.read(5000)
        assert not prompt.read(5001)
        assert prompt.ids == ids
        assert prompt.bytes_per_token() == pytest.approx((prompt.end - prompt.start) / 5000, rel=0.01)


@pytest.mark.parametrize("ids", [b'1, 2, "x"', b"1, 2.5", b"1, -2", b"1,, 2", b"1, 02", b"1, null"])
def test_list_with_something_else_than_ids_has_none(ids: bytes) -> None:
    prompt = PromptIds.of(b'{"input_ids": [%b]}' % ids)
    assert prompt is not None
    assert not prompt.read(1)
    assert prompt.bytes_per_token() == 0


# choices


def asked(ids: Sequence[int], **more: Any) -> Exchange:
    return asking(orjson.dumps({"input_ids": list(ids), **more}))


def following(clock: Any = None, **settings: Any) -> CacheAware:
    policy = CacheAware(Settings(kv_events=True, **settings), *([clock] if clock else []))
    assert policy.blocks is not None
    return policy


def with_blocks(policy: CacheAware, worker: Worker, *prompts: Sequence[int]) -> WorkerBlocks:
    """Blocks of 16 ids that ``worker`` has, the prompts' whole ones."""
    assert policy.blocks is not None
    own = policy.blocks.open(worker.id)
    own.is_in_sync = True
    for number, ids in enumerate(prompts):
        whole = len(ids) // 16
        names: list[Any] = [1000 * number + place for place in range(whole)]
        own.apply(Stored(names, None, list(ids[: 16 * whole]), 16))
    return own


ONE, TWO = list(range(100, 1100)), list(range(2000, 3000))


def test_policy_with_kv_events_keeps_the_contract() -> None:
    check_policy(lambda: CacheAware(Settings(kv_events=True)))


def test_worker_that_has_the_prompt_wins_over_one_that_it_was_sent_to() -> None:
    one, two = ready(0, 0)
    policy = following()
    exchange = asked(ONE)
    assert policy(exchange, [one]) is one  # the belief
    policy.answered(exchange, 1000, 0)
    with_blocks(policy, one)  # it has evicted it
    own = with_blocks(policy, two, ONE)
    two.in_flight = 3
    assert policy(asked(ONE), [one, two]) is two
    assert policy(asked(ONE[:990], lora_path="x"), [one, two]) is one  # then the belief decides
    own.is_in_sync = False
    two.in_flight = 20
    assert policy(asked(TWO), [one, two]) is one


def test_group_stays_together_before_its_events_come() -> None:
    one, two = ready(0, 0)
    policy = following()
    with_blocks(policy, one, TWO)
    with_blocks(policy, two, TWO)
    chosen = []
    for _ in range(6):
        chosen.append(policy(asked(ONE), [one, two]))
        chosen[-1].in_flight += 1
    assert len({worker.id for worker in chosen}) == 1


def test_answered_prompt_counts_only_while_the_worker_has_it() -> None:
    one, two = ready(0, 0)
    policy = following()
    with_blocks(policy, one)
    with_blocks(policy, two)
    exchange = asked(ONE)
    chosen = policy(exchange, [one, two])
    other = two if chosen is one else one
    chosen.in_flight = 1
    assert policy(asked([*ONE, 5]), [one, two]) is chosen
    policy.answered(exchange, 1000, 0)
    assert len(policy._pending) == 1  # the second one is not answered
    policy = following()
    with_blocks(policy, one)
    with_blocks(policy, two)
    one.in_flight = two.in_flight = 0
    chosen = policy(exchange, [one, two])
    other = two if chosen is one else one
    policy.answered(exchange, 1000, 0)
    chosen.in_flight = 1
    assert policy(asked([*ONE, 5]), [one, two]) is other


def test_retried_request_counts_at_its_last_worker_only() -> None:
    one, two = ready(0, 0)
    policy = following()
    with_blocks(policy, one)
    with_blocks(policy, two)
    exchange = asked(ONE)
    assert policy(exchange, [one]) is one
    assert policy(exchange, [two]) is two
    assert len(policy._pending) == 1
    two.in_flight = 3
    assert policy(asked([*ONE, 5]), [one, two]) is two


def test_workers_with_and_without_events_are_compared() -> None:
    one, two, three = ready(0, 0, 0)
    policy = following()
    with_blocks(policy, one, ONE[:500])
    policy(asked(ONE), [two])
    three.in_flight = 1
    assert policy(asked(ONE), [one, two, three]) is two
    two.in_flight = 20
    assert policy(asked(ONE), [one, two, three]) is one


def test_less_than_the_threshold_counts_as_nothing() -> None:
    one, two = ready(1, 0)
    policy = following(cache_threshold=0.5)
    with_blocks(policy, one, ONE[:400])
    with_blocks(policy, two)
    assert policy(asked(ONE), [one, two]) is two


def test_pending_prefixes_are_forgotten_once_answered_or_old() -> None:
    pending = Pending()
    pending.add(1, 1, (10, 11), 0.0)
    pending.add(2, 1, (10, 12), 1.0)
    pending.add(3, 2, (10,), 2.0)
    pending.add(4, 1, (10,), 2.0)
    assert [pending.at(digest) for digest in (10, 11, 12, 13)] == [3, 1, 1, 0]
    pending.remove(1)
    pending.remove(1)
    assert [pending.at(digest) for digest in (10, 11, 12)] == [3, 0, 1]
    pending.remove(4)
    assert pending.at(10) == 3
    pending.remove(2)
    assert pending.at(10) == 2
    pending.add(5, 4, (10,), 62.0)  # the third is old now
    assert (pending.at(10), len(pending)) == (4, 1)
    for number in range(6, 5000):
        pending.add(number, 8, (number,), 62.0)
    assert len(pending) == 4096
    pending.clear()
    holders = pending._holders
    assert (len(pending), pending.at(10), holders._bits, holders._more) == (0, 0, {}, {})
