"""A whole run: a router and engines as processes, a crowd, a trainer, and faults; then the judgement."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import aiohttp
import anyio

from chaos.asking import DEADLINE_S, Crowd
from chaos.conversations import Conversation, Heard, opening
from chaos.counting import COUNTS_MEMORY
from chaos.faults import KINDS, Faults
from chaos.fleet import FIRST, EngineProcess, Trainer, Watch, until
from chaos.oracle import Oracle
from chaos.processes import Program
from chaos.report import Report, Use
from deadlines import HANG_S
from ports import free_port
from slime_engine.model import load_model
from slime_engine.tokenizer import EngineTokenizer

__all__ = ["Rampage"]

_FLAGS = (
    "--middleware-paths", "quick_tokenizer", "chaos.counting",
    "--plugin", "radix_cache", "--radix-tree-max-bytes", str(64 << 20), "--gc-threshold-k", "0",
    "--abort-retry-wait-s", "0.2",
    "--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "1", "--health-failure-threshold", "3",
    "--connect-timeout-secs", "1", "--request-timeout-secs", "5", "--stream-silence-timeout-secs", "5",
    "--control-timeout-s", "2", "--cb-timeout-duration-secs", "2",
)  # fmt: skip
#: Seconds that the end may take: for recovering, for counts to become zero, for what was used to be given back.
_SETTLED_S = 30.0
#: Seconds more than asked for that it goes on until everything has happened that is to happen.
_MORE_S = 90.0
_MORE_FILES, _MORE_TASKS = 8, 4
#: 16 MiB are the filters of losses, which come with the first loss; 4 MiB are buffers for reads of an SSD.
_MORE_BYTES = 24 << 20
#: Memory that a record in the store takes with all that leads to it: 2.5 kB in runs of 300 s.
_DEMOTED_BYTES = 4 << 10
_LOST = ("not_kept", "not_in_store")
_TRACEBACK = re.compile(r"^.*\n(?:  [+|] .*\n)*Traceback.*(?:\n[ \w].*)*", re.MULTILINE)
_WARMING, _UPDATES, _LOOKED_AT_AGAIN = 20, 3, 300


class Rampage:
    """One run with ``flags`` of the router. ``seconds`` is how long things go wrong at least; starting, ending and
    judging come on top. ``crowd``: the number of clients. ``pace``: see Faults.
    """

    def __init__(
        self, directory: Path, flags: Sequence[str], *, seconds: float, seed: int, crowd: int, pace: float
    ) -> None:
        self._seconds, self._seed, self._size, self._pace = seconds, seed, crowd, pace
        self._tokenizer: EngineTokenizer = load_model().tokenizer
        self.engines = [
            EngineProcess(f"engine{number}", directory, relayed=number > 1) for number in range(4)
        ]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        workers = ["--worker-urls", *(engine.url for engine in self.engines)]
        self.router = Program(
            ["--port", str(port), *_FLAGS, *flags, *workers],
            directory / "router.log",
            COUNTS_MEMORY,
        )
        self.dice = Random(f"{seed} turns")
        self.conversations = opening(seed)

    async def run(self) -> Report:
        """Everything; processes are gone afterwards."""
        programs = [self.router, *(engine.program for engine in self.engines)]
        try:
            async with self._clients(), anyio.create_task_group() as relays:
                for engine in self.engines:
                    if engine.relay is not None:
                        await relays.start(engine.relay.run)
                for program in programs:
                    program.start()
                report = await self._run()
                relays.cancel_scope.cancel()
        except Exception as error:
            if self.router.ended:
                error.add_note(f"the router has ended:\n{self.router.said()[-3000:]}")
            raise
        finally:
            for program in programs:
                program.kill()
        return report

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[None]:
        """To the router, and to the engines behind its back. Connections are not kept: files are counted."""
        async with (
            aiohttp.ClientSession(
                self.url,
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=2 * DEADLINE_S),
                read_bufsize=1 << 22,
            ) as self._http,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=2)
            ) as self._direct,
        ):
            self._watch = Watch(self._http)
            self._crowd = Crowd(self._http, tokens=24)
            self._trainer = Trainer(self._http, Random(f"{self._seed} trainer"))
            self._faults = Faults(self._watch, self._direct, self._seed, self._pace)
            yield

    async def _run(self) -> Report:
        loop = asyncio.get_running_loop()
        await self._until_up()
        idle = await self._use()  # before any connection to an engine is kept
        async with asyncio.TaskGroup() as warming:
            for _ in range(_WARMING):
                warming.create_task(self._crowd.play(next(self.conversations), 3, 0.1))
        warm = await self._use()
        before = replace(idle, used_bytes=warm.used_bytes, kept_bytes=warm.kept_bytes, demoted=warm.demoted)
        report = Report(self._seed, self._faults.done, self._crowd.asked, before)
        over = asyncio.Event()
        began = loop.time()
        async with asyncio.TaskGroup() as looking:
            watching = looking.create_task(self._watch.run())
            async with asyncio.TaskGroup() as tasks:
                for number, engine in enumerate(self.engines):
                    tasks.create_task(self._faults.run(engine, number, over))
                tasks.create_task(self._trainer.run(over))
                for _ in range(self._size):
                    tasks.create_task(self._talk(over))
                await asyncio.sleep(self._seconds)
                if not await until(lambda: not self._missing(), _MORE_S):
                    report.wrong.append(("not everything happened", self._missing()))
                report.seconds = loop.time() - began
                over.set()
                self._crowd.hurry.set()
            await self._recover(report)
            watching.cancel()
        await self._leave_nothing(report)
        await self._judge(report)
        report.after = await self._settled_use(report.before)
        report.wrong += [*self._crowd.wrong, *self._faults.wrong, *_leaked(report.after, report.before)]
        await self._read_stats(report)
        self._read_log(report)
        return report

    async def _until_up(self) -> None:
        with anyio.fail_after(HANG_S):
            for engine in self.engines:
                while not await engine.serves(self._direct):  # noqa: ASYNC110  # a process has no event
                    await asyncio.sleep(0.1)
            while not self._all_ready():
                assert not self.router.ended, self.router.said()
                with suppress(aiohttp.ClientError):
                    await self._watch.look()
                await asyncio.sleep(0.1)

    def _all_ready(self) -> bool:
        return all(self._watch.state(engine.url) == "ready" for engine in self.engines)

    async def _talk(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._crowd.play(next(self.conversations), self.dice.randint(3, 6), 4.0 * self._pace)

    def _missing(self) -> str:
        """Return the events that a run must have, and that have not happened yet."""
        missing: list[str] = [*{*KINDS}.difference(fault.kind for fault in self._faults.done if fault.hit)]
        if self._watch.count("stale") == 0:
            missing.append("an engine came back with old weights, and was found stale")
        if len(self._crowd.finished) < self._size:
            missing.append(f"{self._size} conversations")
        if len(self._trainer.updates) <= _UPDATES:
            missing.append(f"{_UPDATES} updates")
        return ", ".join(missing)

    # After the storm.

    async def _recover(self, report: Report) -> None:
        """Every engine serves again once it has taken an update."""
        for _ in range(5):
            if (await self._trainer.update(from_disk=True)).whole:
                break
        if not await until(self._all_ready, _SETTLED_S):
            shown = [
                {key: self._watch.workers[engine.url].get(key) for key in ("url", "state", "reason")}
                for engine in self.engines
            ]
            report.wrong.append(("not every engine is back", f"{shown}; {self._trainer.answers[-3:]}"))
        updates = self._trainer.updates[1:]
        report.updates, report.whole_updates = len(updates), sum(update.whole for update in updates)
        report.stale = self._watch.count("stale")

    async def _leave_nothing(self, report: Report) -> None:
        """Counts are zero, and no engine generates for nobody."""
        deadline = asyncio.get_running_loop().time() + _SETTLED_S
        while True:
            await self._watch.look()
            loads = {worker["url"]: worker["load"] for worker in self._watch.workers.values()}
            orphans = {engine.url: await engine.running(self._direct) for engine in self.engines}
            if not any(loads.values()) and not any(orphans.values()):
                return
            if asyncio.get_running_loop().time() > deadline:
                report.wrong.append(("something is left", f"in flight {loads}, generated {orphans}"))
                return
            await asyncio.sleep(0.2)

    async def _use(self) -> Use:
        """Return the idle router's use of resources."""
        async with self._http.get("/chaos/counts") as answer:
            counts = await answer.json()
        async with self._http.get("/cache_stats") as answer:
            stats = await answer.json()
        demoted = (stats.get("demoted") or {"segments": 0})["segments"]
        files, memory = self.router.open_files(), self.router.resident_bytes()
        return Use(
            files, memory, counts["used_bytes"], counts["tasks"], counts["exchanges"], stats["bytes"], demoted
        )

    async def _settled_use(self, aim: Use) -> Use:
        """Return the use of resources; wait for it to come down to ``aim``: idle connections are kept for 4 s."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLED_S
        while True:
            use = await self._use()
            if loop.time() > deadline or not _leaked(use, aim):
                return use
            await asyncio.sleep(0.5)

    async def _judge(self, report: Report) -> None:
        entries = [entry for engine in self.engines for entry in engine.journal.entries()]
        oracle = Oracle(entries, lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True))
        self._judge_answers(oracle, report)
        again = self._crowd.finished[-_LOOKED_AT_AGAIN:]
        for conversation in self._crowd.finished:
            report.conversations += 1
            report.turns += len(conversation.heard)
            report.given_up += conversation.failed
            if conversation.heard:
                self._judge_retrieved(oracle, conversation, report)
                if conversation in again:
                    conversation.said = await self._crowd.retrieve(conversation)
                    self._judge_retrieved(oracle, conversation, report)
        for session in {conversation.session for conversation in self._crowd.finished}:
            await self._judge_session(session, report)

    def _judge_answers(self, oracle: Oracle, report: Report) -> None:
        garbled = {rid for engine in self.engines if engine.relay is not None for rid in engine.relay.hit}
        for asked in self._crowd.asked:
            if asked.outcome == "garbled" and not garbled.intersection(asked.rids):
                report.wrong.append(("no fault explains an answer that makes no sense", f"{asked.rids}"))
            for heard in asked.heard:
                source = oracle.source(heard)
                if source is None:
                    report.wrong.append(("an answer is not in any journal", f"{heard}"))
                    continue
                oldest, newest = self._trainer.allowed(heard.asked_at, heard.heard_at)
                seen = {int(version) for version in source["output_versions"][: len(heard.output_ids)]}
                if self._explains_first(heard):
                    seen.discard(int(FIRST))
                if any(not oldest <= version <= newest for version in seen):
                    told = (
                        f"{heard.rid}: sampled under {sorted(seen)}, when the fleet had {oldest} to {newest}"
                    )
                    report.wrong.append(("weights that the fleet had not", told))

    def _explains_first(self, heard: Heard) -> bool:
        """Return True when an answer may be of the first weights.

        The request was under way while an engine restarted, or all engines that took the fleet's weights were killed.
        """
        last = self._trainer.last_before(heard.asked_at)
        return self._faults.restarted_between(heard.asked_at, heard.heard_at) or self._faults.all_killed(
            last.takers, last.began, heard.heard_at
        )

    def _judge_retrieved(self, oracle: Oracle, conversation: Conversation, report: Report) -> None:
        said = conversation.said
        assert said is not None, "asked for when it was finished"
        wrong = oracle.judge(conversation, said)
        if wrong is not None:
            report.wrong.append(("retrieved tokens", f"{conversation.session}: {wrong}"))
        elif said["exact"]:
            report.exact += 1
        else:
            report.flagged[said["inexact_reason"]] += 1
            is_whole = all(heard.kept_whole for heard in conversation.heard)
            if is_whole and self._crowd.outcomes(conversation.session).keys() == {"200"}:
                told = f"{conversation.session}: {said['inexact_reason']}, of nothing but whole answers"
                report.wrong.append(("a flag that nothing explains", told))

    async def _judge_session(self, session: str, report: Report) -> None:
        """Check that a session with an answer is complete, unless the router could not read one of its answers.

        A client that hangs up does not know if the router had such an answer by then.
        """
        outcomes = self._crowd.outcomes(session)
        if not outcomes["200"]:
            return
        async with self._http.get(f"/trajectories/{session}") as answer:
            is_complete = answer.status == 200 and (await answer.json())["complete"]
        report.sessions += 1
        report.complete += is_complete
        if is_complete == bool(outcomes["garbled"]) and (is_complete or not self._left_garbled(session)):
            told = f"{session}: {answer.status}, complete: {is_complete}, {dict(outcomes)}"
            report.wrong.append(("a session that is complete, or not, without a reason", told))

    def _left_garbled(self, session: str) -> bool:
        """Return True when a client hung up on an answer whose body may have been no JSON."""
        left = {rid for one in self._crowd.asked if one.outcome == "left" for rid in one.rids}
        hits = (engine.relay.hit for engine in self.engines if engine.relay is not None)
        return any(
            hit.get(rid) == "bad JSON" for hit in hits for rid in left if rid.rpartition(".")[0] == session
        )

    async def _read_stats(self, report: Report) -> None:
        async with self._http.get("/cache_stats") as answer:
            stats = await answer.json()
        report.demoted = stats.get("demoted")
        if report.demoted is not None:
            async with self._http.get("/store") as answer:
                report.tiers = (await answer.json())["tiers"]
        lost = {reason: number for reason, number in stats["evictions"].items() if reason in _LOST}
        if lost:
            report.wrong.append(("records that the store has lost", f"{lost}; {report.demoted}"))

    def _read_log(self, report: Report) -> None:
        log = self.router.said()
        for said in _TRACEBACK.findall(log):
            if "answer_not_understood" not in said:  # of an engine that answered what is no JSON
                report.wrong.append(("a traceback in the router's log", said[:3000]))
        if self.router.ended:
            report.wrong.append(("the router has ended", log[-3000:]))


def _leaked(after: Use, before: Use) -> list[tuple[str, str]]:
    """Return the resources of which there are more, beyond the normal variation of an idle router."""
    found = []
    if after.open_files > before.open_files + _MORE_FILES:
        found.append(f"{after.open_files - before.open_files} files")
    if after.exchanges > before.exchanges:
        found.append(f"{after.exchanges - before.exchanges} exchanges")
    more = after.used_bytes - before.used_bytes
    if more > 2 * after.kept_bytes + _DEMOTED_BYTES * after.demoted + _MORE_BYTES:
        told = f"for {after.kept_bytes >> 20} MiB of records, and {after.demoted} in the store"
        found.append(f"{more >> 20} MiB, {told}")
    tasks = {name: count - before.tasks.get(name, 0) for name, count in after.tasks.items()}
    if sum(tasks.values()) > _MORE_TASKS:
        found.append(f"tasks { ({name: count for name, count in tasks.items() if count > 0}) }")
    return [("leaked", more) for more in found]
