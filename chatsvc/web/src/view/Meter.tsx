// How full the model's window is, and with what. A bar in the header; the numbers on a click.

import { useRef } from "preact/hooks";
import type { Thread } from "../state/thread.ts";
import { PARTS, type Part, type Used } from "../stream/used.ts";
import { openBeside } from "./popup.ts";

const NAMES: Record<Part, string> = {
  system: "Instructions",
  memory: "Memory",
  summary: "Summary",
  pinned: "Pinned messages",
  verbatim: "Messages, word for word",
  recalled: "Recalled messages",
  question: "Your message",
};

const count = (tokens: number): string => tokens.toLocaleString();

export function Meter({ thread }: { thread: Thread }) {
  const used = thread.contexts.latest.value;
  const popup = useRef<HTMLDivElement>(null);
  if (!used) return null;
  const share = Math.round((100 * used.prompt) / used.window);
  const label = `Context: ${share} % of the model's window is used`;
  const open = (event: MouseEvent): void => {
    if (!popup.current || !(event.currentTarget instanceof Element)) return;
    thread.contexts.wantLatest();
    openBeside(popup.current, event.currentTarget);
    popup.current.focus(); // the browser gives it back to the button
  };
  return (
    <>
      <button type="button" class="meter" aria-label={label} title={label} aria-haspopup="dialog" onClick={open}>
        <Bar used={used} />
      </button>
      <div
        ref={popup}
        class="menu meter-details"
        popover="auto"
        role="dialog"
        tabindex={-1}
        aria-label="What the model was given"
        onKeyDown={(event) => event.stopPropagation()}
      >
        <Details used={used} />
      </div>
    </>
  );
}

function Bar({ used }: { used: Used }) {
  return (
    <span class="meter-bar" aria-hidden="true">
      {PARTS.map((part) => (
        <span key={part} class={`part-${part}`} style={{ width: `${(100 * (used.parts[part] ?? 0)) / used.window}%` }} />
      ))}
    </span>
  );
}

function Details({ used }: { used: Used }) {
  const { window, reserve, prompt, cached, parts, leftOut } = used;
  const rows = PARTS.filter((part) => (parts[part] ?? 0) > 0);
  return (
    <>
      <h2>What the model was given</h2>
      <Bar used={used} />
      <dl>
        {rows.map((part) => (
          <div key={part}>
            <dt>
              <span class={`swatch part-${part}`} />
              {NAMES[part]}
            </dt>
            <dd>{count(parts[part] ?? 0)}</dd>
          </div>
        ))}
        {reserve === null ? null : (
          <div>
            <dt>
              <span class="swatch" />
              Kept free for the reply
            </dt>
            <dd>{count(reserve)}</dd>
          </div>
        )}
      </dl>
      <p>
        {count(prompt)} of {count(window)} tokens for the newest reply.
        {cached ? ` ${count(cached)} of them were ready from before.` : ""}
      </p>
      {leftOut > 0 ? <p>{leftOutText(leftOut)}</p> : null}
    </>
  );
}

export const leftOutText = (turns: number): string =>
  turns === 1 ? "The oldest turn did not fit and was left out." : `The ${count(turns)} oldest turns did not fit and were left out.`;
