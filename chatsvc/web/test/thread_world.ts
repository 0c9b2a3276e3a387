// A conversation as the page holds it, beside a server that is played.
import { ApiError, type Client } from "../src/api/client.ts";
import type { Accepted, ConversationRow, Message } from "../src/api/types.ts";
import { Drafts } from "../src/state/drafts.ts";
import type { LiveSurroundings } from "../src/state/replies.ts";
import { Thread } from "../src/state/thread.ts";

export const TIME = "2026-01-01T00:00:00Z";

export function stored(id: string, parent: string | null, role: Message["role"], status: Message["status"] = "complete"): Message {
  return {
    id,
    parent_id: parent,
    role,
    content: `text of ${id}`,
    status,
    model: null,
    response_id: role === "assistant" ? `resp_${id}` : null,
    finish_reason: null,
    tokens: null,
    degraded: [],
    created_at: TIME,
  };
}

export const row = (updated_at = TIME): ConversationRow => ({
  id: "conv_1",
  title: null,
  pinned: false,
  head_message_id: null,
  created_at: TIME,
  updated_at,
});

export const accepted = (number: number): Accepted => ({
  message_id: `a${number}`,
  user_message_id: `u${number}`,
  response_id: `resp_a${number}`,
  stream_url: `/v1/responses/resp_a${number}/stream?token=t`,
  status: "streaming",
  queue_position: null,
  served_model: "small",
  degraded: [],
});

class FakeSource extends EventTarget {
  readyState = 0;
  close(): void {
    this.readyState = 2;
  }
  say(name: string, id: number, data: unknown): void {
    this.dispatchEvent(Object.assign(new Event(name), { data: JSON.stringify(data), lastEventId: String(id) }));
  }
}

export function setUp(id: string | null, client: Partial<Client>) {
  const sources = new Map<string, FakeSource>();
  const surroundings: LiveSurroundings = {
    connect: (url) => {
      const source = new FakeSource();
      sources.set(new URL(url).pathname, source);
      return source as unknown as EventSource;
    },
    setTimeout: () => 0,
    clearTimeout: () => undefined,
    random: () => 0,
    now: () => 0,
    nextFrame: (run) => {
      run();
      return 0;
    },
    cancelFrame: () => undefined,
    onAttention: () => () => undefined,
  };
  const nothing = (): Promise<never> => Promise.reject(new ApiError(404, "not_found", "", false));
  const known: Partial<Client> = {
    address: (path) => new URL(path, "http://h/").href,
    context: nothing,
    response: nothing,
    summaries: nothing,
    ...client,
  };
  const changes: ConversationRow[] = [];
  const thread = new Thread(id, {
    client: known as Client,
    drafts: new Drafts(null),
    surroundings,
    wait: () => Promise.resolve(),
    mark: () => 0,
    onChange: (changed) => {
      changes.push(changed);
      return changed;
    },
  });
  return { thread, sources, changes };
}

export const shown = (thread: Thread): string[] => thread.branch.value.map((message) => message.id);
