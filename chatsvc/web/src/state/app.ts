// Everything the page holds, put together in one place and handed to the views.

import { effect, signal, untracked, type Signal } from "@preact/signals";
import { ApiError, Client } from "../api/client.ts";
import { limitsOf, type Limits } from "../api/limits.ts";
import type { ConversationRow, Me, Model } from "../api/types.ts";
import { Markdown } from "../text/markdown.ts";
import { Sanitiser } from "../text/sanitise.ts";
import { browserSurroundings } from "./browser.ts";
import { Chats, type Mark } from "./chats.ts";
import { summaryDraft } from "./contexts.ts";
import { Drafts, openStorage } from "./drafts.ts";
import { Memories } from "./memories.ts";
import { Notices } from "./notices.ts";
import { Pulse } from "./pulse.ts";
import { Router } from "./router.ts";
import { applyTheme, nextTheme, readTheme, THEME_KEY, type Theme } from "./theme.ts";
import { Thread } from "./thread.ts";

const OUTDATED = new Set(["conversation_busy", "not_found", "unknown_parent"]);

export class App {
  readonly client: Client;
  readonly chats: Chats;
  readonly drafts: Drafts;
  readonly notices = new Notices();
  readonly router: Router;
  readonly markdown = new Markdown();
  readonly sanitiser: Sanitiser;
  readonly pulse: Pulse;
  readonly thread: Signal<Thread>;
  readonly me: Signal<Me | null> = signal(null);
  /** What is left of the caller's budget; null where there is none, or nothing was told yet. */
  readonly limits: Signal<Limits | null> = signal(null);
  /** Those that can be chosen. */
  readonly models: Signal<readonly Model[]> = signal([]);
  readonly memories: Memories;
  readonly theme: Signal<Theme>;
  /** The sidebar on narrow screens. */
  readonly drawer: Signal<boolean> = signal(false);
  private readonly surroundings;
  private readonly storage: Storage | null;
  private knowing: Promise<unknown> | null = null;

  constructor(private readonly window: Window & typeof globalThis) {
    this.storage = openStorage(window);
    this.client = new Client(window.document.baseURI);
    this.client.onLimits = (limits) => {
      this.limits.value = limits;
    };
    this.chats = new Chats(this.client);
    this.memories = new Memories(this.client, this.me);
    this.drafts = new Drafts(this.storage);
    this.router = new Router(window.document.baseURI, window);
    this.sanitiser = new Sanitiser(window);
    this.surroundings = browserSurroundings(window);
    this.theme = signal(readTheme(this.storage));
    this.thread = signal(this.makeThread(this.router.conversation.peek()));
    this.pulse = new Pulse(window, () => this.catchUp());
  }

  start(): void {
    effect(() => {
      const id = this.router.conversation.value;
      untracked(() => this.show(id));
    });
    effect(() => {
      this.window.document.title = this.thread.value.title.value ?? "Chat";
    });
    let reach = this.pulse.reach.peek();
    effect(() => {
      const before = reach;
      reach = this.pulse.reach.value;
      if (reach === "reached" && before !== reach) untracked(() => this.back());
    });
    effect(() => {
      if (this.thread.value.replies.open.value) untracked(() => this.pulse.sign());
    });
    let wasRunning = false;
    effect(() => {
      const running = this.thread.value.running.value !== null;
      if (wasRunning && !running) untracked(() => this.ended());
      wasRunning = running;
    });
    void this.thread.peek().load();
    this.fetchMoreChats();
    void this.attempt(() => this.getToKnow());
    this.pulse.now();
  }

  /** Do what a person asked for. A refusal becomes a notice; success is told to the other windows. True when it went well. */
  readonly act = async (action: () => Promise<unknown>, retry?: () => void): Promise<boolean> => {
    this.notices.clear();
    const done = await this.attempt(action, retry);
    if (done) {
      this.pulse.tell();
      // The server may have more to say about what was done: a title, an order.
      this.pulse.now();
    }
    return done;
  };

