// What is said about the server being away, and how soon its return is noticed.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError } from "../src/api/client.ts";
import { Notices, type Notice } from "../src/state/notices.ts";
import { Pulse } from "../src/state/pulse.ts";

const unreachable = new ApiError(0, "unreachable", "", true);

/** A pulse in a window whose clock only tells how long it was asked to wait. */
function setUp() {
  const waits: number[] = [];
  const state = { onLine: true, polls: 0, fails: null as ApiError | null };
  const window = Object.assign(new EventTarget(), {
    document: Object.assign(new EventTarget(), { visibilityState: "visible" }),
    navigator: {
      get onLine() {
        return state.onLine;
      },
    },
    BroadcastChannel: class {
      postMessage(): void {}
      close(): void {}
    },
    setTimeout: (_: () => void, ms: number) => waits.push(ms),
    clearTimeout: () => undefined,
  });
  const pulse = new Pulse(window as unknown as Window & typeof globalThis, () => {
    state.polls += 1;
    return state.fails ? Promise.reject(state.fails) : Promise.resolve();
  });
  const poll = async (): Promise<void> => {
    pulse.now();
    await new Promise((resolve) => setImmediate(resolve));
  };
  return { pulse, waits, state, poll };
}

test("a server that does not answer is away; offline is what the browser says so of", async () => {
  const { pulse, state, poll } = setUp();
  state.fails = unreachable;
  await poll();
  assert.equal(pulse.reach.value, "away");
  state.onLine = false;
  await poll();
  assert.equal(pulse.reach.value, "offline");
  state.onLine = true;
  state.fails = new ApiError(502, "http_error", "", true);
  await poll();
  assert.equal(pulse.reach.value, "away");
  state.fails = new ApiError(503, "store_unavailable", "", true);
  await poll();
  assert.equal(pulse.reach.value, "reached");
});

test("a server that is away is looked for every five seconds at the least, however long it stays away", async () => {
  const { waits, state, poll } = setUp();
  state.fails = unreachable;
  for (let count = 0; count < 12; count += 1) await poll();
  assert.equal(waits.length, 12);
  assert.ok(Math.max(...waits) <= 5_000, String(waits));
});

test("a sign of life is followed up at once while the server is away, and costs nothing while it is there", async () => {
  const { pulse, state, poll } = setUp();
  await poll();
  pulse.sign();
  assert.equal(state.polls, 1);
  state.fails = unreachable;
  await poll();
  state.fails = null;
  pulse.sign();
  await new Promise((resolve) => setImmediate(resolve));
  assert.equal(pulse.reach.value, "reached");
});

test("a notice goes with its cause, and what can be tried again still can", () => {
  const notices = new Notices();
  const shown = (): Notice | null => notices.current.value;
  notices.show({ text: "running", cause: "running" });
  notices.outdate("unreachable");
  assert.equal(shown()?.text, "running");
  notices.outdate("running");
  assert.equal(shown(), null);
  notices.report(unreachable);
  assert.match(shown()?.text ?? "", /cannot be reached/);
  notices.outdate("unreachable");
  assert.equal(shown(), null);
  notices.report(unreachable, () => undefined);
  notices.outdate("unreachable");
  assert.match(shown()?.text ?? "", /^The server is back/);
  assert.equal(shown()?.action?.label, "Try again");
});
