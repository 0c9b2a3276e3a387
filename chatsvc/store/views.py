"""A branch as a prompt needs it: up from its leaf to the first message that a summary covers, and no further.

So a turn reads what is shown verbatim, however long the conversation is. Folded messages that are pinned are found
without walking all of them: an earlier fold of the same branch is a milestone from which to walk. A child is younger
than its parent, so times tell between which two of them a message can lie.
"""

from __future__ import annotations

from typing import Final

import msgspec

from chatsvc.conversation import BranchView, Message, Summary
from chatsvc.store.pool import Row
from chatsvc.store.records import View, message_of, statement

_COVERED: Final = """EXISTS (
            SELECT 1 FROM summaries s WHERE s.conversation_id = m.conversation_id AND s.through_message_id = m.id
        )"""
VIEW: Final = statement(
    """
    WITH RECURSIVE up (id, parent_id, depth, folded) AS (
        SELECT m.id, m.parent_id, 1, %(leaf_may_be_folded)s AND
    """,
    _COVERED,
    """
        FROM conversations c JOIN messages m ON m.conversation_id = c.id
            AND m.id = CASE WHEN %(at_head)s THEN c.head_message_id ELSE %(leaf)s END
        WHERE c.id = %(id)s AND c.user_id = %(user_id)s
        UNION ALL
        SELECT m.id, m.parent_id, up.depth + 1,
    """,
    _COVERED,
    """
        FROM up JOIN messages m ON m.id = up.parent_id WHERE NOT up.folded
    ), used AS (
        SELECT s.* FROM summaries s
        WHERE s.conversation_id = %(id)s AND s.through_message_id = (SELECT id FROM up WHERE folded)
        ORDER BY s.version DESC LIMIT 1
    ), pins AS MATERIALIZED (
        SELECT id, created_at FROM messages WHERE conversation_id = %(id)s AND pinned
    ), milestones (message_id, at, previous_id) AS (
        SELECT m.id, m.created_at, used.previous_id FROM used JOIN messages m ON m.id = used.through_message_id
        WHERE EXISTS (SELECT 1 FROM pins)
        UNION ALL
        SELECT m.id, m.created_at, s.previous_id FROM milestones JOIN summaries s ON s.id = milestones.previous_id
            JOIN messages m ON m.id = s.through_message_id
    ), search (pin, pin_at, id, parent_id) AS (
        SELECT pins.id, pins.created_at, m.id, m.parent_id FROM pins CROSS JOIN LATERAL (
            SELECT message_id FROM milestones WHERE at >= pins.created_at ORDER BY at LIMIT 1
        ) nearest JOIN messages m ON m.id = nearest.message_id
        UNION ALL
        SELECT search.pin, search.pin_at, m.id, m.parent_id FROM search JOIN messages m ON m.id = search.parent_id
        WHERE search.id <> search.pin AND m.created_at >= search.pin_at
    )
    SELECT {message:m}, true AS shown, up.depth, NULL::jsonb AS summary FROM up JOIN messages m USING (id)
        WHERE NOT up.folded
    UNION ALL
    SELECT {message:m}, false, up.depth, (SELECT to_jsonb(u) FROM (SELECT {summary:used} FROM used) u)
        FROM up JOIN messages m USING (id) WHERE up.folded
    UNION ALL
    SELECT {message:m}, false, NULL, NULL FROM search JOIN messages m USING (id) WHERE search.id = search.pin
    """,
)
"""Three kinds of rows: messages that are ``shown``; the folded one that the walk ended at, with its summary; and pins.

``at_head`` or ``leaf`` says where to begin. A leaf that is to be answered, or gone on with, is not folded itself.
"""


def view_of(rows: list[Row]) -> View | None:
    """The rows of ``VIEW``; None when there was no such leaf."""
    shown: list[tuple[int, Message]] = []
    pinned: list[Message] = []
    summary: Summary | None = None
    end: Message | None = None
    for row in rows:
        message = message_of(row)
        if row["shown"]:
            shown.append((row["depth"], message))
        elif row["depth"] is None:
            pinned.append(message)
        else:
            end, summary = message, msgspec.convert(row["summary"], Summary)
    shown.sort(key=lambda place: place[0])
    pinned.sort(key=lambda message: (message.created_at, message.id))
    leaf = shown[0][1] if shown else end
    if leaf is None:
        return None
    verbatim = tuple(message for _, message in reversed(shown))
    return View(leaf, BranchView(summary=summary, pinned=tuple(pinned), verbatim=verbatim))
