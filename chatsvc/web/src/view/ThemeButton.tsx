import type { Theme } from "../state/theme.ts";
import { useApp } from "./context.ts";
import { IconButton, type IconName } from "./Icon.tsx";

const FACE: Record<Theme, { icon: IconName; label: string }> = {
  system: { icon: "auto", label: "Colours: as the system. Change to light" },
  light: { icon: "sun", label: "Colours: light. Change to dark" },
  dark: { icon: "moon", label: "Colours: dark. Change to the system's" },
};

export function ThemeButton() {
  const app = useApp();
  const { icon, label } = FACE[app.theme.value];
  return <IconButton icon={icon} label={label} onClick={() => app.cycleTheme()} />;
}
