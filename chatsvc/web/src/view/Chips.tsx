// Beside a reply's buttons: which old turns were recalled for it, as a way to them, and what else is worth a word about
// its making. One line of fixed height: nothing moves when it is learned late.

import type { Message } from "../api/types.ts";
import type { Thread } from "../state/thread.ts";
import { turnsOf } from "../stream/used.ts";
import { useApp } from "./context.ts";
import { Icon } from "./Icon.tsx";
import { leftOutText } from "./Meter.tsx";

export function Chips({ thread, message }: { thread: Thread; message: Message }) {
  const app = useApp();
  const used = thread.contexts.of(message);
  if (!used) return null;
  const turns = turnsOf(used.recalled, (id) => thread.parentOf(id));
  if (turns.length === 0 && used.leftOut === 0) return null;
  const { byId } = thread.tree.value;
  const go = (id: string) => () =>
    void app.act(async () => {
      if (!(await thread.reveal(id))) app.notices.show({ text: "This message does not exist any more." });
    });
  return (
    <div class="chips" role="group" aria-label="What this reply rests on">
      {used.leftOut > 0 ? (
        <span class="chip is-word" title={leftOutText(used.leftOut)}>
          {used.leftOut === 1 ? "Oldest turn" : `${used.leftOut} oldest turns`} left out
        </span>
      ) : null}
      {turns.map((id) => {
        const known = byId.get(id);
        const text = known?.content.trim().replace(/\s+/g, " ").slice(0, 60) ?? "";
        const day = known ? new Date(known.created_at).toLocaleDateString() : "";
        return (
          <button
            key={id}
            type="button"
            class="chip"
            aria-label={`Recalled: ${text || "an old message"}. Go there`}
            title={`${day}\n${text}`}
            onClick={go(id)}
          >
            <Icon name="recall" />
            <span>{text || "Old message"}</span>
          </button>
        );
      })}
    </div>
  );
}
