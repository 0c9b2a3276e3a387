"""Conversations that are carried on until they are folded, by an engine whose summaries the test says."""

import asyncio
from contextlib import asynccontextmanager

import psycopg
from running_scheduler import scheduler
from store_world import ALICE
from streaming import soon

from chatsvc import ids
from chatsvc.context.fold import Said, request
from chatsvc.conversation import Role
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.prompt import Chunk
from chatsvc.scheduler import NewMessage

WINDOW = 2048
WORDS = "the cat sat on the mat and saw a long grey rat "
RUNS = "SELECT count(*), count(*) FILTER (WHERE status IN ('queued', 'streaming')) FROM runs"
TASK = request(None, [Said(Role.USER, "x")], cap_tokens=100)[0].content.partition("\n")[0]


def is_fold(prompt):
    """Whether this asks for a summary."""
    return prompt.messages[0].content.startswith(TASK)


class Scribe(ScriptedEngine):
    """A scripted engine whose summaries are said by the test, and can be held back."""

    def __init__(self, *drafts, error=None, **options):
        super().__init__(ScriptedOptions(window=WINDOW, **{"tokens": 24, "slots": 4, **options}), model="small")
        self.drafts = list(drafts)
        """What is said in turn; the last one again and again."""
        self.prompts = []
        """Of all that was asked, as messages."""
        self.summarising = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.error = error

    @property
    def fold_prompts(self):
        return [prompt for prompt in self.prompts if is_fold(prompt)]

    async def generate(self, prompt, sampling, run_id, priority=0):
        self.prompts.append(prompt)
        if not is_fold(prompt):
            async for chunk in super().generate(prompt, sampling, run_id, priority):
                yield chunk
            return
        self.summarising.set()
        if self.error:
            raise self.error
        async with self._slots.hold(priority):
            await self.go_on.wait()
        draft = self.drafts.pop(0) if len(self.drafts) > 1 else self.drafts[0]
        tokens = len(await self.encode(draft))
        reason = "stop" if tokens < sampling.max_tokens else "length"
        yield Chunk(
            text=draft, output_tokens=tokens, prompt_tokens=prompt.tokens, cached_tokens=0, finish_reason=reason
        )


async def rows(url, statement, *params):
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return await (await connection.execute(statement, params)).fetchall()


class Talk:
    """A conversation that is carried on."""

    def __init__(self, store, made, conversation, url):
        self.store, self.made, self.conversation, self.url = store, made, conversation, url
        self.said = 0

    async def start(self, content=None, **fields):
        self.said += 1
        new = NewMessage(content=content or f"{self.said}: {WORDS * 8}", client_msg_id=ids.uuid7_hex(), **fields)
        return (await self.made.submit(ALICE, self.conversation.id, new)).run

    async def turn(self, content=None, **fields):
        run = await self.start(content, **fields)
        await self.ended(run)
        return run

    async def ended(self, run):
        await soon(self._ended(run))

    async def _ended(self, run):
        while not await self.store.runs.ended([run.id]):
            await asyncio.sleep(0.01)

    async def turns(self, count):
        for _ in range(count):
            await self.turn()

    async def until_folding(self, engine):
        """Talk until a fold begins."""
        while not engine.summarising.is_set():
            assert self.said < 40
            await self.turn()
            await self.quiet(folding=engine)

    async def summaries(self):
        return await self.store.summaries.on_branch("alice", self.conversation.id, None)

    async def quiet(self, folding=None):
        """Wait until nothing runs or is looked at in the background any more, or a fold begins."""
        await soon(self._quiet(folding))

    async def _quiet(self, folding):
        """One thing begets another while it is under way, and between queue and worker a run is in the store only. So
        nothing is under way when nothing was seen twice, and no run has come in between.
        """
        made, before = self.made, None
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            while True:
                runs, still_open = await (await connection.execute(RUNS)).fetchone()
                if folding is not None and folding.summarising.is_set():
                    return
                busy = still_open or made.dispatcher.active_count or made.folds.looking or made.warming.busy
                if not busy and runs == before:
                    return
                before = None if busy else runs
                await asyncio.sleep(0.01)

    async def fold_runs(self):
        return await rows(
            self.url,
            "SELECT status, error_code FROM runs WHERE kind = 'fold' AND conversation_id = %s ORDER BY created_at",
            self.conversation.id,
        )


@asynccontextmanager
async def carried_on(world, store, tmp_path, url, engine, embedder=None):
    async with scheduler(store, tmp_path, engine=engine, embedder=embedder) as made:
        yield Talk(store, made, await world.conversation(), url)
