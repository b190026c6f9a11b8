"""Logged trajectories are there again, as they were, wherever the process was killed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from deadlines import HANG_S
from radix_cache.model import Model
from radix_cache.random_rollouts import Rollouts, picture, told
from radix_cache.toy import TOKENS, cut, encode, pack, sampled, spell
from router_core.cli import build
from router_core.errors import StartupError
from routers import Start
from slime_journal.record_files import Header, LogDirectory
from slime_journal.record_frames import Frames
from slime_journal.record_log import RecordLog
from slime_radix_cache.index.losses import Losses, Marks
from slime_radix_cache.index.segments import Segment
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.journal.log_records import TRAJECTORIES, Answered, Asked, Gone, Seen
from slime_radix_cache.journal.logged_trajectories import LoggedTrajectories
from slime_testing import Running

FRAMES = Frames([Header, Asked, Answered, Gone, Seen])


class Sown(NamedTuple):
    """A record of a kind that nobody knows."""

    version: str


def opened(
    directory: Path, limits: Limits | None = None, *, file_bytes: int = 1 << 20, tokenizer: str = "toy"
) -> LoggedTrajectories:
    log = RecordLog(LogDirectory(directory, "--trajectory-log"), TRAJECTORIES, tokenizer, file_bytes)
    marks = [Marks(directory / f"{name}.marks", bits=1 << 14) for name in ("sessions", "texts")]
    return LoggedTrajectories(
        limits if limits is not None else Limits(), cut, log, losses=Losses(marks[0], marks[1])
    )


def after_a_kill(
    kept: LoggedTrajectories, directory: Path, limits: Limits | None = None
) -> LoggedTrajectories:
    """Return the trajectories that another process would find now."""
    copy = directory.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    again = opened(copy, limits)
    again.close()
    return again


def ages(kept: Trajectories) -> list[Any]:
    """The segments in the order in which they would go, and since how many versions they were not used."""
    return [(told(segment), kept._generation - segment.generation) for segment in by_age(kept)]


def by_age(kept: Trajectories) -> Iterator[Segment]:
    """All segments that may be evicted, oldest first."""
    segment = kept._ages.oldest
    while segment is not None:
        yield segment
        segment = segment.newer


LIMITS = [
    Limits(versions=0),
    Limits(tokens=60),
    Limits(size_bytes=20_000),
    Limits(versions=2),
    Limits(tokens=200, versions=3),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_the_trajectories_are_what_they_were(limits: Limits, seed: int, tmp_path: Path) -> None:
    kept = opened(tmp_path / "log", limits, file_bytes=3000)
    rollouts = Rollouts(kept, seed)
    for number in range(150):
        rollouts.step()
        if number % 10 == 0:
            again = after_a_kill(kept, tmp_path / "log", limits)
            assert picture(again) == picture(kept)
            assert ages(again) == ages(kept)
    assert bool(kept.evicted) == (limits != Limits(versions=0))
    kept.close()


@pytest.mark.parametrize("seed", range(4))
def test_trajectories_after_kills_equal_those_without(seed: int, tmp_path: Path) -> None:
    limits = Limits(tokens=100, versions=3)
    undisturbed = opened(tmp_path / "undisturbed", limits)
    killed = opened(tmp_path / "killed", limits, file_bytes=3000)
    one, other = Rollouts(undisturbed, seed), Rollouts(killed, seed)
    for number in range(200):
        one.step()
        other.step()
        if number % 7 == 0:
            killed.close()
            other.kept = killed = opened(tmp_path / "killed", limits, file_bytes=3000)
    assert picture(killed) == picture(undisturbed)
    undisturbed.close()
    killed.close()


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(4))
async def test_records_read_from_a_rewritten_log_are_evicted_like_others(seed: int, tmp_path: Path) -> None:
    """Also a prompt whose answers have gone: what it continues must not go before it."""
    limits = Limits(tokens=400)
    kept = opened(tmp_path / "log", limits, file_bytes=4000)
    rollouts = Rollouts(kept, seed)
    for _ in range(6):
        for _ in range(150):
            rollouts.turn()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.tidy)
            with anyio.fail_after(HANG_S):
                while kept.log._due():  # noqa: ASYNC110  # what is waited for is on the disk
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        kept.close()
        rollouts.kept = kept = opened(tmp_path / "log", limits, file_bytes=4000)
        place = {id(segment): number for number, segment in enumerate(by_age(kept))}
        assert all(
            place[id(segment)] < place[id(segment.parent)]
            for segment in by_age(kept)
            if segment.parent is not None
        )
    assert kept.tokens <= 400
    kept.close()


def test_a_kill_leaves_a_response_or_the_beginning_that_it_replaces(tmp_path: Path) -> None:
    """Never both, whatever write the process is killed behind: the beginning would be a sample of its own."""
    kept = opened(tmp_path / "log")
    left: list[list[int]] = []
    append = kept.log.append

    def killed_behind(records: Sequence[Any]) -> None:
        append(records)
        again = after_a_kill(kept, tmp_path / "log")
        left.append([len(one) for one in again.responses_of("s")])

    kept.log.append = killed_behind  # type: ignore[method-assign]  # the only place that writes
    part = kept.record(None, pack(1), b"a", sampled(1, 2), "s")
    kept.record(None, pack(1), b"a", sampled(1, 2, 2), "s", again=part, instead_of=part)
    assert left == [[2], [3]]
    kept.close()


@pytest.mark.anyio
async def test_longer_record_is_known_when_the_log_has_no_record_between(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log", file_bytes=500)
    part = kept.record(None, pack(1), b"a", sampled(2), "s")
    kept.record((part, 1), pack(7), b"ab<", sampled(6), "t")
    between = kept.record(None, pack(1), b"a", sampled(*[2] * 40), "s", instead_of=part)
    whole = kept.record(None, pack(1), b"a", sampled(*[2] * 41), "s", instead_of=between)
    assert kept.longer_of("s") == {part: whole}
    assert [len(one) for one in after_a_kill(kept, tmp_path / "log").longer_of("s").values()] == [41]
    await tidied(kept, lambda: not kept.log._due())
    assert [len(one) for one in after_a_kill(kept, tmp_path / "log").longer_of("s").values()] == [41]
    kept.close()


@pytest.mark.anyio
async def test_losses_of_one_session_do_not_grow_the_log(tmp_path: Path) -> None:
    """Of all that is told of that only the last is needed, also after a kill."""
    limits = Limits(tokens=400)
    kept = opened(tmp_path / "log", limits, file_bytes=4000)
    rollouts = Rollouts(kept, 5)
    sizes = []
    for _ in range(12):
        for _ in range(150):
            rollouts.turn("one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.tidy)
            while kept.log._due():  # noqa: ASYNC110  # what is waited for is on the disk
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        sizes.append(kept.log._directory.as_dict()["bytes"])
        assert picture(after_a_kill(kept, tmp_path / "log", limits)) == picture(kept)
        kept.close()
        rollouts.kept = kept = opened(tmp_path / "log", limits, file_bytes=4000)
    assert kept.has_lost("one")
    assert max(sizes) < 2.5 * min(sizes)
    kept.close()


class KilledMachine(Model):
    """The machine that the trajectories are tested with, killed now and then, with requests in flight or without."""

    @initialize(tokens=st.sampled_from([0, 0, 12, 40]), versions=st.sampled_from([0, 2]))
    def begin(self, tokens: int, versions: int) -> None:
        super().begin(tokens, versions)
        self.directory = Path(tempfile.mkdtemp())
        self.logged = opened(self.directory / "log", Limits(tokens=tokens, versions=versions), file_bytes=500)
        self.kept = self.logged

    @rule()
    def kill(self) -> None:
        assert picture(after_a_kill(self.logged, self.directory / "log")) == picture(self.logged)

    def teardown(self) -> None:
        self.kill()
        self.logged.close()
        shutil.rmtree(self.directory)


KilledMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestKilled = KilledMachine.TestCase


async def tidied(kept: LoggedTrajectories, until: Callable[[], bool]) -> None:
    """Let files be written again in the background ``until``."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kept.tidy)
        with anyio.fail_after(HANG_S):
            while not until():  # noqa: ASYNC110  # what is waited for is on the disk
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.trajectories"))


