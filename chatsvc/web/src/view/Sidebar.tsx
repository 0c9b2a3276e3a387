// The conversations, newest activity first, pinned ones on top. Ten thousand cost no more than thirty: rows have fixed
// heights and only those in sight are drawn; pages are fetched as the end comes near.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ConversationRow } from "../api/types.ts";
import { DayLabels } from "../list/days.ts";
import { Rows } from "../list/window.ts";
import { ChatRow } from "./ChatRow.tsx";
import { useApp } from "./context.ts";
import { Icon, IconButton } from "./Icon.tsx";
import { MemoryButton } from "./MemoryDialog.tsx";
import { ThemeButton } from "./ThemeButton.tsx";

const ROW_PX = 38;
const HEADING_PX = 38;
const MARGIN_PX = 600;
const FETCH_AHEAD = 20;

type Line = { key: string; heading: string } | { key: string; row: ConversationRow };

function toLines(rows: readonly ConversationRow[], now: Date): Line[] {
  const lines: Line[] = [];
  const labels = new DayLabels(now);
  let group = "";
  for (const row of rows) {
    const label = row.pinned ? "Pinned" : labels.of(row.updated_at);
    if (label !== group) lines.push({ key: `heading ${label}`, heading: label });
    group = label;
    lines.push({ key: row.id, row });
  }
  return lines;
}

export function Sidebar() {
  const app = useApp();
  const me = app.me.value;
  return (
    <aside class="sidebar" id="sidebar" aria-label="Conversations">
      <div class="sidebar-top">
        <button type="button" class="new-chat" onClick={() => app.newChat()}>
          <Icon name="compose" />
          <span>New chat</span>
        </button>
        <IconButton
          class="only-narrow"
          icon="close"
          label="Close the list"
          onClick={() => {
            app.drawer.value = false;
          }}
        />
      </div>
      <ChatList />
      <div class="sidebar-end">
        <span class="who" title={me ? `Tier: ${me.tier}` : ""}>
          {me?.user.id ?? ""}
        </span>
        <MemoryButton />
        <ThemeButton />
      </div>
    </aside>
  );
}

function ChatList() {
  const { chats, thread, fetchMoreChats } = useApp();
  const viewport = useRef<HTMLElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const lines = useMemo(() => toLines(chats.rows.value, new Date()), [chats.rows.value]);
  const rows = useMemo(() => {
    const all = new Rows();
    all.set(lines.map((line) => ({ key: line.key, estimate: "row" in line ? ROW_PX : HEADING_PX })));
    return all;
  }, [lines]);
  const range = rows.range(view.top, view.top + view.height, MARGIN_PX);
  const nearEnd = range.end > lines.length - FETCH_AHEAD && chats.started.value && !chats.complete.value;

  useEffect(() => {
    if (nearEnd) fetchMoreChats();
  }, [nearEnd, lines.length]);
  useLayoutEffect(() => {
    const element = viewport.current;
    if (!element) return undefined;
    const look = (): void => setView({ top: element.scrollTop, height: element.clientHeight });
    const observer = new ResizeObserver(look);
    observer.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);

  const current = thread.value.id.value;
  return (
    <nav class="chats" ref={viewport} aria-label="Conversations">
      <div style={{ height: `${range.before}px` }} />
      {lines.slice(range.first, range.end).map((line) =>
        "row" in line ? (
          <ChatRow key={line.key} row={line.row} current={line.row.id === current} />
        ) : (
          <h2 key={line.key} class="day">
            {line.heading}
          </h2>
        ),
      )}
      <div style={{ height: `${range.after}px` }} />
      {chats.complete.value && lines.length === 0 ? <p class="no-chats">Your conversations will be listed here.</p> : null}
    </nav>
  );
}
