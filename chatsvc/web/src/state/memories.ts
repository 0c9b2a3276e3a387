// What the model is told about the user in every conversation: theirs to list, reword and delete.

import { signal, type Signal } from "@preact/signals";
import { ApiError, type Client } from "../api/client.ts";
import type { Me, Memory } from "../api/types.ts";
import { explain } from "./notices.ts";

export class Memories {
  readonly open: Signal<boolean> = signal(false);
  /** Oldest first; null until they were fetched. */
  readonly list: Signal<readonly Memory[] | null> = signal(null);
  /** What was refused last, in words. */
  readonly trouble: Signal<string | null> = signal(null);
  /** A memory that is being written and not stored yet. */
  readonly draft: Signal<string> = signal("");
  readonly editing: Signal<{ readonly id: string; readonly text: string } | null> = signal(null);

  constructor(
    private readonly client: Client,
    private readonly me: Signal<Me | null>,
  ) {}

  show(): Promise<boolean> {
    this.open.value = true;
    return this.attempt(async () => {
      this.list.value = (await this.client.memories()).data;
    });
  }

  turn(on: boolean): Promise<boolean> {
    return this.attempt(async () => {
      this.me.value = await this.client.changeMe({ memory: on });
    });
  }

  add(): Promise<boolean> {
    const text = this.draft.peek();
    return this.attempt(async () => {
      const memory = await this.client.addMemory(text.trim());
      this.put((list) => [...list, memory]);
      if (this.draft.peek() === text) this.draft.value = "";
    });
  }

  reword(): Promise<boolean> {
    const edit = this.editing.peek();
    if (!edit) return Promise.resolve(false);
    return this.attempt(async () => {
      const memory = await this.client.changeMemory(edit.id, edit.text.trim());
      this.put((list) => list.map((other) => (other.id === edit.id ? memory : other)));
      if (this.editing.peek() === edit) this.editing.value = null;
    });
  }

  remove(id: string): Promise<boolean> {
    return this.attempt(async () => {
      await this.client.deleteMemory(id);
      this.put((list) => list.filter((other) => other.id !== id));
    });
  }

  private put(change: (list: readonly Memory[]) => readonly Memory[]): void {
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