@pytest.mark.anyio
@pytest.mark.parametrize("limits", [Limits(tokens=150, versions=0), Limits(tokens=300, versions=2)], ids=str)
@pytest.mark.parametrize("seed", range(3))
async def test_files_that_are_half_empty_are_written_again_without_what_has_gone(
    limits: Limits, seed: int, tmp_path: Path
) -> None:
    directory = tmp_path / "log"
    kept = opened(directory, limits, file_bytes=3000)
    rollouts = Rollouts(kept, seed)
    for _ in range(5):
        for _ in range(100):
            rollouts.step()
        written = sum(path.stat().st_size for path in files(directory))
        await tidied(kept, lambda: not kept.log._due())
        size = sum(path.stat().st_size for path in files(directory))
        assert size < written
        assert [(file.path, file.size_bytes) for file in kept.log.files] == [
            (path, path.stat().st_size) for path in files(directory)
        ]
        assert len(files(directory)) < 8
        again = after_a_kill(kept, directory, limits)
        pictured = picture(again)
        # Losses of a session may be told for too long where its name was used again: then less is promised.
        assert pictured.pop("incomplete") >= (expected := picture(kept)).pop("incomplete")
        assert pictured == expected
    kept.close()
    reopened = opened(directory, limits, file_bytes=3000)
    await tidied(reopened, lambda: not reopened.log._due())
    reopened.close()
    once_more = opened(directory, limits, file_bytes=3000)
    assert picture(once_more) == picture(reopened)
    once_more.close()


