// Keeps the keyboard where it was when what it was on is drawn anew: another answer in the place of the first one, a
// message in the place of its editor.

import type { RefObject } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Message } from "../api/types.ts";
import type { Thread } from "../state/thread.ts";

/** True when what had the focus is gone, or lies within `element`. */
export function isFocusFree(element: Element | null = null): boolean {
  const { activeElement, body } = document;
  return activeElement === null || activeElement === body || element?.contains(activeElement) === true;
}

/** The row of buttons of a message; when the keyboard is due here it goes to the first of the wished ones that can be pressed. */
export function useKeptFocus(thread: Thread, message: Message): RefObject<HTMLDivElement | null> {
  const row = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const wish = thread.refocus;
    if (wish?.message !== message.id || !row.current) return;
    thread.refocus = null;
    if (!isFocusFree()) return;
    const buttons = [...row.current.querySelectorAll("button")].filter((button) => !button.disabled);
    const found = wish.buttons.map((name) => buttons.find((button) => button.getAttribute("aria-label") === name));
    found.find((button) => button !== undefined)?.focus({ preventScroll: true });
  });
  return row;
}
