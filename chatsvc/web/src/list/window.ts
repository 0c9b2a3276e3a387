// Which rows of a long list are worth drawing. Pure: heights and a viewport in, a range and two paddings out.
//
// Rows not yet seen count with an estimate; when the true height arrives, `measure` tells by how much everything below
// has moved, so that the caller can move the scroll position along and the reader's line stays where it is.

export interface Row {
  readonly key: string;
  /** Pixels, used until the row has been measured. */
  readonly estimate: number;
}

export interface Range {
  /** Rows first … end - 1 are drawn. */
  readonly first: number;
  readonly end: number;
  /** Pixels that stand for the rows above and below. */
  readonly before: number;
  readonly after: number;
}

export class Rows {
  private rows: readonly Row[] = [];
  private tops: number[] = [0];
  private readonly measured = new Map<string, number>();

  /** Replace the rows; heights measured before are kept by key. */
  set(rows: readonly Row[]): void {
    this.rows = rows;
    this.rebuild();
  }

  get total(): number {
    return this.tops[this.rows.length] ?? 0;
  }

  /** Distance of row `index` from the top of the list. */
  top(index: number): number {
    return this.tops[Math.max(0, Math.min(index, this.rows.length))] ?? 0;
  }

  /** Distance of the row with this key from the top of the list; null when there is none. */
  topOf(key: string): number | null {
    const index = this.rows.findIndex((row) => row.key === key);
    return index === -1 ? null : this.top(index);
  }

  heightOf(key: string): number | undefined {
    return this.measured.get(key);
  }

  /**
   * Take true heights. Returns by how many pixels the content moved at `anchor`, a distance from the top: the sum of
   * the changes of the rows that end above it. `fromGuess`: whether a row had the height that was guessed until then.
   */
  measure(heights: ReadonlyMap<string, number>, anchor: number, fromGuess = true): number {
    let moved = 0;
    let changed = false;
    this.rows.forEach((row, index) => {
      const height = heights.get(row.key);
      if (height === undefined || this.measured.get(row.key) === height) return;
      const bottom = this.top(index + 1);
      if (bottom <= anchor && (fromGuess || this.measured.has(row.key))) moved += height - (bottom - this.top(index));
      this.measured.set(row.key, height);
      changed = true;
    });
    if (changed) this.rebuild();
    return moved;
  }

  /** The rows that touch [top - margin, bottom + margin]. */
  range(top: number, bottom: number, margin: number): Range {
    const first = Math.max(0, this.indexAt(top - margin));
    const end = Math.min(this.rows.length, this.indexAt(bottom + margin) + 1);
    return { first, end, before: this.top(first), after: this.total - this.top(end) };
  }

  /** Index of the row that covers a distance from the top (binary search over the tops). */
  indexAt(distance: number): number {
    let low = 0;
    let high = this.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.top(middle) <= distance) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  private rebuild(): void {
    const tops = new Array<number>(this.rows.length + 1);
    let sum = 0;
    this.rows.forEach((row, index) => {
      tops[index] = sum;
      sum += this.measured.get(row.key) ?? row.estimate;
    });
    tops[this.rows.length] = sum;
    this.tops = tops;
  }
}
