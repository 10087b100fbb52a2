"""kda_layers and full_attn_layers: counted from 1 or from 0 (K3.md §1)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parity.audit.entry import AuditEntry
from parity.audit.subject import Subject
from reference.checkpoint import LAYERS

ATTENTION = re.compile(rf"^{re.escape(LAYERS)}(\d+)\.self_attn\.(A_log|kv_b_proj\.weight)$")


def audit_layer_lists(subject: Subject) -> Iterator[AuditEntry]:
    """The lists' own range tells, and the names of the tensors: a KDA layer has an A_log, an MLA layer a kv_b_proj."""
    linear, layers = subject.config.text_config.linear_attn_config, subject.config.text_config.num_hidden_layers
    listed = sorted(linear.kda_layers + linear.full_attn_layers)
    evidence = [
        f"{layers} layers; the lists together run from {listed[0]} to {listed[-1]}: layer {layers} would not exist "
        "if they counted from 0, and layer 0 would be of no kind"
    ]
    verdict, status = "counted from 1: the range alone says so", "decided"
    if subject.weight_map is not None:
        kinds = {int(m[1]): m[2] == "A_log" for name in subject.weight_map if (m := ATTENTION.match(name))}
        fits = {start: sum(kinds.get(i) == (i + start in linear.kda_layers) for i in range(layers)) for start in (1, 0)}
        evidence.append(
            f"of {layers} layers, {fits[1]} have the tensors of their kind if counted from 1, {fits[0]} if from 0"
        )
        if fits[1] < layers:
            verdict, status = "against K3.md: the tensors of some layers are not of the listed kind", "contradicted"
        else:
            verdict = "counted from 1: range and tensor names say so; counted from 0 the model would not load"
    yield AuditEntry(
        name="layer-lists",
        question="Do kda_layers and full_attn_layers count from 1 or from 0?",
        readings={"from 1": "entry n is tensor layer n − 1", "from 0": "entry n is tensor layer n"},
        evidence=tuple(evidence),
        verdict=verdict,
        section="§1",
        status=status,
    )
