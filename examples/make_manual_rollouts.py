"""Writes a rollouts file from Python's own manual, as bytes: can the model tell how the manual goes on?

Each group's prompt is a passage of the manual. Branch 0 is what really follows it (reward 1), the others are passages
from elsewhere (reward 0). So the logprob of branch 0 must rise against the others from step to step.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics


def manual_bytes() -> bytes:
    """The manual that comes with this Python, topic after topic in alphabetical order."""
    return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


def make_group(
    manual: bytes, rng: random.Random, *, group_id: str, prompt_length: int, response_length: int, num_branches: int
) -> dict:
    """One line of the file. The wrong branches overlap neither the prompt nor the true continuation."""
    length = prompt_length + response_length
    start = rng.randrange(len(manual) - length + 1)
    end = start + prompt_length
    truth = manual[end : end + response_length]
    branches = [{"tokens": list(truth), "reward": 1.0}]
    while len(branches) < num_branches:
        at = rng.randrange(len(manual) - response_length + 1)
        passage = manual[at : at + response_length]
        apart = at + response_length <= start or at >= start + length
        if apart and all(list(passage) != branch["tokens"] for branch in branches):
            branches.append({"tokens": list(passage), "reward": 0.0})
    return {"group_id": group_id, "prompt_tokens": list(manual[start:end]), "branches": branches}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-length", type=int, default=16384, help="bytes")
    parser.add_argument("--response-length", type=int, default=64, help="bytes")
    parser.add_argument("--branches", type=int, default=8, help="responses of a group")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    manual = manual_bytes()
    # Half of the manual at most is prompt, so that the other passages are easily found.
    most = len(manual) // 2
    if args.prompt_length < 1 or args.response_length < 1 or args.branches < 1 or args.groups < 1:
        parser.error("lengths and counts must be at least 1")
    if args.prompt_length + args.response_length > most:
        parser.error(f"prompt and response must fit into {most} bytes, half of the manual")
    rng = random.Random(args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for i in range(args.groups):
            group = make_group(
                manual,
                rng,
                group_id=f"manual{i}",
                prompt_length=args.prompt_length,
                response_length=args.response_length,
                num_branches=args.branches,
            )
            file.write(json.dumps(group) + "\n")
    truth = bytes(group["branches"][0]["tokens"]).decode("utf-8", errors="replace")
    print(
        f"{args.out}: {args.groups} group(s) of {args.prompt_length} prompt bytes and {args.branches} x "
        f"{args.response_length} response bytes from {len(manual)} bytes of Python's manual; it goes on with {truth!r}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
