"""The browser's own EventSource, without the page's code around it: idle, cut, and at the end."""

import pytest
from cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

HEARTBEAT_S = 0.4
# What a page would do that knows the rules, and no more. Resolves with all that happened once the stream has ended.
FOLLOW = """
(url) => new Promise((resolve) => {
  const seen = { ids: [], names: [], text: "", errors: 0, opened: 0 };
  const source = new EventSource(url);
  source.onopen = () => { seen.opened += 1; };
  source.onerror = () => { seen.errors += 1; if (source.readyState === 2) resolve(seen); };
  source.onmessage = () => { seen.names.push("message"); };
  for (const name of ["start", "context", "delta", "snapshot", "done", "error"]) {
    source.addEventListener(name, (event) => {
      if (event.data === undefined) return;
      seen.names.push(name);
      seen.ids.push(Number(event.lastEventId));
      if (name === "delta") seen.text += JSON.parse(event.data).text;
      if (name === "snapshot") seen.text = JSON.parse(event.data).text;
    });
  }
})
"""


@pytest.fixture(scope="session")
def idle_server(start_server):
    """The first token comes two and a half heartbeats after ``start``, the second as long after that."""
    silence_s = 2.5 * HEARTBEAT_S
    url = f"scripted:?first_token_ms={1000 * silence_s}&tokens_per_s={1 / silence_s}&tokens=3"
    return start_server(url, CHATSVC_STREAM_HEARTBEAT_S=str(HEARTBEAT_S))


async def started(tab):
    """A reply, and where its stream is."""
    conversation = await tab.api("POST", "v1/conversations", {})
    body = {"content": "Slowly, please.", "client_msg_id": conversation["id"]}
    reply = await tab.api("POST", f"v1/conversations/{conversation['id']}/messages", body)
    return conversation["id"], reply


async def stored_text(tab, conversation_id, reply):
    stored = await tab.api("GET", f"v1/conversations/{conversation_id}")
    return next(message["content"] for message in stored["messages"] if message["id"] == reply["message_id"])


async def test_idle_for_two_heartbeats_an_event_source_sees_nothing_and_stops_at_the_end(visit, idle_server):
    tab = await visit(base_url=idle_server.base_url)
    conversation_id, reply = await started(tab)
    seen = await tab.page.evaluate(FOLLOW, reply["stream_url"])
    assert seen["text"] == await stored_text(tab, conversation_id, reply) != ""
    assert (seen["names"][:2], seen["names"][-1]) == (["start", "context"], "done")
    assert "message" not in seen["names"]  # a heartbeat that ended an event would be one
    assert seen["ids"] == list(range(1, len(seen["ids"]) + 1))
    # One connection for all of it. Then it comes back once, by its own rules, and the 204 stops it.
    assert (seen["opened"], seen["errors"]) == (1, 2)


async def test_an_event_source_that_is_cut_again_and_again_shows_what_is_stored(visit, slow_server):
    proxy = CuttingProxy(slow_server.port)
    async with proxy.running():
        tab = await visit(base_url=f"http://127.0.0.1:{proxy.port}")
        conversation_id, reply = await started(tab)
        proxy.cut_after = 900
        await tab.page.evaluate(f"(url) => {{ window.seen = ({FOLLOW})(url); }}", reply["stream_url"])
        await proxy.have_cut(5)
        proxy.cut_after = None
        await tab.api("POST", f"v1/responses/{reply['response_id']}/stop")
        seen = await tab.page.evaluate("() => window.seen")
        stored = await stored_text(tab, conversation_id, reply)
    assert seen["text"] == stored != ""
    assert seen["ids"] == list(range(1, len(seen["ids"]) + 1))
    assert seen["errors"] > 5
