"""``k3-parity chat``: what conversations must become, for ports in any language."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from parity.cli.common import stderr
from parity.exits import EXIT_AGREE, EXIT_USAGE
from reference.errors import InputError


def chat(
    calls: Annotated[
        Path, typer.Argument(help="JSON: name → call, or a file in the form of fixtures/golden/chat.json.")
    ],
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A folder with tiktoken.model and tokenizer_config.json.")
    ] = None,
) -> None:
    """Print each call's segments, and its token ids where a tokenizer is given, as one JSON document.

    A call that must be refused gets its one-line error instead; then the exit code is 2.
    """
    from reference.chat import encode_conversation
    from reference.config import read_json
    from reference.tokenizer import Tokenizer

    known = Tokenizer.from_folder(tokenizer) if tokenizer else None
    results: dict[str, dict[str, Any]] = {}
    for name, call in named_calls(read_json(calls), calls).items():
        try:
            check_fields(call, encode_conversation)
            segments = encode_conversation(**call)
            results[name] = {"segments": segments}
            if known:
                results[name]["ids"] = known.encode_segments(segments)
        except InputError as error:
            results[name] = {"error": " ".join(str(error).split())}
            stderr.print(f"{name}: {error}", markup=False, highlight=False, soft_wrap=True)
    print(json.dumps({"format": 1, "cases": results}))  # in ASCII: any terminal can take it, a lone surrogate too
    raise typer.Exit(EXIT_USAGE if any("error" in result for result in results.values()) else EXIT_AGREE)


def check_fields(call: dict[str, Any], encode: Callable) -> None:
    """Raise InputError for a field that no call has."""
    known = inspect.signature(encode).parameters
    for field in call:
        if field not in known:
            raise InputError("call", field, f"one of {', '.join(known)}", "an unknown field", "check its spelling")


def named_calls(document: Any, source: Path) -> dict[str, dict[str, Any]]:
    """name → keyword arguments; raises InputError where the document is neither form."""
    if isinstance(document, dict) and isinstance(document.get("cases"), dict):
        document = document["cases"] | document.get("errors", {})
    if not isinstance(document, dict):
        raise InputError(source, "content", "an object of name → call", type(document).__name__, "see golden/chat.json")
    calls = {}
    for name, call in document.items():
        call = call.get("call", call) if isinstance(call, dict) else call
        if not isinstance(call, dict) or "messages" not in call:
            raise InputError(source, name, "a call with messages", type(call).__name__, "see golden/chat.json")
        calls[name] = call
    return calls
