const SUGGESTIONS = [
  "What is the capital of France?",
  "Explain how tides work, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Give me a week of simple vegetarian dinners.",
];

/** The start of a new conversation. */
export function Empty({ onPick }: { onPick: (text: string) => void }) {
  return (
    <div class="empty">
      <h2>What is on your mind?</h2>
      <ul>
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
