// Times and how long things take, in few words and as the reader's own clock shows them.

const DAY_MS = 86_400_000;

/** About how long: whole seconds up to a minute and a half, then minutes, then hours. */
export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5_400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3_600)} h`;
}

/** The time of day of an instant (milliseconds), with the day where it is not within the next or last hours. */
export function timeOf(instant: number, now: number = Date.now(), locale?: string): string {
  const time: Intl.DateTimeFormatOptions = { hour: "2-digit", minute: "2-digit" };
  if (Math.abs(instant - now) > DAY_MS / 2) Object.assign(time, { day: "numeric", month: "short" });
  return new Intl.DateTimeFormat(locale, time).format(instant);
}
