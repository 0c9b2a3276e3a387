// Rewording a message in place. Sending makes a sibling; nothing is overwritten.

import { useLayoutEffect, useRef } from "preact/hooks";
import type { Message } from "../api/types.ts";
import type { Thread } from "../state/thread.ts";
import { COMPOSER_ID } from "./Composer.tsx";
import { useApp } from "./context.ts";
import { isFocusFree } from "./focus.ts";
import { fitHeight, hasTouchKeyboard, isSendKey } from "./textarea.ts";

/** The button that opens the editor, and that the keyboard goes back to. */
export const EDIT_LABEL = "Edit this message";

interface EditorProps {
  thread: Thread;
  message: Message;
  text: string;
}

export function Editor({ thread, message, text }: EditorProps) {
  const app = useApp();
  const area = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => {
    area.current?.focus();
    area.current?.setSelectionRange(text.length, text.length);
  }, []);
  useLayoutEffect(() => fitHeight(area.current), [text]);
  const form = useRef<HTMLFormElement>(null);
  const cancel = (): void => {
    thread.refocus = { message: message.id, buttons: [EDIT_LABEL] };
    thread.editing.value = null;
  };
  const send = (): void => {
    const content = text.trim();
    if (content === "" || thread.pending.value) return;
    void app.act(async () => {
      await thread.edit(message, content);
      // What was edited is on another branch now; the next thing to write goes into the message field.
      if (isFocusFree(form.current) && !hasTouchKeyboard()) document.getElementById(COMPOSER_ID)?.focus();
      thread.editing.value = null;
    });
  };
  return (
    <form
      ref={form}
      class="editor"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <textarea
        ref={area}
        aria-label="Edit your message"
        value={text}
        rows={1}
        onInput={(event) => {
          thread.editing.value = { id: message.id, text: event.currentTarget.value };
        }}
        onKeyDown={(event) => {
          if (event.key === "Escape" && !event.isComposing) {
            event.stopPropagation();
            cancel();
          } else if (isSendKey(event)) {
            event.preventDefault();
            send();
          }
        }}
      />
      <div class="editor-buttons">
        <button type="button" class="button" onClick={cancel}>
          Cancel
        </button>
        <button type="submit" class="button is-main" disabled={text.trim() === "" || thread.pending.value !== null}>
          Send
        </button>
      </div>
    </form>
  );
}
