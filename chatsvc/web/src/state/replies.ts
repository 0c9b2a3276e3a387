// Keeps a stream open for each running reply on the branch that is shown, and for no other.

import { computed, effect, signal, untracked, type ReadonlySignal, type Signal } from "@preact/signals";
import { ApiError, type Client } from "../api/client.ts";
import { isRunning, type Message } from "../api/types.ts";
import type { Surroundings } from "../stream/reader.ts";
import type { Reply } from "../stream/reducer.ts";
import { LiveReply, type Frames } from "./live.ts";

export interface LiveSurroundings extends Surroundings, Frames {
  /** Calls back with true when the page can be seen, with false when it was hidden for some seconds or is leaving. */
  onAttention(listener: (attentive: boolean) => void): () => void;
}

export interface RepliesOptions {
  readonly client: Client;
  readonly surroundings: LiveSurroundings;
  onEnd(message: Message, reply: Reply): void;
  /** Fetch the conversation again: the store knows an end that the stream could not tell. */
  refetch(): Promise<void>;
}

export class LiveReplies {
  /** By message id. */
  readonly live: Signal<ReadonlyMap<string, LiveReply>> = signal(new Map());
  /** True while a stream is connected. */
  readonly open: ReadonlySignal<boolean> = computed(() => [...this.live.value.values()].some((reply) => reply.link.value === "open"));
  private readonly stopWatching: (() => void)[];
  private attentive = true;

  constructor(
    branch: ReadonlySignal<readonly Message[]>,
    private readonly options: RepliesOptions,
  ) {
    this.stopWatching = [
      effect(() => {
        const running = branch.value.filter(isRunning);
        untracked(() => this.follow(running));
      }),
      options.surroundings.onAttention((attentive) => this.attend(attentive)),
    ];
  }

  dispose(): void {
    for (const stop of this.stopWatching) stop();
    for (const reply of this.live.peek().values()) reply.close();
    this.live.value = new Map();
  }

  /** The network was away and is back: connections from before may be dead. */
  renew(): void {
    for (const reply of this.live.peek().values()) reply.renew();
  }

  private attend(attentive: boolean): void {
    this.attentive = attentive;
    for (const reply of this.live.peek().values()) {
      if (attentive) reply.open();
      else reply.park();
    }
  }

  private follow(running: readonly Message[]): void {
    const before = this.live.peek();
    const next = new Map<string, LiveReply>();
    for (const message of running) {
      const known = before.get(message.id);
      const live = known?.responseId === message.response_id ? known : this.start(message);
      if (live) next.set(message.id, live);
    }
    for (const [id, reply] of before) if (next.get(id) !== reply) reply.close();
    if (next.size !== before.size || [...next].some(([id, reply]) => before.get(id) !== reply)) this.live.value = next;
  }

  private start(message: Message): LiveReply | null {
    const responseId = message.response_id;
    if (responseId === null) return null;
    const { client } = this.options;
    const live = new LiveReply({
      responseId,
      place: message.status === "queued" ? (message.queue_position ?? 0) : null,
      url: message.stream_url ? client.address(message.stream_url) : client.streamAddress(responseId),
      surroundings: this.options.surroundings,
      onEnd: (reply) => this.options.onEnd(message, reply),
      onLost: () => this.whereNext(responseId),
    });
    if (this.attentive) live.open();
    return live;
  }

  private async whereNext(responseId: string): Promise<string | null> {
    const { client } = this.options;
    try {
      const state = await client.response(responseId);
      if (!isRunning(state)) {
        await this.options.refetch();
        return null;
      }
      return state.stream_url ? client.address(state.stream_url) : client.streamAddress(responseId);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 404) return client.streamAddress(responseId);
      await this.options.refetch();
      return null;
    }
  }
}
