// Bundles each page into one HTML file without a reference to anything outside of it: the template that looptim ships.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const OUT = "../src/looptim/reporting/templates";
const hash = (text, form) => createHash("sha256").update(text).digest(form);

// A test compares this with the sources, so that a build that was forgotten is noticed where there is no node.
const sources = readdirSync(".").filter((name) => /\.(ts|css|mjs)$/.test(name)).sort();
const stamp = hash(sources.map((name) => readFileSync(name, "utf8")).join(""), "hex");

// The same drawing as `mark` in dom.ts, for the browser's tab.
const icon = encodeURIComponent('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path fill="none" stroke="#0a63b0" ' +
  'stroke-width="2.2" stroke-linecap="round" d="M22 12A10 10 0 0 1 2 12A8 8 0 0 1 18 12A6 6 0 0 1 6 12A4 4 0 0 1 14 12"/>' +
  '<circle cx="11.4" cy="12.6" r="2" fill="#c14b00"/></svg>');

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
<link rel="icon" href="data:image/svg+xml,${icon}">
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