  /** The server is back, perhaps as another version of itself. */
  private back(): void {
    this.thread.value.replies.renew();
    void this.attempt(() => this.getToKnow());
  }

  /** Learn who this is and which models there are. */
  private getToKnow(): Promise<unknown> {
    this.knowing ??= Promise.all([this.meet(), this.fetchModels()]).finally(() => {
      this.knowing = null;
    });
    return this.knowing;
  }

  private async fetchModels(): Promise<void> {
    this.models.value = (await this.client.models()).data;
  }

  private async meet(): Promise<void> {
    this.me.value = await this.client.me();
    this.limits.value = limitsOf(this.me.value);
  }

  private ended(): void {
    this.notices.outdate("running");
    // What a reply has cost is known at its end.
    if (this.limits.peek()) void this.attempt(() => this.meet());
  }

  private async attempt(action: () => Promise<unknown>, retry?: () => void): Promise<boolean> {
    try {
      await action();
      return true;
    } catch (error) {
      this.notices.report(error, retry);
      if (error instanceof ApiError && error.code === "unreachable") this.pulse.now();
      // What was refused rests on an old view of the conversation: a reply from another window, a deletion.
      if (error instanceof ApiError && OUTDATED.has(error.code)) void this.thread.peek().load();
      return false;
    }
  }

  readonly fetchMoreChats = (): void => void this.attempt(() => this.chats.loadMore());

  newChat(): void {
    this.drawer.value = false;
    if (this.thread.peek().id.peek() === null) return;
    this.router.go(null);
  }

  cycleTheme(): void {
    const theme = nextTheme(this.theme.value);
    this.theme.value = theme;
    applyTheme(this.window.document.documentElement, theme);
    if (theme === "system") this.storage?.removeItem(THEME_KEY);
    else this.storage?.setItem(THEME_KEY, theme);
  }

  async deleteChat(id: string): Promise<void> {
    await this.chats.remove(id);
    this.drafts.set(id, "");
    this.drafts.set(summaryDraft(id), "");
    if (this.thread.peek().id.peek() === id) this.router.go(null, "replace");
  }

  private show(id: string | null): void {
    const current = this.thread.peek();
    if (current.id.peek() === id) return;
    current.dispose();
    this.notices.clear();
    const thread = this.makeThread(id);
    this.thread.value = thread;
    void thread.load();
  }

  private makeThread(id: string | null): Thread {
    const thread = new Thread(id, {
      client: this.client,
      drafts: this.drafts,
      surroundings: this.surroundings,
      wait: (ms) => new Promise((resolve) => this.window.setTimeout(resolve, ms)),
      mark: () => this.chats.mark(),
      onChange: (row, asked) => this.changed(thread, row, asked),
    });
    return thread;
  }

  private changed(thread: Thread, row: ConversationRow, asked: Mark): ConversationRow {
    const held = this.chats.put(row, asked);
    // The first message of a new chat has given it an id; the address follows, unless the reader has moved on.
    if (this.thread.peek() === thread && this.router.conversation.peek() === null) this.router.go(row.id);
    return held;
  }

  private async catchUp(): Promise<void> {
    const shown = this.chats.find(this.thread.peek().id.peek()) !== undefined;
    await this.chats.refresh();
    this.notices.outdate("unreachable");
    // What could not be fetched at the start, and a model that was not ready then.
    if (this.me.peek() === null || this.models.peek().length === 0) await this.getToKnow();
    else if (this.models.peek().some(({ ready }) => ready === false)) await this.fetchModels();
    const thread = this.thread.peek();
    thread.contexts.beat();
    const row = this.chats.find(thread.id.peek());
    if (row) await thread.sync(row);
    else if (shown || thread.state.peek() === "failed") await thread.load(); // deleted elsewhere, or not fetched yet
  }
}
