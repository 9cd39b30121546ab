"""Write what is made from the code: docs/configuration.md, the schemas in examples/schema/, and predictions of memory
and time in examples/configs/.

python -m tools.documents
"""

from __future__ import annotations

from pathlib import Path

from megarlhf import cli
from megarlhf.config import describe
from tools import plans

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Configuration

Made from the code by `python -m tools.documents`; do not edit it here.

A program reads one YAML file (`--config`), then changes on the command line: `megarlhf ppo --config run.yaml
training.steps=50 scoring.sources[0].weight=0.5`. `megarlhf ppo --help-config` prints the keys of one program, and
`megarlhf init ppo` a file to start from. Editors with a YAML language server complete and check a file whose first line
is `# yaml-language-server: $schema=SCHEMA`, where SCHEMA is the file that `megarlhf schema ppo` prints
(`examples/schema/ppo.json`). In paths `~` and environment variables such as `$SCRATCH` are expanded.

"none" in the column "default" is YAML's `null`. The default of a section is what differs there from its own defaults.

"""


def documents() -> dict[str, str]:
    """{path in the repository: text} of all of them."""
    made = {f"examples/schema/{name}.json": cli.described("schema", name) for name in cli.PROGRAMS}
    book = describe.handbook({name: cli.find(name).configurations for name in cli.PROGRAMS})
    return made | {"docs/configuration.md": HEAD + book} | plans.comments()


if __name__ == "__main__":
    for name, text in documents().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)
