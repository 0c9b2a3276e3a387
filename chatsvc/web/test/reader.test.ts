import assert from "node:assert/strict";
import { test } from "node:test";
import { Reader, withCursor, type Link, type Surroundings } from "../src/stream/reader.ts";
import type { Reply } from "../src/stream/reducer.ts";

const URL_OF_STREAM = "http://host/base/v1/responses/resp_1/stream?token=abc";

class FakeSource extends EventTarget {
  readyState = 0;
  closed = false;

  constructor(readonly url: string) {
    super();
  }

  close(): void {
    this.readyState = 2;
    this.closed = true;
  }

  say(name: string, id: string, data: unknown): void {
    this.readyState = 1;
    this.dispatchEvent(Object.assign(new Event(name), { data: JSON.stringify(data), lastEventId: id }));
  }

  opens(): void {
    this.readyState = 1;
    this.dispatchEvent(new Event("open"));
  }

  breaks(forGood: boolean): void {
    this.readyState = forGood ? 2 : 0;
    this.dispatchEvent(new Event("error"));
  }
}

function setUp(onLost: () => Promise<string | null> = () => Promise.resolve(URL_OF_STREAM)) {
  const sources: FakeSource[] = [];
  const timers = new Map<number, { run: () => void; ms: number }>();
  const replies: Reply[] = [];
  const links: Link[] = [];
  let handles = 0;
  const surroundings: Surroundings = {
    connect: (url) => {
      const source = new FakeSource(url);
      sources.push(source);
      return source as unknown as EventSource;
    },
    setTimeout: (run, ms) => {
      handles += 1;
      timers.set(handles, { run, ms });
      return handles;
    },
    clearTimeout: (handle) => void timers.delete(handle),
    random: () => 0.5,
  };
  const reader = new Reader({
    url: URL_OF_STREAM,
    surroundings,
    onReply: (reply) => void replies.push(reply),
    onLink: (link) => void links.push(link),
    onLost,
  });
  const source = (): FakeSource => sources.at(-1) as FakeSource;
  const ring = (): number => {
    const [handle, timer] = [...timers][0] as [number, { run: () => void; ms: number }];
    timers.delete(handle);
    timer.run();
    return timer.ms;
  };
  return { reader, sources, source, timers, replies, links, ring };
}

const settled = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

test("a reply is read to its end, then the connection is let go", () => {
  const { reader, source, replies, links } = setUp();
  reader.open();
  assert.equal(source().url, URL_OF_STREAM);
  source().opens();
  source().say("start", "1", { model: "m" });
  source().say("delta", "2", { text: "hello" });
  source().say("done", "3", { finish_reason: "stop", usage: {} });
  assert.equal(replies.at(-1)?.text, "hello");
  assert.ok(source().closed);
  assert.deepEqual(links, ["open", "closed"]);
});

test("the stream's own error event ends the reply; a broken connection does not", () => {
  const { reader, source, replies } = setUp();
  reader.open();
  source().say("delta", "1", { text: "half" });
  source().breaks(false);
  assert.equal(source().closed, false, "EventSource reconnects by itself");
  source().say("error", "2", { code: "worker_lost", message: "", retryable: true });
  assert.equal(replies.at(-1)?.phase, "failed");
  assert.ok(source().closed);
});

test("when EventSource has given up, the reader comes back at its cursor, later each time", async () => {
  const { reader, source, sources, ring } = setUp();
  reader.open();
  source().opens();
  source().say("delta", "7", { text: "seven" });
  source().breaks(true);
  await settled();
  const first = ring();
  assert.equal(new URL(source().url).searchParams.get("last_event_id"), "7");
  assert.equal(new URL(source().url).searchParams.get("token"), "abc");
  source().breaks(true);
  await settled();
  assert.ok(ring() > first);
  assert.equal(sources.length, 3);
});

test("a connection that opens forgets the failures before it", async () => {
  const { reader, source, ring } = setUp();
  reader.open();
  source().breaks(true);
  await settled();
  const first = ring();
  source().opens();
  source().breaks(true);
  await settled();
  assert.equal(ring(), first);
});

test("a reply that is gone or ended elsewhere is not asked for again", async () => {
  const { reader, source, sources, timers, links } = setUp(() => Promise.resolve(null));
  reader.open();
  source().breaks(true);
  await settled();
  assert.equal(timers.size, 0);
  assert.equal(sources.length, 1);
  assert.deepEqual(links, ["closed"]);
});

