// Markdown of a reply as HTML. Raw HTML in it is shown as the text it is, save a few bare tags without attributes;
// the sanitiser still goes over the result (sanitise.ts), so two walls stand between a model's text and the page.

import { Marked, type RendererObject, type Tokens } from "marked";
import { escapeHtml } from "./escape.ts";
import { highlight } from "./highlight.ts";
import { imageSource, linkTarget } from "./urls.ts";

const BARE_TAG = /^<\/?(?:br|sub|sup|kbd|mark|u|s)\s*\/?>$/i;

/** A live block longer than this is not coloured until it has settled. */
const LIVE_COLOURS = 8_000;

/** A block longer than this is shown as plain text. */
const LONGEST = 200_000;

function renderer(live: boolean): RendererObject {
  return {
    html({ text }: Tokens.HTML | Tokens.Tag): string {
      return BARE_TAG.test(text.trim()) ? text : escapeHtml(text);
    },
    link({ href, title, tokens }: Tokens.Link): string {
      const inner = this.parser.parseInline(tokens);
      const target = linkTarget(href);
      if (target === null) return inner;
      const hint = title ? ` title="${escapeHtml(title)}"` : "";
      return `<a href="${escapeHtml(target)}"${hint}>${inner}</a>`;
    },
    image({ href, text }: Tokens.Image): string {
      const source = imageSource(href);
      if (source !== null) return `<img src="${escapeHtml(source)}" alt="${escapeHtml(text)}">`;
      const target = linkTarget(href);
      const label = `Image: ${escapeHtml(text || "no description")}`;
      return target === null ? label : `<a href="${escapeHtml(target)}">${label}</a>`;
    },
    code({ text, lang }: Tokens.Code): string {
      const language = (lang ?? "").trim().split(/\s+/)[0] ?? "";
      const inner = live && text.length > LIVE_COLOURS ? escapeHtml(text) : highlight(text, language.toLowerCase());
      return (
        `<figure class="code"><figcaption><span>${escapeHtml(language || "text")}</span>` +
        `<button type="button" class="code-copy">Copy</button></figcaption>` +
        `<pre tabindex="0"><code>${inner}</code></pre></figure>`
      );
    },
    heading({ tokens, depth }: Tokens.Heading): string {
      // The page's own headings come first in the outline, so those of a reply begin at the third level.
      const level = Math.min(depth + 2, 6);
      return `<h${level} class="h h-${depth}">${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox({ checked }: Tokens.Checkbox): string {
      return checked ? "☑ " : "☐ ";
    },
  };
}

const options = { gfm: true, breaks: true, async: false } as const;

/** Turn one block into HTML. `definitions` are link definitions from elsewhere in the reply. */
export class Markdown {
  private readonly settled = new Marked(options, { renderer: renderer(false) });
  private readonly live = new Marked(options, { renderer: renderer(true) });

  toHtml(raw: string, definitions = "", live = false): string {
    if (raw.length > LONGEST) return `<p class="plain">${escapeHtml(raw)}</p>`;
    const source = definitions !== "" && raw.includes("[") ? `${definitions}\n\n${raw}` : raw;
    return (live ? this.live : this.settled).parse(source) as string;
  }
}