@pytest.mark.anyio
async def test_changes_during_the_writing_again_are_not_lost(tmp_path: Path) -> None:
    limits = Limits(tokens=150, versions=0)
    kept = opened(tmp_path / "log", limits, file_bytes=2000)
    rollouts = Rollouts(kept, 11)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kept.tidy)
        for _ in range(300):
            rollouts.step()
            await anyio.sleep(0.0005)
        with anyio.fail_after(HANG_S):
            while kept.log._due():  # noqa: ASYNC110  # as above
                await anyio.sleep(0.001)
        assert len(files(tmp_path / "log")) < 10
        again = after_a_kill(kept, tmp_path / "log", limits)
        assert picture(again)["texts"] == picture(kept)["texts"]
        tasks.cancel_scope.cancel()
    kept.close()


def test_a_file_that_was_written_again_into_another_is_not_read_twice(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    limits = Limits(tokens=100, versions=0)
    kept = opened(directory, limits, file_bytes=2000)
    rollouts = Rollouts(kept, 5)
    while len(files(directory)) < 5:
        rollouts.step()
    saved = {path: path.read_bytes() for path in files(directory)}
    all_of = kept.log.files
    kept.log._rewrite(all_of[1:3], all_of, lambda session: True)
    gone = [path for path in saved if not path.exists()]
    assert gone == [all_of[1].path]
    gone[0].write_bytes(saved[gone[0]])  # the process was killed before it was removed
    (directory / "00000003.trajectories.tmp").write_bytes(b"half")  # and in the middle of the next one
    expected = picture(kept)
    kept.close()
    again = opened(directory, limits, file_bytes=2000)
    assert picture(again)["texts"] == expected["texts"]
    assert files(directory) == [path for path in saved if path not in gone]
    assert not list(directory.glob("*.tmp"))
    again.close()


def test_a_record_without_its_end_is_dropped_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = opened(tmp_path / "log")
    rollouts = Rollouts(kept, 1)
    pictures = []
    for _ in range(12):
        rollouts.turn()
        pictures.append(picture(kept))
    kept.close()
    [path] = files(tmp_path / "log")
    whole = path.read_bytes()
    *_, before, (start, end, _) = FRAMES.read(memoryview(whole))
    assert (before[1], end) == (start, len(whole))
    for length in range(start, end):
        caplog.clear()
        path.write_bytes(whole[:length])
        again = opened(tmp_path / "log")
        assert picture(again) == pictures[-2]
        assert bool(caplog.records) == (length > start)
        again.close()
        assert path.read_bytes() == whole[:start], "what comes next is behind whole records"


def test_damaged_log_ends_the_start_and_says_where(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log")
    rollouts = Rollouts(kept, 2)
    for _ in range(6):
        rollouts.turn()
    kept.close()
    [path] = files(tmp_path / "log")
    whole = path.read_bytes()
    for start, end, _ in FRAMES.read(memoryview(whole)):
        for place in range(start, end):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(StartupError, match=rf"{path} is damaged at byte {start};"):
                opened(tmp_path / "log")


def test_missing_damaged_or_foreign_log_files_end_the_start(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    kept = opened(directory, file_bytes=1000)
    rollouts = Rollouts(kept, 3)
    while len(files(directory)) < 4:
        rollouts.turn()
    kept.close()
    first, second, _, last = files(directory)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(StartupError, match=rf"{second} is missing"):
        opened(directory)
    second.write_bytes(content[:-5])
    with pytest.raises(StartupError, match=rf"{second} is damaged at byte"):
        opened(directory)
    second.write_bytes(content)
    with pytest.raises(StartupError, match="another tokenizer"):
        opened(directory, tokenizer="other")
    last.write_bytes(b"")
    with pytest.raises(StartupError, match=rf"{last} is damaged at byte 0"):
        opened(directory)
    last.unlink()
    first.write_text("something else")
    with pytest.raises(StartupError, match=rf"{first} is damaged at byte 0"):
        opened(directory)


def test_a_record_that_goes_on_from_one_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log")
    kept.record(None, pack(2), b"b", sampled(1), "one")
    match = kept.find_to_continue(b"baa", "one")
    kept.record(match.context, pack(1), b"baa", sampled(2), "one")
    kept.close()
    [path] = files(tmp_path / "log")
    whole = path.read_bytes()
    (_, header, _), (_, first, _), _ = FRAMES.read(memoryview(whole))
    path.write_bytes(whole[:header] + whole[first:])
    with pytest.raises(
        StartupError, match=rf"{path} has the first of 2 records without their parent; move .*log away"
    ):
        opened(tmp_path / "log")


def test_log_has_one_writer_and_is_private(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log")
    Rollouts(kept, 4).turn()
    with pytest.raises(StartupError, match="another router"):
        opened(tmp_path / "log")
    paths = [tmp_path / "log", *(tmp_path / "log").iterdir()]
    assert not any(path.stat().st_mode & 0o077 for path in paths)
    assert len(paths) == 5  # itself, a file of the log, its lock, and the marks of what is lost
    kept.close()
    opened(tmp_path / "log").close()


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="file"):
        opened(tmp_path / "file")
    (tmp_path / "log" / "00000001.trajectories").mkdir(parents=True)
    with pytest.raises(StartupError, match=r"00000001.trajectories: Is a directory"):
        opened(tmp_path / "log")
    (tmp_path / "log" / "00000001.trajectories").rmdir()
    (tmp_path / "log" / "00000001.trajectories").write_bytes(b"".join(FRAMES.write([Seen("1")])))
    with pytest.raises(StartupError, match=r"is not a log of this version; move .*log away"):
        opened(tmp_path / "log")
    (tmp_path / "log" / "00000001.trajectories").write_bytes(b"".join(Frames([Sown]).write([Sown("1")])))
    with pytest.raises(StartupError, match="damaged at byte 0"):
        opened(tmp_path / "log")


def test_a_disk_that_is_full_costs_the_log_and_not_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = opened(tmp_path / "log")
    rollouts = Rollouts(kept, 6)
    for _ in range(5):
        rollouts.turn()
    before = picture(kept)
    monkeypatch.setattr(
        "os.writev", lambda fd, pieces: __import__("os").write(fd, pieces[0])
    )  # as a full disk does
    rollouts.turn()
    monkeypatch.undo()
    rollouts.turn()
    assert kept.segments > before["sizes"][0]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "nothing more is written" in caplog.text
    assert picture(after_a_kill(kept, tmp_path / "log")) == before
    kept.close()


@pytest.mark.anyio
async def test_files_that_cannot_be_written_again_are_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = opened(tmp_path / "log", Limits(tokens=100, versions=0), file_bytes=2000)
    rollouts = Rollouts(kept, 8)
    for _ in range(100):
        rollouts.step()
    before = picture(kept)
    tries = count()

    def full_at_first(fd: int) -> None:
        if next(tries) == 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_at_first)
    monkeypatch.setattr("slime_journal.record_log._TRY_AGAIN_S", 0.05)
    await tidied(kept, lambda: not kept.log._due())
    [record] = caplog.records
    assert "No space left on device" in record.getMessage()
    assert not list((tmp_path / "log").glob("*.tmp"))
    assert picture(after_a_kill(kept, tmp_path / "log"))["texts"] == before["texts"]
    kept.close()


def test_texts_that_share_a_long_beginning_are_logged_once(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log")
    text = "ab" * 5000
    for turn in range(20):
        match = kept.find_to_continue(text.encode(), "one")
        kept.record(match.context, pack(*encode(text[match.position :])), text.encode(), sampled(1, 3), "one")
        text += spell([1, 3]) + "<" * turn
    size = sum(file.size_bytes for file in kept.log.files)
    assert 10_000 + 4 * 5000 < size < 40_000
    kept.close()


def test_every_token_of_the_toy_can_be_logged(tmp_path: Path) -> None:
    kept = opened(tmp_path / "log")
    for token in TOKENS:
        kept.record(None, pack(2), b"b", sampled(token, logprobs=[float("nan")]), None)
    assert picture(after_a_kill(kept, tmp_path / "log")) == picture(kept)
    kept.close()


PROMPT = "<|im_start|>user\nCount to five, in 日本語 too. 🎉<|im_end|>\n<|im_start|>assistant\n"
SHORT = {"max_new_tokens": 12}
LONG = {"max_new_tokens": 5000, "ignore_eos": True}


def flags(directory: Path, *more: str) -> list[str]:
    return ["--plugin", "engine", "--plugin", "radix_cache", "--trajectory-log", str(directory), *more]


async def every_shape(client: httpx.AsyncClient) -> None:
    """Generations of each shape, some of which end before their time."""

    async def ask(body: dict[str, Any], session: str = "one") -> Any:
        return (await client.post("/generate", json=body, headers={"x-session-id": session})).json()

    first = await ask({"text": PROMPT, "sampling_params": SHORT})
    text = PROMPT + first["text"]
    await ask({"text": text + "<|im_end|>\nMore!", "sampling_params": SHORT})
    await ask({"text": text[:-3] + " or rather", "sampling_params": SHORT})
    await ask({"text": text + "A fork.", "sampling_params": SHORT}, "two")
    await ask({"text": [PROMPT, "Once"], "sampling_params": {**SHORT, "n": 2}}, "three")
    await ask({"input_ids": [*first["output_ids"], 5], "sampling_params": SHORT, "return_logprob": False})
    streamed = {"text": PROMPT, "stream": True, "sampling_params": SHORT}
    assert b"[DONE]" in (await client.post("/generate", json=streamed)).content
    async with client.stream("POST", "/generate", json={**streamed, "sampling_params": LONG}) as stream:
        lines = [line async for line, _ in azip(stream.aiter_lines(), 8)]  # and leave
    told = orjson.loads(next(line[6:] for line in reversed(lines) if line.startswith("data:")))["text"]
    await ask({"text": PROMPT + told + " no", "sampling_params": SHORT})
    update = {"model_path": "m", "weight_version": "2"}
    assert (await client.post("/update_weights_from_disk", json=update)).status_code == 200
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, {"text": "Tell me more.", "rid": "long", "sampling_params": LONG}, "four")
        await anyio.sleep(0.1)
        await client.post("/abort_request", json={"rid": "long"})


async def azip(lines: AsyncIterator[str], most: int) -> AsyncIterator[tuple[str, int]]:
    """The first lines, and their numbers."""
    number = 0
    async for line in lines:
        if number == most:
            return
        yield line, number
        number += 1


def trajectories_of(running: Running) -> Trajectories:
    retrieval = running.router.components.get("trajectories")
    kept: Trajectories = retrieval._trajectories
    return kept


@pytest.mark.anyio
async def test_a_router_begins_with_what_one_before_it_recorded_in_any_shape(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(*flags(tmp_path / "log")) as running:
        await every_shape(running.client)
        shutil.copytree(tmp_path / "log", tmp_path / "killed")
        before = picture(trajectories_of(running))
        names = ("one", "two", "three", "four")
        sessions = {name: (await running.client.get(f"/trajectories/{name}")).content for name in names}
        log = (await running.client.get("/cache_stats")).json()["log"]
        assert (log["files"], log["failed"]) == (1, None)
        assert log["bytes"] == files(tmp_path / "log")[0].stat().st_size
    for directory in (tmp_path / "killed", tmp_path / "log"):  # killed, and ended as it should
        async with start(*flags(directory)) as running:
            assert picture(trajectories_of(running)) == before
            for name, content in sessions.items():
                assert (await running.client.get(f"/trajectories/{name}")).content == content
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.anyio
async def test_a_router_does_not_start_with_a_log_that_it_cannot_read(start: Start, tmp_path: Path) -> None:
    async with start(*flags(tmp_path / "log")) as running:
        await running.client.post("/generate", json={"text": PROMPT, "sampling_params": SHORT})
        with pytest.raises(StartupError, match="another router"):
            build(flags(tmp_path / "log"))
    [path] = files(tmp_path / "log")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(StartupError, match=r"damaged at byte \d+"):
            build(flags(tmp_path / "log"))


@pytest.mark.anyio
async def test_without_a_log_nothing_is_said_of_one(start: Start) -> None:
    async with start("--plugin", "engine", "--plugin", "radix_cache") as running:
        assert "log" not in (await running.client.get("/cache_stats")).json()
