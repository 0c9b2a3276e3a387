// How long to wait before trying again: doubling, bounded, and drawn at random so that many pages do not return in step.

/** Milliseconds before attempt `attempt` (0 = the first retry): between half and all of min(base · 2^attempt, most). */
export function backoff(attempt: number, random: () => number = Math.random, base = 1_000, most = 20_000): number {
  const ceiling = Math.min(base * 2 ** Math.min(attempt, 30), most);
  return ceiling * (0.5 + random() / 2);
}
