"""Answers as they look, for the API's description: one example for each operation that answers with a body.

The flow tests compare the members of these examples with those of real answers, so they cannot go stale.
"""

from __future__ import annotations

from typing import Any, Final

MEMORY_ID: Final = "mem_0199c1a2b3c97d5e8f708192a3b4c5d6"
CONVERSATION_ID: Final = "conv_0199c1a2b3c47d5e8f708192a3b4c5d6"
QUESTION_ID: Final = "msg_0199c1a2b3c57d5e8f708192a3b4c5d6"
REPLY_ID: Final = "msg_0199c1a2b3c67d5e8f708192a3b4c5d6"
SUMMARY_ID: Final = "sum_0199c1a2b3c87d5e8f708192a3b4c5d6"
RESPONSE_ID: Final = "resp_local_0199c1a2b3c77d5e8f708192a3b4c5d6"
STREAM_URL: Final = f"/v1/responses/{RESPONSE_ID}/stream?token=AGsM60CcRnR9kxn_zgB7801ePDaR"
_MADE: Final = "2026-01-01T12:00:00.000000Z"

_conversation: Final[dict[str, Any]] = {
    "id": CONVERSATION_ID,
    "title": "What is the capital of France?",
    "system_prompt": None,
    "model": None,
    "head_message_id": REPLY_ID,
    "pinned": False,
    "temporary": False,
    "created_at": _MADE,
    "updated_at": _MADE,
}
_question: Final[dict[str, Any]] = {
    "id": QUESTION_ID,
    "parent_id": None,
    "role": "user",
    "content": "What is the capital of France?",
    "status": "complete",
    "model": None,
    "response_id": None,
    "finish_reason": None,
    "error_code": None,
    "tokens": 7,
    "pinned": False,
    "degraded": [],
    "created_at": _MADE,
    "stream_url": None,
}
_reply: Final[dict[str, Any]] = {
    **_question,
    "id": REPLY_ID,
    "parent_id": QUESTION_ID,
    "role": "assistant",
    "content": "",
    "status": "streaming",
    "model": "SmolLM2-135M-Instruct",
    "response_id": RESPONSE_ID,
    "tokens": None,
    "stream_url": STREAM_URL,
}
_accepted: Final[dict[str, Any]] = {
    "message_id": REPLY_ID,
    "user_message_id": QUESTION_ID,
    "response_id": RESPONSE_ID,
    "stream_url": STREAM_URL,
    "status": "queued",
    "queue_position": 1,
    "served_model": "SmolLM2-135M-Instruct",
    "degraded": [],
}

_summary: Final = {
    "id": SUMMARY_ID,
    "through_message_id": REPLY_ID,
    "version": 1,
    "text": "Facts\nThe cat is called Minky.",
    "tokens": 11,
    "edited": False,
    "created_at": _MADE,
}

_memory: Final = {"id": MEMORY_ID, "text": "I live in Lisbon.", "created_at": _MADE, "updated_at": _MADE}
_me: Final[dict[str, Any]] = {
    "user": {"id": "ada"},
    "tier": "free",
    "usage": {"since": _MADE, "prompt_tokens": 1200, "cached_tokens": 800, "output_tokens": 950},
    "quota": {
        "open_replies": {"limit": 3, "used": 1, "left": 2, "response_ids": [RESPONSE_ID], "waiting": []},
        "budget": {"limit": 1_000_000, "used": 4_150, "left": 995_850},
        "refills_at": _MADE,
    },
    "memory": False,
}

ANSWERS: Final[dict[str, Any]] = {
    "createConversation": {**_conversation, "title": None, "head_message_id": None},
    "listConversations": {"data": [_conversation], "next_cursor": None},
    "getConversation": {**_conversation, "messages": [_question, _reply]},
    "listBranch": {"data": [_reply, _question], "next_cursor": None},
    "updateConversation": {**_conversation, "pinned": True},
    "listSummaries": {"data": [_summary]},
    "editSummary": {**_summary, "version": 2, "text": "Facts\nThe cat is called Minka, not Minky.", "edited": True},
    "sendMessage": _accepted,
    "answerAgain": _accepted,
    "getResponse": {
        "id": RESPONSE_ID,
        "conversation_id": CONVERSATION_ID,
        "user_message_id": QUESTION_ID,
        "message_id": REPLY_ID,
        "model": "SmolLM2-135M-Instruct",
        "served_model": "SmolLM2-135M-Instruct",
        "degraded": [],
        "tier": "free",
        "status": "complete",
        "queue_position": None,
        "eta_s": None,
        "finish_reason": "stop",
        "error": None,
        "usage": {"prompt_tokens": 37, "cached_tokens": 0, "output_tokens": 8},
        "created_at": _MADE,
        "started_at": _MADE,
        "ended_at": _MADE,
        "stream_url": STREAM_URL,
    },
    "getContext": {
        "window": 8192,
        "reply_reserve": 2048,
        "prompt_tokens": 5310,
        "cached_tokens": 4992,
        "parts": {
            "system": 24,
            "memory": 0,
            "summary": 610,
            "pinned": 96,
            "verbatim": 3890,
            "recalled": 648,
            "question": 42,
        },
        "condensed": True,
        "left_out": 0,
        "summary": {"id": SUMMARY_ID, "version": 1, "through_message_id": REPLY_ID, "tokens": 574},
        "recalled": [{"message_ids": [QUESTION_ID, REPLY_ID], "score": 1.42, "tokens": 210, "created_at": _MADE}],
    },
    "pinMessage": {**_question, "pinned": True},
    "stopResponse": {"status": "streaming"},
    "getMe": _me,
    "updateMe": {**_me, "memory": True},
    "listMemories": {"data": [_memory]},
    "addMemory": _memory,
    "changeMemory": {**_memory, "text": "I live in Porto."},
    "listModels": {
        "object": "list",
        "data": [
            {
                "id": "SmolLM2-135M-Instruct",
                "object": "model",
                "owned_by": "chatsvc",
                "default": True,
                "ready": True,
                "window": 8192,
                "degraded": [],
            }
        ],
    },
    "healthz": {"status": "ok"},
    "readyz": {"ready": True, "checks": {"postgres": "ok", "redis": "ok", "engine SmolLM2-135M-Instruct": "ok"}},
}
