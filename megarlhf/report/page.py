"""The frame of a report: one HTML file with its style and its script, and no address of anything else."""

from __future__ import annotations

import base64
import hashlib
from html import escape


def page(title: str, header: str, sections: dict[str, str]) -> str:
    """`header` and the bodies of `sections` are HTML, `title` is text."""
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections)
    main = "".join(f'<section id="{name.lower()}"><h2>{name}</h2>{body}</section>' for name, body in sections.items())
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # Responses are untrusted and escaped; should one slip through, this policy still lets no script run but ours.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>{escape(title)}: megarlhf</title><style>{STYLE}</style></head>
<body><header>{header}</header><nav>{links}</nav><main>{main}</main><div id="tip" hidden></div>
<script>{SCRIPT}</script></body></html>
"""


STYLE = """
:root { --page:#f5f6f8; --card:#fff; --ink:#1b1f24; --soft:#626b77; --rule:#e3e6ea; --good:#117a57; --bad:#c0362c;
  --c0:#2a6fdb; --c1:#dd6a1c; --c2:#12957b; --c3:#8250df; --c4:#c23a78; --c5:#8a7300; --mark:#fff3cf }
@media (prefers-color-scheme:dark) { :root { --page:#13161a; --card:#1b1f25; --ink:#e4e7eb; --soft:#9aa3af;
  --rule:#2d333b; --good:#4cc398; --bad:#f0776c; --c0:#6ba4f8; --c1:#f0924f; --c2:#3fc4a6; --c3:#b08cf5; --c4:#e77aa8;
  --c5:#cdb443; --mark:#393320 } }
.c0 { --c:var(--c0) } .c1 { --c:var(--c1) } .c2 { --c:var(--c2) } .c3 { --c:var(--c3) } .c4 { --c:var(--c4) }
.c5 { --c:var(--c5) }
* { box-sizing:border-box }
body { margin:0 0 60px; background:var(--page); color:var(--ink); font:15px/1.5 system-ui,sans-serif;
  font-variant-numeric:tabular-nums }
header, main { max-width:1500px; margin:auto; padding:0 24px }
h1 { margin:24px 0 10px; font-size:26px; line-height:1.2 }
h2 { font-size:19px; margin:30px 0 12px }
h3 { font-size:14px; margin:0; font-weight:600 }
small, dt, th, summary { color:var(--soft); font-size:13px; font-weight:400 }
dl { display:flex; flex-wrap:wrap; gap:8px 32px; margin:0 }
dd { margin:0; overflow-wrap:anywhere }
nav { position:sticky; top:0; z-index:1; display:flex; flex-wrap:wrap; gap:4px 22px; margin-top:20px;
  padding:8px max(24px, calc(50vw - 726px)); background:var(--page); border-bottom:1px solid var(--rule) }
a { color:var(--ink); text-decoration:none }
a:hover { text-decoration:underline }
section { scroll-margin-top:46px }
figure, .tile, table, details { background:var(--card); border:1px solid var(--rule); border-radius:8px; margin:0 }
.tiles { display:flex; flex-wrap:wrap; gap:14px; margin-top:18px }
.tile { padding:12px 20px; min-width:190px }
.tile p { margin:2px 0 0; font-size:21px }
.tile span { color:var(--soft) }
.good { color:var(--good) }
.bad { color:var(--bad) }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr)); gap:14px }
figure { padding:11px 13px 5px }
figcaption { display:flex; justify-content:space-between; gap:10px; align-items:baseline }
figcaption small { text-align:right }
.legend { margin:1px 0 4px; font-size:13px; display:flex; flex-wrap:wrap; gap:0 14px }
.key::before { content:""; display:inline-block; width:12px; height:3px; margin-right:6px; border-radius:2px;
  background:var(--c); vertical-align:middle }
.key.level { color:var(--soft) }
.key.level::before { background:var(--soft); height:1px }
svg { width:100%; display:block }
svg text { font-size:10.5px; fill:var(--soft) }
path { fill:none; stroke:var(--c); stroke-linejoin:round; stroke-linecap:round }
.curve { stroke-width:1.8 }
.noisy { stroke-opacity:.4 }
.smooth { stroke-width:1.3 }
path.bad { stroke:var(--bad); stroke-width:2 }
circle, rect { fill:var(--c) }
.rule { stroke:var(--rule) }
.level { stroke:var(--soft); stroke-dasharray:5 4 }
.cursor { stroke:var(--soft); stroke-width:.7 }
#tip { position:fixed; z-index:2; pointer-events:none; padding:5px 11px; white-space:pre; font-size:13px;
  background:var(--card); border:1px solid var(--rule); border-radius:6px; box-shadow:0 2px 10px #0003 }
table { border-spacing:0; text-align:left }
th, td { padding:6px 14px; border-top:1px solid var(--rule) }
tr:first-child > * { border-top:0 }
td i { display:inline-block; height:9px; margin-right:8px; background:var(--c); border-radius:2px }
.phases { display:flex; flex-wrap:wrap; gap:14px; align-items:flex-start }
.phases figure { flex:1 1 560px; max-width:960px }
.samples { width:100%; table-layout:fixed }
.samples td { vertical-align:top }
.samples p { margin:0; overflow-wrap:anywhere; white-space:pre-wrap }
.samples span { color:var(--soft) }
th small { margin-left:14px }
.audit { width:100% }
.differs td { background:var(--mark) }
details { padding:10px 14px; margin-top:14px }
details table { border:0; margin-top:8px }
summary { cursor:pointer }
pre { margin:8px 0 0; overflow:auto; font-size:13px }
"""

# The numbers under the pointer, at the step nearest to it.
SCRIPT = """
const tip = document.getElementById('tip');
for (const svg of document.querySelectorAll('svg.chart')) {
  const {width, height} = svg.viewBox.baseVal;
  const curves = [...svg.querySelectorAll('path.curve')].map(path => ({
    label: path.dataset.label, steps: path.dataset.x.split(' '), values: path.dataset.y.split(' '),
    places: [...path.getAttribute('d').matchAll(/[ML]([^,]+),/g)].map(match => +match[1]),
  }));
  const cursor = svg.appendChild(document.createElementNS(svg.namespaceURI, 'path'));
  cursor.setAttribute('class', 'cursor');
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    let nearest = {distance: Infinity};
    for (const {places, steps} of curves) places.forEach((place, i) => {
      const distance = Math.abs(place - x);
      if (distance < nearest.distance) nearest = {distance, place, step: steps[i]};
    });
    const lines = curves.map(({label, steps, values}) => [label, values[steps.indexOf(nearest.step)]]);
    const shown = [['step', nearest.step], ...lines.filter(line => line[1])];
    tip.textContent = shown.map(line => line.join('  ')).join('\\n');
    cursor.setAttribute('d', `M${nearest.place},8V${height - 24}`);
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  };
  svg.onpointerleave = () => { tip.hidden = true; cursor.removeAttribute('d'); };
}
"""
