// Line icons on a 20 × 20 grid, drawn here so that nothing is fetched.

const PATHS = {
  menu: "M3.5 6h13M3.5 10h13M3.5 14h13",
  close: "M5 5l10 10M15 5L5 15",
  compose: "M10 16.5h6.5M12.8 4.2l3 3L7 16l-3.6.6L4 13z",
  send: "M10 16V4.5M5 9.2l5-5 5 5",
  stop: "M6 6h8v8H6z",
  copy: "M7.5 7.5h8v8h-8zM12.5 7.5v-3h-8v8h3",
  check: "M4.5 10.5l3.6 3.6 7.4-8",
  edit: "M12.8 4.2l3 3L7 16l-3.6.6L4 13z",
  again: "M15.8 8.2A6 6 0 1 0 16 11.5M16 4.5v4h-4",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M10 4v11.5M5.2 10.8L10 15.6l4.8-4.8",
  more: "M4.5 10h.01M10 10h.01M15.5 10h.01",
  pin: "M7 3.5h6l-.8 5.2 2.3 2.3v1h-9v-1l2.3-2.3zM10 12v4.5",
  trash: "M4 6h12M8 6V4h4v2M5.5 6l.7 10.5h7.6L14.5 6M8.5 9v4.5M11.5 9v4.5",
  sun: "M10 6.5a3.5 3.5 0 1 1 0 7 3.5 3.5 0 0 1 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  memory: "M6 3.5h8v13l-4-3.2-4 3.2z",
  recall: "M8 4.5L4 8.5l4 4M4.5 8.5H12a4 4 0 0 1 0 8h-1.5",
  moon: "M16 11.8A6.5 6.5 0 0 1 8.2 4a6.5 6.5 0 1 0 7.8 7.8z",
  auto: "M10 3a7 7 0 1 1 0 14 7 7 0 0 1 0-14zM10 3v14M10 6.5h5.5M10 10h6.8M10 13.5h5.5",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class={`icon icon-${name}`} viewBox="0 0 20 20" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface IconButtonProps {
  icon: IconName;
  label: string;
  onClick(event: MouseEvent): void;
  disabled?: boolean;
  class?: string;
  /** For a button that opens a menu: whether it is open. */
  menuOpen?: boolean;
}

/** A button whose face is an icon and whose name is its label. */
export function IconButton({ icon, label, onClick, disabled = false, class: extra = "", menuOpen }: IconButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${extra}`}
      aria-label={label}
      aria-haspopup={menuOpen === undefined ? undefined : "menu"}
      aria-expanded={menuOpen}
      title={label}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}
