import assert from "node:assert/strict";
import { test } from "node:test";
import { Markdown } from "../src/text/markdown.ts";
import { imageSource, linkTarget } from "../src/text/urls.ts";
import payloads from "./payloads.json";

const markdown = new Markdown();

test("only absolute addresses with a harmless scheme become links", () => {
  for (const good of ["https://example.org/a?b=c#d", "http://10.0.0.1:8080/", "mailto:a@example.org"]) {
    assert.equal(linkTarget(good), good);
  }
  for (const bad of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:alert(1)", "java\nscript:alert(1)", "data:text/html,x",
    "vbscript:x", "blob:https://x/y", "file:///etc/passwd", "/v1/conversations", "c/conv_1", "#x", "//", ""]) {
    assert.equal(linkTarget(bad), null, bad);
  }
});

test("images come from the text itself or not at all", () => {
  assert.ok(imageSource("data:image/png;base64,iVBORw0KGgo="));
  for (const bad of ["https://tracker.example/p.png", "/v1/me", "data:image/svg+xml;base64,PHN2Zz4=", "data:text/html;base64,x"]) {
    assert.equal(imageSource(bad), null, bad);
  }
});

test("raw HTML is shown, not used, and no payload leaves a live tag or handler in the markup", () => {
  for (const payload of payloads) {
    const html = markdown.toHtml(payload);
    const tags = html.match(/<\/?[a-z][^>]*>/gi) ?? [];
    for (const tag of tags) {
      assert.doesNotMatch(tag, /<\/?(?:script|iframe|object|embed|svg|math|form|input|style|link|meta|base|video|audio|details|template)/i, payload);
      assert.doesNotMatch(tag.replace(/"[^"]*"/g, '""'), /[\s"]on\w+\s*=/i, payload);
      assert.doesNotMatch(tag, /(?:href|src)="\s*(?:javascript|vbscript|data:text)/i, payload);
    }
  }
});

test("a few bare tags are let through, with attributes they are not", () => {
  assert.match(markdown.toHtml("H<sub>2</sub>O<br>next"), /H<sub>2<\/sub>O<br>next/);
  assert.match(markdown.toHtml('x<sub onclick="a()">2</sub>'), /&lt;sub onclick/);
});

test("code is coloured where the language is known, and escaped always", () => {
  assert.match(markdown.toHtml("```python\nif x: return '<b>'\n```"), /hljs-keyword.*&lt;b&gt;/s);
  assert.match(markdown.toHtml("```nolanguage\n<script>\n```"), /<code>&lt;script&gt;<\/code>/);
});

test("a reply's headings begin below the page's own", () => {
  assert.match(markdown.toHtml("# One"), /^<h3 class="h h-1">One<\/h3>/);
  assert.match(markdown.toHtml("###### Six"), /^<h6 class="h h-6">/);
});

test("a link definition elsewhere in the reply reaches this block", () => {
  assert.match(markdown.toHtml("See [the page][p].", "[p]: https://example.org/"), /href="https:\/\/example.org\/"/);
});
