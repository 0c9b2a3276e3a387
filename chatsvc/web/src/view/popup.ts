/** Open a popover beside the button that it belongs to, within the window. */
export function openBeside(popup: HTMLElement, button: Element): void {
  const place = button.getBoundingClientRect();
  popup.showPopover();
  const below = place.bottom + popup.offsetHeight < window.innerHeight;
  popup.style.top = `${Math.max(8, below ? place.bottom + 4 : place.top - popup.offsetHeight - 4)}px`;
  popup.style.left = `${Math.max(8, Math.min(place.left, window.innerWidth - popup.offsetWidth - 8))}px`;
}
