import { useApp } from "./context.ts";
import { IconButton } from "./Icon.tsx";

/** What needs a word, above the message field. */
export function Notices() {
  const { notices, pulse } = useApp();
  const notice = notices.current.value;
  const { action } = notice ?? {};
  return (
    <div class="notices" role="status">
      {pulse.online.value ? null : <p class="notice">You are offline. What is written here is kept; this page comes back by itself.</p>}
      {notice ? (
        <p class="notice">
          <span>{notice.text}</span>
          {action ? (
            <button
              type="button"
              class="button"
              onClick={() => {
                notices.clear();
                action.run();
              }}
            >
              {action.label}
            </button>
          ) : null}
          <IconButton icon="close" label="Dismiss" onClick={() => notices.clear()} />
        </p>
      ) : null}
    </div>
  );
}
