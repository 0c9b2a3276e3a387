const SUGGESTIONS = [
  "What is the capital of France?",
  "Explain how tides work, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Give me a week of simple vegetarian dinners.",
];

interface EmptyProps {
  /** False while something is written already: a suggestion takes its place. */
  offering: boolean;
  onPick: (text: string) => void;
}

/** The start of a new conversation. */
export function Empty({ offering, onPick }: EmptyProps) {
  return (
    <div class="empty">
      <h2>What is on your mind?</h2>
      <ul class={offering ? "" : "is-held-back"}>
        {SUGGESTIONS.map((text) => (
          <li key={text}>
            <button type="button" onClick={() => onPick(text)}>
              {text}
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}
