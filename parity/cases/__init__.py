"""What to ask of each small function of the mathematics: one file a module, one record a function and its regimes."""

from parity.cases.activation import CASES as ACTIVATION
from parity.cases.attn_res import CASES as ATTN_RES
from parity.cases.base import Drawn, FunctionCase
from parity.cases.kda import CASES as KDA
from parity.cases.moe import CASES as MOE
from parity.cases.norm import CASES as NORM
from parity.cases.saliency import CASES as SALIENCY
from parity.cases.short_conv import CASES as SHORT_CONV

CASES: tuple[FunctionCase, ...] = (*NORM, *ACTIVATION, *SHORT_CONV, *KDA, *ATTN_RES, *MOE, *SALIENCY)

__all__ = ["CASES", "Drawn", "FunctionCase"]
