"""What was said at the beginning is in the prompt three hundred turns later, though no summary kept it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from chatsvc.clock import SystemClock
from chatsvc.config import ContextConfig
from chatsvc.inference.embedder import create_embedder
from chatsvc.inference.factory import create_engine
from chatsvc.limits import Principal, TierName
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.recall import Recall
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import NewConversation, RecallBranch

pytestmark = pytest.mark.usefixtures("recall_has_time")

ALICE = Principal("alice", TierName.PLUS)
# What is said, what is asked, and the word that has to be there. Five of each kind, so that many are nearly right.
KINDS = [
    (
        "The wifi password at the {0} is {1}.",
        "Remind me what the wifi password was at the {0}?",
        [("office", "quartz77"), ("cabin", "maple31"), ("flat", "tundra8"), ("shop", "velvet5"), ("boat", "anchor19")],
    ),
    (
        "My {0} lives in {1} and teaches there.",
        "In which town does my {0} live?",
        [
            ("sister", "Norrköping"),
            ("cousin", "Ljubljana"),
            ("uncle", "Valparaíso"),
            ("godmother", "Tromsø"),
            ("nephew", "Kyoto"),
        ],
    ),
    (
        "I am allergic to {1}, it gives me {0}.",
        "Which food gives me {0}?",
        [
            ("hives", "walnuts"),
            ("headaches", "sulphites"),
            ("a swollen lip", "kiwi"),
            ("cramps", "lactose"),
            ("a runny nose", "paprika"),
        ],
    ),
    (
        "We named the {0} {1} after a long argument.",
        "What did we call the {0} in the end?",
        [
            ("parrot", "Bismuth"),
            ("rowing boat", "Persephone"),
            ("robot lawnmower", "Gregor"),
            ("band", "Paper Owls"),
            ("new server", "hildegard"),
        ],
    ),
    (
        "For the {0} I paid {1} euros in cash.",
        "How much did the {0} cost me?",
        [("bicycle", "640"), ("piano", "2150"), ("oven", "389"), ("carpet", "175"), ("telescope", "912")],
    ),
    (
        "The {0} is due on {1}, please keep that in mind.",
        "When do I have to hand in the {0}?",
        [
            ("tax return", "2 June"),
            ("grant proposal", "14 March"),
            ("library book", "29 August"),
            ("visa form", "7 October"),
            ("thesis draft", "18 January"),
        ],
    ),
    (
        "{1} is the one who repairs the {0} for us.",
        "Who fixes our {0}?",
        [
            ("heating", "Mrs. Oyelaran"),
            ("roof", "Tadeusz"),
            ("printer", "Anneliese"),
            ("elevator", "Mr. Baptiste"),
            ("dishwasher", "Kalinda"),
        ],
    ),
    (
        "I decided to learn {1} because of {0}.",
        "Which thing did I want to learn because of {0}?",
        [
            ("my trip to Lisbon", "Portuguese"),
            ("the choir", "sight-reading"),
            ("my knees", "swimming"),
            ("the garden", "grafting"),
            ("our archive", "palaeography"),
        ],
    ),
    (
        "The code for the {0} door is {1}.",
        "What do I type to open the {0} door?",
        [("cellar", "4471"), ("garage", "9028"), ("archive", "3316"), ("roof terrace", "7750"), ("studio", "1185")],
    ),
    (
        "On {0} evenings I go to {1}.",
        "Where do I spend my {0} evenings?",
        [
            ("Monday", "the pottery class"),
            ("Tuesday", "fencing practice"),
            ("Wednesday", "the observatory"),
            ("Thursday", "Aunt Rosalind's"),
            ("Friday", "the jazz cellar"),
        ],
    ),
]
FACTS = [(said.format(*names), asked.format(names[0]), names[1]) for said, asked, every in KINDS for names in every]
SUBJECTS = ["weather", "office", "kitchen", "train", "garden", "film", "football match", "printer", "neighbours"]
VERBS = ["looked at", "thought about", "talked about", "was surprised by", "wrote down something on", "read about"]
ENDS = ["this morning", "in the evening", "with a friend", "for an hour", "once more", "and it cost me time"]
TURNS = 340
FOLDED = 320


def talk():
    """Facts in turns 3 to 52, then everyday talk that shares words with them."""
    chance = random.Random(5)

    def sentence():
        return f"I {chance.choice(VERBS)} the {chance.choice(SUBJECTS)} {chance.choice(ENDS)}."

    for turn in range(TURNS):
        fact = FACTS[turn - 2][0] + " " if 2 <= turn < 2 + len(FACTS) else ""
        yield f"{fact}{sentence()} {sentence()} What do you think?"
        yield f"That sounds interesting. {sentence().replace('I ', 'People often say that someone ')} Tell me more."


async def write(store, postgres_url):
    """The conversation, and a summary through turn ``FOLDED`` that says nothing."""
    conversation = await store.conversations.create(ALICE, NewConversation(id="conv_needles"))
    start = datetime(2026, 1, 5, tzinfo=UTC)
    ids = [f"msg_{number:05}" for number in range(2 * TURNS)]
    rows = [
        (
            id_,
            "alice",
            conversation.id,
            ids[n - 1] if n else None,
            "assistant" if n % 2 else "user",
            text,
            start + n * _HOUR,
        )
        for n, (id_, text) in enumerate(zip(ids, talk(), strict=True))
    ]
    through = ids[2 * FOLDED - 1]
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.cursor().executemany(
            "INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, created_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, 'complete', %s)",
            rows,
        )
        await connection.execute(
            "INSERT INTO summaries (id, user_id, conversation_id, through_message_id, version, text, tokens)"
            " VALUES ('sum_1', 'alice', %s, %s, 1, 'They talked.', 4)",
            (conversation.id, through),
        )
    return conversation, RecallBranch(user_id="alice", conversation_id=conversation.id, through=through), ids[-1]


_HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    "setting", ["none", pytest.param("minilm", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_of_fifty_facts_nine_in_ten_are_in_the_prompt_three_hundred_turns_later(
    store, postgres_url, tmp_path, setting
):
    conversation, branch, leaf = await write(store, postgres_url)
    engine = create_engine("scripted:?window=8192", name="small", data_dir=tmp_path)
    await engine.start(lambda line: None)
    embedder = create_embedder(setting)
    recall = Recall(index=store.recall, engines={"small": engine}, embedder=embedder, clock=SystemClock(), most=32)
    recall.indexer.soon(branch)
    while await recall.indexer.step():
        pass
    prompts = Prompts({"small": engine}, ContextConfig(), recall)
    _, view = await store.conversations.view("alice", conversation.id, leaf)
    missing = []
    for _, question, answer in FACTS:
        wanted = Wanted(model="small", conversation=conversation, view=view, leaf_id=leaf, question=question)
        prepared = await prompts.prepare(wanted)
        assert prepared.report.condensed
        text = "\n".join(message.content for message in prepared.prompt.messages)
        if answer not in text.replace(question, ""):
            missing.append(question)
    if embedder is not None:
        await embedder.aclose()
    await recall.aclose()
    await engine.aclose()
    print(f"{len(FACTS) - len(missing)} of {len(FACTS)} found; missing: {missing}")
    assert len(missing) <= len(FACTS) // 10
