"""Cross-entropy over a large vocabulary: ``token_loss`` beside whole logits and torch's ``cross_entropy``.

    python benchmarks/vocabulary_loss.py [--vocabulary 128256 --width 256 --tokens 4096] [--rounds 3]

Each side runs one step (loss, gradients of states and head) in a process of its own. Memory is the operating system's
peak resident size beyond what weights and states took before the step. Checks first that both sides find the same loss
and gradients. The goal is a peak of at most 0.35 of the plain step's.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.training.losses.vocabulary import token_loss

GOAL = 0.35


def plain(head: nn.Linear, states_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return the loss from the logits of all positions."""
    return functional.cross_entropy(head(states_ND).float(), targets_N, reduction="sum")


def chunked(head: nn.Linear, states_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return our loss."""
    return token_loss(head, states_ND, targets_N, parameters=tuple(head.parameters()))


SIDES: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {"whole logits": plain, "token_loss": chunked}


def peak() -> float:
    """Return this process's peak resident size in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(arguments: argparse.Namespace) -> None:
    """Run one side; print its memory, its times, and what it found."""
    torch.manual_seed(0)
    head = nn.Linear(arguments.width, arguments.vocabulary, bias=False)
    states = torch.randn(arguments.tokens, arguments.width, requires_grad=True)
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    # Gradients are compared by their products with these.
    probes = torch.randn(arguments.width, 4)
    before, seconds, found = peak(), [], []
    memory = 0.0
    for index in range(arguments.rounds):
        head.zero_grad(set_to_none=True)
        states.grad = None
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            loss = SIDES[arguments.work](head, states, targets)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        if not index:
            memory = peak() - before
            products = [(gradient @ probes).square().sum(dim=0).sqrt() for gradient in (head.weight.grad, states.grad)]
            found = [loss.item(), *torch.cat(products).tolist()]
    print(json.dumps({"memory": memory, "seconds": statistics.median(seconds), "found": found}))


def main() -> None:
    """Run both sides in both precisions and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {arguments.tokens} tokens, ", end="")
    print(f"vocabulary {arguments.vocabulary}, width {arguments.width}")
    for label, flags in (("float32", []), ("bfloat16 autocast", ["--bf16"])):
        print(label)
        results = {}
        for side in SIDES:
            command = [sys.executable, __file__, "--work", side, *sys.argv[1:], *flags]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[side] = json.loads(output.splitlines()[-1])
        ours, theirs = results["token_loss"], results["whole logits"]
        apart = max(abs(a / b - 1) for a, b in zip(ours["found"], theirs["found"], strict=True))
        print(f"  loss and gradients: largest relative difference {apart:.1e}")
        if apart > (1e-2 if flags else 1e-4):
            sys.exit("the two sides do not find the same")
        for side, result in results.items():
            print(f"  {side:14} peak {result['memory']:6.0f} MiB   {result['seconds']:6.2f} s")
        ratio = ours["memory"] / theirs["memory"]
        print(f"  memory {ratio:.3f} (goal {GOAL}), time {ours['seconds'] / theirs['seconds']:.2f} of whole logits")


if __name__ == "__main__":
    main()
