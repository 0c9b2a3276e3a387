// Learns what other windows and devices did: a light poll while the page is seen, and a word between windows of one browser.

import { signal, type Signal } from "@preact/signals";
import { ApiError } from "../api/client.ts";

const EVERY_MS = 4_000;
const SLOWEST_MS = 30_000;
const CHANNEL = "chatsvc";

export class Pulse {
  /** False after a poll that did not reach the server. */
  readonly online: Signal<boolean> = signal(true);
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
      this.online.value = false;
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
    const wait = Math.min(EVERY_MS * 2 ** this.failures, SLOWEST_MS);
    this.timer = this.window.setTimeout(() => this.now(), wait);
  }

  private async fetch(): Promise<void> {
    try {
      await this.beat();
      this.failures = 0;
      this.online.value = true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.failures = Math.min(this.failures + 1, 10);
      if (error.code === "unreachable") this.online.value = false;
    }
  }
}
