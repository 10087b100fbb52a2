"""A complete engine for docs/engine.md: SiTU-GLU and KDA's log-decay, by numpy and safetensors alone."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def situ_glu(gate, up, beta, linear_beta):
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    up = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * up


def log_decay(decay_logit, A_log, dt_bias, lower_bound):
    heads, width = decay_logit.shape[-2:]
    z = decay_logit.astype(np.float32) + dt_bias.reshape(heads, width)
    rate = np.exp(A_log[:heads, None])
    return -rate * np.logaddexp(0, z) if lower_bound is None else lower_bound * sigmoid(rate * z)


FUNCTIONS = {"activation.situ_glu": situ_glu, "kda.log_decay": log_decay}
case, out = Path(sys.argv[1]), Path(sys.argv[2])
question = json.loads((case / "question.json").read_text())
if question["question"] == "capabilities":
    out.write_text(json.dumps({"dtypes": ["float32"], "functions": list(FUNCTIONS)}))
elif question["question"] == "function":
    answer = FUNCTIONS[question["function"]](**load_file(case / "inputs.safetensors"), **question["settings"])
    save_file({question["results"][0]: np.ascontiguousarray(answer)}, out)
else:
    print("functions only")
    sys.exit(64)
