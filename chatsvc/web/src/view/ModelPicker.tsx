import type { Thread } from "../state/thread.ts";
import { useApp } from "./context.ts";

/** Which model answers in this conversation; nothing where there is no choice. */
export function ModelPicker({ thread }: { thread: Thread }) {
  const app = useApp();
  const models = app.models.value;
  const chosen = thread.model.value ?? models.find((model) => model.default)?.id ?? "";
  if (models.length < 2 || thread.state.value === "missing") return null;
  const known = models.some((model) => model.id === chosen);
  return (
    <select
      class="model-picker"
      aria-label="Model for this conversation"
      value={chosen}
      onChange={(event) => {
        const { value } = event.currentTarget;
        void app.act(() => thread.chooseModel(value));
      }}
    >
      {known ? null : (
        <option value={chosen} disabled>
          {chosen} (not served any more)
        </option>
      )}
      {models.map(({ id, ready }) => (
        <option key={id} value={id}>
          {ready === false ? `${id} (not ready)` : id}
        </option>
      ))}
    </select>
  );
}
