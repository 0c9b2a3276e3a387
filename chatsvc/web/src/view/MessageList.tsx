// The branch on the screen. Long ones are windowed; the list says so to assistive technology by set size and position.

import type { ComponentChildren, RefObject } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { isRunning, type Message, type Status } from "../api/types.ts";
import { Scroller } from "../list/scroller.ts";
import type { Row } from "../list/window.ts";
import type { Thread } from "../state/thread.ts";
import { FoldLine } from "./Fold.tsx";
import { IconButton } from "./Icon.tsx";
import { MessageView } from "./Message.tsx";

const CHARACTERS_A_LINE = 76;
const LINE_PX = 26;
const AROUND_PX = 92;

/** A guess at a row's height, good enough to place the scroll bar. */
function toRow(message: Message): Row {
  const lines = message.content.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / CHARACTERS_A_LINE), 0);
  return { key: message.id, estimate: AROUND_PX + lines * LINE_PX };
}

const isShown = (message: Message): boolean => message.role === "user" || message.role === "assistant";

export function MessageList({ thread }: { thread: Thread }) {
  const scroller = useMemo(() => new Scroller(), [thread]);
  const viewport = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const shown = useMemo(() => thread.branch.value.filter(isShown), [thread.branch.value]);
  const pending = thread.pending.value;

  useLayoutEffect(() => {
    if (!viewport.current || !content.current) return undefined;
    return scroller.attach(viewport.current, content.current);
  }, [scroller]);
  useLayoutEffect(() => scroller.setRows(shown.map(toRow)), [scroller, shown]);
  useLayoutEffect(() => {
    if (pending) scroller.follow();
  }, [scroller, pending]);

  const folded = useMemo(() => rowOfFold(thread, shown), [thread.contexts.fold.value, shown]);
  const flashed = useTarget(thread, scroller, viewport);
  const { first, end, before, after } = scroller.range.value;
  return (
    <>
      <div class="viewport" ref={viewport} tabindex={-1}>
        <div class="messages" role="feed" aria-label="Messages" ref={content}>
          <div style={{ height: `${before}px` }} />
          {shown.slice(first, end).map((message, index) => (
            <RowView
              key={message.id}
              scroller={scroller}
              message={message}
              status={statusOf(thread, message)}
              position={first + index + 1}
              count={shown.length}
              flashed={flashed === message.id}
              onSeen={seen(thread, message)}
            >
              <MessageView thread={thread} message={message} />
              {folded === message.id ? <FoldLine thread={thread} /> : null}
            </RowView>
          ))}
          <div style={{ height: `${after}px` }} />
          {pending ? (
            <article class="message is-user is-pending" aria-busy="true">
              <div class="question">{pending.content}</div>
            </article>
          ) : null}
        </div>
      </div>
      {scroller.far.value ? (
        <IconButton class="to-newest" icon="down" label="Jump to the newest message" onClick={() => scroller.follow()} />
      ) : null}
    </>
  );
}

/** The fold's line is drawn under the last message that the summary covers, or the last one of these that is shown. */
function rowOfFold(thread: Thread, shown: readonly Message[]): string | null {
  const summary = thread.contexts.fold.peek();
  if (!summary) return null;
  const path = thread.branch.peek();
  const covered = new Set(path.slice(0, path.findIndex(({ id }) => id === summary.through_message_id) + 1).map(({ id }) => id));
  return shown.findLast(({ id }) => covered.has(id))?.id ?? null;
}

const FLASH_MS = 2_000;

/** Brings the thread's target into view and hands the keyboard over to it. Returns the id of the row to highlight. */
function useTarget(thread: Thread, scroller: Scroller, viewport: RefObject<HTMLElement | null>): string | null {
  const [flashed, setFlashed] = useState<string | null>(null);
  const target = thread.target.value;
  useLayoutEffect(() => {
    if (!target || !scroller.reveal(target.id)) return;
    thread.target.value = null;
    setFlashed(target.id);
  }, [target, scroller]);
  useEffect(() => {
    if (flashed === null) return undefined;
    viewport.current?.querySelector<HTMLElement>(`[data-message-id="${CSS.escape(flashed)}"]`)?.focus({ preventScroll: true });
    const timer = setTimeout(() => setFlashed(null), FLASH_MS);
    return () => clearTimeout(timer);
  }, [flashed]);
  return flashed;
}

/** What an older reply was made of is asked for when the reply is looked at: only a folded conversation has more to tell. */
function seen(thread: Thread, message: Message): (() => void) | null {
  if (message.role !== "assistant" || isRunning(message) || thread.contexts.fold.value === null) return null;
  return () => thread.contexts.want(message.response_id);
}

/** A queued reply begins to stream without the message being fetched again. */
function statusOf(thread: Thread, message: Message): Status {
  const phase = thread.replies.live.value.get(message.id)?.phase.value;
  return phase === "queued" || phase === "streaming" ? phase : message.status;
}

interface RowProps {
  scroller: Scroller;
  message: Message;
  status: Status;
  position: number;
  count: number;
  flashed: boolean;
  /** Called once the row is in view; null when nobody wants to know. */
  onSeen: (() => void) | null;
  children: ComponentChildren;
}

function RowView({ scroller, message, status, position, count, flashed, onSeen, children }: RowProps) {
  const element = useRef<HTMLElement>(null);
  const watched = onSeen !== null;
  useEffect(() => {
    if (!element.current || !onSeen) return undefined;
    const observer = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      onSeen();
    });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, [watched, message.id]);
  useLayoutEffect(() => (element.current ? scroller.watch(element.current, message.id) : undefined), [scroller, message.id]);
  return (
    <article
      ref={element}
      class={`message is-${message.role}${flashed ? " is-flashed" : ""}`}
      tabindex={-1}
      data-message-id={message.id}
      data-status={status}
      aria-posinset={position}
      aria-setsize={count}
    >
      {children}
    </article>
  );
}
