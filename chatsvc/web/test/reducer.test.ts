import assert from "node:assert/strict";
import { test } from "node:test";
import { apply, EMPTY_REPLY, EVENT_NAMES, type Reply, type StreamEvent } from "../src/stream/reducer.ts";
import { randomFrom } from "./random.ts";

const event = (name: string, id: number | string, data: unknown): StreamEvent => ({ name, id: String(id), data: JSON.stringify(data) });
const delta = (id: number, text: string): StreamEvent => event("delta", id, { text });
const fold = (events: StreamEvent[], start: Reply = EMPTY_REPLY): Reply => events.reduce(apply, start);

const LOG = [
  event("start", 1, { response_id: "r", message_id: "m", model: "tiny", created_at: "2026-01-01T00:00:00Z" }),
  event("context", 2, { prompt_tokens: 12 }),
  delta(3, "One "),
  delta(4, "two\r\n"),
  delta(5, "🙂 three"),
  event("done", 6, { message_id: "m", finish_reason: "stop", usage: { prompt_tokens: 12, output_tokens: 4 } }),
];

test("a log read in order gives its text and its end", () => {
  const reply = fold(LOG);
  assert.equal(reply.text, "One two\r\n🙂 three");
  assert.equal(reply.phase, "complete");
  assert.equal(reply.last, 6);
  assert.equal(reply.model, "tiny");
  assert.equal(reply.outputTokens, 4);
});

test("however often a resume replays, the text is the same", () => {
  for (let seed = 1; seed <= 200; seed += 1) {
    const random = randomFrom(seed);
    let reply = EMPTY_REPLY;
    let at = 0;
    while (at < LOG.length) {
      const from = Math.floor(random() * (at + 1));
      const to = from + 1 + Math.floor(random() * (LOG.length - from));
      // What a server may send again never leaves a hole behind what was seen.
      reply = fold(LOG.slice(from, to), reply);
      at = Math.max(at, to);
    }
    assert.deepEqual(reply, fold(LOG));
  }
});

test("an event that was seen changes nothing, not even the object", () => {
  const reply = fold(LOG.slice(0, 4));
  assert.equal(apply(reply, delta(4, "again")), reply);
  assert.equal(apply(reply, delta(2, "again")), reply);
});

test("a snapshot replaces the text and moves the cursor, also backwards", () => {
  const ahead = fold([delta(1, "a"), delta(500, "b")]);
  const replaced = apply(ahead, event("snapshot", 40, { text: "whole", reason: "log_lost" }));
  assert.equal(replaced.text, "whole");
  assert.equal(replaced.last, 40);
  assert.equal(apply(replaced, delta(41, " text")).text, "whole text");
});

test("a queued event never looks at the id that EventSource repeats for it", () => {
  const queued = fold([event("queued", "", { position: 3, eta_s: 12, tier: "free" })]);
  assert.deepEqual(queued.queue, { position: 3, etaSeconds: 12 });
  assert.equal(queued.last, 0);
  const again = apply(fold(LOG.slice(0, 1)), event("queued", 1, { position: 1, eta_s: null, tier: "free" }));
  assert.equal(again.phase, "queued");
  assert.equal(again.last, 1);
});

test("a delta ends the waiting", () => {
  const reply = fold([event("queued", "", { position: 1, eta_s: null }), delta(1, "x")]);
  assert.equal(reply.phase, "streaming");
  assert.equal(reply.queue, null);
});

test("an end without an id, or with a repeated one, is an end", () => {
  const reply = fold([delta(1, "x"), event("done", 1, { finish_reason: "stopped", usage: {} })]);
  assert.equal(reply.phase, "stopped");
  assert.equal(fold([delta(1, "x"), event("error", "", { code: "worker_lost", message: "", retryable: true })]).phase, "failed");
});

test("an end that the service made says why; one made by hand has nothing to say", () => {
  const stopped = (more: object) => fold([event("done", 1, { finish_reason: "stopped", usage: {}, ...more })]);
  const abandoned = stopped({ error_code: "abandoned" });
  assert.equal(abandoned.phase, "stopped");
  assert.equal(abandoned.failure, null);
  assert.equal(abandoned.errorCode, "abandoned");
  assert.equal(stopped({}).errorCode, null);
});

test("an error keeps the text that was shown and says what can be done", () => {
  const reply = fold([delta(1, "half"), event("error", 2, { code: "worker_lost", message: "gone", retryable: true })]);
  assert.equal(reply.text, "half");
  assert.deepEqual(reply.failure, { code: "worker_lost", message: "gone", retryable: true });
});

test("nothing comes after the end", () => {
  const reply = fold(LOG);
  assert.equal(apply(reply, delta(7, "more")), reply);
  assert.equal(apply(reply, event("error", 8, { code: "x" })), reply);
});

test("parts this page does not draw still move the cursor", () => {
  const reply = fold([delta(1, "a"), event("image", 2, { id: "i" }), delta(3, "b")]);
  assert.equal(reply.last, 3);
  assert.equal(reply.text, "ab");
});

test("every event of the stream is listened to", () => {
  const names = ["queued", "start", "context", "delta", "tool_call", "tool_result", "image", "snapshot", "done", "error"];
  assert.deepEqual([...EVENT_NAMES].sort(), names.sort());
});

test("who writes a reply, what was given up for it and what it is made of are known from its first events", () => {
  const reply = fold([
    event("start", 1, { model: "big", served_model: "small", degraded: ["model", "max_tokens"] }),
    event("context", 2, { window: 100, prompt_tokens: 40, cached_tokens: 30, retrieved: ["m1"], left_out: 1, summary_through: "m9" }),
  ]);
  assert.equal(reply.model, "small");
  assert.deepEqual(reply.degraded, ["model", "max_tokens"]);
  assert.equal(reply.used?.prompt, 40);
  assert.deepEqual(reply.used?.recalled, ["m1"]);
  assert.equal(fold([event("start", 1, { model: "big" })]).model, "big");
});
