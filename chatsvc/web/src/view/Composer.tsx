// Where messages are written. What is typed is never lost: drafts are kept per conversation, and a refused message
// comes back into the field.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Thread } from "../state/thread.ts";
import { budgetText } from "../text/budget.ts";
import { useApp } from "./context.ts";
import { IconButton } from "./Icon.tsx";
import { Notices } from "./Notices.tsx";
import { fitHeight, hasTouchKeyboard, isSendKey } from "./textarea.ts";

export const COMPOSER_ID = "composer";

interface ComposerProps {
  thread: Thread;
  /** Text put in from outside (a suggestion); each new object is taken once. */
  offered: { text: string } | null;
  /** Told whether the field is empty: text from outside may be put in then, and only then. */
  onBlank(blank: boolean): void;
}

export function Composer({ thread, offered, onBlank }: ComposerProps) {
  const app = useApp();
  const area = useRef<HTMLTextAreaElement>(null);
  const [text, setText] = useState(() => app.drafts.get(thread.id.peek()));
  const running = thread.running.value;
  const pending = thread.pending.value !== null;

  const write = (next: string): void => {
    setText(next);
    app.drafts.set(thread.id.peek(), next);
  };
  const latest = useRef(text);
  latest.current = text;

  useLayoutEffect(() => fitHeight(area.current), [text]);
  const blank = text.trim() === "";
  useLayoutEffect(() => onBlank(blank), [blank]);
  // At once: between two conversations the keyboard is never nowhere.
  useLayoutEffect(() => {
    if (!hasTouchKeyboard()) area.current?.focus({ preventScroll: true });
  }, [thread]);
  useEffect(() => {
    if (!offered) return;
    if (latest.current.trim() === "") write(offered.text);
    area.current?.focus();
  }, [offered]);

  const send = async (): Promise<void> => {
    const content = latest.current.trim();
    if (content === "" || pending) return;
    if (running) {
      app.notices.show({ text: "The reply is still running. Stop it, or send when it has ended; your text is kept.", cause: "running" });
      return;
    }
    const origin = thread.id.peek();
    write("");
    const sent = await app.act(
      () => thread.send(content),
      () => void send(),
    );
    if (sent) {
      app.drafts.set(origin, "");
      return;
    }
    app.drafts.set(origin, "");
    write([content, latest.current].filter((part) => part !== "").join("\n\n"));
    area.current?.focus();
  };

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        void send();
      }}
    >
      <Notices />
      <div class="composer-box">
        <textarea
          id={COMPOSER_ID}
          ref={area}
          rows={1}
          value={text}
          placeholder="Write a message"
          aria-label="Message"
          onInput={(event) => write(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (!isSendKey(event)) return;
            event.preventDefault();
            void send();
          }}
        />
        {running ? (
          <IconButton
            class="round"
            icon="stop"
            label="Stop the reply"
            disabled={thread.stopping.value === running.response_id}
            onClick={() => void app.act(() => thread.stop())}
          />
        ) : (
          <button type="submit" class="icon-button round is-send" aria-label="Send" title="Send" disabled={pending || blank}>
            <SendFace />
          </button>
        )}
      </div>
      <Hint />
    </form>
  );
}

/** The budget, when little of it is left, else how to write. */
function Hint() {
  const word = budgetText(useApp().limits.value);
  return word === null ? (
    <p class="hint">Enter sends, Shift + Enter starts a new line. Replies can be wrong; check what matters.</p>
  ) : (
    <p class="hint is-budget">{word}</p>
  );
}

function SendFace() {
  return (
    <svg class="icon" viewBox="0 0 20 20" aria-hidden="true" focusable="false">
      <path d="M10 16V4.5M5 9.2l5-5 5 5" />
    </svg>
  );
}
