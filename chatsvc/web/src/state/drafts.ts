// Unsent text, kept per conversation on this machine, so that a reload or a refused message loses nothing.

const PREFIX = "chatsvc:draft:";

export class Drafts {
  /** `storage` is null where the browser forbids it; drafts then live as long as the page. */
  private readonly memory = new Map<string, string>();

  constructor(private readonly storage: Storage | null) {}

  /** The draft of a conversation; null is the one not yet begun. */
  get(conversation: string | null): string {
    const key = PREFIX + (conversation ?? "new");
    return this.memory.get(key) ?? this.storage?.getItem(key) ?? "";
  }

  set(conversation: string | null, text: string): void {
    const key = PREFIX + (conversation ?? "new");
    this.memory.set(key, text);
    if (!this.storage) return;
    if (text === "") this.storage.removeItem(key);
    else writeIfRoom(this.storage, key, text);
  }
}

function writeIfRoom(storage: Storage, key: string, text: string): void {
  try {
    storage.setItem(key, text);
  } catch (error) {
    // Full storage costs the draft its survival of a reload, nothing else.
    if (!(error instanceof DOMException)) throw error;
  }
}

/** The browser's store for this origin, or null where it is forbidden (some private modes throw on mere access). */
export function openStorage(window: Window): Storage | null {
  try {
    return window.localStorage;
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}
