// Reads one reply's stream to its end, whatever happens to the connection.
//
// A native EventSource does the work and resumes by itself (Last-Event-ID). This adds what it does not do: coming back
// after it has given up (any status but 200 ends it for good), and letting go while the tab is hidden, because a browser
// has six connections to a host and forty tabs.

import { backoff } from "./backoff.ts";
import { apply, EMPTY_REPLY, EVENT_NAMES, hasEnded, type Reply } from "./reducer.ts";

/**
 * `broken`: the connection ended, and is being made anew for the first time: it may have been the reply that ended.
 * `retrying`: that failed.
 */
export type Link = "connecting" | "open" | "broken" | "retrying" | "parked" | "closed";

/** What the reader needs of the browser. */
export interface Surroundings {
  connect(url: string): EventSource;
  setTimeout(run: () => void, ms: number): number;
  clearTimeout(handle: number): void;
  random(): number;
}

export interface ReaderOptions {
  /** Address of the stream, absolute; may hold a token. */
  readonly url: string;
  readonly surroundings: Surroundings;
  onReply(reply: Reply): void;
  onLink(link: Link): void;
  /**
   * Asked when EventSource has given up: the address to try next, or null when there is nothing to read any more (the
   * reply is gone, or has ended and was taken from the store). Must not reject: "cannot tell" is the same address again.
   */
  onLost(): Promise<string | null>;
}

export class Reader {
  reply: Reply;
  private source: EventSource | null = null;
  private timer: number | null = null;
  private failures = 0;
  private link: Link = "connecting";
  private url: string;

  constructor(
    private readonly options: ReaderOptions,
    start: Reply = EMPTY_REPLY,
  ) {
    this.url = options.url;
    this.reply = start;
  }

  /** Connect, unless connected. Also comes back from `park`. */
  open(): void {
    if (this.source !== null || this.link === "closed") return;
    this.clearTimer();
    this.setLink(this.failures > 0 ? "retrying" : "connecting");
    const source = this.options.surroundings.connect(withCursor(this.url, this.reply.last));
    this.source = source;
    source.addEventListener("open", () => {
      if (source !== this.source) return;
      this.failures = 0;
      this.setLink("open");
    });
    for (const name of EVENT_NAMES) {
      source.addEventListener(name, (event) => {
        if (source === this.source) this.take(name, event, source);
      });
    }
  }

  /** Let go of the connection and keep the place. */
  park(): void {
    if (this.link === "closed") return;
    this.disconnect();
    this.setLink("parked");
  }

  /**
   * Connect anew from the same place, at once also where that was to be tried later. The old connection may be dead
   * without anybody having said so.
   */
  renew(): void {
    if (this.source === null && this.timer === null) return;
    this.disconnect();
    this.open();
  }

  /** Let go for good. */
  close(): void {
    this.disconnect();
    this.setLink("closed");
  }

  private take(name: string, event: Event, source: EventSource): void {
    // The stream's own event `error` and EventSource's report of a broken connection share a name; only the first has data.
    if (!("data" in event)) {
      const refused = source.readyState === 2;
      if (this.link === "open") this.setLink("broken");
      else if (!refused) this.setLink("retrying");
      if (refused) void this.recover();
      return;
    }
    const { data, lastEventId } = event as MessageEvent<string>;
    const next = apply(this.reply, { name, id: lastEventId, data });
    if (next === this.reply) return;
    this.reply = next;
    if (hasEnded(next)) this.close();
    this.options.onReply(next);
  }

  private async recover(): Promise<void> {
    this.disconnect();
    const attempt = this.failures;
    this.failures += 1;
    const url = await this.options.onLost();
    if (url === null) {
      this.close();
      return;
    }
    if (this.source !== null || this.link === "parked" || this.link === "closed") return; // meanwhile
    this.setLink("retrying");
    this.url = url;
    this.timer = this.options.surroundings.setTimeout(() => {
      this.timer = null;
      this.open();
    }, backoff(attempt, this.options.surroundings.random));
  }

  private disconnect(): void {
    this.clearTimer();
    this.source?.close();
    this.source = null;
  }

  private clearTimer(): void {
    if (this.timer !== null) this.options.surroundings.clearTimeout(this.timer);
    this.timer = null;
  }

  private setLink(link: Link): void {
    if (link === this.link) return;
    this.link = link;
    this.options.onLink(link);
  }
}

/** The address with the place to go on from. EventSource itself sends Last-Event-ID only when it reconnects. */
export function withCursor(url: string, last: number): string {
  const address = new URL(url);
  if (last > 0) address.searchParams.set("last_event_id", String(last));
  else address.searchParams.delete("last_event_id");
  return address.href;
}
