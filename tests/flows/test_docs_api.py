"""docs/api.md: its examples, pasted one after another into one shell, do what the page says."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from chatsvc.errors import Abandoned, ChatError, ConfigError, EngineFailed, EngineRefused

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MARK = "---- next ----"


async def in_a_shell(script):
    """What a shell says to a script, on both outputs."""
    shell = await asyncio.create_subprocess_exec(
        "bash",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await shell.communicate(script.encode())
    return said.decode()


def events(said):
    """The names and the joined text of a stream."""
    names = re.findall(r"^event: (\w+)$", said, re.MULTILINE)
    texts = re.findall(r"^event: delta\ndata: (.*)$", said, re.MULTILINE)
    return names, "".join(json.loads(text)["text"] for text in texts)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "python3"))), reason="needs bash, curl and python3")
async def test_the_examples_do_what_the_page_says(start_server):
    server = start_server("scripted:?tokens_per_s=20&tokens=100", CHATSVC_AUTH="none")
    script = f"\necho; echo '{MARK}'\n".join(EXAMPLES).replace("http://127.0.0.1:8080", server.base_url)
    print(said := await in_a_shell(script))
    _, send, stream, resume, edit, stop, go_on, again, reads, memory, delete, refused = said.split(MARK)
    accepted = json.loads(send)
    assert accepted["status"] in {"queued", "streaming"}
    names, _ = events(stream)
    assert "start" in names
    assert "delta" in names
    assert "done" not in names
    ids = [int(number) for number in re.findall(r"^id: (\d+)$", resume, re.MULTILINE)]
    assert ids == list(range(5, len(ids) + 5))
    assert events(resume)[0][-1] == "done"
    assert edit.strip() == ""
    assert json.loads(stop)["status"] in {"streaming", "stopped"}
    assert events(go_on)[0][-1] == "done"
    assert events(again)[0][-1] == "done"
    answered = [json.loads(line) for line in split_answers(reads)]
    listed, tree, branch, changed, state, context, summaries, pinned, models, me = answered
    assert listed["data"][0]["title"] == "Capitals"
    replies = [message for message in tree["messages"] if message["role"] == "assistant"]
    assert [reply["status"] for reply in replies] == ["complete", "stopped", "complete", "complete"]
    assert replies[1]["content"]
    assert replies[2]["content"].startswith(replies[1]["content"])
    assert len(branch["data"]) == 2
    assert changed["pinned"] is True
    assert state["status"] == "complete"
    assert context["parts"]["question"] == context["prompt_tokens"] > 0
    assert summaries == {"data": []}
    assert pinned["pinned"] is True
    assert [model["id"] for model in models["data"]] == ["scripted"]
    assert me["user"] == {"id": "local"}
    me, memories, reworded = [json.loads(line) for line in split_answers(memory)]
    assert me["memory"] is True
    assert [kept["text"] for kept in memories["data"]] == ["I live in Lisbon."]
    assert (reworded["id"], reworded["text"]) == (memories["data"][0]["id"], "I live in Porto.")
    assert delete.strip() == "204"
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[-1])
    assert json.loads(refused) == shown


def split_answers(said):
    """JSON documents written one behind the other."""
    decoder, at, rest = json.JSONDecoder(), 0, said.strip()
    while at < len(rest):
        _, end = decoder.raw_decode(rest, at)
        yield rest[at:end]
        at = end + len(rest[end:]) - len(rest[end:].lstrip())


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "python3"))), reason="needs bash, curl and python3")
async def test_the_first_steps_of_the_readme_end_with_a_reply(start_server):
    server = start_server("scripted:?tokens_per_s=100&tokens=20", CHATSVC_AUTH="none")
    steps = README.partition("## First steps with the API")[2]
    script = re.findall(r"^```sh\n(.*?)^```", steps, re.MULTILINE | re.DOTALL)[0]
    said = await in_a_shell(script.replace("http://127.0.0.1:8080", server.base_url))
    assert events(said)[0][-1:] == ["done"], said


def test_the_page_lists_every_code_that_a_request_may_be_refused_with():
    def below(kind):
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    of_streams = {EngineFailed, *below(EngineFailed), EngineRefused, Abandoned, ConfigError}
    codes = {kind.code for kind in below(ChatError) if kind not in of_streams and kind.__module__ == "chatsvc.errors"}
    rows = PAGE.partition("| status | codes |")[2].partition("\n\n")[0]
    assert codes - set(re.findall(r"`(\w+)`", rows)) == {"rate_limited", "unavailable"}, "the bases of others"
