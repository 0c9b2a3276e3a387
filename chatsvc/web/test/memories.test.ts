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

const gone = (): Promise<never> => Promise.reject(new ApiError(404, "not_found", "There is no such memory.", false));

test("a memory that another device deleted is not there any more, and its new wording is kept", async () => {
  let stored: Memory[] = [
    { id: "1", text: "one" },
    { id: "2", text: "two" },
  ];
  const client: Partial<Client> = { memories: () => Promise.resolve({ data: stored }), changeMemory: gone, deleteMemory: gone };
  const memories = new Memories(client as Client, signal<Me | null>(null));
  await memories.show();
  stored = [];
  assert.equal(await memories.remove("1"), true);
  assert.equal(memories.trouble.value, null);
  assert.deepEqual(memories.list.value, [{ id: "2", text: "two" }]);
  memories.editing.value = { id: "2", text: "three" };
  await memories.reword();
  assert.deepEqual(memories.list.value, []);
  assert.match(memories.trouble.value ?? "", /deleted meanwhile/);
  assert.equal(memories.editing.value, null);
  assert.equal(memories.draft.value, "three");
});

test("a memory is stored once, and the same words again are not sent", async () => {
  const sent: string[] = [];
  let refused = true;
  const client: Partial<Client> = {
    memories: () => (refused ? Promise.reject(new ApiError(503, "", "", true)) : Promise.resolve({ data: [{ id: "1", text: "one" }] })),
    addMemory: (text) => {
      sent.push(text);
      return Promise.resolve({ id: "1", text });
    },
    changeMemory: (_, text) => {
      sent.push(text);
      return Promise.resolve({ id: "1", text });
    },
  };
  const memories = new Memories(client as Client, signal<Me | null>(null));
  assert.equal(await memories.show(), false);
  refused = false;
  memories.draft.value = "one";
  assert.deepEqual(await Promise.all([memories.add(), memories.add()]), [true, false]);
  // What was not fetched yet is fetched, not made up of the one that is known.
  assert.deepEqual(memories.list.value, [{ id: "1", text: "one" }]);
  memories.editing.value = { id: "1", text: " one " };
  assert.equal(await memories.reword(), true);
  assert.equal(memories.editing.value, null);
  assert.deepEqual(sent, ["one"]);
});

test("memories follow one another while the list is slow, and an answer from before does not take them away", async () => {
  const stored: Memory[] = [];
  const answers: (() => void)[] = [];
  const client: Partial<Client> = {
    memories: () => {
      const data = [...stored];
      return new Promise((resolve) => answers.push(() => resolve({ data })));
    },
    addMemory: (text) => {
      stored.push({ id: text, text });
      return Promise.resolve({ id: text, text });
    },
  };
  const memories = new Memories(client as Client, signal<Me | null>(null));
  const adding = [memories.show()];
  for (const text of ["one", "two"]) {
    memories.draft.value = text;
    adding.push(memories.add());
    await new Promise((resolve) => setTimeout(resolve));
    assert.equal(memories.draft.value, "");
  }
  for (const answer of answers.toReversed()) answer();
  assert.deepEqual(await Promise.all(adding), [true, true, true]);
  assert.deepEqual(memories.list.value, stored);
  adding.push(memories.show());
  memories.draft.value = "three";
  await memories.add();
  for (const answer of answers) answer();
  await Promise.all(adding);
  assert.deepEqual(memories.list.value, stored);
});
