// Where a reply stands: on its way, or how it ended when that is worth a word.

import type { Message } from "../api/types.ts";
import type { LiveReply } from "../state/live.ts";
import type { Link } from "../stream/reader.ts";
import type { Failure, Queue, Reply } from "../stream/reducer.ts";
import { duration } from "../text/time.ts";

export function Progress({ live, stopping }: { live: LiveReply | null; stopping: boolean }) {
  const reply = live?.view.value.reply;
  const link = live?.link.value;
  const text = progressText(link, stopping, reply?.queue ?? null, (reply?.text ?? "") === "");
  // A place without a time is the first word on a reply, which another replica may begin the next moment.
  const passing = reply?.queue?.etaSeconds === null;
  return (
    <p class="progress">
      <span class="pulse" aria-hidden="true" />
      {passing ? <span class="is-late">{text}</span> : text}
      {text === "" && link === "open" ? <Pause key={reply?.last} ms={live?.patience} /> : null}
    </p>
  );
}

/** Drawn when it has been there for so long: whatever comes of the reply puts a new one in its place. */
const Pause = ({ ms = 0 }: { ms: number | undefined }) => (
  <span class="pause" style={{ animationDelay: `${ms}ms` }}>
    Waiting for the server…
  </span>
);

export function progressText(link: Link | undefined, stopping: boolean, queue: Queue | null, silent: boolean): string {
  if (stopping) return "Stopping…";
  if (link === "broken") return "Reconnecting…";
  if (link === "retrying") return "The connection was lost. Coming back…";
  if (queue) return queueText(queue);
  return silent ? "Thinking…" : "";
}

export function queueText({ position, etaSeconds }: Queue): string {
  const place = position > 0 ? `Waiting in the queue, position ${position}` : "Waiting in the queue";
  return etaSeconds === null ? place : `${place} · about ${duration(etaSeconds)}`;
}

const GIVEN_UP: Record<string, (model: string | null) => string> = {
  model: (model) => `comes from a smaller model${model ? ` (${model})` : ""}`,
  max_tokens: () => "is kept short",
  history: () => "was given less of the conversation",
};

/** One sentence on what was given up for a reply; null when nothing was. */
export function degradedText(degraded: readonly string[], model: string | null): string | null {
  const parts = degraded.map((what) => GIVEN_UP[what]?.(model) ?? null).filter((part) => part !== null);
  if (parts.length === 0) return null;
  const last = parts.pop() ?? "";
  return `The service is busy: this reply ${parts.length > 0 ? `${parts.join(", ")} and ` : ""}${last}.`;
}

interface DegradedProps {
  /** While it is being written. */
  reply: Reply | null;
  message: Message;
}

/** What is said of a reply; of one that never began there is nothing to say. */
export function remarkOn({ reply, message }: DegradedProps): string | null {
  if (message.status === "failed" && message.content === "") return null;
  return degradedText(reply?.degraded.length ? reply.degraded : (message.degraded ?? []), reply?.model ?? message.model);
}

export function Degraded(props: DegradedProps) {
  const text = remarkOn(props);
  return text === null ? null : <p class="remark">{text}</p>;
}

const REASONS: Record<string, string> = {
  draining: "The server was shut down before this reply was finished.",
  worker_lost: "The server working on this reply went away.",
  engine_failed: "The model failed to finish this reply.",
  engine_unavailable: "The model is not available just now.",
  too_late: "So many were waiting that this reply could not begin in time.",
  message_too_long: "This conversation no longer fits the model's window.",
  abandoned: "Nobody was reading, so it was stopped.",
};

interface OutcomeProps {
  message: Message;
  failure: Failure | null;
  onRetry: (() => void) | null;
  /** Go on from the text there is; null where the reply has none, or its end. */
  onContinue: (() => void) | null;
}

export function Outcome({ message, failure, onRetry, onContinue }: OutcomeProps) {
  if (message.status === "failed") {
    const reason = REASONS[message.error_code ?? ""] ?? failure?.message;
    const worthwhile = failure?.retryable !== false;
    return (
      <div class="outcome is-failed" role="alert">
        <p>{reason || "This reply failed."}</p>
        {worthwhile ? <Action label="Try again" onClick={onRetry} /> : null}
        {worthwhile ? <Action label="Continue" onClick={onContinue} /> : null}
      </div>
    );
  }
  if (message.status === "stopped") {
    return (
      <div class="outcome">
        <p>{REASONS[message.error_code ?? ""] ?? "Stopped"}</p>
        <Action label="Continue" onClick={onContinue} />
      </div>
    );
  }
  if (message.finish_reason !== "length") return null;
  return (
    <div class="outcome">
      <p>The reply reached its length limit.</p>
      <Action label="Continue" name="Continue past the length limit that was reached" onClick={onContinue} />
    </div>
  );
}

interface ActionProps {
  label: string;
  /** What it is called where the words around it are not seen. */
  name?: string;
  onClick: (() => void) | null;
}

function Action({ label, name = label, onClick }: ActionProps) {
  if (onClick === null) return null;
  return (
    <button type="button" class="button" aria-label={name} onClick={onClick}>
      {label}
    </button>
  );
}
