"""What a configuration may not say, beyond the type of each field, and how its errors are told (K3.md §1, §16)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reference.errors import InputError

if TYPE_CHECKING:
    from reference.config import TextConfig


def contradiction(field: str, expected: str, found: object) -> ValueError:
    """Two fields that cannot both hold; the parts are taken out again where the error becomes an InputError."""
    return ValueError(f"{field}|{expected}|{found}")


def text_contradictions(text: TextConfig) -> Iterator[tuple[str, str, object]]:
    """Yield (field, expected, found) for every pair of fields that cannot both hold."""
    linear, layers = text.linear_attn_config, set(range(1, text.num_hidden_layers + 1))
    kda, full = linear.kda_layers, linear.full_attn_layers
    listed = sorted(kda + full)
    if listed and (listed[0] < 1 or listed[-1] > text.num_hidden_layers):
        outside = [i for i in listed if i not in layers]
        field = "kda_layers" if set(outside) & set(kda) else "full_attn_layers"
        yield f"linear_attn_config.{field}", f"1-based layer numbers 1..{text.num_hidden_layers}", outside
    if len(set(listed)) != len(listed):
        yield (
            "linear_attn_config.full_attn_layers",
            "each layer listed once",
            [i for i in set(listed) if listed.count(i) > 1],
        )
    if set(listed) != layers:
        yield (
            "linear_attn_config.kda_layers",
            "every layer in one of the two lists",
            f"missing {sorted(layers - set(listed))}",
        )
    if text.num_key_value_heads != text.num_attention_heads:
        yield "num_key_value_heads", f"num_attention_heads ({text.num_attention_heads})", text.num_key_value_heads
    if text.hidden_act == "situ" and text.activation_situ_beta is None:
        yield "activation_situ_beta", 'a positive number, since hidden_act is "situ"', None
    if text.num_experts_per_token > text.num_experts:
        yield "num_experts_per_token", f"at most num_experts ({text.num_experts})", text.num_experts_per_token
    groups, chosen = text.expert_groups, text.chosen_groups
    if text.num_experts % groups:
        yield "num_expert_group", f"a divisor of num_experts ({text.num_experts})", groups
    if chosen > groups:
        yield "topk_group", f"at most num_expert_group ({groups})", chosen
    if chosen < groups and text.num_experts // groups < 2:
        yield (
            "num_expert_group",
            "at least two experts per group, a group's score being the sum of its two best",
            groups,
        )
    if text.num_experts_per_token > text.num_experts // groups * chosen:
        yield (
            "num_experts_per_token",
            f"at most the {text.num_experts // groups * chosen} experts of {chosen} groups",
            text.num_experts_per_token,
        )
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, field) >= text.vocab_size:
            yield field, f"an id below vocab_size ({text.vocab_size})", getattr(text, field)


def as_input_error(error: ValidationError, data: dict, source: object) -> InputError:
    """The first problem of a validation, in one line; problems of absence come first, since they cause others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "missing")
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "missing":
        parent = _at(data, path[:-1])
        return InputError(source, ".".join(path), "the field", "nothing", _absence_mend(path[-1], parent))
    if first["type"] == "value_error":
        field, expected, found = str(first["ctx"]["error"]).split("|", 2)
        return InputError(
            source, ".".join([*path, field]), expected, found, "correct the field or the one it contradicts"
        )
    expected = first["msg"].removeprefix("Input should be ")
    return InputError(source, ".".join(path), expected, repr(first["input"]), "give the released field's value")


def _at(data: Any, path: list[str]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _absence_mend(field: str, parent: Any) -> str:
    near = difflib.get_close_matches(field, parent if isinstance(parent, dict) else (), n=1, cutoff=0.85)
    if near:
        return f"the file has {near[0]!r}; rename it to {field!r} if that is what it means"
    return "add it; there is no default"
