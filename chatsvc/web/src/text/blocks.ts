// Splits markdown into top-level blocks as it grows, so that only the last one is parsed and drawn again.
//
// A block is settled once a whole line that belongs to the next one has arrived: in markdown a complete line's kind
// cannot be changed by later lines, save within the last block (setext headings, tables, loose lists). When the reply
// has ended the whole text is split once more, so that what stays on the screen is what a fresh page would draw.

import { Lexer, type Token } from "marked";

export interface Block {
  /** Offset of its first character: its name as long as the text only grows. */
  readonly start: number;
  readonly raw: string;
}

export interface Split {
  /** The text of all blocks. */
  readonly settled: string;
  readonly blocks: readonly Block[];
  /** The unsettled end; empty raw when there is none. */
  readonly tail: Block;
  /** Link definitions (`[name]: address`) among the settled blocks; every block may refer to them. */
  readonly definitions: string;
}

export const EMPTY_SPLIT: Split = { settled: "", blocks: [], tail: { start: 0, raw: "" }, definitions: "" };

/** marked counts every line end as one `\n`; so do the offsets here. */
const normalise = (text: string): string => text.replace(/\r\n?/g, "\n");

const topLevel = (text: string): Token[] => new Lexer().blockTokens(text, []);

interface Pieces {
  blocks: Block[];
  definitions: string[];
}

/** Blocks of `text`; blank lines go with the block before them. */
function cut(text: string, offset: number): Pieces {
  const blocks: Block[] = [];
  const definitions: string[] = [];
  let start = offset;
  for (const token of topLevel(text)) {
    const raw = token.raw;
    if (token.type === "def") definitions.push(raw.trim());
    const last = blocks[blocks.length - 1];
    if (token.type === "space" && last) blocks[blocks.length - 1] = { start: last.start, raw: last.raw + raw };
    else blocks.push({ start, raw });
    start += raw.length;
  }
  return { blocks, definitions };
}

/** Split a text that will not grow. */
export function splitWhole(text: string): Split {
  const whole = normalise(text);
  const { blocks, definitions } = cut(whole, 0);
  return { settled: whole, blocks, tail: { start: whole.length, raw: "" }, definitions: definitions.join("\n") };
}

/** Split a text that grows: `next` is the text so far. Settled blocks keep their identity from call to call. */
export function splitGrowing(previous: Split, next: string): Split {
  const text = normalise(next);
  const kept = text.startsWith(previous.settled) ? previous : EMPTY_SPLIT;
  const from = kept.tail.start;
  const rest = text.slice(from);
  const lines = rest.slice(0, rest.lastIndexOf("\n") + 1);
  const { blocks, definitions } = cut(lines, from);
  const settled = blocks.slice(0, -1);
  if (settled.length === 0) return { ...kept, tail: { start: from, raw: rest } };
  const last = blocks[blocks.length - 1];
  const start = last ? last.start : from;
  const lastIsDefinition = definitions.length > 0 && last?.raw.trim() === definitions[definitions.length - 1];
  const known = lastIsDefinition ? definitions.slice(0, -1) : definitions;
  return {
    settled: text.slice(0, start),
    blocks: [...kept.blocks, ...settled],
    tail: { start, raw: text.slice(start) },
    definitions: [kept.definitions, ...known].filter((part) => part !== "").join("\n"),
  };
}
