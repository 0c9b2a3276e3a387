"""The calls that most tests make, as a user's client would make them."""

import uuid


class Api:
    """The calls that most tests make, as a user's client would."""

    def __init__(self, client, base_url, headers=None):
        self.client = client
        self.base = base_url
        # A user of its own for every test, so that none uses up another's places.
        self.headers = headers or {"x-forwarded-user": f"user-{uuid.uuid4().hex}"}

    async def call(self, method, path, **kwargs):
        return await self.client.request(method, self.base + path, headers=self.headers, **kwargs)

    async def conversation(self, **body):
        answer = await self.call("POST", "/v1/conversations", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    async def send(self, conversation_id, content="Tell me a story.", **body):
        body = {"content": content, "client_msg_id": uuid.uuid4().hex, **body}
        return await self.call("POST", f"/v1/conversations/{conversation_id}/messages", json=body)

    async def start(self, content="Tell me a story.", conversation_id=None, **body):
        """A new reply: its POST's answer, with ``conversation_id`` beside it."""
        conversation_id = conversation_id or await self.conversation()
        answer = await self.send(conversation_id, content, **body)
        assert answer.status_code == 202, answer.text
        return {**answer.json(), "conversation_id": conversation_id}

    async def messages(self, conversation_id):
        answer = await self.call("GET", f"/v1/conversations/{conversation_id}")
        assert answer.status_code == 200, answer.text
        return {message["id"]: message for message in answer.json()["messages"]}

    async def message_of(self, reply):
        """The assistant message of a reply, as stored."""
        return (await self.messages(reply["conversation_id"]))[reply["message_id"]]

    async def state(self, reply):
        return (await self.call("GET", f"/v1/responses/{reply['response_id']}")).json()

    def stream_url(self, reply):
        return self.base + reply["stream_url"]
