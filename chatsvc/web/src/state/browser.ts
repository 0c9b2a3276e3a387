// The real surroundings: the browser's clocks, frames, EventSource and its word on whether anybody looks.

import type { LiveSurroundings } from "./replies.ts";

/** A tab hidden for this long lets go of its streams. Short looks elsewhere cost nothing. */
const LET_GO_MS = 5_000;

export function browserSurroundings(window: Window & typeof globalThis): LiveSurroundings {
  return {
    connect: (url) => new window.EventSource(url),
    setTimeout: (run, ms) => window.setTimeout(run, ms),
    clearTimeout: (handle) => window.clearTimeout(handle),
    random: Math.random,
    now: () => window.performance.now(),
    nextFrame: (run) => window.requestAnimationFrame(run),
    cancelFrame: (handle) => window.cancelAnimationFrame(handle),
    onAttention: (listener) => watchAttention(window, listener),
  };
}

function watchAttention(window: Window, listener: (attentive: boolean) => void): () => void {
  const { document } = window;
  let timer: number | null = null;
  const clear = (): void => {
    if (timer !== null) window.clearTimeout(timer);
    timer = null;
  };
  const onVisibility = (): void => {
    clear();
    if (document.visibilityState === "visible") listener(true);
    else timer = window.setTimeout(() => listener(false), LET_GO_MS);
  };
  // A tab opened in the background is hidden from the start, and nothing tells.
  if (document.visibilityState !== "visible") onVisibility();
  const onHide = (): void => {
    clear();
    listener(false);
  };
  document.addEventListener("visibilitychange", onVisibility);
  window.addEventListener("pagehide", onHide);
  window.addEventListener("pageshow", onVisibility);
  return () => {
    clear();
    document.removeEventListener("visibilitychange", onVisibility);
    window.removeEventListener("pagehide", onHide);
    window.removeEventListener("pageshow", onVisibility);
  };
}
