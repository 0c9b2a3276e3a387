import type { Limits } from "../api/limits.ts";
import { timeOf } from "./time.ts";

/** Nobody needs to hear of a budget of which there is plenty. */
const LITTLE = 0.2;

/** What is left of a budget, when that is little; else null. */
export function budgetText(limits: Limits | null, now: number = Date.now()): string | null {
  if (!limits || limits.left > limits.limit * LITTLE) return null;
  const share = Math.floor((100 * limits.left) / limits.limit);
  const refills = limits.refillsAt !== null && limits.refillsAt > now ? ` More from ${timeOf(limits.refillsAt, now)} on.` : "";
  return `${share === 0 ? "Less than 1" : share} % of your budget is left.${refills}`;
}
