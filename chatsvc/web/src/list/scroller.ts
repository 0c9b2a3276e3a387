// The scrolling of the message list: follows the newest line until the reader scrolls up, draws only rows near the
// viewport when there are many, and keeps the reader's line in place when rows above it turn out taller than guessed.

import { signal, type Signal } from "@preact/signals";
import { Rows, type Range, type Row } from "./window.ts";

/** Shorter lists are drawn whole: the browser's own search then finds everything. */
const WINDOWED_FROM = 80;
const MARGIN_PX = 1_500;
const NEAR_END_PX = 32;
const FAR_FROM_END_PX = 240;
/** Where a row is put that is brought into view: this share of the viewport's height below its top. */
const FROM_TOP = 0.2;

export class Scroller {
  readonly range: Signal<Range> = signal({ first: 0, end: 0, before: 0, after: 0 });
  /** True when the newest line is so far below that a way back is worth offering. */
  readonly far: Signal<boolean> = signal(false);
  private readonly rows = new Rows();
  private count = 0;
  private viewport: HTMLElement | null = null;
  private content: HTMLElement | null = null;
  private observer: ResizeObserver | null = null;
  private readonly keys = new WeakMap<Element, string>();
  private following = true;
  /** A row that is being brought into view: rows above it may still turn out taller than guessed. */
  private target: string | null = null;
  private lastTop = 0;
  private lastHeight = 0;

  /** `viewport` scrolls, `content` is what it scrolls; rows are children of `content`'s list. Returns the way out. */
  attach(viewport: HTMLElement, content: HTMLElement): () => void {
    this.viewport = viewport;
    this.content = content;
    const observer = new ResizeObserver((entries) => this.resized(entries));
    this.observer = observer;
    observer.observe(viewport);
    observer.observe(content);
    const onScroll = (): void => this.scrolled();
    const onWheel = (event: WheelEvent): void => {
      this.target = null;
      if (event.deltaY < 0 && viewport.scrollHeight > viewport.clientHeight) this.following = false;
    };
    viewport.addEventListener("scroll", onScroll, { passive: true });
    viewport.addEventListener("wheel", onWheel, { passive: true });
    this.update();
    return () => {
      observer.disconnect();
      viewport.removeEventListener("scroll", onScroll);
      viewport.removeEventListener("wheel", onWheel);
      this.observer = null;
      this.viewport = null;
      this.content = null;
    };
  }

  setRows(rows: readonly Row[]): void {
    this.rows.set(rows);
    this.count = rows.length;
    this.update();
  }

  /** Measure a row while it is drawn. Returns the way out. */
  watch(element: Element, key: string): () => void {
    this.keys.set(element, key);
    this.observer?.observe(element);
    return () => this.observer?.unobserve(element);
  }

  /** Bring a row into view, a little below the top, and stay there. False when there is no such row. */
  reveal(key: string): boolean {
    const { viewport, content } = this;
    const top = this.rows.topOf(key);
    if (top === null || !viewport || !content) return false;
    this.following = false;
    this.target = key;
    this.update(top);
    this.toTarget();
    return true;
  }

  /** Go to the newest line and follow it. */
  follow(): void {
    this.following = true;
    this.target = null;
    this.update();
    this.toEnd();
  }

  private scrolled(): void {
    const { viewport } = this;
    if (!viewport) return;
    const { scrollTop, scrollHeight, clientHeight } = viewport;
    const distance = scrollHeight - clientHeight - scrollTop;
    if (Math.abs(scrollTop - this.lastTop) > 1) this.target = null; // not by us
    if (distance <= NEAR_END_PX && scrollTop >= this.lastTop) this.following = true;
    // Upwards, and not merely because the content became shorter: the reader wants to read back.
    else if (scrollTop < this.lastTop - 1 && scrollHeight >= this.lastHeight) this.following = false;
    this.note();
    this.update();
  }

  private resized(entries: readonly ResizeObserverEntry[]): void {
    const heights = new Map<string, number>();
    for (const { target } of entries) {
      const key = this.keys.get(target);
      if (key !== undefined && target.isConnected) heights.set(key, target.getBoundingClientRect().height);
    }
    // Where all rows are drawn the browser has placed them by their true heights from the first: guesses are none.
    const moved = this.rows.measure(heights, this.offset(), this.windowed());
    if (this.following) this.toEnd();
    else if (this.target !== null) this.toTarget();
    else if (moved !== 0 && this.viewport) this.viewport.scrollTop += moved;
    this.note();
    this.update();
  }

  private toTarget(): void {
    const top = this.target === null ? null : this.rows.topOf(this.target);
    if (top === null || !this.viewport || !this.content) return;
    this.viewport.scrollTop = this.content.offsetTop + top - this.viewport.clientHeight * FROM_TOP;
    this.note();
    this.update();
  }

  private toEnd(): void {
    if (!this.viewport) return;
    this.viewport.scrollTop = this.viewport.scrollHeight;
    this.note();
  }

  private note(): void {
    if (!this.viewport) return;
    const { scrollTop, scrollHeight, clientHeight } = this.viewport;
    this.lastTop = scrollTop;
    this.lastHeight = scrollHeight;
    this.far.value = !this.following && scrollHeight - clientHeight - scrollTop > FAR_FROM_END_PX;
  }

  private windowed(): boolean {
    return this.count >= WINDOWED_FROM;
  }

  /** Distance of the viewport's top from the list's top. */
  private offset(): number {
    if (!this.viewport || !this.content) return 0;
    return this.viewport.scrollTop - this.content.offsetTop;
  }

  /** `at`: where the viewport is about to be, as a distance from the list's top. */
  private update(at?: number): void {
    const height = this.viewport?.clientHeight ?? 0;
    const top = at ?? (this.following ? Math.max(0, this.rows.total - height) : this.offset());
    const next = this.windowed()
      ? this.rows.range(top, top + height, MARGIN_PX)
      : { first: 0, end: this.count, before: 0, after: 0 };
    const now = this.range.peek();
    if (next.first !== now.first || next.end !== now.end || next.before !== now.before || next.after !== now.after) {
      this.range.value = next;
    }
  }
}
