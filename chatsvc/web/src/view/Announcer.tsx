// Reads the reply to those who cannot see it: block by block as they settle, then how it ended.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Thread } from "../state/thread.ts";
import { EMPTY_SPLIT, splitGrowing } from "../text/blocks.ts";
import { useApp } from "./context.ts";
import { degradedText, queueText } from "./Status.tsx";

const LONGEST = 1_200;

const WRITING = "The assistant is writing.";
const ENDINGS: Record<string, string> = { complete: "Reply finished.", stopped: "Reply stopped.", failed: "Reply failed." };

export function Announcer({ thread }: { thread: Thread }) {
  const { markdown, sanitiser } = useApp();
  const [text, setText] = useState("");
  const progress = useRef({ id: "", blocks: 0 });
  const last = thread.branch.value.at(-1);
  const live = last ? thread.replies.live.value.get(last.id) : undefined;
  const blocks = live?.view.value.split.blocks ?? [];
  const plain = (raw: string): string => sanitiser.toFragment(markdown.toHtml(raw)).textContent ?? "";

  const phase = live?.phase.value;
  const reply = live?.view.value.reply;
  const queue = reply?.queue;
  const given = degradedText(reply?.degraded ?? [], reply?.model ?? null);

  useEffect(() => {
    if (phase === "queued" && queue) setText(queueText(queue));
    else if (phase === "streaming") setText(given ?? WRITING);
    // The place is known before the time.
  }, [live, phase, queue?.etaSeconds === null, given]);

  useEffect(() => {
    if (!last || !live) return;
    if (progress.current.id !== last.id) {
      // What the reply begins with was there before: read on from the block in which it broke off.
      progress.current = { id: last.id, blocks: splitGrowing(EMPTY_SPLIT, last.content).blocks.length };
    }
    const settled = blocks.slice(progress.current.blocks);
    if (settled.length === 0) return;
    progress.current.blocks = blocks.length;
    setText(plain(settled.map((block) => block.raw).join("")).slice(0, LONGEST));
  }, [last?.id, live, blocks.length]);

  useEffect(() => {
    if (!last || progress.current.id !== last.id || live) return;
    setText(ENDINGS[last.status] ?? "");
  }, [last?.id, last?.status, live]);

  return (
    <div class="sr-only" role="status" aria-live="polite">
      {text}
    </div>
  );
}
