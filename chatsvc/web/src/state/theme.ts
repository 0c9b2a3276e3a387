// Light, dark, or what the system says. The attribute on <html> is set before the first paint by theme.ts (the entry).

export type Theme = "system" | "light" | "dark";

export const THEME_KEY = "chatsvc:theme";
const NEXT: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };

export function readTheme(storage: Storage | null): Theme {
  const value = storage?.getItem(THEME_KEY);
  return value === "light" || value === "dark" ? value : "system";
}

export function applyTheme(root: HTMLElement, theme: Theme): void {
  if (theme === "system") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", theme);
}

export const nextTheme = (theme: Theme): Theme => NEXT[theme];
