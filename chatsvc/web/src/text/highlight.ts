// Colours for code. A handful of languages: those people ask about; anything else is shown plain.

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { escapeHtml } from "./escape.ts";

const LANGUAGES = {
  bash, c, cpp, csharp, css, diff, go, ini, java, javascript, json, python, rust, sql, typescript, xml, yaml,
};

/** Beyond this many characters colours cost more than they help. */
const MOST = 60_000;

const engine = hljs.newInstance();
for (const [name, language] of Object.entries(LANGUAGES)) engine.registerLanguage(name, language);

/** Code as HTML: escaped, and wrapped in `hljs-…` spans where the language is known. */
export function highlight(code: string, language: string): string {
  if (code.length > MOST || !engine.getLanguage(language)) return escapeHtml(code);
  return engine.highlight(code, { language, ignoreIllegals: true }).value;
}