test("a connection is called lost once it could not be made anew, and not where the reply turns out to be gone", async () => {
  const { reader, source, links } = setUp(() => Promise.resolve(null));
  reader.open();
  source().opens();
  source().breaks(false);
  source().opens();
  source().breaks(false);
  source().breaks(false);
  assert.deepEqual(links, ["open", "broken", "open", "broken", "retrying"]);
  source().opens();
  source().breaks(false);
  source().breaks(true);
  await settled();
  assert.deepEqual(links.slice(5), ["open", "broken", "closed"]);
});

test("a stream that is refused though the reply runs is tried again as a lost one", async () => {
  const { reader, source, links } = setUp();
  reader.open();
  source().opens();
  source().breaks(false);
  source().breaks(true);
  assert.equal(links.at(-1), "broken");
  await settled();
  assert.equal(links.at(-1), "retrying");
});

test("a hidden tab lets go and comes back where it was", () => {
  const { reader, source, sources, replies } = setUp();
  reader.open();
  source().say("delta", "1", { text: "one " });
  reader.park();
  assert.ok(source().closed);
  reader.open();
  assert.equal(sources.length, 2);
  assert.equal(new URL(source().url).searchParams.get("last_event_id"), "1");
  source().say("delta", "1", { text: "one " });
  source().say("delta", "2", { text: "two" });
  assert.equal(replies.at(-1)?.text, "one two");
});

test("a tab hidden while a retry is due does not connect until it is seen", async () => {
  const { reader, source, sources, timers } = setUp();
  reader.open();
  source().breaks(true);
  await settled();
  reader.park();
  assert.equal(timers.size, 0);
  reader.open();
  assert.equal(sources.length, 2);
});

test("a tab hidden while the server is asked what became of the reply stays away", async () => {
  const { reader, source, timers, links } = setUp();
  reader.open();
  source().breaks(true);
  reader.park();
  await settled();
  assert.equal(timers.size, 0);
  assert.equal(links.at(-1), "parked");
});

test("an old connection has no say once there is a new one", () => {
  const { reader, sources, replies } = setUp();
  reader.open();
  reader.park();
  reader.open();
  (sources[0] as FakeSource).say("delta", "1", { text: "ghost" });
  assert.equal(replies.length, 0);
});

test("after the network was away a connection is made anew, from the same place", () => {
  const { reader, source, sources, replies } = setUp();
  reader.open();
  source().say("delta", "1", { text: "one " });
  reader.renew();
  assert.ok((sources[0] as FakeSource).closed);
  assert.equal(sources.length, 2);
  assert.equal(new URL(source().url).searchParams.get("last_event_id"), "1");
  source().say("delta", "2", { text: "two" });
  assert.equal(replies.at(-1)?.text, "one two");
});

test("what is parked or ended is not connected because the network is back", () => {
  for (const before of [
    (set: ReturnType<typeof setUp>) => set.reader.park(),
    (set: ReturnType<typeof setUp>) => set.source().say("done", "1", { finish_reason: "stop", usage: {} }),
  ]) {
    const set = setUp();
    set.reader.open();
    before(set);
    set.reader.renew();
    assert.equal(set.sources.length, 1);
  }
});

test("a stream that would wait before it tries again does not when the network is back", async () => {
  const { reader, source, sources, timers } = setUp();
  reader.open();
  source().say("delta", "1", { text: "one " });
  source().breaks(true);
  await settled();
  assert.equal(timers.size, 1);
  reader.renew();
  assert.equal(timers.size, 0);
  assert.equal(sources.length, 2);
  assert.equal(new URL(source().url).searchParams.get("last_event_id"), "1");
});

test("one that is still asking where to read is left to it when the network is back", async () => {
  let answer: (url: string) => void = () => undefined;
  const { reader, source, sources, timers } = setUp(() => new Promise((resolve) => void (answer = resolve)));
  reader.open();
  source().breaks(true);
  reader.renew();
  assert.equal(sources.length, 1);
  answer(URL_OF_STREAM);
  await settled();
  assert.equal(timers.size, 1);
});

test("nothing is opened after the end", () => {
  const { reader, source, sources } = setUp();
  reader.open();
  source().say("done", "1", { finish_reason: "stop", usage: {} });
  reader.park();
  reader.open();
  assert.equal(sources.length, 1);
});

test("the cursor is put into the address only where there is one", () => {
  assert.equal(withCursor("http://h/s?token=t", 0), "http://h/s?token=t");
  assert.equal(withCursor("http://h/s?token=t", 12), "http://h/s?token=t&last_event_id=12");
  assert.equal(withCursor("http://h/s?last_event_id=3", 12), "http://h/s?last_event_id=12");
});
