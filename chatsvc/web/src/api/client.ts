// The HTTP API as functions. Every failure is an ApiError: the server's problem document, or code `unreachable`.

import { readLimits, type Limits } from "./limits.ts";
import type { Accepted, Conversation, ConversationRow, Me, Memory, Message, Model, Page, Problem, ResponseState, Summary } from "./types.ts";

export class ApiError extends Error {
  override name = "ApiError";

  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly retryable: boolean,
    /** Seconds, where the server said. */
    readonly retryAfter: number | null = null,
    readonly extra: Readonly<Record<string, unknown>> = {},
  ) {
    super(message);
  }
}

export interface NewMessage {
  content: string;
  client_msg_id: string;
  /** The message to answer to; null starts a new root. */
  parent_id: string | null;
}

const TIMEOUT_MS = 20_000;

const inPath = encodeURIComponent;

export class Client {
  /** Told what is left of the caller's budget, whenever an answer says so. */
  onLimits: (limits: Limits) => void = () => undefined;

  /** `base` is the address the page lives under, with a slash at the end. */
  constructor(
    private readonly base: string,
    private readonly fetcher: typeof fetch = (input, init) => fetch(input, init),
  ) {}

  /** An address of the API, absolute. Addresses that the server gave out may be absolute already. */
  address(path: string): string {
    return new URL(path, this.base).href;
  }

  me = (): Promise<Me> => this.call("GET", "v1/me");

  conversations = (cursor: string | null, limit: number): Promise<Page<ConversationRow>> =>
    this.call("GET", `v1/conversations?limit=${limit}${cursor === null ? "" : `&cursor=${inPath(cursor)}`}`);

  conversation = (id: string): Promise<Conversation> => this.call("GET", `v1/conversations/${inPath(id)}`);

  /** `model`: null for the default one. */
  createConversation = (model: string | null = null): Promise<Conversation> =>
    this.call("POST", "v1/conversations", model === null ? {} : { model });

  changeConversation = (
    id: string,
    changes: Partial<Pick<Conversation, "title" | "pinned" | "head_message_id" | "model">>,
  ): Promise<ConversationRow> => this.call("PATCH", `v1/conversations/${inPath(id)}`, changes);

  deleteConversation = (id: string): Promise<null> => this.call("DELETE", `v1/conversations/${inPath(id)}`);

  send = (conversation: string, message: NewMessage): Promise<Accepted> =>
    this.call("POST", `v1/conversations/${inPath(conversation)}/messages`, message);

  answerAgain = (message: string, client_msg_id: string): Promise<Accepted> =>
    this.call("POST", `v1/messages/${inPath(message)}/responses`, { client_msg_id });

  continueReply = (reply: string, client_msg_id: string): Promise<Accepted> =>
    this.call("POST", `v1/messages/${inPath(reply)}/responses`, { client_msg_id, continue: true });

  response = (id: string): Promise<ResponseState> => this.call("GET", `v1/responses/${inPath(id)}`);

  /** What a reply's prompt was made of; read it with `readUsed`. */
  context = (response: string): Promise<Record<string, unknown>> => this.call("GET", `v1/responses/${inPath(response)}/context`);

  pinMessage = (id: string, pinned: boolean): Promise<Message> => this.call("PATCH", `v1/messages/${inPath(id)}`, { pinned });

  /** The summaries on the branch that ends with `leaf`, the newest fold first. */
  summaries = (conversation: string, leaf: string): Promise<{ data: Summary[] }> =>
    this.call("GET", `v1/conversations/${inPath(conversation)}/summaries?leaf=${inPath(leaf)}`);

  /** Another wording of a summary; `version` is that of the one it replaces. */
  rewriteSummary = (conversation: string, { through_message_id, version }: Summary, text: string): Promise<Summary> =>
    this.call("PUT", `v1/conversations/${inPath(conversation)}/summaries/${inPath(through_message_id)}`, { text, version });

  changeMe = (changes: { memory: boolean }): Promise<Me> => this.call("PATCH", "v1/me", changes);

  memories = (): Promise<{ data: Memory[] }> => this.call("GET", "v1/me/memories");

  addMemory = (text: string): Promise<Memory> => this.call("POST", "v1/me/memories", { text });

  changeMemory = (id: string, text: string): Promise<Memory> => this.call("PATCH", `v1/me/memories/${inPath(id)}`, { text });

  deleteMemory = (id: string): Promise<null> => this.call("DELETE", `v1/me/memories/${inPath(id)}`);

  models = (): Promise<{ data: Model[] }> => this.call("GET", "v1/models");

  stop = (id: string): Promise<{ status: string }> => this.call("POST", `v1/responses/${inPath(id)}/stop`);

  streamAddress = (id: string): string => this.address(`v1/responses/${inPath(id)}/stream`);

  private async call<T>(method: string, path: string, body?: unknown): Promise<T> {
    const answer = await this.fetch(method, path, body);
    if (answer.type === "opaqueredirect" || answer.status === 401) {
      throw new ApiError(401, "not_authenticated", "You are signed out.", false);
    }
    const limits = readLimits(answer.headers, Date.now());
    if (limits) this.onLimits(limits);
    const json = await readJson(answer);
    if (!answer.ok) throw toError(answer.status, json);
    return json as T;
  }

  private async fetch(method: string, path: string, body: unknown): Promise<Response> {
    const init: RequestInit = {
      method,
      // A sign-in page is no answer to an API call: see it as what it is instead of following.
      redirect: "manual",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    };
    if (body !== undefined) {
      init.headers = { "content-type": "application/json" };
      init.body = JSON.stringify(body);
    }
    try {
      return await this.fetcher(this.address(path), init);
    } catch (cause) {
      if (cause instanceof DOMException || cause instanceof TypeError) throw unreachable();
      throw cause;
    }
  }
}

const unreachable = (): ApiError => new ApiError(0, "unreachable", "The server cannot be reached.", true);

async function readJson(answer: Response): Promise<unknown> {
  let text: string;
  try {
    text = await answer.text();
  } catch {
    throw unreachable(); // the connection broke within the body
  }
  if (text === "") return null;
  try {
    return JSON.parse(text);
  } catch {
    // A proxy's own error page, most likely.
    throw new ApiError(answer.status, "not_json", `The server's answer (${answer.status}) is not understood.`, true);
  }
}

function toError(status: number, json: unknown): ApiError {
  const problem = (typeof json === "object" && json !== null ? json : {}) as Partial<Problem>;
  return new ApiError(
    status,
    problem.code ?? "http_error",
    problem.detail ?? problem.title ?? `The server answered ${status}.`,
    problem.retryable ?? status >= 500,
    problem.retry_after ?? null,
    problem,
  );
}
