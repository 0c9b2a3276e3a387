// The list of conversations: pages fetched as they are needed, kept in the order the sidebar shows.
//
// An answer tells how things were when it was asked for, or later. So one that was under way while a row was changed here
// says nothing about that row; what is deleted does not come back; and changes on their way lie over what is known.

import { computed, signal, type ReadonlySignal, type Signal } from "@preact/signals";
import type { Client } from "../api/client.ts";
import type { ConversationRow } from "../api/types.ts";

const PAGE = 100;
const REFRESH = 30;

export type RowChanges = Partial<Pick<ConversationRow, "title" | "pinned">>;

/** The moment a call goes out: its answer is older than every change made here after it. */
export type Mark = number;

/** A row with the instant of its last activity, read once: ten thousand rows are sorted often. */
interface Entry {
  readonly row: ConversationRow;
  readonly time: number;
}

const sidebarOrder = (a: Entry, b: Entry): number =>
  Number(b.row.pinned) - Number(a.row.pinned) || b.time - a.time || (a.row.id < b.row.id ? 1 : -1);

/** Made, but nothing was ever said in it: its first message was refused, or is on its way. Not worth a line. */
const isEmpty = ({ row }: Entry): boolean => row.head_message_id === null && row.title === null && !row.pinned;

export class Chats {
  /** As the server told last. */
  private readonly byId: Signal<ReadonlyMap<string, Entry>> = signal(new Map());
  /** Changes that the server has not answered yet, in their order. */
  private readonly underWay: Signal<ReadonlyMap<string, readonly RowChanges[]>> = signal(new Map());
  private readonly cursor: Signal<string | null> = signal(null);
  private readonly touched = new Map<string, Mark>();
  private readonly deleted = new Set<string>();
  private readonly unlisted = new Set<string>();
  private readonly queues = new Map<string, Promise<unknown>>();
  private changes: Mark = 0;
  private loadingMore: Promise<void> | null = null;
  readonly started = signal(false);
  readonly rows: ReadonlySignal<readonly ConversationRow[]> = computed(() =>
    [...this.byId.value.values()]
      .map((entry) => this.withChanges(entry))
      .filter((entry) => !isEmpty(entry))
      .sort(sidebarOrder)
      .map((entry) => entry.row),
  );
  readonly complete: ReadonlySignal<boolean> = computed(() => this.started.value && this.cursor.value === null);

  constructor(private readonly client: Client) {}

  /** The row as it is shown. */
  find(id: string | null): ConversationRow | undefined {
    const entry = id === null ? undefined : this.byId.value.get(id);
    return entry && this.withChanges(entry).row;
  }

  /** Fetch the next page; while one is on its way the same promise is returned. */
  loadMore(): Promise<void> {
    if (this.complete.value) return Promise.resolve();
    this.loadingMore ??= this.fetchPage().finally(() => {
      this.loadingMore = null;
    });
    return this.loadingMore;
  }

  /** Fetch what is newest again, for changes made elsewhere. */
  async refresh(): Promise<void> {
    if (!this.started.value) return this.loadMore();
    const asked = this.mark();
    const known = this.byId.peek();
    const page = await this.client.conversations(null, REFRESH);
    const oldest = page.next_cursor === null ? -Infinity : Date.parse(page.data.at(-1)?.updated_at ?? "");
    const listed = new Set(page.data.map(({ id }) => id));
    // Known when we asked, unchanged since, and not where it would have to be: deleted elsewhere. One that is opened
    // after that exists all the same (temporary ones are not listed), and stays.
    for (const [id, entry] of known) {
      if (entry.time <= oldest || listed.has(id) || this.unlisted.has(id) || this.byId.peek().get(id) !== entry) continue;
      this.unlisted.add(id);
      this.forget(id);
    }
    this.merge(page.data, asked);
  }

  mark(): Mark {
    return this.changes;
  }

  /** Take a row from an answer that was asked for at `asked`. Returns it as it holds now. */
  put(row: ConversationRow, asked: Mark): ConversationRow {
    this.merge([row], asked);
    return this.find(row.id) ?? row;
  }

  /** Change title or pin; shown at once, taken back when the server refuses. One after the other for each row. */
  change(id: string, changes: RowChanges): Promise<void> {
    this.overlay(id, (list) => [...list, changes]);
    const before = this.queues.get(id) ?? Promise.resolve();
    const done = before.then(() => this.send(id, changes));
    const settled = done.catch(() => undefined); // the next one waits for the end of this one, whichever it is
    this.queues.set(id, settled);
    void settled.then(() => {
      if (this.queues.get(id) === settled) this.queues.delete(id);
    });
    return done;
  }

  async remove(id: string): Promise<void> {
    await this.client.deleteConversation(id);
    this.deleted.add(id);
    this.forget(id);
  }

  private forget(id: string): void {
    const next = new Map(this.byId.peek());
    next.delete(id);
    this.byId.value = next;
  }

  private async send(id: string, changes: RowChanges): Promise<void> {
    try {
      const row = await this.client.changeConversation(id, changes);
      this.changes += 1;
      this.touched.set(id, this.changes);
      this.merge([row], this.changes);
    } finally {
      this.overlay(id, (list) => list.filter((other) => other !== changes));
    }
  }

  private overlay(id: string, edit: (list: readonly RowChanges[]) => readonly RowChanges[]): void {
    const next = new Map(this.underWay.peek());
    const list = edit(next.get(id) ?? []);
    if (list.length > 0) next.set(id, list);
    else next.delete(id);
    this.underWay.value = next;
  }

  private withChanges(entry: Entry): Entry {
    const changes = this.underWay.value.get(entry.row.id);
    return changes ? { ...entry, row: Object.assign({}, entry.row, ...changes) as ConversationRow } : entry;
  }

  private async fetchPage(): Promise<void> {
    const asked = this.mark();
    const page = await this.client.conversations(this.cursor.value, PAGE);
    this.merge(page.data, asked);
    this.cursor.value = page.next_cursor;
    this.started.value = true;
  }

  private isNews(id: string, asked: Mark): boolean {
    return !this.deleted.has(id) && (this.touched.get(id) ?? 0) <= asked;
  }

  private merge(rows: readonly ConversationRow[], asked: Mark): void {
    const known = this.byId.peek();
    const changed = rows.filter((row) => this.isNews(row.id, asked) && !sameRow(known.get(row.id)?.row, row));
    if (changed.length === 0) return;
    const next = new Map(known);
    for (const row of changed) next.set(row.id, { row, time: Date.parse(row.updated_at) });
    this.byId.value = next;
  }
}

function sameRow(a: ConversationRow | undefined, b: ConversationRow): boolean {
  if (a === undefined || (a.head_message_id === null) !== (b.head_message_id === null)) return false;
  return a.title === b.title && a.pinned === b.pinned && a.updated_at === b.updated_at;
}
