// What a reply's events mean. Pure: a reply and an event give the next reply.
//
// - An event whose id is not above the last one was seen before and changes nothing (a resume may replay).
// - `snapshot` replaces the text and sets the last id, also backwards: the log was lost and goes on from there.
// - `queued` has no id of its own; EventSource repeats the previous one for it, so it is never looked at.
// - `done` and `error` end the reply, whatever their id: nothing can come after them.

import { readUsed, type Used } from "./used.ts";

export type Phase = "waiting" | "queued" | "streaming" | "complete" | "stopped" | "failed";

export interface Queue {
  position: number;
  etaSeconds: number | null;
}

export interface Failure {
  code: string;
  message: string;
  retryable: boolean;
}

export interface Reply {
  readonly text: string;
  /** Sequence number of the last event taken; 0 before the first. */
  readonly last: number;
  readonly phase: Phase;
  readonly queue: Queue | null;
  /** The model that writes it. */
  readonly model: string | null;
  /** What was given up because the service is busy. */
  readonly degraded: readonly string[];
  readonly used: Used | null;
  readonly promptTokens: number | null;
  readonly outputTokens: number | null;
  readonly finishReason: string | null;
  /** Why it was stopped, where that was not by hand. */
  readonly errorCode: string | null;
  readonly failure: Failure | null;
}

export interface StreamEvent {
  readonly name: string;
  /** Digits, or empty when the stream has sent no id yet. */
  readonly id: string;
  readonly data: string;
}

export const EMPTY_REPLY: Reply = {
  text: "",
  last: 0,
  phase: "waiting",
  queue: null,
  model: null,
  degraded: [],
  used: null,
  promptTokens: null,
  outputTokens: null,
  finishReason: null,
  errorCode: null,
  failure: null,
};

/** A reply that is known to wait, before its stream has said so. Position 0: it is not known where. */
export const waitingAt = (position: number): Reply => ({ ...EMPTY_REPLY, phase: "queued", queue: { position, etaSeconds: null } });

export const hasEnded = (reply: Reply): boolean =>
  reply.phase === "complete" || reply.phase === "stopped" || reply.phase === "failed";

type Data = Record<string, unknown>;
type Step = (reply: Reply, data: Data, id: number) => Reply;

const asNumber = (value: unknown): number | null => (typeof value === "number" ? value : null);
const asText = (value: unknown): string => (typeof value === "string" ? value : "");
const asTexts = (value: unknown): string[] => (Array.isArray(value) ? value.filter((each) => typeof each === "string") : []);

const LOGGED: Record<string, Step> = {
  start: (reply, data, last) => ({
    ...reply,
    last,
    phase: "streaming",
    queue: null,
    model: asText(data["served_model"]) || asText(data["model"]) || null,
    degraded: asTexts(data["degraded"]),
  }),
  context: (reply, data, last) => ({ ...reply, last, promptTokens: asNumber(data["prompt_tokens"]), used: readUsed(data) }),
  delta: (reply, data, last) => ({
    ...reply,
    last,
    phase: "streaming",
    queue: null,
    text: reply.text + asText(data["text"]),
  }),
};

const ALWAYS: Record<string, Step> = {
  queued: (reply, data) => ({
    ...reply,
    phase: "queued",
    queue: { position: asNumber(data["position"]) ?? 0, etaSeconds: asNumber(data["eta_s"]) },
  }),
  snapshot: (reply, data, last) => ({ ...reply, last, phase: "streaming", queue: null, text: asText(data["text"]) }),
  done: (reply, data, id) => {
    const usage = (data["usage"] ?? {}) as Data;
    return {
      ...reply,
      last: Math.max(reply.last, id),
      phase: data["finish_reason"] === "stopped" ? "stopped" : "complete",
      queue: null,
      finishReason: asText(data["finish_reason"]) || null,
      errorCode: asText(data["error_code"]) || null,
      promptTokens: asNumber(usage["prompt_tokens"]) ?? reply.promptTokens,
      outputTokens: asNumber(usage["output_tokens"]),
    };
  },
  error: (reply, data, id) => ({
    ...reply,
    last: Math.max(reply.last, id),
    phase: "failed",
    queue: null,
    failure: {
      code: asText(data["code"]) || "internal_error",
      message: asText(data["message"]),
      retryable: data["retryable"] === true,
    },
  }),
};

export const EVENT_NAMES: readonly string[] = [
  ...Object.keys(LOGGED),
  ...Object.keys(ALWAYS),
  "tool_call",
  "tool_result",
  "image",
];

/** The reply after the event. Events after the end, seen ones and unknown ones return the same object. */
export function apply(reply: Reply, event: StreamEvent): Reply {
  if (hasEnded(reply)) return reply;
  const id = /^\d+$/.test(event.id) ? Number(event.id) : reply.last;
  const always = ALWAYS[event.name];
  if (always) return always(reply, parse(event.data), id);
  if (id <= reply.last) return reply;
  const logged = LOGGED[event.name];
  return logged ? logged(reply, parse(event.data), id) : { ...reply, last: id };
}

function parse(data: string): Data {
  const value: unknown = JSON.parse(data);
  return typeof value === "object" && value !== null ? (value as Data) : {};
}
