// One running reply on the screen: a reader, and a view of its text that changes at most once a frame.

import { computed, signal, type ReadonlySignal, type Signal } from "@preact/signals";
import { Reader, type Link, type Surroundings } from "../stream/reader.ts";
import { EMPTY_REPLY, hasEnded, waitingAt, type Phase, type Reply } from "../stream/reducer.ts";
import { EMPTY_SPLIT, splitGrowing, splitWhole, type Split } from "../text/blocks.ts";

export interface LiveView {
  readonly reply: Reply;
  readonly split: Split;
}

export interface Frames {
  now(): number;
  /** Run before the next frame is drawn; not at all while the tab is hidden. */
  nextFrame(run: () => void): number;
  cancelFrame(handle: number): void;
}

export interface LiveOptions {
  readonly responseId: string;
  readonly url: string;
  /** Where it waits, as far as that is known before the stream tells it; null: it does not wait. */
  readonly place: number | null;
  readonly surroundings: Surroundings & Frames;
  onEnd(reply: Reply): void;
  onLost(): Promise<string | null>;
}

/** Drawing a long unsettled end costs more than a frame; leave the browser at least as long to breathe. */
const pause = (split: Split): number => Math.min(400, split.tail.raw.length / 250);

/** A pause in a reply is worth a word when it is as long as this, */
const PAUSE_MS = 3_000;
/** and so many times as long as any before it: who reads a slow model is not told with each word. */
const TIMES_USUAL = 3;

export class LiveReply {
  readonly view: Signal<LiveView>;
  readonly phase: ReadonlySignal<Phase>;
  readonly link: Signal<Link> = signal("connecting");
  readonly responseId: string;
  private readonly reader: Reader;
  private frame: number | null = null;
  private timer: number | null = null;
  private drawn = 0;
  /** After so many milliseconds without news the reply has come to a stop, for all one can see. */
  patience = PAUSE_MS;
  private heard = 0;

  constructor(private readonly options: LiveOptions) {
    this.responseId = options.responseId;
    this.view = signal({ reply: options.place === null ? EMPTY_REPLY : waitingAt(options.place), split: EMPTY_SPLIT });
    this.phase = computed(() => this.view.value.reply.phase);
    this.reader = new Reader({
      url: options.url,
      surroundings: options.surroundings,
      onReply: (reply) => this.take(reply),
      onLink: (link) => {
        this.link.value = link;
        this.heard = options.surroundings.now(); // how long the connection was away says nothing about the model
      },
      onLost: () => options.onLost(),
    });
  }

  open(): void {
    this.reader.open();
  }

  park(): void {
    this.reader.park();
  }

  renew(): void {
    this.reader.renew();
  }

  close(): void {
    this.cancel();
    this.reader.close();
  }

  private take(reply: Reply): void {
    const now = this.options.surroundings.now();
    if (this.view.peek().reply.text !== "") this.patience = Math.max(this.patience, TIMES_USUAL * (now - this.heard));
    this.heard = now;
    if (hasEnded(reply)) {
      this.cancel();
      this.view.value = { reply, split: splitWhole(reply.text) };
      this.options.onEnd(reply);
    } else this.schedule();
  }

  private schedule(): void {
    if (this.frame !== null || this.timer !== null) return;
    const { surroundings } = this.options;
    const wait = this.drawn + pause(this.view.value.split) - surroundings.now();
    if (wait > 0) {
      this.timer = surroundings.setTimeout(() => {
        this.timer = null;
        this.requestDraw();
      }, wait);
    } else this.requestDraw();
  }

  private requestDraw(): void {
    this.frame = this.options.surroundings.nextFrame(() => {
      this.frame = null;
      this.drawn = this.options.surroundings.now();
      const { reply } = this.reader;
      this.view.value = { reply, split: splitGrowing(this.view.value.split, reply.text) };
    });
  }

  private cancel(): void {
    const { surroundings } = this.options;
    if (this.frame !== null) surroundings.cancelFrame(this.frame);
    if (this.timer !== null) surroundings.clearTimeout(this.timer);
    this.frame = null;
    this.timer = null;
  }
}
