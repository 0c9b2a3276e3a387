// Groups the sidebar's conversations by day, in the reader's own time zone.

/** "Today", "Yesterday", a weekday within the last week, else a month. `now` and the time are absolute instants. */
export function dayLabel(iso: string, now: Date, locale?: string): string {
  const then = new Date(iso);
  const days = Math.round((startOfDay(now).getTime() - startOfDay(then).getTime()) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return then.toLocaleDateString(locale, { weekday: "long" });
  const sameYear = then.getFullYear() === now.getFullYear();
  return then.toLocaleDateString(locale, sameYear ? { month: "long" } : { month: "long", year: "numeric" });
}

function startOfDay(time: Date): Date {
  return new Date(time.getFullYear(), time.getMonth(), time.getDate());
}
