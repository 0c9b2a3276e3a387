// What the model is given of the open conversation: the summary at its fold, and what each reply's prompt was made of.
//
// None of this is needed to read or write, so a call that fails is not told: what was asked for is asked for again when
// it is next wanted.

import { computed, effect, signal, untracked, type ReadonlySignal, type Signal } from "@preact/signals";
import { ApiError, type Client } from "../api/client.ts";
import { isRunning, type Message, type Summary } from "../api/types.ts";
import { readUsed, type Used } from "../stream/used.ts";
import type { Drafts } from "./drafts.ts";
import type { LiveReplies } from "./replies.ts";

/** A conversation of one turn has nothing that could be folded. */
const SHORTEST_FOLDED = 3;

/** Replies after which a fold is likely had at least this share of the window in their prompt. */
const FOLDS_FROM = 0.4;
/** For so many beats after such a reply it is looked whether there was one, ever more seldom: a fold may take minutes. */
const BEATS = 100;

/** A rewriting of a summary: the last message and the version of the one that was read when it began, and the new text. */
export interface Draft {
  readonly through: string;
  readonly version: number;
  readonly text: string;
}

/** Under which name the drafts of a conversation's summaries are kept beside the drafts of messages. */
export const summaryDraft = (conversation: string): string => `${conversation}#summary`;

const isDraft = ({ through, version, text }: Partial<Draft>): boolean =>
  typeof through === "string" && typeof version === "number" && typeof text === "string";

function parseDrafts(json: string): Draft[] {
  const kept: unknown = json === "" ? [] : JSON.parse(json);
  return Array.isArray(kept) ? kept.filter(isDraft) : [];
}

/** Of things that belong to messages, by their ids: that of the message nearest to the end. */
const nearest = <T>(path: readonly Message[], of: (id: string) => T | undefined): T | null =>
  path.reduce<T | null>((found, { id }) => of(id) ?? found, null);

export interface ContextsOptions {
  readonly client: Client;
  readonly drafts: Drafts;
  readonly conversation: ReadonlySignal<string | null>;
  readonly branch: ReadonlySignal<readonly Message[]>;
  readonly replies: LiveReplies;
}

export class Contexts {
  /** By response id. */
  readonly used: Signal<ReadonlyMap<string, Used>> = signal(new Map());
  /** What is not saved yet of the branch that is shown: another branch's summary tells of other things. */
  readonly draft: ReadonlySignal<Draft | null> = computed(() => {
    const drafted = this.drafted.value;
    return nearest(this.options.branch.value, (id) => drafted.find(({ through }) => through === id));
  });
  private readonly drafted: Signal<readonly Draft[]> = signal([]);
  /** Whether the summary is open to be read. */
  readonly reading: Signal<boolean> = signal(false);
  private readonly summaries: Signal<ReadonlyMap<string, Summary>> = signal(new Map());
  /** The summary that stands for the older part of the branch. */
  readonly fold: ReadonlySignal<Summary | null> = computed(() => {
    const known = this.summaries.value;
    return known.size === 0 ? null : nearest(this.options.branch.value, (id) => known.get(id));
  });
  /** What the newest reply on the branch was made of, as far as that is known. */
  readonly latest: ReadonlySignal<Used | null> = computed(() => {
    const reply = this.options.branch.value.findLast(({ role }) => role === "assistant");
    return reply ? this.of(reply) : null;
  });
  private readonly asked = new Set<string>();
  private readonly queue: string[] = [];
  private draining = false;
  private looking: Promise<unknown> = Promise.resolve();
  /** Beats since a reply after which a fold is likely, and after how many of them it is looked for that next. */
  private beats = 0;
  private nextLook = BEATS + 1;
  private lookedUp: string | null = null;
  private readonly stops: (() => void)[];

  constructor(private readonly options: ContextsOptions) {
    const { branch, replies } = options;
    const live = computed(() => {
      const last = branch.value.at(-1);
      const reply = last && replies.live.value.get(last.id);
      return reply ? { response: reply.responseId, used: reply.view.value.reply.used } : null;
    });
    const used = computed(() => live.value?.used ?? null);
    this.stops = [
      effect(() => {
        if (used.value === null) return;
        const response = live.peek()?.response;
        if (response) untracked(() => this.note(response, used.value));
      }),
      effect(() => {
        const path = branch.value;
        untracked(() => this.follow(path));
      }),
    ];
  }

  dispose(): void {
    for (const stop of this.stops) stop();
    this.queue.length = 0;
  }

  of(reply: Message): Used | null {
    const live = this.options.replies.live.value.get(reply.id)?.view.value.reply.used;
    return live ?? (reply.response_id === null ? null : (this.used.value.get(reply.response_id) ?? null));
  }

  /** Have all known of the newest reply: the stream tells most, and not at all times how much was ready from before. */
  wantLatest(): void {
    const reply = this.options.branch.peek().findLast(({ role }) => role === "assistant");
    const response = reply && !isRunning(reply) ? reply.response_id : null;
    if (response !== null && this.used.peek().get(response)?.reserve === null) this.enqueue(response);
  }

