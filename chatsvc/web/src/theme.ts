// Runs before the first paint, so that the page never flashes in the other colours.

import { openStorage } from "./state/drafts.ts";
import { applyTheme, readTheme } from "./state/theme.ts";

applyTheme(document.documentElement, readTheme(openStorage(window)));
