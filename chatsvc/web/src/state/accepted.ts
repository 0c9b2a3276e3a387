// Messages that the server has accepted, before the conversation is fetched again: what the page shows at once.

import type { Accepted, Message } from "../api/types.ts";

const madeHere = (): Pick<Message, "created_at" | "finish_reason" | "tokens" | "model" | "degraded"> => ({
  created_at: new Date().toISOString(),
  finish_reason: null,
  tokens: null,
  model: null,
  degraded: [],
});

/** The user's message, as the server has taken it. */
export function userMessage(accepted: Accepted, content: string, parent: string | null): Message {
  return { ...madeHere(), id: accepted.user_message_id, parent_id: parent, role: "user", content, status: "complete", response_id: null };
}

/** The reply that will be written: as yet only the text it begins with. */
export function replyOf(accepted: Accepted, kept = ""): Message {
  return {
    ...madeHere(),
    id: accepted.message_id,
    parent_id: accepted.user_message_id,
    role: "assistant",
    content: kept,
    // A repeated POST may answer for a reply that has ended meanwhile; its stream tells the end.
    status: accepted.queue_position === null ? "streaming" : "queued",
    queue_position: accepted.queue_position,
    response_id: accepted.response_id,
    stream_url: accepted.stream_url,
    degraded: accepted.degraded,
  };
}
