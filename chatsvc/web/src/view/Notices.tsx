import type { Reach } from "../state/pulse.ts";
import { useApp } from "./context.ts";
import { IconButton } from "./Icon.tsx";

const TROUBLE: Record<Reach, string | null> = {
  reached: null,
  offline: "You are offline. What is written here is kept; this page comes back by itself.",
  away: "The server cannot be reached. What is written here is kept; this page comes back by itself.",
};

/** What needs a word, above the message field. */
export function Notices() {
  const { notices, pulse } = useApp();
  const reach = pulse.reach.value;
  const said = notices.current.value;
  const repeats = said?.cause === "unreachable";
  // The same is not said twice. That the network is gone is the truer word; a notice stays beside it for its way on.
  const notice = repeats && reach === "offline" && !said.action ? null : said;
  const trouble = repeats && reach === "away" ? null : TROUBLE[reach];
  const { action } = notice ?? {};
  return (
    <div class="notices" role="status">
      {trouble === null ? null : <p class="notice">{trouble}</p>}
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
