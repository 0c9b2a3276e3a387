import assert from "node:assert/strict";
import { test } from "node:test";
import { LiveReply } from "../src/state/live.ts";

function setUp() {
  let time = 0;
  let last = 0;
  const frames: (() => void)[] = [];
  const source = Object.assign(new EventTarget(), { readyState: 1, close: () => undefined });
  const live = new LiveReply({
    responseId: "resp_1",
    url: "http://h/stream",
    place: null,
    surroundings: {
      connect: () => source as unknown as EventSource,
      setTimeout: () => 0,
      clearTimeout: () => undefined,
      random: () => 0,
      now: () => time,
      nextFrame: (run) => frames.push(run),
      cancelFrame: () => undefined,
    },
    onEnd: () => undefined,
    onLost: () => Promise.resolve(null),
  });
  const opens = (): void => void source.dispatchEvent(new Event("open"));
  const says = (name: string, after: number, data: unknown): void => {
    time += after;
    last += 1;
    source.dispatchEvent(Object.assign(new Event(name), { data: JSON.stringify(data), lastEventId: String(last) }));
    for (const draw of frames.splice(0)) draw();
  };
  const breaks = (): void => {
    source.readyState = 0;
    source.dispatchEvent(new Event("error"));
    source.readyState = 1;
  };
  const passes = (ms: number): void => {
    time += ms;
  };
  live.open();
  opens();
  return { live, opens, says, breaks, passes };
}

test("a pause is one when it is long, and much longer than the model's pauses are", () => {
  const { live, says } = setUp();
  says("start", 30_000, { model: "m" });
  says("delta", 60_000, { text: "The first words take their time. " });
  assert.equal(live.patience, 3_000);
  says("delta", 900, { text: "A quick model. " });
  assert.equal(live.patience, 3_000);
  says("delta", 4_000, { text: "A slow one, " });
  says("delta", 2_000, { text: "by and by." });
  assert.equal(live.patience, 12_000);
});

test("the time without a connection is no pause of the model's", () => {
  const { live, opens, says, breaks, passes } = setUp();
  says("delta", 0, { text: "one " });
  passes(500);
  breaks();
  passes(60_000);
  opens();
  says("delta", 500, { text: "two" });
  assert.equal(live.patience, 3_000);
});
