import assert from "node:assert/strict";
import { test } from "node:test";
import { EMPTY_SPLIT, splitGrowing, splitWhole, type Split } from "../src/text/blocks.ts";
import { randomFrom } from "./random.ts";

const FRAGMENTS = [
  "Plain words", "# Heading", "#hashtag", "***", "***bold***", "---", "===", "- item", "  nested", "1. one", "2) two", "+", "> quote",
  "```python", "```", "~~~", "    indented", "| a | b |", "|---|---|", "| 1 | 2 |", "[ref]: https://example.org/x", "see [ref]",
  "<div>", "</div>", "<!-- open", "-->", "\\", "*", "_", "`code`", "日本語の文", "🙂 emoji", "a\u2028b", "\ttab", "- [ ] task", "\r", "text  ",
];

function document(random: () => number): string {
  const lines = Math.floor(random() * 24);
  let text = "";
  for (let i = 0; i < lines; i += 1) {
    const parts = 1 + Math.floor(random() * 2);
    for (let j = 0; j < parts; j += 1) text += FRAGMENTS[Math.floor(random() * FRAGMENTS.length)];
    text += random() < 0.3 ? "\n\n" : "\n";
  }
  return text;
}

function stream(text: string, random: () => number): Split {
  let split = EMPTY_SPLIT;
  for (let at = 0; at < text.length; ) {
    at = Math.min(text.length, at + 1 + Math.floor(random() * 9));
    split = splitGrowing(split, text.slice(0, at));
    assert.equal(split.settled + split.tail.raw, text.slice(0, at).replace(/\r\n?/g, "\n"));
    assert.equal(split.blocks.map((block) => block.raw).join(""), split.settled);
  }
  return split;
}

test("blocks and tail are the text, at every step of its growth", () => {
  for (let seed = 1; seed <= 300; seed += 1) {
    const random = randomFrom(seed);
    stream(document(random), random);
  }
});

test("settled blocks are those that the whole text has", () => {
  for (let seed = 1; seed <= 300; seed += 1) {
    const random = randomFrom(seed);
    const text = document(random);
    const grown = stream(text, random);
    const whole = splitWhole(text).blocks.slice(0, grown.blocks.length);
    assert.deepEqual(grown.blocks, whole, JSON.stringify(text));
  }
});

test("a settled block keeps its identity while the text grows", () => {
  const first = splitGrowing(EMPTY_SPLIT, "One.\n\nTwo.\n\nThr\n");
  const second = splitGrowing(first, "One.\n\nTwo.\n\nThr\nee.\n\nFour.\n");
  assert.equal(first.blocks.length, 2);
  assert.equal(second.blocks[0], first.blocks[0]);
  assert.equal(second.blocks[1], first.blocks[1]);
});

test("half a line settles nothing: a # may become a #hashtag", () => {
  const half = splitGrowing(EMPTY_SPLIT, "words\n#");
  assert.equal(half.blocks.length, 0);
  assert.equal(splitGrowing(half, "words\n# Title\n\nmore\n").blocks.length, 2);
});

test("an open fence stays one block, blank lines and all", () => {
  const split = splitGrowing(EMPTY_SPLIT, "```js\nlet a;\n\n# no heading\n\nlet b;\n");
  assert.equal(split.blocks.length, 0);
});

test("a text that is replaced is split anew", () => {
  const before = splitGrowing(EMPTY_SPLIT, "Old one.\n\nOld two.\n");
  const after = splitGrowing(before, "New.\n\nNext.\n");
  assert.equal(after.settled, "New.\n\n");
});

test("link definitions of settled blocks are kept for the others", () => {
  const split = splitGrowing(EMPTY_SPLIT, "[a]: https://a.example\n\nSee [a].\n\nMore\n");
  assert.equal(split.definitions, "[a]: https://a.example");
});
