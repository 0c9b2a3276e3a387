// Copying that also works on plain HTTP from a LAN address, where navigator.clipboard does not exist.

/** Puts text on the clipboard. Resolves to whether it worked. */
export async function copyText(text: string, window: Window): Promise<boolean> {
  const clipboard = window.navigator.clipboard as Clipboard | undefined;
  if (clipboard) {
    try {
      await clipboard.writeText(text);
      return true;
    } catch (error) {
      // Refused (no permission, page not focused): the old way may still be allowed.
      if (!(error instanceof DOMException)) throw error;
    }
  }
  return copyBySelection(text, window.document);
}

function copyBySelection(text: string, document: Document): boolean {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.readOnly = true;
  area.className = "off-screen";
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return copied;
}
