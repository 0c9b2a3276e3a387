// Repeats a call that may be repeated (an idempotent one, or one with a client_msg_id) when the trouble looks short.

import { backoff } from "../stream/backoff.ts";
import { ApiError } from "./client.ts";

const TRIES = 4;
const LONGEST_WAIT_S = 6;

export type Wait = (ms: number) => Promise<void>;

/** Milliseconds until the next try, or null when waiting does not help or would take too long. */
export function patienceFor(error: unknown, attempt: number, random: () => number = Math.random): number | null {
  if (!(error instanceof ApiError) || attempt >= TRIES - 1) return null;
  if (error.code === "unreachable") return backoff(attempt, random, 600, 4_000);
  if (error.status !== 502 && error.status !== 503 && error.status !== 504) return null;
  const seconds = error.retryAfter ?? 1;
  return seconds <= LONGEST_WAIT_S ? seconds * 1_000 + backoff(attempt, random, 300, 1_000) : null;
}

/** The call's result, after at most four tries. Rejects with the last error. */
export async function patiently<T>(call: () => Promise<T>, wait: Wait): Promise<T> {
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await call();
    } catch (error) {
      const ms = patienceFor(error, attempt);
      if (ms === null) throw error;
      await wait(ms);
    }
  }
}
