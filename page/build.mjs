// Writes the page into the package: one script, one style sheet, and the HTML with the hash of all that they are made of.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "services", "gateway", "page", "static");

// As tests/contract/gateway/test_page_files.py computes it: name and content of every source, in the order of names.
const sources = [...readdirSync(join(here, "src")).map((name) => `src/${name}`), "build.mjs", "package-lock.json", "tsconfig.json"].sort();
const hash = createHash("sha256");
for (const name of sources) {
  hash.update(`${name}\n`);
  hash.update(readFileSync(join(here, name)));
}

mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: join(here, "src", "main.tsx") },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "eof",
  charset: "utf8",
  absWorkingDir: here,
});
const html = readFileSync(join(here, "src", "index.html"), "utf-8");
writeFileSync(join(out, "index.html"), html.replace("SOURCE_HASH", hash.digest("hex")));
copyFileSync(join(here, "src", "icon.svg"), join(out, "icon.svg"));
// What is bundled is passed on, and with it its terms.
const { dependencies } = JSON.parse(readFileSync(join(here, "package.json"), "utf-8"));
const terms = Object.keys(dependencies).map((name) => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf-8").trim()}\n`);
writeFileSync(join(out, "licences.txt"), terms.join("\n----\n\n"));
