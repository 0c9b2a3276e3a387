import assert from "node:assert/strict";
import { test } from "node:test";
import { signal } from "@preact/signals";
import { ApiError, type Client } from "../src/api/client.ts";
import type { Me, Memory } from "../src/api/types.ts";
import { Memories } from "../src/state/memories.ts";

test("memories are added, reworded and deleted; what was refused is said, and what was written is kept", async () => {
  const me = signal<Me | null>({ user: { id: "a" }, tier: "free", memory: false });
  const stored: Memory[] = [{ id: "1", text: "one" }];
  let full = true;
  const client: Partial<Client> = {
    memories: () => Promise.resolve({ data: stored }),
    addMemory: (text) => {
      if (full) return Promise.reject(new ApiError(422, "memory_full", "You have 50 memories, and 50 are allowed.", false));
      return Promise.resolve({ id: "2", text });
    },
    changeMemory: (id, text) => Promise.resolve({ id, text }),
    deleteMemory: () => Promise.resolve(null),
    changeMe: ({ memory }) => Promise.resolve({ user: { id: "a" }, tier: "free", memory }),
  };
  const memories = new Memories(client as Client, me);
  const texts = (): string[] => (memories.list.value ?? []).map(({ text }) => text);
  await memories.show();
  assert.deepEqual(texts(), ["one"]);
  memories.draft.value = " two ";
  assert.equal(await memories.add(), false);
  assert.equal(memories.trouble.value, "You have 50 memories, and 50 are allowed.");
  assert.equal(memories.draft.value, " two ");
  full = false;
  assert.equal(await memories.add(), true);
  assert.equal(memories.trouble.value, null);
  assert.equal(memories.draft.value, "");
  memories.editing.value = { id: "1", text: "three" };
  await memories.reword();
  assert.equal(memories.editing.value, null);
  assert.deepEqual(texts(), ["three", "two"]);
  await memories.remove("1");
  assert.deepEqual(texts(), ["two"]);
  await memories.turn(true);
  assert.equal(me.value?.memory, true);
});
