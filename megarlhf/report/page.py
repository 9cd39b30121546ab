"""Templates -> pages."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from megarlhf.report.samples import averages, record_text


def fill(template: str, **values: Any) -> str:
    """The page that a template of this directory makes of `values`, which are escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "averages": averages,
        "record_text": record_text,
        "sha256": lambda text: b64encode(sha256(text.encode()).digest()).decode(),
    }
    return environment.get_template(template).render(**values)


def listed(sections: dict[str, Any]) -> list[str]:
    """The names of the sections that have something to show."""
    return [name for name, content in sections.items() if content]
