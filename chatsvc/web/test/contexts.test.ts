import assert from "node:assert/strict";
import { test } from "node:test";
import { signal } from "@preact/signals";
import { ApiError, type Client } from "../src/api/client.ts";
import type { Message, Summary } from "../src/api/types.ts";
import { Contexts } from "../src/state/contexts.ts";
import { Drafts } from "../src/state/drafts.ts";
import type { LiveReplies } from "../src/state/replies.ts";
import { readUsed, type Used } from "../src/stream/used.ts";
import { stored, TIME } from "./thread_world.ts";

const message = (id: string, role: Message["role"]): Message => ({ ...stored(id, null, role), content: id });
const turns = (...names: string[]): Message[] => names.flatMap((name) => [message(`q${name}`, "user"), message(`a${name}`, "assistant")]);
const summary = (through: string, version = 1, text = "facts"): Summary => ({
  id: `${through}.${version}`,
  through_message_id: through,
  version,
  text,
  tokens: 3,
  edited: version > 1,
  created_at: TIME,
});
const report = (through: string | null, version = 1): Record<string, unknown> => ({
  window: 100,
  prompt_tokens: 10,
  summary: through === null ? null : { id: "s", version, through_message_id: through, tokens: 3 },
});
const settled = (): Promise<void> => new Promise((resolve) => setTimeout(resolve));

function setUp(path: Message[], client: Partial<Client>, drafts = new Drafts(null)) {
  const branch = signal<readonly Message[]>([]);
  const replies = { live: signal(new Map()) } as unknown as LiveReplies;
  const known: Partial<Client> = { response: () => Promise.resolve({ status: "complete" }), ...client };
  const contexts = new Contexts({ client: known as Client, drafts, conversation: signal("conv_1"), branch, replies });
  branch.value = path;
  return { contexts, branch };
}

test("the fold is that of the summary nearest to the end of the branch", async () => {
  const asked: string[] = [];
  const client: Partial<Client> = {
    summaries: (_, leaf) => {
      asked.push(leaf);
      return Promise.resolve({ data: leaf === "a9" ? [summary("a1")] : [summary("a2"), summary("a1")] });
    },
    context: () => Promise.resolve(report("a2")),
  };
  const path = turns("1", "2", "3");
  const { contexts, branch } = setUp(path, client);
  await settled();
  assert.equal(contexts.fold.value?.through_message_id, "a2");
  assert.equal(contexts.latest.value?.prompt, 10);
  branch.value = [...path, ...turns("4")];
  await settled();
  assert.deepEqual(asked, ["a3"]); // a branch that grew has the summaries it had
  branch.value = [...path.slice(0, 2), ...turns("9")];
  assert.equal(contexts.fold.value?.through_message_id, "a1");
  await settled();
  assert.deepEqual(asked, ["a3", "a9"]);
});

test("a reply made of a newer summary than is known has it fetched", async () => {
  let newest = summary("a1");
  let asked = 0;
  const client: Partial<Client> = {
    summaries: () => {
      asked += 1;
      return Promise.resolve({ data: [newest] });
    },
    context: (response) => Promise.resolve(report("a1", response === "resp_a3" ? 1 : 2)),
  };
  const { contexts } = setUp(turns("1", "2", "3"), client);
  await settled();
  assert.equal(asked, 1);
  newest = summary("a1", 2, "other words");
  contexts.want("resp_a2");
  await settled();
  assert.equal(asked, 2);
  assert.equal(contexts.fold.value?.text, "other words");
});

test("what was asked for once is not asked for again, unless it could not be answered", async () => {
  const asked: string[] = [];
  let error: ApiError | null = new ApiError(503, "store_unavailable", "", true);
  const client: Partial<Client> = {
    summaries: () => Promise.resolve({ data: [] }),
    context: (response) => {
      asked.push(response);
      return error ? Promise.reject(error) : Promise.resolve(report(null));
    },
  };
  const { contexts } = setUp([], client);
  contexts.want("r1");
  await settled();
  error = new ApiError(404, "not_found", "", false);
  contexts.want("r1");
  await settled();
  contexts.want("r1");
  error = null;
  contexts.want("r2");
  contexts.want("r2");
  await settled();
  assert.deepEqual(asked, ["r1", "r1", "r2"]);
});

