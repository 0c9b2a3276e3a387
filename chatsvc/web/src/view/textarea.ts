/** True where typing brings up a keyboard that covers half of the page. */
export const hasTouchKeyboard = (): boolean => matchMedia("(pointer: coarse)").matches;

/** True when this key press sends the text: Enter, but not while an input method composes a word with it. */
export function isSendKey(event: KeyboardEvent): boolean {
  // Safari reports the Enter that ends a composition after it, with the key code 229.
  const composing = event.isComposing || event.keyCode === 229;
  return event.key === "Enter" && !event.shiftKey && !composing && !hasTouchKeyboard();
}

/** Make the field as high as its text; the style sheet bounds it. */
export function fitHeight(area: HTMLTextAreaElement | null): void {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
