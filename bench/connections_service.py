"""The service, with one thing added: each token that its scripted engine says carries the moment it was said.

``@<ns of the monotonic clock>@`` before the token's own text, so that a reader on the same machine can tell how long
an event was under way, from the engine to its socket.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from chatsvc import __main__ as command
from chatsvc import app
from chatsvc.inference.scripted import ScriptedEngine
from chatsvc.prompt import Chunk


def _stamping(make: Any) -> Any:
    def stamping(*arguments: Any, **options: Any) -> Any:
        engine = make(*arguments, **options)
        assert isinstance(engine, ScriptedEngine)
        generate = engine.generate

        async def stamped(*arguments: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
            generation = generate(*arguments, **options)
            try:
                async for chunk in generation:
                    yield msgspec.structs.replace(chunk, text=f"@{time.monotonic_ns()}@{chunk.text}")
            finally:
                await generation.aclose()

        engine.generate = stamped  # type: ignore[method-assign]
        return engine

    return stamping


if __name__ == "__main__":
    app.create_engine = _stamping(app.create_engine)  # type: ignore[attr-defined]
    sys.exit(command.main())
