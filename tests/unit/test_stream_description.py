"""What the OpenAPI document says of the stream is what is sent: it is text, which nothing derives from the events."""

import json
import re

import msgspec

from chatsvc.api import openapi
from chatsvc.events import EVENT_TYPES


def test_the_example_has_all_members_of_its_events():
    events = re.findall(r"^event: (\w+)\ndata: (.*)$", openapi._STREAM_EXAMPLE, re.MULTILINE)
    assert [name for name, _ in events] == ["start", "context", "delta", "delta", "done"]
    for name, data in events:
        always = {
            field.name for field in msgspec.structs.fields(EVENT_TYPES[name]) if field.default is not msgspec.UNSET
        }
        assert set(json.loads(data)) == always, name


def test_the_table_has_all_members_of_its_events():
    rows = re.findall(r"^\| `(\w+)`[^|]* \| `\{(.*?)\}`", openapi._STREAM_DESCRIPTION, re.MULTILINE)
    assert len(rows) == 7
    for name, members in rows:
        assert members.split(", ") == list(EVENT_TYPES[name].__struct_fields__), name
