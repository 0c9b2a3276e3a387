// A small menu behind a button, in the browser's top layer: it is never cut off, and closes on Esc or a click elsewhere.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon, IconButton, type IconName } from "./Icon.tsx";
import { openBeside } from "./popup.ts";

export interface MenuItem {
  label: string;
  icon: IconName;
  danger?: boolean;
  run(): void;
}

const STEPS: Record<string, (index: number, count: number) => number> = {
  ArrowDown: (index, count) => (index + 1) % count,
  ArrowUp: (index, count) => (index - 1 + count) % count,
  Home: () => 0,
  End: (_, count) => count - 1,
};

export function Menu({ label, items }: { label: string; items: readonly MenuItem[] }) {
  // Drawn only while it is open: there may be one for each of many rows.
  const [opened, setOpened] = useState<{ readonly by: Element } | null>(null);
  const popup = useRef<HTMLDivElement>(null);
  const buttons = (): HTMLButtonElement[] => [...(popup.current?.querySelectorAll("button") ?? [])];
  useLayoutEffect(() => {
    if (!opened || !popup.current) return;
    openBeside(popup.current, opened.by);
    buttons()[0]?.focus();
  }, [opened]);
  const onKeyDown = (event: KeyboardEvent): void => {
    event.stopPropagation();
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const all = buttons();
    all[step(all.indexOf(document.activeElement as HTMLButtonElement), all.length)]?.focus();
  };
  return (
    <>
      <IconButton
        class="menu-button"
        icon="more"
        label={label}
        menuOpen={opened !== null}
        onClick={(event) => {
          if (event.currentTarget instanceof Element) setOpened({ by: event.currentTarget });
        }}
      />
      {opened ? (
        <div
          ref={popup}
          class="menu"
          popover="auto"
          role="menu"
          aria-label={label}
          onKeyDown={onKeyDown}
          onToggle={(event) => {
            // Told a moment later, when it may be open again.
            if (!event.currentTarget.matches(":popover-open")) setOpened(null);
          }}
        >
          {items.map((item) => (
            <button
              key={item.label}
              type="button"
              role="menuitem"
              class={item.danger ? "is-danger" : ""}
              onClick={() => {
                popup.current?.hidePopover();
                item.run();
              }}
            >
              <Icon name={item.icon} />
              {item.label}
            </button>
          ))}
        </div>
      ) : null}
    </>
  );
}
