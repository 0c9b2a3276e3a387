// What a reply's prompt was made of, as the stream's `context` event and the API tell it. Pure.

export type Part = "system" | "memory" | "summary" | "pinned" | "verbatim" | "recalled" | "question";

/** In the order in which they stand in the prompt. */
export const PARTS: readonly Part[] = ["system", "memory", "summary", "pinned", "verbatim", "recalled", "question"];

/** All numbers but `leftOut` are tokens. */
export interface Used {
  readonly window: number;
  /** Kept free for the reply; null where that was not told. */
  readonly reserve: number | null;
  readonly prompt: number;
  /** Null until the engine has said so. */
  readonly cached: number | null;
  readonly parts: Readonly<Partial<Record<Part, number>>>;
  /** Oldest turns that neither stood in the prompt nor in its summary. */
  readonly leftOut: number;
  readonly summary: { readonly through: string; readonly version: number | null } | null;
  /** Messages of old turns that were quoted, the oldest first. */
  readonly recalled: readonly string[];
}

type Data = Readonly<Record<string, unknown>>;

const isData = (value: unknown): value is Data => typeof value === "object" && value !== null;
const asNumber = (value: unknown): number | null => (typeof value === "number" ? value : null);
const asTexts = (value: unknown): string[] =>
  Array.isArray(value) ? value.filter((each): each is string => typeof each === "string") : [];

/** From either form; null where there is no window to measure by. */
export function readUsed(data: Data): Used | null {
  const [window, prompt] = [asNumber(data["window"]), asNumber(data["prompt_tokens"])];
  if (window === null || window <= 0 || prompt === null) return null;
  const told = isData(data["parts"]) ? data["parts"] : {};
  const parts: Partial<Record<Part, number>> = {};
  for (const part of PARTS) parts[part] = asNumber(told[part]) ?? 0;
  const turns = data["recalled"];
  return {
    window,
    reserve: asNumber(data["reply_reserve"]),
    prompt,
    cached: asNumber(data["cached_tokens"]),
    parts,
    leftOut: asNumber(data["left_out"]) ?? 0,
    summary: readSummary(data),
    recalled: Array.isArray(turns)
      ? turns.flatMap((turn) => (isData(turn) ? asTexts(turn["message_ids"]) : []))
      : asTexts(data["retrieved"]),
  };
}

function readSummary(data: Data): Used["summary"] {
  const { summary, summary_through: through } = data;
  if (isData(summary) && typeof summary["through_message_id"] === "string") {
    return { through: summary["through_message_id"], version: asNumber(summary["version"]) };
  }
  return typeof through === "string" ? { through, version: null } : null;
}

/** Where each recalled passage begins: what follows on a message that was recalled with it needs no place of its own. */
export function turnsOf(recalled: readonly string[], parentOf: (id: string) => string | null | undefined): string[] {
  const all = new Set(recalled);
  return [...all].filter((id) => {
    const parent = parentOf(id);
    return parent === null || parent === undefined || !all.has(parent);
  });
}
