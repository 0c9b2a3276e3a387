import assert from "node:assert/strict";
import { test } from "node:test";
import type { Message } from "../src/api/types.ts";
import { branchTo, headOrNewest, leafUnder, plant, siblingsOf } from "../src/tree/branch.ts";

function message(id: string, parent: string | null, role: Message["role"], second: number): Message {
  return {
    id,
    parent_id: parent,
    role,
    content: id,
    status: "complete",
    model: null,
    response_id: null,
    finish_reason: null,
    tokens: null,
    degraded: [],
    created_at: new Date(Date.UTC(2026, 0, 1, 0, 0, second)).toISOString(),
  };
}

// u1 ─ a1 ─ u2 ─ a2
//    │        └─ a2b
//    └ a1b ─ u3
// u1b (an edit of u1)
const MESSAGES = [
  message("u1", null, "user", 1),
  message("a1", "u1", "assistant", 2),
  message("u2", "a1", "user", 3),
  message("a2", "u2", "assistant", 4),
  message("a2b", "u2", "assistant", 5),
  message("a1b", "u1", "assistant", 6),
  message("u3", "a1b", "user", 7),
  message("u1b", null, "user", 8),
];
const tree = plant([...MESSAGES].reverse());
const ids = (messages: Message[]): string[] => messages.map((one) => one.id);
const get = (id: string): Message => tree.byId.get(id) as Message;

test("a branch is the path from the root to its leaf", () => {
  assert.deepEqual(ids(branchTo(tree, "a2")), ["u1", "a1", "u2", "a2"]);
  assert.deepEqual(branchTo(tree, "unknown"), []);
  assert.deepEqual(branchTo(tree, null), []);
});

test("the leaf under a message is the newest, unless another was chosen", () => {
  assert.equal(leafUnder(tree, "a1"), "a2b");
  assert.equal(leafUnder(tree, "u1"), "u3");
  assert.equal(leafUnder(tree, "u1", new Map([["u1", "a1"], ["u2", "a2"]])), "a2");
});

test("without a stored head the newest root is shown; with one, its branch to the end", () => {
  assert.equal(headOrNewest(tree, null), "u1b");
  assert.equal(headOrNewest(tree, "deleted"), "u1b");
  assert.equal(headOrNewest(tree, "u2"), "a2b");
  assert.equal(headOrNewest(plant([]), null), null);
});

test("siblings are counted in the order they were made, within one role", () => {
  assert.deepEqual(siblingsOf(tree, get("a2b")), { position: 2, count: 2, previous: "a2", next: null });
  assert.deepEqual(siblingsOf(tree, get("u1")), { position: 1, count: 2, previous: null, next: "u1b" });
  assert.equal(siblingsOf(tree, get("u3")).count, 1);
});

test("times are compared as times, whatever zone and digits they are written with", () => {
  const at = (id: string, created_at: string): Message => ({ ...message(id, null, "user", 1), created_at });
  const made = [at("c", "2026-01-01T00:00:02Z"), at("b", "2026-01-01T00:00:01.25Z"), at("a", "2026-01-01T01:00:00.5+01:00")];
  assert.deepEqual(ids([...(plant(made).children.get(null) ?? [])]), ["a", "b", "c"]);
});

test("a message whose parent is missing is shown as a root, and a ring does not hang the page", () => {
  const lost = plant([message("orphan", "gone", "user", 1)]);
  assert.deepEqual(ids(branchTo(lost, "orphan")), ["orphan"]);
  const ring = plant([message("p", "q", "user", 1), message("q", "p", "assistant", 2)]);
  assert.equal(branchTo(ring, "p").length, 2);
});
