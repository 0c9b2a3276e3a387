// Learns what other windows and devices did: a light poll while the page is seen, and a word between windows of one browser.

import { signal, type Signal } from "@preact/signals";
import { ApiError } from "../api/client.ts";
import { backoff } from "../stream/backoff.ts";

const EVERY_MS = 4_000;
const SLOWEST_MS = 30_000;
/** While the server is away it is looked for at least so often: people wait for it. */
const AWAY_MS = 5_000;
const CHANNEL = "chatsvc";

/** `offline`: this machine has no network. `away`: it has, and the server does not answer. */
export type Reach = "reached" | "offline" | "away";

export class Pulse {
  /** What the last poll found, or the browser said since. */
  readonly reach: Signal<Reach> = signal("reached");
  private readonly channel: BroadcastChannel;
  private timer: number | null = null;
  private beating: Promise<void> | null = null;
  private again = false;
  private failures = 0;
  private readonly stopWatching: () => void;

  constructor(
    private readonly window: Window & typeof globalThis,
    /** Fetch what may have changed. Rejects with ApiError. */
    private readonly beat: () => Promise<void>,
  ) {
    this.channel = new window.BroadcastChannel(CHANNEL);
    this.channel.onmessage = () => this.now();
    const onVisibility = (): void => {
      if (window.document.visibilityState === "visible") this.now();
      else this.pause();
    };
    const onNetwork = (): void => this.now();
    const onOffline = (): void => {
      this.reach.value = "offline";
    };
    window.document.addEventListener("visibilitychange", onVisibility);
    window.addEventListener("focus", onNetwork);
    window.addEventListener("online", onNetwork);
    window.addEventListener("offline", onOffline);
    this.stopWatching = () => {
      window.document.removeEventListener("visibilitychange", onVisibility);
      window.removeEventListener("focus", onNetwork);
      window.removeEventListener("online", onNetwork);
      window.removeEventListener("offline", onOffline);
    };
  }

  /** Tell the other windows of this browser that something changed. */
  tell(): void {
    this.channel.postMessage("changed");
  }

  /** Something else has got through to the server: look whether it is back. */
  sign(): void {
    if (this.reach.peek() !== "reached") this.now();
  }

  /** Fetch now, then go on beating. Asked while a fetch is on its way, fetch again after it: it may have been too early. */
  now(): void {
    this.pause();
    if (this.beating) this.again = true;
    else this.beating = this.run();
  }

  dispose(): void {
    this.pause();
    this.stopWatching();
    this.channel.close();
  }

  private pause(): void {
    if (this.timer !== null) this.window.clearTimeout(this.timer);
    this.timer = null;
  }

  private async run(): Promise<void> {
    try {
      do {
        this.again = false;
        await this.fetch();
      } while (this.again);
    } finally {
      this.beating = null;
    }
    if (this.window.document.visibilityState !== "visible") return;
    this.timer = this.window.setTimeout(() => this.now(), this.pauseMs());
  }

  private pauseMs(): number {
    // Drawn at random: the pages of everybody must not return to a restarted server in step.
    if (this.reach.peek() !== "reached") return backoff(this.failures, Math.random, 1_000, AWAY_MS);
    return Math.min(EVERY_MS * 2 ** this.failures, SLOWEST_MS);
  }

  private async fetch(): Promise<void> {
    try {
      await this.beat();
      this.failures = 0;
      this.reach.value = "reached";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.failures = Math.min(this.failures + 1, 10);
      if (isAway(error)) this.reach.value = this.window.navigator.onLine ? "away" : "offline";
      else this.reach.value = "reached";
    }
  }
}

/** No answer, or one of a gateway that got none. */
const isAway = ({ code, status }: ApiError): boolean => code === "unreachable" || status === 502 || status === 504;
