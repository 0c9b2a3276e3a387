"""When there is too little: free gives up first, all of it is told, and nothing that streams is ever cut."""

import asyncio
import uuid
from datetime import datetime

import pytest
from api_client import Api
from reader import read_to_the_end

FREE, PLUS, PRO = "free", "plus", "pro"


def models(tmp_path, *, large, small):
    """Where the file of two models is."""
    path = tmp_path / "models.toml"
    first = f'[models.large]\nengine = "{large}"\ndefault = true\ndegrade_to = "small"\n'
    path.write_text(f'{first}[models.small]\nengine = "{small}"\n', encoding="utf-8")
    return str(path)


def user(client, server, name, tier):
    return Api(client, server.base_url, {"x-forwarded-user": name, "x-forwarded-tier": tier})


async def metric(client, server, name):
    """A metric's value, 0 where it is not there (yet)."""
    text = (await client.get(f"{server.base_url}/metrics")).text
    return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


async def until_step(client, server, step, within_s=60):
    """Wait until the service stands on this step or a higher one; for 0, on none."""
    async with asyncio.timeout(within_s):
        while True:
            now = await metric(client, server, 'chatsvc_degradation_step{model="large"}')
            if now >= step > 0 or now == step:
                return
            await asyncio.sleep(0.05)


async def test_what_is_given_up_is_told_and_what_comes_too_late_is_refused(start_server, client, tmp_path):
    server = start_server(
        "",
        CHATSVC_CONFIG=models(
            tmp_path, large="scripted:?tokens_per_s=10&tokens=2000&slots=1", small="scripted:?slots=1"
        ),
        CHATSVC_DEGRADATION_INTERVAL_S="0.1",
        CHATSVC_DEGRADATION_RECOVER_S="0.1",
        CHATSVC_DEGRADATION_MAX_TOKENS="7",
        CHATSVC_TIERS_FREE_QUEUE_TARGET_S="0.1",
        CHATSVC_TIERS_FREE_DEADLINE_S="2",
        CHATSVC_TIERS_PLUS_QUEUE_TARGET_S="0.1",
    )
    pro, free, late = (user(client, server, name, tier) for name, tier in (("pat", PRO), ("fay", FREE), ("lou", FREE)))
    streaming = await pro.start("Go on and on.")
    waiting = await free.start()
    # Waits on when the other one is refused, so that there is too little for as long as it is looked at.
    plus = user(client, server, "pia", PLUS)
    staying = await plus.start()
    assert (waiting["served_model"], waiting["degraded"]) == ("large", [])
    await until_step(client, server, 4)

    conversation = await late.conversation()
    body = {"content": "And mine?", "client_msg_id": uuid.uuid4().hex}
    answer = (await late.call("POST", f"/v1/conversations/{conversation}/messages", json=body)).json()
    assert (answer["served_model"], answer["degraded"]) == ("small", ["model", "max_tokens"])
    seen = await read_to_the_end(client, late.stream_url(answer))
    [start] = seen.of("start")
    assert (start.data["model"], start.data["served_model"]) == ("large", "small")
    assert start.data["degraded"] == ["model", "max_tokens"]
    assert seen.end.data["usage"]["output_tokens"] == 7
    state = await late.state(answer)
    assert (state["model"], state["served_model"], state["degraded"]) == ("large", "small", ["model", "max_tokens"])
    stored = (await late.messages(conversation))[answer["message_id"]]
    assert (stored["model"], stored["degraded"]) == ("small", ["model", "max_tokens"])

    # To have it answered once more is on the same terms; what a paying user asks for is left alone.
    again = {"client_msg_id": uuid.uuid4().hex, "model": "large"}
    other = (await late.call("POST", f"/v1/messages/{answer['user_message_id']}/responses", json=again)).json()
    assert (other["served_model"], other["degraded"]) == ("small", ["model", "max_tokens"])
    # Each of the answers says so for good, wherever it is read; the question and what was taken in before do not.
    given_up = {each["id"]: each["degraded"] for each in (await late.messages(conversation)).values()}
    question = answer["user_message_id"]
    assert given_up == dict.fromkeys((answer["message_id"], other["message_id"]), other["degraded"]) | {question: []}
    page = (await late.call("GET", f"/v1/conversations/{conversation}/messages")).json()["data"]
    assert [(each["id"], each["degraded"]) for each in page] == [
        (other["message_id"], other["degraded"]),
        (question, []),
    ]
    pinned = (await late.call("PATCH", f"/v1/messages/{answer['message_id']}", json={"pinned": True})).json()
    assert (pinned["pinned"], pinned["degraded"]) == (True, answer["degraded"])
    assert (await free.message_of(waiting))["degraded"] == []
    ours = await pro.start()
    assert (ours["served_model"], ours["degraded"]) == ("large", [])
    [large, _] = (await late.call("GET", "/v1/models")).json()["data"]
    assert large["degraded"] == ["model", "max_tokens", "history"]

    await until_step(client, server, 6)
    # Who waits is told as soon as it is too late.
    seen = await read_to_the_end(client, free.stream_url(waiting))
    assert (seen.end.name, seen.end.data["code"], seen.end.data["retryable"]) == ("error", "too_late", True)
    assert seen.end.data["message"] == (await free.state(waiting))["error"]["message"]
    assert (await free.call("GET", "/v1/me")).json()["quota"]["open_replies"]["used"] == 0
    assert await metric(client, server, 'chatsvc_degraded_total{model="large",tier="free",what="max_tokens"}') == 2

    for api, reply in ((pro, ours), (plus, staying)):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
    assert (await pro.state(streaming))["status"] == "streaming"
    await until_step(client, server, 0)
    # The same request gives the same answer, whatever holds by now.
    repeated = (await late.call("POST", f"/v1/conversations/{conversation}/messages", json=body)).json()
    assert (repeated["response_id"], repeated["degraded"]) == (answer["response_id"], answer["degraded"])
    assert (await pro.state(streaming))["status"] == "streaming"
    await pro.call("POST", f"/v1/responses/{streaming['response_id']}/stop")


