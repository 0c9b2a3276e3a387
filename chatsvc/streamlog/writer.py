"""Opens replies, and keeps one pump per shard running: what becomes of one server holds up nobody else's replies."""

from __future__ import annotations

import asyncio

import structlog

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.base import StreamLog
from chatsvc.streamlog.pump import Audience, Holds, LogPump, Pace
from chatsvc.streamlog.reply import ReplyWriter

__all__ = ["LogWriter", "ReplyWriter"]

_logger = structlog.get_logger(__name__)


class LogWriter:
    """Opens replies and pumps what they have due. ``run`` runs the pumps; the composition root owns its task.

    ``holds(response_id, attempt)`` says whether this attempt still holds the run's lease; it is asked only when a log
    was lost, or the connection to it broke. ``audience`` gets every entry once Redis has it, so that local readers need
    no way back.
    """

    def __init__(
        self, log: StreamLog, audience: Audience | None, *, batch_ms: int, batch_tokens: int, holds: Holds
    ) -> None:
        self._log = log
        self._audience = audience
        self._pace = Pace(batch_s=batch_ms / 1000, batch_tokens=batch_tokens)
        self._holds = holds
        self._pumps: dict[str, LogPump] = {}
        self._new_pump = asyncio.Event()

    @property
    def open_replies(self) -> int:
        """How many replies are being written."""
        return sum(len(pump.replies) for pump in self._pumps.values())

    async def open(self, response_id: str, attempt: int, *, after: int = 0) -> ReplyWriter:
        """Fence off earlier attempts and go on after the last event in the log, or after ``after`` if that is higher.

        When the log is away the reply is opened all the same: it is written once the log is back (L4). Raises
        ``Fenced`` when a newer attempt holds the log.
        """
        # A run that nobody has claimed has attempt 0, but readers look behind 1-<cursor>.
        attempt = max(attempt, 1)
        try:
            last = await self._log.open(response_id, attempt)
        except LogUnavailable as error:
            _logger.warning("reply begins without its log", run_id=response_id, reason=error.detail)
            last = None
        pump = self._pump(self._log.shard(response_id))
        reply = ReplyWriter(pump, response_id, attempt, last_seq=max(last or 0, after), opened=last is not None)
        pump.add(reply)
        return reply

    def _pump(self, shard: str) -> LogPump:
        pump = self._pumps.get(shard)
        if pump is None:
            pump = self._pumps[shard] = LogPump(self._log, self._audience, pace=self._pace, holds=self._holds)
            self._new_pump.set()
        return pump

    async def _more(self) -> None:
        await self._new_pump.wait()

    async def run(self) -> None:
        """Run the pumps until cancelled. Raises what one of them raises."""
        running: dict[str, asyncio.Task[None]] = {}
        news = asyncio.create_task(self._more())
        try:
            while True:
                self._new_pump.clear()
                for shard in self._pumps.keys() - running.keys():
                    running[shard] = asyncio.create_task(self._pumps[shard].run(), name=f"log pump {shard}")
                if news.done():
                    news = asyncio.create_task(self._more())
                await asyncio.wait({news, *running.values()}, return_when=asyncio.FIRST_COMPLETED)
                for task in running.values():
                    if task.done():
                        task.result()
        finally:
            for task in (news, *running.values()):
                task.cancel()
            await asyncio.gather(news, *running.values(), return_exceptions=True)

    async def aclose(self) -> None:
        """Let go of all replies. Whatever was not flushed stays unwritten; the store has it or the lease says so."""
        for pump in self._pumps.values():
            for reply in tuple(pump.replies):
                reply.discard()
