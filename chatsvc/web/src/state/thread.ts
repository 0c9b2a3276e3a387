// The open conversation: its tree, the branch on the screen, and what a person can do with it.

import { computed, signal, type ReadonlySignal, type Signal } from "@preact/signals";
import { ApiError, type Client } from "../api/client.ts";
import { clientMessageId } from "../api/ids.ts";
import { patiently, type Wait } from "../api/patience.ts";
import { isRunning, type Accepted, type Conversation, type ConversationRow, type Message } from "../api/types.ts";
import type { Failure, Reply } from "../stream/reducer.ts";
import { branchTo, headOrNewest, leafUnder, plant, siblingsOf, type Siblings, type Tree } from "../tree/branch.ts";
import { replyOf, userMessage } from "./accepted.ts";
import type { Mark } from "./chats.ts";
import { Contexts } from "./contexts.ts";
import type { Drafts } from "./drafts.ts";
import { LiveReplies, type LiveSurroundings } from "./replies.ts";

export type ThreadState = "new" | "loading" | "ready" | "missing" | "failed";

export interface ThreadOptions {
  readonly client: Client;
  readonly drafts: Drafts;
  readonly surroundings: LiveSurroundings;
  readonly wait: Wait;
  /** Taken when a call goes out, and handed on with what it answers. */
  mark(): Mark;
  /** The conversation came into being, was fetched, or changed by our doing. Returns its row as it holds now. */
  onChange(row: ConversationRow, asked: Mark): ConversationRow;
}

/** A message on its way to the server. */
export interface Pending {
  readonly content: string;
  readonly parent: string | null;
  readonly clientId: string;
}

export class Thread {
  /** Names this object, also before the conversation has an id. */
  readonly key = clientMessageId();
  readonly id: Signal<string | null>;
  readonly state: Signal<ThreadState>;
  readonly title: Signal<string | null> = signal(null);
  readonly pending: Signal<Pending | null> = signal(null);
  /** The message being reworded, and its new text so far. */
  readonly editing: Signal<{ readonly id: string; readonly text: string } | null> = signal(null);
  /** Where the keyboard goes when this message is drawn next: to the first of these buttons that can be pressed. */
  refocus: { readonly message: string; readonly buttons: readonly string[] } | null = null;
  /** Response that was asked to stop and has not ended yet. */
  readonly stopping: Signal<string | null> = signal(null);
  readonly failures: Signal<ReadonlyMap<string, Failure>> = signal(new Map());
  readonly replies: LiveReplies;
  readonly contexts: Contexts;
  /** The model it was told to use; null: the default one. */
  readonly model: Signal<string | null> = signal(null);
  /** A message to bring into view; each new object once. */
  readonly target: Signal<{ readonly id: string } | null> = signal(null);
  private readonly messages: Signal<ReadonlyMap<string, Message>> = signal(new Map());
  private readonly head: Signal<string | null> = signal(null);
  private readonly chosen = new Map<string | null, string>();
  private updatedAt = "";
  private busy = 0;
  private changes = 0;
  private stale = false;
  private unsent: Pending | null = null;
  /** A conversation made for a first message that was not taken: the next try goes there. */
  private made: ConversationRow | null = null;
  /** The model that it was made with. */
  private madeFor: string | null = null;
  /** Client ids of asked-for answers that were not heard to be taken: asked for once more, they are the same answers. */
  private readonly asked = new Map<string, string>();

  readonly tree: ReadonlySignal<Tree> = computed(() => plant(this.messages.value.values()));
  readonly branch: ReadonlySignal<readonly Message[]> = computed(() =>
    branchTo(this.tree.value, headOrNewest(this.tree.value, this.head.value)),
  );
  /** The reply that is running at the end of the branch. */
  readonly running: ReadonlySignal<Message | null> = computed(() => {
    const last = this.branch.value.at(-1);
    return last && isRunning(last) ? last : null;
  });

  constructor(
    id: string | null,
    private readonly options: ThreadOptions,
  ) {
    this.id = signal(id);
    this.state = signal(id === null ? "new" : "loading");
    this.replies = new LiveReplies(this.branch, {
      client: options.client,
      surroundings: options.surroundings,
      onEnd: (message, reply) => this.finish(message, reply),
      refetch: () => this.load(),
    });
    const { client, drafts } = options;
    this.contexts = new Contexts({ client, drafts, conversation: this.id, branch: this.branch, replies: this.replies });
  }

  dispose(): void {
    this.contexts.dispose();
    this.replies.dispose();
  }

  siblings(message: Message): Siblings {
    return siblingsOf(this.tree.value, message);
  }

