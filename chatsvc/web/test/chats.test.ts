// Answers that cross: what was done here holds, whatever was under way meanwhile.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, type Client } from "../src/api/client.ts";
import type { ConversationRow, Page } from "../src/api/types.ts";
import { Chats } from "../src/state/chats.ts";

const TIME = "2026-01-01T00:00:00Z";
const row = (id: string, more: Partial<ConversationRow> = {}): ConversationRow => ({
  id,
  title: id,
  pinned: false,
  head_message_id: "m",
  created_at: TIME,
  updated_at: TIME,
  ...more,
});

/** A server that answers when told to. */
class Door {
  readonly waiting: { readonly name: string; answer(value: unknown): void; refuse(error: Error): void }[] = [];
  readonly client = {
    conversations: () => this.wait("list"),
    changeConversation: (id: string) => this.wait(`change ${id}`),
    deleteConversation: (id: string) => this.wait(`delete ${id}`),
  } as unknown as Client;

  async take(name: string): Promise<Door["waiting"][number]> {
    await tick();
    const index = this.waiting.findIndex((call) => call.name === name);
    assert.notEqual(index, -1, `no call "${name}" is waiting`);
    return this.waiting.splice(index, 1)[0]!;
  }

  private wait(name: string): Promise<unknown> {
    return new Promise((answer, refuse) => this.waiting.push({ name, answer, refuse }));
  }
}

const tick = (): Promise<void> => new Promise((resolve) => setTimeout(resolve));
const list = (...data: ConversationRow[]): Page<ConversationRow> => ({ data, next_cursor: null });

async function setUp(...rows: ConversationRow[]) {
  const door = new Door();
  const chats = new Chats(door.client);
  const loading = chats.loadMore();
  (await door.take("list")).answer(list(...rows));
  await loading;
  const shown = (): string[] => chats.rows.value.map(({ title, pinned }) => `${title}${pinned ? " pinned" : ""}`);
  return { door, chats, shown };
}

test("a list that was under way while a conversation was unpinned or renamed does not bring the old row back", async () => {
  const { door, chats, shown } = await setUp(row("a", { pinned: true }));
  const refreshing = chats.refresh();
  const changing = chats.change("a", { pinned: false, title: "b" });
  assert.deepEqual(shown(), ["b"]);
  (await door.take("change a")).answer(row("a", { title: "b" }));
  await changing;
  (await door.take("list")).answer(list(row("a", { pinned: true })));
  await refreshing;
  assert.deepEqual(shown(), ["b"]);
});

test("a list that arrives before the change is answered does not hide it", async () => {
  const { door, chats, shown } = await setUp(row("a"));
  const changing = chats.change("a", { pinned: true });
  const refreshing = chats.refresh();
  (await door.take("list")).answer(list(row("a", { updated_at: "2026-01-01T00:00:01Z" })));
  await refreshing;
  assert.deepEqual(shown(), ["a pinned"]);
  (await door.take("change a")).answer(row("a", { pinned: true, updated_at: "2026-01-01T00:00:01Z" }));
  await changing;
  assert.deepEqual(shown(), ["a pinned"]);
});

test("a deleted conversation does not come back with an answer from before", async () => {
  const { door, chats, shown } = await setUp(row("a"), row("b"));
  const refreshing = chats.refresh();
  const removing = chats.remove("a");
  (await door.take("delete a")).answer(null);
  await removing;
  (await door.take("list")).answer(list(row("a"), row("b")));
  await refreshing;
  assert.deepEqual(shown(), ["b"]);
  chats.put(row("a"), chats.mark());
  assert.deepEqual(shown(), ["b"]);
});

test("two changes in a row are sent one after the other, and a refused one alone is taken back", async () => {
  const { door, chats, shown } = await setUp(row("a"));
  const renaming = chats.change("a", { title: "refused" });
  const pinning = chats.change("a", { pinned: true });
  assert.deepEqual(shown(), ["refused pinned"]);
  const first = await door.take("change a");
  assert.equal(door.waiting.length, 0);
  first.refuse(new ApiError(422, "invalid", "", false));
  await assert.rejects(renaming);
  assert.deepEqual(shown(), ["a pinned"]);
  (await door.take("change a")).answer(row("a", { pinned: true }));
  await pinning;
  assert.deepEqual(shown(), ["a pinned"]);
});

test("what was deleted elsewhere goes with the next list; what was begun meanwhile, and what is further down, stays", async () => {
  const old = row("old", { updated_at: "2025-01-01T00:00:00Z" });
  const { door, chats, shown } = await setUp(row("a"), row("b"), old);
  const refreshing = chats.refresh();
  chats.put(row("new"), chats.mark());
  const page = { data: [row("b"), row("c", { updated_at: "2025-06-01T00:00:00Z" })], next_cursor: "more" };
  (await door.take("list")).answer(page);
  await refreshing;
  assert.deepEqual(shown().sort(), ["b", "c", "new", "old"]);
  chats.put(row("a"), chats.mark()); // it was looked for by its address, and is there
  const again = chats.refresh();
  (await door.take("list")).answer(page);
  await again;
  assert.ok(shown().includes("a"));
});
