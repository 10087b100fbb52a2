"""Any program as a port under test: ``command:./engine {case} {out}``. The protocol is files only: docs/engine.md.

Every question is a folder with ``question.json`` and, where there are arrays, ``inputs.safetensors``; the program
writes its answer to the file ``{out}``. Exit status 0: answered; 64: it cannot do that; anything else: it crashed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parity.arrays import cast
from parity.protocol import RUNS, Capabilities, ModuleCall, Step, Taps, Unsupported
from parity.trace import load_arrays, save_trace
from reference.errors import InputError

CANNOT = 64
SECONDS = 600
FIELDS = {"dtypes": [], "runs": [], "kinds": [], "functions": [], "taps": None, "picture": False, "chat": False}
IMPOSED = "imposed."


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_arrays(path: Path) -> Taps:
    return load_arrays(path)[0]


class CommandPort:
    """``command`` holds ``{case}`` and ``{out}``; it is run without a shell, once for every question."""

    def __init__(self, command: str) -> None:
        self.name, self.words = f"command:{command}", shlex.split(command)
        if not all(any(hole in word for word in self.words) for hole in ("{case}", "{out}")):
            mend = "say where the two paths go, e.g. command:'./engine {case} {out}'"
            raise InputError("--port", self.name, "a command with {case} and {out}", command, mend)

    def ask(
        self,
        read: Callable[[Path], Any],
        question: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray | None] | None = None,
    ) -> Any:
        """What ``read`` makes of the answer's file."""
        with tempfile.TemporaryDirectory(prefix="k3-parity-") as scratch:
            folder = Path(scratch)
            given = {name: np.asarray(value) for name, value in (arrays or {}).items() if value is not None}
            (folder / "question.json").write_text(json.dumps({"format": 1, **question}))
            if given:
                save_trace(folder / "inputs.safetensors", given, {})
            self._run(folder, folder / "answer")
            return read(folder / "answer")

    def _run(self, folder: Path, out: Path) -> None:
        words = [word.replace("{case}", str(folder)).replace("{out}", str(out)) for word in self.words]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        except OSError as error:
            raise InputError("--port", self.name, "a program that can be started", error, "check the command") from None
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        if done.returncode == CANNOT:
            raise Unsupported(f"the program cannot do this: {said[0]}")
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {said[0]}")
        if not out.is_file():
            raise RuntimeError("exit status 0, but it wrote no answer")

    @cached_property
    def able(self) -> dict[str, Any]:
        """What the program says it can do; a field that it leaves out is something that it cannot."""
        try:
            answer = self.ask(read_json, {"question": "capabilities"})
        except (Unsupported, RuntimeError, ValueError) as error:
            mend = "answer the question 'capabilities' with a JSON object (docs/engine.md)"
            raise InputError("--port", self.name, "what the program can do", error, mend) from None
        if not isinstance(answer, dict) or (unknown := sorted(set(answer) - set(FIELDS))):
            found = unknown[0] if isinstance(answer, dict) else type(answer).__name__
            raise InputError("--port", self.name, f"fields of {', '.join(FIELDS)}", found, "see docs/engine.md")
        return FIELDS | answer

    def capabilities(self) -> Capabilities:
        able = self.able
        return Capabilities(
            dtypes=tuple(able["dtypes"]),
            runs=tuple(run for run in RUNS if run in able["runs"]),
            kinds=tuple(able["kinds"]),
            functions=frozenset(able["functions"]),
            taps=None if able["taps"] is None else frozenset(able["taps"]),
            imposes_routing=True,
        )

    def versions(self) -> dict[str, str]:
        return {"command": shlex.join(self.words)}

    def tensor_names(self, config: Mapping[str, Any], expert_format: str) -> set[str]:
        raise Unsupported("a program is not asked which tensors it reads")

    def open(self, checkpoint: Path, dtype: str) -> CommandSession:
        return CommandSession(self, checkpoint, dtype)

    def call(
        self, function: str, arrays: Mapping[str, np.ndarray | None], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        from parity.cases import CASES

        results = next(case.results for case in CASES if case.function == function)
        question = {"question": "function", "function": function, "settings": settings, "results": results}
        answer = self.ask(read_arrays, question, arrays)
        if missing := [name for name in results if name not in answer]:
            raise RuntimeError(f"the answer to {function} has no {', '.join(missing)}")
        return tuple(answer[name] for name in results)

    def picture(self, file: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
        if not self.able["picture"]:
            raise Unsupported("this program has no image processor")
        question = {"question": "picture", "settings": dict(settings)}
        answer = self.ask(read_arrays, question, {"file": np.frombuffer(file, np.uint8)})
        prompt = bytes(answer["prompt"].astype(np.uint8)).decode()
        return {"pixel_values": answer["pixel_values"], "tokens": int(answer["tokens"].item()), "prompt": prompt}

    def chat(self, call: Mapping[str, Any]) -> list[tuple[str, bool]]:
        if not self.able["chat"]:
            raise Unsupported("this program has no chat encoding")
        return [tuple(segment) for segment in self.ask(read_json, {"question": "chat", "call": call})]


class CommandSession:
    """One checkpoint in one dtype, by its path: the program opens it anew for every question."""

    def __init__(self, port: CommandPort, checkpoint: Path, dtype: str) -> None:
        self.port, self.dtype = port, dtype
        self.about = {"checkpoint": str(checkpoint.resolve()), "dtype": dtype}

    def _ask(self, question: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]) -> Taps:
        given = {name: None if value is None else cast(value, self.dtype) for name, value in arrays.items()}
        return self.port.ask(read_arrays, {**self.about, **question}, given)

    def module(self, call: ModuleCall) -> Taps:
        if call.kind not in self.port.able["kinds"]:
            raise Unsupported(f"this program has no {call.kind}")
        imposed = {} if call.imposed is None else {"imposed": call.imposed}
        question = {"question": "module", "kind": call.kind, "layer": call.layer}
        return self._ask(question, {**call.inputs, **imposed})

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        if not self.port.able["runs"]:
            raise Unsupported("this program has no whole pass")
        arrays: dict[str, np.ndarray | None] = {}
        for number, step in enumerate(steps):
            parts = {"input_ids": step.input_ids, "inputs_embeds": step.inputs_embeds, "mask": step.mask}
            parts |= {IMPOSED + name: array for name, array in (imposed[number] if imposed else {}).items()}
            arrays |= {f"{number}/{name}": array for name, array in parts.items()}
        answer = self._ask({"question": "run", "steps": len(steps)}, arrays)
        return [
            {name.removeprefix(f"{number}/"): array for name, array in answer.items() if name.startswith(f"{number}/")}
            for number in range(len(steps))
        ]

    def vision(self, pixel_values: np.ndarray, grid_thws: np.ndarray) -> Taps:
        if "vision" not in self.port.able["runs"]:
            raise Unsupported("this program has no vision tower")
        return self._ask({"question": "vision"}, {"pixel_values": pixel_values, "grid_thws": grid_thws})

    def multimodal(self, input_ids, attention_mask, pixel_values, grid_thws, imposed=None) -> Taps:
        if "mm" not in self.port.able["runs"]:
            raise Unsupported("this program takes no pictures")
        arrays = {"input_ids": input_ids, "attention_mask": attention_mask}
        arrays |= {"pixel_values": pixel_values, "grid_thws": grid_thws}
        arrays |= {IMPOSED + name: array for name, array in (imposed or {}).items()}
        return self._ask({"question": "multimodal"}, arrays)

    def use_form(self, module: str, form: str) -> None:
        raise Unsupported(f"form {form!r} of {module}")
