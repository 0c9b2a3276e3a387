// Which conversation the address bar names: `c/<id>` under the page's base, or the base itself for a new one.

import { signal, type ReadonlySignal, type Signal } from "@preact/signals";

/** The conversation id in a path, null for the start page (and for any other path). */
export function conversationIn(pathname: string, basePath: string): string | null {
  if (!pathname.startsWith(basePath)) return null;
  const match = /^c\/([^/]+)\/?$/.exec(pathname.slice(basePath.length));
  return match?.[1] ? decodeURIComponent(match[1]) : null;
}

export class Router {
  private readonly base: URL;
  private readonly id: Signal<string | null>;

  constructor(
    base: string,
    private readonly window: Window,
  ) {
    this.base = new URL(base);
    this.id = signal(this.read());
    window.addEventListener("popstate", () => {
      this.id.value = this.read();
    });
  }

  get conversation(): ReadonlySignal<string | null> {
    return this.id;
  }

  address(id: string | null): string {
    return new URL(id === null ? "" : `c/${encodeURIComponent(id)}`, this.base).pathname;
  }

  go(id: string | null, how: "push" | "replace" = "push"): void {
    if (id === this.id.value) return;
    if (how === "push") this.window.history.pushState(null, "", this.address(id));
    else this.window.history.replaceState(null, "", this.address(id));
    this.id.value = id;
  }

  private read(): string | null {
    return conversationIn(this.window.location.pathname, this.base.pathname);
  }
}
