// The last wall: what comes out of the markdown parser is parsed by the browser and stripped to a short list of tags
// and attributes. It runs after markdown, on what will really be drawn.

import createDOMPurify, { type Config, type DOMPurify } from "dompurify";
import { imageSource, linkTarget } from "./urls.ts";

const CONFIG: Config & { RETURN_DOM_FRAGMENT: true } = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "button", "code", "del", "em", "figcaption", "figure", "h3", "h4", "h5", "h6", "hr", "i", "img",
    "kbd", "li", "mark", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["align", "alt", "class", "href", "src", "start", "tabindex", "title", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  KEEP_CONTENT: true,
  RETURN_DOM_FRAGMENT: true,
};

const CLASSES = /^(?:code|code-copy|plain|h h-\d|hljs-[\w -]+)$/;

export class Sanitiser {
  private readonly purify: DOMPurify;

  constructor(window: Window & typeof globalThis) {
    this.purify = createDOMPurify(window);
    this.purify.addHook("afterSanitizeAttributes", harden);
  }

  /** HTML as nodes that are safe to put into the page. */
  toFragment(html: string): DocumentFragment {
    return this.purify.sanitize(html, CONFIG);
  }
}

function harden(node: Element): void {
  if (node.hasAttribute("class") && !CLASSES.test(node.getAttribute("class") ?? "")) node.removeAttribute("class");
  if (node.tagName === "A") hardenLink(node);
  if (node.tagName === "IMG" && imageSource(node.getAttribute("src") ?? "") === null) node.remove();
  if (node.tagName === "BUTTON") node.setAttribute("type", "button");
}

function hardenLink(link: Element): void {
  const target = linkTarget(link.getAttribute("href") ?? "");
  if (target === null) {
    link.removeAttribute("href");
    return;
  }
  link.setAttribute("target", "_blank");
  link.setAttribute("rel", "noopener noreferrer nofollow");
}
