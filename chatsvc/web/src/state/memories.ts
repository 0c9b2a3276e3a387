// What the model is told about the user in every conversation: theirs to list, reword and delete.

import { signal, type Signal } from "@preact/signals";
import { ApiError, type Client } from "../api/client.ts";
import type { Me, Memory } from "../api/types.ts";
import { explain } from "./notices.ts";

const isGone = (error: unknown): boolean => error instanceof ApiError && error.status === 404;

export class Memories {
  readonly open: Signal<boolean> = signal(false);
  /** Oldest first; null until they were fetched. */
  readonly list: Signal<readonly Memory[] | null> = signal(null);
  /** What was refused last, in words. */
  readonly trouble: Signal<string | null> = signal(null);
  /** A memory that is being written and not stored yet. */
  readonly draft: Signal<string> = signal("");
  readonly editing: Signal<{ readonly id: string; readonly text: string } | null> = signal(null);
  /** Whether what was written is on its way: sent twice it would be stored twice. */
  readonly adding: Signal<boolean> = signal(false);
  /** How many times the list was asked for, and the last of them, or change of the list, that is shown. */
  private asked = 0;
  private shown = 0;

  constructor(
    private readonly client: Client,
    private readonly me: Signal<Me | null>,
  ) {}

  show(): Promise<boolean> {
    this.open.value = true;
    return this.attempt(() => this.fetch());
  }

  turn(on: boolean): Promise<boolean> {
    return this.attempt(async () => {
      this.me.value = await this.client.changeMe({ memory: on });
    });
  }

  async add(): Promise<boolean> {
    if (this.adding.peek()) return false;
    const text = this.draft.peek();
    this.adding.value = true;
    return this.attempt(async () => {
      // Once it is stored the next one may follow, whatever the list still waits for.
      const memory = await this.client.addMemory(text.trim()).finally(() => (this.adding.value = false));
      if (this.draft.peek() === text) this.draft.value = "";
      if (this.list.peek() === null) await this.fetch();
      else this.put((list) => [...list, memory]);
    });
  }

  reword(): Promise<boolean> {
    const edit = this.editing.peek();
    if (!edit) return Promise.resolve(false);
    const text = edit.text.trim();
    return this.attempt(async () => {
      // The same words once more would count as new ones, and be gone from running conversations for a while.
      if (this.list.peek()?.find(({ id }) => id === edit.id)?.text !== text) await this.store(edit.id, text);
      if (this.editing.peek() === edit) this.editing.value = null;
    });
  }

  remove(id: string): Promise<boolean> {
    return this.attempt(async () => {
      try {
        await this.client.deleteMemory(id);
      } catch (error) {
        if (!isGone(error)) throw error; // gone is what it was to be
      }
      this.put((list) => list.filter((other) => other.id !== id));
    });
  }

  private async fetch(): Promise<void> {
    const asked = (this.asked += 1);
    const { data } = await this.client.memories();
    if (asked <= this.shown) return; // it was asked for before what is shown
    this.shown = asked;
    this.list.value = data;
  }

  private async store(id: string, text: string): Promise<void> {
    try {
      const memory = await this.client.changeMemory(id, text);
      this.put((list) => list.map((other) => (other.id === id ? memory : other)));
    } catch (error) {
      if (!isGone(error)) throw error;
      if (this.draft.peek() === "") this.draft.value = text;
      await this.fetch();
      this.trouble.value = "This memory was deleted meanwhile. To have it again, add it as a new one.";
    }
  }

  private put(change: (list: readonly Memory[]) => readonly Memory[]): void {
    this.shown = this.asked;
    this.list.value = change(this.list.peek() ?? []);
  }

  private async attempt(action: () => Promise<void>): Promise<boolean> {
    this.trouble.value = null;
    try {
      await action();
      return true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.trouble.value = explain(error);
      return false;
    }
  }
}