test("a summary that changed meanwhile is fetched, what was written is kept, and then replaces the newer one", async () => {
  let newest = summary("a1");
  const client: Partial<Client> = {
    summaries: () => Promise.resolve({ data: [newest] }),
    context: () => Promise.resolve(report("a1")),
    rewriteSummary: (_, { version }, text) => {
      if (version !== newest.version) return Promise.reject(new ApiError(409, "summary_changed", "", false));
      newest = summary("a1", version + 1, text);
      return Promise.resolve(newest);
    },
  };
  const { contexts } = setUp(turns("1", "2"), client);
  await settled();
  const known = contexts.fold.value;
  assert.ok(known);
  newest = summary("a1", 2, "theirs");
  const draft = { through: "a1", version: 1, text: " mine " };
  contexts.write(draft);
  await assert.rejects(contexts.save(known, draft), (error: ApiError) => error.code === "summary_changed");
  assert.equal(contexts.fold.value?.text, "theirs");
  assert.equal(contexts.draft.value, draft);
  await contexts.save(contexts.fold.value, draft);
  assert.equal(contexts.fold.value.text, "mine");
  assert.equal(contexts.draft.value, null);
});

test("what was written about a summary that a further fold has followed is not stored where no prompt of the branch shows it", async () => {
  let known = [summary("a1")];
  const stored: [string, string][] = [];
  const client: Partial<Client> = {
    summaries: () => Promise.resolve({ data: known }),
    context: () => Promise.resolve(report("a1")),
    rewriteSummary: (_, { through_message_id: through, version }, text) => {
      stored.push([through, text]);
      return Promise.resolve(summary(through, version + 1, text));
    },
  };
  const { contexts } = setUp(turns("1", "2", "3"), client);
  await settled();
  const draft = { through: "a1", version: 1, text: "mine" };
  contexts.write(draft);
  const before = contexts.fold.value!;
  known = [summary("a2"), summary("a1")];
  await assert.rejects(contexts.save(before, draft), (error: ApiError) => error.code === "summary_changed");
  assert.equal(contexts.draft.value, draft);
  assert.equal(contexts.fold.value?.through_message_id, "a2");
  await contexts.save(contexts.fold.value, draft);
  assert.deepEqual(stored, [["a2", "mine"]]);
});

test("what is written about one branch's summary is not offered for another branch's, and is there when one comes back", async () => {
  const client: Partial<Client> = {
    summaries: (_, leaf) => Promise.resolve({ data: [leaf === "a9" ? summary("a8") : summary("a1")] }),
    context: () => Promise.resolve(report(null)),
  };
  const path = turns("1", "2");
  const other = turns("8", "9");
  const drafts = new Drafts(null);
  const { contexts, branch } = setUp(path, client, drafts);
  await settled();
  const mine = { through: "a1", version: 1, text: "of the first branch" };
  contexts.write(mine);
  branch.value = other;
  await settled();
  contexts.read();
  assert.equal(contexts.fold.value?.through_message_id, "a8");
  assert.equal(contexts.draft.value, null);
  const theirs = { through: "a8", version: 1, text: "of the second branch" };
  contexts.write(theirs);
  assert.equal(contexts.draft.value, theirs);
  branch.value = path;
  assert.equal(contexts.draft.value, mine);
  const { contexts: again, branch: shown } = setUp(other, client, drafts);
  again.read();
  assert.deepEqual(again.draft.value, theirs);
  again.write(null);
  shown.value = path;
  assert.deepEqual(again.draft.value, mine);
  await settled();
});

