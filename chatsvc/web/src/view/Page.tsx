// The page: sidebar, conversation, message field; and the keys that work everywhere.

import { useEffect, useState } from "preact/hooks";
import type { App } from "../state/app.ts";
import type { Thread } from "../state/thread.ts";
import { Announcer } from "./Announcer.tsx";
import { titleOf } from "./ChatRow.tsx";
import { Composer, COMPOSER_ID } from "./Composer.tsx";
import { useApp } from "./context.ts";
import { Empty } from "./Empty.tsx";
import { OpenedSummary } from "./Fold.tsx";
import { IconButton } from "./Icon.tsx";
import { MemoryDialog } from "./MemoryDialog.tsx";
import { MessageList } from "./MessageList.tsx";
import { Meter } from "./Meter.tsx";
import { ModelPicker } from "./ModelPicker.tsx";
import { Sidebar } from "./Sidebar.tsx";

export function Page() {
  const app = useApp();
  const thread = app.thread.value;
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => handleKey(app, event);
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, [app]);
  return (
    <div class={`page${app.drawer.value ? " is-drawer-open" : ""}`}>
      <a class="skip" href={`${location.pathname}#${COMPOSER_ID}`} onClick={focusComposer}>
        Skip to the message field
      </a>
      <Sidebar />
      <div
        class="shade"
        onClick={() => {
          app.drawer.value = false;
        }}
      />
      <main class="main">
        <header class="header">
          <IconButton
            class="only-narrow"
            icon="menu"
            label="Open the list"
            onClick={() => {
              app.drawer.value = true;
            }}
          />
          <h1>{headingOf(thread)}</h1>
          <ModelPicker thread={thread} />
          <Meter thread={thread} />
          <IconButton class="only-narrow" icon="compose" label="New chat" onClick={() => app.newChat()} />
        </header>
        <ThreadView key={thread.key} thread={thread} />
      </main>
      <MemoryDialog />
    </div>
  );
}

function headingOf(thread: Thread): string {
  if (thread.id.value === null) return "New chat";
  return thread.state.value === "missing" ? "Not found" : titleOf(thread.title.value);
}

function ThreadView({ thread }: { thread: Thread }) {
  const [offered, setOffered] = useState<{ text: string } | null>(null);
  const [unwritten, setUnwritten] = useState(true);
  const blank = thread.branch.value.length === 0 && thread.pending.value === null;
  const state = thread.state.value;
  return (
    <>
      <section class="thread" aria-label="Conversation">
        {state === "missing" ? <p class="aside">This conversation was deleted, does not exist, or is not yours.</p> : null}
        {state === "failed" ? (
          <p class="aside" role="alert">
            This conversation could not be loaded.{" "}
            <button type="button" class="button" onClick={() => void thread.load()}>
              Try again
            </button>
          </p>
        ) : null}
        {state === "loading" ? <p class="aside is-late">Loading…</p> : null}
        {blank && (state === "new" || state === "ready") ? (
          <Empty offering={unwritten} onPick={(text) => setOffered({ text })} />
        ) : null}
        {blank ? null : <MessageList thread={thread} />}
      </section>
      <OpenedSummary thread={thread} />
      {state === "missing" ? null : (
        <>
          <Announcer thread={thread} />
          <Composer thread={thread} offered={offered} onBlank={setUnwritten} />
        </>
      )}
    </>
  );
}

function focusComposer(event?: Event): void {
  event?.preventDefault();
  document.getElementById(COMPOSER_ID)?.focus();
}

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && (target.isContentEditable || /^(?:INPUT|TEXTAREA|SELECT)$/.test(target.tagName));

function handleKey(app: App, event: KeyboardEvent): void {
  if (event.isComposing || event.defaultPrevented) return;
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if ((command && !event.shiftKey && key === "k") || (key === "/" && !command && !event.altKey && !isTyping(event.target))) {
    focusComposer(event);
  } else if (command && event.shiftKey && key === "o") {
    event.preventDefault();
    app.newChat();
  } else if (key === "escape") escape(app);
}

/** Closes what is open, the topmost first; with nothing open it stops the reply. */
function escape(app: App): void {
  const thread = app.thread.peek();
  if (app.drawer.peek()) app.drawer.value = false;
  else if (app.notices.current.peek()) app.notices.clear();
  else if (thread.running.peek()) void app.act(() => thread.stop());
}
