"""What the laboratory adds to the names of the core; each is imported when used."""

from collections.abc import Mapping
from typing import Any

EXTENSIONS: Mapping[str, Mapping[str, Any]] = {
    "score": {
        "blend": "ompq.lab.more_scores.blend:BLEND",
        "block_loss": "ompq.lab.more_scores.block_loss:BLOCK_LOSS",
        "fisher": "ompq.lab.more_scores.loss_gradients:FISHER",
        "gradient": "ompq.lab.more_scores.loss_gradients:GRADIENT",
        "hessian": "ompq.lab.more_scores.loss_gradients:HESSIAN",
        "orm_shift": "ompq.lab.more_scores.orm_shift:ORM_SHIFT",
        "reconstruction": "ompq.lab.more_scores.block_loss:RECONSTRUCTION",
    },
    "solver": {
        "depth-first": "ompq.lab.solvers:search_depth_first",
        "genetic": "ompq.lab.solvers:GENETIC",
    },
    "weight rule": {
        "dorefa": "ompq.lab.weight_rules.dorefa:DoReFaWeights",
        "fracbits": "ompq.lab.weight_rules.fracbits:FRACBITS",
        "lq-nets": "ompq.lab.weight_rules.lq_nets:LearnedLevels",
        "outliers": "ompq.lab.weight_rules.outliers:OUTLIERS",
    },
    "plan protocol": {
        "brecq": "ompq.lab.protocols:BRECQ_PLAN",
        "hawq-v3": "ompq.lab.protocols:HAWQ_V3_PLAN",
    },
    "quantize protocol": {
        "brecq": "ompq.lab.protocols:BRECQ_QUANTIZING",
        "hawq-v3": "ompq.lab.protocols:HAWQ_V3_QUANTIZING",
    },
    # The paper reconstructs with BRECQ's method.
    "reconstruct protocol": {
        "brecq": "ompq.lab.brecq:BRECQ",
        "paper-ptq": "ompq.lab.brecq:BRECQ",
    },
    "train protocol": {
        "fracbits-pact": "ompq.lab.protocols:FRACBITS_PACT",
        "hawq-v3": "ompq.lab.protocols:HAWQ_V3_TRAINING",
        "lq-nets": "ompq.lab.protocols:LQ_NETS",
        "one-bitwidth": "ompq.lab.protocols:ONE_BITWIDTH",
        "pact": "ompq.lab.protocols:PACT",
        "rvquant": "ompq.lab.protocols:RVQUANT",
    },
    "named bits": {
        "published": "ompq.lab.published_bits:published_bits",
        "zoo": "ompq.lab.zoo:zoo_bits",
    },
    "command": {
        "audit": {
            "module": "ompq.lab.research_commands",
            "panel": "Research",
            "summary": "Measure how well each score chooses bits for a network.",
        },
        "reproduce": {
            "module": "ompq.lab.research_commands",
            "panel": "Research",
            "summary": "Reproduce a table or figure of the OMPQ paper.",
        },
        "zoo": {
            "module": "ompq.lab.research_commands",
            "panel": "Research",
            "summary": "List plans that come with ompq, for well-known networks.",
        },
    },
}
