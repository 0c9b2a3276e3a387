// The dialog in which a user says what is to be known about them in all conversations.

import { useLayoutEffect, useRef } from "preact/hooks";
import type { Memory } from "../api/types.ts";
import { useApp } from "./context.ts";
import { isFocusFree } from "./focus.ts";
import { IconButton } from "./Icon.tsx";

const LONGEST = 500;

export function MemoryButton() {
  const { me, memories } = useApp();
  if (me.value?.memory === undefined) return null;
  return <IconButton icon="memory" label="Memory: what is known about you" onClick={() => void memories.show()} />;
}

export function MemoryDialog() {
  const { memories } = useApp();
  return memories.open.value ? <OpenDialog /> : null;
}

function OpenDialog() {
  const { me, memories } = useApp();
  const dialog = useRef<HTMLDialogElement>(null);
  const field = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => dialog.current?.showModal(), []);
  // What had the keyboard is gone (deleted, stored): here is where one goes on.
  const goOn = (): void => {
    if (isFocusFree()) field.current?.focus();
  };
  const list = memories.list.value;
  const text = memories.draft.value;
  return (
    <dialog
      ref={dialog}
      class="dialog is-wide"
      aria-labelledby="memory-title"
      onKeyDown={(event) => event.stopPropagation()}
      onClose={() => {
        memories.open.value = false;
      }}
    >
      <h2 id="memory-title">Memory</h2>
      <p>
        Facts that you want to be known in all your conversations. What you write counts for conversations that begin from now
        on, and for others after their next summary; what you delete is gone at once.
      </p>
      <label class="switch">
        <input
          type="checkbox"
          role="switch"
          checked={me.value?.memory === true}
          onChange={(event) => {
            const box = event.currentTarget;
            const on = box.checked;
            void memories.turn(on).then((done) => {
              if (!done) box.checked = !on;
            });
          }}
        />
        Give my memories to the model
      </label>
      {list === null ? null : (
        <ul class="memories" aria-label="Memories">
          {list.map((memory) => (
            <MemoryRow key={memory.id} memory={memory} onGone={goOn} />
          ))}
        </ul>
      )}
      <form
        class="memory-new"
        onSubmit={(event) => {
          event.preventDefault();
          if (text.trim() !== "") void memories.add().then(goOn);
        }}
      >
        <input
          ref={field}
          type="text"
          aria-label="New memory"
          placeholder="I live in Lisbon."
          maxLength={LONGEST}
          value={text}
          onInput={(event) => {
            memories.draft.value = event.currentTarget.value;
          }}
        />
        <button type="submit" class="button" disabled={memories.adding.value || text.trim() === ""}>
          Add
        </button>
      </form>
      {memories.trouble.value === null ? null : (
        <p class="trouble" role="alert">
          {memories.trouble.value}
        </p>
      )}
      <div class="dialog-buttons">
        <button type="button" class="button is-main" autofocus onClick={() => dialog.current?.close()}>
          Close
        </button>
      </div>
    </dialog>
  );
}

function MemoryRow({ memory, onGone }: { memory: Memory; onGone(): void }) {
  const { memories } = useApp();
  const editing = memories.editing.value;
  const row = useRef<HTMLLIElement>(null);
  const isEdited = editing?.id === memory.id;
  const wasEdited = useRef(isEdited);
  useLayoutEffect(() => {
    if (isEdited) row.current?.querySelector("input")?.focus();
    else if (wasEdited.current) row.current?.querySelector("button")?.focus();
    wasEdited.current = isEdited;
  }, [isEdited]);
  if (editing?.id === memory.id) {
    return (
      <li ref={row}>
        <form
          onSubmit={(event) => {
            event.preventDefault();
            if (editing.text.trim() !== "") void memories.reword();
          }}
        >
          <input
            type="text"
            aria-label="Reword this memory"
            maxLength={LONGEST}
            value={editing.text}
            onInput={(event) => {
              memories.editing.value = { id: memory.id, text: event.currentTarget.value };
            }}
            onKeyDown={(event) => {
              if (event.key !== "Escape" || event.isComposing) return;
              event.preventDefault(); // the dialog stays
              memories.editing.value = null;
            }}
          />
          <button type="submit" class="button" disabled={editing.text.trim() === ""}>
            Save
          </button>
          <button
            type="button"
            class="button"
            onClick={() => {
              memories.editing.value = null;
            }}
          >
            Cancel
          </button>
        </form>
      </li>
    );
  }
  return (
    <li ref={row}>
      <span>{memory.text}</span>
      <IconButton
        icon="edit"
        label={`Reword: ${memory.text}`}
        onClick={() => {
          memories.editing.value = { id: memory.id, text: memory.text };
        }}
      />
      <IconButton icon="trash" label={`Delete: ${memory.text}`} onClick={() => void memories.remove(memory.id).then(onGone)} />
    </li>
  );
}
