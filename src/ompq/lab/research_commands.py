"""The commands audit, reproduce and zoo: their help and examples.

As in :mod:`ompq.cli.commands`, the module that does the work is imported when a command
is called, so that help needs neither PyTorch nor NumPy.
"""

from ompq.cli.command_registry import calls
from ompq.cli.console import Console, View
from ompq.cli.option_groups import CacheOptions, PlanOptions, SourceOptions
from ompq.cli.options import BudgetOption
from ompq.lab.research_options import AuditOptions, ReproduceOptions, ZooNetwork


@calls("ompq.lab.audit_command:run_audit")
def audit(
    sources: SourceOptions,
    planning: PlanOptions,
    options: AuditOptions,
    caching: CacheOptions,
    console: Console,
    budget: BudgetOption,
) -> View:
    r"""Measure how well each score chooses bits for a network.

    Examples:
      ompq audit cifar:resnet20 --weights r20.safetensors --data cifar10/ \
        --budget 15% -o audit/
      ompq audit ompq:demo --data digits --budget 3bits --scores orm,weight-noise
      ompq audit torchvision:resnet18 --data train/ --eval-data val/ \
        --limit 1000 --budget 4.0MiB --reconstruct 100 -o audit/
      ompq audit timm:resnet18 --data train/ --budget 4.0MiB --plan published.json

    Three kinds of allocations are quantized and compared with the float network on
    held-out inputs: random ones within the budget, the choice of each score, and known
    ones, which are uniform bits and those of --plan. The correlation that random scores
    reach is shown for comparison.
    """


@calls("ompq.lab.reproduction:run_reproduce")
def reproduce(options: ReproduceOptions, console: Console) -> View:
    r"""Reproduce a table or figure of the OMPQ paper, with the methods it compares.

    Examples:
      ompq reproduce --list
      ompq reproduce table-ptq-mobilenetv2 --data imagenet/ --weights mbv2.pth \
        -o out/
      ompq reproduce table-ptq-resnet18 --data imagenet/ --rows 'ompq-*' -o out/
      ompq reproduce figure-beta-mobilenetv2 --network ompq:demo --data digits \
        --quick

    Writes NAME.json, NAME.md (a table next to the paper's numbers) and the figure as
    SVG, PDF and PNG. Each row is saved as soon as it is measured; the same command
    continues a stopped run. Rows that train take days on ImageNet; select others with
    --rows.
    """


@calls("ompq.lab.zoo:run_zoo")
def zoo(network: ZooNetwork = None) -> View:
    r"""List plans that come with ompq: bits of well-known networks at a few sizes.

    Examples:
      ompq zoo
      ompq zoo mobilenet_v2
      ompq quantize torchvision:resnet18 --data images/ \
        --plan zoo:resnet18-4.0MiB -o out/

    Loss and divergence are those of networks that are only rounded. Where no trained
    weights were at hand, only the shapes of the layers decided: plan anew if you can.
    """
