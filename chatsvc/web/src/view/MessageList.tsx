// The branch on the screen. Long ones are windowed; the list says so to assistive technology by set size and position.

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Message, Status } from "../api/types.ts";
import { Scroller } from "../list/scroller.ts";
import type { Row } from "../list/window.ts";
import type { Thread } from "../state/thread.ts";
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
            >
              <MessageView thread={thread} message={message} />
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
  children: ComponentChildren;
}

function RowView({ scroller, message, status, position, count, children }: RowProps) {
  const element = useRef<HTMLElement>(null);
  useLayoutEffect(() => (element.current ? scroller.watch(element.current, message.id) : undefined), [scroller, message.id]);
  return (
    <article
      ref={element}
      class={`message is-${message.role}`}
      data-message-id={message.id}
      data-status={status}
      aria-posinset={position}
      aria-setsize={count}
    >
      {children}
    </article>
  );
}
