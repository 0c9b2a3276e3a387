"""How long a reply the next turn of a branch is likely to ask for: as long as the last one did.

Room is kept for what a request names, so what the next prompt leaves out, and whether a fold is due, hang on it.
"""

from __future__ import annotations

from chatsvc.conversation import Branch
from chatsvc.store import Store


async def asked_tokens(store: Store, user_id: str, branch: Branch) -> int | None:
    """The longest reply that the branch's last request named, in tokens; None: it named none.

    Raises ``NotFound`` where the conversation was deleted meanwhile, and ``StoreUnavailable``.
    """
    for message in reversed(branch):
        if message.response_id is not None:
            return (await store.runs.get(user_id, message.response_id)).max_tokens
    return None
