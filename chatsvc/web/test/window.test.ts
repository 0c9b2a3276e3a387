import assert from "node:assert/strict";
import { test } from "node:test";
import { Rows } from "../src/list/window.ts";
import { randomFrom } from "./random.ts";

function rowsOf(count: number, estimate = 100): Rows {
  const rows = new Rows();
  rows.set(Array.from({ length: count }, (_, index) => ({ key: `k${index}`, estimate })));
  return rows;
}

test("only rows near the viewport are drawn, and the paddings stand for the rest", () => {
  const rows = rowsOf(2_000);
  const range = rows.range(50_000, 50_800, 200);
  assert.deepEqual(range, { first: 498, end: 511, before: 49_800, after: 200_000 - 51_100 });
});

test("paddings and drawn rows are always the whole, whatever was measured", () => {
  for (let seed = 1; seed <= 100; seed += 1) {
    const random = randomFrom(seed);
    const rows = rowsOf(1 + Math.floor(random() * 300));
    const heights = new Map<string, number>();
    for (let i = 0; i < 50; i += 1) heights.set(`k${Math.floor(random() * 300)}`, Math.floor(random() * 900));
    rows.measure(heights, 0);
    const top = random() * rows.total;
    const { first, end, before, after } = rows.range(top, top + 700, 300);
    let drawn = 0;
    for (let index = first; index < end; index += 1) drawn += rows.top(index + 1) - rows.top(index);
    assert.equal(before + drawn + after, rows.total);
    assert.ok(rows.top(first) <= Math.max(0, top - 300));
    assert.ok(rows.top(end) >= Math.min(rows.total, top + 1_000));
  }
});

test("rows above the reader's line move it by as much as they grew; rows below do not", () => {
  const rows = rowsOf(100);
  assert.equal(rows.measure(new Map([["k3", 160], ["k50", 500]]), 2_000), 60);
  assert.equal(rows.total, 100 * 100 + 60 + 400);
  assert.equal(rows.measure(new Map([["k3", 160]]), 2_000), 0, "the same height again is no change");
});

test("heights are kept when rows are added", () => {
  const rows = rowsOf(3);
  rows.measure(new Map([["k0", 40]]), 0);
  rows.set(["new", "k0", "k1"].map((key) => ({ key, estimate: 100 })));
  assert.equal(rows.top(2), 140);
});

test("an empty list has an empty range", () => {
  assert.deepEqual(new Rows().range(0, 800, 100), { first: 0, end: 0, before: 0, after: 0 });
});

test("a height that was only guessed moves nothing where all rows are drawn; a true one that changes does", () => {
  const rows = rowsOf(3, 50);
  assert.equal(rows.measure(new Map([["k0", 90], ["k1", 60]]), 200, false), 0);
  assert.equal(rows.measure(new Map([["k0", 130]]), 200, false), 40);
  assert.equal(rows.topOf("k2"), 190);
  assert.equal(rows.topOf("gone"), null);
});
