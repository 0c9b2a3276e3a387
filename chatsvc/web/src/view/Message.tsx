// One message: who says it, what, and what can be done with it.

import { useApp } from "./context.ts";
import { isContinuable, isRunning, type Message } from "../api/types.ts";
import type { Thread } from "../state/thread.ts";
import { ReplyBody } from "./Body.tsx";
import { Chips } from "./Chips.tsx";
import { CopyButton } from "./CopyButton.tsx";
import { EDIT_LABEL, Editor } from "./Editor.tsx";
import { useKeptFocus } from "./focus.ts";
import { Icon, IconButton } from "./Icon.tsx";
import { Menu } from "./Menu.tsx";
import { Degraded, Outcome, Progress } from "./Status.tsx";

interface MessageProps {
  thread: Thread;
  message: Message;
}

export function MessageView({ thread, message }: MessageProps) {
  return message.role === "user" ? <Question thread={thread} message={message} /> : <Answer thread={thread} message={message} />;
}

function Question({ thread, message }: MessageProps) {
  const editing = thread.editing.value;
  const actions = useKeptFocus(thread, message);
  if (editing?.id === message.id) return <Editor thread={thread} message={message} text={editing.text} />;
  return (
    <>
      <h2 class="sr-only">You said</h2>
      <div class="question">{message.content}</div>
      <div class="actions" ref={actions}>
        <IconButton
          icon="edit"
          label={EDIT_LABEL}
          onClick={() => {
            thread.editing.value = { id: message.id, text: message.content };
          }}
        />
        <CopyButton text={message.content} label="Copy this message" />
        <More thread={thread} message={message} />
        {/* What always shows stands at the edge: the buttons above show under the mouse only, and left a gap. */}
        <PinMark message={message} />
        <Arrows thread={thread} message={message} />
      </div>
    </>
  );
}

function Answer({ thread, message }: MessageProps) {
  const app = useApp();
  const live = thread.replies.live.value.get(message.id) ?? null;
  const running = isRunning(message);
  const question = message.parent_id;
  const actions = useKeptFocus(thread, message);
  const again = question === null ? null : () => void app.act(() => thread.regenerate(question), again ?? undefined);
  const goOn = isContinuable(message) ? () => void app.act(() => thread.continueReply(message), goOn ?? undefined) : null;
  return (
    <>
      <h2 class="sr-only">The assistant said</h2>
      <ReplyBody content={message.content} live={live} />
      <Degraded reply={live?.view.value.reply ?? null} message={message} />
      {running ? null : (
        <Outcome
          message={message}
          failure={thread.failures.value.get(message.id) ?? null}
          onRetry={again}
          onContinue={goOn}
        />
      )}
      <div class="below">
        {running ? (
          <Progress live={live} stopping={thread.stopping.value === message.response_id} />
        ) : (
          <div class="actions" ref={actions}>
            <PinMark message={message} />
            <Arrows thread={thread} message={message} />
            <CopyButton text={message.content} label="Copy this reply" />
            {again ? <IconButton icon="again" label="Answer again" onClick={again} /> : null}
            <More thread={thread} message={message} />
            <Facts message={message} />
          </div>
        )}
        <Chips thread={thread} message={message} />
      </div>
    </>
  );
}

function More({ thread, message }: MessageProps) {
  const app = useApp();
  const pinned = message.pinned === true;
  return (
    <Menu
      label="More for this message"
      items={[
        {
          label: pinned ? "Unpin this message" : "Pin this message",
          icon: "pin",
          run: () => void app.act(() => thread.pin(message, !pinned)),
        },
      ]}
    />
  );
}

function PinMark({ message }: { message: Message }) {
  if (!message.pinned) return null;
  return (
    <span class="pin-mark stays" title="Pinned: the model is given this message word for word, also when it is old">
      <Icon name="pin" />
      <span class="sr-only">Pinned</span>
    </span>
  );
}

function Facts({ message }: { message: Message }) {
  const time = new Date(message.created_at).toLocaleString();
  const tokens = message.tokens === null ? "" : ` · ${message.tokens.toLocaleString()} tokens`;
  return message.model ? (
    <span class="facts" title={`${time}${tokens}`}>
      {message.model}
    </span>
  ) : null;
}

function Arrows({ thread, message }: MessageProps) {
  const app = useApp();
  const { position, count, previous, next } = thread.siblings(message);
  if (count < 2) return null;
  const what = message.role === "user" ? "wording" : "answer";
  const [back, forth] = [`Previous ${what}`, `Next ${what}`];
  const go = (id: string | null, pressed: string, other: string) => () => {
    if (id === null) return;
    thread.refocus = { message: id, buttons: [pressed, other] };
    void app.act(() => thread.choose(id));
  };
  return (
    <span class="arrows" role="group" aria-label={`${what} ${position} of ${count}`}>
      <IconButton icon="left" label={back} disabled={previous === null} onClick={go(previous, back, forth)} />
      <span class="count">
        {position}/{count}
      </span>
      <IconButton icon="right" label={forth} disabled={next === null} onClick={go(next, forth, back)} />
    </span>
  );
}
