// One conversation in the sidebar: a link, and a menu to pin, rename or delete it.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { ConversationRow } from "../api/types.ts";
import { ConfirmDialog } from "./ConfirmDialog.tsx";
import { useApp } from "./context.ts";
import { Icon } from "./Icon.tsx";
import { Menu } from "./Menu.tsx";

export const titleOf = (title: string | null): string => title?.trim() || "Untitled";

export function ChatRow({ row, current }: { row: ConversationRow; current: boolean }) {
  const app = useApp();
  const [renaming, setRenaming] = useState(false);
  const [deleting, setDeleting] = useState(false);
  const line = useRef<HTMLDivElement>(null);
  const comingBack = useRef(false);
  useLayoutEffect(() => {
    if (renaming || !comingBack.current) return;
    comingBack.current = false;
    line.current?.querySelector<HTMLElement>(".menu-button")?.focus();
  }, [renaming]);
  const title = titleOf(row.title);
  const change = (changes: Partial<Pick<ConversationRow, "title" | "pinned">>): void =>
    void app.act(() => app.chats.change(row.id, changes));
  const open = (event: MouseEvent): void => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    app.drawer.value = false;
    app.router.go(row.id);
  };

  if (renaming) {
    return (
      <RenameField
        title={row.title ?? ""}
        onDone={(next, withKeyboard) => {
          comingBack.current = withKeyboard;
          setRenaming(false);
          if (next !== null && next !== "" && next !== row.title) change({ title: next });
        }}
      />
    );
  }
  return (
    <div ref={line} class={`chat-row${current ? " is-current" : ""}`}>
      <a href={app.router.address(row.id)} aria-current={current ? "page" : undefined} title={title} onClick={open}>
        {row.pinned ? <Icon name="pin" /> : null}
        <span>{title}</span>
      </a>
      <Menu
        label={`Actions for ${title}`}
        items={[
          { label: row.pinned ? "Unpin" : "Pin", icon: "pin", run: () => change({ pinned: !row.pinned }) },
          { label: "Rename", icon: "edit", run: () => setRenaming(true) },
          { label: "Delete", icon: "trash", danger: true, run: () => setDeleting(true) },
        ]}
      />
      {deleting ? (
        <ConfirmDialog
          title="Delete this conversation?"
          text={`“${title}” and everything in it will be gone for good.`}
          confirm="Delete"
          onClose={(confirmed) => {
            setDeleting(false);
            if (confirmed) void app.act(() => app.deleteChat(row.id));
          }}
        />
      ) : null}
    </div>
  );
}

interface RenameFieldProps {
  title: string;
  /** Called once: null when nothing is to change. `withKeyboard` is false when the focus has gone elsewhere already. */
  onDone(title: string | null, withKeyboard: boolean): void;
}

function RenameField({ title, onDone }: RenameFieldProps) {
  const field = useRef<HTMLInputElement>(null);
  const done = useRef(false);
  const end = (next: string | null, withKeyboard: boolean): void => {
    if (done.current) return;
    done.current = true;
    onDone(next, withKeyboard);
  };
  useLayoutEffect(() => field.current?.select(), []);
  return (
    <div class="chat-row is-renaming">
      <input
        ref={field}
        type="text"
        aria-label="New title"
        maxLength={200}
        defaultValue={title}
        onBlur={(event) => end(event.currentTarget.value.trim(), false)}
        onKeyDown={(event) => {
          if (event.isComposing) return;
          if (event.key === "Enter") {
            event.preventDefault(); // or it would press the button that the keyboard comes back to
            end(event.currentTarget.value.trim(), true);
          }
          if (event.key === "Escape") {
            event.stopPropagation();
            end(null, true);
          }
        }}
      />
    </div>
  );
}
