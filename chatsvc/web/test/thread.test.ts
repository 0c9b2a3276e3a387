import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, type Client, type NewMessage } from "../src/api/client.ts";
import type { Accepted, Conversation } from "../src/api/types.ts";
import { Thread } from "../src/state/thread.ts";
import { progressText, remarkOn } from "../src/view/Status.tsx";
import { accepted, row, setUp, shown, stored } from "./thread_world.ts";

test("the first message makes the conversation, then its reply is read to the end", async () => {
  const { thread, sources, changes } = setUp(null, {
    createConversation: () => Promise.resolve({ ...row(), messages: [] }),
    send: () => Promise.resolve(accepted(1)),
  });
  await thread.send("hello");
  assert.equal(thread.id.value, "conv_1");
  assert.equal(changes.length, 1);
  assert.deepEqual(shown(thread), ["u1", "a1"]);
  const source = sources.get("/v1/responses/resp_a1/stream");
  source?.say("delta", 1, { text: "hi" });
  source?.say("done", 2, { finish_reason: "stop", usage: { output_tokens: 1 } });
  const reply = thread.branch.value[1];
  assert.equal(reply?.content, "hi");
  assert.equal(reply?.status, "complete");
  assert.equal(thread.running.value, null);
  assert.equal(source?.readyState, 2);
});

test("a refused first message leaves no conversation behind, and the next try goes to the one that was made", async () => {
  let made = 0;
  let refuse = true;
  const targets: string[] = [];
  const { thread, changes } = setUp(null, {
    createConversation: () => {
      made += 1;
      return Promise.resolve({ ...row(), id: `conv_${made}`, messages: [] });
    },
    send: (conversation) => {
      targets.push(conversation);
      return refuse ? Promise.reject(new ApiError(429, "quota_exceeded", "", true)) : Promise.resolve(accepted(1));
    },
  });
  await assert.rejects(thread.send("hello"));
  assert.equal(thread.id.value, null);
  assert.equal(thread.state.value, "new");
  assert.equal(changes.length, 0);
  refuse = false;
  await thread.send("hello, in other words");
  assert.deepEqual(targets, ["conv_1", "conv_1"]);
  assert.equal(thread.id.value, "conv_1");
  assert.equal(changes[0]?.head_message_id, "a1");
});

test("the same text sent again after a failure is the same message; another text is not", async () => {
  const sent: NewMessage[] = [];
  const { thread } = setUp("conv_1", {
    send: (_, message) => {
      sent.push(message);
      return Promise.reject(new ApiError(429, "too_many_replies", "", true));
    },
  });
  for (const text of ["one", "one", "two"]) await assert.rejects(thread.send(text));
  assert.equal(sent[0]?.client_msg_id, sent[1]?.client_msg_id);
  assert.notEqual(sent[1]?.client_msg_id, sent[2]?.client_msg_id);
  assert.equal(thread.pending.value, null);
});

test("an answer that was under way when a message was sent does not hide it", async () => {
  let answer: (conversation: Conversation) => void = () => undefined;
  const asked: number[] = [];
  const { thread } = setUp("conv_1", {
    conversation: () => {
      asked.push(asked.length);
      if (asked.length > 1) {
        const messages = [stored("u1", null, "user"), stored("a1", "u1", "assistant", "streaming")];
        return Promise.resolve({ ...row(), head_message_id: "a1", messages });
      }
      return new Promise((resolve) => {
        answer = resolve;
      });
    },
    send: () => Promise.resolve(accepted(1)),
  });
  const loading = thread.load();
  await thread.send("hello");
  answer({ ...row(), messages: [] });
  await loading;
  assert.deepEqual(shown(thread), ["u1", "a1"]);
  assert.equal(asked.length, 2);
});

test("an ended reply does not run again because the store was asked a moment too early", async () => {
  const early = [stored("u1", null, "user"), stored("a1", "u1", "assistant", "streaming")];
  const { thread, sources } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: "a1", messages: early }),
    streamAddress: (id) => `http://h/v1/responses/${id}/stream`,
  });
  await thread.load();
  const why = { error_code: "abandoned" };
  sources.get("/v1/responses/resp_a1/stream")?.say("done", 1, { finish_reason: "stopped", usage: {}, ...why });
  assert.equal(thread.branch.value[1]?.status, "stopped");
  assert.equal(thread.branch.value[1]?.error_code, "abandoned");
  await thread.load();
  assert.equal(thread.branch.value[1]?.status, "stopped");
});

const brokenOff = (): Conversation => ({
  ...row("2026-01-01T00:00:09Z"),
  head_message_id: "a1",
  messages: [stored("u1", null, "user"), stored("a1", "u1", "assistant", "stopped")],
});

