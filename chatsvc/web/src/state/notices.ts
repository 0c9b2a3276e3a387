// What the page says when something did not work: one calm sentence with what to do, until it is dismissed or outdated.

import { signal, type Signal } from "@preact/signals";
import { ApiError } from "../api/client.ts";
import { timeOf } from "../text/time.ts";

/** What a notice rests on: it goes when that is over. */
export type Cause = "unreachable" | "running";

export interface Notice {
  readonly text: string;
  readonly cause?: Cause | undefined;
  readonly action?: { readonly label: string; run(): void };
}

type Advice = (error: ApiError) => string;

const kept = "Your text is kept.";
/** Longer waits are told by the clock: a notice is read later than it was written. */
const CLOCK_FROM_S = 90;
const when = ({ retryAfter }: ApiError): string => {
  if (retryAfter === null) return "in a moment";
  return retryAfter < CLOCK_FROM_S ? `in ${Math.max(1, Math.ceil(retryAfter))} s` : `at ${timeOf(Date.now() + retryAfter * 1_000)}`;
};

const ADVICE: Record<string, Advice> = {
  unreachable: () => `The server cannot be reached. ${kept}`,
  not_authenticated: () => `You are signed out. Reload the page to sign in again. ${kept}`,
  too_many_replies: (error) => {
    const open = Array.isArray(error.extra["open"]) ? error.extra["open"].length : null;
    const count = open === null ? "As many replies as allowed" : open === 1 ? "One reply" : `${open} replies`;
    return `${count} of yours ${open === 1 ? "is" : "are"} still running. Wait for one to end or stop one, then send again.`;
  },
  quota_exceeded: (error) => `Your budget does not cover this message now. ${error.message} Try again ${when(error)}. ${kept}`,
  too_late: (error) => `So many people are waiting that this would begin too late. Try again ${when(error)}. ${kept}`,
  queue_full: (error) => `Too many people are waiting just now. Try again ${when(error)}. ${kept}`,
  conversation_busy: () => `A reply is still running here. Send again when it has ended, or stop it first. ${kept}`,
  payload_too_large: () => "This message is too large to send. Shorten it, please.",
  not_found: () => "This conversation does not exist any more.",
};

const BY_STATUS: Record<number, Advice> = {
  429: (error) => `You have reached a limit: ${error.message} Try again ${when(error)}.`,
  502: (error) => `The service cannot be reached just now. Try again ${when(error)}. ${kept}`,
  503: (error) => `The service cannot take messages just now. Try again ${when(error)}. ${kept}`,
  504: (error) => `The service takes too long to answer. Try again ${when(error)}. ${kept}`,
};

/** One sentence or two for a person. */
export function explain(error: ApiError): string {
  const advice = ADVICE[error.code] ?? BY_STATUS[error.status];
  return advice ? advice(error) : error.message;
}

const CAUSES: Record<string, Cause> = { unreachable: "unreachable", conversation_busy: "running" };

export class Notices {
  readonly current: Signal<Notice | null> = signal(null);

  show(notice: Notice): void {
    this.current.value = notice;
  }

  clear(): void {
    this.current.value = null;
  }

  /** The cause is over; a notice that rests on it is untrue now. What can be tried again still can. */
  outdate(cause: Cause): void {
    const notice = this.current.peek();
    if (notice?.cause !== cause) return;
    if (cause === "unreachable" && notice.action) this.show({ text: `The server is back. ${kept}`, action: notice.action });
    else this.clear();
  }

  /** Show a failed call. Anything but an ApiError is a fault of this page and is thrown on. */
  report(error: unknown, retry?: () => void): void {
    if (!(error instanceof ApiError)) throw error;
    const said = { text: explain(error), cause: CAUSES[error.code] };
    if (error.code === "not_authenticated") this.show({ ...said, action: { label: "Reload", run: () => location.reload() } });
    else if (error.retryable && retry) this.show({ ...said, action: { label: "Try again", run: retry } });
    else this.show(said);
  }
}
