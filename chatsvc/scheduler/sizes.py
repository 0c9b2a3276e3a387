"""What messages take in a prompt of one model, as far as it is known without rendering it."""

from __future__ import annotations

from collections.abc import Sequence

from chatsvc.conversation import Message, Role
from chatsvc.inference.base import Engine
from chatsvc.prompt import ChatMessage


class Sizes:
    """``overhead``: tokens that the chat template adds to a message.

    The store's counts are taken where this model made them; the rest is counted, which an engine does once for a text.
    A turn's size never changes, so what is left out by it stays where it is.
    """

    def __init__(self, engine: Engine, model: str, overhead: int) -> None:
        self._engine = engine
        self._model = model
        self.overhead = overhead

    async def of_turn(self, turn: Sequence[Message]) -> int:
        """Tokens of the messages of a turn."""
        # A question was counted by the model that answered it.
        is_ours = all(message.model in {None, self._model} for message in turn)
        sizes = [
            message.tokens
            if is_ours and message.tokens is not None and (message.role is not Role.ASSISTANT or message.status.ended)
            else await self.of_text(message.content)
            for message in turn
        ]
        return sum(sizes) + self.overhead * len(sizes)

    async def of(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of messages as they are shown."""
        counts = [await self.of_text(message.content) for message in messages]
        return sum(counts) + self.overhead * len(counts)

    async def of_text(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(await self._engine.encode(text))
