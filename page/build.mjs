// Bundles each page into one HTML file without a reference to anything outside of it: the template that looptim ships.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const OUT = "../src/looptim/reporting/templates";
const hash = (text, form) => createHash("sha256").update(text).digest(form);

// A test compares this with the sources, so that a build that was forgotten is noticed where there is no node.
const sources = readdirSync(".").filter((name) => /\.(ts|css|mjs)$/.test(name)).sort();
const stamp = hash(sources.map((name) => readFileSync(name, "utf8")).join(""), "hex");

async function bundle(file) {
  const done = await build({ entryPoints: [file], bundle: true, minify: true, write: false, target: "es2022" });
  return done.outputFiles[0].text.trim();
}

for (const name of process.argv.slice(2)) {
  const script = await bundle(`${name}.ts`);
  const style = await bundle(`${name}.css`);
  // Nothing but this script and this style may run or load: hostile text stays text, and the page stays offline.
  const policy = `default-src 'none'; script-src 'sha256-${hash(script, "base64")}'; ` +
    `style-src 'sha256-${hash(style, "base64")}'; img-src data:`;
  writeFileSync(`${OUT}/${name}.html`, `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="sources" content="${stamp}">
<title>looptim</title>
<style>${style}</style>
</head>
<body>
<main id="page"><noscript>This page draws its figures with JavaScript, which is switched off.</noscript></main>
<script id="data" type="application/octet-stream">{{data}}</script>
<script>${script}</script>
</body>
</html>
`);
}
