// What is left of the caller's budget, as the headers of an answer or `GET /v1/me` tell it.

import type { Me } from "./types.ts";

export interface Limits {
  readonly limit: number;
  readonly left: number;
  /** When the oldest part of what was used is free again, in milliseconds since the epoch; null where that was not told. */
  readonly refillsAt: number | null;
}

const SECONDS: Record<string, number> = { d: 86_400, h: 3_600, m: 60, s: 1 };

/** Milliseconds of a time like `1h2m3s`; null for anything else. */
export function readDuration(text: string | null): number | null {
  if (text === null || !/^(?:\d+[dhms])+$/.test(text)) return null;
  return [...text.matchAll(/(\d+)([dhms])/g)].reduce((sum, [, count, unit]) => sum + Number(count) * (SECONDS[unit ?? ""] ?? 0), 0) * 1_000;
}

/** From `x-ratelimit-*-tokens`; null where there is no budget. */
export function readLimits(headers: Headers, now: number): Limits | null {
  const limit = Number(headers.get("x-ratelimit-limit-tokens") ?? NaN);
  const left = Number(headers.get("x-ratelimit-remaining-tokens") ?? NaN);
  if (!(limit > 0) || !(left >= 0)) return null;
  const reset = readDuration(headers.get("x-ratelimit-reset-tokens"));
  return { limit, left, refillsAt: reset === null ? null : now + reset };
}

export function limitsOf({ quota }: Me): Limits | null {
  if (!quota?.budget || quota.budget.limit <= 0) return null;
  const { limit, left } = quota.budget;
  return { limit, left, refillsAt: quota.refills_at === null ? null : Date.parse(quota.refills_at) };
}