test("that a summary changed is said also when the newer one cannot be fetched", async () => {
  let away = false;
  const client: Partial<Client> = {
    summaries: () => (away ? Promise.reject(new ApiError(503, "store_unavailable", "", true)) : Promise.resolve({ data: [summary("a1")] })),
    context: () => Promise.resolve(report("a1")),
    rewriteSummary: () => {
      away = true;
      return Promise.reject(new ApiError(409, "summary_changed", "", false));
    },
  };
  const { contexts } = setUp(turns("1", "2"), client);
  await settled();
  const draft = { through: "a1", version: 1, text: "mine" };
  contexts.write(draft);
  await assert.rejects(contexts.save(contexts.fold.value!, draft), (error: ApiError) => error.code === "store_unavailable");
  assert.equal(contexts.draft.value, draft);
});

test("after a long prompt it is looked for a fold, ever more seldom, for minutes; after a short one not at all", async () => {
  let asked = 0;
  const client: Partial<Client> = {
    summaries: () => {
      asked += 1;
      return Promise.resolve({ data: asked > 2 ? [summary("a1")] : [] });
    },
    context: () => Promise.resolve(report(null)),
  };
  const { contexts } = setUp(turns("1", "2"), client);
  const used = (prompt: number): Used => readUsed({ window: 100, prompt_tokens: prompt })!;
  const beat = async (): Promise<void> => {
    contexts.beat();
    await settled();
  };
  await settled();
  contexts.ended("resp_a2", used(10));
  await beat();
  assert.equal(asked, 1);
  contexts.ended("resp_a2", used(70));
  await beat();
  assert.equal(contexts.fold.peek(), null);
  await beat();
  assert.equal(contexts.fold.value?.through_message_id, "a1");
  for (let count = 0; count < 18; count += 1) await beat();
  assert.equal(asked, 8);
  for (let count = 0; count < 80; count += 1) await beat();
  assert.equal(asked, 12);
  for (let count = 0; count < 300; count += 1) await beat();
  assert.equal(asked, 12);
  contexts.ended("resp_a2", used(70));
  await beat();
  assert.equal(asked, 13);
});

test("what the stream did not tell of the newest reply is asked for once", async () => {
  const asked: string[] = [];
  const client: Partial<Client> = {
    summaries: () => Promise.resolve({ data: [] }),
    context: (response) => {
      asked.push(response);
      return Promise.resolve({ ...report(null), reply_reserve: 25, cached_tokens: 8 });
    },
  };
  const { contexts, branch } = setUp([], client);
  branch.value = [message("q1", "user"), { ...message("a1", "assistant"), status: "streaming" }];
  contexts.wantLatest();
  contexts.note("resp_a1", readUsed({ window: 100, prompt_tokens: 10, cached_tokens: null }));
  branch.value = turns("1");
  contexts.want("resp_a1");
  assert.deepEqual(asked, []);
  contexts.wantLatest();
  await settled();
  contexts.wantLatest();
  assert.deepEqual(asked, ["resp_a1"]);
  assert.deepEqual([contexts.latest.value?.reserve, contexts.latest.value?.cached], [25, 8]);
});

test("a summary that is being reworded waits for its writer to come back, until it is given up", async () => {
  const client: Partial<Client> = { summaries: () => Promise.resolve({ data: [summary("a1")] }), context: () => Promise.resolve(report("a1")) };
  const drafts = new Drafts(null);
  const first = setUp(turns("1", "2"), client, drafts).contexts;
  const draft = { through: "a1", version: 1, text: "half a th" };
  first.write(draft);
  first.dispose();
  const second = setUp(turns("1", "2"), client, drafts).contexts;
  second.read();
  assert.deepEqual(second.draft.value, draft);
  second.write(null);
  const third = setUp(turns("1", "2"), client, drafts).contexts;
  third.read();
  assert.equal(third.draft.value, null);
  await settled();
});
