// The wire types: what the HTTP API sends and takes. Names are the API's own.

export type Status = "queued" | "streaming" | "complete" | "stopped" | "failed";

export interface Message {
  id: string;
  parent_id: string | null;
  role: "user" | "assistant" | "system" | "tool";
  content: string;
  status: Status;
  model: string | null;
  response_id: string | null;
  finish_reason: string | null;
  tokens: number | null;
  created_at: string;
  error_code?: string | null;
  /** Stays in the prompt, word for word, when what is around it is summarised. */
  pinned?: boolean;
  /** What was given up for this reply because the service was busy. */
  degraded: readonly string[];
  /** Its place in the queue when it was taken on, where it was this page that asked for it. */
  queue_position?: number | null;
  /** On running replies: where to read them, with a token in it. */
  stream_url?: string | null;
}

/** A conversation as the list shows it. */
export interface ConversationRow {
  id: string;
  title: string | null;
  pinned: boolean;
  head_message_id: string | null;
  created_at: string;
  updated_at: string;
}

export interface Conversation extends ConversationRow {
  /** Null: the default one. */
  model?: string | null;
  messages: Message[];
}

export interface Page<T> {
  data: T[];
  next_cursor: string | null;
}

/** The answer to a message: a reply has been taken on. */
export interface Accepted {
  /** The assistant message that will hold the reply. */
  message_id: string;
  user_message_id: string;
  response_id: string;
  stream_url: string;
  status: Status;
  queue_position: number | null;
  served_model: string;
  degraded: string[];
}

export interface ResponseState {
  status: Status;
  stream_url?: string | null;
}

/** Text that stands for a branch up to a message. A change is a new version. */
export interface Summary {
  id: string;
  through_message_id: string;
  version: number;
  text: string;
  tokens: number;
  edited: boolean;
  created_at: string;
}

/** A fact that a user wants to be known in all their conversations. */
export interface Memory {
  id: string;
  text: string;
}

export interface Model {
  id: string;
  default: boolean;
  ready: boolean | null;
}

export interface Me {
  user: { id: string };
  tier: string;
  /** Whether memories are shown to the model. */
  memory?: boolean;
  quota?: { budget: { limit: number; left: number } | null; refills_at: string | null };
}

/** RFC 9457, with the members every error of this API carries. */
export interface Problem {
  title: string;
  status: number;
  detail?: string;
  code: string;
  retryable: boolean;
  retry_after?: number | null;
  [extra: string]: unknown;
}

export const isRunning = (message: Pick<Message, "status">): boolean =>
  message.status === "queued" || message.status === "streaming";

/** A reply that broke off, with a text to go on from. The server takes no other. */
export const isContinuable = ({ role, content, status, finish_reason }: Message): boolean =>
  role === "assistant" && content !== "" && (status === "stopped" || status === "failed" || finish_reason === "length");
