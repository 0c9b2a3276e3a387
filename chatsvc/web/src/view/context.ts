import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { App } from "../state/app.ts";

export const AppContext = createContext<App | null>(null);

/** The App that the page was started with. */
export function useApp(): App {
  const app = useContext(AppContext);
  if (!app) throw new Error("no App around this component");
  return app;
}
