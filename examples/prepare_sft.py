"""Convert public data sets to JSONL for `megarlhf sft`.

python examples/prepare_sft.py sst2 train.tsv sst2.jsonl      # lines of sentence<TAB>label -> {"text"}
python examples/prepare_sft.py gsm8k train.jsonl gsm8k.jsonl  # {"question", "answer"} -> {"prompt", "response"}
"""

import argparse
import json
from pathlib import Path


def sst2(line: str) -> dict[str, str]:
    return {"text": line.partition("\t")[0]}


def gsm8k(line: str) -> dict[str, str]:
    row = json.loads(line)
    return {"prompt": f"Question: {row['question']}\nAnswer:", "response": f" {row['answer']}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sst2", "gsm8k"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    convert = {"sst2": sst2, "gsm8k": gsm8k}[args.kind]
    with args.source.open(encoding="utf-8") as source, args.target.open("w", encoding="utf-8") as target:
        for line in source:
            target.write(json.dumps(convert(line.rstrip("\n")), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
