"""A port that keeps what it was asked and what it answered, so that the same questions can be put to another.

Diagnosis asks the reference again, with a known fault in it, and looks whether the answers are the port's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parity.protocol import Port, Unsupported
from parity.tracing import trace_port

TRACE = "trace"
"""A whole trace as one question: checkpoint, inputs, dtype and imposed routing are its arguments."""
STATELESS = ("call", "picture", "chat", "tokenize", "tensor_names")
"""What a port is asked directly; everything else is asked of a session."""


class Asked(NamedTuple):
    """One question: ``session`` is (checkpoint, dtype), or None where no model is needed; ``answer`` may be what was
    raised."""

    session: tuple[Path, str] | None
    method: str
    arguments: tuple
    answer: Any


def answer_of(question: Callable[[], Any]) -> Any:
    """The answer, or the exception that stands for it."""
    try:
        return question()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a port may fail in any way, a panic of Rust is no Exception; that is its answer
        return error


class Recording:
    """``port`` as it is, with ``asked`` growing by every question."""

    def __init__(self, port: Port) -> None:
        self.inner, self.name, self.asked = port, port.name, []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if name in STATELESS and attribute is not None:
            return self._kept(None, name, attribute)
        return attribute

    def open(self, checkpoint: Path, dtype: str) -> RecordedSession:
        session = answer_of(lambda: self.inner.open(checkpoint, dtype))
        if isinstance(session, BaseException):
            self.asked.append(Asked((checkpoint, dtype), "open", (), session))
            raise session
        return RecordedSession(self, session, (checkpoint, dtype))

    def _kept(self, session: tuple[Path, str] | None, method: str, function: Callable) -> Callable:
        def kept(*arguments: Any) -> Any:
            answer = answer_of(lambda: function(*arguments))
            if not isinstance(answer, Unsupported):
                self.asked.append(Asked(session, method, arguments, answer))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return kept


class RecordedSession:
    def __init__(self, recording: Recording, session: Any, key: tuple[Path, str]) -> None:
        self._recording, self._session, self._key = recording, session, key

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._session, name)
        return self._recording._kept(self._key, name, attribute) if callable(attribute) else attribute


def asked_again(port: Port, questions: Sequence[Asked]) -> Iterator[Any]:
    """The answers of another port to the same questions, in order; exceptions stand for themselves."""
    sessions: dict[tuple[Path, str], Any] = {}
    for question in questions:
        if question.method == TRACE:
            yield answer_of(lambda question=question: trace_port(port, *question.arguments)[0])
            continue
        if question.session is None:
            target: Any = port
        else:
            if question.session not in sessions:
                sessions[question.session] = answer_of(lambda key=question.session: port.open(*key))
            target = sessions[question.session]
        if isinstance(target, BaseException) or question.method == "open":
            yield target
            continue
        yield answer_of(lambda target=target, question=question: getattr(target, question.method)(*question.arguments))