test("a continued reply begins with the kept text, also before its stream and in the eyes of a store that lags", async () => {
  const conversation = brokenOff();
  const { thread, sources } = setUp("conv_1", {
    conversation: () => Promise.resolve(conversation),
    continueReply: () => Promise.resolve({ ...accepted(2), user_message_id: "u1", status: "queued" }),
  });
  await thread.load();
  await thread.continueReply(stored("a1", "u1", "assistant", "stopped"));
  assert.deepEqual(shown(thread), ["u1", "a2"]);
  assert.equal(thread.branch.value[1]?.content, "text of a1");
  conversation.messages.push({ ...stored("a2", "u1", "assistant", "streaming"), content: "" });
  conversation.head_message_id = "a2";
  await thread.load();
  assert.equal(thread.branch.value[1]?.status, "streaming");
  assert.equal(thread.branch.value[1]?.content, "text of a1");
  const source = sources.get("/v1/responses/resp_a2/stream");
  source?.say("delta", 1, { text: "text of a1" });
  source?.say("delta", 2, { text: " and the rest" });
  source?.say("done", 3, { finish_reason: "stop", usage: {} });
  assert.equal(thread.branch.value[1]?.content, "text of a1 and the rest");
  const [, whole] = thread.branch.value;
  assert.equal(whole && thread.siblings(whole).previous, "a1");
  assert.equal(thread.tree.value.byId.get("a1")?.content, "text of a1");
});

test("what was given up is told of each reply, when it is taken on, when it has ended, and when the page is loaded again", async () => {
  const conversation = brokenOff();
  const client: Partial<Client> = {
    conversation: () => Promise.resolve(conversation),
    answerAgain: () => Promise.resolve({ ...accepted(2), user_message_id: "u1", degraded: ["max_tokens"] }),
  };
  const { thread, sources } = setUp("conv_1", client);
  await thread.load();
  await thread.regenerate("u1");
  const given = (shown: Thread): string[] => shown.branch.value.flatMap(({ degraded }) => degraded);
  assert.deepEqual(given(thread), ["max_tokens"]);
  sources.get("/v1/responses/resp_a2/stream")?.say("done", 1, { finish_reason: "length", usage: {} });
  assert.deepEqual(given(thread), ["max_tokens"]);
  const later = { ...stored("a3", "u3", "assistant"), model: "tiny", degraded: ["model"] };
  conversation.messages.push({ ...stored("a2", "u1", "assistant"), degraded: ["max_tokens"] }, stored("u3", "a2", "user"), later);
  conversation.head_message_id = "a3";
  const again = setUp("conv_1", { ...client, response: () => assert.fail("the messages say it themselves") }).thread;
  await again.load();
  assert.deepEqual(given(again), ["max_tokens", "model"]);
  assert.deepEqual(
    again.branch.value.map((message) => remarkOn({ reply: null, message })),
    [
      null,
      "The service is busy: this reply is kept short.",
      null,
      "The service is busy: this reply comes from a smaller model (tiny).",
    ],
  );
});

test("a reply that waits shows its place at once, and the time as soon as the stream tells it", async () => {
  const { thread, sources } = setUp(null, {
    createConversation: () => Promise.resolve({ ...row(), messages: [] }),
    send: () => Promise.resolve({ ...accepted(1), status: "queued", queue_position: 3 }),
  });
  await thread.send("hello");
  const told = (): string => {
    const reply = thread.replies.live.value.get("a1")!.view.value.reply;
    return progressText("open", false, reply.queue, reply.text === "");
  };
  assert.equal(told(), "Waiting in the queue, position 3");
  sources.get("/v1/responses/resp_a1/stream")?.say("queued", 0, { position: 2, eta_s: 20, tier: "free" });
  assert.match(told(), /^Waiting in the queue, position 2 · about 20/);
});

test("a reply that was found waiting waits until its stream says otherwise; one that was begun at once does not", async () => {
  const waiting = { ...stored("a1", "u1", "assistant", "queued"), stream_url: accepted(1).stream_url };
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: "a1", messages: [stored("u1", null, "user"), waiting] }),
    answerAgain: () => Promise.resolve({ ...accepted(2), user_message_id: "u1", status: "queued" }),
  });
  await thread.load();
  assert.deepEqual(thread.replies.live.value.get("a1")?.view.value.reply.queue, { position: 0, etaSeconds: null });
  await thread.regenerate("u1");
  assert.equal(thread.replies.live.value.get("a2")?.view.value.reply.queue, null);
});

test("an answer asked for twice before it is known to be taken is one answer; asked for later it is another", async () => {
  const asked: string[] = [];
  let fail = true;
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve(brokenOff()),
    continueReply: (_, clientId) => {
      asked.push(clientId);
      return fail ? Promise.reject(new ApiError(429, "too_many_replies", "", true)) : Promise.resolve(accepted(2));
    },
  });
  await thread.load();
  const reply = stored("a1", "u1", "assistant", "stopped");
  await assert.rejects(thread.continueReply(reply));
  fail = false;
  await Promise.all([thread.continueReply(reply), thread.continueReply(reply)]);
  await thread.continueReply(reply);
  assert.equal(new Set(asked.slice(0, 3)).size, 1);
  assert.notEqual(asked[3], asked[0]);
});

test("news from the list are fetched once, and wait while a message is on its way", async () => {
  let asked = 0;
  let send: (answer: Accepted) => void = () => undefined;
  const { thread } = setUp("conv_1", {
    conversation: () => {
      asked += 1;
      return Promise.resolve({ ...row("2026-01-01T00:00:09Z"), head_message_id: null, messages: [] });
    },
    send: () =>
      new Promise((resolve) => {
        send = resolve;
      }),
  });
  await thread.load();
  await thread.sync(row("2026-01-01T00:00:09Z"));
  assert.equal(asked, 1);
  const sending = thread.send("hello");
  await thread.sync(row("2026-01-01T00:00:10Z"));
  assert.equal(asked, 1);
  send(accepted(1));
  await sending;
  assert.equal(asked, 2);
});
