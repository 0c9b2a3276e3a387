// What a prompt was made of, in both forms in which it is told; and the few words made of limits and times.
import assert from "node:assert/strict";
import { test } from "node:test";
import { limitsOf, readDuration, readLimits } from "../src/api/limits.ts";
import { ApiError, Client } from "../src/api/client.ts";
import type { Message } from "../src/api/types.ts";
import { explain } from "../src/state/notices.ts";
import { readUsed, turnsOf } from "../src/stream/used.ts";
import { budgetText } from "../src/text/budget.ts";
import { duration, timeOf } from "../src/text/time.ts";
import { degradedText, remarkOn } from "../src/view/Status.tsx";

const PARTS = { system: 10, memory: 0, summary: 20, pinned: 0, verbatim: 30, recalled: 5, question: 7 };

test("the event and the report of one prompt say the same", () => {
  const common = { window: 4096, prompt_tokens: 72, cached_tokens: 60, parts: PARTS, condensed: true, left_out: 2 };
  const event = readUsed({ ...common, summary_through: "m9", retrieved: ["m1", "m2"] });
  const report = readUsed({
    ...common,
    reply_reserve: 1024,
    summary: { id: "s", version: 3, through_message_id: "m9", tokens: 20 },
    recalled: [{ message_ids: ["m1", "m2"], score: 0.5, tokens: 5, created_at: "2026-01-01T00:00:00Z" }],
  });
  assert.deepEqual(event?.summary, { through: "m9", version: null });
  assert.deepEqual(report?.summary, { through: "m9", version: 3 });
  assert.deepEqual({ ...event, summary: null, reserve: 1024 }, { ...report, summary: null });
  assert.deepEqual(report?.recalled, ["m1", "m2"]);
  assert.equal(report?.leftOut, 2);
});

test("an older server that tells less is understood, and without a window there is nothing to measure by", () => {
  const used = readUsed({ condensed: false, summary_through: null, retrieved: [], prompt_tokens: 5, cached_tokens: null, window: 100 });
  assert.equal(used?.prompt, 5);
  assert.equal(used?.summary, null);
  assert.equal(used?.leftOut, 0);
  assert.equal(readUsed({ prompt_tokens: 5 }), null);
});

test("a recalled turn has one way to it, an answer recalled alone its own", () => {
  const parents: Record<string, string | null> = { q1: null, a1: "q1", q2: "a1", a2: "q2" };
  assert.deepEqual(turnsOf(["q1", "a1", "a2", "a2", "lost"], (id) => parents[id]), ["q1", "a2", "lost"]);
});

test("what is left is read from headers and from the caller's record", () => {
  const headers = new Headers({
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "50",
    "x-ratelimit-reset-tokens": "1h2m3s",
  });
  assert.deepEqual(readLimits(headers, 1_000), { limit: 1000, left: 50, refillsAt: 1_000 + 3_723_000 });
  assert.equal(readLimits(new Headers({ "x-ratelimit-limit-requests": "3" }), 0), null);
  assert.equal(readDuration("soon"), null);
  const quota = { budget: { limit: 10, left: 4 }, refills_at: "1970-01-01T00:00:01Z" };
  assert.deepEqual(limitsOf({ user: { id: "a" }, tier: "free", quota }), { limit: 10, left: 4, refillsAt: 1_000 });
  assert.equal(limitsOf({ user: { id: "a" }, tier: "free", quota: { budget: null, refills_at: null } }), null);
});

test("a refused message tells what is left as well", async () => {
  const headers = { "x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "0" };
  const client = new Client("http://h/", () => Promise.resolve(new Response('{"code":"quota_exceeded"}', { status: 429, headers })));
  const told: unknown[] = [];
  client.onLimits = (limits) => told.push(limits);
  await assert.rejects(client.me());
  assert.deepEqual(told, [{ limit: 1000, left: 0, refillsAt: null }]);
});

test("of a budget one hears when little is left, and when there is more", () => {
  const now = new Date(2026, 0, 1, 12, 0).getTime();
  assert.equal(budgetText({ limit: 100, left: 21, refillsAt: null }, now), null);
  assert.equal(budgetText(null, now), null);
  assert.match(budgetText({ limit: 100, left: 20, refillsAt: now + 1_800_000 }, now) ?? "", /^20 % of your budget is left\. More from .*30/);
  assert.equal(budgetText({ limit: 1_000, left: 3, refillsAt: now - 1 }, now), "Less than 1 % of your budget is left.");
});

test("times are told by the clock, with the day when that is another, and how long things take in round numbers", () => {
  const now = new Date(2026, 0, 1, 12, 0).getTime();
  assert.match(timeOf(now + 60_000, now, "en-GB"), /^12:01$/);
  assert.match(timeOf(now + 86_400_000, now, "en-GB"), /2 Jan.*12:00/);
  assert.deepEqual([0.2, 89, 90, 5_399, 7_200].map(duration), ["1 s", "89 s", "2 min", "90 min", "2 h"]);
});

test("a short wait is told in seconds, a long one by the clock", () => {
  const full = (retryAfter: number): string => explain(new ApiError(503, "queue_full", "", true, retryAfter));
  assert.match(full(10), /Try again in 10 s\./);
  assert.match(full(600), /Try again at \d/);
  const quota = new ApiError(429, "quota_exceeded", "It costs 5 units.", true, 600);
  assert.match(explain(quota), /It costs 5 units\. Try again at \d.* Your text is kept\./);
});

test("what was given up for a reply is one sentence", () => {
  assert.equal(degradedText([], "big"), null);
  assert.equal(degradedText(["a_later_kind"], "big"), null);
  assert.equal(degradedText(["max_tokens"], null), "The service is busy: this reply is kept short.");
  assert.equal(
    degradedText(["model", "max_tokens", "history"], "tiny"),
    "The service is busy: this reply comes from a smaller model (tiny), is kept short and was given less of the conversation.",
  );
});

test("of a reply that never began it is not said what was given up for it", () => {
  const message: Message = {
    id: "a1",
    parent_id: "u1",
    role: "assistant",
    content: "",
    status: "queued",
    model: null,
    response_id: "resp_a1",
    finish_reason: null,
    tokens: null,
    created_at: "2026-01-01T00:00:00Z",
    degraded: ["max_tokens"],
  };
  const of = (change: Partial<Message>): string | null => remarkOn({ reply: null, message: { ...message, ...change } });
  assert.equal(of({}), "The service is busy: this reply is kept short.");
  assert.equal(of({ status: "failed" }), null);
  assert.equal(of({ status: "failed", content: "It began so." }), "The service is busy: this reply is kept short.");
});

test("a refusal for want of time says so, and when to try again", () => {
  const late = new ApiError(503, "too_late", "", true, 20);
  assert.equal(explain(late), "So many people are waiting that this would begin too late. Try again in 20 s. Your text is kept.");
});
