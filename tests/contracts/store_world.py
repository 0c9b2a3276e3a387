"""Arranges a store through its own door: who asks, what is asked, and replies in each state."""

import msgspec

from chatsvc import ids
from chatsvc.limits import Principal, Tier, TierName, Usage
from chatsvc.run import Checkpoint, Outcome, RunStatus
from chatsvc.store import NewConversation, NewFold, Regeneration, Submission

ALICE = Principal("alice", TierName.PLUS)
BOB = Principal("bob", TierName.FREE)
WORKER = "worker-1"
MANY = Tier(name=TierName.FREE, weight=1, max_open_replies=1_000)


def at_most(open_replies):
    """A tier with so many open replies."""
    return msgspec.structs.replace(MANY, max_open_replies=open_replies)


def complete(text="All of it.", last_seq=9):
    return Outcome(
        status=RunStatus.COMPLETE,
        text=text,
        last_seq=last_seq,
        finish_reason="stop",
        usage=Usage(prompt_tokens=20, cached_tokens=16, output_tokens=4),
    )


def stopped(text="All of", last_seq=8):
    return Outcome(status=RunStatus.STOPPED, text=text, last_seq=last_seq, finish_reason="stopped")


def failed(text="", last_seq=1):
    return Outcome(status=RunStatus.FAILED, text=text, last_seq=last_seq, error_code="engine_failed", error_message="x")


def checkpoint(run, text, seq=5):
    return Checkpoint(run_id=run.id, attempt=run.attempt, seq=seq, text=text, usage=Usage(output_tokens=2))


def submission(conversation, parent_id=None, **changes):
    fields = {
        "principal": ALICE,
        "conversation_id": conversation.id,
        "parent_id": parent_id,
        "content": "What is the capital of France?",
        "client_msg_id": ids.uuid7_hex(),
        "request_hash": b"hash",
        "model": "small",
        "tier": MANY,
        "charge": 100.0,
        "prompt_tokens": 20,
        "user_message_id": ids.new_message_id(),
        "message_id": ids.new_message_id(),
        "response_id": ids.new_response_id("local"),
    }
    return Submission(**(fields | changes))


def new_fold(conversation, through, base=None, **changes):
    fields = {
        "id": ids.new_fold_id(),
        "user_id": conversation.user_id,
        "conversation_id": conversation.id,
        "through_message_id": through,
        "base_id": base,
        "model": "small",
        "tier": TierName.FREE,
        "prompt_tokens": 300,
        "max_tokens": 100,
    }
    return NewFold(**(fields | changes))


def regeneration(user_message_id, **changes):
    fields = {
        "principal": ALICE,
        "user_message_id": user_message_id,
        "client_msg_id": ids.uuid7_hex(),
        "request_hash": b"hash",
        "model": "small",
        "tier": MANY,
        "charge": 100.0,
        "prompt_tokens": 20,
        "message_id": ids.new_message_id(),
        "response_id": ids.new_response_id("local"),
    }
    return Regeneration(**(fields | changes))


class World:
    """A store with things in it."""

    def __init__(self, store):
        self.store = store

    async def conversation(self, principal=ALICE, **fields):
        new = NewConversation(id=ids.new_conversation_id(), **fields)
        return await self.store.conversations.create(principal, new)

    async def queued(self, conversation=None, parent_id=None, **changes):
        conversation = conversation or await self.conversation()
        return (await self.store.runs.submit(submission(conversation, parent_id, **changes))).run

    async def streaming(self, conversation=None, parent_id=None, *, owner=WORKER, **changes):
        run = await self.queued(conversation, parent_id, **changes)
        [claimed] = await self.store.runs.claim([run.id], owner)
        return claimed

    async def complete(self, conversation=None, parent_id=None, *, text="All of it.", **changes):
        run = await self.streaming(conversation, parent_id, **changes)
        assert await self.store.runs.finish(run.id, run.attempt, complete(text))
        return await self.store.runs.get(run.user_id, run.id)

    async def turns(self, conversation, count):
        """A chain of turns; returns the message ids from root to leaf."""
        return await self.turns_after(conversation, None, count)

    async def turns_after(self, conversation, parent, count):
        """More turns behind a message; returns their message ids."""
        path = []
        for number in range(count):
            run = await self.complete(conversation, parent, content=f"question {number}", text=f"answer {number}")
            path += [run.user_message_id, run.message_id]
            parent = run.message_id
        return path

    async def path(self, conversation_id, leaf, user_id="alice"):
        """The ids from the root to a leaf."""
        _, branch = await self.store.conversations.turn(user_id, conversation_id, leaf)
        return [message.id for message in branch]

    async def message(self, run):
        """The assistant message of a run."""
        return await self.store.conversations.owner_of_message(run.user_id, run.message_id)
