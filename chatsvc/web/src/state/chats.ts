// The list of conversations: pages fetched as they are needed, kept in the order the sidebar shows.

import { computed, signal, type ReadonlySignal, type Signal } from "@preact/signals";
import type { Client } from "../api/client.ts";
import type { ConversationRow } from "../api/types.ts";

const PAGE = 100;
const REFRESH = 30;

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
  private readonly byId: Signal<ReadonlyMap<string, Entry>> = signal(new Map());
  private readonly cursor: Signal<string | null> = signal(null);
  private loadingMore: Promise<void> | null = null;
  readonly started = signal(false);
  readonly rows: ReadonlySignal<readonly ConversationRow[]> = computed(() =>
    [...this.byId.value.values()].filter((entry) => !isEmpty(entry)).sort(sidebarOrder).map((entry) => entry.row),
  );
  readonly complete: ReadonlySignal<boolean> = computed(() => this.started.value && this.cursor.value === null);

  constructor(private readonly client: Client) {}

  find(id: string | null): ConversationRow | undefined {
    return id === null ? undefined : this.byId.value.get(id)?.row;
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
    const page = await this.client.conversations(null, REFRESH);
    this.merge(page.data);
  }

  put(row: ConversationRow): void {
    this.merge([row]);
  }

  /** Change title or pin; shown at once, taken back when the server refuses. */
  async change(id: string, changes: Partial<Pick<ConversationRow, "title" | "pinned">>): Promise<void> {
    const before = this.find(id);
    if (!before) return;
    this.put({ ...before, ...changes });
    try {
      this.put({ ...before, ...(await this.client.changeConversation(id, changes)) });
    } catch (error) {
      this.put(before);
      throw error;
    }
  }

  async remove(id: string): Promise<void> {
    await this.client.deleteConversation(id);
    this.forget(id);
  }

  forget(id: string): void {
    const next = new Map(this.byId.value);
    next.delete(id);
    this.byId.value = next;
  }

  private async fetchPage(): Promise<void> {
    const page = await this.client.conversations(this.cursor.value, PAGE);
    this.merge(page.data);
    this.cursor.value = page.next_cursor;
    this.started.value = true;
  }

  private merge(rows: readonly ConversationRow[]): void {
    const changed = rows.filter((row) => !sameRow(this.find(row.id), row));
    if (changed.length === 0) return;
    const next = new Map(this.byId.value);
    for (const row of changed) next.set(row.id, { row, time: Date.parse(row.updated_at) });
    this.byId.value = next;
  }
}

function sameRow(a: ConversationRow | undefined, b: ConversationRow): boolean {
  if (a === undefined || (a.head_message_id === null) !== (b.head_message_id === null)) return false;
  return a.title === b.title && a.pinned === b.pinned && a.updated_at === b.updated_at;
}
