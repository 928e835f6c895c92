"""Tries grammars out in a process that may be lost.

The library compiles in native code that nothing can interrupt. It bounds most of its work, but not
all: some intersections of patterns take minutes, and a grammar whose rules refer to each other
thousands deep overflows the stack. So each new grammar is compiled and walked into in a child first,
which the kernel ends when it takes too long, too much memory or too much stack.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import llguidance

from tidemill_worker.structured_vocabulary import Vocabulary

STACK = 2 << 20
"""Bytes; a quarter of what the worker's own threads have, which compile what has passed here."""
NUM_STEPS = 8
"""Tokens of a random text; enough to be inside the outermost object."""

CRASHES = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""What a child dies of that a grammar was too much for; not of being killed by somebody."""

WRAPPING = re.compile(r"^at 1\(8\): (failed to compile JSON schema: |invalid regex .* \(in regex\): )")
"""What the library says of a schema or regular expression that we have made a grammar of."""

LIMITS = llguidance.LLParserLimits(
    step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)  # of one mask: some 40 ms and 40 MB at the very most


@dataclass(frozen=True)
class Budget:
    """What one grammar may take in the child."""

    cpu_seconds: float = 1.0
    """Real schemas compile in milliseconds, the largest in tenths of a second."""
    memory: int = 64 << 20
    """Bytes on top of the vocabulary; real grammars take 1 to 5 MB."""

    def limit_this_process(self) -> None:
        """Memory where the kernel tells how much there is now; elsewhere, time alone."""
        import resource

        signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)
        status = Path("/proc/self/status")
        if status.exists():
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            used = int(fields["VmData"].split()[0]) << 10
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (used + self.memory, hard))

    def reason_of_loss(self, returncode: int) -> str:
        """Why a grammar is refused that a child was lost with."""
        if returncode == -signal.SIGPROF:
            return f"it takes more than {self.cpu_seconds:g} s to compile"
        return f"it takes more than {self.memory >> 20} MB to compile, or is nested too deeply"


class GrammarTrial:
    """Compiles grammars in a child process, one at a time; any thread may ask."""

    def __init__(self, vocabulary: Vocabulary, budget: Budget = Budget()) -> None:
        self._vocabulary = vocabulary
        self._budget = budget
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def refusal_of(self, grammar: str) -> str | None:
        """Why `grammar` cannot be used, in one line; `None` if it can.

        Raises:
            RuntimeError: if the child is lost again and again, and not by its own doing.
        """
        with self._lock:
            for _ in range(2):
                try:
                    return self._ask(grammar)
                except (OSError, ValueError):
                    status = 0 if self._child is None else self._child.wait()
                if -status in CRASHES:
                    return self._budget.reason_of_loss(status)
        raise RuntimeError(f"the process that tries grammars out ended with status {status}")

    def close(self) -> None:
        """End the child; the next grammar starts another."""
        with self._lock:
            if self._child is not None:
                _end(self._child)

    def _ask(self, grammar: str) -> str | None:
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        _send(child.stdin, grammar)
        answer: str | None = json.loads(child.stdout.readline())
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                _end(self._child)
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is the worker's to handle
            )
            weakref.finalize(self, _end, self._child)
            assert self._child.stdin is not None
            _send(self._child.stdin, [self._vocabulary.to_plain(), asdict(self._budget)])
        return self._child


def _send(pipe: IO[bytes], message: object) -> None:
    """One line of JSON: whatever a grammar does to the child, it can send back no more than text."""
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was left to be sent to a child that has gone
                pipe.close()


def _first_refusal(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> str | None:
    """What is wrong with a fresh matcher or the first tokens that it allows."""
    if matcher.is_error():
        return one_line(matcher.get_error())
    allowed = _allowed(matcher)
    if matcher.is_error():
        return _reason_of_stop(matcher)
    if matcher.is_stopped() or allowed <= {*vocabulary.end_of_text, len(vocabulary.tokens)}:
        return "only the empty text satisfies it"
    return None


def try_out(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> str | None:
    """Compute the first masks of some text, the same one each time."""
    refusal = _first_refusal(matcher, vocabulary)
    dice = random.Random(0)
    for _ in range(NUM_STEPS):
        if refusal is not None or matcher.is_stopped():
            break
        candidates = sorted(_allowed(matcher).difference(vocabulary.end_of_text))
        if not matcher.is_error() and candidates:
            matcher.consume_token(dice.choice(candidates))
        if matcher.is_error():
            refusal = _reason_of_stop(matcher)
    return refusal


def _allowed(matcher: llguidance.LLMatcher) -> set[int]:
    mask = matcher.compute_bitmask()
    return {8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}


def _reason_of_stop(matcher: llguidance.LLMatcher) -> str:
    error = one_line(matcher.get_error())
    return "no text that this model can write satisfies it" if error.startswith("NoExtension") else error


def one_line(error: str) -> str:
    """The one line of the library's reports that says what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (causes or lines or ["it cannot be compiled"])[0]
    if "oneOf constraints are not supported" in line:
        return "oneOf is supported only where a text cannot satisfy two of its schemas"
    return WRAPPING.sub("", line)


def main() -> None:
    """The child: a vocabulary, then grammars, until the pipe is closed."""
    threading.stack_size(STACK)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    plain_vocabulary, plain_budget = json.loads(requests.readline())
    vocabulary, budget = Vocabulary.of_plain(plain_vocabulary), Budget(**plain_budget)
    tokenizer = vocabulary.for_matching()
    for line in requests:
        budget.limit_this_process()
        answer = _tried_in_a_thread(tokenizer, vocabulary, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(answers, answer)


def _tried_in_a_thread(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary, grammar: str) -> str | None:
    """In one with a small stack, so that what passes here fits the worker's threads."""
    answers: list[str | None] = []

    def compile_and_walk() -> None:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        answers.append(try_out(matcher, vocabulary))

    thread = threading.Thread(target=compile_and_walk)
    thread.start()
    thread.join()
    return answers[0]


if __name__ == "__main__":
    main()