  /** Have it known, soon, what a reply was made of. */
  want(response: string | null): void {
    if (response !== null && !this.used.peek().has(response)) this.enqueue(response);
  }

  private enqueue(response: string): void {
    if (this.asked.has(response)) return;
    this.asked.add(response);
    this.queue.push(response);
    if (!this.draining) void this.drain();
  }

  /** The stream has told what a reply is made of. A summary that is not known yet is fetched. */
  note(response: string, used: Used | null): void {
    if (used === null || this.used.peek().get(response) === used) return;
    this.used.value = new Map(this.used.peek()).set(response, used);
    if (used.summary) void this.makeSure(used.summary);
  }

  private async makeSure({ through, version }: NonNullable<Used["summary"]>): Promise<void> {
    await this.looking;
    const known = this.summaries.peek().get(through);
    if (!known || (version ?? 0) > known.version) await this.lookUp();
  }

  /** Fetch the summaries of the branch that is shown. */
  private async lookUp(): Promise<void> {
    this.looking = this.quietly(() => this.fetchSummaries());
    await this.looking;
  }

  private async fetchSummaries(): Promise<void> {
    const id = this.options.conversation.peek();
    const leaf = this.options.branch.peek().at(-1);
    if (id === null || !leaf) return;
    const { data } = await this.options.client.summaries(id, leaf.id);
    const next = new Map(this.summaries.peek());
    for (const summary of data) {
      if ((next.get(summary.through_message_id)?.version ?? 0) < summary.version) next.set(summary.through_message_id, summary);
    }
    this.summaries.value = next;
  }

  /** Show the summary, and see whether there is a newer one. */
  read(): void {
    const id = this.options.conversation.peek();
    if (id !== null && this.drafted.peek().length === 0) this.drafted.value = parseDrafts(this.options.drafts.get(summaryDraft(id)));
    this.reading.value = true;
    void this.lookUp();
  }

  /** Keep a rewriting, until it is saved or given up (null); also past a reload. */
  write(draft: Draft | null): void {
    this.replace(this.draft.peek(), draft);
  }

  private replace(before: Draft | null, draft: Draft | null): void {
    const id = this.options.conversation.peek();
    const others = this.drafted.peek().filter((other) => other !== before);
    const next = draft === null ? others : [...others, draft];
    this.drafted.value = next;
    if (id !== null) this.options.drafts.set(summaryDraft(id), next.length === 0 ? "" : JSON.stringify(next));
  }

  /** A reply has ended; its conversation may be folded behind it. */
  ended(response: string, used: Used | null): void {
    this.note(response, used);
    if (!used || used.prompt < used.window * FOLDS_FROM) return;
    this.beats = 0;
    this.nextLook = 1;
  }

  /** Called every few seconds while the page is seen. */
  beat(): void {
    this.beats += 1;
    if (this.beats < this.nextLook || this.nextLook > BEATS) return;
    this.nextLook = Math.ceil(this.beats * 1.5);
    void this.lookUp();
  }

  /**
   * Store the draft in the place of `summary`, as it is known now. Rejects with ApiError, and the draft is kept; code
   * `summary_changed` when somebody else or a further fold was faster: then the newer one is known.
   */
  async save(summary: Summary, draft: Draft): Promise<void> {
    const id = this.options.conversation.peek();
    if (id === null) return;
    // The server takes other words for a summary that a further fold has followed too: other branches may have it still.
    await this.fetchSummaries();
    if (this.fold.peek() !== summary) throw new ApiError(409, "summary_changed", "The summary has changed meanwhile.", false);
    try {
      const stored = await this.options.client.rewriteSummary(id, summary, draft.text.trim());
      this.summaries.value = new Map(this.summaries.peek()).set(stored.through_message_id, stored);
      this.replace(draft, null);
    } catch (error) {
      if (error instanceof ApiError && error.status === 409) await this.fetchSummaries();
      throw error;
    }
  }

  /** Another branch may have another summary; one that only grew has not. */
  private follow(path: readonly Message[]): void {
    const leaf = path.at(-1);
    if (!leaf) return;
    const grown = this.lookedUp !== null && path.some(({ id }) => id === this.lookedUp);
    this.lookedUp = leaf.id;
    if (grown) return;
    const reply = path.findLast(({ role }) => role === "assistant");
    if (reply && !isRunning(reply)) this.want(reply.response_id);
    if (path.length < SHORTEST_FOLDED) return;
    void this.lookUp();
  }

  private async drain(): Promise<void> {
    this.draining = true;
    try {
      // The one seen last first: who scrolls past many does not wait for all of them.
      for (let next = this.queue.pop(); next !== undefined; next = this.queue.pop()) {
        const response = next;
        const found = await this.quietly(async () => this.note(response, readUsed(await this.options.client.context(response))));
        if (!found) this.asked.delete(response);
      }
    } finally {
      this.draining = false;
    }
  }

  /** False when it is worth asking again later. */
  private async quietly(call: () => Promise<void>): Promise<boolean> {
    try {
      await call();
      return true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return error.status === 404;
    }
  }
}
