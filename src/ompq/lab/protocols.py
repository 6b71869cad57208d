"""The settings of published work, other than the OMPQ paper's own."""

from dataclasses import replace

from ompq.configs import (
    ENDS,
    QUANTIZE_PROTOCOLS,
    TRAIN_PROTOCOLS,
    PlanConfig,
    TrainConfig,
)

# HAWQ-V3's own limits are halfway between W4A4 and W8A8 for all units.
HAWQ_V3_PLAN = PlanConfig(
    score="hessian", choices=((4, 4), (8, 8)), pinned=ENDS, accounting="paper"
)
# BRECQ's table of block losses and its genetic search.
BRECQ_PLAN = PlanConfig(
    score="block_loss", choices=(2, 3, 4), accounting="paper", method="genetic"
)

# The OMPQ paper quantizes and reconstructs as BRECQ does, and trains as HAWQ-V3 does.
BRECQ_QUANTIZING = QUANTIZE_PROTOCOLS["paper-ptq"]
HAWQ_V3_QUANTIZING = QUANTIZE_PROTOCOLS["paper-qat"]
HAWQ_V3_TRAINING = TRAIN_PROTOCOLS["paper-qat"]

# PACT on ImageNet: SGD from 0.1, 110 epochs, batch 256. The original trains from
# scratch with a step schedule and weight decay on the clipping values; here training
# starts from the float network, with cosine decay and no decay of clipping values.
PACT = TrainConfig(
    epochs=110,
    batch_size=256,
    learning_rate=0.1,
    start="float",
    weights="dorefa",
    activations="clip",
    step_rate=1.0,
    batch_norm="fold-and-train",
    freeze_norm_epoch=110,
)
# FracBits' ResNets: like PACT with 120 epochs. The learning rate of the widths is not
# published.
FRACBITS_PACT = replace(PACT, epochs=120, weights="fracbits", freeze_norm_epoch=120)
# OneBitwidth trains from scratch: one_bitwidth returns random weights. Not all of
# its settings are published; these are PACT's. Norms are never frozen: at the learning
# rate that random weights need, a network whose norms stop normalising unlearns.
ONE_BITWIDTH = replace(PACT, epochs=200, batch_size=128, freeze_norm_epoch=200)
# LQ-Nets on ImageNet: SGD from 0.1, 120 epochs, batch 256; differs as for PACT.
LQ_NETS = replace(
    PACT, epochs=120, weights="lq-nets", activations="step", freeze_norm_epoch=120
)
# RVQuant fine-tunes a float network; its learning rate and epochs are not published.
RVQUANT = replace(
    HAWQ_V3_TRAINING,
    epochs=10,
    learning_rate=1e-3,
    weights="outliers",
    activations="fixed",  # the rule follows them
)
