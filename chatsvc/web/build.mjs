// Builds the page into dist/: index.html, and assets/ whose names carry their content's hash and may be cached for ever.
//
//   node build.mjs            one build, sizes printed; fails when the script grows over its budget
//   node build.mjs --watch    rebuild on change, with source maps
//   node build.mjs --tests    bundle test/*.test.ts for node's own test runner
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";

const root = path.dirname(fileURLToPath(import.meta.url));
const dist = path.join(root, "dist");
const SCRIPT_BUDGET = 90 * 1024;

const ENTRIES = { app: "src/main.tsx", theme: "src/theme.ts", style: "src/style/main.css", icon: "src/icon.svg" };

const page = {
  absWorkingDir: root,
  entryPoints: ENTRIES,
  outdir: "dist/assets",
  entryNames: "[name]-[hash]",
  assetNames: "[name]-[hash]",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".svg": "copy" },
  legalComments: "linked",
  metafile: true,
  logLevel: "warning",
};

const writeIndex = {
  name: "index",
  setup(build) {
    build.onEnd(async ({ metafile, errors }) => {
      if (errors.length > 0) return;
      let html = await readFile(path.join(root, "src/index.html"), "utf8");
      for (const [name, entry] of Object.entries(ENTRIES)) {
        const built = Object.keys(metafile.outputs).find((file) => metafile.outputs[file].entryPoint === entry);
        html = html.replaceAll(`{{${name}}}`, path.relative("dist", built));
      }
      await writeFile(path.join(dist, "index.html"), html);
    });
  },
};

async function buildPage() {
  await rm(dist, { recursive: true, force: true });
  const { metafile } = await esbuild.build({ ...page, plugins: [writeIndex] });
  let script = 0;
  for (const file of Object.keys(metafile.outputs).sort()) {
    const bytes = await readFile(path.join(root, file));
    const packed = gzipSync(bytes, { level: 9 }).length;
    if (file.endsWith(".js")) script += packed;
    console.log(`${file.padEnd(36)} ${kib(bytes.length)}  gzip ${kib(packed)}`);
  }
  console.log(`scripts together, gzip: ${kib(script)} of ${kib(SCRIPT_BUDGET)}`);
  if (script > SCRIPT_BUDGET) throw new Error("the scripts are larger than their budget");
}

function kib(bytes) {
  return `${(bytes / 1024).toFixed(1)} KiB`.padStart(10);
}

async function watchPage() {
  await mkdir(dist, { recursive: true });
  const context = await esbuild.context({ ...page, minify: false, sourcemap: "linked", entryNames: "[name]", plugins: [writeIndex] });
  await context.watch();
  console.log("watching");
}

async function buildTests() {
  const outdir = path.join(root, "build/tests");
  await rm(outdir, { recursive: true, force: true });
  const names = (await readdir(path.join(root, "test"))).filter((name) => name.endsWith(".test.ts"));
  await esbuild.build({
    absWorkingDir: root,
    entryPoints: names.map((name) => `test/${name}`),
    outdir: "build/tests",
    bundle: true,
    platform: "node",
    format: "esm",
    target: ["node20"],
    sourcemap: "inline",
    logLevel: "warning",
  });
}

const modes = { "--watch": watchPage, "--tests": buildTests };
await (modes[process.argv[2]] ?? buildPage)();