async def chat(api, ended, until, pause_s=0.0):
    """One message after the other, until ``until`` is set. Every reply, with what was seen of it, goes to ``ended``."""
    while not until.is_set():
        reply = await api.start("Say something.", max_tokens=25)
        seen = await read_to_the_end(api.client, api.stream_url(reply))
        ended.append((await api.state(reply), seen))
        await asyncio.sleep(pause_s)


def long_wait_s(ended):
    """The longest but one: a machine that stands still for a moment makes one wait, where one comes after another."""

    def waited_s(state):
        created, started = (datetime.fromisoformat(state[name]) for name in ("created_at", "started_at"))
        return (started - created).total_seconds()

    return sorted(waited_s(state) for state, _ in ended)[-2]


@pytest.mark.slow
@pytest.mark.alone
async def test_with_half_the_capacity_free_gives_up_first_and_all_comes_back_without_swinging(
    start_server, client, tmp_path
):
    """Half the places of the engine are taken for a while, by replies that stream all through it."""
    server = start_server(
        "",
        CHATSVC_CONFIG=models(
            tmp_path,
            large="scripted:?tokens_per_s=50&tokens=30000&slots=4&text=on+and+on+&window=100000",
            small="scripted:?tokens_per_s=50&tokens=30000&slots=8",
        ),
        CHATSVC_DEGRADATION_INTERVAL_S="0.5",
        CHATSVC_DEGRADATION_RECOVER_S="2",
        CHATSVC_TIERS_FREE_QUEUE_TARGET_S="0.3",
    )
    one_reply_s = 0.5
    halved, restored, steps = asyncio.Event(), asyncio.Event(), []
    before, during = {FREE: [], PRO: []}, {FREE: [], PRO: []}

    async def load(ended, until):
        async with asyncio.TaskGroup() as tasks:
            # As many as there are places: with all of them nobody waits, however slow the machine is.
            for number in range(3):
                tasks.create_task(chat(user(client, server, f"free-{number}", FREE), ended[FREE], until))
            tasks.create_task(chat(user(client, server, "pro", PRO), ended[PRO], until, pause_s=0.1))

    async def watch():
        while True:
            steps.append(await metric(client, server, 'chatsvc_degradation_step{model="large"}'))
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        normal = tasks.create_task(load(before, halved))
        await asyncio.sleep(5)  # an ordinary time, to compare with
        halved.set()
        await normal
        assert set(steps) == {0}
        blocker = user(client, server, "blocker", PRO)
        blocking = [await blocker.start("Go on and on.", max_tokens=30_000) for _ in range(2)]
        tight = tasks.create_task(load(during, restored))
        await until_step(client, server, 2)
        await asyncio.sleep(4)  # a tight time, and nothing swings in it
        assert [(await blocker.state(reply))["status"] for reply in blocking] == ["streaming"] * 2
        for reply in blocking:
            await blocker.call("POST", f"/v1/responses/{reply['response_id']}/stop")
        restored_at = len(steps)
        await until_step(client, server, 0)
        restored.set()
        await tight
        await asyncio.sleep(2)  # nor after it
        watching.cancel()

    states = [state for ended in (before, during) for replies in ended.values() for state, _ in replies]
    assert {state["status"] for state in states} == {"complete"}
    assert {state["served_model"] for state, _ in during[FREE]} == {"large", "small"}
    assert {(state["served_model"], *state["degraded"]) for state, _ in during[PRO]} == {("large",)}
    # A place of four is free after a part of one reply's time, as a rule; one of two after one reply at most. What is
    # measured here goes through a busy machine; the figures are the simulator's.
    noise_s = 0.5
    assert long_wait_s(during[PRO]) < 2 * max(long_wait_s(before[PRO]), one_reply_s) + noise_s
    falling = steps[restored_at:]
    assert falling == sorted(falling, reverse=True), steps
    assert max(steps) <= 4


async def test_a_process_without_engines_judges_by_what_it_hears_of_the_queues(start_server, client, tmp_path):
    shared = {
        "CHATSVC_CONFIG": models(
            tmp_path, large="scripted:?tokens_per_s=10&tokens=2000&slots=1", small="scripted:?slots=1"
        ),
        "CHATSVC_DEGRADATION_INTERVAL_S": "0.1",
        "CHATSVC_TIERS_FREE_QUEUE_TARGET_S": "0.1",
    }
    worker = start_server("", **shared)
    door = start_server("", beside=worker, CHATSVC_ROLES="api", **shared)
    pro, free = user(client, door, "pat", PRO), user(client, door, "fay", FREE)
    streaming = await pro.start("Go on and on.")
    waiting = await free.start()
    assert waiting["degraded"] == []
    await until_step(client, door, 3)
    late = await free.start()
    assert (late["served_model"], late["degraded"]) == ("small", ["model", "max_tokens"])
    seen = await read_to_the_end(client, free.stream_url(late))
    assert seen.end.name == "done"
    for api, reply in ((free, waiting), (pro, streaming)):
        await api.call("POST", f"/v1/responses/{reply['response_id']}/stop")
