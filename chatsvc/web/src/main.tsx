import { render } from "preact";
import { App } from "./state/app.ts";
import { AppContext } from "./view/context.ts";
import { Page } from "./view/Page.tsx";

const root = document.getElementById("app");
if (!root) throw new Error("index.html has no #app");
const app = new App(window);
app.start();
render(
  <AppContext.Provider value={app}>
    <Page />
  </AppContext.Provider>,
  root,
);