  /** Fetch the whole conversation. Failures end up in `state`, unless there is something to show already. */
  async load(): Promise<void> {
    const id = this.id.value;
    if (id === null) return;
    const changes = this.changes;
    const asked = this.options.mark();
    try {
      const conversation = await this.options.client.conversation(id);
      // An answer from before what we did since would hide it.
      if (changes === this.changes) this.take(conversation, asked);
      else if (this.busy > 0) this.stale = true;
      else await this.load();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 404) this.vanish();
      else if (this.state.value !== "ready") this.state.value = "failed";
    }
  }

  /** Fetch again when the list says that the conversation has changed since. */
  async sync(row: ConversationRow): Promise<void> {
    if (row.id !== this.id.value) return;
    this.title.value = row.title;
    if (row.updated_at === this.updatedAt || this.state.value === "loading") return;
    if (this.busy > 0) this.stale = true;
    else await this.load();
  }

  /** Send a message to the end of the branch. Rejects with ApiError; the same text sent again is the same message. */
  send(content: string): Promise<void> {
    return this.post(content, this.branch.value.at(-1)?.id ?? null);
  }

  /** Send another wording of a message: a sibling. */
  edit(message: Message, content: string): Promise<void> {
    return this.post(content, message.parent_id);
  }

  /** Have a user message answered again: a sibling of its answer. */
  regenerate(userMessageId: string): Promise<void> {
    return this.ask(userMessageId, "", (clientId) => this.options.client.answerAgain(userMessageId, clientId));
  }

  /** Go on with a reply that broke off: a sibling that begins with its text. The broken-off one stays. */
  continueReply(reply: Message): Promise<void> {
    return this.ask(reply.id, reply.content, (clientId) => this.options.client.continueReply(reply.id, clientId));
  }

  async stop(): Promise<void> {
    const response = this.running.value?.response_id;
    if (!response || this.stopping.value === response) return;
    this.stopping.value = response;
    try {
      await patiently(() => this.options.client.stop(response), this.options.wait);
    } catch (error) {
      this.stopping.value = null;
      throw error;
    }
  }

  /** Show the branch through `messageId`, and let the server remember it. */
  async choose(messageId: string): Promise<void> {
    const id = this.id.value;
    const message = this.messages.value.get(messageId);
    if (id === null || !message) return;
    this.chosen.set(message.parent_id, messageId);
    const leaf = leafUnder(this.tree.value, messageId, this.chosen);
    this.changes += 1;
    this.head.value = leaf;
    await this.exclusively(async () => {
      const asked = this.options.mark();
      this.noteRow(await this.options.client.changeConversation(id, { head_message_id: leaf }), asked);
    });
  }

  /** Keep a message in the prompt word for word, or do so no more. Shown at once, taken back when the server refuses. */
  async pin({ id }: Message, pinned: boolean): Promise<void> {
    const mark = (value: boolean): void => {
      const message = this.messages.peek().get(id);
      if (message) this.messages.value = new Map(this.messages.peek()).set(id, { ...message, pinned: value });
    };
    this.changes += 1;
    mark(pinned);
    await this.exclusively(async () => {
      try {
        await this.options.client.pinMessage(id, pinned);
      } catch (error) {
        mark(!pinned);
        throw error;
      } finally {
        this.changes += 1; // what was asked for meanwhile may be from before
      }
    });
  }

  /** Use another model from the next message on. */
  async chooseModel(model: string | null): Promise<void> {
    const [id, before] = [this.id.peek() ?? this.made?.id ?? null, this.model.peek()];
    this.model.value = model;
    if (id === null) return;
    this.changes += 1;
    try {
      await this.exclusively(async () => void (await this.options.client.changeConversation(id, { model })));
      this.madeFor = model;
    } catch (error) {
      this.model.value = before;
      throw error;
    }
  }

  /** Bring a message into view, also one of another branch, or one that is not fetched yet. False when it is gone. */
  async reveal(id: string): Promise<boolean> {
    if (!this.messages.peek().has(id)) await this.load();
    if (!this.messages.peek().has(id)) return false;
    if (!this.branch.peek().some((message) => message.id === id)) await this.choose(id);
    this.target.value = { id };
    return true;
  }

  parentOf(id: string): string | null | undefined {
    return this.messages.value.get(id)?.parent_id;
  }

  private async ask(target: string, kept: string, call: (clientId: string) => Promise<Accepted>): Promise<void> {
    const clientId = this.asked.get(target) ?? clientMessageId();
    this.asked.set(target, clientId);
    await this.exclusively(async () => {
      const accepted = await patiently(() => call(clientId), this.options.wait);
      this.asked.delete(target);
      this.adopt([replyOf(accepted, kept)], accepted.message_id);
    });
  }

  private async post(content: string, parent: string | null): Promise<void> {
    const same = this.unsent?.content === content && this.unsent.parent === parent;
    const pending = same && this.unsent ? this.unsent : { content, parent, clientId: clientMessageId() };
    this.pending.value = pending;
    this.unsent = pending;
    try {
      await this.exclusively(async () => {
        const id = this.id.value ?? (await this.make()).id;
        const body = { content, parent_id: parent, client_msg_id: pending.clientId };
        const accepted = await patiently(() => this.options.client.send(id, body), this.options.wait);
        this.unsent = null;
        this.begin(accepted);
        const user = userMessage(accepted, content, parent);
        this.adopt([user, replyOf(accepted)], accepted.message_id);
      });
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.made = null; // gone meanwhile
      throw error;
    } finally {
      this.pending.value = null;
    }
  }

  private async make(): Promise<ConversationRow> {
    const { client } = this.options;
    if (this.made === null) {
      const model = this.model.peek();
      this.made = await client.createConversation(model);
      this.madeFor = model;
    }
    const model = this.model.peek();
    if (model !== this.madeFor) {
      // Chosen while it was being made.
      await client.changeConversation(this.made.id, { model });
      this.madeFor = model;
    }
    return this.made;
  }

  /** A new conversation has its first message: now it is one to show, list and come back to. */
  private begin(accepted: Accepted): void {
    if (this.made === null) return;
    const row = this.made;
    this.made = null;
    this.id.value = row.id;
    this.state.value = "ready";
    this.noteRow({ ...row, head_message_id: accepted.message_id }, this.options.mark());
  }

  /** While a call of ours is on its way, news from elsewhere wait: they would show what we are about to add twice. */
  private async exclusively(work: () => Promise<void>): Promise<void> {
    this.busy += 1;
    try {
      await work();
    } finally {
      this.busy -= 1;
      if (this.busy === 0 && this.stale) {
        this.stale = false;
        void this.load();
      }
    }
  }

  private take(conversation: Conversation, asked: Mark): void {
    this.noteRow(conversation, asked);
    const known = this.messages.peek();
    const next = new Map<string, Message>();
    for (const message of conversation.messages) next.set(message.id, this.newest(message));
    this.messages.value = next;
    // A head that was there before is another window's looking around; a new one is something that was said.
    const head = conversation.head_message_id;
    if (!known.has(head ?? "") || !next.has(this.head.peek() ?? "")) this.head.value = head;
    this.model.value = conversation.model ?? null;
    this.state.value = "ready";
  }

  /**
   * An answer that was under way when its reply ended must not bring the running reply back; and the store learns what a
   * continued reply begins with only when it is being written.
   */
  private newest(incoming: Message): Message {
    const known = this.messages.peek().get(incoming.id);
    if (!isRunning(incoming) || !known || known.response_id !== incoming.response_id) return incoming;
    return isRunning(known) ? { ...incoming, content: incoming.content || known.content } : known;
  }

  private noteRow({ id, title, pinned, head_message_id, created_at, updated_at }: ConversationRow, asked: Mark): void {
    this.updatedAt = updated_at;
    this.title.value = this.options.onChange({ id, title, pinned, head_message_id, created_at, updated_at }, asked).title;
  }

  /** It was deleted elsewhere, or never was: nothing of it stays on the screen. */
  private vanish(): void {
    this.messages.value = new Map();
    this.state.value = "missing";
  }

  private adopt(added: readonly Message[], head: string): void {
    const next = new Map(this.messages.value);
    for (const message of added) if (!next.has(message.id)) next.set(message.id, message);
    this.messages.value = next;
    this.head.value = head;
    this.changes += 1;
  }

  private finish(message: Message, reply: Reply): void {
    if (this.stopping.value === message.response_id) this.stopping.value = null;
    if (message.response_id !== null) this.contexts.ended(message.response_id, reply.used);
    if (reply.failure) this.failures.value = new Map(this.failures.value).set(message.id, reply.failure);
    const ended: Message = {
      ...(this.messages.peek().get(message.id) ?? message),
      content: reply.text,
      status: reply.phase === "failed" ? "failed" : reply.phase === "stopped" ? "stopped" : "complete",
      model: reply.model ?? message.model,
      degraded: reply.degraded.length > 0 ? reply.degraded : (message.degraded ?? []),
      finish_reason: reply.finishReason,
      tokens: reply.outputTokens,
      error_code: reply.failure?.code ?? reply.errorCode,
    };
    this.messages.value = new Map(this.messages.value).set(message.id, ended);
  }
}
