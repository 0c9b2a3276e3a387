// A reply's text. Settled blocks are drawn once; only the unsettled end is drawn again as it grows.

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { LiveReply } from "../state/live.ts";
import { splitWhole, type Split } from "../text/blocks.ts";
import { copyText } from "./clipboard.ts";
import { useApp } from "./context.ts";

interface BlockProps {
  raw: string;
  definitions: string;
  live: boolean;
}

function BlockView({ raw, definitions, live }: BlockProps) {
  const { markdown, sanitiser } = useApp();
  const element = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    element.current?.replaceChildren(sanitiser.toFragment(markdown.toHtml(raw, definitions, live)));
  }, [raw, definitions, live]);
  return <div class="block" ref={element} />;
}

function Blocks({ split, live }: { split: Split; live: boolean }) {
  const { blocks, tail, definitions } = split;
  const shown = tail.raw === "" ? blocks : [...blocks, tail];
  return (
    <div class={live ? "prose is-live" : "prose"} onClick={copyCode}>
      {shown.map((block) => (
        <BlockView key={block.start} raw={block.raw} definitions={definitions} live={live && block === tail} />
      ))}
    </div>
  );
}

/** One component for both, so that the nodes on the screen stay when the reply ends. */
export function ReplyBody({ content, live }: { content: string; live: LiveReply | null }) {
  const whole = useMemo(() => (live ? null : splitWhole(content)), [live, content]);
  const running = live?.view.value ?? null;
  // Until the first text arrives, what is known already is better than nothing: what the store had, what is gone on from.
  const silent = running?.reply.text === "";
  const resumed = useMemo(() => (silent ? splitWhole(content) : null), [silent, content]);
  const split = whole ?? resumed ?? running?.split;
  if (!split) return null;
  return <Blocks split={split} live={live !== null} />;
}

function copyCode(event: MouseEvent): void {
  const button = event.target instanceof Element ? event.target.closest(".code-copy") : null;
  const code = button?.closest("figure")?.querySelector("code");
  if (!button || !code) return;
  void copyText(code.textContent ?? "", window).then((copied) => {
    button.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1_600);
  });
}
