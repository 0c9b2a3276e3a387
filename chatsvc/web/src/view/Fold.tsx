// The line at which the older part of a conversation is folded, and the summary that stands for it.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../api/client.ts";
import type { Summary } from "../api/types.ts";
import type { Draft } from "../state/contexts.ts";
import { explain } from "../state/notices.ts";
import type { Thread } from "../state/thread.ts";
import { ReplyBody } from "./Body.tsx";
import { fitHeight } from "./textarea.ts";

export function FoldLine({ thread }: { thread: Thread }) {
  return (
    <div class="fold">
      <button
        type="button"
        class="fold-button"
        aria-haspopup="dialog"
        title="In place of what is above this line the model is given a summary"
        onClick={() => thread.contexts.read()}
      >
        Earlier messages are summarised
      </button>
    </div>
  );
}

/** Not within the line: a long list stops drawing lines that are out of sight. */
export function OpenedSummary({ thread }: { thread: Thread }) {
  const { fold, reading } = thread.contexts;
  const summary = fold.value;
  return summary && reading.value ? <SummaryDialog thread={thread} summary={summary} /> : null;
}

interface SummaryDialogProps {
  thread: Thread;
  /** The newest version that is known. */
  summary: Summary;
}

function SummaryDialog({ thread, summary }: SummaryDialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const edit = useRef<HTMLButtonElement>(null);
  const { contexts } = thread;
  const draft = contexts.draft.value;
  const editing = draft !== null;
  const wasEditing = useRef(editing);
  useLayoutEffect(() => dialog.current?.showModal(), []);
  useLayoutEffect(() => {
    if (wasEditing.current && !editing) edit.current?.focus();
    wasEditing.current = editing;
  }, [editing]);
  const close = (): void => dialog.current?.close();
  return (
    <dialog
      ref={dialog}
      class="dialog is-wide"
      aria-labelledby="summary-title"
      onKeyDown={(event) => event.stopPropagation()}
      onClose={() => {
        contexts.reading.value = false;
      }}
    >
      <h2 id="summary-title">Summary of the earlier messages</h2>
      <p>
        The model is given this text in place of the messages above the line. {summary.tokens.toLocaleString()} tokens, version{" "}
        {summary.version}
        {summary.edited ? ", edited by you" : ""}.
      </p>
      {draft ? (
        <SummaryEditor thread={thread} summary={summary} draft={draft} />
      ) : (
        <>
          <div class="summary-text" tabindex={0} role="region" aria-label="Summary">
            <ReplyBody content={summary.text} live={null} />
          </div>
          <div class="dialog-buttons">
            <button
              type="button"
              class="button"
              ref={edit}
              onClick={() => {
                contexts.write({ through: summary.through_message_id, version: summary.version, text: summary.text });
              }}
            >
              Edit
            </button>
            <button type="button" class="button is-main" autofocus onClick={close}>
              Close
            </button>
          </div>
        </>
      )}
    </dialog>
  );
}

interface SummaryEditorProps {
  thread: Thread;
  summary: Summary;
  draft: Draft;
}

function SummaryEditor({ thread, summary, draft }: SummaryEditorProps) {
  const { contexts } = thread;
  const area = useRef<HTMLTextAreaElement>(null);
  const [saving, setSaving] = useState(false);
  const [trouble, setTrouble] = useState<string | null>(null);
  const { through, version, text } = draft;
  // Reworded elsewhere, or the conversation was folded further.
  const overtaken = summary.through_message_id !== through || summary.version !== version;
  useLayoutEffect(() => area.current?.focus(), []);
  useLayoutEffect(() => fitHeight(area.current), [text]);
  const save = async (): Promise<void> => {
    if (saving) return;
    setSaving(true);
    setTrouble(null);
    try {
      await contexts.save(summary, draft);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      // A newer one that is known by now is shown, and says it better.
      if (error.status !== 409 || contexts.fold.peek() === summary) setTrouble(explain(error));
    } finally {
      setSaving(false);
    }
  };
  return (
    <form
      class="summary-editor"
      onSubmit={(event) => {
        event.preventDefault();
        void save();
      }}
    >
      {overtaken ? (
        <div class="overtaken" role="alert">
          <p>This summary has changed meanwhile. Here is the newer version; your text is kept below it.</p>
          <div class="summary-text" tabindex={0} role="region" aria-label="The newer version">
            <ReplyBody content={summary.text} live={null} />
          </div>
        </div>
      ) : null}
      <textarea
        ref={area}
        aria-label="Summary text"
        value={text}
        onInput={(event) => {
          contexts.write({ through, version, text: event.currentTarget.value });
        }}
      />
      {trouble === null ? null : (
        <p class="trouble" role="alert">
          {trouble}
        </p>
      )}
      <div class="dialog-buttons">
        <button
          type="button"
          class="button"
          onClick={() => {
            contexts.write(null);
          }}
        >
          {overtaken ? "Keep the newer version" : "Cancel"}
        </button>
        <button type="submit" class="button is-main" disabled={saving || text.trim() === ""}>
          {overtaken ? "Replace it with mine" : "Save"}
        </button>
      </div>
    </form>
  );
}
