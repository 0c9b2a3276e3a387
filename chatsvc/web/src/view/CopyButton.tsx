import { useEffect, useState } from "preact/hooks";
import { copyText } from "./clipboard.ts";
import { IconButton } from "./Icon.tsx";

const SHOWN_MS = 1_600;

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [result, setResult] = useState<boolean | null>(null);
  useEffect(() => {
    if (result === null) return undefined;
    const timer = setTimeout(() => setResult(null), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [result]);
  const name = result === null ? label : result ? "Copied" : "Copying is not allowed here";
  return (
    <IconButton icon={result ? "check" : "copy"} label={name} onClick={() => void copyText(text, window).then(setResult)} />
  );
}
