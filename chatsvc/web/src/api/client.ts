// The HTTP API as functions. Every failure is an ApiError: the server's problem document, or code `unreachable`.

import type { Accepted, Conversation, ConversationRow, Me, Page, Problem, ResponseState } from "./types.ts";

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

export class Client {
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
    this.call("GET", `v1/conversations?limit=${limit}${cursor === null ? "" : `&cursor=${encodeURIComponent(cursor)}`}`);

  conversation = (id: string): Promise<Conversation> => this.call("GET", `v1/conversations/${encodeURIComponent(id)}`);

  createConversation = (): Promise<Conversation> => this.call("POST", "v1/conversations", {});

  changeConversation = (
    id: string,
    changes: Partial<Pick<ConversationRow, "title" | "pinned" | "head_message_id">>,
  ): Promise<ConversationRow> => this.call("PATCH", `v1/conversations/${encodeURIComponent(id)}`, changes);

  deleteConversation = (id: string): Promise<null> => this.call("DELETE", `v1/conversations/${encodeURIComponent(id)}`);

  send = (conversation: string, message: NewMessage): Promise<Accepted> =>
    this.call("POST", `v1/conversations/${encodeURIComponent(conversation)}/messages`, message);

  answerAgain = (message: string, client_msg_id: string): Promise<Accepted> =>
    this.call("POST", `v1/messages/${encodeURIComponent(message)}/responses`, { client_msg_id });

  continueReply = (reply: string, client_msg_id: string): Promise<Accepted> =>
    this.call("POST", `v1/messages/${encodeURIComponent(reply)}/responses`, { client_msg_id, continue: true });

  response = (id: string): Promise<ResponseState> => this.call("GET", `v1/responses/${encodeURIComponent(id)}`);

  stop = (id: string): Promise<{ status: string }> => this.call("POST", `v1/responses/${encodeURIComponent(id)}/stop`);

  streamAddress = (id: string): string => this.address(`v1/responses/${encodeURIComponent(id)}/stream`);

  private async call<T>(method: string, path: string, body?: unknown): Promise<T> {
    const answer = await this.fetch(method, path, body);
    if (answer.type === "opaqueredirect" || answer.status === 401) {
      throw new ApiError(401, "not_authenticated", "You are signed out.", false);
    }
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
