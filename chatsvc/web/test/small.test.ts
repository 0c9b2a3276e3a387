// The small pure parts, a few lines each.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, Client } from "../src/api/client.ts";
import { clientMessageId } from "../src/api/ids.ts";
import { patienceFor, patiently } from "../src/api/patience.ts";
import { isContinuable, type Message } from "../src/api/types.ts";
import { DayLabels } from "../src/list/days.ts";
import { Chats } from "../src/state/chats.ts";
import { Drafts } from "../src/state/drafts.ts";
import { explain } from "../src/state/notices.ts";
import { conversationIn } from "../src/state/router.ts";
import { backoff } from "../src/stream/backoff.ts";

test("ids are UUIDs also where crypto.randomUUID is missing", () => {
  const plain = { getRandomValues: crypto.getRandomValues.bind(crypto) };
  const ids = new Set(Array.from({ length: 100 }, () => clientMessageId(plain)));
  assert.equal(ids.size, 100);
  for (const id of ids) assert.match(id, /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
});

test("waits double, are bounded, and are drawn from the upper half", () => {
  assert.equal(backoff(0, () => 0), 500);
  assert.equal(backoff(0, () => 1), 1_000);
  assert.equal(backoff(3, () => 1), 8_000);
  assert.equal(backoff(2_000, () => 1), 20_000);
});

const unreachable = new ApiError(0, "unreachable", "", true);
const away = (retryAfter: number | null): ApiError => new ApiError(503, "store_unavailable", "", true, retryAfter);

test("short trouble is waited for, refusals and long trouble are not", () => {
  assert.ok((patienceFor(unreachable, 0) ?? 0) > 0);
  assert.ok((patienceFor(away(2), 0) ?? 0) >= 2_000);
  assert.equal(patienceFor(away(60), 0), null);
  assert.equal(patienceFor(new ApiError(429, "too_many_replies", "", true, 1), 0), null);
  assert.equal(patienceFor(new ApiError(409, "conversation_busy", "", true), 0), null);
  assert.equal(patienceFor(unreachable, 3), null);
});

test("a call that keeps failing is tried four times, and the last error is told", async () => {
  let calls = 0;
  const call = (): Promise<void> => {
    calls += 1;
    return Promise.reject(unreachable);
  };
  await assert.rejects(patiently(call, () => Promise.resolve()), unreachable);
  assert.equal(calls, 4);
});

test("addresses are relative to the base, whatever path the page is under", () => {
  const client = new Client("https://host/chat/");
  assert.equal(client.streamAddress("resp_x"), "https://host/chat/v1/responses/resp_x/stream");
  assert.equal(client.address("/chat/v1/x?token=1"), "https://host/chat/v1/x?token=1");
});

const answer = (status: number, body: string): typeof fetch => () => Promise.resolve(new Response(body, { status }));

test("a reply is continued by its own id, answered again by its question's", async () => {
  const calls: [string, unknown][] = [];
  const client = new Client("http://h/", (input, init) => {
    calls.push([String(input), JSON.parse(String(init?.body))]);
    return Promise.resolve(new Response("{}"));
  });
  await client.continueReply("msg_a", "one");
  await client.answerAgain("msg_q", "two");
  assert.deepEqual(calls, [
    ["http://h/v1/messages/msg_a/responses", { client_msg_id: "one", continue: true }],
    ["http://h/v1/messages/msg_q/responses", { client_msg_id: "two" }],
  ]);
});

test("what broke off with some text can be continued, and nothing else", () => {
  const reply: Message = {
    id: "msg_a",
    parent_id: "msg_q",
    role: "assistant",
    content: "Once",
    status: "complete",
    model: null,
    response_id: null,
    finish_reason: "stop",
    tokens: 1,
    degraded: [],
    created_at: "2026-01-01T00:00:00Z",
  };
  const broken: Partial<Message>[] = [{ status: "stopped" }, { status: "failed", finish_reason: null }, { finish_reason: "length" }];
  for (const change of broken) {
    assert.equal(isContinuable({ ...reply, ...change }), true);
    assert.equal(isContinuable({ ...reply, ...change, content: "" }), false);
  }
  const whole: Partial<Message>[] = [
    {},
    { finish_reason: "tool_calls" },
    { status: "queued", finish_reason: null },
    { status: "streaming", finish_reason: null },
    { role: "user", status: "stopped" },
  ];
  for (const change of whole) assert.equal(isContinuable({ ...reply, ...change }), false);
});

test("a problem document becomes an error with all it says", async () => {
  const problem = { title: "t", status: 429, detail: "d", code: "too_many_replies", retryable: true, retry_after: 3, open: ["a"] };
  const client = new Client("http://h/", answer(429, JSON.stringify(problem)));
  await assert.rejects(client.me(), (error: ApiError) => error.code === "too_many_replies" && error.retryAfter === 3);
});

test("a proxy's own page and a lost connection are errors too", async () => {
  await assert.rejects(new Client("http://h/", answer(502, "<html>")).me(), (error: ApiError) => error.status === 502);
  await assert.rejects(new Client("http://h/", answer(200, "<html>")).me(), (error: ApiError) => error.code === "not_json");
  const lost: typeof fetch = () => Promise.reject(new TypeError("Failed to fetch"));
  await assert.rejects(new Client("http://h/", lost).me(), (error: ApiError) => error.code === "unreachable");
});

test("the route is read under any base path", () => {
  assert.equal(conversationIn("/c/conv_1", "/"), "conv_1");
  assert.equal(conversationIn("/deep/chat/c/conv_1", "/deep/chat/"), "conv_1");
  assert.equal(conversationIn("/deep/chat/", "/deep/chat/"), null);
  assert.equal(conversationIn("/elsewhere/c/conv_1", "/deep/chat/"), null);
  assert.equal(conversationIn("/c/conv_1/more", "/"), null);
});

test("days are those of the reader's own zone", () => {
  const labels = new DayLabels(new Date(2026, 10, 18, 9, 0), "en");
  const of = (...time: [number, number, number, number?, number?]): string => labels.of(new Date(...time).toISOString());
  assert.equal(of(2026, 10, 18, 0, 5), "Today");
  assert.equal(of(2026, 10, 17, 23, 55), "Yesterday");
  assert.equal(of(2026, 10, 14, 12, 0), "Saturday");
  assert.equal(of(2026, 9, 1), "October");
  assert.equal(of(2025, 9, 1), "October 2025");
});

test("refusals are told in words that say what to do", () => {
  const many = new ApiError(429, "too_many_replies", "", true, null, { open: ["a", "b", "c"] });
  assert.match(explain(many), /^3 replies of yours are still running/);
  assert.match(explain(away(4)), /in 4 s/);
  assert.equal(explain(new ApiError(422, "message_too_long", "It has 9,000 tokens.", false)), "It has 9,000 tokens.");
});

test("a conversation in which nothing was said yet is not listed until something is", async () => {
  const row = { title: null, pinned: false, head_message_id: null, created_at: "2026-01-01T00:00:00Z", updated_at: "2026-01-01T00:00:00Z" };
  const rows = [{ ...row, id: "empty" }, { ...row, id: "named", title: "Plans" }, { ...row, id: "begun", head_message_id: "msg_a" }];
  const chats = new Chats(new Client("http://h/", answer(200, JSON.stringify({ data: rows, next_cursor: null }))));
  await chats.loadMore();
  assert.deepEqual(chats.rows.value.map(({ id }) => id), ["named", "begun"]);
  chats.put({ ...row, id: "empty", head_message_id: "msg_b" }, chats.mark());
  assert.equal(chats.rows.value.length, 3);
});

test("drafts live on without storage, and apart for each conversation", () => {
  const drafts = new Drafts(null);
  drafts.set(null, "new");
  drafts.set("conv_1", "old");
  assert.equal(drafts.get(null), "new");
  assert.equal(drafts.get("conv_1"), "old");
  assert.equal(drafts.get("conv_2"), "");
});
