import { useLayoutEffect, useRef } from "preact/hooks";

interface ConfirmDialogProps {
  title: string;
  text: string;
  confirm: string;
  onClose(confirmed: boolean): void;
}

/** Asks before something that cannot be undone. The browser's own dialog keeps the focus inside and closes on Esc. */
export function ConfirmDialog({ title, text, confirm, onClose }: ConfirmDialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog
      ref={dialog}
      class="dialog"
      aria-labelledby="dialog-title"
      onKeyDown={(event) => event.stopPropagation()}
      onClose={(event) => onClose(event.currentTarget.returnValue === "yes")}
    >
      <h2 id="dialog-title">{title}</h2>
      <p>{text}</p>
      <div class="dialog-buttons">
        <button type="button" class="button" autofocus onClick={() => dialog.current?.close("no")}>
          Cancel
        </button>
        <button type="button" class="button is-danger" onClick={() => dialog.current?.close("yes")}>
          {confirm}
        </button>
      </div>
    </dialog>
  );
}
