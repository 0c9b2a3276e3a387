"""``kill -9`` of the only worker in mid-reply: what every reader is told, what is kept, and that life goes on (L6)."""

import asyncio
import math
import time
from types import SimpleNamespace

import httpx
import pytest
from api_client import Api
from reader import read, read_to_the_end

pytestmark = pytest.mark.slow

READERS = 4


@pytest.fixture(scope="module")
def aftermath(start_server):
    """A conversation whose second reply was running when its worker was killed, and all that was seen of that."""
    worker = start_server("scripted:?tokens_per_s=20&tokens=400", CHATSVC_ROLES="worker,api")
    other = start_server("scripted:?", beside=worker, CHATSVC_ROLES="api")

    async def story():
        async with httpx.AsyncClient(timeout=30) as client:
            doomed = Api(client, worker.base_url)
            api = Api(client, other.base_url, doomed.headers)
            first = await doomed.start("First.", max_tokens=5)
            await read_to_the_end(client, doomed.stream_url(first))
            reply = await doomed.start("Second.", conversation_id=first["conversation_id"], max_tokens=400)
            before = await read(client, doomed.stream_url(reply), cut=lambda seen: len(seen.text) > 60)
            messages_before = await api.messages(reply["conversation_id"])
            # Those of the worker lose their connection and come back elsewhere, with what they have.
            cut_off = [asyncio.create_task(read(client, doomed.stream_url(reply))) for _ in range(READERS)]
            staying = [asyncio.create_task(read(client, api.stream_url(reply))) for _ in range(READERS)]
            await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > len(before.text))
            killed_at = time.monotonic()
            await asyncio.to_thread(worker.kill)
            await asyncio.wait(cut_off)
            come_back = [
                asyncio.create_task(read_to_the_end(client, api.stream_url(reply), pause_s=0.1)) for _ in cut_off
            ]
            seen = await asyncio.gather(*staying, *come_back)
            told_s = time.monotonic() - killed_at
            messages = await api.messages(reply["conversation_id"])
            states = [await api.state(each) for each in (first, reply)]
            quota = (await api.call("GET", "/v1/me")).json()["quota"]
            following = await api.send(reply["conversation_id"], "Third.", max_tokens=5)
            assert following.status_code == 202, following.text
            await asyncio.to_thread(worker.start)
            answer = await read_to_the_end(client, api.base + following.json()["stream_url"], pause_s=0.1)
            return SimpleNamespace(
                first=first,
                reply=reply,
                before=before,
                told_s=told_s,
                seen=seen,
                messages_before=messages_before,
                messages=messages,
                states=states,
                quota=quota,
                following=following.json(),
                answer=answer,
                messages_after=await api.messages(reply["conversation_id"]),
            )

    return asyncio.run(story())


def test_what_the_dead_worker_held_is_free_again_and_what_was_shown_is_charged(aftermath):
    usages = [state["usage"] for state in aftermath.states]
    assert usages[1]["prompt_tokens"] > 0
    shown = aftermath.messages[aftermath.reply["message_id"]]["content"]
    # The process that judged has no tokenizer: it reckons with four bytes a token.
    assert usages[1]["output_tokens"] >= len(shown.encode()) // 4
    assert aftermath.quota["open_replies"]["used"] == 0
    costs = [each["prompt_tokens"] - 0.9 * each["cached_tokens"] + 3 * each["output_tokens"] for each in usages]
    assert aftermath.quota["budget"]["used"] == math.ceil(sum(costs))


def test_kill_9_leaves_nothing_in_progress_and_tells_every_open_reader_within_10_seconds(aftermath):
    assert aftermath.told_s < 10
    assert len(aftermath.seen) == 2 * READERS
    for one in aftermath.seen:
        assert (one.end.name, one.end.data["code"], one.end.data["retryable"]) == ("error", "worker_lost", True)
        assert one.text == aftermath.seen[0].text
    stored = aftermath.messages[aftermath.reply["message_id"]]
    assert (stored["status"], stored["error_code"]) == ("failed", "worker_lost")
    assert stored["content"] == aftermath.seen[0].text
    assert stored["content"].startswith(aftermath.before.text)


def test_after_a_kill_a_new_message_is_taken_and_answered_by_the_worker_that_comes_back(aftermath):
    stored = aftermath.messages_after[aftermath.following["message_id"]]
    assert aftermath.answer.end.name == "done"
    assert stored["content"] == aftermath.answer.text != ""
    asked = aftermath.messages_after[aftermath.following["user_message_id"]]
    assert asked["parent_id"] == aftermath.reply["message_id"]


def test_recovery_after_a_kill_merges_no_text_into_another_message(aftermath):
    """The same ids under the same parents, and every text but the broken reply's as it was."""
    before, after = aftermath.messages_before, aftermath.messages_after
    new = {aftermath.following["message_id"], aftermath.following["user_message_id"]}
    assert after.keys() == before.keys() | new
    assert aftermath.messages.keys() == before.keys()
    for message_id, message in before.items():
        assert after[message_id]["parent_id"] == message["parent_id"]
        assert after[message_id]["response_id"] == message["response_id"]
        if message_id != aftermath.reply["message_id"]:
            assert after[message_id] == message
    assert before[aftermath.first["message_id"]]["content"] != ""
    assert after[aftermath.reply["message_id"]]["content"] == aftermath.seen[0].text
