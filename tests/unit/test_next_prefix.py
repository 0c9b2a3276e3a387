"""What is read before the next turn is what the next turn's prompt begins with, token for token (L11)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from contracts.long_talk import Reminding, asking, said
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.conversation import BranchView, Role
from chatsvc.inference.chat_tokenizer import ChatTokenizer
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.run import RunStatus
from chatsvc.scheduler.next_prefix import ended, prefix
from chatsvc.scheduler.prompts import Prompts

tokenizers = pytest.importorskip("tokenizers", reason="comes with the extra 'transformers'")


class Joining(ScriptedEngine):
    """Has a template like those of real models, and a tokenizer that joins a line break with what follows it."""

    def __init__(self, follows="Ċ") -> None:
        super().__init__(ScriptedOptions(window=8192), model="m")
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate([*alphabet, f"Ċ{follows}"])}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("Ċ", follows)]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_special_tokens(["<|start|>", "<|end|>"])
        special = {text: backend.token_to_id(text) for text in ("<|start|>", "<|end|>")}
        tokenizer: Any = SimpleNamespace(
            name_or_path="test",
            chat_template="as below",
            backend_tokenizer=backend,
            get_added_vocab=lambda: special,
            apply_chat_template=self.templated,
        )
        self._chat = ChatTokenizer(tokenizer)

    @staticmethod
    def templated(turns, *, tokenize, add_generation_prompt):
        text = "".join(f"<|start|>{turn['role']}\n{turn['content']}<|end|>\n" for turn in turns)
        return text + "<|start|>assistant\n" * add_generation_prompt

    async def render(self, messages):
        return await self._chat.render(messages)

    async def encode(self, text):
        return await self._chat.encode(text)


BRANCH = (said(Role.USER, "What is a heron?", 2), said(Role.ASSISTANT, "\n\nA bird 🙂.\n", 3))
PIECES = ("\n", "\n\n", " ", "1", "a", "?", "🙂", "<|end|>", "日")
QUESTIONS = st.lists(st.sampled_from(PIECES), min_size=1).map("".join)


@given(QUESTIONS, st.booleans(), st.sampled_from(["Ċ", "Ġ"]))
@settings(deadline=None, max_examples=60)
def test_the_next_prompt_begins_with_it_whatever_is_asked_and_recalled(question, recalls, joined):
    async def prompts_of():
        engine = Joining(joined)
        await engine.start(lambda _: None)
        plain = Prompts({"m": engine})
        wanted = asking(BRANCH, question)
        read = await prefix(plain, engine, msgspec.structs.replace(wanted, question=None))
        coming = Prompts({"m": engine}, recall=Reminding()) if recalls else plain
        prepared = await coming.prepare(wanted)
        assert bool(prepared.report.recalled) == recalls
        assert prepared.prompt.token_ids[: read.tokens] == read.token_ids
        # All before the question: what follows the answer there is nothing but the template's.
        assert read.tokens > (await engine.render(prepared.prompt.messages[:-1])).tokens

    asyncio.run(prompts_of())


async def test_nothing_is_recalled_for_it():
    engine = Joining()
    recall = Reminding()
    await prefix(Prompts({"m": engine}, recall=recall), engine, asking(BRANCH, "x"))
    assert recall.times == 0


def test_a_branch_is_of_use_up_to_its_last_ended_reply():
    asked, answered = said(Role.USER, "1", 1), msgspec.structs.replace(said(Role.ASSISTANT, "2", 2), response_id="r")
    running = msgspec.structs.replace(answered, id="msg_4", status=RunStatus.STREAMING)
    asked_again = said(Role.USER, "3", 3)
    view = BranchView(summary=None, pinned=(), verbatim=(asked, answered, asked_again, running))
    assert ended(view.verbatim) == (asked, answered)
    assert ended((asked, answered)) == (asked, answered)
    assert ended((asked_again, running)) == ()
