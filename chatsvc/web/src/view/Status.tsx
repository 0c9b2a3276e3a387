// Where a reply stands: on its way, or how it ended when that is worth a word.

import type { Message } from "../api/types.ts";
import type { LiveReply } from "../state/live.ts";
import type { Failure, Queue } from "../stream/reducer.ts";

export function Progress({ live, stopping }: { live: LiveReply | null; stopping: boolean }) {
  const reply = live?.view.value.reply;
  const link = live?.link.value;
  return (
    <p class="progress">
      <span class="pulse" aria-hidden="true" />
      {progressText(link === "retrying", stopping, reply?.queue ?? null, (reply?.text ?? "") === "")}
    </p>
  );
}

function progressText(retrying: boolean, stopping: boolean, queue: Queue | null, silent: boolean): string {
  if (stopping) return "Stopping…";
  if (retrying) return "The connection was lost. Coming back…";
  if (queue) return queueText(queue);
  return silent ? "Thinking…" : "";
}

function queueText({ position, etaSeconds }: Queue): string {
  const place = position > 0 ? `Waiting in the queue, position ${position}` : "Waiting in the queue";
  return etaSeconds === null ? place : `${place} · about ${duration(etaSeconds)}`;
}

function duration(seconds: number): string {
  return seconds < 90 ? `${Math.max(1, Math.round(seconds))} s` : `${Math.round(seconds / 60)} min`;
}

const REASONS: Record<string, string> = {
  worker_lost: "The server working on this reply went away.",
  engine_failed: "The model failed to finish this reply.",
  engine_unavailable: "The model is not available just now.",
  message_too_long: "This conversation no longer fits the model's window.",
};

interface OutcomeProps {
  message: Message;
  failure: Failure | null;
  onRetry: (() => void) | null;
}

export function Outcome({ message, failure, onRetry }: OutcomeProps) {
  if (message.status === "stopped") return <p class="outcome">Stopped</p>;
  if (message.status === "failed") {
    const reason = REASONS[message.error_code ?? ""] ?? failure?.message;
    return (
      <div class="outcome is-failed" role="alert">
        <p>{reason || "This reply failed."}</p>
        {onRetry && failure?.retryable !== false ? (
          <button type="button" class="button" onClick={onRetry}>
            Try again
          </button>
        ) : null}
      </div>
    );
  }
  if (message.finish_reason === "length") return <p class="outcome">The reply reached its length limit.</p>;
  return null;
}
