// A conversation is a tree that only stores parents; what is shown is one path from a root to a leaf. Pure.

import type { Message } from "../api/types.ts";

export interface Tree {
  readonly byId: ReadonlyMap<string, Message>;
  /** Children in the order they were made; roots under null. */
  readonly children: ReadonlyMap<string | null, readonly Message[]>;
}

export interface Siblings {
  /** From 1. */
  readonly position: number;
  readonly count: number;
  readonly previous: string | null;
  readonly next: string | null;
}

const older = (a: Message, b: Message): number =>
  Date.parse(a.created_at) - Date.parse(b.created_at) || (a.id < b.id ? -1 : 1);

/** Index the messages. A message whose parent is not among them counts as a root, so that nothing is hidden. */
export function plant(messages: Iterable<Message>): Tree {
  const byId = new Map<string, Message>();
  for (const message of messages) byId.set(message.id, message);
  const children = new Map<string | null, Message[]>();
  for (const message of byId.values()) {
    const parent = message.parent_id !== null && byId.has(message.parent_id) ? message.parent_id : null;
    const list = children.get(parent);
    if (list) list.push(message);
    else children.set(parent, [message]);
  }
  for (const list of children.values()) list.sort(older);
  return { byId, children };
}

/** The path from the root to `leaf`, both included; empty when there is no such message. */
export function branchTo(tree: Tree, leaf: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>();
  let current = leaf === null ? undefined : tree.byId.get(leaf);
  while (current && !seen.has(current.id)) {
    seen.add(current.id);
    path.push(current);
    current = current.parent_id === null ? undefined : tree.byId.get(current.parent_id);
  }
  return path.reverse();
}

/** The leaf reached from `start` by following `chosen` children where known, else the newest. */
export function leafUnder(tree: Tree, start: string | null, chosen: ReadonlyMap<string | null, string> = new Map()): string | null {
  let current = start;
  for (;;) {
    const list = tree.children.get(current);
    if (!list || list.length === 0) return current;
    const wanted = chosen.get(current);
    const next = list.find((message) => message.id === wanted) ?? list[list.length - 1];
    if (!next) return current;
    current = next.id;
  }
}

/** The leaf to show when the stored head is missing: the newest message's own branch. */
export function headOrNewest(tree: Tree, head: string | null): string | null {
  if (head !== null && tree.byId.has(head)) return leafUnder(tree, head);
  return leafUnder(tree, null);
}

/** Where a message stands among the alternatives that share its parent and role. */
export function siblingsOf(tree: Tree, message: Message): Siblings {
  const parent = message.parent_id !== null && tree.byId.has(message.parent_id) ? message.parent_id : null;
  const list = (tree.children.get(parent) ?? []).filter((other) => other.role === message.role);
  const index = list.findIndex((other) => other.id === message.id);
  return {
    position: index + 1,
    count: list.length,
    previous: list[index - 1]?.id ?? null,
    next: list[index + 1]?.id ?? null,
  };
}
