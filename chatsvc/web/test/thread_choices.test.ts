import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError } from "../src/api/client.ts";
import { accepted, row, setUp, shown, stored } from "./thread_world.ts";

test("choosing another answer shows its branch and is remembered by the server", async () => {
  const messages = [stored("u1", null, "user"), stored("a1", "u1", "assistant"), stored("a2", "u1", "assistant")];
  const heads: unknown[] = [];
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: "a2", messages }),
    changeConversation: (_, changes) => {
      heads.push(changes.head_message_id);
      return Promise.resolve(row());
    },
  });
  await thread.load();
  assert.deepEqual(shown(thread), ["u1", "a2"]);
  await thread.choose("a1");
  assert.deepEqual(shown(thread), ["u1", "a1"]);
  assert.deepEqual(heads, ["a1"]);
});

test("a window keeps its branch while another one looks through the rest, and follows what is said there", async () => {
  const messages = [
    stored("u1", null, "user"),
    stored("a1", "u1", "assistant"),
    stored("a2", "u1", "assistant"),
  ];
  let head = "a2";
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: head, messages: [...messages] }),
  });
  await thread.load();
  assert.deepEqual(shown(thread), ["u1", "a2"]);
  head = "a1";
  await thread.load();
  assert.deepEqual(shown(thread), ["u1", "a2"]);
  messages.push(stored("u2", "a1", "user"), stored("a3", "u2", "assistant"));
  head = "a3";
  await thread.load();
  assert.deepEqual(shown(thread), ["u1", "a1", "u2", "a3"]);
});

test("a conversation that is gone says so; one that cannot be fetched can be asked for again", async () => {
  let error = new ApiError(0, "unreachable", "", true);
  const { thread } = setUp("conv_1", { conversation: () => Promise.reject(error) });
  await thread.load();
  assert.equal(thread.state.value, "failed");
  error = new ApiError(404, "not_found", "", false);
  await thread.load();
  assert.equal(thread.state.value, "missing");
});

test("nothing of a conversation that was deleted elsewhere stays on the screen, and its reply is read no further", async () => {
  const messages = [stored("u1", null, "user"), stored("a1", "u1", "assistant", "streaming")];
  let gone = false;
  const { thread, sources } = setUp("conv_1", {
    conversation: () =>
      gone
        ? Promise.reject(new ApiError(404, "not_found", "", false))
        : Promise.resolve({ ...row(), head_message_id: "a1", messages }),
    streamAddress: (id) => `http://h/v1/responses/${id}/stream`,
  });
  await thread.load();
  assert.deepEqual(shown(thread), ["u1", "a1"]);
  gone = true;
  await thread.load();
  assert.equal(thread.state.value, "missing");
  assert.deepEqual(shown(thread), []);
  assert.equal(thread.running.value, null);
  assert.equal(sources.get("/v1/responses/resp_a1/stream")?.readyState, 2);
});

test("a pin is shown at once, holds against an answer from before, and is taken back when it is refused", async () => {
  let refuse = false;
  let pinning: () => void = () => undefined;
  const messages = [stored("u1", null, "user"), stored("a1", "u1", "assistant")];
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: "a1", messages: messages.map((each) => ({ ...each })) }),
    pinMessage: (id, pinned) =>
      new Promise((resolve, reject) => {
        pinning = () => (refuse ? reject(new ApiError(503, "store_unavailable", "", true)) : resolve({ ...messages[0]!, id, pinned }));
      }),
  });
  const pinned = (): boolean => thread.branch.value[0]?.pinned === true;
  await thread.load();
  const loading = thread.load();
  const first = thread.pin(messages[0]!, true);
  await loading;
  assert.equal(pinned(), true);
  messages[0] = { ...messages[0]!, pinned: true };
  pinning();
  await first;
  assert.equal(pinned(), true);
  refuse = true;
  const second = thread.pin(messages[0], false);
  assert.equal(pinned(), false);
  pinning();
  await assert.rejects(second);
  assert.equal(pinned(), true);
});

test("a message is brought into view also when it is not fetched yet or on another branch, and missed when it is gone", async () => {
  const messages = [stored("u1", null, "user"), stored("a1", "u1", "assistant"), stored("a2", "u1", "assistant")];
  const { thread } = setUp("conv_1", {
    conversation: () => Promise.resolve({ ...row(), head_message_id: "a2", messages }),
    changeConversation: () => Promise.resolve(row()),
  });
  assert.equal(await thread.reveal("u1"), true);
  assert.equal(thread.target.value?.id, "u1");
  assert.equal(await thread.reveal("a1"), true);
  assert.deepEqual(shown(thread), ["u1", "a1"]);
  assert.equal(await thread.reveal("gone"), false);
});

test("a model is chosen before the first message and after it, and the old one is back when the new one is refused", async () => {
  const models: unknown[] = [];
  let refuse = false;
  const { thread } = setUp(null, {
    createConversation: (model) => {
      models.push(model);
      return Promise.resolve({ ...row(), messages: [] });
    },
    changeConversation: (_, { model }) => {
      models.push(model);
      return refuse ? Promise.reject(new ApiError(422, "unknown_model", "", false)) : Promise.resolve(row());
    },
    send: () => Promise.resolve(accepted(1)),
  });
  await thread.chooseModel("small");
  await thread.send("hello");
  await thread.chooseModel("big");
  refuse = true;
  await assert.rejects(thread.chooseModel("gone"));
  assert.deepEqual(models, ["small", "big", "gone"]);
  assert.equal(thread.model.value, "big");
});

test("a model chosen while the conversation is being made is the one it has", async () => {
  const told: (string | null | undefined)[] = [];
  let make = (): void => undefined;
  const { thread } = setUp(null, {
    createConversation: (model) => {
      told.push(model);
      return new Promise((resolve) => {
        make = () => resolve({ ...row(), messages: [] });
      });
    },
    changeConversation: (_, { model }) => {
      told.push(model);
      return Promise.resolve(row());
    },
    send: () => {
      told.push("sent");
      return Promise.resolve(accepted(1));
    },
  });
  const sending = thread.send("Hello");
  await thread.chooseModel("small");
  make();
  await sending;
  assert.deepEqual(told, [null, "small", "sent"]);
});
