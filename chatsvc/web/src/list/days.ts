// Groups the sidebar's conversations by day, in the reader's own time zone.

const DAY_MS = 86_400_000;

/** Names the day of a time: "Today", "Yesterday", a weekday within the last week, else a month. */
export class DayLabels {
  private readonly today: number;
  private readonly year: number;
  private readonly weekday: Intl.DateTimeFormat;
  private readonly month: Intl.DateTimeFormat;
  private readonly monthAndYear: Intl.DateTimeFormat;
  /** Formatting is slow and days are few. */
  private readonly known = new Map<number, string>();

  constructor(now: Date, locale?: string) {
    this.today = startOfDay(now);
    this.year = now.getFullYear();
    this.weekday = new Intl.DateTimeFormat(locale, { weekday: "long" });
    this.month = new Intl.DateTimeFormat(locale, { month: "long" });
    this.monthAndYear = new Intl.DateTimeFormat(locale, { month: "long", year: "numeric" });
  }

  /** `iso` is an instant as the API writes it. */
  of(iso: string): string {
    const day = startOfDay(new Date(iso));
    const label = this.known.get(day) ?? this.name(day);
    this.known.set(day, label);
    return label;
  }

  private name(day: number): string {
    // Rounded, because a day of the change to or from summer time has 23 or 25 hours.
    const ago = Math.round((this.today - day) / DAY_MS);
    if (ago <= 0) return "Today";
    if (ago === 1) return "Yesterday";
    const date = new Date(day);
    if (ago < 7) return this.weekday.format(date);
    return (date.getFullYear() === this.year ? this.month : this.monthAndYear).format(date);
  }
}

function startOfDay(time: Date): number {
  return new Date(time.getFullYear(), time.getMonth(), time.getDate()).getTime();
}
